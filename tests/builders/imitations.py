"""Traces with invented arrivals, and traces that imitate another one."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING, Any

from goodput_core.units import NS_PER_S
from goodput_traces.format.reader import Trace, open_trace
from goodput_traces.format.schema import Clock, HashSemantics, TraceMetadata, TraceRow
from goodput_traces.format.writer import write_trace
from goodput_traces.synthesis.like import fit_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["imitate", "make_rows", "session_relative", "write"]


def make_rows(times_s: Sequence[float], seed: int = 0, **columns: Any) -> Iterator[TraceRow]:
    rng = Random(seed)
    for at, time_s in enumerate(times_s):
        prompt = round(math.exp(rng.gauss(6, 1))) + 1
        yield TraceRow(
            request_id=f"source-{at}",
            timestamp_start_unix_ns=round(time_s * NS_PER_S),
            input_tokens=prompt,
            output_tokens=prompt // 4 + rng.randrange(1, 200),
            **{name: value(rng) for name, value in columns.items()},
        )


def write(path: Path, rows: Iterator[TraceRow] | Sequence[TraceRow], **metadata: Any) -> Trace:
    defaults = {"clock": Clock.TRACE_RELATIVE, "hash_semantics": HashSemantics.FULL_BLOCKS}
    write_trace(path, rows, TraceMetadata(**(defaults | metadata)))
    return open_trace(path)


def imitate(
    source: Trace, *, seed: int = 1, duration_ns: int | None = None, rate: float | None = None
) -> Trace:
    model = fit_trace(source)
    duration_ns = duration_ns or source.last_ns - source.first_ns + 1
    out = source.path.with_name(f"like-{seed}.parquet")
    rows = model.rows(seed=seed, duration_ns=duration_ns, rate_per_s=rate)
    write_trace(out, rows, model.metadata("test"), overwrite=True)
    return open_trace(out)


def session_relative(tmp_path: Path) -> Trace:
    rng = Random(1)
    rows = [
        TraceRow(
            request_id=f"{session}/{turn}",
            timestamp_start_unix_ns=turn * 20 * NS_PER_S,
            input_tokens=100 + turn,
            output_tokens=5,
            provided_session_id=f"s{session:03d}",
            turn=turn,
        )
        for session in range(50)
        for turn in range(rng.randrange(1, 20))
    ]
    return write(tmp_path / "source.parquet", rows, clock=Clock.SESSION_RELATIVE)
