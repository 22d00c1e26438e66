"""Find request ids that occur twice, in bounded memory.

Each id is stored as a digest of 128 bits. Up to a million digests stay in memory. More digests
are distributed to temporary files by value, so that each file can be sorted separately.
"""

from __future__ import annotations

import struct
import tempfile
from contextlib import ExitStack
from hashlib import blake2b
from typing import IO, Any, Final

import numpy as np

__all__ = ["DuplicateIds"]

_ENTRY: Final = np.dtype([("high", "<u8"), ("low", "<u8"), ("place", "<i8")])
_PLACE: Final = struct.Struct("<q")
_IN_MEMORY: Final = 1_000_000
_PARTS: Final = 64


class DuplicateIds:
    """Request ids and their places in the source; close it to remove the temporary files.

    Args:
        in_memory: maximum number of ids in memory.
    """

    def __init__(self, in_memory: int = _IN_MEMORY) -> None:
        self._limit_bytes = in_memory * _ENTRY.itemsize
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
        pairs = []
        for part in self._parts:
            part.seek(0)
            pairs.append(_find_first_pair(np.frombuffer(part.read(), dtype=_ENTRY)))
        return min((pair for pair in pairs if pair), key=lambda pair: pair[1], default=None)

    def _spill(self) -> None:
        if not self._parts:
            for _ in range(_PARTS):
                file = tempfile.TemporaryFile()  # noqa: SIM115 - the stack closes it
                self._parts.append(self._stack.enter_context(file))
        entries = np.frombuffer(bytes(self._buffer), dtype=_ENTRY)
        part_numbers = entries["high"] % _PARTS
        for number, part in enumerate(self._parts):
            part.write(entries[part_numbers == number].tobytes())
        self._buffer.clear()


def _find_first_pair(entries: np.ndarray[Any, Any]) -> tuple[int, int] | None:
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
