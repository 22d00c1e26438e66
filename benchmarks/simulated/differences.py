"""The product's bounds of a gate, computed for many trials at once.

They are the bounds of the difference between two builds, and of the candidate's attainment over
several runs. A test proves that they are those of `goodput_core.slo`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from benchmarks.simulated.intervals import (
    Scales,
    block_sums,
    bounds,
    has_long_gap,
    missed_share,
    offset_sums,
)
from benchmarks.simulated.processes import Windows
from scipy import stats

from goodput_core.slo.intervals import DEFAULT_CONFIDENCE
from goodput_core.slo.pairs import DifferenceEstimate, RunSpread
from goodput_core.slo.pairs import PairCounts as ProductCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.simulated.pairs import PairCounts
    from benchmarks.simulated.processes import Floats
    from numpy.typing import NDArray

__all__ = ["Differences", "all_pass", "any_fails", "attainment_bounds"]

_STEPS: Final = 45


class Differences:
    """The differences of one class in many trials.

    Args:
        counts: the outcomes, `[trials, pairs, seconds]`.
        history: earlier pairs of one build. One pair without a history is taken to be
            deterministic.
        outage_s: declared longest outage.
    """

    def __init__(
        self, counts: PairCounts, history: PairCounts | None = None, *, outage_s: int = 0
    ) -> None:
        change, total = counts.only_b - counts.only_a, counts.total
        self.pairs = total.shape[1]
        pair_total, pair_change = total.sum(axis=2), change.sum(axis=2)
        self.gained = counts.only_b.sum(axis=(1, 2))
        self.lost = counts.only_a.sum(axis=(1, 2))
        self.total = pair_total.sum(axis=1)
        self._weight = self.pairs * pair_total.min(axis=1) / self.total
        shares = pair_change / pair_total
        self.difference = shares.mean(axis=1)
        spread = _spread(history, counts)
        self._between, self._degrees = _pooled_variance(shares, *spread)
        self._between /= self.pairs
        residual = change / pair_total[..., None] - (shares / pair_total)[..., None] * total
        self._within = [
            (blocks, sums.var(axis=-1, ddof=1) * blocks * scale)
            for blocks, scale, sums in block_sums(residual, outage_s=outage_s)
        ]
        cumulated = np.cumsum(residual, axis=-1)
        excess = []
        for blocks, _ in self._within:
            sums = offset_sums(cumulated, residual.shape[-1] // blocks)
            excess.append(sums.max(axis=(1, 2)) + sums.min(axis=(1, 2)))
        self._excess = np.stack(excess) / self.pairs
        self._outage = missed_share(total, outage_s).max(axis=1) / self.pairs
        # `block_scales` leaves out long periods without requests, of another length in each trial.
        self._with_gaps = {
            trial: _estimate(counts, history, trial, outage_s)
            for trial in np.flatnonzero(has_long_gap(total.sum(axis=1))).tolist()
        }

    def bound(self, confidence: float, sign: int) -> Floats:
        """Return the upper bounds for the sign 1, and the lower bounds for −1."""
        z = stats.norm.ppf(confidence)
        inflated = [
            variance * (stats.t.ppf(confidence, blocks - 1) / z) ** 2
            for blocks, variance in self._within
        ]
        within = np.max(inflated, axis=0).sum(axis=1) / self.pairs**2
        unseen = np.maximum(1 / self.total, (sign * self._excess).max(axis=0))
        if sign < 0:
            unseen = np.maximum(unseen, self._outage)
        mean = (self.gained - self.lost) / self.total
        # Without degrees of freedom, the variance is 0.
        between = stats.t.ppf(confidence, max(1, self._degrees)) * np.sqrt(self._between)
        blocks = unseen + z * np.sqrt(within + unseen**2)
        gained, lost, total = (n * self._weight for n in (self.gained, self.lost, self.total))
        independent = np.abs(_tango(gained, lost, total, sign * z) - mean)
        distance = np.maximum(np.maximum(between, blocks), independent)
        reached: Floats = np.clip(self.difference + sign * distance, -1, 1)
        for trial, estimate in self._with_gaps.items():
            interval = estimate.interval(confidence)
            reached[trial] = interval.upper if sign > 0 else interval.lower
        return reached


def _estimate(
    counts: PairCounts, history: PairCounts | None, trial: int, outage_s: int
) -> DifferenceEstimate:
    """Return the product's estimate of one trial."""
    spread = None
    if history is not None:
        missed = float(history.missed[trial].mean())
        spread = RunSpread.of(history.difference[trial].tolist(), missed)
        spread = spread.at(float(counts.missed[trial, 0]))
    columns = (counts.only_b[trial], counts.only_a[trial], counts.total[trial])
    return DifferenceEstimate(
        [
            ProductCounts(gained=gained.tolist(), lost=lost.tolist(), total=total.tolist())
            for gained, lost, total in zip(*columns, strict=True)
        ],
        deterministic=history is None and counts.total.shape[1] == 1,
        history=spread,
        outage_s=outage_s,
    )


