"""How promises fared over the last minutes: what the condition SLOAttained and the columns say."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from goodput_core.contract import ROLE_ROUTER
from goodput_core.control import Signal
from goodput_core.control.slo_window import LEAST_REQUESTS, WINDOW_NS, wilson_upper
from goodput_core.slo.targets import format_objective
from goodput_core.spec.status import ClassStatus, Truth
from goodput_core.units import NS_PER_S, format_number
from goodput_operator.reconcile.snapshot import Tallied

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goodput_core.slo.targets import SLOClass
    from goodput_operator.control.measures import Measures

__all__ = ["Attainment", "attainment", "silence_reason", "tally"]

_WINDOW_WORDS: Final = f"{WINDOW_NS // (60 * NS_PER_S)} minutes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """What is said of a window.

    Args:
        status, reason, message: of the condition.
        classes: counts by class.
        goodput: requests per second that attained, rounded; None: not known.
        nearest: the class nearest to its objective or furthest below, in words; None: none.
    """

    status: Truth
    reason: str
    message: str
    classes: tuple[ClassStatus, ...]
    goodput: str | None
    nearest: str | None


def tally(window: Sequence[Tallied], measures: Measures, now_ns: int) -> tuple[Tallied, ...]:
    """The window after one more interval."""
    kept = tuple(one for one in window if one.at_ns > now_ns - WINDOW_NS)
    if measures.traffic.signal is not Signal.FRESH:
        return kept
    counts = tuple((one.name, one.good, one.total) for one in measures.attained)
    return (*kept, Tallied(at_ns=now_ns, interval_ns=measures.interval_ns, counts=counts))


def attainment(
    window: Sequence[Tallied], classes: Sequence[SLOClass], measures: Measures
) -> Attainment:
    """What can be said of the classes.

    Args:
        window: outcomes of the last minutes.
        classes: the promises.
        measures: of the interval that has just ended; whether they can be believed.
    """
    sums = {c.name: [0, 0] for c in classes}
    for one in window:
        for name, good, total in one.counts:
            if name in sums:
                sums[name][0] += good
                sums[name][1] += total
    seconds = sum(one.interval_ns for one in window) / NS_PER_S
    goods = sum(good for good, _ in sums.values())
    status, reason, message = _verdict(sums, classes, measures)
    return Attainment(
        status=status,
        reason=reason,
        message=message,
        classes=tuple(_class_status(c, *sums[c.name]) for c in classes),
        goodput=f"{format_number(goods / seconds)}/s" if seconds else None,
        nearest=_nearest(sums, classes),
    )


def _verdict(
    sums: Mapping[str, Sequence[int]], classes: Sequence[SLOClass], measures: Measures
) -> tuple[Truth, str, str]:
    signal = measures.traffic.signal
    if signal is not Signal.FRESH:
        routers = [one for one in measures.silent if one.role == ROLE_ROUTER]
        said = "; ".join(one.detail for one in routers if one.signal is signal)
        return Truth.UNKNOWN, silence_reason(signal), said or "nothing has been counted yet"
    promised = [(c, c.objective) for c in classes if c.objective is not None]
    if not promised:
        return Truth.UNKNOWN, "NoObjective", "no class of the service has an objective"
    if not any(sums[c.name][1] for c in classes):
        return Truth.UNKNOWN, "NoTraffic", f"no request has ended for {_WINDOW_WORDS}"
    told = [(c, objective) for c, objective in promised if sums[c.name][1]]
    missed = [
        _words(c.name, sums[c.name], objective)
        for c, objective in told
        if sums[c.name][1] >= LEAST_REQUESTS and wilson_upper(*sums[c.name]) < objective
    ]
    if missed:
        return Truth.FALSE, "Missed", f"within {_WINDOW_WORDS}: {'; '.join(missed)}"
    said = "; ".join(_words(c.name, sums[c.name], objective) for c, objective in told)
    kept = [
        sums[c.name][1] >= LEAST_REQUESTS and Fraction(*sums[c.name]) >= objective
        for c, objective in told
    ]
    if told and all(kept):
        return Truth.TRUE, "Attained", f"within {_WINDOW_WORDS}: {said}"
    words = said or "no class with an objective had a request"
    return Truth.UNKNOWN, "TooFew", f"within {_WINDOW_WORDS} too few requests to tell: {words}"


def silence_reason(signal: Signal) -> str:
    """What numbers that are not there are called, in conditions and Events."""
    return "ScrapeFailed" if signal is Signal.FAILED else "MetricsMissing"


def _words(name: str, counts: Sequence[int], objective: Fraction) -> str:
    good, total = counts
    return f"{name} {_percent(good, total)} of {format_objective(objective)}"


def _percent(good: int, total: int) -> str:
    """Rounded down: nothing is shown as kept that was not."""
    hundredths = 10_000 * good // total
    return f"{hundredths // 100}.{hundredths % 100:02d}%"


def _class_status(promised: SLOClass, good: int, total: int) -> ClassStatus:
    objective = promised.objective
    return ClassStatus(
        name=promised.name,
        good=good,
        total=total,
        attainment=_percent(good, total) if total else None,
        objective=None if objective is None else format_objective(objective),
    )


def _nearest(sums: Mapping[str, Sequence[int]], classes: Sequence[SLOClass]) -> str | None:
    margins = {
        c.name: (Fraction(*sums[c.name]) - c.objective, c.objective)
        for c in classes
        if c.objective is not None and sums[c.name][1]
    }
    if not margins:
        return None
    name = min(margins, key=lambda one: margins[one][0])
    good, total = sums[name]
    return f"{_percent(good, total)}/{format_objective(margins[name][1])}"
