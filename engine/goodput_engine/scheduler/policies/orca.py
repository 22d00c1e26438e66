"""Orca: iteration-level scheduling with whole prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policy import MIXED, Phase, SchedulingPolicy

if TYPE_CHECKING:
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["OrcaPolicy"]


class OrcaPolicy(SchedulingPolicy):
    """A finished request leaves at once and the next one joins; steps mix decodes and prompts.

    First come, first served. A prompt is computed whole, beside the decodes, which wait for it;
    only one longer than the token budget, which the paper does not have, is split. A request gets
    blocks for the longest sequence of the engine when it starts, so no request is ever evicted,
    and fewer run at once than would fit.

    Source: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative
    Models", OSDI 2022, sections 3.1 and 4.2, algorithm 1.
    """

    name: ClassVar[Policy] = Policy.ORCA

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """The newest first, for a batch wider than the token budget."""
        return (request.arrival_ns, request.rid)

    def reserved_tokens(self, request: ScheduledRequest) -> int:  # noqa: ARG002 - the same for all
        """The longest prompt and answer of the engine; the last token is never read."""
        return self.view.max_total_tokens - 1

    def headroom_blocks(self) -> int:
        """Zero: running requests have all blocks that they can need."""
        return 0

    def phase(self) -> Phase:
        """Decodes, prefills and admissions in one step."""
        return MIXED

    def chunk_tokens(self, request: ScheduledRequest, remaining: int, budget_left: int) -> int:
        """The whole prompt or nothing."""
        if request.total_tokens <= self.view.limits.token_budget and remaining > budget_left:
            return 0
        return min(remaining, budget_left)

    def can_fast_forward(self) -> bool:
        """Always: a place becomes free only when a request ends."""
        return True
