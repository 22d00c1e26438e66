"""One start of one process of the fleet. Only this module creates and signals processes.

A process leads a process group, so that Ctrl-C reaches it only through the supervisor, and SIGKILL
reaches its child processes too. Its stdin is a pipe of the supervisor, so the process ends with the
supervisor, even by `kill -9`. Its output is untrusted: lines are bounded and control characters are
escaped. Other modules decide when to start or stop a process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import aiohttp

from goodput_core.contract import EVENT_LISTENING, PATH_LIVE
from goodput_core.errors import ExitCode
from goodput_operator.local.decide import Address, ProcessPhase, ProcessView, Role

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from goodput_operator.backoff import BackOff
    from goodput_operator.local.commands import Command

__all__ = [
    "MAX_LINE_BYTES",
    "ChildProcess",
    "LineSplitter",
    "answers",
    "parse_listening",
    "port_of",
]

_MAX_LAST_LINE: Final = 300
_CLOSE_TIMEOUT_S: Final = 1.0
"""Time limit for the last output of a process that ended."""
_LIVENESS_INTERVAL_S: Final = 1.0
_ERROR: Final = "error: "
MAX_LINE_BYTES: Final = 8192
_CONTROLS: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 9}
"""Escapes of control characters, since a log line may contain a client's bytes."""
_LIVENESS_TIMEOUT: Final = aiohttp.ClientTimeout(total=2.0)


class ChildProcess:
    """One start of a process. Create and use it inside a running event loop.

    Args:
        name: name of the process.
        role: replica or router.
        earlier: the last start, which has ended; None for the first start.
        back_off: counts consecutive failures.
        clock: monotonic clock in nanoseconds.
        log: called with the name and each line that the process writes.
        changed: called when the process became ready or ended.
        answers: checks the liveness of the process at this address.
        silent: called when the first liveness check fails.
        routable: returns once a router is ready at this address; None for a replica, which is
            ready as soon as it listens.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        *,
        earlier: ProcessView | None,
        back_off: BackOff,
        clock: Callable[[], int],
        log: Callable[[str, str], None],
        changed: Callable[[ProcessView], None],
        answers: Callable[[Address], Awaitable[bool]],
        silent: Callable[[], None],
        routable: Callable[[Address], Awaitable[None]] | None = None,
    ) -> None:
        self._name = name
        self._role = role
        self._back_off = back_off
        self._clock = clock
        self._log = log
        self._changed = changed
        self._answers = answers
        self._silent = silent
        self._routable = routable
        self._failures = earlier.failures if earlier else 0
        self._ever_ready = earlier.ever_ready if earlier else False

        self._transport: asyncio.SubprocessTransport | None = None
        self._listening: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        self._phase = ProcessPhase.STARTING
        self._started_ns = clock()
        self._ready_ns: int | None = None
        self._exited_ns: int | None = None
        self._terminated_ns: int | None = None
        self._killed = False
        self._silent_ns: int | None = None
        self._address: Address | None = None
        # Values of the last start, until this one reports its own.
        self._exit_code = earlier.exit_code if earlier else None
        self._error = earlier.error if earlier else None
        self._error_logged = True
        self._last_line = earlier.last_line if earlier else None

    def view(self) -> ProcessView:
        """Return the state of the process."""
        return ProcessView(
            name=self._name,
            role=self._role,
            phase=self._phase,
            started_ns=self._started_ns,
            ready_ns=self._ready_ns,
            exited_ns=self._exited_ns,
            exit_code=self._exit_code,
            failures=self._failures,
            ever_ready=self._ever_ready,
            terminated_ns=self._terminated_ns,
            killed=self._killed,
            silent_ns=self._silent_ns,
            address=self._address,
            error=self._error,
            last_line=self._last_line,
        )

    def terminate(self) -> None:
        """Send SIGTERM unless the process has ended."""
        self._terminated_ns = self._clock()
        if self._transport is not None:
            try:
                self._transport.terminate()
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        """Send SIGKILL to the process and its children."""
        self._killed = True
        if self._transport is not None:
            _kill_group(self._transport)

    async def run(self, command: Command) -> None:
        """Start the process and wait for its end; a cancellation kills it.

        A failed start or end is not raised; `view` returns it.
        """
        try:
            transport, output = await asyncio.get_running_loop().subprocess_exec(
                lambda: _Output({1: self._on_stdout, 2: self._on_stderr}),
                *command.argv,
                env=dict(command.env),
                process_group=0,
            )
        except OSError as error:
            self._take(f"cannot start {command.argv[0]}: {error.strerror}")
            self._ended(None)
            return
        self._transport = transport
        # Requests received while the process was being created.
        if self._killed:
            self.kill()
        elif self._terminated_ns is not None:
            self.terminate()
        try:
            async with asyncio.TaskGroup() as group:
                watches = [
                    group.create_task(self._become_ready()),
                    group.create_task(self._watch_life()),
                ]
                await output.wait_exited()
                for watch in watches:
                    watch.cancel()
        finally:
            # Remaining children would hold its pipes and its port. The id of a process group is not
            # reused while the group has a member.
            _kill_group(transport)
            await output.wait_closed()
            transport.close()
            self._transport = None
            self._ended(transport.get_returncode())

    async def _become_ready(self) -> None:
        address = await self._listening
        self._phase = ProcessPhase.LISTENING
        if self._routable is not None:
            await self._routable(address)
        self._phase = ProcessPhase.READY
        self._ready_ns = self._clock()
        self._ever_ready = True
        self._changed(self.view())

    async def _watch_life(self) -> None:
        address = await self._listening
        while True:
            await asyncio.sleep(_LIVENESS_INTERVAL_S)
            if await self._answers(address):
                self._silent_ns = None
            elif self._silent_ns is None:
                self._silent_ns = self._clock()
                self._silent()

    def _ended(self, code: int | None) -> None:
        self._phase = ProcessPhase.EXITED
        self._silent_ns = None
        self._exit_code = code
        self._exited_ns = self._clock()
        self._failures = self._back_off.count_failures(
            self._failures, ready_ns=self._ready_ns, exited_ns=self._exited_ns
        )
        rejected = code == ExitCode.USAGE or self._terminated_ns is not None
        if self._ever_ready or not rejected:
            self._log_error()
        self._changed(self.view())

    def _on_stdout(self, line: str) -> None:
        address = None if self._listening.done() else parse_listening(line)
        if address is None:
            self._take(line)
        else:
            self._address = address
            self._listening.set_result(address)

    def _on_stderr(self, line: str) -> None:
        if self._phase is not ProcessPhase.STARTING or not line.startswith(_ERROR):
            self._take(line)
            return
        # An error at the start is not logged yet: the supervisor reports it for all replicas.
        self._log_error()
        self._error = line.removeprefix(_ERROR)
        self._error_logged = False

    def _log_error(self) -> None:
        if self._error is not None and not self._error_logged:
            self._error_logged = True
            self._log(self._name, f"{_ERROR}{self._error}")

    def _take(self, line: str) -> None:
        if line.strip():
            self._last_line = line[:_MAX_LAST_LINE]
        self._log(self._name, line)


class _Output(asyncio.SubprocessProtocol):
    """Reads the output of a process as lines, and observes its end.

    The end is observed even while another process holds the pipes; `asyncio.subprocess` reports it
    only once all holders have closed them.
    """

    def __init__(self, takers: Mapping[int, Callable[[str], None]]) -> None:
        self._takers = takers
        self._splitters = {fd: LineSplitter() for fd in takers}
        self._exited = asyncio.Event()
        self._closed = asyncio.Event()
        self._failure: Exception | None = None

    async def wait_exited(self) -> None:
        """Wait for the end of the process; raise an error of a line's handler."""
        await self._exited.wait()
        if self._failure is not None:
            raise self._failure

    async def wait_closed(self) -> None:
        """Wait until the process is reaped and its last line is read, for a second at most."""
        await self._exited.wait()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._closed.wait()
        except TimeoutError:
            pass

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        self._take(fd, self._splitters[fd].feed(data))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        if fd in self._splitters:  # stdin has none
            self._take(fd, self._splitters[fd].end())

    def process_exited(self) -> None:
        self._exited.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        self._closed.set()

    def _take(self, fd: int, lines: list[str]) -> None:
        try:
            for line in lines:
                self._takers[fd](line)
        except Exception as error:  # noqa: BLE001 - raised by wait_exited
            self._failure = error
            self._exited.set()


