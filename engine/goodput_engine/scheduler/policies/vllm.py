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
    """Steps hold whole prompts alone while one can start; otherwise all requests decode.

    First come, first served. Blocks are allocated as tokens are computed, with a headroom of one
    in a hundred at admission. If blocks run out, the newest request is evicted and returns to the
    head of the queue. A prompt longer than the token budget, which vLLM rejects, is split.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023, section 4.5; the order of a step as in vLLM 0.2.
    """

    name: ClassVar[Policy] = Policy.VLLM

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """The newest first."""
        return (request.arrival_ns, request.rid)

    def reserved_tokens(self, request: ScheduledRequest) -> int:
        """The whole prompt, and after a preemption the answer so far."""
        return request.total_tokens

    def headroom_blocks(self) -> int:
        """One block in a hundred: vLLM's watermark."""
        return self.view.total_blocks // 100

    def phase(self) -> Phase:
        """Decodes only if no prompt can be computed."""
        return _PROMPTS_FIRST

    def chunk_tokens(self, request: ScheduledRequest, remaining: int, budget_left: int) -> int:
        """The whole prompt or nothing."""
        if request.total_tokens <= self.view.limits.token_budget and remaining > budget_left:
            return 0
        return min(remaining, budget_left)

    def can_fast_forward(self) -> bool:
        """Always: a place or blocks become free only when a request ends."""
        return True
