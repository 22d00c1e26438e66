"""Orca: iteration-level scheduling with whole prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policy import SchedulingPolicy

if TYPE_CHECKING:
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["OrcaPolicy"]


class OrcaPolicy(SchedulingPolicy):
    """Whoever ends leaves at once and the next one joins; each step mixes decodes and prompts.

    First come, first served. A prompt is computed whole, beside the decodes, which wait for it;
    only one longer than the token budget, which the paper does not have, is split. Every request
    gets blocks for the longest sequence the engine allows when it starts, so nobody is ever
    evicted and fewer run at once than fit.

    Source: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative
    Models", OSDI 2022, sections 3.1 and 4.2, algorithm 1.
    """

    name: ClassVar[Policy] = Policy.ORCA

    def reserve_tokens(self, request: ScheduledRequest, view: SchedulerView) -> int:  # noqa: ARG002
        """The longest prompt and answer that may be asked for; the last token is never read."""
        return view.max_total_tokens - 1

    def headroom_blocks(self, view: SchedulerView) -> int:  # noqa: ARG002
        """None: those who run have all they can need."""
        return 0

    def chunk_tokens(
        self, request: ScheduledRequest, remaining: int, budget_left: int, view: SchedulerView
    ) -> int:
        """The whole prompt, or nothing yet."""
        if request.total_tokens <= view.limits.token_budget and remaining > budget_left:
            return 0
        return min(remaining, budget_left)

    def steady(self, view: SchedulerView) -> bool:  # noqa: ARG002
        """Who waits starts when a place falls free, and none does while all decode."""
        return True
