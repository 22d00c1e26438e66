"""Files that survive a full disk: what was written before it filled stays readable.

A Parquet file can be read only with its footer, and the footer comes last. So a run sets a
reserve of disk space aside first and gives it back when a write meets a full disk: the row
group in hand, the footer and the summary then still fit. It knows bytes, not requests.
"""

from __future__ import annotations

import errno
import io
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InternalError
from goodput_replay.run.names import PARTIAL_SUFFIX

if TYPE_CHECKING:
    from pathlib import Path

    from _typeshed import ReadableBuffer

__all__ = ["DiskFullError", "Reserve", "SurvivingFile", "is_disk_full", "write_atomically"]

# One row group (a megabyte or two), the footer of a long run, the summary and the report.
RESERVE_BYTES: Final = 8 << 20


class DiskFullError(InternalError):
    """The disk that holds a run's folder is full; what was recorded until then is kept."""


def is_disk_full(error: OSError) -> bool:
    """Whether the error says that no more bytes fit: a full disk or a used-up quota."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT}


class Reserve:
    """Disk space held by a hidden file until `release`.

    Args:
        path: the file; replaced when it exists.
        size: bytes.

    Raises:
        OSError: with ENOSPC when there is not even room for the reserve.
    """

    def __init__(self, path: Path, size: int = RESERVE_BYTES) -> None:
        self._path = path
        self.released = False
        try:
            path.write_bytes(bytes(size))
        except OSError:
            with suppress(OSError):
                path.unlink()
            raise

    def release(self) -> None:
        """Give the space back; again is harmless."""
        self.released = True
        self._path.unlink(missing_ok=True)


class SurvivingFile(io.RawIOBase):
    """A new binary file whose writes give the reserve back when the disk is full, and go on.

    Args:
        path: the file; replaced when it exists.
        reserve: the space to give back.
    """

    def __init__(self, path: Path, reserve: Reserve) -> None:
        super().__init__()
        self._file = path.open("wb", buffering=0)
        self._reserve = reserve
        self._position = 0

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
        while rest:
            try:
                written = self._file.write(rest)
            except OSError as error:
                if self._reserve.released or not is_disk_full(error):
                    raise
                self._reserve.release()
                continue
            rest = rest[written:]
            self._position += written
        return total

    def close(self) -> None:
        """Close the file; its bytes reach the disk with the system's own timing."""
        if not self.closed:
            self._file.close()
        super().close()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a whole file or none: readers never see half of it.

    Raises:
        OSError: it could not be written; nothing is left behind.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
