"""The cached folder of a GGUF file, in Hugging Face's format and with checksums.

The name of the folder contains the checksum of the file and the version of the conversion, so a
changed file or a changed conversion gets another folder.
"""

from __future__ import annotations

import shutil
from importlib import import_module
from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError
from goodput_engine.weights.checksums import damaged_file, file_digest, write_checksums
from goodput_engine.weights.locks import locked

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_engine.weights.progress import FetchProgress

__all__ = ["converted_folder"]

_MAGIC: Final = b"GGUF"
_DIGEST_CHARACTERS: Final = 32
# Counts the changes of the conversion, after which a file is converted again.
_VERSION: Final = 2
# The import of transformers takes seconds.
_CONVERSION: Final = "goodput_engine.executor.torch.gguf_conversion"


def converted_folder(file: Path, *, dtype: str, cache: Path, progress: FetchProgress) -> Path:
    """Return the folder of a GGUF file, after a conversion if there is none yet.

    Args:
        file: a GGUF file.
        dtype: data type of the converted weights.
        cache: folder of the converted files.
        progress: gets the phases.

    Raises:
        InputError: the file is missing, damaged, not supported, or too large for the memory or
            the disk.
        ModuleNotFoundError: a package for the conversion is not installed.
        OSError: the cache cannot be written.
    """
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(_MAGIC))
        if magic != _MAGIC:
            raise InputError(f"{file}: is not a GGUF file; download it again")
        with progress.phase(f"read {file.name}", file.stat().st_size):
            digest = file_digest(file, progress.add)[:_DIGEST_CHARACTERS]
    except OSError as error:
        raise InputError(f"{file}: the GGUF file cannot be read ({error.strerror})") from error
    folder = cache / f"{digest}-{dtype}-{_VERSION}"
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{folder.name}.lock"):
        if folder.is_dir():
            size = sum(path.stat().st_size for path in folder.iterdir())
            with progress.phase("check the converted weights", size):
                damaged = damaged_file(folder, progress.add)
            if damaged is None:
                return folder
            progress.warn(f"{damaged} in {folder} is damaged, so {file.name} is converted again")
            shutil.rmtree(folder)
        partial = cache / f"{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a conversion that was interrupted
        try:
            with progress.phase(f"convert {file.name} to {dtype}", 0):
                import_module(_CONVERSION).convert(file, partial, dtype, progress.warn)
                write_checksums(partial)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder
