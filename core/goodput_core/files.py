"""Files that are complete or absent: written under a temporary name and renamed at the end.

Use this module to replace small files. A reader sees the old content or the new content, never a
part of it.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "atomic_file",
    "is_disk_full",
    "output_file",
    "partial_path",
    "publish",
    "write_atomically",
    "write_output",
]

_SUFFIX: Final = ".partial"


def partial_path(path: Path, *, private: bool = False) -> Path:
    """Return the temporary name beside `path`.

    Args:
        path: the final name.
        private: True for a hidden name that contains the process's id, so that several processes
            may write the same file; False for a name that is the same for every process.
    """
    name = f".{path.name}.{os.getpid()}" if private else path.name
    return path.with_name(name + _SUFFIX)


def publish(path: Path, *, private: bool = False) -> None:
    """Rename the complete file `partial_path(path)` to `path`, replacing an earlier one.

    Args:
        path: the final name.
        private: the value that was given to `partial_path`.
    """
    partial_path(path, private=private).replace(path)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the content of a small file; the system decides when the bytes reach the disk.

    For files with a single writer. Space that was allocated under `partial_path(path)` is used,
    so that a file can be replaced on a disk that became full.

    Raises:
        OSError: the file could not be written. After any exception the temporary file is removed.
    """
    partial = partial_path(path)
    try:
        # Without O_TRUNC, which would release the allocated space.
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
            file.write(data)
            file.truncate()
        publish(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_output(path: Path, data: bytes) -> None:
    """Write a small file that a user named.

    A file is replaced as by `write_atomically`, and the target of a symbolic link in place of the
    link. A pipe or a device, such as /dev/stdout, is written into.

    Raises:
        OSError: the file could not be written.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
    else:
        write_atomically(path.resolve(), data)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a new binary file that replaces `path` when the block ends, with its bytes on the disk.

    Two processes may write the same file: the last one to finish replaces the others' content. If
    the block raises, the temporary file is removed.

    Raises:
        OSError: the file could not be created or written.
    """
    partial = partial_path(path, private=True)
    file = partial.open("wb")
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()
        publish(path, private=True)
    except BaseException:
        with suppress(OSError):  # on a full disk closing fails as well
            file.close()
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def output_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that a user named, for outputs of any size; otherwise as `write_output`.

    Raises:
        OSError: the file could not be created or written.
    """
    is_file = path.is_file() or not path.exists()
    with atomic_file(path.resolve()) if is_file else path.open("wb") as file:
        yield file


def is_disk_full(error: OSError) -> bool:
    """True if no more bytes fit on the disk: it is full, or a quota is used up."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT}
