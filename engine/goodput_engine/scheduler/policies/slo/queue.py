"""A queue that is sorted before every step, because time alone can change its order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_engine.scheduler.policies.slo.prompts import is_ensurable
from goodput_engine.scheduler.request_table import FcfsQueue

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from goodput_engine.scheduler.policies.slo.device import LearningStepTime
    from goodput_engine.scheduler.policies.slo.forecast import Forecast
    from goodput_engine.scheduler.policies.slo.prompts import Prompt
    from goodput_engine.scheduler.prediction import LengthPredictor
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["RankedQueue", "with_undecided"]


class RankedQueue(FcfsQueue):
    """The waiting requests, and their order in the next step."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        super().__init__()
        self._order: list[ScheduledRequest] = []

    def rank(self, order: Sequence[ScheduledRequest]) -> None:
        """Set the order of the next step; a request that is missing from it does not start."""
        self._order = list(reversed(order))

    def peek(self, now_ns: int) -> ScheduledRequest | None:  # noqa: ARG002 - ranked for this step
        """Return the first request of the order that still waits."""
        order = self._order
        while order:
            if order[-1].rid in self._waiting:
                return order[-1]
            order.pop()
        return None


def with_undecided(
    forecast: Forecast,
    undecided: Collection[ScheduledRequest],
    model: LearningStepTime,
    predictor: LengthPredictor,
) -> list[Prompt]:
    """Return the prompts to start, in order.

    Undecided requests may start if no other request has targets that can be ensured. Memory does
    not suffice for all of them, so the shortest start first, and most are in time.
    """
    prompts = forecast.prompts
    if not undecided or not model.steps or forecast.ensures_targets:
        return prompts
    started = [forecast.prompt(one) for one in undecided if not is_ensurable(one, model)]
    if not started:
        return prompts
    output_tokens = predictor.output_tokens
    return sorted(
        [*prompts, *started],
        key=lambda p: (p.level, p.request.input_tokens + output_tokens(p.request), *p[1:3]),
    )
