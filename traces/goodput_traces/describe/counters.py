"""Counters of a description, updated batch by batch in bounded memory, and their results.

They must not know files, nor how results are shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from goodput_traces.format.reader import Trace

__all__ = [
    "ArrivalCounts",
    "Arrivals",
    "DistinctCounter",
    "LengthCounts",
    "LengthSummary",
    "PrefixCounts",
    "PrefixReuse",
    "SessionCounts",
    "integers",
]

_Int64 = np.ndarray[Any, np.dtype[np.int64]]
_U64 = np.ndarray[Any, np.dtype[np.uint64]]
_TIME_BINS: Final = 60
_REMEMBERED: Final = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """Lengths in tokens; quantiles are nearest-rank and exact.

    Args:
        total: the sum over all rows.
        p50, p90, p99, max: quantiles.
        histogram: (lowest, highest, rows) per power of two, without empty ends.
    """

    total: int
    p50: int
    p90: int
    p99: int
    max: int
    histogram: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Arrivals on one clock.

    Args:
        span_ns: from the first to the last arrival.
        mean_rate_per_s: rows over the span; None if all arrive at once.
        peak_1s: most arrivals in any whole second, counted from the first arrival.
        peak_60s: most arrivals in any whole minute, counted likewise.
        longest_gap_ns: longest time without an arrival.
        longest_gap_start_ns: start of that gap, counted from the first arrival.
        gap_cv: standard deviation of the gaps between arrivals over their mean: 1 for a
            Poisson process, above it bursty; None with fewer than two gaps or no mean.
        distinct_instants: distinct arrival times.
        tied_rows: rows that share their instant with another row.
        largest_tie: most rows at one instant.
        histogram: arrivals in equal parts of the span.
    """

    span_ns: int
    mean_rate_per_s: float | None
    peak_1s: int
    peak_60s: int
    longest_gap_ns: int
    longest_gap_start_ns: int
    gap_cv: float | None
    distinct_instants: int
    tied_rows: int
    largest_tie: int
    histogram: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReuse:
    """Prompt blocks seen before: the upper bound of a prefix cache's hits.

    Args:
        blocks: hashes in all rows.
        distinct_blocks: distinct hashes.
        block_sizes: tokens per hash, as found.
        rows: rows with hashes.
        exact: True if `distinct_blocks` is counted, False if it is estimated.
    """

    blocks: int
    distinct_blocks: int
    block_sizes: tuple[int, ...]
    rows: int
    exact: bool

    @property
    def reused(self) -> float | None:
        """Share of blocks that occurred before, in an earlier row or the same one."""
        return None if self.blocks == 0 else max(0.0, 1 - self.distinct_blocks / self.blocks)


