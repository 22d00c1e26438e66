"""Attainment of a service in the last minutes: the condition SLOAttained, class counts, goodput.

The rule is that of a run's verdict, applied to the last 5, 15 and 60 minutes. The shortest window
with a conclusive verdict counts. The error probability is divided equally among the three windows,
so that a wrong verdict is no more likely than in one run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from goodput_core.contract import ROLE_ROUTER
from goodput_core.control import Signal
from goodput_core.slo.targets import format_objective
from goodput_core.slo.verdict import VerdictKind, format_share
from goodput_core.slo.window import WINDOWS_S, judge_rolling
from goodput_core.spec.status import ClassStatus, Truth
from goodput_core.units import NS_PER_S, format_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goodput_core.slo.attainment import SecondCounts
    from goodput_core.slo.evidence import ClassEvidence
    from goodput_core.slo.targets import SLOClass
    from goodput_operator.control.measures import Measures

__all__ = ["AttainmentStatus", "judge_attainment", "reason_of_signal"]

_RECENT_S: Final = WINDOWS_S[0]
_VERDICTS_PER_WINDOW: Final = 60
"""A window above five minutes is judged at most this many times within its own length."""
_MAX_MESSAGE: Final = 2048
"""Longest message of a condition."""
_CONDITIONS: Final = {
    VerdictKind.PASS: (Truth.TRUE, "Attained"),
    VerdictKind.FAIL: (Truth.FALSE, "Missed"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttainmentStatus:
    """The condition SLOAttained and the figures of the window behind it.

    Args:
        status, reason, message: fields of the condition.
        classes: counts and bounds by class; empty before the first measurement.
        goodput: requests that met their targets, per second of the last five minutes; None
            before the first measurement.
        nearest: attainment and objective of the class with the smallest margin; None if no class
            with an objective had requests.
        window_s: length of the window; 0 before the first measurement.
        judged_ns: time of the verdict.
        criteria: classes and declared outage that the verdict was based on.
    """

    status: Truth
    reason: str
    message: str
    classes: tuple[ClassStatus, ...] = ()
    goodput: str | None = None
    nearest: str | None = None
    window_s: int = 0
    judged_ns: int = 0
    criteria: tuple[object, ...] = ()


def judge_attainment(
    measures: Measures,
    classes: Sequence[SLOClass],
    *,
    now_ns: int,
    outage_s: int = 0,
    last: AttainmentStatus | None = None,
) -> AttainmentStatus:
    """Judge the requests of the last minutes.

    If the last five minutes are inconclusive, a longer window is judged again only after a sixtieth
    of its length. Its verdict changes slowly, and one operator may have to judge a thousand
    services.

    Args:
        measures: measurements of the interval that just ended.
        classes: SLO classes of the spec.
        now_ns: the current time.
        outage_s: the longest outage that a PASS must exclude.
        last: attainment after the previous interval; its figures stay while routers return no
            counts.
    """
    seconds = measures.seconds
    if seconds is None:
        signal = measures.traffic.signal
        details = [
            pod.detail
            for pod in measures.unmeasured
            if pod.role == ROLE_ROUTER and pod.signal is signal
        ]
        return AttainmentStatus(
            status=Truth.UNKNOWN,
            reason=reason_of_signal(signal),
            message="; ".join(details)[:_MAX_MESSAGE] or "no requests have been counted yet",
            classes=() if last is None else last.classes,
            goodput=None if last is None else last.goodput,
            nearest=None if last is None else last.nearest,
        )
    criteria = (*classes, outage_s)
    recent = any(sum(seconds[c.name].total[-_RECENT_S:]) for c in classes)
    if last is not None and recent and _is_current(last, criteria, now_ns):
        rolling = judge_rolling(seconds, classes, outage_s=outage_s, windows_s=(_RECENT_S,))
        if rolling.verdict.kind is VerdictKind.INCONCLUSIVE:
            return replace(last, goodput=_format_goodput(seconds, classes))
    else:
        rolling = judge_rolling(seconds, classes, outage_s=outage_s)
    verdict = rolling.verdict
    if all(c.objective is None for c in classes):
        status, reason = Truth.UNKNOWN, "NoObjective"
        message = "no class of the service has an objective"
    elif not recent:
        status, reason = Truth.UNKNOWN, "NoTraffic"
        message = f"no request has ended for {_format_duration(_RECENT_S)}"
    else:
        status, reason = _CONDITIONS.get(verdict.kind, (Truth.UNKNOWN, verdict.reason.value))
        message = f"over the last {_format_duration(rolling.window_s)}: {verdict.sentence}"
    return AttainmentStatus(
        status=status,
        reason=reason,
        message=message[:_MAX_MESSAGE],
        classes=tuple(map(_class_status, rolling.classes)),
        goodput=_format_goodput(seconds, classes),
        nearest=_format_nearest(rolling.classes),
        window_s=rolling.window_s,
        judged_ns=now_ns,
        criteria=criteria,
    )


def _is_current(last: AttainmentStatus, criteria: tuple[object, ...], now_ns: int) -> bool:
    """True if the last verdict is on a window above five minutes that need not be judged yet."""
    age_ns = now_ns - last.judged_ns
    return (
        last.reason not in {"NoTraffic", "NoObjective"}
        and last.window_s > _RECENT_S
        and last.criteria == criteria
        and age_ns * _VERDICTS_PER_WINDOW < last.window_s * NS_PER_S
    )


def reason_of_signal(signal: Signal) -> str:
    """Return the reason that conditions and Events give for missing measurements."""
    return "ScrapeFailed" if signal is Signal.FAILED else "MetricsMissing"


def _format_duration(seconds: int) -> str:
    return f"{seconds} s" if seconds % 60 else f"{seconds // 60} minutes"


def _class_status(evidence: ClassEvidence) -> ClassStatus:
    counts, interval, objective = evidence.attainment, evidence.interval, evidence.objective
    return ClassStatus(
        name=evidence.name,
        good=counts.good,
        total=counts.total,
        attainment=_format_percent(counts.good, counts.total) if counts.total else None,
        lower=None if interval is None else format_share(interval.lower),
        upper=None if interval is None else f"{math.ceil(interval.upper * 10_000) / 100:.2f}%",
        objective=None if objective is None else format_objective(objective),
    )


def _format_goodput(seconds: Mapping[str, SecondCounts], classes: Sequence[SLOClass]) -> str:
    """Format the requests per second of the last five minutes that met their targets."""
    recent = [seconds[c.name].good[-_RECENT_S:] for c in classes]
    return f"{format_number(sum(map(sum, recent)) / len(recent[0]))}/s"


def _format_nearest(classes: Sequence[ClassEvidence]) -> str | None:
    """Format attainment and objective of the class with the smallest margin."""
    margins = [
        (share - c.objective, c.attainment, c.objective)
        for c in classes
        if c.objective is not None and (share := c.attainment.share) is not None
    ]
    if not margins:
        return None
    _, counts, objective = min(margins, key=lambda margin: margin[0])
    return f"{_format_percent(counts.good, counts.total)}/{format_objective(objective)}"


def _format_percent(good: int, total: int) -> str:
    """Format a percentage, rounded down to two decimals: a missed objective never looks met."""
    hundredths = 10_000 * good // total
    return f"{hundredths // 100}.{hundredths % 100:02d}%"
