"""Messages between the processes of one run, as frames on a pipe.

A frame is a length of four bytes, a kind of one byte, and a body. The body is MessagePack, which a
decoder of the kind's type validates; nothing in it can name code. Records come in batches, which
take three microseconds a record.
"""

from __future__ import annotations

import os
import struct
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from goodput_core.slo.record import RequestRecord

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

__all__ = ["MAX_FRAME", "MessageCodec", "Records"]

MAX_FRAME: Final = 64 << 20
"""Limit of the buffer of a pipe's reader."""
_HEADER: Final = struct.Struct("<IB")
_RECORDS: Final = 0

Records = list[tuple[RequestRecord, bool]]
"""Requests that ended; True for those of the warm-up."""


class MessageCodec:
    """Encodes and decodes the messages of one kind of pipe.

    Args:
        types: dataclasses of the messages besides records. Both ends of a pipe use one codec.
    """

    def __init__(self, *types: type) -> None:
        self._types = types
        self._kinds = {one: kind for kind, one in enumerate(types, start=_RECORDS + 1)}
        # Made when they are needed, because most processes receive a few types only.
        self._decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {}
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_value)

    def encode(self, message: object) -> bytes:
        """Return the frame of a message."""
        return _frame(self._kinds[type(message)], self._encoder.encode(message))

    def encode_records(self, records: Sequence[tuple[RequestRecord, bool]]) -> bytes:
        """Return the frame of requests that ended."""
        return _frame(_RECORDS, self._encoder.encode(records))

    async def read(self, pipe: asyncio.StreamReader) -> Any:
        """Return the next message, `Records` as a list; None at the end of the pipe."""
        try:
            length, kind = _HEADER.unpack(await pipe.readexactly(_HEADER.size))
            body = await pipe.readexactly(length)
        except EOFError:  # also within a frame
            return None
        return self._decoder(kind).decode(body)

    def _decoder(self, kind: int) -> msgspec.msgpack.Decoder[Any]:
        if kind not in self._decoders:
            message: Any = Records if kind == _RECORDS else self._types[kind - 1]
            self._decoders[kind] = msgspec.msgpack.Decoder(message, dec_hook=_decode_value)
        return self._decoders[kind]


def _encode_value(value: object) -> object:
    """Return a path or a fraction as a value of MessagePack."""
    match value:
        case Path():
            return os.fsencode(value)
        case Fraction():
            return value.as_integer_ratio()
    raise NotImplementedError(f"{type(value)} has no encoding")


def _decode_value(kind: type, value: Any) -> object:
    if kind is Path:
        return Path(os.fsdecode(value))
    if kind is Fraction:
        return Fraction(*value)
    raise NotImplementedError(f"{kind} has no encoding")


def _frame(kind: int, body: bytes) -> bytes:
    return _HEADER.pack(len(body), kind) + body
