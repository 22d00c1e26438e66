"""What SIGTERM and a closed terminal do to a command: what Ctrl-C does.

By default both end a process between two instructions, and leave its temporary files and the
processes that it has started. A command with handlers of its own installs them over these. It
knows nothing of what a command does.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Terminals", "interrupt_by_signals"]

_LIKE_CTRL_C: Final = (signal.SIGTERM, signal.SIGHUP)


class Terminals:
    """Which of stdout and stderr are terminals: asked while they still are."""

    def __init__(self) -> None:
        self._numbers = [number for number in (1, 2) if os.isatty(number)]

    def closed(self) -> None:
        """Point them at nothing: every write to a terminal that was closed is an error."""
        if not self._numbers:
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in self._numbers:
            os.dup2(nowhere, number)
        os.close(nowhere)


def interrupt_by_signals() -> None:
    """Raise `KeyboardInterrupt` on SIGTERM and SIGHUP, too; the main thread only.

    A signal that is ignored, as `nohup` leaves SIGHUP, stays ignored.
    """
    terminals = Terminals()

    def received(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            terminals.closed()
            # A shell repeats to its jobs the hang-up that the system has sent them.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in _LIKE_CTRL_C:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, received)
