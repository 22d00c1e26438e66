"""How a process of the engine is told to end: in order, or without waiting.

A first SIGTERM, Ctrl-C or closed terminal asks for a drain, a second one ends it. A parent that
holds the other end of stdin and goes away ends it at once, even by `kill -9`. It also drains and
ends when a task has ended that should not: going on without it, it would be wrong and look well.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Final

from goodput_core.errors import ExitCode, InternalError
from goodput_core.signals import Terminals

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Stops", "require_running"]

_log: Final = logging.getLogger(__name__)


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

    async def wait(self, *vital: asyncio.Future[None]) -> None:
        """Wait until it should end.

        Args:
            vital: what should go on for as long as the process; the end of one is a reason too.
        """
        told = asyncio.ensure_future(self.soon.wait())
        any_of: set[asyncio.Future[Any]] = {told, *vital}
        try:
            await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()
        for one in vital:
            if one.done() and not one.cancelled():
                _log.error("ended by itself", extra={"detail": repr(one.exception())})

    def _on_signal(self, number: signal.Signals) -> None:
        self._interrupted = self._interrupted or number is not signal.SIGTERM
        if number is signal.SIGHUP:
            self._terminals.closed()
        (self.now if self.soon.is_set() else self.soon).set()

    def _at_once(self) -> None:
        self.soon.set()
        self.now.set()


def require_running(*vital: asyncio.Future[None]) -> None:
    """Raise what ended one of these; nothing, while all go on.

    Raises:
        InternalError: it ended, and nothing was wrong.
    """
    for one in vital:
        if one.done():
            one.result()
            raise InternalError("a part of this process ended too early; report it as a bug")


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
