"""Chances to meet end-to-end targets that no admission can ensure, corrected by outcomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from goodput_engine.scheduler.policies.slo.forecast import Forecast
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["Chances"]

_RECENT: Final = 100
"""Number of recent requests of a class by which its chances are corrected."""
_FIRST: Final = 1
"""Number of requests before them that are taken to have met the prediction. With more, classes of
which few requests end keep chances that are too high."""
_MAX_CLASSES: Final = 64


class Chances:
    """The chances of requests whose end-to-end targets cannot be ensured.

    The distribution of lengths alone gives too high a chance where requests wait or are evicted
    after their admission. So it is multiplied by the recent ratio of met to predicted targets of
    the class.
    """

    def __init__(self) -> None:
        self._classes: dict[str, tuple[float, float]] = {}
        """By class: how many recent requests met the target, and the sum of their chances."""

    def of(self, request: ScheduledRequest, forecast: Forecast) -> float:
        """Return the chance that a request meets its target, if it starts now."""
        chance = _predicted(request, forecast)
        if forecast.ensures(request):
            return chance
        met, predicted = self._classes.get(request.slo_class, (0.0, 0.0))
        return min(1.0, chance * (met + _FIRST) / (predicted + _FIRST))

    def note(self, request: ScheduledRequest, forecast: Forecast) -> None:
        """Keep the uncorrected chance of a request, to be compared with the outcome."""
        request.chance = None if forecast.ensures(request) else _predicted(request, forecast)

    def learn(self, request: ScheduledRequest, *, kept: bool) -> None:
        """Learn if a request met its target; only once for each request."""
        name, chance = request.slo_class, request.chance
        if chance is None or (name not in self._classes and len(self._classes) >= _MAX_CLASSES):
            return
        met, predicted = self._classes.get(name, (0.0, 0.0))
        fade = 1 - 1 / _RECENT
        self._classes[name] = fade * met + kept, fade * predicted + chance
        request.chance = None


def _predicted(request: ScheduledRequest, forecast: Forecast) -> float:
    """Return the chance by the distribution of lengths that a request meets its target."""
    tokens = forecast.tokens_in_time(request)
    return 1.0 if tokens is None else forecast.chance_within(request, tokens)
