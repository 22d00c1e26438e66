"""The last hour of a service: a bounded ring of per-second counts, and the verdict on it.

Each router counts in a ring, and the operator adds the routers' counts to a ring of its own. The
verdict follows the rule for a run (`verdict.decide`), on the shortest window that is conclusive.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.slo.attainment import SecondCounts
from goodput_core.slo.evidence import ClassEvidence, class_evidence
from goodput_core.slo.intervals import DEFAULT_CONFIDENCE
from goodput_core.slo.verdict import Verdict, VerdictKind, decide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.slo.targets import SLOClass

__all__ = [
    "RING_S",
    "WINDOWS_S",
    "RecentSeconds",
    "RollingVerdict",
    "SecondRing",
    "judge_rolling",
]

WINDOWS_S: Final = (300, 900, 3600)
"""Windows in seconds, tried in this order."""
RING_S: Final = WINDOWS_S[-1]
_MAX_COUNT: Final = 2**32 - 1  # unsigned, 32 bits
_ZEROS: Final = array("I", [0]) * RING_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentSeconds:
    """Counts of consecutive seconds; routers publish these, and the operator adds them up.

    Args:
        first_s: number of the first second.
        end_s: number of the second after the last one.
        classes: counts of each class that had requests, one entry per second.
    """

    first_s: int
    end_s: int
    classes: Mapping[str, SecondCounts]


class SecondRing:
    """Counts of judged requests per class for each of the last 3,600 seconds.

    The caller's clock numbers the seconds. The ring advances to the newest second that was
    counted or read. Counts that are more than an hour older are dropped.

    Args:
        first_s: number of the first second.
    """

    def __init__(self, first_s: int) -> None:
        self._first_s = first_s
        self._end_s = first_s
        self._classes: dict[str, tuple[array[int], array[int]]] = {}

    @property
    def first_s(self) -> int:
        """The oldest second in the ring."""
        return max(self._first_s, self._end_s - RING_S)

    @property
    def end_s(self) -> int:
        """The second after the newest one."""
        return self._end_s

    def advance(self, end_s: int) -> None:
        """Advance the ring up to, but excluding, `end_s`; drop counts older than an hour."""
        if end_s <= self._end_s:
            return
        new = min(end_s - self._end_s, RING_S)
        for good, total in self._classes.values():
            for counts in (good, total):
                _put(counts, end_s - new, _ZEROS[:new])
        self._end_s = end_s

    def extend_back(self, first_s: int) -> None:
        """Move the first second back, at most by the length of the ring."""
        self._first_s = min(self._first_s, first_s)

    def add(self, name: str, second: int, *, good: int, total: int) -> None:
        """Add requests of one second; ignore seconds older than the ring.

        Args:
            name: the class.
            second: number of the second in which their outcomes became known.
            good: number of requests that met their targets.
            total: number of requests that met or missed their targets.
        """
        self.advance(second + 1)
        if second < self.first_s:
            return
        if name not in self._classes:
            self._classes[name] = (_ZEROS[:], _ZEROS[:])
        index = second % RING_S
        for counts, more in zip(self._classes[name], (good, total), strict=True):
            counts[index] = min(counts[index] + more, _MAX_COUNT)

    def counts(self, name: str, first_s: int, end_s: int) -> SecondCounts:
        """Return the counts of the seconds from `first_s` up to, but excluding, `end_s`.

        Args:
            name: the class; a class that was never counted has zeros.
            first_s: at least `self.first_s`.
            end_s: above `first_s` and at most `self.end_s`.
        """
        if not self.first_s <= first_s < end_s <= self._end_s:
            raise ValueError(f"seconds {first_s} to {end_s} are not in the ring")
        if name not in self._classes:
            zeros = _ZEROS[: end_s - first_s]
            return SecondCounts(good=zeros, total=zeros)
        good, total = (_get(counts, first_s, end_s) for counts in self._classes[name])
        return SecondCounts(good=good, total=total)

    def recent(self, since_s: int, end_s: int) -> RecentSeconds:
        """Return the seconds in the ring from `since_s` up to, but excluding, `end_s`.

        Classes without requests in these seconds are left out.
        """
        self.advance(end_s)
        first_s = min(max(since_s, self.first_s), end_s)
        classes: dict[str, SecondCounts] = {}
        for name in self._classes if first_s < end_s else ():
            counts = self.counts(name, first_s, end_s)
            if any(counts.total):
                # Convert to lists, because arrays cannot be encoded.
                classes[name] = SecondCounts(good=list(counts.good), total=list(counts.total))
        return RecentSeconds(first_s=first_s, end_s=end_s, classes=classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingVerdict:
    """The verdict on the last minutes of a service.

    Args:
        window_s: length of the window on which the verdict is based.
        classes: the evidence about each class in that window.
        verdict: PASS, FAIL or INCONCLUSIVE.
    """

    window_s: int
    classes: tuple[ClassEvidence, ...]
    verdict: Verdict


def judge_rolling(
    seconds: Mapping[str, SecondCounts],
    classes: Sequence[SLOClass],
    *,
    confidence: float = DEFAULT_CONFIDENCE,
    outage_s: int = 0,
    windows_s: Sequence[int] = WINDOWS_S,
) -> RollingVerdict:
    """Judge the shortest conclusive window of 5, 15 and 60 minutes; the longest if none is.

    A window is conclusive if its verdict is PASS or FAIL. Each window has a third of the permitted
    error probability, so that three attempts do not make an error likelier. If the counts begin
    later than a window, the window is shortened.

    Args:
        seconds: counts of each class up to the present, all of the same length.
        classes: the classes with their objectives; at least one.
        confidence: confidence of each one-sided bound, over the three windows together.
        outage_s: the longest outage that the bounds take into account.
        windows_s: the windows to try, a subset of `WINDOWS_S`.
    """
    each = 1 - (1 - confidence) / len(WINDOWS_S)
    sharers = max(1, sum(c.objective is not None for c in classes))
    available_s = min((len(seconds[c.name].total) for c in classes), default=0)
    for window_s in sorted({min(w, available_s) for w in windows_s}):
        evidence = tuple(
            class_evidence(
                c.name,
                c.objective,
                _last(seconds[c.name], window_s),
                confidence=each,
                classes=sharers,
                outage_s=outage_s,
            )
            for c in classes
        )
        verdict = decide(evidence, None)
        rolling = RollingVerdict(window_s=window_s, classes=evidence, verdict=verdict)
        if verdict.kind is not VerdictKind.INCONCLUSIVE:
            break
    return rolling


def _last(counts: SecondCounts, window_s: int) -> SecondCounts:
    return SecondCounts(good=counts.good[-window_s:], total=counts.total[-window_s:])


def _put(ring: array[int], first_s: int, values: array[int]) -> None:
    """Write the values of consecutive seconds, at most `RING_S` of them."""
    start = first_s % RING_S
    until_wrap = min(len(values), RING_S - start)
    ring[start : start + until_wrap] = values[:until_wrap]
    ring[: len(values) - until_wrap] = values[until_wrap:]


def _get(ring: array[int], first_s: int, end_s: int) -> array[int]:
    start, stop = first_s % RING_S, (end_s - 1) % RING_S + 1
    return ring[start:stop] if start < stop else ring[start:] + ring[:stop]
