"""One start of one process of the fleet: the only place that creates and signals processes.

A child leads a process group, so Ctrl-C reaches it through us alone and SIGKILL reaches what
it started too. Its stdin is a pipe that we hold: it ends when we do, even by `kill -9`. When
and why a process is started or stopped is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Final

from goodput_core.errors import ExitCode
from goodput_operator.local.lines import LineSplitter
from goodput_operator.local.listening import parse_listening
from goodput_operator.local.snapshot import Address, Phase, ProcessView, Role

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from goodput_operator.backoff import BackOff
    from goodput_operator.local.commands import Command

__all__ = ["Child"]

_MAX_SHOWN: Final = 300
# How long the last output of an ended process is waited for.
_DRAIN_S: Final = 1.0
# Between two questions whether it still answers.
_LIVENESS_S: Final = 1.0
_ERROR: Final = "error: "


class Child:
    """One start of a process. Created and used inside a running event loop.

    Args:
        name: the process's name.
        role: replica or router.
        earlier: how its last start ended; None for the first.
        back_off: how failures in a row are counted.
        clock: nanoseconds, monotonic.
        log: takes the name and each line that the process writes.
        changed: called when the process became ready or ended.
        answers: whether the process at this address gives a sign of life.
        silent: called when the process falls silent.
        routable: for a router: returns once it is ready at this address; None for a replica,
            which is ready as soon as it listens.
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
        self._phase = Phase.STARTING
        self._started_ns = clock()
        self._ready_ns: int | None = None
        self._exited_ns: int | None = None
        self._terminated_ns: int | None = None
        self._killed = False
        self._silent_ns: int | None = None
        self._address: Address | None = None
        # How the last start ended, until this one says more: a process that is just being
        # started again has nothing to say for itself yet.
        self._exit_code = earlier.exit_code if earlier else None
        self._error = earlier.error if earlier else None
        self._error_told = True
        self._last_line = earlier.last_line if earlier else None

    def view(self) -> ProcessView:
        """The process as it stands now."""
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
        """Ask the process to end; without effect on one that has ended."""
        self._terminated_ns = self._clock()
        if self._transport is not None:
            try:
                self._transport.terminate()
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        """End the process and all that it started."""
        self._killed = True
        if self._transport is not None:
            _kill_group(self._transport)

    async def run(self, command: Command) -> None:
        """Start the process and stay with it to its end; cancelling this kills it.

        That it cannot be started or ends badly is not raised but seen in `view`.
        """
        try:
            transport, talk = await asyncio.get_running_loop().subprocess_exec(
                lambda: _Talk({1: self._said, 2: self._complained}),
                *command.argv,
                env=dict(command.env),
                process_group=0,
            )
        except OSError as error:
            self._take(f"cannot start {command.argv[0]}: {error.strerror}")
            self._ended(None)
            return
        self._transport = transport
        # What was asked for while the process was being created.
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
                await talk.wait_exited()
                for watch in watches:
                    watch.cancel()
        finally:
            # What it leaves behind would hold its pipes and its port. The number of a group is
            # not given away while a member lives; an empty group is not there to be killed.
            _kill_group(transport)
            await talk.wait_closed()
            transport.close()
            self._transport = None
            self._ended(transport.get_returncode())

    async def _become_ready(self) -> None:
        address = await self._listening
        self._phase = Phase.LISTENING
        if self._routable is not None:
            await self._routable(address)
        self._phase = Phase.READY
        self._ready_ns = self._clock()
        self._ever_ready = True
        self._changed(self.view())

    async def _watch_life(self) -> None:
        address = await self._listening
        while True:
            await asyncio.sleep(_LIVENESS_S)
            if await self._answers(address):
                self._silent_ns = None
            elif self._silent_ns is None:
                self._silent_ns = self._clock()
                self._silent()

    def _ended(self, code: int | None) -> None:
        self._phase = Phase.EXITED
        self._silent_ns = None
        self._exit_code = code
        self._exited_ns = self._clock()
        self._failures = self._back_off.failures(
            self._failures, ready_ns=self._ready_ns, exited_ns=self._exited_ns
        )
        refused = code == ExitCode.USAGE or self._terminated_ns is not None
        if self._ever_ready or not refused:
            self._tell_error()
        self._changed(self.view())

    def _said(self, line: str) -> None:
        address = None if self._listening.done() else parse_listening(line)
        if address is None:
            self._take(line)
        else:
            self._address = address
            self._listening.set_result(address)

    def _complained(self, line: str) -> None:
        if self._phase is not Phase.STARTING or not line.startswith(_ERROR):
            self._take(line)
            return
        # A refusal at the start is held back: the fleet is about to say it for all replicas.
        self._tell_error()
        self._error = line.removeprefix(_ERROR)
        self._error_told = False

    def _tell_error(self) -> None:
        if self._error is not None and not self._error_told:
            self._error_told = True
            self._log(self._name, f"{_ERROR}{self._error}")

    def _take(self, line: str) -> None:
        if line.strip():
            self._last_line = line[:_MAX_SHOWN]
        self._log(self._name, line)


class _Talk(asyncio.SubprocessProtocol):
    """What a process writes, as lines; and when it ended, whoever still holds its pipes.

    (`asyncio.subprocess` tells of an end only once every holder has closed them.)
    """

    def __init__(self, takers: Mapping[int, Callable[[str], None]]) -> None:
        self._takers = takers
        self._splitters = {fd: LineSplitter() for fd in takers}
        self._exited = asyncio.Event()
        self._closed = asyncio.Event()
        self._failure: Exception | None = None

    async def wait_exited(self) -> None:
        """Return when the process has ended; raise what went wrong in taking its lines."""
        await self._exited.wait()
        if self._failure is not None:
            raise self._failure

    async def wait_closed(self) -> None:
        """Return when the process was reaped and its last line taken, or that takes too long."""
        await self._exited.wait()
        try:
            async with asyncio.timeout(_DRAIN_S):
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
        except Exception as error:  # noqa: BLE001 - raised where the process is accompanied
            self._failure = error
            self._exited.set()


def _kill_group(transport: asyncio.SubprocessTransport) -> None:
    try:
        os.killpg(transport.get_pid(), signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # nobody left; some systems answer EPERM for a group of zombies
