"""Several senders, each in a process of its own with its own event loop.

The processes prepare their shares of the plan, and start at one time zero on the monotonic clock,
which all processes of a machine share. They pass their records to this process, which judges and
writes them, so that a record survives the process that made it. If a process dies, the others are
stopped: rows were lost, and the run is invalid.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from goodput_core.errors import InternalError, root_of
from goodput_replay.frames import MAX_FRAME, MessageCodec
from goodput_replay.sending.loop import SenderPlan, SenderProgress, SenderUsage

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.frames import Records

__all__ = [
    "SENDER_MESSAGES",
    "SenderEnded",
    "SenderFailed",
    "SenderProcesses",
    "SenderReady",
    "SenderStart",
    "SenderStop",
]

# Time in which a stopped sender must end; it only cancels its requests and reports them.
_STOP_S: Final = 20.0
_CLOSE_S: Final = 5.0
_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderReady:
    """From a sender: its first requests are prepared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderStart:
    """To a sender: send, from this time zero on the monotonic clock."""

    zero_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderStop:
    """To a sender: stop sending, and cancel the requests in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderEnded:
    """From a sender, as its last message: all of its requests have ended."""

    usage: SenderUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderFailed:
    """From a sender, as its last message: it could not continue.

    Args:
        reason: a sentence.
    """

    reason: str


SENDER_MESSAGES: Final = MessageCodec(
    SenderPlan, SenderReady, SenderStart, SenderStop, SenderProgress, SenderEnded, SenderFailed
)
"""Codec of the pipes to and from a sender."""


class SenderProcesses:
    """Sends with several processes; see `goodput_replay.sending.loop.Senders`.

    Args:
        plan: inputs of all senders together.
        count: number of processes.
        on_record: called with each record, and True for a warm-up request; an exception ends the
            run and is raised by `run`.
    """

    def __init__(
        self, plan: SenderPlan, count: int, on_record: Callable[[RequestRecord, bool], None]
    ) -> None:
        self._on_record = on_record
        self._processes = [
            _SenderProcess(plan.part(index, count), self._take, f"sender {index + 1} of {count}")
            for index in range(count)
        ]
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        """Start the processes, and wait until each has prepared its first requests."""
        try:
            async with asyncio.TaskGroup() as group:
                for process in self._processes:
                    group.create_task(process.prepare())
        except BaseExceptionGroup as errors:
            await self.__aexit__()
            raise root_of(errors) from None
        except asyncio.CancelledError:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End every process that still runs."""
        await asyncio.gather(*(process.close() for process in self._processes))

    async def run(self, zero_ns: int) -> None:
        """Send all requests; see `Senders.run`."""
        following = asyncio.gather(*(self._follow(one, zero_ns) for one in self._processes))
        ends: set[asyncio.Future[Any]] = {following, self._failed}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for process in self._processes:
                process.stop()
            await asyncio.wait({following}, timeout=_STOP_S)
            following.cancel()
        if self._failed.done():
            self._failed.result()

    def progress(self) -> SenderProgress:
        """Return the progress of all senders together."""
        parts = [process.progress for process in self._processes]
        return SenderProgress(
            sent=sum(part.sent for part in parts),
            in_flight=sum(part.in_flight for part in parts),
            loop_lag_p99_ns=max(part.loop_lag_p99_ns for part in parts),
            loop_lag_max_ns=max(part.loop_lag_max_ns for part in parts),
        )

    def usage(self) -> tuple[SenderUsage, ...]:
        """Return the usage of each sender by its number; of a dead one, what it had reported."""
        return tuple(process.usage for process in self._processes)

    async def _follow(self, process: _SenderProcess, zero_ns: int) -> None:
        try:
            await process.follow(zero_ns)
        except Exception as error:  # noqa: BLE001 - raised again in `run`
            self._fail(error)

    def _take(self, records: Records) -> None:
        for record, warmup in records:
            try:
                self._on_record(record, warmup)
            except Exception as error:  # noqa: BLE001 - raised again in `run`
                # The requests that are cancelled now are still recorded.
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)


class _SenderProcess:
    """One process, seen from the process of the command."""

    def __init__(self, plan: SenderPlan, take: Callable[[Records], None], name: str) -> None:
        self._plan = plan
        self._take = take
        self._name = name
        self._child: asyncio.subprocess.Process | None = None
        self._ended: SenderUsage | None = None
        self.progress = SenderProgress()

    @property
    def usage(self) -> SenderUsage:
        """Usage at the end; if the process died, without its CPU time and its stalls."""
        if self._ended is not None:
            return self._ended
        known = self.progress
        return SenderUsage(
            sent=known.sent,
            cpu_ns=0,
            peak_in_flight=known.in_flight,
            loop_lag_p99_ns=known.loop_lag_p99_ns,
            loop_lag_max_ns=known.loop_lag_max_ns,
            stalls=(),
        )

    async def prepare(self) -> None:
        """Start the process, and wait until its first requests are prepared.

        Raises:
            InternalError: the process failed or died.
        """
        self._child = await asyncio.create_subprocess_exec(
            # -P: a module in the working directory must not replace a module of Goodput.
            *(sys.executable, "-P", "-m", "goodput_replay.sending.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_FRAME,
        )
        self._write(self._plan)
        await self._read(SenderReady)

    async def follow(self, zero_ns: int) -> None:
        """Start sending, and take the records of the process until it has ended.

        Raises:
            InternalError: the process failed or died.
        """
        self._write(SenderStart(zero_ns=zero_ns))
        ended = await self._read(SenderEnded)
        self._ended = ended.usage
        self.progress = replace(self.progress, sent=ended.usage.sent, in_flight=0)

    def stop(self) -> None:
        """Ask the process to stop, if it has not ended."""
        if self._ended is None:
            self._write(SenderStop())

    async def close(self) -> None:
        """End the process; it ends when its standard input closes."""
        child = self._child
        if child is None:
            return
        assert child.stdin is not None
        child.stdin.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await child.wait()
        except TimeoutError:
            pass
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()

    async def _read(self, last: type[_Message]) -> _Message:
        """Take messages until one of the type `last`, and return it."""
        assert self._child is not None
        assert self._child.stdout is not None
        while (message := await SENDER_MESSAGES.read(self._child.stdout)) is not None:
            if isinstance(message, last):
                return message
            match message:
                case list():
                    self._take(message)
                case SenderProgress():
                    self.progress = message
                case SenderFailed():
                    raise InternalError(f"{self._name} failed: {message.reason}")
        code = await self._child.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        raise InternalError(f"{self._name} {how} before all of its requests had ended")

    def _write(self, message: object) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        with suppress(ConnectionError, RuntimeError):  # it died, which `_read` finds
            self._child.stdin.write(SENDER_MESSAGES.encode(message))
