"""Who ended a run early, and how its tasks learn of it.

The first Ctrl-C, SIGTERM or closed terminal stops sending and keeps what was recorded. After it
the run is closed and judged, which takes a while where there are many records; a second one
ends the process at once, also in the middle of that.
"""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING, Final

from goodput_core.errors import ExitCode
from goodput_core.signals import Terminals

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator
    from types import FrameType

    from goodput_replay.run.folder import RunWriter

__all__ = ["StoppedBy", "Stopper", "watching_signals"]

_ASKED_BY: Final = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "the closed terminal",
}


class StoppedBy(Enum):
    """What ended a run before its last answer."""

    SIGNAL = "signal"
    RULE = "rule"


class Stopper:
    """Cancels one task, for one reason; later reasons are ignored.

    Args:
        task: what is to stop.
    """

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self.by: StoppedBy | None = None
        self.reason = ""

    def stop(self, by: StoppedBy, reason: str) -> None:
        """Cancel the task; `reason` follows "the run ended early: "."""
        if self.by is None:
            self.by, self.reason = by, reason
            self._task.cancel()


@contextmanager
def watching_signals(first: Callable[[str], object], writer: RunWriter) -> Iterator[None]:
    """Tell of the first signal and end the process on the second; the main thread only.

    Args:
        first: called with "interrupted by Ctrl-C" or the like, between any two instructions.
        writer: keeps what it has when the process ends at once.
    """
    asked = False

    def received(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        said = _ASKED_BY[signal.Signals(number)]
        if asked:
            _end_now(said, writer)
        asked = True
        if number == signal.SIGHUP:
            terminals.closed()
        # A shell repeats to its jobs the hang-up that the system has sent them.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        first(f"interrupted by {said}")

    terminals = Terminals()
    # Not an event loop's own handlers: they would wait until a judgement is over.
    before = {
        number: signal.signal(number, received)
        for number in _ASKED_BY
        if signal.getsignal(number) is not signal.SIG_IGN  # as `nohup` leaves SIGHUP
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_now(said: str, writer: RunWriter) -> None:
    # Not by an exception: it would wait for the service, or vanish in a callback.
    writer.abandon()
    with suppress(OSError):
        # Past the stream's own buffer, in the middle of which this signal may have come.
        os.write(2, f"error: ended at once by {said}; {writer.holds}\n".encode())
    os._exit(ExitCode.INTERRUPTED)
