"""Request-level scheduling: the baseline that iteration-level scheduling replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policy import Phase, SchedulingPolicy

if TYPE_CHECKING:
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["RequestPolicy"]


class RequestPolicy(SchedulingPolicy):
    """Requests that wait while the engine is idle start together; none joins until all have ended.

    The engine does not wait for a full batch: it starts as many waiting requests as the batch
    width, the token budget and the blocks allow. The slot of a request that ends early stays empty.
    At its start, a request gets blocks for its longest output, so none is ever evicted.

    Source: Yu et al., "Orca", OSDI 2022, section 3 and figure 3 (the scheduling it argues against).
    """

    name: ClassVar[Policy] = Policy.REQUEST
    joins_running = False

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
        """Admissions only while no request runs."""
        return Phase(admissions=self.view.num_running == 0)

    def chunk_tokens(self, request: ScheduledRequest, remaining: int, budget_left: int) -> int:  # noqa: ARG002
        """The rest of the prompt within the budget."""
        return min(remaining, budget_left)

    def can_fast_forward(self) -> bool:
        """True: no request starts while one runs."""
        return True
