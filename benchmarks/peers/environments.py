"""Virtual environments of other load generators, and the tokenizer that these need.

Each tool has an environment of its own, which uv builds. The tool's version is pinned, and so are
its dependencies, because uv ignores all packages published on or after `PUBLISHED_BEFORE`. An
interrupted build is repeated: an environment has its final name only when it is complete.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MODEL", "BuildError", "Environment", "build", "cache_folder", "tokenizer"]

UV: Final = "uv==0.13.9"
PUBLISHED_BEFORE: Final = "2026-11-22"
MODEL: Final = "goodput/words"
BUILD_TIMEOUT_S: Final = 1800.0

# Tools that are offline find a model only in the layout of a Hugging Face cache.
_SNAPSHOT: Final = "0" * 40
_TRAIN: Final = """
import json, pathlib, sys
from tokenizers import ByteLevelBPETokenizer
out, corpus = pathlib.Path(sys.argv[1]), sys.argv[2:]
tokenizer = ByteLevelBPETokenizer()
tokenizer.train(corpus, vocab_size=8000, special_tokens=["<eos>"])
tokenizer.save(str(out / "tokenizer.json"))
names = {"eos_token": "<eos>", "bos_token": "<eos>", "unk_token": "<eos>", "pad_token": "<eos>"}
config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 131072, **names}
(out / "tokenizer_config.json").write_text(json.dumps(config))
model = {"model_type": "gpt2", "n_positions": 131072, "vocab_size": 8000}
(out / "config.json").write_text(json.dumps(model))
"""


class BuildError(Exception):
    """An environment cannot be built; the message is the reason in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A tool's virtual environment.

    Args:
        name: tool and version, the name of the folder.
        packages: requirements to install with all their dependencies.
        bare_packages: requirements to install without their dependencies.
        python: the required version of Python, such as "3.12"; None for the version that runs
            this benchmark.
    """

    name: str
    packages: tuple[str, ...] = ()
    bare_packages: tuple[str, ...] = ()
    python: str | None = None

    @property
    def folder(self) -> Path:
        """The folder of the environment."""
        return cache_folder() / self.name

    def program(self, name: str) -> str:
        """Return the path of a program of the environment."""
        return str(self.folder / "bin" / name)


def cache_folder() -> Path:
    """Return the folder of environments, tokenizer and results."""
    cache = os.environ.get("GOODPUT_CACHE", "~/.cache/goodput")
    return Path(cache).expanduser() / "loadgen"


def build(environment: Environment) -> None:
    """Build an environment unless it is complete.

    Raises:
        BuildError: Python or a package is not available.
    """
    # Programs in an environment contain its path, so it is built in place, under a mark.
    mark = environment.folder.with_name(environment.folder.name + ".building")
    if environment.folder.exists() and not mark.exists():
        return
    uv = _uv()
    mark.touch()
    python = _interpreter(uv, environment.python)
    _run([uv, "venv", "--quiet", "--clear", "--python", python, str(environment.folder)])
    # Compiled at once, so that the first run does not start slower than the others.
    install = [uv, "pip", "install", "--quiet", "--compile-bytecode"]
    install += ["--python", environment.program("python")]
    install += ["--exclude-newer", PUBLISHED_BEFORE]
    if environment.packages:
        _run([*install, *environment.packages])
    if environment.bare_packages:
        _run([*install, "--no-deps", *environment.bare_packages])
    mark.unlink()


def tokenizer(environment: Environment) -> Path:
    """Return the folder of the tokenizer, and train it first unless it exists.

    It has 8,000 tokens and is trained on the documentation of this repository. `HF_HOME` is the
    folder's fourth parent.

    Args:
        environment: an environment whose Python has the package `tokenizers`.
    """
    model = cache_folder() / "huggingface" / "hub" / f"models--{MODEL.replace('/', '--')}"
    folder = model / "snapshots" / _SNAPSHOT
    reference = model / "refs" / "main"
    if not reference.exists():
        folder.mkdir(parents=True, exist_ok=True)
        docs = Path(__file__).resolve().parents[2] / "docs"
        corpus = [str(page) for page in sorted(docs.glob("*.md"))]
        _run([environment.program("python"), "-c", _TRAIN, str(folder), *corpus])
        reference.parent.mkdir(exist_ok=True)
        reference.write_text(_SNAPSHOT)
    return folder


def _uv() -> str:
    folder = cache_folder() / "uv"
    program = folder / "bin" / "uv"
    if not program.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(folder / "bin" / "pip"), "install", "--quiet", UV])
    return str(program)


def _interpreter(uv: str, version: str | None) -> str:
    """Return a path or a version for `uv venv --python`."""
    if version is None:
        return sys.executable
    name = f"python{version}"
    installed = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/{name}"))
    candidates = [*map(str, installed), *filter(None, [shutil.which(name)])]
    for candidate in candidates:
        works = subprocess.run([candidate, "--version"], capture_output=True, check=False)
        if works.returncode == 0:
            return candidate
    try:
        _run([uv, "python", "install", version])
    except BuildError as error:
        raise BuildError(
            f"{name} is not installed, and uv cannot download it ({error}); install {name}"
        ) from None
    return version


def _run(command: list[str]) -> None:
    try:
        finished = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} did not end within {BUILD_TIMEOUT_S:.0f} s") from None
    if finished.returncode:
        lines = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
        raise BuildError(lines[0] if lines else f"{command[0]} failed without a message")
