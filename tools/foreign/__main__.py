"""`python -m tools.foreign`: install the servers of other projects for `make test-foreign`.

llama-cpp-python is built from source, which takes up to 15 minutes on two cores. The installation
of torch takes 5 GB. Both are done once; later calls return at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

from tools.foreign.servers import COMPLETE, folder, gguf_file, snapshot
from tools.smollm2 import download

_LLAMA_CPP: Final = "llama-cpp-python[server]==0.3.36"
_TRANSFORMERS: Final = (
    "transformers[serving]==5.23.0",
    "torch==2.13.0",
    # both read the GGUF file
    "accelerate==1.15.0",
    "gguf==0.19.0",
)
_CONSTRAINTS: Final = Path(__file__).resolve().parents[2] / "constraints.txt"
_BUILD_S: Final = 2700
_INSTALL_S: Final = 1800


def main() -> None:
    """Install everything that is missing."""
    folder().mkdir(parents=True, exist_ok=True)
    if not gguf_file().exists():
        print("downloading the model")
        download(gguf_file())
    # Code for the instructions of this processor alone would not run on another machine.
    portable = {"CMAKE_ARGS": "-DGGML_NATIVE=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
    _install("llama_cpp", [_LLAMA_CPP], timeout_s=_BUILD_S, variables=portable)
    _install("transformers", [*_TRANSFORMERS, "-c", str(_CONSTRAINTS)], timeout_s=_INSTALL_S)
    if not (snapshot() / COMPLETE).exists():
        print("converting the model")
        python = folder() / "transformers" / "bin" / "python"
        script = Path(__file__).parents[1] / "convert_gguf.py"
        subprocess.run([python, script, gguf_file(), snapshot()], check=True, timeout=_INSTALL_S)
        references = snapshot().parents[1] / "refs"
        references.mkdir(exist_ok=True)
        (references / "main").write_text(snapshot().name, encoding="utf-8")
        (snapshot() / COMPLETE).touch()
    print(folder())


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
