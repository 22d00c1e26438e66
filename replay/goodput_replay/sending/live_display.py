"""Live display of a run on stderr: a panel on a terminal, a line every ten seconds elsewhere.

Drawing must not delay requests. On a terminal, the event loop therefore only reads the counts,
twice a second, and a thread of the display draws them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.live import Live
from rich.table import Table
from rich.text import Text

from goodput_core.histogram import DurationHistogram
from goodput_core.slo.attainment import AttainmentTally, ClassCounts
from goodput_core.slo.record import Outcome
from goodput_core.text import printable
from goodput_core.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import Console

    from goodput_core.slo.judging import Judgement
    from goodput_core.slo.record import RequestRecord

__all__ = ["LiveCounts", "RunProgress", "display"]

_TICK_S: Final = 0.5
_LINE_EVERY_S: Final = 10.0
_MAX_ERRORS: Final = 100
_SHOWN_ERRORS: Final = 3
_NO_ERRORS: Final = frozenset({Outcome.OK, Outcome.CANCELLED})


class LiveCounts:
    """Counts requests as they end, in constant memory.

    Args:
        classes: the SLO classes, shown even before one of their requests ends.

    Attributes:
        tally: judged requests by class.
        lag: send lag of the requests that were sent.
        errors: requests by distinct error, warm-up requests included.
    """

    def __init__(self, classes: Iterable[str]) -> None:
        self.tally = AttainmentTally(classes)
        self.lag = DurationHistogram()
        self.errors: Counter[str] = Counter()

    def add(self, record: RequestRecord, judgement: Judgement | None) -> None:
        """Count one request that ended; a warm-up request has no judgement."""
        if record.lag_ns is not None:
            self.lag.add(record.lag_ns)
        if record.outcome not in _NO_ERRORS:
            error = record.detail or record.outcome.value
            listed = error in self.errors or len(self.errors) < _MAX_ERRORS
            self.errors[error if listed else "other errors"] += 1
        if judgement is not None:
            self.tally.add(record, judgement)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Progress of a run.

    Args:
        elapsed_ns: time since the run's time zero.
        duration_ns: time from the run's time zero to the last arrival.
        planned: requests of the complete run.
        sent: requests sent.
        in_flight: requests that were sent and have not ended.
        counts: counts of the requests that ended.
    """

    elapsed_ns: int
    duration_ns: int
    planned: int
    sent: int
    in_flight: int
    counts: LiveCounts


@contextmanager
def display(read_progress: Callable[[], RunProgress], console: Console) -> Iterator[None]:
    """Show a run until the block ends; requires a running event loop.

    Args:
        read_progress: returns the current progress; called in the event loop.
        console: console on stderr.
    """
    with ExitStack() as stack:
        if console.is_terminal:
            live = stack.enter_context(
                Live(
                    _build_panel(read_progress()),
                    console=console,
                    refresh_per_second=1 / _TICK_S,
                    transient=True,
                )
            )
            work = _repeat(_TICK_S, lambda: live.update(_build_panel(read_progress())))
        else:
            work = _repeat(_LINE_EVERY_S, lambda: _print_line(console, read_progress()))
        stack.callback(asyncio.ensure_future(work).cancel)
        yield


async def _repeat(every_s: float, draw: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(every_s)
        draw()


def _print_line(console: Console, progress: RunProgress) -> None:
    console.print(_format_line(progress), soft_wrap=True, highlight=False, markup=False)


def _build_panel(progress: RunProgress) -> Table:
    counts = progress.counts
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("time", _format_time(progress))
    table.add_row("sent", f"{progress.sent} of {progress.planned}, {progress.in_flight} in flight")
    for class_counts in counts.tally.by_class():
        table.add_row(Text(printable(class_counts.name) or "all"), _format_attained(class_counts))
    table.add_row("misses", _format_misses(counts.tally.overall()))
    for error, count in counts.errors.most_common(_SHOWN_ERRORS):
        table.add_row("error", Text(f"{count} × {printable(error)}", style="red"))
    table.add_row("send lag", _format_lag(counts.lag))
    return table


def _format_line(progress: RunProgress) -> str:
    counts = progress.counts
    overall = counts.tally.overall()
    frequent = counts.errors.most_common(_SHOWN_ERRORS)
    errors = "; ".join(f"{count} × {printable(error)}" for error, count in frequent)
    return (
        f"{_format_time(progress)}: sent {progress.sent} of {progress.planned}, "
        f"{progress.in_flight} in flight, attained {_format_share(overall)}, "
        f"misses: {_format_misses(overall)}, "
        f"send lag {_format_lag(counts.lag)}{f', errors: {errors}' if errors else ''}"
    )


def _format_time(progress: RunProgress) -> str:
    elapsed = max(0, progress.elapsed_ns)
    remaining = progress.duration_ns - elapsed
    shown = format_duration(elapsed)
    if remaining > 0:
        return f"{shown}, {format_duration(remaining)} left"
    return f"{shown}, waiting for the last responses"


def _format_attained(counts: ClassCounts) -> Text:
    text = Text(_format_share(counts))
    if counts.attainment.good < counts.attainment.total:
        text.stylize("yellow")
    return text


def _format_share(counts: ClassCounts) -> str:
    share = counts.attainment.share
    if share is None:
        return f"- ({counts.rows} unjudged)" if counts.rows else "-"
    return f"{float(share):.2%} ({counts.attainment.good} of {counts.attainment.total})"


def _format_misses(counts: ClassCounts) -> str:
    return ", ".join(f"{reason} {n}" for reason, n in counts.misses.items()) or "none"


def _format_lag(lag: DurationHistogram) -> str:
    return f"p99 {format_duration(lag.quantile_ns(0.99))}, max {format_duration(lag.max_ns)}"
