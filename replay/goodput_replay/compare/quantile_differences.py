"""Differences of latency quantiles between two runs, with intervals.

Latencies of neighbouring requests depend on each other, so blocks of seconds are resampled, not
requests. If the runs are paired, the same blocks are drawn for both. Blocks of several lengths are
tried, and the widest bounds are used. The latencies are counted in bins for each block, so that the
cost of a draw does not grow with the number of requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["LatencySample", "QuantileDifference", "quantile_differences"]

_BLOCK_COUNTS: Final = (60, 30, 15)
_DRAWS: Final = 500
_BINS: Final = 1024
_MIN_WINDOW_S: Final = 20
_MIN_BEYOND: Final = 5  # requests above the quantile
_SEED: Final = 20_261_123


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySample:
    """Finite latencies of one run.

    Args:
        values_ns: the latencies; shape [num_requests].
        seconds: second of the window of each request.
        window_s: length of the window.
    """

    values_ns: NDArray[np.float64]
    seconds: NDArray[np.int64]
    window_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileDifference:
    """One quantile in both runs and the bounds of its difference, nanoseconds.

    Args:
        baseline_ns: quantile of the baseline, nearest rank.
        candidate_ns: quantile of the candidate.
        bounds_ns: lower and upper bound of candidate less baseline; None if a window is too short
            or has too few requests beyond the quantile.
    """

    baseline_ns: float
    candidate_ns: float
    bounds_ns: tuple[float, float] | None


def quantile_differences(
    baseline: LatencySample,
    candidate: LatencySample,
    levels: Sequence[float],
    *,
    confidence: float,
    paired: bool,
) -> list[QuantileDifference] | None:
    """Return the differences of quantiles.

    Args:
        baseline: latencies of the first run.
        candidate: latencies of the second run.
        levels: quantiles, such as 0.99.
        confidence: one-sided confidence of each bound.
        paired: True if the runs served the same trace.

    Returns:
        One difference for each level; None if a run has no latency.
    """
    if not len(baseline.values_ns) or not len(candidate.values_ns):
        return None
    samples = (baseline, candidate)
    edges = _edges(baseline.values_ns, candidate.values_ns)
    rng = np.random.default_rng(_SEED)
    spreads = []
    shortest_s = min(sample.window_s for sample in samples)
    for blocks in sorted({min(shortest_s, count) for count in _BLOCK_COUNTS}):
        tables = [_count(sample, edges, blocks) for sample in samples]
        draws = [rng.multinomial(blocks, np.full(blocks, 1 / blocks), _DRAWS) for _ in tables]
        if paired:
            draws[1] = draws[0]
        counts = [np.cumsum(d @ t, axis=1) for d, t in zip(draws, tables, strict=True)]
        spreads.append([_spread(counts, edges, level, confidence) for level in levels])
    results = []
    for number, level in enumerate(levels):
        first, second = (
            float(np.quantile(sample.values_ns, level, method="inverted_cdf")) for sample in samples
        )
        beyond = min(len(sample.values_ns) for sample in samples) * (1 - level)
        bounds = None
        if shortest_s >= _MIN_WINDOW_S and beyond >= _MIN_BEYOND:
            bounds = (
                second - first + min(0.0, *(spread[number][0] for spread in spreads)),
                second - first + max(0.0, *(spread[number][1] for spread in spreads)),
            )
        results.append(QuantileDifference(baseline_ns=first, candidate_ns=second, bounds_ns=bounds))
    return results


def _spread(
    counts: Sequence[NDArray[np.float64]],
    edges: NDArray[np.float64],
    level: float,
    confidence: float,
) -> tuple[float, float]:
    """Return the bounds of a resampled difference, relative to its median."""
    first, second = (edges[_rank(one, level)] for one in counts)
    # A draw of blocks without a request has no quantile.
    drawn = (counts[0][:, -1] > 0) & (counts[1][:, -1] > 0)
    difference = (second - first)[drawn]
    low, high = np.quantile(difference - np.median(difference), [1 - confidence, confidence])
    return float(low), float(high)


def _edges(*samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the upper edges of the bins: quantiles of all values, dense in the upper tail."""
    pooled = np.concatenate(samples)
    tail = 1 - np.logspace(-5, 0, _BINS // 2)
    levels = np.unique(np.concatenate((np.linspace(0, 1, _BINS // 2), tail)))
    edges: NDArray[np.float64] = np.unique(np.quantile(pooled, levels, method="inverted_cdf"))
    return edges


def _count(sample: LatencySample, edges: NDArray[np.float64], blocks: int) -> NDArray[np.float64]:
    """Count the values in each block and bin; shape [blocks, num_bins]."""
    block = np.minimum(sample.seconds * blocks // sample.window_s, blocks - 1)
    bins = np.minimum(np.searchsorted(edges, sample.values_ns), len(edges) - 1)
    counts = np.bincount(block * len(edges) + bins, minlength=blocks * len(edges))
    # Floating point, because numpy multiplies matrices of integers slowly.
    table: NDArray[np.float64] = counts.reshape(blocks, len(edges)).astype(np.float64)
    return table


def _rank(cumulated: NDArray[np.float64], level: float) -> NDArray[np.int64]:
    """Return the bin of the nearest-rank quantile of each draw; shape [num_draws]."""
    ranks = np.maximum(1, np.ceil(level * cumulated[:, -1]))
    found = (cumulated < ranks[:, None]).sum(axis=1)
    bins: NDArray[np.int64] = np.minimum(found, cumulated.shape[1] - 1)
    return bins
