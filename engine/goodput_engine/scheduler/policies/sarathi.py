"""Sarathi-Serve: stall-free batching with chunked prefills."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policy import MIXED, Phase, SchedulingPolicy

if TYPE_CHECKING:
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["SarathiPolicy"]


class SarathiPolicy(SchedulingPolicy):
    """Decodes first, then started prompts, then new ones, all within the token budget.

    A prefill never displaces a decode from a step: prompts share the part of the budget that the
    decodes leave, so a long prompt is computed in chunks. Requests are served first come, first
    served. A request starts when the free blocks suffice for its prompt and, if other requests run,
    for a hundredth of all blocks in addition. If blocks run out, the newest request is evicted and
    returns to the head of the queue.

    `splitfuse`, `sjf`, `priority` and `fastserve` are derived from this policy and override some of
    its hooks.

    Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with
    Sarathi-Serve", OSDI 2024, algorithm 3.
    """

    name: ClassVar[Policy] = Policy.SARATHI
    uses_prefill_budget: ClassVar[bool] = True

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """The newest first."""
        return (request.arrival_ns, request.rid)

    def reserved_tokens(self, request: ScheduledRequest) -> int:
        """The prompt and, after a preemption, the output so far."""
        return request.total_tokens

    def headroom_blocks(self) -> int:
        """A hundredth of all blocks, so that decodes can grow."""
        return self.view.total_blocks // 100

    def phase(self) -> Phase:
        """Decodes, prefills and admissions in one step."""
        return MIXED

    def chunk_tokens(self, request: ScheduledRequest, remaining: int, budget_left: int) -> int:  # noqa: ARG002
        """The rest of the prompt within the budget."""
        return min(remaining, budget_left)

    def can_fast_forward(self) -> bool:
        """True: no hook depends on time or on tokens."""
        return True
