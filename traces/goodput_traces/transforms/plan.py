"""Everything a replay does to a trace, as one value, and the one function that does it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice
from typing import TYPE_CHECKING

from goodput_traces.transforms.classes import ClassRule, assign_classes
from goodput_traces.transforms.scale import scale_rate
from goodput_traces.transforms.speed import warp_time
from goodput_traces.transforms.window import Window, cut_window

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from goodput_traces.row import TraceRow

__all__ = ["TransformPlan", "apply"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformPlan:
    """What to do, in this order: window, rate scale, classes, limit, speed.

    Args:
        window: the part of the trace; None: all of it.
        rate_scale: more (above 1) or fewer (below 1) requests, bursts preserved.
        seed: chooses the requests that a scale adds or drops.
        class_rules: the first that matches gives a row its class.
        limit: at most so many requests, counted after scaling; None: all.
        speed: time warp, above 1 is faster.
        first_ns: the trace's first arrival (`Trace.first_ns`). None: the first row's, which is
            right whenever the rows come from the trace's start.
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

    def end_ns(self, first_ns: int) -> int | None:
        """Where the window ends on the trace's clock; None: with the trace."""
        if self.window is None or self.window.end_ns is None:
            return None
        return first_ns + self.window.end_ns


def apply(rows: Iterable[TraceRow], plan: TransformPlan) -> Iterator[TraceRow]:
    """The rows of a replay, streamed; order of arrival is kept.

    Args:
        rows: a trace's rows, in order of arrival.
        plan: what to do to them.
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
