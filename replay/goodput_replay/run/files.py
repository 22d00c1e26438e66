"""Files that survive a full disk: what was written before it filled stays readable.

A Parquet file can be read only with its footer, and the footer comes last. So a file of records
is always some way longer on the disk than what was written to it: when the disk fills up, the
row group in hand and the footer go into space that is the file's already and that no neighbour
can take. It knows bytes, not requests.
"""

from __future__ import annotations

import errno
import io
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InternalError

if TYPE_CHECKING:
    from pathlib import Path

    from _typeshed import ReadableBuffer

__all__ = [
    "DECISIONS_FILE",
    "PARTIAL_SUFFIX",
    "RECORDS_FILE",
    "REPORT_FILE",
    "RESERVE_BYTES",
    "SUMMARY_FILE",
    "DiskFullError",
    "SurvivingFile",
    "is_disk_full",
    "set_aside",
    "write_atomically",
]

# A row group or two (a megabyte each) and what ends together with the run.
RESERVE_BYTES: Final = 8 << 20
# The footer grows with the file: by a sixth of it where requests have one token each.
_FOOTER_SHARE: Final = 4
_STEP_BYTES: Final = 1 << 20


class DiskFullError(InternalError):
    """The disk that holds a run's folder is full; what was recorded until then is kept."""


def is_disk_full(error: OSError) -> bool:
    """Whether the error says that no more bytes fit: a full disk or a used-up quota."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT}


def set_aside(path: Path, size: int) -> None:
    """Give a new file space on the disk, which `write_atomically` then writes into.

    Args:
        path: the file's final name.
        size: bytes.

    Raises:
        OSError: with ENOSPC when there is not that much room; nothing is left behind.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        with partial.open("wb") as file:
            _allocate(file.fileno(), 0, size)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


class SurvivingFile(io.RawIOBase):
    """A new binary file that has room to be ended when the disk is full.

    Args:
        path: the file; replaced when it exists.
        reserve_bytes: how much longer than its contents it is kept on the disk, at least.

    Raises:
        OSError: it cannot be made, with ENOSPC when there is not even room for the reserve.
    """

    def __init__(self, path: Path, *, reserve_bytes: int = RESERVE_BYTES) -> None:
        super().__init__()
        self._reserve_bytes = reserve_bytes
        self._position = 0
        self._held = 0
        self._file = path.open("wb", buffering=0)
        try:
            self._hold(reserve_bytes + _STEP_BYTES)
        except OSError:
            self._file.close()
            with suppress(OSError):
                path.unlink()
            raise

    @property
    def room(self) -> int | None:
        """Bytes that can be written still, once the disk was found full; None: it was not."""
        return self._held - self._position if self.full else None

    full = False
    """Whether the disk had no room for more than what the file holds."""

    def writable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
        return self._position

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of `data`.

        Raises:
            OSError: the disk is full and the reserve is spent too.
        """
        rest = memoryview(data).cast("B")
        total = len(rest)
        end = self._position + total
        ahead = max(self._reserve_bytes, end // _FOOTER_SHARE)
        if not self.full and end + ahead > self._held:
            try:
                self._hold(end + ahead + _STEP_BYTES)
            except OSError as error:
                if not is_disk_full(error):
                    raise
                self.full = True
        while rest:
            written = self._file.write(rest)
            rest = rest[written:]
            self._position += written
        return total

    def close(self) -> None:
        """Cut off what was held and close; the bytes reach the disk with the system's timing."""
        if not self.closed:
            try:
                self._file.truncate(self._position)
            finally:
                self._file.close()
                super().close()

    def _hold(self, end: int) -> None:
        _allocate(self._file.fileno(), self._held, end)
        self._held = end


def write_atomically(path: Path, data: bytes) -> None:
    """Write a whole file or none: readers never see half of it.

    Raises:
        OSError: it could not be written; nothing is left behind.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        # Not emptied first: space that was set aside is written into.
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
            file.write(data)
            file.truncate()
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


def _allocate(descriptor: int, start: int, end: int) -> None:
    """Make the bytes from `start` to `end` the file's own."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, start, end - start)
        return
    while start < end:  # macOS
        start += os.pwrite(descriptor, bytes(min(_STEP_BYTES, end - start)), start)


RECORDS_FILE: Final = "records.parquet"
SUMMARY_FILE: Final = "summary.json"
REPORT_FILE: Final = "report.html"
DECISIONS_FILE: Final = "decisions.jsonl"
PARTIAL_SUFFIX: Final = ".partial"
"""Ends the name of a file that is not whole yet."""
