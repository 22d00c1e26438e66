"""A further HTTP process of a replica, which serves the port of the first one.

The first process, which leads, starts `python -m goodput_engine.server.follower --fd N` with one
end of a socket pair. The follower has a connection to the core for its own requests. It obeys the
leader and ends with it, so it ignores SIGINT, SIGTERM and SIGHUP.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import uvloop

from goodput_core.errors import ExitCode, GoodputError
from goodput_core.process import raise_open_files
from goodput_core.signals import ignore_stop_signals
from goodput_engine.core_client import CoreConnection
from goodput_engine.http_server import listen
from goodput_engine.logs import configure_logging
from goodput_engine.messages import Failed
from goodput_engine.server.app import serving_app
from goodput_engine.server.follower_channel import (
    DrainRequests,
    FollowerChannel,
    FollowerReport,
    FollowerStage,
    FollowFields,
    RequestReport,
    ServeCore,
    StageReached,
    StartFollower,
    SuspendAdmission,
    leader_messages,
)
from goodput_engine.server.lifecycle import reduce_pauses, write_last_events
from goodput_engine.server.model_options import load_text_settings
from goodput_engine.server.parsers import Parsers
from goodput_engine.server.state import ServerPhase, ServerState

if TYPE_CHECKING:
    from goodput_engine.server.follower_channel import LeaderMessage

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Serve until the leader closes its end of the socket."""
    parser = argparse.ArgumentParser(prog="python -m goodput_engine.server.follower")
    parser.add_argument("--fd", type=int, required=True, help="an inherited, connected socket")
    sock = socket.socket(fileno=parser.parse_args(argv).fd)
    ignore_stop_signals()
    configure_logging()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(sock))


async def _serve(sock: socket.socket) -> int:
    received: asyncio.Queue[tuple[LeaderMessage, socket.socket | None] | None] = asyncio.Queue()
    channel = FollowerChannel(
        sock,
        leader_messages(),
        lambda message, carried: received.put_nowait((message, carried)),
        lambda: received.put_nowait(None),
    )
    async with AsyncExitStack() as stack:
        stack.callback(channel.close)
        first = await received.get()
        if first is None:
            return ExitCode.PASS
        start, _ = first
        assert isinstance(start, StartFollower), start
        try:
            follower = await _Follower.start(stack, channel, start)
        except GoodputError as error:
            channel.send(Failed(detail=f"{error}", exit_code=error.exit_code))
            return error.exit_code
        while (message := await received.get()) is not None:
            await follower.obey(*message)
        await follower.end()
    return ExitCode.PASS


class _Follower:
    """A follower that listens.

    Args:
        channel: connection to the leader.
        state: state of this process.
    """

    def __init__(self, channel: FollowerChannel[LeaderMessage], state: ServerState) -> None:
        self._channel = channel
        self._state = state
        self._drain: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, stack: AsyncExitStack, channel: FollowerChannel[LeaderMessage], start: StartFollower
    ) -> _Follower:
        """Listen until the stack is closed.

        Raises:
            GoodputError: the port cannot be opened, or the model's text settings are invalid.
        """
        settings = start.settings
        state = ServerState(settings, number=start.number)
        parsers = Parsers.start(stack)
        await listen(
            stack,
            serving_app(state, parsers),
            (settings.host, settings.port),
            limits=settings.connections.within(raise_open_files(), files_each=1),
            shared=True,
            handler_cancellation=True,
        )
        model = settings.configure.model
        if model is not None:
            state.tokenizer, state.defaults = await asyncio.get_running_loop().run_in_executor(
                parsers.long_bodies, load_text_settings, model
            )
        reduce_pauses()
        return cls(channel, state)

    async def obey(self, message: LeaderMessage, sock: socket.socket | None) -> None:
        """Act on a message of the leader; `sock` is the socket that it carries."""
        state = self._state
        if isinstance(message, ServeCore):
            assert sock is not None, "the message carries a socket"
            await self._serve_core(message, sock)
        elif isinstance(message, SuspendAdmission):
            state.retry_after_s = message.retry_after_s
        elif isinstance(message, FollowFields):
            state.follow(message.fields)
        elif isinstance(message, DrainRequests):
            state.phase = ServerPhase.DRAINING
            self._drain = asyncio.create_task(self._report_drain())
        elif isinstance(message, RequestReport):
            self._channel.send(
                FollowerReport(
                    serial=message.serial,
                    epoch=state.epoch,
                    in_flight=state.in_flight,
                    lengths=state.lengths.rows(),
                )
            )

    async def end(self) -> None:
        """Cancel the running requests, and write their last events."""
        if self._drain is not None:
            self._drain.cancel()
        state = self._state
        if state.phase is not ServerPhase.FAILED:
            state.phase = ServerPhase.DRAINING
        if state.core is not None:
            state.core.abandon()
        await write_last_events(state)
        if state.core is not None:
            state.core.disconnect()

    async def _serve_core(self, message: ServeCore, sock: socket.socket) -> None:
        state = self._state
        if state.core is not None:  # the end of the last core is not noticed yet
            state.core.disconnect()
            state.suspend()
        core = await CoreConnection.connect(sock, message.ready)
        state.serve(core, message.ready)
        state.epoch = message.epoch
        core.gone.add_done_callback(lambda _: self._lose(core))
        self._channel.send(StageReached(stage=FollowerStage.SERVING))

    def _lose(self, core: CoreConnection) -> None:
        state = self._state
        if state.core is not core:
            return
        if state.draining:
            state.phase = ServerPhase.FAILED
        elif state.phase is ServerPhase.SERVING:
            state.suspend()

    async def _report_drain(self) -> None:
        await self._state.submitted.wait()
        self._channel.send(StageReached(stage=FollowerStage.SUBMITTED))
        await self._state.idle.wait()
        self._channel.send(StageReached(stage=FollowerStage.IDLE))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
