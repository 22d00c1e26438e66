"""Who ended a run early, and how its tasks learn of it.

The first Ctrl-C or SIGTERM stops sending and keeps what was recorded; the second ends the
process at once, by the signal's own default.
"""

from __future__ import annotations

import signal
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

__all__ = ["StoppedBy", "Stopper"]


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

    def watch_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop on the first Ctrl-C or SIGTERM."""
        for number, said in ((signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")):
            loop.add_signal_handler(number, self._signalled, loop, f"interrupted by {said}")

    def _signalled(self, loop: asyncio.AbstractEventLoop, reason: str) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        self.stop(StoppedBy.SIGNAL, reason)
