"""Frames between the HTTP front and the core's process: a length, then MessagePack.

Both sides use this module and do their own I/O around it: the front reads in asyncio, the core
between two steps. It knows nothing of sockets, so every split and merge of bytes is testable.
"""

from __future__ import annotations

import struct
from typing import Final, Generic, TypeVar

import msgspec

from goodput_core.errors import InternalError
from goodput_engine.messages import CoreMessage, FrontMessage

__all__ = ["MAX_FRAME_BYTES", "FrameReader", "WireError", "core_reader", "encode", "front_reader"]

M = TypeVar("M")

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
"""A frame announces at most this many bytes; a million token ids take about five million."""

_LENGTH: Final = struct.Struct("<I")


class WireError(InternalError):
    """The other side sent what no version of it would send."""


class FrameReader(Generic[M]):
    """Cuts a byte stream into messages of one kind.

    Args:
        decoder: of the union of messages that may come.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """The messages that `data` completes, in order.

        Raises:
            WireError: a frame that is too long, or is not a message of this kind.
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
    """Reads what the front says: the core's side."""
    return FrameReader(msgspec.msgpack.Decoder(FrontMessage))


def core_reader() -> FrameReader[CoreMessage]:
    """Reads what the core says: the front's side."""
    return FrameReader(msgspec.msgpack.Decoder(CoreMessage))


def encode(message: FrontMessage | CoreMessage) -> bytes:
    """One frame.

    Raises:
        WireError: the message is longer than a frame may be.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes exceeds a frame's {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body
