"""Definitions of other projects' custom resources, from their Go modules."""

from __future__ import annotations

import json
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tools.cluster.binaries import go_environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tools.cluster.handle import ClusterHandle

__all__ = ["DefinitionsMissing", "defined", "module_folder"]

_TIMEOUT_S = 120


class DefinitionsMissing(Exception):
    """A module cannot be downloaded; the text has the reason and the remedy."""


def module_folder(module: str) -> Path:
    """Return the folder of a Go module, which is downloaded once into the project's cache.

    Args:
        module: its path and version, as `go mod download` takes them.

    Raises:
        DefinitionsMissing: Go is missing, or the download failed.
    """
    try:
        downloaded = subprocess.run(
            ["go", "mod", "download", "-json", module],
            env=go_environment(),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
            cwd="/",  # outside of any module
        )
    except FileNotFoundError:
        text = "Go is missing; install it with `apt-get install golang-go`"
        raise DefinitionsMissing(text) from None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        text = f"{module} cannot be downloaded; try `go mod download {module}`"
        raise DefinitionsMissing(text) from None
    return Path(json.loads(downloaded.stdout)["Dir"])


@contextmanager
def defined(cluster: ClusterHandle, files: Iterable[Path]) -> Iterator[None]:
    """Create custom resource definitions, wait until they are established, and delete them."""
    words = [word for file in files for word in ("-f", str(file))]
    cluster.kubectl("apply", "--server-side", *words)
    try:
        cluster.kubectl("wait", "--for=condition=Established", *words)
        yield
    finally:
        cluster.kubectl("delete", *words, "--wait=false")
