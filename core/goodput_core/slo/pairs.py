"""The difference of attainment between two builds that served the same trace.

The replicate is the pair of runs: a run of the baseline and a run of the candidate with the same
requests. Within a pair, requests are matched by id, so that the difficulty of each request cancels.
Over several pairs, the spread between pairs shows the noise of machines and runs that no single
run can show. docs/verdicts.md has the formula, an example and the measured error rates.

Source: Tango, "Equivalence test and confidence interval for the difference in proportions for the
paired-sample design", Statistics in Medicine, 1998, for the bounds of independent requests.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Final

from goodput_core.slo.distributions import normal_quantile, student_t_quantile
from goodput_core.slo.intervals import (
    DEFAULT_CONFIDENCE,
    LEAST_CONFIDENCE,
    BlockScale,
    Exposure,
    block_scales,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "MAX_PAIRS",
    "USUAL_PAIRS",
    "DifferenceEstimate",
    "DifferenceInterval",
    "PairCounts",
    "RunSpread",
    "tango_bounds",
]

_PRECISION: Final = 1e-9
MAX_PAIRS: Final = 100
"""Largest number of pairs that are compared or advised."""
USUAL_PAIRS: Final = 4
"""Pairs that are compared, unless the user states another number; fewer are not advised."""
_COMPARABLE: Final = 2
"""A baseline with more than this factor of a history's misses is not comparable with it."""
_NO_CHANGES: Final = BlockScale(blocks=1, variance=0.0, highest=0.0, lowest=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCounts:
    """One class's matched requests in one pair of runs, by second of the window.

    Args:
        gained: requests that met their targets only with the candidate, one entry per second.
        lost: requests that met their targets only with the baseline.
        total: requests that were judged in both runs.

    Raises:
        ValueError: the sequences are empty, differ in length, or have more changes than requests.
    """

    gained: Sequence[int]
    lost: Sequence[int]
    total: Sequence[int]

    def __post_init__(self) -> None:
        if not len(self.gained) == len(self.lost) == len(self.total) > 0:
            raise ValueError("the counts of a pair need one entry per second of the same window")
        if any(g + c > n for g, c, n in zip(self.gained, self.lost, self.total, strict=True)):
            raise ValueError("more requests changed than were matched in a second")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpread:
    """Spread between earlier pairs of one build with itself.

    Args:
        variance: variance of the difference between pairs, at least 0.
        degrees: degrees of freedom of the variance, at least 1.
        missed: share of requests that the earlier runs missed.
    """

    variance: float
    degrees: int
    missed: float

    @classmethod
    def of(cls, differences: Sequence[float], missed: float) -> RunSpread:
        """Estimate the spread from pairs of the same build.

        The mean difference is not taken to be 0, because the second run of a pair may always be
        faster.

        Args:
            differences: difference of the attainments in each pair.
            missed: mean share of requests that the runs missed.

        Raises:
            ValueError: fewer than two differences.
        """
        degrees = len(differences) - 1
        if degrees < 1:
            raise ValueError("a spread needs at least two differences")
        variance = statistics.variance(differences)
        return cls(variance=variance, degrees=degrees, missed=missed)

    def at(self, missed: float) -> RunSpread:
        """Return the spread to expect while the same build misses another share of requests.

        Machines and neighbours change the number of misses by a factor, so the spread grows with
        it. Runs with less than half of the misses say little about that factor; then the spread is
        at least that of runs whose misses vary as much as they are many. Fewer misses do not
        narrow it.

        Args:
            missed: mean share of requests that the judged runs of the baseline missed.
        """
        if missed <= self.missed:
            return self
        variance = self.variance * (missed / self.missed) ** 2 if self.missed else 0.0
        if missed > _COMPARABLE * self.missed:
            # The difference of two runs has twice the variance of one.
            variance = max(variance, 2 * missed**2)
        return RunSpread(variance=variance, degrees=self.degrees, missed=missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceInterval:
    """One-sided bounds of attainment of the candidate less attainment of the baseline.

    Args:
        difference: mean difference of the pairs, −1 … 1.
        lower: lower bound.
        uppers: upper bounds. `uppers[k]` is the bound if k + 1 tests share the permitted error
            probability, for Holm's procedure.
        confidence: confidence of each bound alone.
        covers_runs: False if the bounds exclude the spread between runs, because there is only one
            pair and its service is not deterministic.
    """

    difference: float
    lower: float
    uppers: tuple[float, ...]
    confidence: float
    covers_runs: bool

    @property
    def upper(self) -> float:
        """The upper bound for this class alone."""
        return self.uppers[0]


class DifferenceEstimate:
    """Estimate the difference of one class's attainment from one or more pairs of runs.

    A bound is the mean difference of the pairs, plus or minus the largest of three distances:

    - t · SE, where SE² is the variance between pairs, with their degrees of freedom;
    - s + z · √(SE² + s²), where SE² is the variance within pairs from the spread between blocks of
      seconds. The worst block of changes against the candidate (or in its favour, for the upper
      bound) counts once more as far as it exceeds the worst block of the other kind: that is s.
      For the lower bound, s is at least an unobserved outage of the declared length in one run;
    - the distance for independent requests.

    Args:
        pairs: matched requests of each pair, with at least one request in each.
        deterministic: True if runs have no spread, as in virtual time; then one pair is all.
        history: spread between earlier pairs of one build; None if unknown.
        outage_s: length of the longest outage that the bounds take into account.

    Raises:
        ValueError: there is no pair, a pair has no request, or there are several deterministic
            pairs.
    """

    def __init__(
        self,
        pairs: Sequence[PairCounts],
        *,
        deterministic: bool = False,
        history: RunSpread | None = None,
        outage_s: float = 0.0,
    ) -> None:
        if not pairs:
            raise ValueError("a difference needs at least one pair")
        if deterministic and len(pairs) > 1:
            raise ValueError("runs without spread are equal, so a second pair adds no evidence")
        self.pairs = len(pairs)
        self.deterministic = deterministic
        self.gained = sum(sum(pair.gained) for pair in pairs)
        self.lost = sum(sum(pair.lost) for pair in pairs)
        self.total = sum(sum(pair.total) for pair in pairs)
        self._smallest = min(sum(pair.total) for pair in pairs)
        self.differences = tuple(_difference(pair) for pair in pairs)
        self.difference = math.fsum(self.differences) / self.pairs
        # All pairs leave out the same seconds, so that their blocks are alike.
        arrived = [sum(n) for n in zip_longest(*(pair.total for pair in pairs), fillvalue=0)]
        self._scales = tuple(tuple(_change_scales(pair, arrived, outage_s)) for pair in pairs)
        # An outage hits one run, of one pair.
        self._outage_share = max(Exposure(p.total).missed_share(outage_s) for p in pairs)
        self._between, self._degrees = _pool(self.differences, None if deterministic else history)
        self._covers_runs = deterministic or self._degrees > 0

    def interval(
        self, confidence: float = DEFAULT_CONFIDENCE, *, tests: int = 1
    ) -> DifferenceInterval:
        """Return both bounds.

        Args:
            confidence: confidence of each one-sided bound, at least 0.5 and below 1.
            tests: maximum number of tests that may share the permitted error probability of the
                upper bound.

        Raises:
            ValueError: the confidence is out of bounds.
        """
        if not LEAST_CONFIDENCE <= confidence < 1:
            raise ValueError(f"a confidence of {confidence} is out of bounds; 0.5 ≤ confidence < 1")
        uppers = [self._bound(1 - (1 - confidence) / share, 1) for share in range(1, tests + 1)]
        return DifferenceInterval(
            difference=self.difference,
            lower=self._bound(confidence, -1),
            uppers=tuple(accumulate(uppers, max)),
            confidence=confidence,
            covers_runs=self._covers_runs,
        )

    def pairs_to_decide(self, margin: float, confidence: float = DEFAULT_CONFIDENCE) -> int | None:
        """Return the number of pairs that would decide if they continue like the recorded ones.

        The estimate assumes that further pairs have the same mean difference and variance.

        Args:
            margin: the largest difference that is acceptable, at least 0.
            confidence: confidence of each one-sided bound.

        Returns:
            At least four pairs and more than there are; None if a hundred would not decide, and if
            runs have no spread, so that further pairs would be equal.
        """
        if self.deterministic:
            return None
        variance = max(self._within_variance(confidence), self._between)
        for pairs in range(max(USUAL_PAIRS, self.pairs + 1), MAX_PAIRS + 1):
            between = student_t_quantile(confidence, pairs - 1) * math.sqrt(variance / pairs)
            below, above = (
                max(between, self._within_distance(confidence, sign, pairs)) for sign in (-1, 1)
            )
            if self.difference - below >= -margin or self.difference + above < -margin:
                return pairs
        return None

    def _bound(self, confidence: float, sign: int) -> float:
        """Return the upper bound for the sign 1, and the lower bound for −1."""
        distance = self._within_distance(confidence, sign, self.pairs)
        if self._degrees:
            error = math.sqrt(self._between / self.pairs)
            distance = max(distance, student_t_quantile(confidence, self._degrees) * error)
        return min(max(-1.0, self.difference + sign * distance), 1.0)

    def _within_distance(self, confidence: float, sign: int, pairs: int) -> float:
        """Return the distance of the bound as far as it follows from the requests in the pairs.

        Args:
            confidence: confidence of the bound.
            sign: 1 for the upper bound, −1 for the lower one.
            pairs: number of pairs like the recorded ones.
        """
        quantile = normal_quantile(confidence)
        unseen = self._unseen(sign) * self.pairs / pairs
        error = math.sqrt(self._within_variance(confidence) / pairs + unseen**2)
        # Pairs count equally, so the smallest one limits how much their requests show together.
        weight = self.pairs * self._smallest / self.total
        gained, lost, total = (n * weight for n in (self.gained, self.lost, self.total))
        mean = (gained - lost) / total
        independent = tango_bounds(gained, lost, total, quantile)[sign > 0]
        distance = abs(independent - mean) * math.sqrt(self.pairs / pairs)
        return max(unseen + quantile * error, distance)

    def _within_variance(self, confidence: float) -> float:
        """Return the variance of one pair's difference from the spread between its blocks."""
        worst = [max(scale.inflated(confidence) for scale in scales) for scales in self._scales]
        return math.fsum(worst) / self.pairs

    def _unseen(self, sign: int) -> float:
        """Return the share of requests in one more block like the worst, at least one request.

        The true difference may include another such block that did not occur by chance. Changes
        in both directions are noise of single requests, so the opposite worst block is subtracted.
        A declared outage that did not occur may hit the candidate, too.
        """
        worst = 1 / self.total
        if sign < 0:
            worst = max(worst, self._outage_share / self.pairs)
        for alike in zip_longest(*self._scales, fillvalue=_NO_CHANGES):
            up = max(scale.highest for scale in alike)
            down = -min(scale.lowest for scale in alike)
            worst = max(worst, sign * (up - down) / self.pairs)
        return worst


def tango_bounds(gained: float, lost: float, total: float, quantile: float) -> tuple[float, float]:
    """Return Tango's score bounds of (gained − lost) / total for independent requests.

    Args:
        gained: requests that met their targets only with the candidate.
        lost: requests that met their targets only with the baseline.
        total: all matched requests, above 0.
        quantile: quantile of the normal distribution at the one-sided confidence, above 0.
    """

    def score(difference: float) -> float:
        # The share of lost requests that is likeliest under this difference.
        b = (2 * total - gained + lost) * difference - gained - lost
        root = math.sqrt(max(0.0, b * b + 8 * total * lost * difference * (1 - difference)))
        share = (root - b) / (4 * total)
        variance = total * (2 * share + difference * (1 - difference))
        distance = gained - lost - total * difference
        if variance <= 0:
            return math.copysign(math.inf, distance) if distance else 0.0
        return distance / math.sqrt(variance)

    mean = (gained - lost) / total
    return _solve(score, quantile, -1.0, mean), _solve(score, -quantile, mean, 1.0)


def _solve(score: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Return the point at which a decreasing function reaches `target`."""
    while high - low > _PRECISION:
        middle = (low + high) / 2
        if score(middle) > target:
            low = middle
        else:
            high = middle
    return low if target > 0 else high


def _difference(pair: PairCounts) -> float:
    total = sum(pair.total)
    if not total:
        raise ValueError("a pair of runs needs at least one matched request")
    return (sum(pair.gained) - sum(pair.lost)) / total


def _change_scales(
    pair: PairCounts, arrived: Sequence[int], outage_s: float
) -> Iterator[BlockScale]:
    """Divide the changes of a pair, as shares of its requests, into blocks at each scale.

    Args:
        pair: the counts.
        arrived: requests of each second in all pairs.
        outage_s: length of the longest declared outage.
    """
    total, change = sum(pair.total), sum(pair.gained) - sum(pair.lost)
    residuals = [
        (gained - lost) * total - change * n
        for gained, lost, n in zip(pair.gained, pair.lost, pair.total, strict=True)
    ]
    return block_scales(residuals, arrived[: len(residuals)], total**2, outage_s=outage_s)


def _pool(differences: Sequence[float], history: RunSpread | None) -> tuple[float, int]:
    """Return the variance between pairs, pooled with that of earlier ones, and its degrees."""
    degrees = len(differences) - 1
    squares = statistics.variance(differences) * degrees if degrees else 0.0
    if history is not None:
        degrees += history.degrees
        squares += history.variance * history.degrees
    return squares / max(1, degrees), degrees
