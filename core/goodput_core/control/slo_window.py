"""The SLO window of the control laws: counts of met and missed targets by class.

The token-budget law must distinguish a missed TTFT target from a missed TPOT target, and needs to
know whether the other one has slack. Therefore each request counts for TTFT and for TPOT
separately. A request that met a target with less than a fifth to spare counts as close. A target
has slack if the objective would also be met with the target a fifth tighter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from statistics import NormalDist
from typing import TYPE_CHECKING, Final, TypeVar

from goodput_core.slo.intervals import DEFAULT_CONFIDENCE
from goodput_core.slo.judging import JudgementKind, MissReason, judge
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_core.slo.judging import Judgement
    from goodput_core.slo.record import RequestRecord
    from goodput_core.slo.targets import Targets

__all__ = [
    "LEAST_REQUESTS",
    "WINDOW_NS",
    "ClassOutcomes",
    "ClassWindow",
    "OutcomeTally",
    "TargetCounts",
    "TargetStatus",
    "WindowTally",
    "merge_windows",
    "request_counts",
    "target_status",
    "wilson_upper",
]

_COUNTED: Final = frozenset({JudgementKind.ATTAINED, JudgementKind.MISSED})
_UNRELATED_TO_LOAD: Final = frozenset({MissReason.ERROR, MissReason.UNSENT, MissReason.SHORT})
_SLOW: Final = frozenset({MissReason.TPOT, MissReason.TBT, MissReason.TIMEOUT, MissReason.SHED})
_TIGHTENED: Final = Fraction(4, 5)
"""A request that exceeds this share of a target is close to missing it."""
LEAST_REQUESTS: Final = 20
"""Targets with fewer requests have the status UNKNOWN."""
WINDOW_NS: Final = 300 * NS_PER_S
"""Length of the window: requests that ended longer ago are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCounts:
    """Counts of the requests that met or missed one target.

    Args:
        judged: requests that have the target.
        missed: judged requests that missed the target.
        close: judged requests that met the target with less than a fifth to spare.
    """

    judged: int = 0
    missed: int = 0
    close: int = 0

    def __add__(self, other: TargetCounts) -> TargetCounts:
        return TargetCounts(
            judged=self.judged + other.judged,
            missed=self.missed + other.missed,
            close=self.close + other.close,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassWindow:
    """Counts of one class: of one request, of an interval or of a complete window.

    Args:
        name: name of the class.
        ttft: counts for the time to first token. A request that was shed, or that timed out
            without a token, counts as missed.
        tpot: counts for the mean time per token, and for the p99 of the gaps if the class has that
            target.
    """

    name: str
    ttft: TargetCounts
    tpot: TargetCounts

    def __add__(self, other: ClassWindow) -> ClassWindow:
        return ClassWindow(name=self.name, ttft=self.ttft + other.ttft, tpot=self.tpot + other.tpot)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassOutcomes:
    """Outcomes of the requests of one class that ended in an interval.

    Unlike `ClassWindow`, it counts each request once, and includes misses that are unrelated to
    load.

    Args:
        name: name of the class.
        good: requests that met their targets.
        total: requests in the denominator: attained, missed, shed, error and timeout.
    """

    name: str
    good: int
    total: int

    def __add__(self, other: ClassOutcomes) -> ClassOutcomes:
        return ClassOutcomes(
            name=self.name, good=self.good + other.good, total=self.total + other.total
        )

    def misses(self, objective: Fraction) -> bool:
        """True if the share of good requests is below the objective; False without requests."""
        return self.good < objective * self.total


class TargetStatus(StrEnum):
    """Status of a target within the window."""

    UNKNOWN = "unknown"
    """Too few requests have the target."""
    MISSED = "missed"
    """The upper bound of the attainment is below the objective."""
    KEPT = "kept"
    """Neither missed nor with slack. (The result `kept` of `goodput_promises_total` has another
    meaning: it counts requests that met a target with at least a fifth to spare.)"""
    SLACK = "slack"
    """The objective would also be met with the target a fifth tighter."""


_Counts = TypeVar("_Counts", ClassWindow, ClassOutcomes)


def target_status(counts: TargetCounts, objective: Fraction) -> TargetStatus:
    """Return the status of one target of one class."""
    judged = counts.judged
    if judged < LEAST_REQUESTS:
        return TargetStatus.UNKNOWN
    if wilson_upper(judged - counts.missed, judged) < objective:
        return TargetStatus.MISSED
    if Fraction(judged - counts.missed - counts.close, judged) >= objective:
        return TargetStatus.SLACK
    return TargetStatus.KEPT


def wilson_upper(good: int, total: int) -> float:
    """Return Wilson's upper bound of good/total at 95 %, for independent requests.

    The control laws must act within seconds. Therefore they do not use the verdict's interval,
    which accounts for bursts of misses and needs many more requests.

    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference",
    JASA 1927.
    """
    if good == total:
        return 1.0
    z = NormalDist().inv_cdf(DEFAULT_CONFIDENCE)
    share, square = good / total, z * z / total
    spread = z * math.sqrt(share * (1 - share) / total + square / (4 * total))
    return min(1.0, max(share, (share + square / 2 + spread) / (1 + square)))


def request_counts(
    record: RequestRecord, targets: Targets, judgement: Judgement
) -> ClassWindow | None:
    """Return the counts of one request that ended.

    A request that missed only its end-to-end target counts as missed for both TTFT and TPOT, so
    that the law does not trade one for the other. A request that was dropped or timed out after its
    first token counts as missed for TPOT.

    Args:
        record: the request.
        targets: targets of the request's class, overridden by its own.
        judgement: judgement of the request by these targets.

    Returns:
        The counts; None if the request is excluded or unjudged, or missed for a reason that is
        unrelated to load.
    """
    reasons = judgement.reasons
    if judgement.kind not in _COUNTED or not _UNRELATED_TO_LOAD.isdisjoint(reasons):
        return None
    only_e2e = reasons == (MissReason.E2E,)
    has_token = record.first_token_ns is not None
    ttft, tpot = TargetCounts(), TargetCounts()
    if targets.ttft_ns is not None or not has_token:
        # The single reason of a dropped request or a timeout does not contain the TTFT target.
        late = only_e2e or _exceeds(record.ttft_ns, targets.ttft_ns)
        ttft = _count_target(record.ttft_ns, targets.ttft_ns, missed=late)
    if targets.pace_ns is not None and record.tpot_ns is not None:
        slow = only_e2e or not _SLOW.isdisjoint(reasons)
        tpot = _count_target(record.tpot_ns, targets.tpot_ns, missed=slow)
    return ClassWindow(name=record.slo_class, ttft=ttft, tpot=tpot)


class WindowTally:
    """Counts of requests by class since the start, or since the last `take`."""

    def __init__(self) -> None:
        self._classes: dict[str, ClassWindow] = {}

    def add(
        self, record: RequestRecord, targets: Targets, judgement: Judgement | None = None
    ) -> None:
        """Count a request that ended; see `request_counts`. Without a judgement, judge it first."""
        window = request_counts(record, targets, judgement or judge(record, targets))
        if window is not None:
            _add(self._classes, window)

    def sums(self) -> tuple[ClassWindow, ...]:
        """Return the counts, ordered by class name."""
        return tuple(self._classes[name] for name in sorted(self._classes))

    def take(self) -> tuple[ClassWindow, ...]:
        """Return the counts and reset them."""
        taken = self.sums()
        self._classes.clear()
        return taken


class OutcomeTally:
    """Outcomes of requests by class since the last `take`."""

    def __init__(self) -> None:
        self._classes: dict[str, ClassOutcomes] = {}

    def add(self, name: str, judgement: Judgement) -> None:
        """Count a request of this class, unless it is excluded or unjudged."""
        if judgement.kind in _COUNTED:
            good = int(judgement.kind is JudgementKind.ATTAINED)
            _add(self._classes, ClassOutcomes(name=name, good=good, total=1))

    def take(self) -> tuple[ClassOutcomes, ...]:
        """Return the counts, ordered by class name, and reset them."""
        taken = tuple(self._classes[name] for name in sorted(self._classes))
        self._classes.clear()
        return taken


def merge_windows(windows: Iterable[_Counts]) -> dict[str, _Counts]:
    """Add up the counts of several intervals by class."""
    sums: dict[str, _Counts] = {}
    for window in windows:
        _add(sums, window)
    return sums


def _add(sums: dict[str, _Counts], window: _Counts) -> None:
    earlier = sums.get(window.name)
    sums[window.name] = window if earlier is None else earlier + window


def _exceeds(latency_ns: int | None, target_ns: int | None) -> bool:
    """Return True if a latency is unknown or above its target."""
    return latency_ns is None or (target_ns is not None and latency_ns > target_ns)


def _count_target(latency_ns: float | None, target_ns: int | None, *, missed: bool) -> TargetCounts:
    if missed:
        return TargetCounts(judged=1, missed=1)
    close = (
        latency_ns is not None
        and target_ns is not None
        and latency_ns * _TIGHTENED.denominator > target_ns * _TIGHTENED.numerator
    )
    return TargetCounts(judged=1, close=int(close))
