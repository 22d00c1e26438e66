"""One start of one process of the fleet. Only this module creates, signals and checks processes.

Each process leads a process group, so Ctrl-C reaches only the supervisor, and SIGKILL also reaches
the children of the process. Its stdin is a pipe of the supervisor, so it ends with the supervisor,
even if `kill -9` ends the supervisor. Its output is untrusted: the length of lines is limited, and
control characters are escaped.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import aiohttp

from goodput_core.contract import EVENT_LISTENING, PATH_LIVE, PATH_READY
from goodput_core.errors import ExitCode
from goodput_operator.local.decide import Address, ProcessPhase, ProcessView, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from goodput_operator.backoff import BackOff
    from goodput_operator.local.commands import Command

__all__ = [
    "MAX_LINE_BYTES",
    "ChildProcess",
    "LineSplitter",
    "parse_listening",
    "port_of",
]

_MAX_LAST_LINE: Final = 300
_CLOSE_TIMEOUT_S: Final = 1.0
"""Time limit for the last output of a process that ended."""
_LIVENESS_INTERVAL_S: Final = 1.0
_POLL_S: Final = 0.05
_ERROR: Final = "error: "
MAX_LINE_BYTES: Final = 8192
_CONTROLS: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 9}
"""Escapes of control characters, because a log line may contain bytes that a client sent."""
_REQUEST_TIMEOUT: Final = aiohttp.ClientTimeout(total=2.0)


class ChildProcess:
    """One start of a process. Create and use it inside a running event loop.

    Args:
        name: name of the process.
        role: replica or router.
        earlier: state after the last start; None for the first start.
        back_off: counts consecutive failures.
        clock: monotonic clock in nanoseconds.
        session: HTTP session for checks of the process.
        routed: returns the number of replicas that a ready router must have.
        log: called with the name and each line of the process's output.
        changed: called when the process has become ready or has ended.
        unresponsive: called when the first liveness check fails.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        *,
        earlier: ProcessView | None,
        back_off: BackOff,
        clock: Callable[[], int],
        session: aiohttp.ClientSession,
        routed: Callable[[], int],
        log: Callable[[str, str], None],
        changed: Callable[[ProcessView], None],
        unresponsive: Callable[[], None],
    ) -> None:
        self._back_off = back_off
        self._clock = clock
        self._session = session
        self._routed = routed
        self._log = log
        self._changed = changed
        self._unresponsive = unresponsive
        self._transport: asyncio.SubprocessTransport | None = None
        self._listening: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        self._error_logged = True
        # Keep the results of the last start until this start has its own.
        self._view = ProcessView(
            name=name,
            role=role,
            phase=ProcessPhase.STARTING,
            started_ns=clock(),
            failures=earlier.failures if earlier else 0,
            ever_ready=earlier.ever_ready if earlier else False,
            exit_code=earlier.exit_code if earlier else None,
            error=earlier.error if earlier else None,
            last_line=earlier.last_line if earlier else None,
        )

    @property
    def view(self) -> ProcessView:
        """State of the process."""
        return self._view

    def terminate(self) -> None:
        """Send SIGTERM unless the process has ended."""
        self._update(terminated_ns=self._clock())
        if self._transport is not None:
            try:
                self._transport.terminate()
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        """Send SIGKILL to the process and its children."""
        self._update(killed=True)
        if self._transport is not None:
            _kill_group(self._transport)

    async def run(self, command: Command) -> None:
        """Start the process and wait for its end; a cancellation kills the process.

        A failed start or exit raises no exception; `view` contains it.
        """
        try:
            transport, output = await asyncio.get_running_loop().subprocess_exec(
                lambda: _Output({1: self._on_stdout, 2: self._on_stderr}),
                *command.argv,
                env=dict(command.env),
                process_group=0,
            )
        except OSError as error:
            self._log_line(f"cannot start {command.argv[0]}: {error.strerror}")
            self._ended(None)
            return
        self._transport = transport
        # Send a signal that was requested while the process was being created.
        if self._view.killed:
            self.kill()
        elif self._view.terminated_ns is not None:
            self.terminate()
        try:
            async with asyncio.TaskGroup() as group:
                watches = [
                    group.create_task(self._become_ready()),
                    group.create_task(self._check_liveness()),
                ]
                await output.wait_exited()
                for watch in watches:
                    watch.cancel()
        finally:
            # Remaining children would keep the pipes and the port of the process open. The id of a
            # process group is not reused while the group has a member.
            _kill_group(transport)
            await output.wait_closed()
            transport.close()
            self._transport = None
            self._ended(transport.get_returncode())

    async def _become_ready(self) -> None:
        address = await self._listening
        self._update(phase=ProcessPhase.LISTENING)
        # A replica is ready as soon as it listens. A router is ready once it has the replicas.
        if self._view.role is Role.ROUTER:
            while not await _is_routable(self._session, address, self._routed()):  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(_POLL_S)
        self._update(phase=ProcessPhase.READY, ready_ns=self._clock(), ever_ready=True)
        self._changed(self._view)

    async def _check_liveness(self) -> None:
        address = await self._listening
        while True:
            await asyncio.sleep(_LIVENESS_INTERVAL_S)
            if await _is_alive(self._session, address):
                self._update(unresponsive_ns=None)
            elif self._view.unresponsive_ns is None:
                self._update(unresponsive_ns=self._clock())
                self._unresponsive()

    def _ended(self, code: int | None) -> None:
        now_ns = self._clock()
        view = self._view
        self._update(
            phase=ProcessPhase.EXITED,
            unresponsive_ns=None,
            exit_code=code,
            exited_ns=now_ns,
            failures=self._back_off.count_failures(
                view.failures, ready_ns=view.ready_ns, exited_ns=now_ns
            ),
        )
        rejected = code == ExitCode.USAGE or view.terminated_ns is not None
        if view.ever_ready or not rejected:
            self._log_error()
        self._changed(self._view)

    def _on_stdout(self, line: str) -> None:
        address = None if self._listening.done() else parse_listening(line)
        if address is None:
            self._log_line(line)
        else:
            self._update(address=address)
            self._listening.set_result(address)

    def _on_stderr(self, line: str) -> None:
        if self._view.phase is not ProcessPhase.STARTING or not line.startswith(_ERROR):
            self._log_line(line)
            return
        # Do not log this error yet, because the supervisor reports an error at the start once for
        # all replicas.
        self._log_error()
        self._update(error=line.removeprefix(_ERROR))
        self._error_logged = False

    def _log_error(self) -> None:
        if self._view.error is not None and not self._error_logged:
            self._error_logged = True
            self._log(self._view.name, f"{_ERROR}{self._view.error}")

    def _log_line(self, line: str) -> None:
        if line.strip():
            self._update(last_line=line[:_MAX_LAST_LINE])
        self._log(self._view.name, line)

    def _update(self, **changes: Any) -> None:
        self._view = replace(self._view, **changes)


