"""Servers of other projects, with a small real model: where they are installed, how they start.

`python -m tools.foreign` installs them. llama_cpp.server and `transformers serve` run in virtual
environments of their own, because their dependencies are not those of Goodput.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from tools.cache import cache_folder
from tools.smollm2 import GGUF_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = [
    "COMPLETE",
    "MODEL",
    "ForeignServer",
    "folder",
    "gguf_file",
    "running",
    "serving_packages",
    "snapshot",
]

MODEL: Final = "local/smollm2"
"""Name of the model that `transformers serve` finds in its cache."""
COMPLETE: Final = "complete"
"""File that marks a complete installation."""
_REVISION: Final = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
_START_S: Final = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignServer:
    """A running server.

    Args:
        url: its address.
        model: model name to send.
        pid: its first process.
    """

    url: str
    model: str
    pid: int


def folder() -> Path:
    """Return the folder of the installations."""
    return cache_folder() / "foreign"


def serving_packages() -> Path:
    """Return the folder of the packages that `transformers serve` needs beside `make torch`."""
    return folder() / "serving"


def gguf_file() -> Path:
    """Return the model as llama.cpp reads it."""
    return folder() / GGUF_NAME


def snapshot() -> Path:
    """Return the folder of the converted model, in the form of Hugging Face's cache."""
    name = f"models--{MODEL.replace('/', '--')}"
    return folder() / "huggingface" / "hub" / name / "snapshots" / _REVISION


@contextmanager
def running(
    kind: str, log: Path, *options: str, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[ForeignServer]:
    """Run a server on loopback during the block.

    Args:
        kind: `llama_cpp` or `transformers`.
        log: file for its output.
        options: further options of its command.
        variables: further environment variables.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    programs = folder() / kind / "bin"
    environment = {**os.environ, **variables}
    if kind == "llama_cpp":
        model = str(gguf_file())
        command = [str(programs / "python"), "-m", "llama_cpp.server", "--model", model]
        command += ["--n_ctx", "2048", "--n_threads", "2", "--host", "127.0.0.1", "--port", port]
    else:
        model = MODEL
        command = [str(programs / "transformers"), "serve", "--continuous-batching"]
        # By default it takes 60 % of the memory for blocks.
        command += ["--cb-num-blocks", "256", "--device", "cpu", "--dtype", "float32"]
        command += ["--host", "127.0.0.1", "--port", port]
        environment |= {"HF_HOME": str(folder() / "huggingface"), "HF_HUB_OFFLINE": "1"}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, *options], stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, process, log)
            yield ForeignServer(url=url, model=model, pid=process.pid)
        finally:
            process.kill()


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}; see {log}")
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=10):  # noqa: S310
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"{url} did not start within {_START_S:g} s; see {log}")
