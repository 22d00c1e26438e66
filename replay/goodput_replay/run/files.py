"""The files of a run's folder, and a file format writer's protection against a full disk.

A Parquet file is readable only with its footer, which is written last. So a file of records is
kept longer on the disk than its contents: when the disk fills up, the current row group and the
footer are written into space that the file already owns.
"""

from __future__ import annotations

import io
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InternalError
from goodput_core.files import is_disk_full, partial_path

if TYPE_CHECKING:
    from pathlib import Path

    from _typeshed import ReadableBuffer

__all__ = [
    "DECISIONS_FILE",
    "RECORDS_FILE",
    "REPORT_FILE",
    "RESERVE_BYTES",
    "SUMMARY_FILE",
    "DiskFullError",
    "SurvivingFile",
    "set_aside",
]

# A row group or two (a megabyte each) and what ends together with the run.
RESERVE_BYTES: Final = 8 << 20
# The footer grows with the file: by a sixth of it where requests have one token each.
_FOOTER_SHARE: Final = 4
_STEP_BYTES: Final = 1 << 20


class DiskFullError(InternalError):
    """The disk that holds a run's folder is full; what was recorded until then is kept."""


def set_aside(path: Path, size: int) -> None:
    """Allocate disk space for a new file, which `write_atomically` then writes into.

    Args:
        path: the file's final name.
        size: bytes.

    Raises:
        OSError: with ENOSPC if there is not enough space; no file is left behind.
    """
    partial = partial_path(path)
    try:
        with partial.open("wb") as file:
            _allocate(file.fileno(), 0, size)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


class SurvivingFile(io.RawIOBase):
    """A new binary file with reserved space to be completed when the disk is full.

    Args:
        path: the file; an existing file is replaced.
        reserve_bytes: allocated beyond the contents, at least.

    Raises:
        OSError: the file cannot be created; ENOSPC if the reserve does not fit.
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
        """Bytes that can still be written after the disk filled up; None before."""
        return self._held - self._position if self.full else None

    full = False
    """True once the disk had no space for more than the reserve."""

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._position

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of `data`.

        Raises:
            OSError: the disk is full and the reserve is used up.
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
        """Release the reserve and close the file."""
        if not self.closed:
            try:
                self._file.truncate(self._position)
            finally:
                self._file.close()
                super().close()

    def _hold(self, end: int) -> None:
        _allocate(self._file.fileno(), self._held, end)
        self._held = end


def _allocate(descriptor: int, start: int, end: int) -> None:
    """Allocate the bytes from `start` to `end`."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, start, end - start)
        return
    while start < end:  # macOS
        start += os.pwrite(descriptor, bytes(min(_STEP_BYTES, end - start)), start)


RECORDS_FILE: Final = "records.parquet"
SUMMARY_FILE: Final = "summary.json"
REPORT_FILE: Final = "report.html"
DECISIONS_FILE: Final = "decisions.jsonl"
