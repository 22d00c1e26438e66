"""Attainment and goodput: exact counts of judged requests, per class and overall.

A ratio is stored as the two counts (good, total) until it is printed. Therefore the counts of two
runs can be added, and nothing is rounded early. `judging` determines how a request counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from goodput_core.slo.judging import Judgement, JudgementKind, MissReason
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "NO_MISSES",
    "Attainment",
    "AttainmentTally",
    "ClassCounts",
    "MissCounts",
    "SecondCounts",
    "goodput_per_s",
]

_CAUSES: Final = {
    MissReason.TTFT: "exceed the TTFT target",
    MissReason.TPOT: "exceed the TPOT target",
    MissReason.TBT: "exceed the TBT target",
    MissReason.E2E: "exceed the E2E target",
    MissReason.SHORT: "are outputs with too few tokens",
    MissReason.SHED: "are rejections for load (429 or 503)",
    MissReason.ERROR: "are error responses",
    MissReason.TIMEOUT: "are time-outs",
    MissReason.UNSENT: "were never sent",
}
_CONNECTION_ERRORS: Final = "are connection errors"


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
class MissCounts:
    """Missed requests of one class by reason.

    Args:
        by_reason: number for each reason; a request with several reasons counts for each of them.
        without_response: those of `error` that have no HTTP response, because the connection
            failed.
    """

    by_reason: Mapping[MissReason, int] = field(default_factory=dict)
    without_response: int = 0

    def __add__(self, other: MissCounts) -> MissCounts:
        return MissCounts(
            by_reason=Counter(self.by_reason) + Counter(other.by_reason),
            without_response=self.without_response + other.without_response,
        )

    def describe_main(self, missed: int) -> str:
        """Return the most frequent cause, as in "9 of 10 misses are time-outs"; empty if unknown.

        Args:
            missed: number of missed requests.
        """
        counts = {_CAUSES[reason]: self.by_reason.get(reason, 0) for reason in MissReason}
        counts[_CAUSES[MissReason.ERROR]] -= self.without_response
        counts[_CONNECTION_ERRORS] = self.without_response
        cause = max(counts, key=counts.__getitem__)
        return f"{counts[cause]} of {missed} misses {cause}" if counts[cause] else ""


NO_MISSES: Final = MissCounts()


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
        misses: missed requests by reason.
    """

    name: str
    attainment: Attainment
    excluded: int = 0
    unjudged: int = 0
    outcomes: Mapping[Outcome, int] = field(default_factory=dict)
    misses: MissCounts = NO_MISSES

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
        self._without_response: Counter[str] = Counter()

    def add(self, record: RequestRecord, judgement: Judgement) -> None:
        """Count one request."""
        name = record.slo_class
        self._kinds.setdefault(name, Counter())[judgement.kind] += 1
        self._outcomes.setdefault(name, Counter())[record.outcome] += 1
        self._misses.setdefault(name, Counter()).update(judgement.reasons)
        if judgement.kind is JudgementKind.MISSED:
            self._without_response[name] += record.failed_without_response

    def by_class(self) -> tuple[ClassCounts, ...]:
        """Return the counts of every class."""
        return tuple(
            _sum_up(
                name, kinds, self._outcomes[name], self._misses[name], self._without_response[name]
            )
            for name, kinds in self._kinds.items()
        )

    def overall(self) -> ClassCounts:
        """Return the counts of all requests together; the name is empty."""
        return _sum_up(
            "",
            sum(self._kinds.values(), Counter()),
            sum(self._outcomes.values(), Counter()),
            sum(self._misses.values(), Counter()),
            self._without_response.total(),
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
    without_response: int,
) -> ClassCounts:
    good = kinds[JudgementKind.ATTAINED]
    return ClassCounts(
        name=name,
        attainment=Attainment(good=good, total=good + kinds[JudgementKind.MISSED]),
        excluded=kinds[JudgementKind.EXCLUDED],
        unjudged=kinds[JudgementKind.UNJUDGED],
        outcomes={outcome: outcomes[outcome] for outcome in Outcome if outcomes[outcome]},
        misses=MissCounts(
            by_reason={reason: misses[reason] for reason in MissReason if misses[reason]},
            without_response=without_response,
        ),
    )
