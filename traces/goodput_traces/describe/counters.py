"""Counters of a trace's description, updated batch by batch in bounded memory.

This module must not depend on files or on how a description is shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
    "WindowCounts",
    "integers",
]

_Int64 = np.ndarray[Any, np.dtype[np.int64]]
_U64 = np.ndarray[Any, np.dtype[np.uint64]]
_TIME_BINS: Final = 60
_MAX_STORED: Final = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """Distribution of lengths in tokens; quantiles are nearest-rank and exact.

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
    """Distribution of arrivals over time, for a trace with one clock.

    Args:
        span_ns: time from the first to the last arrival.
        mean_rate_per_s: rows over the span; None if all rows have the same arrival.
        peak_1s: maximum number of arrivals in a second; seconds count from the first arrival.
        peak_60s: maximum number of arrivals in a minute; minutes count from the first arrival.
        peak_1s_start_ns, peak_60s_start_ns: start of that second and minute, since the first
            arrival.
        longest_gap_ns: longest time without an arrival.
        longest_gap_start_ns: start of the longest gap, counted from the first arrival.
        gap_cv: coefficient of variation of the gaps between arrivals: 1 for a Poisson process,
            larger for bursts; None if there are fewer than two gaps, or if all gaps are zero.
        distinct_instants: number of distinct arrival times.
        tied_rows: rows that share their arrival time with another row.
        largest_tie: maximum number of rows with the same arrival time.
        histogram: arrivals in equal parts of the span.
    """

    span_ns: int
    mean_rate_per_s: float | None
    peak_1s: int
    peak_60s: int
    peak_1s_start_ns: int
    peak_60s_start_ns: int
    longest_gap_ns: int
    longest_gap_start_ns: int
    gap_cv: float | None
    distinct_instants: int
    tied_rows: int
    largest_tie: int
    histogram: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReuse:
    """Reuse of prompt blocks: the upper bound of a prefix cache's hits.

    Args:
        blocks: number of hashes in all rows.
        distinct_blocks: number of distinct hashes.
        block_sizes: distinct numbers of tokens per hash.
        rows: number of rows with hashes.
        exact: True if `distinct_blocks` is exact, False if it is an estimate.
    """

    blocks: int
    distinct_blocks: int
    block_sizes: tuple[int, ...]
    rows: int
    exact: bool

    @property
    def reused(self) -> float | None:
        """Share of blocks that repeat a block of the same or an earlier row."""
        return None if self.blocks == 0 else max(0.0, 1 - self.distinct_blocks / self.blocks)


