"""Files that are either whole or not there: written under another name, renamed when complete."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

from goodput_traces.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["refuse_existing", "whole_file"]


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise a `TraceError` when a file would be replaced without having been asked to."""
    if path.is_dir():
        raise TraceError(path, "this is a folder; name a file to write")
    if path.exists() and not overwrite:
        raise TraceError(path, "the file exists; name another, or add --force to replace it")


@contextmanager
def whole_file(path: Path, *, overwrite: bool) -> Iterator[IO[bytes]]:
    """A binary file that gets its name when the block ends, and vanishes when it raises.

    Raises:
        TraceError: the file exists already, or its folder cannot be written.
        OSError: the disk is full.
    """
    refuse_existing(path, overwrite=overwrite)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        sink = part.open("wb")
    except OSError as error:
        raise TraceError(path, f"cannot be written ({error.strerror}); check the folder") from error
    try:
        yield sink
        sink.flush()
        os.fsync(sink.fileno())
        sink.close()
        part.replace(path)
    except BaseException:
        with suppress(OSError):  # on a full disk closing fails again
            sink.close()
        part.unlink(missing_ok=True)
        raise