async def _is_alive(session: aiohttp.ClientSession, address: Address) -> bool:
    """True if the process responds, with any status."""
    try:
        async with session.get(address.url + PATH_LIVE, timeout=_REQUEST_TIMEOUT):
            return True
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def _is_routable(session: aiohttp.ClientSession, address: Address, replicas: int) -> bool:
    """True if the router at this address is ready and has at least this many ready replicas."""
    try:
        async with session.get(address.url + PATH_READY, timeout=_REQUEST_TIMEOUT) as response:
            if response.status != 200:
                return False
            body: Any = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return False
    ready = body.get("ready_replicas") if isinstance(body, dict) else None
    return not isinstance(ready, int) or ready >= replicas


class _Output(asyncio.SubprocessProtocol):
    """Splits the output of a process into lines and detects its end.

    The end is detected even while another process keeps the pipes open. `asyncio.subprocess`
    reports the end only after all processes have closed the pipes.
    """

    def __init__(self, handlers: Mapping[int, Callable[[str], None]]) -> None:
        self._handlers = handlers
        self._splitters = {fd: LineSplitter() for fd in handlers}
        self._exited = asyncio.Event()
        self._closed = asyncio.Event()
        self._failure: Exception | None = None

    async def wait_exited(self) -> None:
        """Wait for the end of the process; an error of a handler is raised here."""
        await self._exited.wait()
        if self._failure is not None:
            raise self._failure

    async def wait_closed(self) -> None:
        """Wait at most one second until the process is reaped and its last line is read."""
        await self._exited.wait()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._closed.wait()
        except TimeoutError:
            pass

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        self._handle(fd, self._splitters[fd].feed(data))

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        if fd in self._splitters:  # stdin has none
            self._handle(fd, self._splitters[fd].end())

    def process_exited(self) -> None:
        self._exited.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        self._closed.set()

    def _handle(self, fd: int, lines: list[str]) -> None:
        try:
            for line in lines:
                self._handlers[fd](line)
        except Exception as error:  # noqa: BLE001 - raised by wait_exited
            self._failure = error
            self._exited.set()


def _kill_group(transport: asyncio.SubprocessTransport) -> None:
    try:
        os.killpg(transport.get_pid(), signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # no process is left; some systems return EPERM for a group of zombies


class LineSplitter:
    """Splits bytes into lines; a line over `MAX_LINE_BYTES` is truncated."""

    def __init__(self) -> None:
        self._part = bytearray()
        self._cut = 0

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that these bytes complete, without their line ends."""
        *complete, rest = data.split(b"\n")
        lines = []
        for piece in complete:
            self._append(piece)
            lines.append(self._line())
        self._append(rest)
        return lines

    def end(self) -> list[str]:
        """Return the last line if it has no line end."""
        return [self._line()] if self._part else []

    def _append(self, piece: bytes) -> None:
        free_bytes = MAX_LINE_BYTES - len(self._part)
        self._part += piece[:free_bytes]
        self._cut += max(0, len(piece) - free_bytes)

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
        valid = parts.scheme == "http" and parts.hostname and parts.port
    except ValueError:
        return None
    return value.rstrip("/") if valid else None
