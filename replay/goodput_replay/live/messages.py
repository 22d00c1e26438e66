"""Messages from the sending process to the observing one, as frames on a pipe.

A frame is a length of four bytes, a kind of one byte, and a body. Records and progress are
msgpack, which takes three microseconds a record. The other messages occur once.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from goodput_core.slo.record import RequestRecord
from goodput_replay.live.tally import LiveWindow, RunProgress
from goodput_replay.run.summary_builder import RunInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Begin", "End", "Records", "encode", "encode_records", "read_message"]

_HEADER: Final = struct.Struct("<IB")
_encoder: Final = msgspec.msgpack.Encoder()
_records: Final = msgspec.msgpack.Decoder(list[tuple[RequestRecord, bool]])
_progress: Final = msgspec.msgpack.Decoder(RunProgress)

Records = list[tuple[RequestRecord, bool]]
"""Requests that ended; True for those of the warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """A run begins.

    Args:
        window: judged window.
        info: information about the run, known before it starts.
    """

    window: LiveWindow
    info: RunInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A run was judged; its folder is complete."""

    folder: Path


class _FrameKind(IntEnum):
    ONCE = 0
    RECORDS = 1
    PROGRESS = 2


def encode(message: Begin | End | RunProgress) -> bytes:
    """Return the frame of a message."""
    if isinstance(message, RunProgress):
        return _frame(_FrameKind.PROGRESS, _encoder.encode(message))
    return _frame(_FrameKind.ONCE, pickle.dumps(message))


def encode_records(records: Sequence[tuple[RequestRecord, bool]]) -> bytes:
    """Return the frame of requests that ended."""
    return _frame(_FrameKind.RECORDS, _encoder.encode(records))


async def read_message(pipe: asyncio.StreamReader) -> Begin | End | Records | RunProgress | None:
    """Return the next message; None at the end of the pipe."""
    try:
        length, kind = _HEADER.unpack(await pipe.readexactly(_HEADER.size))
        body = await pipe.readexactly(length)
    except asyncio.IncompleteReadError:
        return None
    if kind == _FrameKind.RECORDS:
        return _records.decode(body)
    if kind == _FrameKind.PROGRESS:
        return _progress.decode(body)
    message: Begin | End = pickle.loads(body)  # noqa: S301 - written by the parent process
    return message


def _frame(kind: _FrameKind, body: bytes) -> bytes:
    return _HEADER.pack(len(body), kind) + body
