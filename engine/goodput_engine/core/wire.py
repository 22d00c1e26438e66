"""Frames between the HTTP server and the core process, and the core's outgoing buffer.

A frame is a length and a MessagePack message. Both sides do their own I/O: the server reads in
asyncio, and the core reads between two steps. `FrameReader` and `encode` do not use sockets.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

from goodput_core.errors import InternalError
from goodput_engine.messages import CoreMessage, FrontMessage, RequestOutput, StepOutputs

if TYPE_CHECKING:
    import socket

__all__ = [
    "MAX_FRAME_BYTES",
    "FrameReader",
    "Outbox",
    "WireError",
    "core_reader",
    "encode",
    "front_reader",
]

M = TypeVar("M")

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
"""Upper bound of a frame; a million token ids take about five million bytes."""

_MERGE_ABOVE_BYTES: Final = 1024 * 1024
_LENGTH: Final = struct.Struct("<I")


class WireError(InternalError):
    """The peer process sent an invalid frame or message."""


class FrameReader(Generic[M]):
    """Splits a byte stream into messages of one kind.

    Args:
        decoder: decodes the union of the expected messages.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Return the messages that `data` completes, in order.

        Raises:
            WireError: a frame is too long, or is not a message of this kind.
        """
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        at, end = 0, len(buffer)
        with memoryview(buffer) as view:
            while end - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, at)
                if length > MAX_FRAME_BYTES:
                    raise WireError(
                        f"a frame announces {length} bytes; at most {MAX_FRAME_BYTES} are allowed"
                    )
                start = at + _LENGTH.size
                if end - start < length:
                    break
                at = start + length
                try:
                    messages.append(self._decoder.decode(view[start:at]))
                except msgspec.DecodeError as error:
                    raise WireError(
                        f"a frame of {length} bytes is not a message: {error}"
                    ) from error
        del buffer[:at]
        return messages


def front_reader() -> FrameReader[FrontMessage]:
    """Return a reader of the server's messages, for the core."""
    return FrameReader(msgspec.msgpack.Decoder(FrontMessage))


def core_reader() -> FrameReader[CoreMessage]:
    """Return a reader of the core's messages, for the server."""
    return FrameReader(msgspec.msgpack.Decoder(CoreMessage))


def encode(message: FrontMessage | CoreMessage) -> bytes:
    """Return the frame of a message.

    Raises:
        WireError: the message is longer than a frame.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes exceeds a frame's {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Outbox:
    """Bounded buffer of unsent messages to one non-blocking socket.

    While the socket accepts no data, steps are merged instead of queued: a delayed server receives
    one message with all tokens of each request. The number of requests therefore bounds the buffer.

    Args:
        merge_above_bytes: number of unsent bytes above which steps are merged.
    """

    def __init__(self, *, merge_above_bytes: int = _MERGE_ABOVE_BYTES) -> None:
        self._merge_above_bytes = merge_above_bytes
        self._unsent = bytearray()
        self._held: StepOutputs | None = None
        self._held_outputs: dict[int, RequestOutput] = {}

    @property
    def waiting(self) -> bool:
        """True if anything is unsent."""
        return bool(self._unsent) or self._held is not None

    def push(self, message: CoreMessage) -> None:
        """Append a message, or merge a step with the held one."""
        if not isinstance(message, StepOutputs) or (
            self._held is None and len(self._unsent) <= self._merge_above_bytes
        ):
            self._release()
            self._unsent += encode(message)
            return
        held = self._held_outputs
        for output in message.outputs:
            before = held.get(output.rid)
            held[output.rid] = output if before is None else _merge(before, output)
        self._held = message

    def flush(self, sock: socket.socket) -> None:
        """Send as much as the socket accepts.

        Raises:
            OSError: the connection is closed.
        """
        while self.waiting:
            if not self._unsent:
                self._release()
            try:
                sent = sock.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def _release(self) -> None:
        if self._held is not None:
            last = self._held
            outputs = list(self._held_outputs.values())
            self._unsent += encode(msgspec.structs.replace(last, outputs=outputs))
            self._held = None
            self._held_outputs = {}


def _merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    return msgspec.structs.replace(
        first,
        new_tokens=first.new_tokens + second.new_tokens,
        token_ids=first.token_ids + second.token_ids,
        finish_reason=second.finish_reason,
    )
