"""The display of a run in virtual time on stderr: a bar on a terminal, else a line now and then.

It looks at this machine's clock, for people; nothing of it reaches a result.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.progress import BarColumn, Progress, TextColumn

from goodput_core.units import NS_PER_S, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.plan import PlanStats

__all__ = ["display"]

_LOOK_EVERY: Final = 64  # requests
_BAR_EVERY_NS: Final = NS_PER_S // 5
_LINE_EVERY_NS: Final = 10 * NS_PER_S


@contextmanager
def display(stats: PlanStats, console: Console) -> Iterator[Callable[[RequestRecord], None]]:
    """Show how far a run has come until the block ends.

    Args:
        stats: of the plan.
        console: on stderr.

    Yields:
        To be told of each request that ended.
    """
    if not console.is_terminal:

        def line(_: int, words: str) -> None:
            console.print(words, soft_wrap=True, highlight=False)

        yield _Pulse(stats, _LINE_EVERY_NS, line).ended
        return
    columns = (BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=stats.rows)

        def draw(done: int, words: str) -> None:
            bar.update(task, completed=done, description=words)

        yield _Pulse(stats, _BAR_EVERY_NS, draw).ended


class _Pulse:
    """Counts, and now and then says how far it is."""

    def __init__(self, stats: PlanStats, every_ns: int, say: Callable[[int, str], None]) -> None:
        self._stats = stats
        self._every_ns = every_ns
        self._say = say
        self._started_ns = self._said_ns = time.monotonic_ns()
        self._done = 0

    def ended(self, record: RequestRecord) -> None:
        """A request ended."""
        self._done += 1
        if self._done % _LOOK_EVERY:
            return
        now_ns = time.monotonic_ns()
        if now_ns - self._said_ns < self._every_ns:
            return
        self._said_ns = now_ns
        rate = self._done * NS_PER_S / (now_ns - self._started_ns)
        virtual = format_duration(record.end_ns or 0)
        self._say(
            self._done,
            f"{virtual} of virtual time, {self._done:,} of {self._stats.rows:,} requests, "
            f"{rate:,.0f} requests/s",
        )
