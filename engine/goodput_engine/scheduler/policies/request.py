"""Request-level scheduling: the baseline that iteration-level scheduling replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policy import Phase, SchedulingPolicy

if TYPE_CHECKING:
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["RequestPolicy"]


class RequestPolicy(SchedulingPolicy):
    """Requests that wait while the engine is idle start together; none joins until all ended.

    The engine does not wait for a batch to fill: it takes as many waiting requests as the batch
    width, the token budget and the blocks allow. A place that becomes free early stays empty. A
    request gets blocks for its longest answer when it starts, so no request is ever evicted.

    Source: Yu et al., "Orca", OSDI 2022, section 3 and figure 3 (the scheduling it argues against).
    """

    name: ClassVar[Policy] = Policy.REQUEST

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """The newest first, for a batch wider than the token budget."""
        return (request.arrival_ns, request.rid)

    def reserved_tokens(self, request: ScheduledRequest) -> int:
        """The prompt and the longest answer, whose last token is never read."""
        return request.input_tokens + request.output_limit - 1

    def headroom_blocks(self) -> int:
        """Zero: running requests have all blocks that they can need."""
        return 0

    def phase(self) -> Phase:
        """New requests only while none runs."""
        return Phase(admissions=self.view.num_running == 0)

    def chunk_tokens(self, request: ScheduledRequest, remaining: int, budget_left: int) -> int:  # noqa: ARG002
        """The rest of the prompt within the budget."""
        return min(remaining, budget_left)

    def can_fast_forward(self) -> bool:
        """Always: no request joins while one runs."""
        return True
