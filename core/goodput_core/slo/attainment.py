"""Attainment and goodput: exact counts of judged requests, per class and overall.

A ratio is stored as the two counts (good, total) until it is printed. Therefore the counts of two
runs can be added, and nothing is rounded early. `judging` determines how a request counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from goodput_core.slo.judging import Judgement, JudgementKind, MissReason
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Attainment", "AttainmentTally", "ClassCounts", "SecondCounts", "goodput_per_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """Counts of judged requests and of requests that met their targets.

    Args:
        good: requests that met their targets.
        total: requests that met or missed their targets.

    Raises:
        ValueError: not 0 ≤ good ≤ total.
    """

    good: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.good <= self.total:
            raise ValueError(f"{self.good} good of {self.total} cannot be counts of requests")

    @property
    def share(self) -> Fraction | None:
        """The exact fraction good / total; None if no request was judged."""
        return Fraction(self.good, self.total) if self.total else None

    def __add__(self, other: Attainment) -> Attainment:
        return Attainment(good=self.good + other.good, total=self.total + other.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondCounts:
    """One class's judged requests by second of a window, from which intervals are computed.

    Args:
        good: requests that met their targets, one entry per second.
        total: requests that met or missed their targets, one entry per second; at least one entry.

    Raises:
        ValueError: the sequences are empty or differ in length.
    """

    good: Sequence[int]
    total: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.good) != len(self.total) or not self.total:
            raise ValueError(
                f"{len(self.good)} and {len(self.total)} entries cannot be the counts of a window"
            )

    @property
    def attainment(self) -> Attainment:
        """Counts of the complete window."""
        return Attainment(good=sum(self.good), total=sum(self.total))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCounts:
    """Counts of one class's requests, or of all requests.

    Args:
        name: the class; empty for requests without one, and for all classes together.
        attainment: counts of requests that met their targets and of judged requests.
        excluded: number of cancelled requests that had not missed their TTFT target.
        unjudged: number of requests without a target, or whose record does not suffice to judge
            them.
        outcomes: requests by outcome; adds up to `rows`.
        misses: missed requests by reason; a request with several reasons counts for each of them.
    """

    name: str
    attainment: Attainment
    excluded: int = 0
    unjudged: int = 0
    outcomes: Mapping[Outcome, int] = field(default_factory=dict)
    misses: Mapping[MissReason, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of requests of the class, judged or not."""
        return self.attainment.total + self.excluded + self.unjudged


class AttainmentTally:
    """Counts judgements one by one, in constant memory.

    Args:
        names: classes that are listed first, in this order and even without a request; other
            classes are appended with their first request.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._kinds: dict[str, Counter[JudgementKind]] = {name: Counter() for name in names}
        self._outcomes: dict[str, Counter[Outcome]] = {name: Counter() for name in self._kinds}
        self._misses: dict[str, Counter[MissReason]] = {name: Counter() for name in self._kinds}

    def add(self, record: RequestRecord, judgement: Judgement) -> None:
        """Count one request."""
        name = record.slo_class
        self._kinds.setdefault(name, Counter())[judgement.kind] += 1
        self._outcomes.setdefault(name, Counter())[record.outcome] += 1
        self._misses.setdefault(name, Counter()).update(judgement.reasons)

    def by_class(self) -> tuple[ClassCounts, ...]:
        """Return the counts of every class."""
        return tuple(
            _sum_up(name, kinds, self._outcomes[name], self._misses[name])
            for name, kinds in self._kinds.items()
        )

    def overall(self) -> ClassCounts:
        """Return the counts of all requests together; the name is empty."""
        return _sum_up(
            "",
            sum(self._kinds.values(), Counter()),
            sum(self._outcomes.values(), Counter()),
            sum(self._misses.values(), Counter()),
        )


def goodput_per_s(good: int, window_ns: int) -> Fraction:
    """Return the exact number per second of requests that met their targets.

    Args:
        good: requests that met their targets.
        window_ns: length of the window in which the requests were scheduled, above 0.
    """
    return Fraction(good * NS_PER_S, window_ns)


def _sum_up(
    name: str,
    kinds: Counter[JudgementKind],
    outcomes: Counter[Outcome],
    misses: Counter[MissReason],
) -> ClassCounts:
    good = kinds[JudgementKind.ATTAINED]
    return ClassCounts(
        name=name,
        attainment=Attainment(good=good, total=good + kinds[JudgementKind.MISSED]),
        excluded=kinds[JudgementKind.EXCLUDED],
        unjudged=kinds[JudgementKind.UNJUDGED],
        outcomes={outcome: outcomes[outcome] for outcome in Outcome if outcomes[outcome]},
        misses={reason: misses[reason] for reason in MissReason if misses[reason]},
    )
