"""Confidence bounds of an attainment from per-second counts, without resampling.

Misses come in bursts, so a thousand requests carry the information of fewer independent ones. The
variance of the number of misses is estimated from blocks of seconds at several scales. A gamma
distribution with that variance bounds the true number, and the scale with the widest bound is
used. If misses are far apart, the bounds are those of independent requests. The bounds are never
tighter than the exact (Clopper–Pearson) bounds. docs/verdicts.md has the formula, an example and
the measured coverage.

Source: Fay and Feuer, "Confidence intervals for directly standardized rates: a method based on
the gamma distribution", Statistics in Medicine, 1997, for the bounds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
from operator import sub
from typing import TYPE_CHECKING, Final, TypeVar

from goodput_core.slo.distributions import (
    beta_quantile,
    chi_square_quantile,
    normal_quantile,
    student_t_quantile,
)
from goodput_core.slo.targets import USUAL_CONFIDENCE

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from goodput_core.slo.attainment import SecondCounts

__all__ = [
    "DEFAULT_CONFIDENCE",
    "LEAST_CONFIDENCE",
    "LONGEST_WINDOW_S",
    "BlockScale",
    "Exposure",
    "Interval",
    "IntervalMethod",
    "WindowEstimate",
    "block_scales",
    "count_blocks",
    "find_below",
    "requests_needed",
]

DEFAULT_CONFIDENCE: Final = float(USUAL_CONFIDENCE)
LEAST_CONFIDENCE: Final = 0.5
LONGEST_WINDOW_S: Final = 86_400
"""The longest window that `WindowEstimate.deciding_window_s` tries, seconds."""
_BLOCK_COUNTS: Final = (60, 30, 15, 8)
# t/z is 0/0 at a confidence of 0.5 and nearly constant below 0.75, so lower confidences use its
# value at 0.75.
_MIN_INFLATED: Final = 0.75
_OUTAGE_PRECISION: Final = 1e-2
# Shorter outages count as none.
_LEAST_OUTAGE_S: Final = 1e-3
# Lengths of windows that are tried, each this many times as long as the one before.
_WINDOW_STEP: Final = 1.05
# Share of the windows of the estimated length that decide.
_LIKELY: Final = 0.8
_Test = TypeVar("_Test", bound="Hashable")


class IntervalMethod(StrEnum):
    """The source of an interval's bounds."""

    BLOCKS = "blocks"
    """The variance between blocks of seconds; never tighter than for independent requests."""
    EXACT = "exact"
    """The bounds of independent requests, because a window of one second has no blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Two one-sided bounds of an attainment, each holding with the stated confidence.

    Args:
        lower: lower bound of the attainment.
        uppers: upper bounds of the attainment. `uppers[0]` is the bound for one class;
            `uppers[k]` is the bound if k + 1 classes share the error probability, for Holm's
            step-down tests.
        confidence: confidence of each bound alone, 0.5 … 1; both together hold less often.
        effective: effective sample size, the number of independent requests with the same
            attainment that would have the same variance.
        method: the source of the bounds.

    Raises:
        ValueError: not 0 ≤ lower ≤ uppers[0] ≤ uppers[1] ≤ … ≤ 1.
    """

    lower: float
    uppers: tuple[float, ...]
    confidence: float
    effective: float
    method: IntervalMethod

    def __post_init__(self) -> None:
        bounds = (0.0, self.lower, *self.uppers, 1.0)
        if not self.uppers or any(a > b for a, b in pairwise(bounds)):
            raise ValueError(f"bounds {bounds} of an attainment are not in order")

    @property
    def upper(self) -> float:
        """The upper bound for this class alone."""
        return self.uppers[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScale:
    """The residuals of a window, cut into blocks of one length; see `block_scales`.

    Args:
        blocks: number of blocks; 1 if there are no residuals.
        variance: variance of the window's sum, from the spread between blocks.
        highest: the largest sum of residuals in a block at any offset.
        lowest: the smallest sum of residuals in a block at any offset.
    """

    blocks: int
    variance: float
    highest: float
    lowest: float

    def inflated(self, confidence: float) -> float:
        """Return the variance times (t/z)², which corrects for its estimate from few blocks."""
        if self.blocks < 2:
            return self.variance
        level = max(confidence, _MIN_INFLATED)
        inflation = student_t_quantile(level, self.blocks - 1) / normal_quantile(level)
        return self.variance * inflation**2


class Exposure:
    """The part of a window in which an outage would be seen, because a request arrives during it.

    If all requests of a class arrive within a few seconds of each minute, most outages hit none of
    them. A window without a miss then excludes less than its length suggests. The requests of a
    second are taken to be evenly spread over it.

    Args:
        total: requests of each second of the window, at least one in all.
        runs: number of runs of which these are the sums.
    """

    def __init__(self, total: Sequence[int], *, runs: int = 1) -> None:
        busy = [second for second, requests in enumerate(total) if requests]
        # After the last second, the first one follows.
        ends = [*busy[1:], busy[0] + len(total)]
        self._gaps = Counter(end - second for second, end in zip(busy, ends, strict=True))
        self._rates = Counter(max(1.0, total[second] / runs) for second in busy)

    def seconds(self, outage_s: float) -> float:
        """Return how long the instants are, together, at which a visible outage can begin.

        It is the length of the window if each period of `outage_s` has a request.
        """
        if outage_s < 1:
            return sum(n * min(rate * outage_s, 1.0) for rate, n in self._rates.items())
        return sum(n * min(gap, outage_s) for gap, n in self._gaps.items())

    def missed_share(self, outage_s: float) -> float:
        """Return the share of requests that miss if there was one visible outage on average.

        It is outage_s / window if requests arrive all the time, and larger the rarer they are.
        """
        return outage_s / self.seconds(outage_s) if outage_s else 0.0


class WindowEstimate:
    """Bounds of one class's attainment in one window, from its per-second counts.

    Args:
        counts: judged requests of the window.
        outage_s: length of the longest outage that both bounds take into account.
        runs: number of runs whose counts were added up. An outage hits one of them.
    """

    def __init__(self, counts: SecondCounts, *, outage_s: float = 0.0, runs: int = 1) -> None:
        attainment = counts.attainment
        self._seconds = len(counts.total)
        self._outage_s = outage_s
        self._runs = runs
        self._total = attainment.total
        self._good = attainment.good
        self._missed = attainment.total - attainment.good
        self._exposure = Exposure(counts.total, runs=runs) if attainment.total else None
        self._scales = tuple(_miss_scales(counts, outage_s))
        # Variance of the number of misses among independent requests.
        self._independent = self._missed * self._good / self._total if self._total else 0.0

    def interval(self, confidence: float = DEFAULT_CONFIDENCE, *, classes: int = 1) -> Interval:
        """Return both bounds of the attainment.

        Args:
            confidence: confidence of each one-sided bound, at least 0.5 and below 1.
            classes: maximum number of classes that may share the permitted error probability of the
                upper bound.

        Raises:
            ValueError: the confidence is out of bounds.
        """
        if not LEAST_CONFIDENCE <= confidence < 1:
            raise ValueError(f"a confidence of {confidence} is out of bounds; 0.5 ≤ confidence < 1")
        uppers = [self._upper(1 - (1 - confidence) / share) for share in range(1, classes + 1)]
        return Interval(
            lower=min(self._lower(confidence, self._outage_s), self._exact_lower(confidence)),
            # Keep the bounds in order despite rounding errors.
            uppers=tuple(accumulate(uppers, max)),
            confidence=confidence,
            effective=self._effective(confidence),
            method=IntervalMethod.BLOCKS if self._seconds > 1 else IntervalMethod.EXACT,
        )

    def tolerated_outage_s(
        self, objective: Fraction, confidence: float = DEFAULT_CONFIDENCE
    ) -> float:
        """Return the longest unobserved outage with which the objective would still be met.

        All requests that arrive during an outage are missed. Without misses the result is about
        window · runs · (1 − objective) / 3 if requests arrive all the time. It is 0 if the
        objective is not met even without an outage.
        """
        if self._lower(confidence, 0.0) < objective:
            return 0.0
        share = float(1 - objective)
        if not self._missed:
            return self._excluded_outage_s(share / -math.log(1 - confidence))
        low, high = 0.0, self._seconds * self._runs * share
        while high - low > _OUTAGE_PRECISION * high:
            middle = (low + high) / 2
            if self._lower(confidence, middle) >= objective:
                low = middle
            else:
                high = middle
        return low

    def _excluded_outage_s(self, share: float) -> float:
        """Return the longest outage of which `missed_share` is at most `share`."""
        assert self._exposure is not None, "a window without requests excludes nothing"
        longest_s = share * self._seconds * self._runs
        while longest_s >= _LEAST_OUTAGE_S:
            # The exposure is concave, so these values fall towards the solution.
            next_s = share * self._exposure.seconds(longest_s) * self._runs
            if next_s > longest_s * (1 - _OUTAGE_PRECISION**2):
                return next_s
            longest_s = next_s
        return 0.0

    def deciding_window_s(
        self, objective: Fraction, confidence: float = DEFAULT_CONFIDENCE, *, classes: int = 1
    ) -> float | None:
        """Return the length of a window that would probably decide about the objective.

        The estimate assumes that requests and misses continue as in this window. Their numbers and
        the variance of the misses then grow with the window, and the worst block with its square
        root. The bounds of the longer window are tested with a number of requests and of misses
        that four of five such windows reach.

        Args:
            objective: share of requests that must meet their targets.
            confidence: confidence of each one-sided bound.
            classes: number of classes that share the permitted error probability of the upper
                bound.

        Returns:
            At least the length of this window; None if no window of up to `LONGEST_WINDOW_S` would
            probably decide, as when the share of requests lies close to the objective.
        """
        longest = LONGEST_WINDOW_S / self._seconds
        if longest < 1 or not self._total:
            return None
        steps = range(int(math.log(longest, _WINDOW_STEP)) + 1)
        decides = partial(self._decides, objective, confidence, classes)
        step = bisect_left(steps, True, key=lambda number: decides(_WINDOW_STEP**number))
        return None if step == len(steps) else self._seconds * _WINDOW_STEP**step

    def _decides(self, objective: Fraction, confidence: float, classes: int, longer: float) -> bool:
        """True if a window that is `longer` times as long would probably decide."""
        likely = normal_quantile(_LIKELY)
        total = longer * self._total
        total -= likely * math.sqrt(total)
        allowed = total * float(1 - objective)
        if Fraction(self._missed, self._total) < 1 - objective:
            most = self._most_missed(confidence, self._outage_s, longer=longer, deviation=likely)
            return most <= allowed
        corrected = 1 - (1 - confidence) / classes
        fewest = self._fewest_missed(corrected, longer=longer, deviation=likely)
        exact = beta_quantile(corrected, longer * self._good + 1, longer * self._missed)
        return fewest > allowed and exact < objective

    def _lower(self, confidence: float, outage_s: float) -> float:
        if self._exposure is None:
            return 0.0
        most_missed = self._most_missed(confidence, outage_s)
        return min(max(0.0, 1 - most_missed / self._total), self._good / self._total)

    def _most_missed(
        self, confidence: float, outage_s: float, *, longer: float = 1.0, deviation: float = 0.0
    ) -> float:
        """Return the upper bound on the number of misses, by the widest scale.

        Args:
            confidence: confidence of the bound.
            outage_s: length of an unseen outage, which counts once.
            longer: factor by which the window is longer than this one.
            deviation: standard errors by which there are more misses than expected.
        """
        assert self._exposure is not None, "a window without requests has no bounds"
        missed_share = self._exposure.missed_share(outage_s) / self._runs
        min_unseen = max(1.0, missed_share * self._total)
        most = 0.0
        for scale in self._scales:
            # Count the worst block once more, because the true rate may include another such block
            # that did not occur in the window by chance.
            unseen = max(scale.highest * math.sqrt(longer), min_unseen)
            spread = longer * self._variance(scale, confidence)
            mean = longer * self._missed + deviation * math.sqrt(spread) + unseen
            most = max(most, _gamma_quantile(confidence, mean, spread + unseen**2))
        return most

    def _exact_lower(self, confidence: float) -> float:
        """Return the exact lower bound. The gamma bound may exceed it at confidences near 50 %."""
        if not self._good:
            return 0.0
        return beta_quantile(1 - confidence, self._good, self._missed + 1)

    def _upper(self, confidence: float) -> float:
        if self._missed == 0:
            return 1.0
        fewest_missed = self._fewest_missed(confidence)
        # The upper gamma bound alone would be slightly tighter than the exact one.
        exact = beta_quantile(confidence, self._good + 1, self._missed)
        return max(1 - fewest_missed / self._total, exact, self._good / self._total)

    def _fewest_missed(
        self, confidence: float, *, longer: float = 1.0, deviation: float = 0.0
    ) -> float:
        """Return the lower bound on the number of misses, by the widest scale.

        Args:
            confidence: confidence of the bound.
            longer: factor by which the window is longer than this one.
            deviation: standard errors by which there are fewer misses than expected.
        """
        fewest = math.inf
        for scale in self._scales:
            variance = longer * self._variance(scale, confidence)
            mean = longer * self._missed - deviation * math.sqrt(variance)
            bound = _gamma_quantile(1 - confidence, mean, variance) if mean > 0 else 0.0
            fewest = min(fewest, bound)
        return fewest

    def _effective(self, confidence: float) -> float:
        largest = max(self._variance(scale, confidence) for scale in self._scales)
        return self._total * self._independent / largest if largest else float(self._total)

    def _variance(self, scale: BlockScale, confidence: float) -> float:
        return max(scale.inflated(confidence), self._independent)


def count_blocks(seconds: int) -> int:
    """Return the number of blocks at the finest scale of a window."""
    return min(seconds, _BLOCK_COUNTS[0])


def requests_needed(objective: Fraction, confidence: float = DEFAULT_CONFIDENCE) -> int:
    """Return the minimum number of requests that can show the objective if all meet their targets.

    Without a miss, the upper bound on the misses is −ln(1 − confidence), about 3 at 95 % (the rule
    of three). An objective of 99 % therefore requires 300 requests.
    """
    return math.ceil(-math.log(1 - confidence) / float(1 - objective))


def find_below(limits: Mapping[_Test, tuple[Fraction, Sequence[float]]]) -> dict[_Test, int]:
    """Return the tests whose upper bounds lie below their limits.

    This is Holm's procedure on bounds. The open tests share the permitted error probability.
    Every test whose upper bound lies below its limit is decided. The remaining ones are then
    tested again, with a larger share for each.

    Args:
        limits: for each test its limit and its upper bounds; `uppers[k]` is the bound if k + 1
            tests share the error probability.

    Returns:
        For each of these tests, the number of tests that shared the error probability when its
        bound was below its limit.

    Source: Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979.
    """
    still_open = dict(limits)
    found: dict[_Test, int] = {}
    while still_open:
        sharers = len(still_open)
        below = [key for key, (limit, uppers) in still_open.items() if uppers[sharers - 1] < limit]
        if not below:
            break
        for key in below:
            found[key] = sharers
            del still_open[key]
    return found


def block_scales(
    residuals: Sequence[int], total: Sequence[int], unit: int, *, outage_s: float = 0.0
) -> Iterator[BlockScale]:
    """Divide a window into blocks at each scale.

    Periods without requests that are longer than a block of the finest scale are left out first.
    Otherwise a class that sends for a minute of an hour would fill one block, whose residuals add
    up to 0 whatever happened in this minute.

    In fewer than 120 s, the blocks of the finest scale are single seconds. If a declared outage is
    longer than the blocks of the coarsest scale, there is one more scale with blocks of at least
    its length, because shorter blocks would hide that its misses belong together.

    Args:
        residuals: for each second, its count less its expected share, times `unit`; they add up
            to 0. As integers, their sums are exact and do not depend on the order.
        total: requests of each second.
        unit: divisor of the residuals, above 0.
        outage_s: length of the longest declared outage.
    """
    kept = _without_long_gaps(total)
    if has_gaps := len(kept) < len(total):
        residuals = [residuals[second] for second in kept]
        outage_s = _most_within(kept, outage_s)
    seconds = len(residuals)
    if seconds < 2 or not any(residuals):
        yield BlockScale(blocks=1, variance=0.0, highest=0.0, lowest=0.0)
        return
    sums = list(accumulate(residuals, initial=0))
    finest = count_blocks(seconds)
    block_counts = [finest, *(b for b in _BLOCK_COUNTS if b < finest)]
    if outage_s * block_counts[-1] > seconds:
        block_counts.append(max(2, int(seconds / outage_s)))
    for blocks in block_counts:
        length = seconds // blocks
        # So few seconds may be left that those behind equal blocks would be a large part of them.
        ends = [b * seconds // blocks if has_gaps else b * length for b in range(blocks + 1)]
        # All residuals add up to 0, so the sums continue around the end of the window.
        offset_sums = list(map(sub, [*sums[length:], *sums[1:length]], sums))
        block_sums = [(sums[end] - sums[begin]) / unit for begin, end in pairwise(ends)]
        yield BlockScale(
            blocks=blocks,
            variance=_sum_variance(block_sums) * seconds / ends[-1],
            highest=max(offset_sums) / unit,
            lowest=min(offset_sums) / unit,
        )


def _miss_scales(counts: SecondCounts, outage_s: float) -> Iterator[BlockScale]:
    """Divide the misses of a window into blocks at each scale."""
    good, total = counts.attainment.good, counts.attainment.total
    residuals = [good * n - total * g for g, n in zip(counts.good, counts.total, strict=True)]
    return block_scales(residuals, counts.total, max(1, total), outage_s=outage_s)


def _without_long_gaps(total: Sequence[int]) -> Sequence[int]:
    """Return the seconds of a window but those of long periods without requests."""
    longest = max(1, len(total) // _BLOCK_COUNTS[0])
    kept: list[int] = []
    begin = 0
    for second, requests in enumerate(total):
        if requests:
            kept += range(second if second - begin > longest else begin, second + 1)
            begin = second + 1
    if len(total) - begin <= longest:
        kept += range(begin, len(total))
    return kept


def _most_within(seconds: Sequence[int], length_s: float) -> float:
    """Return how much of a period of this length the ascending seconds fill at most."""
    ends = (bisect_left(seconds, first + math.ceil(length_s)) for first in seconds)
    return min(length_s, max((end - start for start, end in enumerate(ends)), default=0))


def _sum_variance(values: Sequence[float]) -> float:
    """Return the variance of the sum of independent values, estimated from their spread."""
    count = len(values)
    mean = math.fsum(values) / count
    return math.fsum((value - mean) ** 2 for value in values) * count / (count - 1)


def _gamma_quantile(p: float, mean: float, variance: float) -> float:
    """Return the p-quantile of the gamma distribution with this mean and variance."""
    if variance == 0:
        return mean
    return variance / (2 * mean) * chi_square_quantile(p, 2 * mean**2 / variance)
