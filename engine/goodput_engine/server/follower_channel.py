"""The messages between the HTTP processes of an engine, and the socket that carries them.

The first process leads; the others serve the same port. A message of the leader can carry the
socket of a core, because a restarted core has new ones. This module starts no processes.
"""

from __future__ import annotations

import asyncio
import socket
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from goodput_engine.core.wire import FrameReader, WireError, frame
from goodput_engine.messages import Failed, Ready
from goodput_engine.server.manifest_watch import FollowedFields  # noqa: TC001 - msgspec reads it
from goodput_engine.server.settings import EngineSettings  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DrainRequests",
    "FollowFields",
    "FollowerChannel",
    "FollowerEvent",
    "FollowerReport",
    "FollowerStage",
    "LeaderMessage",
    "RequestReport",
    "ServeCore",
    "StageReached",
    "StartFollower",
    "SuspendAdmission",
    "follower_events",
    "leader_messages",
]

M = TypeVar("M")

_RECEIVE_BYTES: Final = 1 << 16
_MAX_SOCKETS: Final = 4


class _ChannelMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Base of the messages."""


class StartFollower(_ChannelMessage, frozen=True, kw_only=True):
    """The first message: listen on the port of the settings.

    Args:
        number: number of the follower; the leader has 0.
        settings: settings of the replica, with the actual port and without the control token.
    """

    number: int
    settings: EngineSettings


class ServeCore(_ChannelMessage, frozen=True, kw_only=True):
    """Admit requests to the core whose socket comes with the message.

    Args:
        ready: the core's report.
        epoch: identifies the start of the core.
    """

    ready: Ready
    epoch: str


class SuspendAdmission(_ChannelMessage, frozen=True, kw_only=True):
    """Admit no requests, because the core died.

    Args:
        retry_after_s: expected time until the next core is ready.
    """

    retry_after_s: int


class FollowFields(_ChannelMessage, frozen=True, kw_only=True):
    """Apply the fields of a changed manifest to later requests."""

    fields: FollowedFields


class DrainRequests(_ChannelMessage, frozen=True, kw_only=True):
    """Admit no further requests, and report `SUBMITTED` and then `IDLE`."""


class RequestReport(_ChannelMessage, frozen=True, kw_only=True):
    """Send a `FollowerReport`.

    Args:
        serial: number of the report.
    """

    serial: int


class FollowerStage(StrEnum):
    """Stages that a follower reports."""

    SERVING = "serving"
    """It admits requests to the core of the last `ServeCore`."""
    SUBMITTED = "submitted"
    """During a drain: the core has all admitted requests."""
    IDLE = "idle"
    """During a drain: all requests have ended."""


class StageReached(_ChannelMessage, frozen=True, kw_only=True):
    """A follower has reached a stage."""

    stage: FollowerStage


class FollowerReport(_ChannelMessage, frozen=True, kw_only=True):
    """The counts of a follower.

    Args:
        serial: number of the `RequestReport`.
        epoch: identifies the core whose requests `lengths` counts.
        in_flight: number of requests that are being read or served.
        lengths: rows of the `LengthHistogram` of finished requests.
    """

    serial: int
    epoch: str
    in_flight: int
    lengths: list[list[int]]


LeaderMessage = (
    StartFollower | ServeCore | SuspendAdmission | FollowFields | DrainRequests | RequestReport
)
"""A message to a follower."""
FollowerEvent = StageReached | FollowerReport | Failed
"""A message to the leader."""


def leader_messages() -> FrameReader[LeaderMessage]:
    """Return a reader of the leader's messages."""
    return FrameReader(msgspec.msgpack.Decoder(LeaderMessage, dec_hook=_decode_as_text))


def follower_events() -> FrameReader[FollowerEvent]:
    """Return a reader of a follower's messages."""
    return FrameReader(msgspec.msgpack.Decoder(FollowerEvent))


class FollowerChannel(Generic[M]):
    """One end of the socket pair of a follower and the leader.

    Args:
        sock: the socket; `close` closes it.
        reader: reads the messages of the other end.
        on_message: called with each message, and with the socket that it carries.
        on_end: called once, when the other end has closed or sent an invalid message.
    """

    def __init__(
        self,
        sock: socket.socket,
        reader: FrameReader[M],
        on_message: Callable[[M, socket.socket | None], None],
        on_end: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = reader
        self._on_message = on_message
        self._on_end = on_end
        self._socks: list[socket.socket] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._receive)

    def send(
        self, message: LeaderMessage | FollowerEvent, sock: socket.socket | None = None
    ) -> bool:
        """Send a message, and a copy of a socket with it.

        Messages are few and short, so a full buffer means that the other end hangs.

        Returns:
            False if the other end has closed, or does not read.
        """
        data = frame(msgspec.msgpack.encode(message, enc_hook=str))
        try:
            if sock is None:
                return self._sock.send(data) == len(data)
            return socket.send_fds(self._sock, [data], [sock.fileno()]) == len(data)
        except OSError:
            return False

    def close(self) -> None:
        """Close the socket."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
        for sock in self._socks:
            sock.close()
        self._socks.clear()

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, _RECEIVE_BYTES, _MAX_SOCKETS)
            self._socks += [socket.socket(fileno=fd) for fd in fds]
            messages = self._reader.feed(data)
        except BlockingIOError:
            return
        except (OSError, WireError):
            data, messages = b"", []
        for message in messages:
            carries = isinstance(message, ServeCore) and self._socks
            self._on_message(message, self._socks.pop(0) if carries else None)
        if not data:
            self.close()
            self._on_end()


def _decode_as_text(kind: type, text: Any) -> Any:
    """Decode a path or a fraction from its text."""
    return kind(text)
