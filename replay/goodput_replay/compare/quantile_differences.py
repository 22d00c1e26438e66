"""Differences of latency quantiles between two runs, with intervals.

Latencies of neighbouring requests depend on each other, so blocks of seconds are resampled, not
requests. If the runs are paired, the same blocks are drawn for both. Blocks of several lengths are
tried, and the widest bounds are used. The latencies are counted in bins for each block, so that the
cost of a draw does not grow with the number of requests. They are read in several passes, so that
memory does not grow with it either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from goodput_replay.statistics.rank_search import RankSearch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LatencySource", "QuantileDifference", "quantile_differences"]

_BLOCK_COUNTS: Final = (60, 30, 15)
_DRAWS: Final = 500
_BINS: Final = 1024
_MIN_WINDOW_S: Final = 20
_MIN_BEYOND: Final = 5  # requests above the quantile
_SEED: Final = 20_261_123
LatencyParts = Iterable[tuple[int, NDArray[np.float64], NDArray[np.int64]]]
"""Parts of several groups of latencies: the group, the latencies, and the second of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySource:
    """Latencies of one run.

    Args:
        read: returns the latencies in parts, the same in each pass; latencies that are not finite
            are left out.
        window_s: length of the window.
    """

    read: Callable[[], LatencyParts]
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
    baseline: LatencySource,
    candidate: LatencySource,
    groups: int,
    levels: Sequence[float],
    *,
    confidence: float,
    paired: bool,
) -> list[list[QuantileDifference] | None]:
    """Return the differences of quantiles of several groups of latencies.

    Args:
        baseline: latencies of the first run.
        candidate: latencies of the second run.
        groups: number of groups.
        levels: quantiles, such as 0.99.
        confidence: one-sided confidence of each bound.
        paired: True if the runs served the same trace.

    Returns:
        One difference for each level of each group; None if a run has no such latency.
    """
    sources = (baseline, candidate)
    search = _QuantileSearch(groups, levels)
    while not search.finished:
        for number, source in enumerate(sources):
            for group, values_ns, _ in source.read():
                search.add(number, group, values_ns)
        search.end_pass()
    shortest_s = min(source.window_s for source in sources)
    block_counts = sorted({min(shortest_s, count) for count in _BLOCK_COUNTS})
    edges = [search.edges(group) for group in range(groups)]
    tables = [
        [[_BlockTable(blocks, len(each)) for blocks in block_counts] for each in edges]
        for _ in sources
    ]
    for source, by_group in zip(sources, tables, strict=True):
        for group, values_ns, seconds in source.read():
            measured = np.isfinite(values_ns)
            bins = np.searchsorted(edges[group], values_ns[measured])
            for table in by_group[group]:
                table.add(bins, seconds[measured], source.window_s)
    return [
        _compare(
            search, group, [by_group[group] for by_group in tables], levels,
            confidence=confidence, paired=paired, shortest_s=shortest_s,
        )
        for group in range(groups)
    ]  # fmt: skip


