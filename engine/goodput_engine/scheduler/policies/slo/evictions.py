"""Evictions: which running requests make room, and when a waiting one needs it."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from goodput_engine.scheduler.policies.slo.forecast import NEVER_NS
from goodput_engine.scheduler.policies.slo.memory import copies_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_engine.scheduler.policies.slo.forecast import Forecast
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["EvictionOrder", "freed_after", "urgent_ns"]

_URGENT_STEPS: Final = 2
"""A prompt is urgent if it must start within this many steps."""
_LEAST_LOSS: Final = 0.02  # part of the weight that a pause costs without a predicted loss
_LOSS_SCALE: Final = 10**12  # eviction keys are integers, weights divided by tokens times steps


def freed_after(forecast: Forecast) -> Callable[[int], float]:
    """Return a function: the time until the ends of running requests free so many tokens."""
    ends = forecast.ends()
    freed = [*accumulate(running.total_tokens for *_, running in ends)]

    def freed_ns(tokens: int) -> float:
        at = bisect_left(freed, tokens)
        return ends[at][0] * forecast.pace_ns if at < len(ends) else NEVER_NS

    return freed_ns


def urgent_ns(
    request: ScheduledRequest, forecast: Forecast, view: SchedulerView, *, free_tokens: int
) -> float:
    """Return the slack from which a waiting prompt must start, or find room by evictions."""
    slack_ns = max(3 * forecast.token_ns, _URGENT_STEPS * forecast.step_ns)
    if request.total_tokens <= free_tokens:
        return slack_ns
    return slack_ns + copies_ns(request, forecast, view, step_ns=forecast.step_ns)


class EvictionOrder:
    """The order in which running requests that can meet their targets are evicted in a step.

    Those come first that lose nothing even if they pause until all less important ones have ended.
    Then the least important come first, and of them those that lose the least weight.

    Args:
        view: the scheduler.
        forecast: the state before the step.
    """

    def __init__(self, view: SchedulerView, forecast: Forecast) -> None:
        self._view = view
        self._forecast = forecast
        self._stays_ns: dict[int, float] = {}
        """By priority: the longest time for which less important requests will run."""

    def key(self, request: ScheduledRequest) -> tuple[int, int, int]:
        """Return a sort key; the highest is evicted first."""
        forecast = self._forecast
        lost = self.loss(request)
        # If no target can be ensured, the loss is divided by the memory that becomes free.
        if not forecast.ensures_targets:
            left = forecast.tokens_left(request)
            freed = (request.total_tokens + left / 2) * left
            lost = (lost + _LEAST_LOSS * request.weight) / freed
        lost = int(lost * _LOSS_SCALE)
        if not lost and self._can_wait_for_others(request):
            return 1, 0, 0
        return 0, -request.priority, -lost

    def loss(self, request: ScheduledRequest) -> float:
        """Return the weight that is expected to be lost if a running request is evicted now."""
        forecast, e2e_ns = self._forecast, request.targets.e2e_ns
        pause_ns, kept = forecast.resume_ns(request), 1.0
        can_pause = forecast.paced_ns(request) >= pause_ns
        after = float(can_pause)
        if e2e_ns is not None:
            left_ns = request.arrival_ns + e2e_ns - forecast.begins_ns
            kept = self._chance(request, left_ns)
            after = self._chance(request, left_ns - pause_ns) if can_pause else 0.0
        return request.weight * (kept - after)

    def _chance(self, request: ScheduledRequest, left_ns: float) -> float:
        """Return the chance that a running request ends within a time."""
        tokens = max(0, int(left_ns / self._forecast.token_ns))
        return self._forecast.chance_within(request, request.sampled_tokens + tokens)

    def _can_wait_for_others(self, request: ScheduledRequest) -> bool:
        """Return True if a request can pause until all less important ones have ended."""
        forecast, priority = self._forecast, request.priority
        if priority not in self._stays_ns:
            tokens = [
                forecast.tokens_left(other)
                for other in self._view.running()
                if other.priority < priority and other.rid not in forecast.lost
            ]
            self._stays_ns[priority] = max(tokens, default=0) * forecast.pace_ns
        stay_ns = self._stays_ns[priority]
        return not stay_ns or forecast.slack_ns(request) - forecast.resume_ns(request) > stay_ns
