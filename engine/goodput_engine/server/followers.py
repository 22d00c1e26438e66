"""The further HTTP processes of a replica, as the first one, which leads, sees them.

Each follower listens on the serving port and has its own connection to the core. The leader owns
the core, the admin port and the manifest, and passes changes on. If a follower ends unexpectedly,
the replica drains and ends: a follower that is restarted alone would lose its counts.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from goodput_core.errors import ExitCode, GoodputError, InternalError, UsageError
from goodput_core.process import share_session_priority
from goodput_engine.messages import Failed
from goodput_engine.openai.errors import unavailable
from goodput_engine.server.follower_channel import (
    DrainRequests,
    FollowerChannel,
    FollowerStage,
    FollowFields,
    RequestReport,
    ServeCore,
    StageReached,
    StartFollower,
    SuspendAdmission,
    follower_events,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.messages import Ready
    from goodput_engine.server.follower_channel import FollowerEvent, FollowerReport, LeaderMessage
    from goodput_engine.server.manifest_watch import FollowedFields
    from goodput_engine.server.settings import EngineSettings

__all__ = ["Followers"]

_REPORT_S: Final = 5.0
_SHORT_S: Final = 1.0
# A follower that sends none of this number of reports, which are requested one by one, is killed.
_SILENT_REPORTS: Final = 6
# Time for a follower to end after its last events, before it is killed.
_END_S: Final = 5.0
_log: Final = logging.getLogger(__name__)


class Followers:
    """The further HTTP processes of a replica.

    Args:
        count: number of HTTP processes, the leader included.

    Attributes:
        ended: future that is done when a follower has ended.
    """

    def __init__(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        self.count = count
        self.ended: Final[asyncio.Future[None]] = loop.create_future()
        self._processes: list[_FollowerProcess] = []
        self._check: asyncio.TimerHandle | None = None

    async def start(self, settings: EngineSettings) -> None:
        """Start the processes, which listen on the port of the settings."""
        for number in range(1, self.count):
            process = await _FollowerProcess.start(number, settings)
            process.ended.add_done_callback(self._on_end)
            self._processes.append(process)
        if self._processes:
            self._schedule_check()

    async def serve(self, socks: Sequence[socket.socket], ready: Ready, epoch: str) -> None:
        """Let the followers admit requests to a core, and wait until all of them do.

        Args:
            socks: sockets to the core, one for each follower; they are closed here.
            ready: the core's report.
            epoch: identifies the start of the core.

        Raises:
            GoodputError: a follower ended.
        """
        message = ServeCore(ready=ready, epoch=epoch)
        serving = []
        for process, sock in zip(self._processes, socks, strict=True):
            with sock:
                serving.append(process.expect(FollowerStage.SERVING))
                process.send(message, sock)
        if serving:
            await asyncio.wait(serving)
        self.require_running()

    def suspend(self, retry_after_s: int) -> None:
        """Let the followers admit no requests, because the core died."""
        self._send(SuspendAdmission(retry_after_s=retry_after_s))

    def follow(self, fields: FollowedFields) -> None:
        """Apply a changed manifest to later requests."""
        self._send(FollowFields(fields=fields))

    def drain(self) -> None:
        """Let the followers admit no further requests; see `reach`."""
        for process in self._processes:
            process.expect(FollowerStage.SUBMITTED)
            process.expect(FollowerStage.IDLE)
        self._send(DrainRequests())

    async def reach(self, stage: FollowerStage) -> None:
        """Wait until all followers that run have reached a stage of the drain."""
        for process in self._processes:
            await process.awaited[stage]

    async def reports(self) -> list[FollowerReport]:
        """Return the counts of each follower.

        Raises:
            APIError: 503 if a follower does not respond.
        """
        reports = await self._read(_REPORT_S)
        if len(reports) < len(self._processes):
            raise unavailable("an HTTP process of the engine does not respond", "process_lost")
        return reports

    async def in_flight(self) -> int:
        """Return the number of requests of the followers that respond."""
        return sum(report.in_flight for report in await self._read(_SHORT_S))

    def require_running(self) -> None:
        """Raise an error if a follower has ended.

        Raises:
            GoodputError: the reason of the follower, or its exit code.
        """
        for process in self._processes:
            if process.ended.done():
                raise process.failure()

    async def close(self) -> None:
        """End the followers; each writes its last events before."""
        if self._check is not None:
            self._check.cancel()
        await asyncio.gather(*(process.close() for process in self._processes))

    async def _read(self, timeout_s: float) -> list[FollowerReport]:
        requested = [process.request_report() for process in self._processes]
        if not requested:
            return []
        done, _ = await asyncio.wait(requested, timeout=timeout_s)
        return [one.result() for one in done if not one.cancelled()]

    def _send(self, message: LeaderMessage) -> None:
        for process in self._processes:
            process.send(message)

    def _on_end(self, _: asyncio.Future[None]) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _schedule_check(self) -> None:
        self._check = asyncio.get_running_loop().call_later(_REPORT_S, self._check_reports)

    def _check_reports(self) -> None:
        for process in self._processes:
            process.check()
        self._schedule_check()


class _FollowerProcess:
    """One follower.

    Args:
        number: its number; the leader has 0.
        process: the running process.
        sock: this end of its channel.

    Attributes:
        ended: task that is done when the process has ended.
        awaited: futures of expected stages; they are done, too, when the process has ended.
    """

    def __init__(
        self, number: int, process: asyncio.subprocess.Process, sock: socket.socket
    ) -> None:
        self.number = number
        self.awaited: dict[FollowerStage, asyncio.Future[None]] = {}
        self._process = process
        self._channel = FollowerChannel(sock, follower_events(), self._on_event, self._kill)
        self._reports: dict[int, asyncio.Future[FollowerReport]] = {}
        self._serial = 0
        self._checked: asyncio.Future[FollowerReport] | None = None
        self._silent_checks = 0
        self._failed: Failed | None = None
        self.ended: asyncio.Task[None] = asyncio.create_task(self._wait())

    @classmethod
    async def start(cls, number: int, settings: EngineSettings) -> _FollowerProcess:
        """Start a process."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "goodput_engine.server.follower"),
                *("--fd", f"{theirs.fileno()}"),
                stdin=DEVNULL,
                # The stdout of this process carries only its own line of JSON.
                stdout=sys.stderr.fileno(),
                pass_fds=(theirs.fileno(),),
                # In a session of its own, the follower does not receive Ctrl-C from the terminal.
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        share_session_priority(process.pid)
        follower = cls(number, process, ours)
        follower.send(StartFollower(number=number, settings=settings))
        return follower

    def send(self, message: LeaderMessage, sock: socket.socket | None = None) -> None:
        """Send a message; kill a process that cannot receive it."""
        if not self._channel.send(message, sock):
            self._kill()

    def expect(self, stage: FollowerStage) -> asyncio.Future[None]:
        """Return a future of the next report of a stage."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.awaited[stage] = future
        if self.ended.done():
            future.set_result(None)
        return future

    def request_report(self) -> asyncio.Future[FollowerReport]:
        """Return a future of the counts; it is cancelled if the process ends before."""
        future: asyncio.Future[FollowerReport] = asyncio.get_running_loop().create_future()
        self._serial += 1
        self._reports[self._serial] = future
        self.send(RequestReport(serial=self._serial))
        if self.ended.done():
            future.cancel()
        return future

    def check(self) -> None:
        """Request a report, and kill a process that has sent none for several checks.

        A process that starts is not checked, because it may load a tokenizer.
        """
        if (
            FollowerStage.SERVING not in self.awaited
            or not self.awaited[FollowerStage.SERVING].done()
        ):
            return
        if self._checked is not None and not self._checked.done():
            self._silent_checks += 1
            if self._silent_checks >= _SILENT_REPORTS:
                detail = f"an HTTP process of the engine was silent for {self._silent_s:g} s"
                self._failed = Failed(detail=detail, exit_code=ExitCode.INTERNAL)
                self._kill()
            return
        self._silent_checks = 0
        self._checked = self.request_report()

    def failure(self) -> GoodputError:
        """Return the error of a replica whose follower ended without a request."""
        if self._failed is not None:
            correctable = self._failed.exit_code == ExitCode.USAGE
            return (UsageError if correctable else InternalError)(self._failed.detail)
        code = self._process.returncode or 0
        end = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return InternalError(f"an HTTP process of the engine ended {end}; see its log above")

    async def close(self) -> None:
        """End the process, and kill it if it does not end."""
        self._channel.close()
        try:
            async with asyncio.timeout(_END_S):
                await asyncio.shield(self.ended)
        except TimeoutError:
            self._kill()
            await self.ended

    @property
    def _silent_s(self) -> float:
        return _REPORT_S * self._silent_checks

    def _on_event(self, event: FollowerEvent, _: socket.socket | None) -> None:
        if isinstance(event, StageReached):
            future = self.awaited.get(event.stage)
            if future is not None and not future.done():
                future.set_result(None)
        elif isinstance(event, Failed):
            self._failed = event
        else:
            report = self._reports.pop(event.serial, None)
            if report is not None and not report.done():
                report.set_result(event)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def _wait(self) -> None:
        await self._process.wait()
        for future in self.awaited.values():
            if not future.done():
                future.set_result(None)
        for report in self._reports.values():
            report.cancel()
