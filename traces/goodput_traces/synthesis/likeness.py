"""Compare a synthetic trace with its source: arrivals, lengths, classes, prefixes and sessions.

Each trace is read once, in bounded memory. Rank correlations and sessions of very long traces are
measured on a sample.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from goodput_core.quantiles import quantile
from goodput_core.units import NS_PER_S
from goodput_traces.describe.counters import LengthCounts, WindowCounts
from goodput_traces.format.schema import Clock
from goodput_traces.synthesis.prefixes import PrefixObserver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_traces.format.reader import Trace
    from goodput_traces.format.schema import TraceRow

__all__ = ["Feature", "compare_traces", "measure_trace"]

_SCALES_S: Final = (1, 10, 60, 600)
_MIN_WINDOWS: Final = 12
_MAX_CLASSES: Final = 100
_RECENT_NS: Final = 60 * NS_PER_S
_MAX_SAMPLE: Final = 200_000
_BATCH_ROWS: Final = 8_192
_HALF: Final = Fraction(1, 2)
_NINE_TENTHS: Final = Fraction(9, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A number that describes a trace, for a source and a trace that should be like it.

    Args:
        name: the name; dots separate group, class and number.
        source: value for the source; None if it is not defined.
        expected: value for a trace like the source at the rate of the result; None if it is not
            known.
        result: value for the result; None if it is not defined.
    """

    name: str
    source: float | None
    expected: float | None
    result: float | None


def compare_traces(
    source: Trace, result: Trace, duration_ns: int, rate_per_s: float | None = None
) -> list[Feature]:
    """Return the features of two traces, in the order of a table.

    Args:
        source: the trace that the result should be like.
        result: a synthetic trace.
        duration_ns: duration of the result; later requests of the source are left out.
        rate_per_s: rate that the result should have; None for that of the source.

    Raises:
        TraceError: a trace is invalid.
    """
    before = measure_trace(source, duration_ns)
    after = measure_trace(result, duration_ns, is_complete=True)
    for name in (*before, *after):
        if name.startswith("class.") and name.endswith(".share"):  # of a class that one trace lacks
            before.setdefault(name, 0.0)
            after.setdefault(name, 0.0)
    source_rate_per_s = before.get("arrivals.rate_per_s")
    factor = 1.0
    if rate_per_s is not None and source_rate_per_s is not None:
        factor = rate_per_s / source_rate_per_s
    return [
        Feature(
            name=name,
            source=before.get(name),
            expected=_scale(name, before.get(name), factor),
            result=after.get(name),
        )
        for name in dict.fromkeys([*after, *before])
    ]


def _scale(name: str, value: float | None, factor: float) -> float | None:
    """Return the value of a feature if bursts keep their share of a rate that is multiplied."""
    if value is None or factor == 1.0 or not name.startswith("arrivals."):
        return value
    if name.endswith("_per_s"):
        return value * factor
    if ".dispersion_" in name:
        return 1 + (value - 1) * factor
    return None


def measure_trace(trace: Trace, duration_ns: int, *, is_complete: bool = False) -> dict[str, float]:
    """Return the features of the requests in the first part of a trace, by name.

    If sessions share no clock, all requests are measured, and arrivals have no features.

    Args:
        trace: the trace.
        duration_ns: duration of the part.
        is_complete: True if the trace covers this duration, even if its last request arrives
            earlier.

    Raises:
        TraceError: the trace is invalid.
    """
    has_clock = trace.metadata.clock is not Clock.SESSION_RELATIVE
    end_ns = trace.first_ns + duration_ns if has_clock else None
    measures: list[_FeatureCounter] = [
        _LengthFeatures(),
        _ClassFeatures(),
        _PrefixFeatures(),
        _SessionFeatures(),
    ]
    if has_clock:
        span_ns = duration_ns
        if not is_complete:
            span_ns = min(span_ns, trace.last_ns - trace.first_ns + 1)
        measures.insert(0, _ArrivalFeatures(trace.first_ns, span_ns))
    for row in trace.rows(end_ns=end_ns):
        for measure in measures:
            measure.add(row)
    return {name: value for measure in measures for name, value in measure.features()}


