"""Requests to end a process: SIGINT, SIGTERM, SIGHUP and the end of its standard input.

Commands install signal handlers only through this module, except the operator's, because Kopf
replaces them while it starts. By default SIGTERM and SIGHUP end a process between two
instructions, and its temporary files and children remain. A signal that is ignored when a handler
is installed stays ignored, as SIGHUP under `nohup`. asyncio is imported inside functions, because
every command imports this module and most need no event loop.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from goodput_core.errors import ExitCode

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = [
    "Shutdown",
    "StopCause",
    "defer_signals",
    "handle_stop_signals",
    "ignore_stop_signals",
    "interrupt_by_signals",
    "watch_stop_requests",
]


class StopCause(StrEnum):
    """Cause of a request to end the process; the value completes "interrupted by …"."""

    CTRL_C = "Ctrl-C"
    SIGTERM = "SIGTERM"
    HANG_UP = "the closed terminal"
    STDIN_CLOSED = "stdin closed"

    @property
    def exit_code(self) -> ExitCode:
        """0 if a supervisor ended the process, 130 if a user interrupted it."""
        supervised = self in {StopCause.SIGTERM, StopCause.STDIN_CLOSED}
        return ExitCode.PASS if supervised else ExitCode.INTERRUPTED


_CAUSES: Final = {
    signal.SIGINT: StopCause.CTRL_C,
    signal.SIGTERM: StopCause.SIGTERM,
    signal.SIGHUP: StopCause.HANG_UP,
}


class _Terminals:
    """The standard streams that are terminals, looked up before the terminal may close."""

    def __init__(self) -> None:
        self._descriptors = [number for number in (1, 2) if os.isatty(number)]

    def closed(self) -> None:
        """Redirect them to /dev/null: every write to a closed terminal raises."""
        if not self._descriptors:
            return
        null = os.open(os.devnull, os.O_WRONLY)
        for number in self._descriptors:
            os.dup2(null, number)
        os.close(null)


def interrupt_by_signals() -> None:
    """Raise `KeyboardInterrupt` on Ctrl-C, SIGTERM and SIGHUP; main thread only.

    A command that installs handlers of its own replaces these.
    """

    def interrupt(_cause: StopCause) -> None:
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        # Python's own handler, because asyncio replaces only this one by a cancellation.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _install([n for n in _CAUSES if signal.getsignal(n) is signal.SIG_DFL], interrupt)


@contextmanager
def handle_stop_signals(handle: Callable[[StopCause], object]) -> Iterator[None]:
    """Call `handle` on each SIGINT, SIGTERM and SIGHUP inside the block; main thread only.

    Unlike an event loop's handlers, these run at once, between any two instructions, even while a
    computation blocks the loop. Only the first SIGHUP is handled, because a shell sends its jobs a
    second one after that of the system.
    """
    before = _install([n for n in _CAUSES if signal.getsignal(n) is not signal.SIG_IGN], handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def defer_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals inside the block; this process receives them after it.

    Processes started inside the block never receive them, since they inherit the mask.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP in a child process that its parent ends by other means."""
    for number in _CAUSES:
        signal.signal(number, signal.SIG_IGN)


def watch_stop_requests(
    handle: Callable[[StopCause], object], *, exit_with_parent: bool = False
) -> None:
    """Call `handle` on the running event loop for each signal, and for the end of stdin.

    Args:
        handle: called with the cause, once for each request; repeated SIGHUPs count once.
        exit_with_parent: True to treat the end of stdin as a request. It occurs when the parent
            process that holds the other end exits, even by `kill -9`.
    """
    import asyncio  # noqa: PLC0415 - see the module's docstring

    loop = asyncio.get_running_loop()
    terminals = _Terminals()

    def hang_up() -> None:
        terminals.closed()
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
        handle(StopCause.HANG_UP)

    for number, cause in _CAUSES.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            continue
        if number is signal.SIGHUP:
            loop.add_signal_handler(number, hang_up)
        else:
            loop.add_signal_handler(number, handle, cause)
    if exit_with_parent:
        _watch_stdin(loop, lambda: handle(StopCause.STDIN_CLOSED))


class Shutdown:
    """The shutdown of a server: the first request starts a drain, the second one ends it at once.

    The end of stdin ends the server at once, because the parent process has exited. Create it
    inside a running event loop.

    Args:
        exit_with_parent: True to treat the end of stdin as a request.

    Attributes:
        requested: set by the first request.
        immediate: set when the server must stop without waiting for requests.
    """

    def __init__(self, *, exit_with_parent: bool) -> None:
        import asyncio  # noqa: PLC0415 - see the module's docstring

        self.requested: Final = asyncio.Event()
        self.immediate: Final = asyncio.Event()
        self._interrupted = False
        watch_stop_requests(self._on_request, exit_with_parent=exit_with_parent)

    @property
    def exit_code(self) -> ExitCode:
        """0 after a drain by SIGTERM; 130 after Ctrl-C, a hang-up, or an immediate end."""
        interrupted = self._interrupted or self.immediate.is_set()
        return ExitCode.INTERRUPTED if interrupted else ExitCode.PASS

    async def wait(self, *tasks: asyncio.Future[None]) -> None:
        """Wait for a stop request or until one of `tasks`, which normally do not end, ends."""
        import asyncio  # noqa: PLC0415 - see the module's docstring

        requested = asyncio.ensure_future(self.requested.wait())
        awaited: set[asyncio.Future[Any]] = {requested, *tasks}
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            requested.cancel()

    def _on_request(self, cause: StopCause) -> None:
        if self.requested.is_set() or cause is StopCause.STDIN_CLOSED:
            self.immediate.set()
        self.requested.set()
        self._interrupted = self._interrupted or cause in {StopCause.CTRL_C, StopCause.HANG_UP}


def _install(
    numbers: list[signal.Signals], handle: Callable[[StopCause], object]
) -> dict[signal.Signals, Any]:
    """Install a handler and return the handlers that it replaced."""
    terminals = _Terminals()

    def received(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            terminals.closed()
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        handle(_CAUSES[signal.Signals(number)])

    return {number: signal.signal(number, received) for number in numbers}


def _watch_stdin(loop: asyncio.AbstractEventLoop, closed: Callable[[], object]) -> None:
    """Call `closed` on the loop at the end of stdin.

    A thread reads it, because an event loop cannot watch a regular file or a closed descriptor.
    """

    def read() -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError:
            pass  # a closed stdin is at its end too
        try:
            loop.call_soon_threadsafe(closed)
        except RuntimeError:
            pass  # the loop ended first

    threading.Thread(target=read, name="watch-stdin", daemon=True).start()
