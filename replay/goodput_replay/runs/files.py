"""The files of a run's folder, and disk space reserved to complete them on a full disk.

A Parquet file is readable only with its footer, which is written last. Disk space
beyond the contents of the records file is therefore reserved for it. If the disk fills up, the
current row group and the footer are written into the reserve.
"""

from __future__ import annotations

import hashlib
import io
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError, InternalError
from goodput_core.files import is_disk_full, partial_path

if TYPE_CHECKING:
    from pathlib import Path

    from _typeshed import ReadableBuffer

__all__ = [
    "DECISIONS_FILE",
    "RECORDS_FILE",
    "REPORT_FILE",
    "RUN_FILES",
    "SERVER_METRICS_FILE",
    "SERVICE_LOG_FILE",
    "SUMMARY_FILE",
    "DiskFullError",
    "ReservedFile",
    "digest_records",
    "require_digest",
    "reserve_file",
]

RECORDS_FILE: Final = "records.parquet"
SUMMARY_FILE: Final = "summary.json"
REPORT_FILE: Final = "report.html"
DECISIONS_FILE: Final = "decisions.jsonl"
SERVER_METRICS_FILE: Final = "server_metrics.parquet"
SERVICE_LOG_FILE: Final = "service.log"
RUN_FILES: Final = (RECORDS_FILE, SUMMARY_FILE, REPORT_FILE, DECISIONS_FILE, SERVER_METRICS_FILE)
"""Files that a run with `--force` replaces; the log of the service is only sometimes among them."""

# One or two row groups of a megabyte each, and the rows of the requests in flight.
_RESERVE_BYTES: Final = 8 << 20
# The footer takes up to a sixth of the file, if requests have one token each.
_FOOTER_SHARE: Final = 4
_STEP_BYTES: Final = 1 << 20


class DiskFullError(InternalError):
    """The disk of a run's folder, or of its result, is full; rows recorded before are kept."""


def digest_records(folder: Path) -> str:
    """Return the digest of the records of a run, for its summary."""
    with (folder / RECORDS_FILE).open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def require_digest(folder: Path, digest: str) -> None:
    """Reject records that are not those of the run's summary, such as those of another run.

    Args:
        folder: the run's folder.
        digest: digest in the summary; empty in summaries of earlier versions, which have none.

    Raises:
        InputError: the records are missing or have another digest.
    """
    path = folder / RECORDS_FILE
    try:
        found = digest_records(folder) if digest else digest
    except OSError as error:
        why = error.strerror or "cannot be read"
        raise InputError(f"{path}: {why}; give the folder of a run") from error
    if found != digest:
        raise InputError(
            f"{path}: the records are not those of the summary, which has another digest of them; "
            "restore both files or replay again"
        )


def reserve_file(path: Path, size: int) -> None:
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


class ReservedFile(io.RawIOBase):
    """A new binary file with reserved space, so that it can be completed on a full disk.

    Args:
        path: the file; an existing file is replaced.
        reserve_bytes: minimum disk space to reserve beyond the contents.

    Raises:
        OSError: the file cannot be created; ENOSPC if the reserve does not fit.
    """

    def __init__(self, path: Path, *, reserve_bytes: int = _RESERVE_BYTES) -> None:
        super().__init__()
        self._reserve_bytes = reserve_bytes
        self._position = 0
        self._allocated = 0
        self._file = path.open("wb", buffering=0)
        try:
            self._allocate(reserve_bytes + _STEP_BYTES)
        except OSError:
            self._file.close()
            with suppress(OSError):
                path.unlink()
            raise

    @property
    def free_bytes(self) -> int | None:
        """Remaining bytes of the reserve; None if the disk is not full."""
        return self._allocated - self._position if self.full else None

    full = False
    """True if the reserve could not be extended because the disk is full."""

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
        if not self.full and end + ahead > self._allocated:
            try:
                self._allocate(end + ahead + _STEP_BYTES)
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

    def _allocate(self, end: int) -> None:
        _allocate(self._file.fileno(), self._allocated, end)
        self._allocated = end


def _allocate(descriptor: int, start: int, end: int) -> None:
    """Allocate the bytes from `start` to `end`."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, start, end - start)
        return
    while start < end:  # macOS
        start += os.pwrite(descriptor, bytes(min(_STEP_BYTES, end - start)), start)