class _FeatureCounter(Protocol):
    def add(self, row: TraceRow) -> None: ...

    def features(self) -> Iterator[tuple[str, float]]: ...


class _ArrivalFeatures:
    """Rate, gaps, ties, and the index of dispersion of counts at several scales.

    The index of dispersion is the variance of the number of arrivals in a window, divided by its
    mean: 1 for a Poisson process at every width of the window.
    """

    def __init__(self, first_ns: int, span_ns: int) -> None:
        self._first_ns, self._span_ns = first_ns, span_ns
        self._times: list[int] = []
        self._last_ns = 0
        self._rows = 0
        self._gap_squares_s2 = 0.0
        self._instants = WindowCounts(1)
        self._minutes = WindowCounts(60 * NS_PER_S)
        self._scales = {scale_s: WindowCounts(scale_s * NS_PER_S) for scale_s in _SCALES_S}

    def add(self, row: TraceRow) -> None:
        self._times.append(row.timestamp_start_unix_ns - self._first_ns)
        if len(self._times) == _BATCH_ROWS:
            self._count()

    def features(self) -> Iterator[tuple[str, float]]:
        self._count()
        span_s = self._span_ns / NS_PER_S
        yield "arrivals.rate_per_s", self._rows / span_s
        yield "arrivals.peak_minute_per_s", self._minutes.peak / 60
        gaps = self._rows - 1
        if gaps > 1 and self._last_ns:
            mean_s = self._last_ns / NS_PER_S / gaps
            variance_s2 = max(0.0, self._gap_squares_s2 / gaps - mean_s**2)
            yield "arrivals.gap_cv", math.sqrt(variance_s2) / mean_s
        yield "arrivals.tied_share", self._instants.shared_rows / self._rows
        for scale_s, windows in self._scales.items():
            if span_s / scale_s >= _MIN_WINDOWS:
                index = windows.dispersion(self._span_ns)
                yield f"arrivals.dispersion_{scale_s}s", index

    def _count(self) -> None:
        if not self._times:
            return
        times = np.array(self._times, dtype=np.int64)
        self._times.clear()
        for windows in (self._instants, self._minutes, *self._scales.values()):
            windows.add(times)
        gaps_s = np.diff(times, prepend=self._last_ns if self._rows else times[0]) / NS_PER_S
        self._gap_squares_s2 += float(np.square(gaps_s).sum())
        self._rows += len(times)
        self._last_ns = int(times[-1])


class _LengthFeatures:
    """Quantiles of lengths, and the rank correlation of prompt and output."""

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []
        self._sample: list[tuple[int, int]] = []
        self._stride = 1
        self._rows = 0
        self._prompt, self._output = LengthCounts(), LengthCounts()

    def add(self, row: TraceRow) -> None:
        pair = (row.input_tokens, row.output_tokens)
        self._pairs.append(pair)
        if len(self._pairs) == _BATCH_ROWS:
            self._count()
        if self._rows % self._stride == 0:
            self._sample.append(pair)
            if len(self._sample) == _MAX_SAMPLE:
                self._sample = self._sample[::2]
                self._stride *= 2
        self._rows += 1

    def features(self) -> Iterator[tuple[str, float]]:
        self._count()
        for name, counts in (("prompt_tokens", self._prompt), ("output_tokens", self._output)):
            lengths = counts.summary()
            for quantile_name in ("p50", "p90", "p99"):
                yield f"{name}.{quantile_name}", getattr(lengths, quantile_name)
            yield f"{name}.mean", lengths.total / self._rows
        prompts, outputs = (_ranks(values) for values in zip(*self._sample, strict=True))
        if prompts.std() > 0 and outputs.std() > 0:
            yield "lengths.rank_correlation", float(np.corrcoef(prompts, outputs)[0, 1])

    def _count(self) -> None:
        if self._pairs:
            pairs = np.array(self._pairs, dtype=np.int64)
            self._pairs.clear()
            self._prompt.add(pairs[:, 0])
            self._output.add(pairs[:, 1])