def any_fails(
    classes: Sequence[Differences], *, margin: float, confidence: float
) -> NDArray[np.bool_]:
    """Return True for each trial that fails by a difference, by Holm's procedure.

    Every class has one more test, that of its objective, which is taken to be far from failing.

    Args:
        classes: the differences of each class.
        margin: the largest acceptable difference.
        confidence: confidence of all tests together.

    Returns:
        bool `[trials]`.
    """
    # The other steps of the procedure fail further classes only after a first one.
    share = (1 - confidence) / (2 * len(classes))
    failed: NDArray[np.bool_] = np.any(
        [one.bound(1 - share, 1) < -margin for one in classes], axis=0
    )
    return failed


def all_pass(
    classes: Sequence[Differences], *, margin: float, confidence: float
) -> NDArray[np.bool_]:
    """Return True for each trial in which every difference passes, bool `[trials]`."""
    passed: NDArray[np.bool_] = np.all(
        [one.bound(confidence, -1) >= -margin for one in classes], axis=0
    )
    return passed


def attainment_bounds(
    counts: PairCounts, history: PairCounts | None = None, *, outage_s: int
) -> tuple[Floats, Floats]:
    """Return the bounds of the second build's attainment over several runs of the same window.

    Args:
        counts: the outcomes, `[trials, pairs, seconds]`.
        history: earlier pairs of one build.
        outage_s: declared longest outage.

    Returns:
        The lower and the upper bounds, float64 `[trials]`.
    """
    windows = counts.second_build
    runs = windows.total.shape[1]
    added = Windows(total=windows.total.sum(axis=1), missed=windows.missed.sum(axis=1))
    found = bounds(Scales(added, outage_s=outage_s, runs=runs))
    shares = 1 - windows.missed.sum(axis=2) / windows.total.sum(axis=2)
    # A difference between two runs has twice the variance of a run.
    variance, degrees = _pooled_variance(shares, *_spread(history, counts), factor=0.5)
    reach = stats.t.ppf(DEFAULT_CONFIDENCE, max(1, degrees)) * np.sqrt(variance / runs)
    mean = shares.mean(axis=1)
    return (
        np.minimum(found.lower, np.clip(mean - reach, 0, 1)),
        np.maximum(found.upper, np.clip(mean + reach, 0, 1)),
    )


def _spread(history: PairCounts | None, judged: PairCounts) -> tuple[Floats | float, int]:
    """Return the variance between runs with the misses of the judged ones, and its degrees.

    `goodput_core.slo.pairs.RunSpread` explains the rule.
    """
    if history is None:
        return 0.0, 0
    known, now = history.missed.mean(axis=0), judged.missed[0]
    variance = history.difference.var(axis=1, ddof=1)
    more = np.divide(now, known, out=np.ones_like(now), where=known > 0)
    least = np.where(now > 2 * known, 2 * now**2, 0)
    return np.maximum(variance * np.maximum(1, more) ** 2, least), history.total.shape[1] - 1


def _pooled_variance(
    values: Floats, known: Floats | float, degrees: int, *, factor: float = 1.0
) -> tuple[Floats, int]:
    """Return the variance within the rows, and its degrees of freedom; 0 without any.

    Args:
        values: float64 `[trials, values]`.
        known: earlier variance, float64 `[trials]`.
        degrees: its degrees of freedom.
        factor: factor of the earlier variance.
    """
    squares = values.var(axis=1) * values.shape[1] + known * factor * degrees
    degrees += values.shape[1] - 1
    return squares / max(1, degrees), degrees


def _tango(gained: Floats, lost: Floats, total: Floats, target: float) -> Floats:
    """Return Tango's score bounds, the upper ones if the quantile `target` is above 0."""
    mean = (gained - lost) / total
    low = np.where(target > 0, mean, -1.0) * np.ones(len(total))
    high = np.where(target > 0, 1.0, mean) * np.ones(len(total))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        b = (2 * total - gained + lost) * middle - gained - lost
        root = np.sqrt(np.maximum(0, b * b + 8 * total * lost * middle * (1 - middle)))
        variance = total * ((root - b) / (2 * total) + middle * (1 - middle))
        distance = gained - lost - total * middle
        # The score decreases; it is infinite where the variance is 0.
        spread = np.sqrt(np.maximum(variance, 0))
        above = distance > -target * spread
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.where(target > 0, high, low)
