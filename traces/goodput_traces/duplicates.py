"""Find request ids that occur twice, in bounded memory.

Each id is stored as a digest of 128 bits. Up to 262,144 digests stay in memory. More digests are
distributed to temporary files by value. A file is read in as many passes as its digests need to be
sorted within the same limit.
"""

from __future__ import annotations

import os
import struct
import tempfile
from contextlib import ExitStack
from hashlib import blake2b
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DuplicateIds"]

_ENTRY: Final = np.dtype([("high", "<u8"), ("low", "<u8"), ("place", "<i8")])
_PLACE: Final = struct.Struct("<q")
_IN_MEMORY: Final = 1 << 18
_PARTS: Final = 64
_READ_ENTRIES: Final = 1 << 9

_Entries: TypeAlias = np.ndarray[Any, Any]


class DuplicateIds:
    """Request ids and their places in the source; close it to remove the temporary files.

    Args:
        in_memory: maximum number of ids in memory.
        num_parts: number of temporary files.
    """

    def __init__(self, in_memory: int = _IN_MEMORY, num_parts: int = _PARTS) -> None:
        self._limit_bytes = in_memory * _ENTRY.itemsize
        self._num_parts = num_parts
        self._buffer = bytearray()
        self._parts: list[IO[bytes]] = []
        self._stack = ExitStack()

    def close(self) -> None:
        """Remove the temporary files."""
        self._stack.close()

    def add(self, request_id: str, place: int) -> None:
        """Add the id of one row; places increase from row to row."""
        digest = blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self._buffer += digest + _PLACE.pack(place)
        if len(self._buffer) >= self._limit_bytes:
            self._spill()

    def find_first(self) -> tuple[int, int] | None:
        """Return the places of the first two equal ids, in order; None if all ids differ."""
        if not self._parts:
            return _find_first_pair(np.frombuffer(bytes(self._buffer), dtype=_ENTRY))
        self._spill()
        pairs = [_find_first_pair(entries) for part in self._parts for entries in self._cut(part)]
        return min((pair for pair in pairs if pair), key=lambda pair: pair[1], default=None)

    def _cut(self, part: IO[bytes]) -> Iterator[_Entries]:
        """Yield the entries of a file in groups, equal digests in one group."""
        size = part.seek(0, os.SEEK_END)
        passes = -(-size // self._limit_bytes)
        for number in range(passes):
            part.seek(0)
            groups = []
            while data := part.read(_READ_ENTRIES * _ENTRY.itemsize):
                entries = np.frombuffer(data, dtype=_ENTRY)
                groups.append(entries[entries["low"] % passes == number])
            yield np.concatenate(groups)

    def _spill(self) -> None:
        if not self._parts:
            for _ in range(self._num_parts):
                file = tempfile.TemporaryFile()  # noqa: SIM115 - the stack closes it
                self._parts.append(self._stack.enter_context(file))
        entries = np.frombuffer(bytes(self._buffer), dtype=_ENTRY)
        part_numbers = entries["high"] % self._num_parts
        for number, part in enumerate(self._parts):
            part.write(entries[part_numbers == number].tobytes())
        self._buffer.clear()


def _find_first_pair(entries: _Entries) -> tuple[int, int] | None:
    order = np.lexsort((entries["place"], entries["low"], entries["high"]))
    entries = entries[order]
    same = (entries["high"][1:] == entries["high"][:-1]) & (
        entries["low"][1:] == entries["low"][:-1]
    )
    at = np.flatnonzero(same)
    if not len(at):
        return None
    earliest = at[np.argmin(entries["place"][at + 1])]
    return int(entries["place"][earliest]), int(entries["place"][earliest + 1])
