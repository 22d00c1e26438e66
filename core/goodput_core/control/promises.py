"""How the promises of each class fared over an interval, in counts that can be added.

Which of the two promises is missed decides which way the token budget goes, and whether the
other one could bear it. So a request counts for TTFT and for TPOT apart, and one that kept a
promise only just counts as close: a promise has slack where it would hold a fifth tighter.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from goodput_core.slo.intervals import wilson
from goodput_core.slo.judging import JudgementKind, MissReason, judge
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_core.slo.record import RequestRecord
    from goodput_core.slo.targets import Targets

__all__ = [
    "LEAST_REQUESTS",
    "WINDOW_NS",
    "ClassWindow",
    "PromiseCounts",
    "Standing",
    "WindowTally",
    "counted",
    "merged",
    "standing",
]

_COUNTED: Final = frozenset({JudgementKind.ATTAINED, JudgementKind.MISSED})
_OF_NO_LOAD: Final = frozenset({MissReason.ERROR, MissReason.UNSENT, MissReason.SHORT})
_SLOW: Final = frozenset({MissReason.TPOT, MissReason.TBT, MissReason.TIMEOUT})
_SLACK: Final = Fraction(4, 5)
LEAST_REQUESTS: Final = 20
"""Of fewer requests nothing is said."""
WINDOW_NS: Final = 300 * NS_PER_S
"""Requests that ended longer ago say nothing about now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseCounts:
    """How often one promise was kept.

    Args:
        judged: requests that it was made to.
        missed: of these, to whom it was broken.
        close: of these, to whom it was kept with less than a fifth of the target to spare.
    """

    judged: int = 0
    missed: int = 0
    close: int = 0

    def __add__(self, other: PromiseCounts) -> PromiseCounts:
        return PromiseCounts(
            judged=self.judged + other.judged,
            missed=self.missed + other.missed,
            close=self.close + other.close,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassWindow:
    """One class over one interval.

    Args:
        name: of the class.
        ttft: who was shed, or timed out without a token, missed it.
        tpot: mean time per token, and the gaps' p99 where one was promised.
    """

    name: str
    ttft: PromiseCounts
    tpot: PromiseCounts

    def __add__(self, other: ClassWindow) -> ClassWindow:
        return ClassWindow(name=self.name, ttft=self.ttft + other.ttft, tpot=self.tpot + other.tpot)


class Standing(StrEnum):
    """How a promise stands, by the evidence at hand."""

    UNKNOWN = "unknown"
    """Too few requests to tell, or none that were promised anything."""
    MISSED = "missed"
    """Conclusively: the upper bound of who kept it lies below the objective."""
    KEPT = "kept"
    SLACK = "slack"
    """The objective would hold with targets a fifth tighter."""


def standing(counts: PromiseCounts, objective: Fraction) -> Standing:
    """How one promise of one class stands."""
    judged = counts.judged
    if judged < LEAST_REQUESTS:
        return Standing.UNKNOWN
    if wilson(judged - counts.missed, judged).upper < objective:
        return Standing.MISSED
    if Fraction(judged - counts.missed - counts.close, judged) >= objective:
        return Standing.SLACK
    return Standing.KEPT


def counted(record: RequestRecord, targets: Targets) -> ClassWindow | None:
    """What one request that ended adds; None: its end has nothing to do with load.

    An answer that came too late as a whole, though both of its parts were in time, counts
    against both: neither has anything to give to the other.

    Args:
        record: it.
        targets: what it was promised, its own targets applied.
    """
    judgement = judge(record, targets)
    reasons = judgement.reasons
    if judgement.kind not in _COUNTED or not _OF_NO_LOAD.isdisjoint(reasons):
        return None
    whole = reasons == (MissReason.E2E,)
    begun = record.first_token_ns is not None
    ttft, tpot = PromiseCounts(), PromiseCounts()
    if targets.ttft_ns is not None or not begun:
        late = whole or not begun or MissReason.TTFT in reasons
        ttft = _counted(record.ttft_ns, targets.ttft_ns, missed=late)
    paced = targets.tpot_ns is not None or targets.tbt_p99_ns is not None
    if paced and record.tpot_ns is not None:
        late = whole or not _SLOW.isdisjoint(reasons)
        tpot = _counted(record.tpot_ns, targets.tpot_ns, missed=late)
    return ClassWindow(name=record.slo_class, ttft=ttft, tpot=tpot)


class WindowTally:
    """Adds up requests as they end, since the start or since they were last taken."""

    def __init__(self) -> None:
        self._classes: dict[str, ClassWindow] = {}

    def add(self, record: RequestRecord, targets: Targets) -> None:
        """A request ended; see `counted`."""
        window = counted(record, targets)
        if window is not None:
            known = self._classes.get(window.name)
            self._classes[window.name] = window if known is None else known + window

    def sums(self) -> tuple[ClassWindow, ...]:
        """What was counted, in the order of names."""
        return tuple(self._classes[name] for name in sorted(self._classes))

    def take(self) -> tuple[ClassWindow, ...]:
        """The same, and begin anew."""
        taken = self.sums()
        self._classes.clear()
        return taken


def merged(windows: Iterable[ClassWindow]) -> dict[str, ClassWindow]:
    """Windows of several intervals, brought together by class."""
    sums: dict[str, ClassWindow] = {}
    for window in windows:
        known = sums.get(window.name)
        sums[window.name] = window if known is None else known + window
    return sums


def _counted(latency_ns: float | None, target_ns: int | None, *, missed: bool) -> PromiseCounts:
    if missed:
        return PromiseCounts(judged=1, missed=1)
    close = (
        latency_ns is not None
        and target_ns is not None
        and latency_ns * _SLACK.denominator > target_ns * _SLACK.numerator
    )
    return PromiseCounts(judged=1, close=int(close))
