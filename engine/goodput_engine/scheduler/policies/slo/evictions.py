"""Evictions: which running requests make room, and when a waiting one needs it."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from goodput_engine.scheduler.policies.slo.forecast import NEVER_NS
from goodput_engine.scheduler.policies.slo.memory import copies_ns, headroom_blocks
from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from goodput_engine.scheduler.policies.slo.forecast import Forecast
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["Displacement", "EvictionOrder", "free_tokens", "urgent_ns"]

_URGENT_STEPS: Final = 2
"""A prompt is urgent if it must start within this many steps."""
_LEAST_LOSS: Final = 0.02  # part of the weight that a pause costs without a predicted loss
_LOSS_SCALE: Final = 10**12  # eviction keys are integers, weights divided by tokens times steps


def _freed_after(forecast: Forecast) -> Callable[[int], float]:
    """Return a function: the time until the ends of running requests free so many tokens."""
    ends = forecast.ends()
    freed = [*accumulate(running.own_tokens for *_, running in ends)]

    def freed_ns(tokens: int) -> float:
        at = bisect_left(freed, tokens)
        return ends[at][0] * forecast.pace_ns if at < len(ends) else NEVER_NS

    return freed_ns


def _pause_ns(request: ScheduledRequest, forecast: Forecast) -> float:
    """Return the time for which a decoding request may stay evicted."""
    return forecast.slack_ns(request) - forecast.resume_ns(request)


def free_tokens(view: SchedulerView) -> int:
    """Return the tokens of a prompt that finds room without an eviction."""
    return (view.free_blocks - headroom_blocks(view)) * view.block_size


def urgent_ns(
    request: ScheduledRequest, forecast: Forecast, view: SchedulerView, *, free: int
) -> float:
    """Return the slack from which a waiting prompt must start, or find room by evictions."""
    slack_ns = max(3 * forecast.token_ns, _URGENT_STEPS * forecast.step_ns)
    if request.own_tokens <= free:
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
            freed = (request.own_tokens + left / 2) * left
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
        return not stay_ns or _pause_ns(request, forecast) > stay_ns


class Displacement:
    """The running requests that make room for waiting ones, before a step.

    Args:
        view: the scheduler.
        forecast: the state before the step.
        urgency: returns the sort key of a running request; the highest is evicted first.
    """

    def __init__(
        self,
        view: SchedulerView,
        forecast: Forecast,
        urgency: Callable[[ScheduledRequest], tuple[int, ...]],
    ) -> None:
        self._view = view
        self._forecast = forecast
        self._urgency = urgency

    def victims(self, request: ScheduledRequest) -> list[ScheduledRequest]:
        """Return late requests; for an urgent prompt also those that can pause, then lower levels.

        The first ones are evicted first.
        """
        forecast, favoured = self._forecast, self._forecast.favoured
        if request.rid in forecast.lost or request is favoured:
            return []
        urgent = self.is_urgent(request)
        decode_ns = forecast.tokens_left(request) * forecast.pace_ns
        stay_ns = decode_ns + request.total_tokens * forecast.prompt_ns
        freed_ns = _freed_after(forecast) if urgent else None
        backlog_ns = sum(prompt.share_ns for prompt in forecast.prompts) if urgent else 0.0
        going: list[ScheduledRequest] = []
        losing: list[ScheduledRequest] = []
        for running in self._view.running():
            if running is favoured and (running.is_stuck or running.priority >= request.priority):
                continue
            if running.rid in forecast.lost or (
                freed_ns is not None
                and running.sampled_tokens
                and _pause_ns(running, forecast) - backlog_ns
                > min(stay_ns, freed_ns(request.own_tokens + running.own_tokens))
            ):
                going.append(running)
            elif urgent and running.priority < request.priority:
                losing.append(running)
        going.sort(key=self._urgency, reverse=True)
        losing.sort(key=self._urgency, reverse=True)
        return going + losing

    def is_urgent(self, request: ScheduledRequest) -> bool:
        """Return True if a prompt is in time only if it starts within a few steps."""
        forecast, view = self._forecast, self._view
        if request.rid in forecast.lost:
            return False
        slack_ns = forecast.latest_start_ns(forecast.prompt(request)) - forecast.begins_ns
        return slack_ns < urgent_ns(request, forecast, view, free=free_tokens(view))

    def first(self, waiting: Iterable[ScheduledRequest]) -> ScheduledRequest | None:
        """Return the first urgent prompt for which evictions must make room; None for none."""
        free, view = free_tokens(self._view), self._view
        is_full = view.num_running >= view.limits.max_num_seqs
        for request in waiting:
            missing = request.own_tokens - free
            if (is_full or missing > 0) and self.is_urgent(request):
                found = sum(victim.own_tokens for victim in self.victims(request))
                return request if found >= max(1, missing) else None
        return None

    def ahead(self) -> list[ScheduledRequest]:
        """Return the victims of all urgent prompts, so that their copies do not wait in turn.

        Empty if only one prompt is urgent: its own evictions come when it is at the head.
        """
        view = self._view
        free = free_tokens(view) + view.pending_blocks() * view.block_size
        found: dict[int, ScheduledRequest] = {}
        urgent = 0
        for prompt in self._forecast.prompts:
            request = prompt.request
            if request.state is not RequestState.WAITING:
                continue
            if not self.is_urgent(request):
                break
            urgent += 1
            missing = request.own_tokens - free
            more: list[ScheduledRequest] = []
            for victim in self.victims(request) if missing > 0 else ():
                if missing > 0 and victim.rid not in found and victim.displaceable:
                    more.append(victim)
                    missing -= victim.own_tokens
            if missing <= 0:
                found |= {victim.rid: victim for victim in more}
                free += sum(victim.own_tokens for victim in more) - request.own_tokens
        return list(found.values()) if urgent > 1 else []
