"""Ending a computation at a point where nothing is half done.

The first Ctrl-C or SIGTERM is noted and raised by the next `check`; the second ends the process
at once, by the signal's own default.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Stopped", "stoppable"]

_WORDS: Final = {signal.SIGINT: "interrupted by Ctrl-C", signal.SIGTERM: "interrupted by SIGTERM"}


class Stopped(Exception):
    """A person or the system asked to stop."""


@contextmanager
def stoppable() -> Iterator[Callable[[], None]]:
    """Watch for signals; the main thread only.

    Yields:
        `check`, which raises `Stopped` once a signal has come.
    """
    stopped_by: list[signal.Signals] = []

    def note(number: int, _: Any) -> None:
        stopped_by.append(signal.Signals(number))
        for watched in _WORDS:
            signal.signal(watched, signal.SIG_DFL)

    def check() -> None:
        if stopped_by:
            raise Stopped(_WORDS[stopped_by[0]])

    before = {number: signal.signal(number, note) for number in _WORDS}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