class DistinctCounter:
    """Count distinct 64-bit values in bounded memory.

    The count is exact up to the limit. Beyond the limit, only values whose hash ends in a certain
    number of zero bits are stored, and the number of stored values is scaled up. With a million
    stored values, the error is a fraction of a percent.

    Source: Wegman's adaptive sampling, in Flajolet, "On adaptive sampling", Computing 43, 1990.

    Args:
        limit: maximum number of stored values.
    """

    def __init__(self, limit: int = _MAX_STORED) -> None:
        self._limit = limit
        self._shift = 0
        self._stored: _U64 = np.empty(0, dtype=np.uint64)

    @property
    def exact(self) -> bool:
        """True if every value was stored."""
        return self._shift == 0

    @property
    def count(self) -> int:
        """Number of distinct values; an estimate unless `exact`."""
        return len(self._stored) << self._shift

    def add(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Add a batch of values; repeats are allowed."""
        new = self._sample(_hash(values.view(np.uint64)))
        # `np.unique` builds a hash table, which is fifty times slower for these values.
        merged = np.sort(np.concatenate((self._stored, new)))
        is_first = np.ones(len(merged), dtype=np.bool_)
        np.not_equal(merged[1:], merged[:-1], out=is_first[1:])
        self._stored = merged[is_first]
        while len(self._stored) > self._limit:
            self._shift += 1
            self._stored = self._sample(self._stored)

    def _sample(self, values: _U64) -> _U64:
        mask = np.uint64((1 << self._shift) - 1)
        return values[(values & mask) == 0] if self._shift else values


def _hash(values: _U64) -> _U64:
    """Hash 64-bit values one-to-one with the finalizer of splitmix64."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class LengthCounts:
    """Count the rows of every length; lengths are at most `MAX_TOKENS`."""

    def __init__(self) -> None:
        self._counts: _Int64 = np.zeros(1, dtype=np.int64)

    def add(self, lengths: _Int64) -> None:
        """Count a batch of lengths, `[rows]`."""
        counts = np.bincount(lengths, minlength=len(self._counts)).astype(np.int64)
        counts[: len(self._counts)] += self._counts
        self._counts = counts

    def summary(self) -> LengthSummary:
        """Return the quantiles and the histogram; requires at least one length."""
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
    """Count sorted arrival times, batch by batch."""

    def __init__(self, trace: Trace) -> None:
        self._first_ns = trace.first_ns
        self._span_ns = trace.last_ns - trace.first_ns
        self._bins: _Int64 = np.zeros(_TIME_BINS, dtype=np.int64)
        self._seconds = WindowCounts(NS_PER_S)
        self._minutes = WindowCounts(60 * NS_PER_S)
        self._times = WindowCounts(1)
        self._last_ns: int | None = None
        self._rows = 0
        self._gap_squares_s2 = 0.0
        self._longest_gap_ns = self._longest_gap_start_ns = 0

    def add(self, times: _Int64) -> None:
        """Count a batch of sorted arrivals in nanoseconds, `[rows]`."""
        since = times - self._first_ns
        self._rows += len(times)
        # Divide before multiplying: the nanoseconds of five years times 60 overflow 64 bits.
        width = self._span_ns // _TIME_BINS + 1
        self._bins += np.bincount(since // width, minlength=_TIME_BINS)
        for windows in (self._seconds, self._minutes, self._times):
            windows.add(since)
        # The gap before the batch's first row counts, too, except that of the trace's first row.
        previous = since[:1] if self._last_ns is None else [self._last_ns]
        edges = np.concatenate((previous, since))
        gaps = np.diff(edges)
        self._gap_squares_s2 += float(np.square(gaps / NS_PER_S).sum())
        longest = int(gaps.argmax())
        if gaps[longest] > self._longest_gap_ns:
            self._longest_gap_ns = int(gaps[longest])
            self._longest_gap_start_ns = int(edges[longest])
        self._last_ns = int(since[-1])

    def summary(self) -> Arrivals:
        """Return the rates, gaps, ties and histogram of the counted arrivals."""
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
            peak_1s_start_ns=self._seconds.peak_window * NS_PER_S,
            peak_60s_start_ns=self._minutes.peak_window * 60 * NS_PER_S,
            longest_gap_ns=self._longest_gap_ns,
            longest_gap_start_ns=self._longest_gap_start_ns,
            gap_cv=cv,
            distinct_instants=self._times.windows,
            tied_rows=self._times.shared_rows,
            largest_tie=self._times.peak,
            histogram=tuple(self._bins.tolist()),
        )


class WindowCounts:
    """Rows per time window of one width, counted batch by batch from sorted times.

    Args:
        width_ns: width of a window, nanoseconds.

    Attributes:
        windows: number of windows with at least one row.
        peak: maximum number of rows in one window.
        peak_window: number of the first window with this maximum, from 0.
        shared_rows: number of rows in windows with more than one row.
        squares: sum of the squared numbers of rows of all windows.
    """

    def __init__(self, width_ns: int) -> None:
        self.windows = self.peak = self.peak_window = self.shared_rows = self.squares = 0
        self._width_ns = width_ns
        self._rows = 0
        self._last_window = -1
        self._last_rows = 0

    def add(self, since_ns: _Int64) -> None:
        """Count a batch of times, which must not be empty."""
        windows, rows = np.unique(since_ns // self._width_ns, return_counts=True)
        self._rows += len(since_ns)
        if int(windows[0]) == self._last_window:
            # The window continues: its rows so far are counted again, together with the new ones.
            rows[0] += self._last_rows
            self.windows -= 1
            self.shared_rows -= self._last_rows if self._last_rows > 1 else 0
            self.squares -= self._last_rows**2
        self.windows += len(windows)
        busiest = int(rows.argmax())
        if rows[busiest] > self.peak:
            self.peak, self.peak_window = int(rows[busiest]), int(windows[busiest])
        self.shared_rows += int(rows[rows > 1].sum())
        self.squares += int(np.square(rows).sum())
        self._last_window, self._last_rows = int(windows[-1]), int(rows[-1])

    def dispersion(self, span_ns: int) -> float:
        """Return the variance of the rows of a window divided by their mean.

        Windows without rows count; the last window does not if the span ends within it.

        Args:
            span_ns: span of the times; it must contain at least one window with rows.
        """
        windows = span_ns // self._width_ns
        is_partial = self._last_window >= windows
        rows = self._rows - (self._last_rows if is_partial else 0)
        squares = self.squares - (self._last_rows**2 if is_partial else 0)
        mean = rows / windows
        return (squares / windows - mean**2) / mean


class SessionCounts:
    """Count distinct sessions and the rows that belong to one."""

    def __init__(self) -> None:
        self.distinct = DistinctCounter()
        self.rows = 0

    def add(self, columns: dict[str, Any]) -> None:
        """Count a batch of columns, as `Trace.batches` yields them."""
        ids = [
            columns[name].cast(pa.string())
            for name in ("provided_session_id", "poor_man_session_id")
            if name in columns
        ]
        if not ids:
            return
        sessions = pc.coalesce(*ids)
        self.rows += len(sessions) - sessions.null_count
        names = sessions.unique().drop_null().to_pylist()
        if names:
            digests = b"".join(blake2b(n.encode(), digest_size=8).digest() for n in names)
            self.distinct.add(np.frombuffer(digests, dtype=np.int64))


class PrefixCounts:
    """Count prompt blocks, distinct blocks and block sizes."""

    def __init__(self) -> None:
        self._distinct = DistinctCounter()
        self._blocks = self._rows = 0
        self._sizes: set[int] = set()

    def add(self, columns: dict[str, Any]) -> None:
        """Count a batch of columns, as `Trace.batches` yields them."""
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
        """Return the prefix reuse of the counted rows."""
        return PrefixReuse(
            blocks=self._blocks,
            distinct_blocks=self._distinct.count,
            block_sizes=tuple(sorted(self._sizes)),
            rows=self._rows,
            exact=self._distinct.exact,
        )


def integers(column: Any) -> _Int64:
    """Return an Arrow column without nulls as 64-bit integers, `[rows]`."""
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.int64)
