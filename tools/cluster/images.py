"""Images of the cluster: names that stand for folders of this machine.

A container has these folders at the same paths, and /usr, and no other part of the file system. The
image of our own commands consists of a virtual environment and a checkout.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = [
    "EMULATED_VLLM",
    "PYTHON",
    "SHELL",
    "Image",
    "checkout_image",
    "emulated_vllm_image",
    "kubectl_image",
    "publish",
    "python_image",
    "shell_image",
]

SHELL = "goodput.test/shell:1"
PYTHON = "goodput.test/python:1"
EMULATED_VLLM = "goodput.test/emulated-vllm:0.33.0"
_ANY_USER = 65532


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Folders and a command.

    Args:
        folders: folders of the container.
        path: entries before the usual PATH.
        env: environment variables.
        entrypoint, command: as in an image.
        user: numeric user, as in the USER line of a Dockerfile; only user 0 gets capabilities.
    """

    folders: list[str] = field(default_factory=list)
    path: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    user: int = _ANY_USER


def shell_image() -> Image:
    """Return an image with this machine's /usr and a shell."""
    return Image(entrypoint=["/bin/sh"])


def python_image() -> Image:
    """Return an image with the virtual environment of the tests and its base Python."""
    folders = dict.fromkeys([sys.base_prefix, sys.prefix])
    return Image(
        folders=[f for f in folders if not f.startswith("/usr/")],
        path=[str(Path(sys.prefix) / "bin")],
        env={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"},
        entrypoint=["python"],
    )


def emulated_vllm_image(root: Path) -> Image:
    """Return an image with the program `vllm` of `tools/e2e/emulated_vllm.py` in a checkout."""
    python = python_image()
    tools = root / "tools" / "e2e"
    return Image(
        folders=[*python.folders, str(tools)],
        path=[str(tools / "bin"), *python.path],
        env=python.env,
    )


def kubectl_image(binaries: Path) -> Image:
    """Return an image with the kubectl of a cluster's programs, as registry.k8s.io/kubectl.

    Args:
        binaries: folder of the programs.
    """
    return Image(folders=[str(binaries)], path=[str(binaries)], entrypoint=["kubectl"])


def checkout_image(root: Path, *command: str, packages: Path | None = None) -> Image:
    """Return an image of our commands from a checkout, with the entry point of the Dockerfiles.

    Args:
        root: the checkout.
        command: the default command.
        packages: folder of further Python packages, such as torch; None for none.
    """
    python = python_image()
    folders = [str(root / name) for name in ("core", "traces", "engine", "replay", "operator")]
    folders += [] if packages is None else [str(packages)]
    return Image(
        folders=[*python.folders, *folders],
        path=python.path,
        # It overrides an installation of another checkout.
        env={**python.env, "PYTHONPATH": ":".join(folders)},
        entrypoint=["goodput"],
        command=list(command),
    )


def publish(catalogue: Path, images: dict[str, Image]) -> None:
    """Add images to a cluster's catalogue, or replace them; nodes read it for each pull."""
    known = json.loads(catalogue.read_text()) if catalogue.exists() else {}
    known |= {name: asdict(image) for name, image in images.items()}
    new = catalogue.with_suffix(".new")
    new.write_text(json.dumps(known, indent=1))
    new.replace(catalogue)