class _ClassFeatures:
    """Share and mean lengths of the requests of each class."""

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()
        self._prompt: Counter[str] = Counter()
        self._output: Counter[str] = Counter()

    def add(self, row: TraceRow) -> None:
        name = row.slo_class or ""
        if name not in self._rows and len(self._rows) >= _MAX_CLASSES:
            name = "(others)"
        self._rows[name] += 1
        self._prompt[name] += row.input_tokens
        self._output[name] += row.output_tokens

    def features(self) -> Iterator[tuple[str, float]]:
        if set(self._rows) == {""}:
            return
        total = self._rows.total()
        for name, rows in sorted(self._rows.items()):
            shown = name or "(none)"
            yield f"class.{shown}.share", rows / total
            yield f"class.{shown}.prompt_mean", self._prompt[name] / rows
            yield f"class.{shown}.output_mean", self._output[name] / rows


class _PrefixFeatures:
    """Share of the blocks that were seen before, and within the last minute."""

    def __init__(self) -> None:
        self._observer = PrefixObserver()
        self._blocks = self._reused = self._recent = 0

    def add(self, row: TraceRow) -> None:
        link = self._observer.observe(row)
        self._blocks += len(row.total_hashes)
        self._reused += link.blocks
        self._recent += link.blocks if link.lag_ns <= _RECENT_NS else 0

    def features(self) -> Iterator[tuple[str, float]]:
        if self._blocks:
            yield "prefixes.reused", self._reused / self._blocks
            yield "prefixes.reused_within_1m", self._recent / self._blocks


class _SessionFeatures:
    """Share of requests in sessions, turns of a session, and time between turns.

    Sessions are chosen by a hash of their id if there are many.
    """

    def __init__(self) -> None:
        self._rows = self._session_rows = 0
        self._share = 1.0
        self._turns: dict[int, int] = {}
        self._last_ns: dict[int, int] = {}
        self._gaps_ns: list[int] = []

    def add(self, row: TraceRow) -> None:
        self._rows += 1
        session = row.session_id
        if session is None:
            return
        self._session_rows += 1
        key = int.from_bytes(blake2b(session.encode(), digest_size=8).digest(), "little")
        if key >= self._share * 2.0**64:
            return
        now_ns = row.timestamp_start_unix_ns
        if key in self._turns and len(self._gaps_ns) < _MAX_SAMPLE:
            self._gaps_ns.append(now_ns - self._last_ns[key])
        self._turns[key] = self._turns.get(key, 0) + 1
        self._last_ns[key] = now_ns
        if len(self._turns) > _MAX_SAMPLE:
            self._share /= 2
            limit = self._share * 2.0**64
            self._turns = {key: turns for key, turns in self._turns.items() if key < limit}
            self._last_ns = {key: self._last_ns[key] for key in self._turns}

    def features(self) -> Iterator[tuple[str, float]]:
        if not self._turns:
            return
        yield "sessions.share_of_requests", self._session_rows / self._rows
        yield "sessions.turns_mean", sum(self._turns.values()) / len(self._turns)
        yield "sessions.turns_p90", quantile(self._turns.values(), _NINE_TENTHS)
        if self._gaps_ns:
            yield "sessions.gap_p50_s", quantile(self._gaps_ns, _HALF) / NS_PER_S
            yield "sessions.gap_p90_s", quantile(self._gaps_ns, _NINE_TENTHS) / NS_PER_S


def _ranks(values: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the rank of each value; equal values have their mean rank."""
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[at], dtype=np.float64)
