"""SHA-256 checksums of the files in a folder, stored in the folder itself."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError
from goodput_engine.model_folder import read_json_object

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["damaged_file", "file_digest", "write_checksums"]

_NAME: Final = "checksums.json"
_CHUNK: Final = 16 << 20


def file_digest(
    path: Path, read: Callable[[int], object], *, algorithm: str = "sha256", head: bytes = b""
) -> str:
    """Return the digest of a file in hexadecimal form.

    Args:
        path: the file.
        read: called with the size of each part that was read.
        algorithm: a name of hashlib.
        head: bytes that the digest includes before the file.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.new(algorithm, head, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            read(len(chunk))
    return digest.hexdigest()


def write_checksums(folder: Path) -> None:
    """Write the checksums of the files that are in a folder now."""
    digests = {path.name: file_digest(path, lambda _: None) for path in sorted(folder.iterdir())}
    (folder / _NAME).write_text(json.dumps(digests, indent=1), encoding="utf-8")


def damaged_file(folder: Path, read: Callable[[int], object]) -> str | None:
    """Return the name of a file that is missing or has another checksum; None if there is none.

    Args:
        folder: a folder with checksums.
        read: see `file_digest`.
    """
    try:
        digests = read_json_object(folder / _NAME)
    except InputError:
        return _NAME
    for name, expected in digests.items():
        try:
            found = file_digest(folder / name, read)
        except OSError:
            return name
        if found != expected:
            return name
    return None
