"""vLLM as in its paper: prompts first, and recomputation when blocks run out."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policy import Phase, SchedulingPolicy

if TYPE_CHECKING:
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["VllmPolicy"]

_PROMPTS_FIRST: Final = Phase(prompts_alone=True)


class VllmPolicy(SchedulingPolicy):
    """While a prompt can start, a step holds only unsplit prompts; otherwise all requests decode.

    Requests are served first come, first served. Blocks are allocated as tokens are computed. While
    requests run, an admission leaves a hundredth of all blocks free. If blocks run out, the newest
    request is evicted and returns to the head of the queue. vLLM rejects a prompt longer than the
    token budget; here it is split.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023, section 4.5; the order of a step as in vLLM 0.2.
    """

    name: ClassVar[Policy] = Policy.VLLM

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """The newest first."""
        return (request.arrival_ns, request.rid)

    def reserved_tokens(self, request: ScheduledRequest) -> int:
        """The prompt and, after a preemption, the output so far."""
        return request.total_tokens

    def headroom_blocks(self) -> int:
        """A hundredth of all blocks: vLLM's watermark."""
        return self.view.total_blocks // 100

    def phase(self) -> Phase:
        """Decodes only if the step has no prompt tokens."""
        return _PROMPTS_FIRST

    def chunk_tokens(self, request: ScheduledRequest, remaining: int, budget_left: int) -> int:
        """The complete prompt or nothing, unless it exceeds the token budget."""
        if request.total_tokens <= self.view.limits.token_budget and remaining > budget_left:
            return 0
        return min(remaining, budget_left)

    def can_fast_forward(self) -> bool:
        """True: a slot or blocks become free only when a request ends."""
        return True