class DistinctCounter:
    """Count distinct 64-bit values in bounded memory.

    Exact up to the limit. Beyond it, only values whose scrambled form ends in enough zero bits are
    kept, and their number is scaled up: with a million kept, the error is a fraction of a per
    cent.

    Source: Wegman's adaptive sampling, in Flajolet, "On adaptive sampling", Computing 43, 1990.

    Args:
        limit: values remembered at most.
    """

    def __init__(self, limit: int = _REMEMBERED) -> None:
        self._limit = limit
        self._shift = 0
        self._seen: _U64 = np.empty(0, dtype=np.uint64)

    @property
    def exact(self) -> bool:
        """True if no value was left out."""
        return self._shift == 0

    @property
    def count(self) -> int:
        """Distinct values so far; an estimate unless `exact`."""
        return len(self._seen) << self._shift

    def add(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Add a batch of values, in any order, with repeats."""
        new = self._kept(_scramble(values.view(np.uint64)))
        # Sorted rather than `np.unique`, whose hash table is fifty times slower on these.
        merged = np.sort(np.concatenate((self._seen, new)))
        first = np.ones(len(merged), dtype=np.bool_)
        np.not_equal(merged[1:], merged[:-1], out=first[1:])
        self._seen = merged[first]
        while len(self._seen) > self._limit:
            self._shift += 1
            self._seen = self._kept(self._seen)

    def _kept(self, values: _U64) -> _U64:
        mask = np.uint64((1 << self._shift) - 1)
        return values[(values & mask) == 0] if self._shift else values


def _scramble(values: _U64) -> _U64:
    """One-to-one and well mixed: the finalizer of splitmix64."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class LengthCounts:
    """Count every length; at most `MAX_TOKENS` counters."""

    def __init__(self) -> None:
        self._counts: _Int64 = np.zeros(1, dtype=np.int64)

    def add(self, lengths: _Int64) -> None:
        """Count a batch of lengths, `[rows]`."""
        counts = np.bincount(lengths, minlength=len(self._counts)).astype(np.int64)
        counts[: len(self._counts)] += self._counts
        self._counts = counts

    def summary(self) -> LengthSummary:
        """Quantiles and histogram of everything counted; at least one length."""
        ranks = np.cumsum(self._counts)
        rows = int(ranks[-1])

        def nearest_rank(percent: int) -> int:
            return int(np.searchsorted(ranks, -(-rows * percent // 100)))

        present = np.flatnonzero(self._counts)
        total = sum(int(n) * int(self._counts[n]) for n in present)
        first, last = int(present[0]).bit_length(), int(present[-1]).bit_length()
        return LengthSummary(
            total=total,
            p50=nearest_rank(50),
            p90=nearest_rank(90),
            p99=nearest_rank(99),
            max=int(present[-1]),
            histogram=tuple(
                (1 << bits - 1, (1 << bits) - 1, int(self._counts[1 << bits - 1 : 1 << bits].sum()))
                for bits in range(first, last + 1)
            ),
        )


class ArrivalCounts:
    """Statistics of sorted arrival times, batch by batch."""

    def __init__(self, trace: Trace) -> None:
        self._first_ns = trace.first_ns
        self._span_ns = trace.last_ns - trace.first_ns
        self._bins: _Int64 = np.zeros(_TIME_BINS, dtype=np.int64)
        self._seconds = _PeakWindow(NS_PER_S)
        self._minutes = _PeakWindow(60 * NS_PER_S)
        self._last_ns: int | None = None
        self._rows = self._instants = self._tied = self._largest = 0
        self._tie = 0  # rows so far at the last instant
        self._gap_squares_s2 = 0.0
        self._longest_gap_ns = self._longest_gap_start_ns = 0

    def add(self, times: _Int64) -> None:
        """Count a batch of sorted arrivals in nanoseconds, `[rows]`."""
        since = times - self._first_ns
        self._rows += len(times)
        # Divided before multiplied: nanoseconds of months times 60 overflow 64 bits.
        width = self._span_ns // _TIME_BINS + 1
        self._bins += np.bincount(since // width, minlength=_TIME_BINS)
        self._seconds.add(since)
        self._minutes.add(since)
        gaps = np.diff(since if self._last_ns is None else [self._last_ns - self._first_ns, *since])
        if len(gaps):
            self._gap_squares_s2 += float(np.square(gaps / NS_PER_S).sum())
            longest = int(gaps.argmax())
            if gaps[longest] > self._longest_gap_ns:
                self._longest_gap_ns = int(gaps[longest])
                end_at = longest + (1 if self._last_ns is None else 0)
                self._longest_gap_start_ns = int(since[end_at]) - self._longest_gap_ns
        instants, counts = np.unique(times, return_counts=True)
        runs = counts.tolist()
        if self._last_ns == int(instants[0]):
            runs[0] += self._tie
        else:
            self._close_tie()
        for run in runs[:-1]:
            self._tie = run
            self._close_tie()
        self._tie = runs[-1]
        self._last_ns = int(times[-1])

    def summary(self) -> Arrivals:
        """Rates, gaps, ties and histogram of everything counted."""
        self._close_tie()
        span_s = self._span_ns / NS_PER_S
        gaps = self._rows - 1
        cv = None
        if gaps > 1 and span_s > 0:
            mean = span_s / gaps
            cv = math.sqrt(max(0.0, self._gap_squares_s2 / gaps - mean * mean)) / mean
        return Arrivals(
            span_ns=self._span_ns,
            mean_rate_per_s=self._rows / span_s if span_s > 0 else None,
            peak_1s=self._seconds.peak,
            peak_60s=self._minutes.peak,
            longest_gap_ns=self._longest_gap_ns,
            longest_gap_start_ns=self._longest_gap_start_ns,
            gap_cv=cv,
            distinct_instants=self._instants,
            tied_rows=self._tied,
            largest_tie=self._largest,
            histogram=tuple(self._bins.tolist()),
        )

    def _close_tie(self) -> None:
        if self._tie == 0:
            return
        self._instants += 1
        self._largest = max(self._largest, self._tie)
        if self._tie > 1:
            self._tied += self._tie
        self._tie = 0


class _PeakWindow:
    """The highest count in consecutive windows of one width."""

    def __init__(self, width_ns: int) -> None:
        self._width_ns = width_ns
        self._window = -1
        self._count = 0
        self.peak = 0

    def add(self, since_ns: _Int64) -> None:
        windows, counts = np.unique(since_ns // self._width_ns, return_counts=True)
        if int(windows[0]) == self._window:
            counts[0] += self._count
        self.peak = max(self.peak, int(counts.max()))
        self._window, self._count = int(windows[-1]), int(counts[-1])


class SessionCounts:
    """Count distinct sessions, provided or derived, and the rows that belong to one."""

    def __init__(self) -> None:
        self.distinct = DistinctCounter()
        self.rows = 0

    def add(self, columns: dict[str, Any]) -> None:
        """Count a batch of columns, as `Trace.batches` gives them."""
        given = columns.get("provided_session_id")
        derived = columns.get("poor_man_session_id")
        names = set() if given is None else set(given.to_pylist())
        count = 0 if given is None else len(given) - given.null_count
        if derived is not None:
            texts = [None] * len(derived) if given is None else given.to_pylist()
            alone = [
                number
                for number, text in zip(derived.to_pylist(), texts, strict=True)
                if number is not None and text is None
            ]
            names.update(map(str, alone))
            count += len(alone)
        names.discard(None)
        self.rows += count
        if names:
            digests = b"".join(blake2b(n.encode(), digest_size=8).digest() for n in names)
            self.distinct.add(np.frombuffer(digests, dtype=np.int64))


class PrefixCounts:
    """Count blocks, distinct blocks and block sizes."""

    def __init__(self) -> None:
        self._distinct = DistinctCounter()
        self._blocks = self._rows = 0
        self._sizes: set[int] = set()

    def add(self, columns: dict[str, Any]) -> None:
        """Count a batch of columns, as `Trace.batches` gives them."""
        hashes = columns.get("total_hashes")
        if hashes is None or hashes.null_count == len(hashes):
            return
        flat = integers(hashes.flatten())
        self._blocks += len(flat)
        self._rows += int(np.count_nonzero(integers(hashes.value_lengths().fill_null(0))))
        self._distinct.add(flat)
        if "block_size" in columns:
            self._sizes.update(columns["block_size"].unique().drop_null().to_pylist())

    def summary(self) -> PrefixReuse:
        """Prefix reuse of everything counted."""
        return PrefixReuse(
            blocks=self._blocks,
            distinct_blocks=self._distinct.count,
            block_sizes=tuple(sorted(self._sizes)),
            rows=self._rows,
            exact=self._distinct.exact,
        )


def integers(column: Any) -> _Int64:
    """An Arrow column without nulls as 64-bit integers, `[rows]`."""
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.int64)
