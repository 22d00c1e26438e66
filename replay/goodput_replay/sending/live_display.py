"""The live display of a run on stderr: a panel on a terminal, a line every ten seconds elsewhere.

Drawing must not disturb the measurement: counts are read in the event loop, twice a second, and
drawn by the display's own thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.live import Live
from rich.table import Table
from rich.text import Text

from goodput_core.histogram import DurationHistogram
from goodput_core.slo.attainment import AttainmentTally, ClassCounts
from goodput_core.slo.record import Outcome
from goodput_core.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import Console

    from goodput_core.slo.judging import Judgement
    from goodput_core.slo.record import RequestRecord

__all__ = ["LiveCounts", "LiveSnapshot", "RunProgress", "display"]

_TICK_S: Final = 0.5
_LINE_EVERY_S: Final = 10.0
_MAX_ERRORS: Final = 100
_SHOWN_ERRORS: Final = 3
_NO_ERRORS: Final = frozenset({Outcome.OK, Outcome.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSnapshot:
    """Counts of the requests that ended so far.

    Args:
        overall: all judged requests together.
        classes: each class.
        errors: distinct errors and their requests, the most frequent first; warm-up included.
        lag_p99_ns: of the sends so far.
        lag_max_ns: of the sends so far.
    """

    overall: ClassCounts
    classes: tuple[ClassCounts, ...]
    errors: tuple[tuple[str, int], ...]
    lag_p99_ns: int
    lag_max_ns: int


class LiveCounts:
    """Counts requests as they end, in constant memory.

    Args:
        classes: the SLO classes, shown even before one of their requests ends.
    """

    def __init__(self, classes: Iterable[str]) -> None:
        self._tally = AttainmentTally(classes)
        self._lag = DurationHistogram()
        self._errors: Counter[str] = Counter()

    def add(self, record: RequestRecord, judgement: Judgement | None) -> None:
        """Count one request that ended; a warm-up request has no judgement."""
        if record.lag_ns is not None:
            self._lag.add(record.lag_ns)
        if record.outcome not in _NO_ERRORS:
            error = record.detail or record.outcome.value
            known = error in self._errors or len(self._errors) < _MAX_ERRORS
            self._errors[error if known else "other errors"] += 1
        if judgement is not None:
            self._tally.add(record, judgement)

    def snapshot(self) -> LiveSnapshot:
        """Return the counts so far."""
        return LiveSnapshot(
            overall=self._tally.overall(),
            classes=self._tally.by_class(),
            errors=tuple(self._errors.most_common(_SHOWN_ERRORS)),
            lag_p99_ns=self._lag.quantile_ns(0.99),
            lag_max_ns=self._lag.max_ns,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The progress of a run at one instant.

    Args:
        elapsed_ns: since the run's zero.
        duration_ns: from the run's zero to the last arrival.
        planned: requests of the whole run.
        sent: requests sent.
        in_flight: requests sent and not ended.
        counts: of the requests that ended.
    """

    elapsed_ns: int
    duration_ns: int
    planned: int
    sent: int
    in_flight: int
    counts: LiveSnapshot


@contextmanager
def display(now: Callable[[], RunProgress], console: Console) -> Iterator[None]:
    """Show a run until the block ends; call it inside the running loop.

    Args:
        now: reads the counts; called in the event loop.
        console: on stderr.
    """
    if console.is_terminal:
        live = Live(_panel(now()), console=console, refresh_per_second=1 / _TICK_S, transient=True)
        with live:
            ticking = asyncio.ensure_future(_tick_panel(live, now))
            try:
                yield
            finally:
                ticking.cancel()
    else:
        ticking = asyncio.ensure_future(_tick_lines(console, now))
        try:
            yield
        finally:
            ticking.cancel()


async def _tick_panel(live: Live, now: Callable[[], RunProgress]) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        live.update(_panel(now()))


async def _tick_lines(console: Console, now: Callable[[], RunProgress]) -> None:
    while True:
        await asyncio.sleep(_LINE_EVERY_S)
        console.print(_line(now()), soft_wrap=True, highlight=False, markup=False)


def _panel(progress: RunProgress) -> Table:
    counts = progress.counts
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("time", _time(progress))
    table.add_row("sent", f"{progress.sent} of {progress.planned}, {progress.in_flight} in flight")
    for one in counts.classes:
        table.add_row(Text(one.name or "all"), _attained(one))
    table.add_row("missed by", _misses(counts.overall))
    for error, count in counts.errors:
        table.add_row("error", Text(f"{count} × {error}", style="red"))
    table.add_row("send lag", _lag(counts))
    return table


def _line(progress: RunProgress) -> str:
    counts = progress.counts
    errors = "; ".join(f"{count} × {error}" for error, count in counts.errors)
    return (
        f"{_time(progress)}: sent {progress.sent} of {progress.planned}, "
        f"{progress.in_flight} in flight, attained {_share(counts.overall)}, "
        f"missed by {_misses(counts.overall)}, "
        f"send lag {_lag(counts)}{f', errors: {errors}' if errors else ''}"
    )


def _time(progress: RunProgress) -> str:
    elapsed = max(0, progress.elapsed_ns)
    remaining = progress.duration_ns - elapsed
    shown = format_duration(elapsed)
    if remaining > 0:
        return f"{shown}, {format_duration(remaining)} left"
    return f"{shown}, waiting for the last answers"


def _attained(counts: ClassCounts) -> Text:
    text = Text(_share(counts))
    if counts.attainment.good < counts.attainment.total:
        text.stylize("yellow")
    return text


def _share(counts: ClassCounts) -> str:
    share = counts.attainment.share
    if share is None:
        return f"- ({counts.rows} unjudged)" if counts.rows else "-"
    return f"{float(share):.2%} ({counts.attainment.good} of {counts.attainment.total})"


def _misses(counts: ClassCounts) -> str:
    return ", ".join(f"{reason} {n}" for reason, n in counts.misses.items()) or "nothing"


def _lag(counts: LiveSnapshot) -> str:
    return f"p99 {format_duration(counts.lag_p99_ns)}, max {format_duration(counts.lag_max_ns)}"
