"""Messages between the processes of one run, as frames on a pipe.

A frame is a length of four bytes, a kind of one byte, and a body. Records are msgpack, which takes
three microseconds each. Other messages are few, and pickled: both ends are this program.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import msgspec

from goodput_core.slo.record import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_FRAME", "Records", "encode", "encode_records", "read_message"]

MAX_FRAME: Final = 64 << 20
"""Limit of the buffer of a pipe's reader."""
_HEADER: Final = struct.Struct("<IB")
_encoder: Final = msgspec.msgpack.Encoder()
_records: Final = msgspec.msgpack.Decoder(list[tuple[RequestRecord, bool]])

Records = list[tuple[RequestRecord, bool]]
"""Requests that ended; True for those of the warm-up."""


class _FrameKind(IntEnum):
    PICKLED = 0
    RECORDS = 1


def encode(message: object) -> bytes:
    """Return the frame of a message."""
    return _frame(_FrameKind.PICKLED, pickle.dumps(message))


def encode_records(records: Sequence[tuple[RequestRecord, bool]]) -> bytes:
    """Return the frame of requests that ended."""
    return _frame(_FrameKind.RECORDS, _encoder.encode(records))


async def read_message(pipe: asyncio.StreamReader) -> Any:
    """Return the next message, `Records` as a list; None at the end of the pipe."""
    try:
        length, kind = _HEADER.unpack(await pipe.readexactly(_HEADER.size))
        body = await pipe.readexactly(length)
    except asyncio.IncompleteReadError:
        return None
    if kind == _FrameKind.RECORDS:
        return _records.decode(body)
    return pickle.loads(body)  # noqa: S301 - written by a process of this run


def _frame(kind: _FrameKind, body: bytes) -> bytes:
    return _HEADER.pack(len(body), kind) + body
