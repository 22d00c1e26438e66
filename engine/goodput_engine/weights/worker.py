"""`python -m goodput_engine.weights.worker SOURCE`: fetch weights, and write lines of JSON.

The process imports torch and may need much memory, which its end frees. It ends when stdin is
closed, so that it does not survive the process that waits for it.
"""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from goodput_core.contract import ENV_CACHE
from goodput_core.errors import ExitCode, GoodputError, InternalError, UsageError, install_hint
from goodput_core.files import is_disk_full
from goodput_engine.weights.gguf import converted_folder
from goodput_engine.weights.progress import FetchProgress
from goodput_engine.weights.source import WeightsSource

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["main"]

_MAX_DETAIL: Final = 300
# Needs a package that only real models need.
_HUB: Final = "goodput_engine.weights.hub"


def main(argv: list[str]) -> int:
    """Fetch the weights of a source, and return an exit code."""
    source = msgspec.json.decode(argv[0], type=WeightsSource)
    # Libraries that write to stdout must not damage the lines.
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    progress = FetchProgress(lines)
    try:
        folder = fetch(source, progress, os.environ)
    except GoodputError as error:
        progress.write({"error": str(error), "exit_code": error.exit_code})
        # A thread may still wait for a server.
        os._exit(error.exit_code)
    progress.write({"folder": str(folder)})
    return ExitCode.PASS


def fetch(source: WeightsSource, progress: FetchProgress, environment: Mapping[str, str]) -> Path:
    """Return the folder with the weights of a source.

    Raises:
        GoodputError: the weights cannot be fetched.
    """
    cache = Path(environment.get(ENV_CACHE) or "~/.cache/goodput").expanduser() / "models"
    try:
        if source.dtype is not None:
            return converted_folder(
                Path(source.name), dtype=source.dtype, cache=cache / "gguf", progress=progress
            )
        folder: Path = import_module(_HUB).hub_folder(
            source.name, revision=source.revision, offline=source.offline, progress=progress
        )
        return folder
    except ModuleNotFoundError as error:
        raise UsageError(
            f"serving {source.title} needs the package {error.name!r}; {install_hint('torch')}"
        ) from error
    except MemoryError as error:
        raise InternalError(f"{source.title}: out of memory during the conversion") from error
    except OSError as error:
        where = f" at {error.filename}" if error.filename else ""
        if is_disk_full(error):
            raise InternalError(
                f"{source.title}: the disk is full{where}; free some space and start again"
            ) from error
        variable = "HF_HOME" if source.dtype is None else ENV_CACHE
        detail = error.strerror or str(error)[:_MAX_DETAIL]
        raise InternalError(
            f"{source.title}: the cache cannot be written{where} ({detail}); set {variable} to "
            "another folder"
        ) from error


def _end_with_stdin() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
