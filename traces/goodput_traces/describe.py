"""What a trace looks like: one streaming pass, bounded memory, plain numbers.

How it is shown is the business of `describe_view`. Lengths have exact quantiles, because they
are small whole numbers that can be counted; distinct sessions and blocks are exact up to two
million and estimated beyond, and say so.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from goodput_core.units import NS_PER_S
from goodput_traces.distinct import DistinctCounter
from goodput_traces.schema import Clock, TraceMetadata

if TYPE_CHECKING:
    from goodput_traces.reader import Trace

__all__ = ["Arrivals", "LengthSummary", "PrefixReuse", "TraceDescription", "describe"]

_Int64 = np.ndarray[Any, np.dtype[np.int64]]
_TIME_BINS: Final = 60
_MAX_CLASSES: Final = 1000
_COLUMNS: Final = (
    "input_tokens",
    "output_tokens",
    "total_hashes",
    "provided_session_id",
    "poor_man_session_id",
    "slo_class",
)


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
    """When requests arrive, on one clock.

    Args:
        span_ns: from the first to the last arrival.
        mean_rate_per_s: rows over the span; None when all arrive at once.
        peak_1s: most arrivals in any whole second, counted from the first arrival.
        peak_60s: most arrivals in any whole minute, counted likewise.
        gap_cv: standard deviation of the gaps between arrivals over their mean: 1 for a
            Poisson process, above it bursty; None with fewer than two gaps or no mean.
        distinct_instants: different arrival times.
        tied_rows: rows that share their instant with another.
        largest_tie: most rows at one instant.
        histogram: arrivals in equal parts of the span.
    """

    span_ns: int
    mean_rate_per_s: float | None
    peak_1s: int
    peak_60s: int
    gap_cv: float | None
    distinct_instants: int
    tied_rows: int
    largest_tie: int
    histogram: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReuse:
    """How much of the prompts was seen before: the best that a prefix cache could do.

    Args:
        blocks: hashes in all rows.
        distinct_blocks: different ones.
        block_sizes: tokens per hash, as found.
        rows: rows with hashes.
        exact: whether `distinct_blocks` is counted rather than estimated.
    """

    blocks: int
    distinct_blocks: int
    block_sizes: tuple[int, ...]
    rows: int
    exact: bool

    @property
    def reused(self) -> float | None:
        """Share of blocks that an earlier row, or the same one, already had."""
        return None if self.blocks == 0 else max(0.0, 1 - self.distinct_blocks / self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDescription:
    """Everything `goodput trace describe` shows.

    Args:
        rows: requests.
        metadata: what the file says about itself.
        floored_output_rows: zero-length answers that are read as one token.
        arrivals: None for a session-relative clock: there is no common time.
        prompt: lengths of prompts.
        answer: lengths of answers.
        sessions: different sessions; rows without one are not counted.
        session_rows: rows that belong to a session.
        sessions_exact: whether `sessions` is counted rather than estimated.
        prefixes: prefix reuse.
        classes: rows per SLO class; the empty name stands for rows without one.
    """

    rows: int
    metadata: TraceMetadata
    floored_output_rows: int
    arrivals: Arrivals | None
    prompt: LengthSummary
    answer: LengthSummary
    sessions: int
    session_rows: int
    sessions_exact: bool
    prefixes: PrefixReuse
    classes: tuple[tuple[str, int], ...]


def describe(trace: Trace) -> TraceDescription:
    """Read a trace once and describe it.

    Raises:
        TraceError: a row breaks a rule, or the file is damaged.
    """
    prompt, answer = _Lengths(), _Lengths()
    arrivals = None if trace.metadata.clock is Clock.SESSION_RELATIVE else _ArrivalCounts(trace)
    sessions, prefixes = _Sessions(), _Prefixes()
    classes: Counter[str] = Counter()
    rows = 0
    for columns, times in trace.batches(only=_COLUMNS):
        rows += len(times)
        prompt.add(_integers(columns["input_tokens"]))
        answer.add(np.maximum(_integers(columns["output_tokens"]), 1))
        sessions.add(columns)
        prefixes.add(columns)
        _count_classes(classes, columns, len(times))
        if arrivals is not None:
            arrivals.add(times)
    return TraceDescription(
        rows=rows,
        metadata=trace.metadata,
        floored_output_rows=trace.floored_output_rows,
        arrivals=None if arrivals is None else arrivals.summary(),
        prompt=prompt.summary(),
        answer=answer.summary(),
        sessions=sessions.distinct.count,
        session_rows=sessions.rows,
        sessions_exact=sessions.distinct.exact,
        prefixes=prefixes.summary(),
        classes=tuple(classes.most_common()),
    )


class _Lengths:
    """Counts every length; at most `MAX_TOKENS` counters."""

    def __init__(self) -> None:
        self._counts: _Int64 = np.zeros(1, dtype=np.int64)

    def add(self, lengths: _Int64) -> None:
        counts = np.bincount(lengths, minlength=len(self._counts)).astype(np.int64)
        counts[: len(self._counts)] += self._counts
        self._counts = counts

    def summary(self) -> LengthSummary:
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


class _ArrivalCounts:
    """Everything about sorted arrival times, batch after batch."""

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

    def add(self, times: _Int64) -> None:
        since = times - self._first_ns
        self._rows += len(times)
        # Divided before multiplied: nanoseconds of months times 60 overflow 64 bits.
        width = self._span_ns // _TIME_BINS + 1
        self._bins += np.bincount(since // width, minlength=_TIME_BINS)
        self._seconds.add(since)
        self._minutes.add(since)
        if self._last_ns is not None:
            self._gap_squares_s2 += ((int(times[0]) - self._last_ns) / NS_PER_S) ** 2
        self._gap_squares_s2 += float(np.square(np.diff(times) / NS_PER_S).sum())
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
    """The fullest of consecutive windows of one width."""

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


class _Sessions:
    def __init__(self) -> None:
        self.distinct = DistinctCounter()
        self.rows = 0

    def add(self, columns: dict[str, Any]) -> None:
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


class _Prefixes:
    def __init__(self) -> None:
        self._distinct = DistinctCounter()
        self._blocks = self._rows = 0
        self._sizes: set[int] = set()

    def add(self, columns: dict[str, Any]) -> None:
        hashes = columns.get("total_hashes")
        if hashes is None or hashes.null_count == len(hashes):
            return
        flat = _integers(hashes.flatten())
        self._blocks += len(flat)
        self._rows += int(np.count_nonzero(_integers(hashes.value_lengths().fill_null(0))))
        self._distinct.add(flat)
        if "block_size" in columns:
            self._sizes.update(columns["block_size"].unique().drop_null().to_pylist())

    def summary(self) -> PrefixReuse:
        return PrefixReuse(
            blocks=self._blocks,
            distinct_blocks=self._distinct.count,
            block_sizes=tuple(sorted(self._sizes)),
            rows=self._rows,
            exact=self._distinct.exact,
        )


def _count_classes(classes: Counter[str], columns: dict[str, Any], rows: int) -> None:
    column = columns.get("slo_class")
    if column is None:
        classes[""] += rows
        return
    for entry in column.value_counts().to_pylist():
        name = entry["values"] or ""
        if name not in classes and len(classes) >= _MAX_CLASSES:
            name = "(others)"
        classes[name] += entry["counts"]


def _integers(column: Any) -> _Int64:
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.int64)
