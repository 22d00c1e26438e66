"""Request-level scheduling: the baseline that iteration-level scheduling replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policy import Phase, SchedulingPolicy

if TYPE_CHECKING:
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["RequestPolicy"]


class RequestPolicy(SchedulingPolicy):
    """Those who wait when the engine is idle start together; nobody joins until all have ended.

    The batch is never waited for: it is whoever waits in that moment, as many as the batch width,
    the token budget and the blocks allow. A place that falls free early stays empty. Every request
    gets blocks for its longest answer when it starts, so nobody is ever evicted.

    Source: Yu et al., "Orca", OSDI 2022, section 3 and figure 3 (the scheduling it argues against).
    """

    name: ClassVar[Policy] = Policy.REQUEST

    def phase(self, view: SchedulerView) -> Phase:
        """New requests only when nobody runs."""
        return Phase(admissions=view.num_running == 0)

    def reserve_tokens(self, request: ScheduledRequest, view: SchedulerView) -> int:  # noqa: ARG002
        """The prompt and the longest answer, whose last token is never read."""
        return request.input_tokens + request.output_limit - 1

    def headroom_blocks(self, view: SchedulerView) -> int:  # noqa: ARG002
        """None: those who run have all they can need."""
        return 0

    def steady(self, view: SchedulerView) -> bool:  # noqa: ARG002
        """Nobody joins while anybody runs."""
        return True
