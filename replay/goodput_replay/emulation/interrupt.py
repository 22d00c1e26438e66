"""Ending a computation at a point where nothing is half done.

The first signal is noted and raised by the next `check`; the second ends the process at once.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from goodput_replay.stopping import watching_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from goodput_replay.run.folder import RunWriter

__all__ = ["Stopped", "stoppable"]


class Stopped(Exception):
    """A person or the system asked to stop."""


@contextmanager
def stoppable(writer: RunWriter) -> Iterator[Callable[[], None]]:
    """Watch for signals; the main thread only.

    Args:
        writer: keeps what it has when a second signal ends the process.

    Yields:
        `check`, which raises `Stopped` once a signal has come.
    """
    reasons: list[str] = []

    def check() -> None:
        if reasons:
            raise Stopped(reasons[0])

    with watching_signals(reasons.append, writer):
        yield check
