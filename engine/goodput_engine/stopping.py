"""How a process of the engine is told to end: in order, or without waiting.

A first SIGTERM, Ctrl-C or closed terminal asks for a drain, a second one ends it. A parent that
holds the other end of stdin and goes away ends it at once, even by `kill -9`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import TYPE_CHECKING

from goodput_core.errors import ExitCode
from goodput_core.interruption import Terminals

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Stops"]


class Stops:
    """What asked this process to end. Created inside a running event loop, which it listens on.

    Args:
        exit_with_parent: whether the end of stdin ends the process.

    Attributes:
        soon: set once it should end.
        now: set once it should not wait for what runs.
    """

    def __init__(self, *, exit_with_parent: bool) -> None:
        self.soon = asyncio.Event()
        self.now = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._interrupted = False
        self._terminals = Terminals()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` leaves SIGHUP
                loop.add_signal_handler(number, self._on_signal, number)
        if exit_with_parent:
            _watch_stdin(loop, self._at_once)

    @property
    def exit_code(self) -> ExitCode:
        """0 for a stop in order; 130 after Ctrl-C, a hang-up, or when told not to wait."""
        return ExitCode.INTERRUPTED if self._interrupted or self.now.is_set() else ExitCode.PASS

    def _on_signal(self, number: signal.Signals) -> None:
        self._interrupted = self._interrupted or number is not signal.SIGTERM
        if number is signal.SIGHUP:
            self._terminals.closed()
        (self.now if self.soon.is_set() else self.soon).set()

    def _at_once(self) -> None:
        self.soon.set()
        self.now.set()


def _watch_stdin(loop: asyncio.AbstractEventLoop, closed: Callable[[], None]) -> None:
    """Call `closed` on the loop once nobody holds the other end of stdin.

    A thread, because a regular file or a closed descriptor cannot be watched by the loop.
    """

    def read() -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError:
            pass  # no stdin at all is a closed one
        try:
            loop.call_soon_threadsafe(closed)
        except RuntimeError:
            pass  # the loop ended first

    threading.Thread(target=read, name="watch-stdin", daemon=True).start()
