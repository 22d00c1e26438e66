"""Images of the cluster: names that stand for folders of this machine.

A container sees these folders, at the paths that they have here, and /usr; nothing else of the
machine's disk. So an image for our own commands is a virtual environment and a checkout.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

__all__ = ["PYTHON", "SHELL", "Image", "checkout_image", "publish", "python_image", "shell_image"]

SHELL = "goodput.test/shell:1"
PYTHON = "goodput.test/python:1"
_ANY_USER = 65532


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Folders, and how to start what lies in them.

    `path` goes before the usual PATH; `user` is what the image's USER line would say, and a
    user other than 0 gets no capabilities.
    """

    folders: list[str] = field(default_factory=list)
    path: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    user: int = _ANY_USER


def shell_image() -> Image:
    """This machine's /usr and a shell."""
    return Image(entrypoint=["/bin/sh"])


def python_image() -> Image:
    """The virtual environment that runs the tests, and the Python below it."""
    folders = dict.fromkeys([sys.base_prefix, sys.prefix])
    return Image(
        folders=[f for f in folders if not f.startswith("/usr/")],
        path=[str(Path(sys.prefix) / "bin")],
        env={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"},
        entrypoint=["python"],
    )


def checkout_image(root: Path, *command: str) -> Image:
    """Our commands, from the sources of a checkout, started as the Dockerfiles' images are."""
    python = python_image()
    packages = [str(root / name) for name in ("core", "traces", "engine", "replay", "operator")]
    return Image(
        folders=[*python.folders, *packages],
        path=python.path,
        # It wins over an installation of another checkout.
        env={**python.env, "PYTHONPATH": ":".join(packages)},
        entrypoint=["goodput"],
        command=list(command),
    )


def publish(catalogue: Path, images: dict[str, Image]) -> None:
    """Add images to a cluster's catalogue, or replace them; the nodes read it at each pull."""
    known = json.loads(catalogue.read_text()) if catalogue.exists() else {}
    known |= {name: asdict(image) for name, image in images.items()}
    beside = catalogue.with_suffix(".new")
    beside.write_text(json.dumps(known, indent=1))
    beside.replace(catalogue)
