"""All transforms of a replay as one value, and the function that applies them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_S, format_duration, parse_duration
from goodput_traces.transforms.classes import ClassRule, assign_classes
from goodput_traces.transforms.scale import scale_rate

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

_FACTOR: Final = re.compile(r"\d{1,6}(\.\d{1,9})?(/\d{1,6})?", re.ASCII)
_LEAST: Final = Fraction(1, 10_000)
_MOST: Final = Fraction(10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Arrivals from `start_ns` up to, not including, `end_ns`, since the trace's first arrival.

    Args:
        start_ns: the replay's zero, nanoseconds.
        end_ns: end of the window; None for the end of the trace.
    """

    start_ns: int = 0
    end_ns: int | None = None

    def __str__(self) -> str:
        end = "" if self.end_ns is None else f"{self.end_ns / NS_PER_S:g}s"
        return f"{self.start_ns / NS_PER_S:g}s..{end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformPlan:
    """Transforms in the order of their application: window, rate scale, classes, limit, speed.

    Args:
        window: part of the trace; None for all of it.
        rate_scale: more (above 1) or fewer (below 1) requests, bursts preserved.
        seed: selects the requests that a scale adds or drops.
        class_rules: the first that matches gives a row its class.
        limit: highest number of requests after scaling; None for no limit.
        speed: time warp, above 1 is faster.
        first_ns: the trace's first arrival (`Trace.first_ns`); None to use the first row's, if
            the rows begin at the trace's start.
    """

    window: Window | None = None
    rate_scale: Fraction = Fraction(1)
    seed: int = 0
    class_rules: tuple[ClassRule, ...] = ()
    limit: int | None = None
    speed: Fraction = Fraction(1)
    first_ns: int | None = None

    def zero_ns(self, first_ns: int) -> int:
        """The replay's zero on the trace's clock: the window's start, else the first arrival.

        `row.timestamp_start_unix_ns - zero_ns` of a transformed row is when to send it.
        """
        return first_ns + (0 if self.window is None else self.window.start_ns)

    def empty_problem(self, span_ns: int) -> str:
        """Return a message for a trace of which no row is left.

        Args:
            span_ns: time from the trace's first to its last arrival.
        """
        if self.window is None or self.rate_scale < 1:
            return "no row is left to send; widen --window, or raise --rate-scale"
        return (
            f"no row is left to send: the trace spans {format_duration(span_ns)}; the window "
            f"{self.window} holds no request; choose a window within the span"
        )

    def end_ns(self, first_ns: int) -> int | None:
        """The window's end on the trace's clock; None for the end of the trace."""
        if self.window is None or self.window.end_ns is None:
            return None
        return first_ns + self.window.end_ns


def apply(rows: Iterable[TraceRow], plan: TransformPlan) -> Iterator[TraceRow]:
    """Apply the transforms to streamed rows; the order of arrival does not change.

    Args:
        rows: a trace's rows, in order of arrival.
        plan: the transforms.
    """
    rows = iter(rows)
    first_ns = plan.first_ns
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
    """Keep the rows inside the window, with unchanged timestamps.

    Args:
        rows: in order of arrival.
        window: the arrivals to keep.
        first_ns: the trace's first arrival, nanoseconds on the trace's clock.
    """
    start = first_ns + window.start_ns
    end = None if window.end_ns is None else first_ns + window.end_ns
    for row in rows:
        if end is not None and row.timestamp_start_unix_ns >= end:
            return
        if row.timestamp_start_unix_ns >= start:
            yield row


def parse_factor(text: str) -> Fraction:
    """Parse an exact positive factor: `2`, `0.5`, `3/2`.

    Raises:
        ValueError: not a number from 1/10000 to 10000.
    """
    if not _FACTOR.fullmatch(text.strip()) or text.strip().endswith("/0"):
        raise ValueError(f"{text!r} is not a factor; write for example 2, 0.5 or 3/2")
    whole, _, below = text.strip().partition("/")
    divisor = Fraction(below or 1)
    if divisor == 0:
        raise ValueError(f"{text!r} divides by zero; write for example 2, 0.5 or 3/2")
    factor = Fraction(whole) / divisor
    if not _LEAST <= factor <= _MOST:
        raise ValueError(f"{text!r} is out of bounds; a factor lies between 0.0001 and 10000")
    return factor


def warp_time(rows: Iterable[TraceRow], speed: Fraction, *, zero_ns: int) -> Iterator[TraceRow]:
    """Move every arrival towards (above 1) or away from (below 1) the replay's zero.

    Exact integer arithmetic, rounded down, so ties stay ties and the order is kept. Targets,
    cancellations and recorded outcomes are not arrivals and stay unchanged.

    Args:
        rows: in order of arrival.
        speed: above 1 is faster.
        zero_ns: the time that does not change.
    """
    up, down = speed.numerator, speed.denominator
    for row in rows:
        since = row.timestamp_start_unix_ns - zero_ns
        yield replace(row, timestamp_start_unix_ns=zero_ns + since * down // up)