class _QuantileSearch:
    """Finds the quantiles of both runs, and the edges of the bins of their latencies.

    Args:
        groups: number of groups.
        levels: quantiles to find.
    """

    def __init__(self, groups: int, levels: Sequence[float]) -> None:
        tail = 1 - np.logspace(-5, 0, _BINS // 2)
        self._edge_levels = np.unique(np.concatenate((np.linspace(0, 1, _BINS // 2), tail)))
        self._levels = np.array(levels)
        self._groups = groups
        self._search = RankSearch(3 * groups, self._choose_ranks)

    @property
    def finished(self) -> bool:
        """True if no further pass is needed."""
        return self._search.finished

    def add(self, run: int, group: int, values_ns: NDArray[np.float64]) -> None:
        """Add latencies of a run, numbered 0 or 1."""
        self._search.add(run * self._groups + group, values_ns)
        self._search.add(2 * self._groups + group, values_ns)

    def end_pass(self) -> None:
        """End a pass over the latencies of both runs."""
        self._search.end_pass()

    def count(self, run: int, group: int) -> int:
        """Return the number of latencies of a run."""
        return self._search.count(run * self._groups + group)

    def quantiles_ns(self, run: int, group: int) -> list[float]:
        """Return the quantiles of a run at all levels."""
        quantiles: list[float] = self._search.values(run * self._groups + group).tolist()
        return quantiles

    def edges(self, group: int) -> NDArray[np.float64]:
        """Return the upper edges of the bins: quantiles of both runs, dense in the upper tail."""
        edges: NDArray[np.float64] = np.unique(self._search.values(2 * self._groups + group))
        return edges

    def _choose_ranks(self, counts: Sequence[int]) -> list[NDArray[np.int64]]:
        return [
            find_ranks(count, self._levels if key < 2 * self._groups else self._edge_levels)
            for key, count in enumerate(counts)
        ]


def find_ranks(count: int, levels: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the ranks, from 0, that numpy's method "inverted_cdf" reads for these quantiles."""
    if not count:
        return np.empty(0, dtype=np.int64)
    return np.maximum(np.ceil(count * levels - 1), 0).astype(np.int64)


class _BlockTable:
    """Counts of the latencies of one group in each block and bin.

    Args:
        blocks: number of blocks of seconds.
        bins: number of bins.

    Attributes:
        counts: the counts; shape [blocks, bins].
    """

    def __init__(self, blocks: int, bins: int) -> None:
        self.counts: NDArray[np.int64] = np.zeros((blocks, bins), dtype=np.int64)

    def add(self, bins: NDArray[np.int64], seconds: NDArray[np.int64], window_s: int) -> None:
        """Count latencies by their bins and their seconds of the window."""
        num_blocks, num_bins = self.counts.shape
        blocks = np.minimum(seconds * num_blocks // window_s, num_blocks - 1)
        places = blocks * num_bins + np.minimum(bins, num_bins - 1)
        self.counts += np.bincount(places, minlength=self.counts.size).reshape(self.counts.shape)


def _compare(
    search: _QuantileSearch,
    group: int,
    tables: Sequence[Sequence[_BlockTable]],
    levels: Sequence[float],
    *,
    confidence: float,
    paired: bool,
    shortest_s: int,
) -> list[QuantileDifference] | None:
    """Return the differences of one group; the tables are those of both runs."""
    least = min(search.count(run, group) for run in (0, 1))
    if not least:
        return None
    edges = search.edges(group)
    rng = np.random.default_rng(_SEED)
    spreads = []
    for pair in zip(*tables, strict=True):
        blocks = len(pair[0].counts)
        draws = [rng.multinomial(blocks, np.full(blocks, 1 / blocks), _DRAWS) for _ in pair]
        if paired:
            draws[1] = draws[0]
        # Floating point, because numpy multiplies matrices of integers slowly.
        counts = [
            np.cumsum(d @ table.counts.astype(np.float64), axis=1)
            for d, table in zip(draws, pair, strict=True)
        ]
        spreads.append([_spread(counts, edges, level, confidence) for level in levels])
    results = []
    quantiles = zip(*(search.quantiles_ns(run, group) for run in (0, 1)), strict=True)
    for number, (level, (first, second)) in enumerate(zip(levels, quantiles, strict=True)):
        bounds = None
        if shortest_s >= _MIN_WINDOW_S and least * (1 - level) >= _MIN_BEYOND:
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


def _rank(cumulated: NDArray[np.float64], level: float) -> NDArray[np.int64]:
    """Return the bin of the nearest-rank quantile of each draw; shape [num_draws]."""
    ranks = np.maximum(1, np.ceil(level * cumulated[:, -1]))
    found = (cumulated < ranks[:, None]).sum(axis=1)
    bins: NDArray[np.int64] = np.minimum(found, cumulated.shape[1] - 1)
    return bins
