"""Frames between the HTTP server and the core process, and the core's outgoing buffer.

A frame is a length and a MessagePack message. The server receives with asyncio, the core between
two steps. `FrameReader` and `encode` therefore do not use sockets.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

from goodput_core.errors import InternalError
from goodput_engine.messages import (
    Cancel,
    CoreMessage,
    FrontMessage,
    RequestOutput,
    StepOutputs,
    Submit,
)

if TYPE_CHECKING:
    import socket

__all__ = [
    "MAX_FRAME_BYTES",
    "FrameReader",
    "Outbox",
    "WireError",
    "core_reader",
    "encode",
    "frame",
    "front_reader",
    "request_reader",
]

M = TypeVar("M")

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
"""Largest size of a frame. A million token ids take about five million bytes."""

_MERGE_ABOVE_BYTES: Final = 1024 * 1024
_MAX_MERGED: Final = 1_000_000
"""Token ids and log-probabilities in one merged message, which then has at most 20 MB or so."""
_LENGTH: Final = struct.Struct("<I")


class WireError(InternalError):
    """The peer process sent an invalid frame or message."""


class FrameReader(Generic[M]):
    """Splits a byte stream into the messages of one direction.

    Args:
        decoder: decodes the union of the expected messages.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Return the messages that `data` completes, in order.

        Raises:
            WireError: a frame is too long, or is not a message of this direction.
        """
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        offset, end = 0, len(buffer)
        with memoryview(buffer) as view:
            while end - offset >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, offset)
                if length > MAX_FRAME_BYTES:
                    raise WireError(
                        f"a frame announces {length} bytes; at most {MAX_FRAME_BYTES} are allowed"
                    )
                start = offset + _LENGTH.size
                if end - start < length:
                    break
                offset = start + length
                try:
                    messages.append(self._decoder.decode(view[start:offset]))
                except msgspec.DecodeError as error:
                    raise WireError(
                        f"a frame of {length} bytes is not a message: {error}"
                    ) from error
        del buffer[:offset]
        return messages


def front_reader() -> FrameReader[FrontMessage]:
    """Return a reader of the server's messages, for the core."""
    return FrameReader(msgspec.msgpack.Decoder(FrontMessage))


def request_reader() -> FrameReader[FrontMessage]:
    """Return a reader for the core of the messages of an HTTP process that does not lead."""
    decoder: msgspec.msgpack.Decoder[FrontMessage] = msgspec.msgpack.Decoder(Submit | Cancel)
    return FrameReader(decoder)


def core_reader() -> FrameReader[CoreMessage]:
    """Return a reader of the core's messages, for the server."""
    return FrameReader(msgspec.msgpack.Decoder(CoreMessage))


def encode(message: FrontMessage | CoreMessage) -> bytes:
    """Return the frame of a message.

    Raises:
        WireError: the message is too long for a frame.
    """
    return frame(msgspec.msgpack.encode(message))


def frame(body: bytes) -> bytes:
    """Return the frame of an encoded message.

    Raises:
        WireError: the message is too long for a frame.
    """
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes exceeds a frame's {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Outbox:
    """Bounded buffer of unsent messages to one non-blocking socket.

    While the socket accepts no data, steps are merged instead of queued. A server that reads late
    receives one message with all tokens of each request, or several if their ids and
    log-probabilities are too many for a frame. Without these, the size of the buffer is bounded by
    the number of requests.

    Args:
        merge_above_bytes: number of unsent bytes above which steps are merged.
    """

    def __init__(self, *, merge_above_bytes: int = _MERGE_ABOVE_BYTES) -> None:
        self._merge_above_bytes = merge_above_bytes
        self._unsent = bytearray()
        # The last of the merged steps, and the merged outputs by rid.
        self._last_step: StepOutputs | None = None
        self._outputs: dict[int, RequestOutput] = {}
        self._num_merged = 0

    @property
    def waiting(self) -> bool:
        """True if anything is unsent."""
        return bool(self._unsent) or self._last_step is not None

    def push(self, message: CoreMessage) -> None:
        """Append a message, or merge a step with the previous unsent steps."""
        if not isinstance(message, StepOutputs) or (
            self._last_step is None and len(self._unsent) <= self._merge_above_bytes
        ):
            self._encode_merged()
            self._unsent += encode(message)
            return
        merged = self._outputs
        for output in message.outputs:
            earlier = merged.get(output.rid)
            merged[output.rid] = output if earlier is None else _merge(earlier, output)
            tops = sum(len(one.top_ids) for one in output.logprobs)
            self._num_merged += len(output.token_ids) + 2 * tops
        self._last_step = message
        if self._num_merged > _MAX_MERGED:
            self._encode_merged()

    def flush(self, sock: socket.socket) -> None:
        """Send as much as the socket accepts.

        Raises:
            OSError: the connection is closed.
        """
        while self.waiting:
            if not self._unsent:
                self._encode_merged()
            try:
                sent = sock.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def _encode_merged(self) -> None:
        if self._last_step is not None:
            outputs = list(self._outputs.values())
            self._unsent += encode(msgspec.structs.replace(self._last_step, outputs=outputs))
            self._last_step = None
            self._outputs = {}
            self._num_merged = 0


def _merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    return msgspec.structs.replace(
        first,
        new_tokens=first.new_tokens + second.new_tokens,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        finish_reason=second.finish_reason,
    )