def _kill_group(transport: asyncio.SubprocessTransport) -> None:
    try:
        os.killpg(transport.get_pid(), signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # no process left; some systems return EPERM for a group of zombies


class LineSplitter:
    """Splits bytes into lines; a line over `MAX_LINE_BYTES` is truncated."""

    def __init__(self) -> None:
        self._part = bytearray()
        self._cut = 0

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that these bytes complete, without their line ends."""
        *whole, rest = data.split(b"\n")
        lines = []
        for piece in whole:
            self._take(piece)
            lines.append(self._line())
        self._take(rest)
        return lines

    def end(self) -> list[str]:
        """Return the last line if it had no line end."""
        return [self._line()] if self._part else []

    def _take(self, piece: bytes) -> None:
        room = MAX_LINE_BYTES - len(self._part)
        self._part += piece[:room]
        self._cut += max(0, len(piece) - room)

    def _line(self) -> str:
        text = self._part.decode("utf-8", "replace").removesuffix("\r").translate(_CONTROLS)
        if self._cut:
            text += f"… ({self._cut} bytes cut)"
        self._part.clear()
        self._cut = 0
        return text


def parse_listening(line: str) -> Address | None:
    """Return the address in a `listening` event; None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        event: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or event.get("event") != EVENT_LISTENING:
        return None
    url, admin_url = _base_url(event.get("url")), _base_url(event.get("admin_url"))
    return Address(url=url, admin_url=admin_url) if url and admin_url else None


def port_of(url: str) -> int:
    """Return the port of a URL from `parse_listening`."""
    port = urlsplit(url).port
    assert port is not None, url
    return port


def _base_url(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    try:
        parts = urlsplit(value)
        whole = parts.scheme == "http" and parts.hostname and parts.port
    except ValueError:
        return None
    return value.rstrip("/") if whole else None


async def answers(session: aiohttp.ClientSession, address: Address) -> bool:
    """True if the process is alive, that is, if it responds with any status."""
    try:
        async with session.get(address.url + PATH_LIVE, timeout=_LIVENESS_TIMEOUT):
            return True
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
