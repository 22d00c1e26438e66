"""Replays as child processes, one after the other, and the signals that end them.

A child leads a process group of its own: Ctrl-C would otherwise reach it twice, and SIGTERM not
at all. It is told once of each signal, ends what it has started, and only then does the search.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from goodput_core.errors import Interrupted
from goodput_core.signals import Terminals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

__all__ = ["Replays", "replays"]

_ASKING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Replays:
    """Runs replays and passes signals on to the one that runs.

    Attributes:
        interrupted: whether a signal came.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._child: subprocess.Popen[bytes] | None = None
        self._waiting: int | None = None

    def run(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
        """Run one to its end, whatever ends it.

        Args:
            arguments: of `replay`.

        Raises:
            Interrupted: a signal came before it was started.
        """
        if self.interrupted:
            raise Interrupted("interrupted")
        command = [sys.executable, "-m", "goodput_core", "replay", *arguments]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        ) as child:
            self._child = child
            if self._waiting is not None:  # it came while the child was being created
                child.send_signal(self._waiting)
            out, err = child.communicate()
        self._child = None
        return subprocess.CompletedProcess(command, child.returncode, out, err)

    def interrupt(self, number: int) -> None:
        """Pass a signal on, at any time."""
        self.interrupted = True
        if self._child is None:
            self._waiting = number
        else:
            self._child.send_signal(number)


@contextmanager
def replays() -> Iterator[Replays]:
    """Replays that Ctrl-C, SIGTERM and a closed terminal end; the main thread only."""
    run = Replays()
    terminals = Terminals()

    def received(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            terminals.closed()
            # A shell repeats to its jobs the hang-up that the system has sent them.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        run.interrupt(number)

    before = {
        number: signal.signal(number, received)
        for number in _ASKING
        if signal.getsignal(number) is not signal.SIG_IGN  # as `nohup` leaves SIGHUP
    }
    try:
        yield run
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
