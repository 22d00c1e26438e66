"""The process of one sender: receives its plan, sends its requests, and passes on its records.

It reads messages from its standard input and writes messages to its standard output; see
`goodput_replay.sending.senders`. It ends when its standard input closes, so it also ends if the
process of the command is killed. Signals of the terminal are left to that process.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Final

import uvloop

from goodput_core.errors import ExitCode, GoodputError, InternalError
from goodput_core.signals import ignore_stop_signals
from goodput_replay.frames import MAX_FRAME
from goodput_replay.sending.client.connection import open_session
from goodput_replay.sending.loop import SendingLoop
from goodput_replay.sending.senders import (
    SENDER_MESSAGES,
    SenderEnded,
    SenderFailed,
    SenderReady,
    SenderStart,
)
from goodput_replay.sending.target import tls_context
from goodput_replay.sessions import open_follow_ups

if TYPE_CHECKING:
    from goodput_core.slo.record import RequestRecord
    from goodput_replay.sending.loop import SenderPlan

__all__ = ["main"]

_FLUSH_S: Final = 0.25
_BATCH: Final = 128
# A process that records more slowly than this one sends would need memory without a bound.
_MAX_BEHIND: Final = 256 << 20


def main() -> None:
    """Send one share of a run."""
    ignore_stop_signals()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work())


async def _work() -> None:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=MAX_FRAME)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    transport, _ = await loop.connect_write_pipe(asyncio.Protocol, sys.stdout)
    output = _RecordPipe(transport)
    plan = await SENDER_MESSAGES.read(commands)
    if plan is None:
        return
    try:
        await _send(plan, commands, output)
    except GoodputError as error:
        output.write(SenderFailed(reason=str(error)))
    except Exception as error:  # noqa: BLE001 - reported by the process of the command
        output.write(SenderFailed(reason=f"{type(error).__name__}: {error}"))
    await commands.read()  # its end: the process of the command has read everything
    transport.close()


async def _send(plan: SenderPlan, commands: asyncio.StreamReader, output: _RecordPipe) -> None:
    async with AsyncExitStack() as stack:
        tls = tls_context(plan.ca_file)
        session = await stack.enter_async_context(open_session(plan.headers, tls))
        follow_ups = None
        if plan.causal:
            follow_ups = stack.enter_context(open_follow_ups(plan.requests, plan.share))
        sending = await stack.enter_async_context(
            SendingLoop(plan, session, output.add, follow_ups)
        )
        output.write(SenderReady())
        start = await SENDER_MESSAGES.read(commands)
        if not isinstance(start, SenderStart):
            return
        running = asyncio.ensure_future(sending.run(start.zero_ns))
        obeying = asyncio.ensure_future(_obey(commands, running))
        reporting = asyncio.ensure_future(_report(sending, output))
        try:
            with suppress(asyncio.CancelledError):
                await running
        finally:
            obeying.cancel()
            reporting.cancel()
            await asyncio.wait({obeying, reporting})
        output.flush()
        (usage,) = sending.usage()
        output.write(SenderEnded(usage=usage))


async def _obey(commands: asyncio.StreamReader, running: asyncio.Future[None]) -> None:
    """Cancel the run when it is to stop; end at once if the process of the command has ended."""
    while await SENDER_MESSAGES.read(commands) is not None:
        running.cancel()
    os._exit(ExitCode.INTERNAL)


async def _report(sending: SendingLoop, output: _RecordPipe) -> None:
    while True:
        await asyncio.sleep(_FLUSH_S)
        output.flush()
        output.write(sending.progress())


class _RecordPipe:
    """Writes messages without waiting; records in batches."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self._records: list[tuple[RequestRecord, bool]] = []

    def add(self, record: RequestRecord, warmup: bool) -> None:  # noqa: FBT001 - a callback
        """Pass on a request that ended.

        Raises:
            InternalError: the process of the command is too far behind.
        """
        self._records.append((record, warmup))
        if len(self._records) >= _BATCH:
            self.flush()
            if self._transport.get_write_buffer_size() > _MAX_BEHIND:
                raise InternalError("the records are written more slowly than requests end")

    def flush(self) -> None:
        """Write the records so far."""
        if self._records:
            self._transport.write(SENDER_MESSAGES.encode_records(self._records))
            self._records.clear()

    def write(self, message: object) -> None:
        """Write any other message."""
        self._transport.write(SENDER_MESSAGES.encode(message))


if __name__ == "__main__":
    main()
