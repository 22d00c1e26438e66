"""Signals and the end of stdin, each case in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

import pytest

from goodput_core.signals import StopCause

if TYPE_CHECKING:
    from collections.abc import Iterator

_WATCH = """
    import asyncio
    from goodput_core.signals import watch_stop_requests

    async def main():
        watch_stop_requests(lambda cause: print(cause, flush=True), exit_with_parent=True)
        print("ready", flush=True)
        await asyncio.sleep(60)

    asyncio.run(main())
"""
_SHUTDOWN = """
    import asyncio
    from goodput_core.signals import Shutdown

    async def main():
        shutdown = Shutdown(exit_with_parent=True)
        print("ready", flush=True)
        await shutdown.wait()
        print("draining", flush=True)
        await shutdown.immediate.wait()
        return shutdown.exit_code

    raise SystemExit(asyncio.run(main()))
"""
_HANDLE = """
    import time
    from goodput_core.signals import handle_stop_signals

    causes = []
    with handle_stop_signals(causes.append):
        print("ready", flush=True)
        while len(causes) < 2:
            time.sleep(0.001)
    print(*causes, sep=", ", flush=True)
    while True:
        time.sleep(0.001)
"""
_INTERRUPT = """
    import time
    from goodput_core.signals import interrupt_by_signals

    interrupt_by_signals()
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@contextmanager
def _python(code: str, *, hang_up: int = signal.SIG_DFL) -> Iterator[subprocess.Popen[str]]:
    def prepare() -> None:
        signal.signal(signal.SIGHUP, hang_up)

    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=prepare,  # noqa: PLW1509 - no other thread runs
    ) as process:
        try:
            assert _line(process.stdout) == "ready"
            yield process
        finally:
            process.kill()


def _line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


def test_each_request_is_reported_with_its_cause() -> None:
    with _python(_WATCH) as process:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            process.send_signal(number)
            assert _line(process.stdout) == StopCause(
                {15: "SIGTERM", 2: "Ctrl-C", 1: "the closed terminal"}[number]
            )
        process.send_signal(signal.SIGHUP)  # a shell's repetition of the one before
        assert process.stdin is not None
        process.stdin.close()
        assert _line(process.stdout) == "stdin closed"


def test_a_second_request_ends_a_shutdown_at_once() -> None:
    with _python(_SHUTDOWN) as process:
        process.send_signal(signal.SIGTERM)
        assert _line(process.stdout) == "draining"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 130


def test_the_end_of_the_parent_ends_a_shutdown_at_once() -> None:
    with _python(_SHUTDOWN) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 130


def test_handlers_are_removed_after_the_block() -> None:
    with _python(_HANDLE) as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert set(_line(process.stdout).split(", ")) == {"Ctrl-C", "SIGTERM"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_every_stop_signal_interrupts_a_command(number: int) -> None:
    with _python(_INTERRUPT) as process:
        process.send_signal(number)
        assert _line(process.stdout) == "interrupted"


@pytest.mark.parametrize("code", [_WATCH, _INTERRUPT], ids=["watch", "interrupt"])
def test_an_ignored_hang_up_stays_ignored(code: str) -> None:
    with _python(code, hang_up=signal.SIG_IGN) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert _line(process.stdout) in {"SIGTERM", "interrupted"}


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (StopCause.CTRL_C, 130),
        (StopCause.HANG_UP, 130),
        (StopCause.SIGTERM, 0),
        (StopCause.STDIN_CLOSED, 0),
    ],
)
def test_the_exit_code_depends_on_the_cause(cause: StopCause, code: int) -> None:
    assert cause.exit_code == code


def test_a_closed_terminal_does_not_break_later_writes() -> None:
    leader, follower = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_INTERRUPT)], stdout=follower, start_new_session=True
    )
    os.close(follower)
    assert os.read(leader, 100).strip() == b"ready"
    process.send_signal(signal.SIGHUP)
    os.close(leader)
    assert process.wait(10) == 0
