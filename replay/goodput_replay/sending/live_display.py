"""The live display of a run on stderr: a panel on a terminal, a line every ten seconds elsewhere.

Drawing must not disturb what is measured: counts are taken in the event loop, twice a second,
and drawn by a thread of the display's own.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.live import Live
from rich.table import Table
from rich.text import Text

from goodput_core.slo.attainment import AttainmentTally, ClassCounts
from goodput_core.units import format_duration
from goodput_replay.sending.sketch import DurationSketch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import Console

    from goodput_core.slo.judging import Judgement
    from goodput_core.slo.record import RequestRecord

__all__ = ["Moment", "Observer", "Progress", "display"]

_TICK_S: Final = 0.5
_LINE_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is shown.

    Args:
        elapsed_ns: since the run's zero.
        duration_ns: from the run's zero to the last arrival.
        planned: requests of the whole run.
        sent: requests that left.
        in_flight: requests without an end.
        progress: what is known of those that ended.
    """

    elapsed_ns: int
    duration_ns: int
    planned: int
    sent: int
    in_flight: int
    progress: Progress


@contextmanager
def display(now: Callable[[], Moment], console: Console) -> Iterator[None]:
    """Show a run until the block ends; call it inside the running loop.

    Args:
        now: takes the counts; called in the event loop.
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


async def _tick_panel(live: Live, now: Callable[[], Moment]) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        live.update(_panel(now()))


async def _tick_lines(console: Console, now: Callable[[], Moment]) -> None:
    while True:
        await asyncio.sleep(_LINE_EVERY_S)
        console.print(_line(now()), soft_wrap=True, highlight=False)


def _panel(moment: Moment) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("time", _time(moment))
    table.add_row("sent", f"{moment.sent} of {moment.planned}, {moment.in_flight} in flight")
    for counts in moment.progress.classes:
        table.add_row(counts.name or "all", _attained(counts))
    table.add_row("missed by", _misses(moment.progress.overall))
    table.add_row("send lag", _lag(moment.progress))
    return table


def _line(moment: Moment) -> str:
    progress = moment.progress
    return (
        f"{_time(moment)}: sent {moment.sent} of {moment.planned}, {moment.in_flight} in flight, "
        f"attained {_share(progress.overall)}, missed by {_misses(progress.overall)}, "
        f"send lag {_lag(progress)}"
    )


def _time(moment: Moment) -> str:
    elapsed = max(0, moment.elapsed_ns)
    remaining = moment.duration_ns - elapsed
    shown = format_duration(elapsed)
    if remaining > 0:
        return f"{shown}, {format_duration(remaining)} to go"
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


def _lag(progress: Progress) -> str:
    return f"p99 {format_duration(progress.lag_p99_ns)}, max {format_duration(progress.lag_max_ns)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A moment of a run.

    Args:
        ended: requests that ended, warm-up included.
        overall: all judged requests together.
        classes: each class.
        lag_p99_ns: of the sends so far.
        lag_max_ns: of the sends so far.
    """

    ended: int
    overall: ClassCounts
    classes: tuple[ClassCounts, ...]
    lag_p99_ns: int
    lag_max_ns: int


class Observer:
    """Counts requests as they end.

    Args:
        classes: the promised classes, shown even before a request of theirs ends.
    """

    def __init__(self, classes: Iterable[str]) -> None:
        self._tally = AttainmentTally(classes)
        self._lag = DurationSketch()
        self._ended = 0

    def ended(self, record: RequestRecord, judgement: Judgement | None) -> None:
        """Count one request that ended; a warm-up request has no judgement."""
        self._ended += 1
        if record.lag_ns is not None:
            self._lag.add(record.lag_ns)
        if judgement is not None:
            self._tally.add(record, judgement)

    def progress(self) -> Progress:
        """The counts so far."""
        return Progress(
            ended=self._ended,
            overall=self._tally.overall(),
            classes=self._tally.by_class(),
            lag_p99_ns=self._lag.quantile_ns(0.99),
            lag_max_ns=self._lag.max_ns,
        )
