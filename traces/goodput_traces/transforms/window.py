"""A part of a trace, by time since its first arrival."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from goodput_core.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from goodput_traces.row import TraceRow

__all__ = ["Window", "cut_window", "parse_window"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Arrivals from `start_ns` up to, not including, `end_ns`, since the trace's first arrival.

    Args:
        start_ns: where the replay's zero lies, nanoseconds.
        end_ns: where it ends; None: with the trace.
    """

    start_ns: int = 0
    end_ns: int | None = None


def parse_window(text: str) -> Window:
    """A window as people write it: `10m..20m`, `90s..`, `..5m`.

    Raises:
        ValueError: no `..`, a wrong duration, or an end that is not after the start.
    """
    start_text, dots, end_text = text.partition("..")
    if not dots or not text.strip(". "):
        raise ValueError(f"{text!r} is not a window; write for example 10m..20m, 90s.. or ..5m")
    start = parse_duration(start_text) if start_text.strip() else 0
    end = parse_duration(end_text) if end_text.strip() else None
    if end is not None and end <= start:
        raise ValueError(f"{text!r} ends before it starts; write the earlier time first")
    return Window(start_ns=start, end_ns=end)


def cut_window(rows: Iterable[TraceRow], window: Window, *, first_ns: int) -> Iterator[TraceRow]:
    """The rows inside the window; timestamps stay as they are.

    Args:
        rows: in order of arrival.
        window: what to keep.
        first_ns: the trace's first arrival, nanoseconds on the trace's clock.
    """
    start = first_ns + window.start_ns
    end = None if window.end_ns is None else first_ns + window.end_ns
    for row in rows:
        if end is not None and row.timestamp_start_unix_ns >= end:
            return
        if row.timestamp_start_unix_ns >= start:
            yield row
