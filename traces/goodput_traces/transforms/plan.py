"""The transforms of a replay as one value, and the function that applies them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_S, format_duration, parse_duration
from goodput_traces.transforms.classes import ClassRule, assign_classes
from goodput_traces.transforms.scale import scale_rate
from goodput_traces.transforms.sessions import SessionArrivals, start_sessions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from goodput_traces.format.schema import TraceRow

__all__ = [
    "TransformPlan",
    "Window",
    "apply",
    "cut_window",
    "parse_factor",
    "parse_window",
    "warp_time",
]

_FACTOR: Final = re.compile(r"(\d{1,6}(?:\.\d{1,9})?)(?:/(0*[1-9]\d{0,5}))?", re.ASCII)
_MIN_FACTOR: Final = Fraction(1, 10_000)
_MAX_FACTOR: Final = Fraction(10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A part of a trace; times count from the trace's first arrival.

    Args:
        start_ns: start of the window and time zero of the replay, nanoseconds.
        end_ns: end of the window, which is not part of it; None for the end of the trace.
    """

    start_ns: int = 0
    end_ns: int | None = None

    def __str__(self) -> str:
        end = "" if self.end_ns is None else f"{self.end_ns / NS_PER_S:g}s"
        return f"{self.start_ns / NS_PER_S:g}s..{end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformPlan:
    """Transforms of a replay, in this order: sessions, window, rate scale, classes, limit, speed.

    Args:
        session_arrivals: starts of the sessions of a session-relative trace; None for a trace with
            one clock. With it, the first arrival is 0.
        window: part of the trace; None for the complete trace.
        rate_scale: factor for the number of requests; bursts are preserved.
        seed: selects the requests that a rate scale adds or drops, and the starts of sessions.
        class_rules: rules that assign classes; the first rule that matches a row applies.
        limit: maximum number of requests after scaling; None for no limit.
        speed: factor for the speed of time; above 1 is faster.
        first_ns: the trace's first arrival (`Trace.first_ns`); None if the first row to
            transform is the trace's first row.
    """

    session_arrivals: SessionArrivals | None = None
    window: Window | None = None
    rate_scale: Fraction = Fraction(1)
    seed: int = 0
    class_rules: tuple[ClassRule, ...] = ()
    limit: int | None = None
    speed: Fraction = Fraction(1)
    first_ns: int | None = None

    def zero_ns(self, first_ns: int) -> int:
        """Return time zero of the replay on the trace's clock.

        This is the start of the window, or the first arrival if there is no window. A replay sends
        a transformed row at `row.timestamp_start_unix_ns - zero_ns`.

        Args:
            first_ns: the trace's first arrival, nanoseconds on the trace's clock.
        """
        return first_ns + (0 if self.window is None else self.window.start_ns)

    def empty_problem(self, span_ns: int) -> str:
        """Return the message for a plan that selects no row of a trace.

        Args:
            span_ns: time from the trace's first to its last arrival.
        """
        if self.window is None or self.rate_scale < 1:
            return "no row is left to send; widen --window, or raise --rate-scale"
        return (
            f"no row is left to send: the trace spans {format_duration(span_ns)}; the window "
            f"{self.window} has no request; choose a window within the span"
        )

    def end_ns(self, first_ns: int) -> int | None:
        """Return the window's end on the trace's clock; None for the end of the trace."""
        if self.window is None or self.window.end_ns is None:
            return None
        return first_ns + self.window.end_ns


def apply(rows: Iterable[TraceRow], plan: TransformPlan) -> Iterator[TraceRow]:
    """Apply the transforms to streamed rows; yield them in the order of arrival.

    Args:
        rows: rows of a trace, in order of arrival; of a session-relative trace by session.
        plan: the transforms.
    """
    rows = iter(rows)
    first_ns = plan.first_ns
    if plan.session_arrivals is not None:
        rows, first_ns = start_sessions(rows, plan.session_arrivals, seed=plan.seed), 0
    if first_ns is None:
        head = next(rows, None)
        if head is None:
            return
        first_ns = head.timestamp_start_unix_ns
        rows = chain((head,), rows)
    if plan.window is not None:
        rows = cut_window(rows, plan.window, first_ns=first_ns)
    rows = scale_rate(rows, plan.rate_scale, seed=plan.seed)
    if plan.class_rules:
        rows = assign_classes(rows, plan.class_rules)
    if plan.limit is not None:
        rows = islice(rows, plan.limit)
    if plan.speed != 1:
        rows = warp_time(rows, plan.speed, zero_ns=plan.zero_ns(first_ns))
    yield from rows


def parse_window(text: str) -> Window:
    """Parse a window: `10m..20m`, `90s..`, `..5m`.

    Raises:
        ValueError: `..` is missing, a duration is invalid, or the end is not after the start.
    """
    start_text, dots, end_text = text.partition("..")
    if not dots or not text.strip(". "):
        raise ValueError(f"{text!r} is not a window; write, for example, 10m..20m, 90s.. or ..5m")
    start = parse_duration(start_text) if start_text.strip() else 0
    end = parse_duration(end_text) if end_text.strip() else None
    if end is not None and end <= start:
        raise ValueError(f"{text!r} does not end after its start; write the earlier time first")
    return Window(start_ns=start, end_ns=end)


def cut_window(rows: Iterable[TraceRow], window: Window, *, first_ns: int) -> Iterator[TraceRow]:
    """Yield the rows inside the window, with unchanged timestamps.

    Args:
        rows: rows in order of arrival.
        window: the part of the trace to keep.
        first_ns: the trace's first arrival, nanoseconds on the trace's clock.
    """
    start_ns = first_ns + window.start_ns
    end_ns = None if window.end_ns is None else first_ns + window.end_ns
    for row in rows:
        if end_ns is not None and row.timestamp_start_unix_ns >= end_ns:
            return
        if row.timestamp_start_unix_ns >= start_ns:
            yield row


def parse_factor(text: str) -> Fraction:
    """Parse an exact positive factor: `2`, `0.5`, `3/2`.

    Raises:
        ValueError: not a number from 1/10000 to 10000.
    """
    match = _FACTOR.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a factor; write, for example, 2, 0.5 or 3/2")
    factor = Fraction(match[1]) / Fraction(match[2] or 1)
    if not _MIN_FACTOR <= factor <= _MAX_FACTOR:
        raise ValueError(f"{text!r} is out of bounds; a factor must be between 0.0001 and 10000")
    return factor


def warp_time(rows: Iterable[TraceRow], speed: Fraction, *, zero_ns: int) -> Iterator[TraceRow]:
    """Divide the time between each arrival and the replay's time zero by `speed`.

    The arithmetic is exact and rounds down, so equal arrivals stay equal and the order does not
    change. Targets, cancellations and recorded outcomes do not change.

    Args:
        rows: rows in order of arrival.
        speed: above 1 is faster.
        zero_ns: time zero of the replay on the trace's clock.
    """
    numerator, denominator = speed.numerator, speed.denominator
    for row in rows:
        since_ns = row.timestamp_start_unix_ns - zero_ns
        scaled_ns = since_ns * denominator // numerator
        yield replace(row, timestamp_start_unix_ns=zero_ns + scaled_ns)
