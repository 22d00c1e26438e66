"""Orca: iteration-level scheduling with unsplit prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policy import MIXED, Phase, SchedulingPolicy

if TYPE_CHECKING:
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["OrcaPolicy"]


class OrcaPolicy(SchedulingPolicy):
    """When a request has ended, the next one starts in the next step; prompts are not split.

    Requests are served first come, first served. A step has decodes and prompts, so decodes take as
    long as the prompts beside them. The paper has no token budget; here a prompt longer than the
    budget is split. At its start, a request gets blocks for its prompt and its longest output
    (`max_tokens`, or else the model's limit). So no request is ever evicted, but fewer requests run
    than the blocks could hold.

    Source: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative
    Models", OSDI 2022, sections 3.1 and 4.2, algorithm 1.
    """

    name: ClassVar[Policy] = Policy.ORCA

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """The newest first. Only a batch wider than the token budget needs the key."""
        return (request.arrival_ns, request.rid)

    def reserved_tokens(self, request: ScheduledRequest) -> int:
        """The prompt and the longest output, whose last token needs no block."""
        return request.input_tokens + request.output_limit - 1

    def headroom_blocks(self) -> int:
        """Zero: a running request already has all its blocks."""
        return 0

    def phase(self) -> Phase:
        """Decodes, prefills and admissions in one step."""
        return MIXED

    def chunk_tokens(self, request: ScheduledRequest, remaining: int, budget_left: int) -> int:
        """The complete prompt or nothing, unless it exceeds the token budget."""
        if request.total_tokens <= self.view.limits.token_budget and remaining > budget_left:
            return 0
        return min(remaining, budget_left)

    def can_fast_forward(self) -> bool:
        """True: a slot becomes free only when a request ends."""
        return True
