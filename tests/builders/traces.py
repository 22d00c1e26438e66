"""Rows of traces, and traces as files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from goodput_core.units import NS_PER_S
from goodput_traces.format.schema import Clock, TraceMetadata, TraceRow
from goodput_traces.format.writer import write_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["steady_rows", "trace_row", "write_rows"]


def trace_row(number: int, at_s: float = 0, **fields: Any) -> TraceRow:
    """Make the row `row-NUMBER` of 8 prompt and 4 output tokens; `fields` override its values."""
    values: dict[str, Any] = {
        "request_id": f"row-{number}",
        "timestamp_start_unix_ns": round(at_s * NS_PER_S),
        "input_tokens": 8,
        "output_tokens": 4,
    }
    return TraceRow(**(values | fields))


def steady_rows(count: int, *, per_s: int = 20, **fields: Any) -> Iterator[TraceRow]:
    """Yield rows at a constant rate."""
    for number in range(count):
        yield trace_row(number, timestamp_start_unix_ns=number * NS_PER_S // per_s, **fields)


def write_rows(path: Path, rows: Iterable[TraceRow], clock: Clock = Clock.TRACE_RELATIVE) -> Path:
    """Write rows to a trace and return its path."""
    write_trace(path, rows, TraceMetadata(clock=clock), overwrite=True)
    return path
