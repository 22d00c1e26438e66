"""A real server of object storage with S3's API: versitygw, built from its Go module.

`python -m tools.s3` builds it once into the cache; its version is declared in `go.mod` only. It
keeps a bucket as a folder and an object as a file, and verifies the signatures of its clients.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.cache import cache_folder
from tools.cluster.binaries import Unbuildable, go_environment
from tools.cluster.host import lacks_for_building

__all__ = ["BUILD", "StorageServer", "build", "program"]

BUILD: Final = "make test-s3"
"""Command that builds the server and runs its tests."""
_MODULE: Final = Path(__file__).parent
_PACKAGE: Final = "github.com/versity/versitygw/cmd/versitygw"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageServer:
    """A server and its only account.

    Args:
        address: host and port.
        folder: parent of its folders, which must exist.
        access_key, secret_key: credentials of the account.
    """

    address: str
    folder: Path
    access_key: str
    secret_key: str

    def bucket(self, name: str) -> Path:
        """Return the folder of a bucket, which is made if necessary."""
        path = self.folder / "buckets" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def uri(self, path: str) -> str:
        """Return the URI of `BUCKET/PATH` as pyarrow reads it."""
        return f"s3://{path}?endpoint_override={self.address}&scheme=http"

    def command(self) -> list[str]:
        """Return the command line of the server; the account is in its environment."""
        metadata = self.folder / "metadata"
        metadata.mkdir(exist_ok=True)
        (self.folder / "buckets").mkdir(exist_ok=True)
        return [
            "env",
            f"ROOT_ACCESS_KEY={self.access_key}",
            f"ROOT_SECRET_KEY={self.secret_key}",
            *(str(program()), "--port", self.address, "--health", "/health"),
            *("posix", "--sidecar", str(metadata), str(self.folder / "buckets")),
        ]


def program() -> Path:
    """Return the path of the program, which need not exist."""
    digest = hashlib.sha256(platform.machine().encode())
    for name in ("go.mod", "go.sum"):
        digest.update((_MODULE / name).read_bytes())
    return cache_folder() / "s3" / digest.hexdigest()[:12] / "versitygw"


def build() -> Path:
    """Build the program unless it is cached, and return its path.

    Raises:
        Unbuildable: no suitable Go, or the compiler or a download failed.
    """
    done = program()
    if done.exists():
        return done
    if lacks := lacks_for_building():
        raise Unbuildable("; ".join(lacks))
    done.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=done.parent) as folder:
        making = Path(folder) / done.name
        ended = subprocess.run(
            ["go", "build", "-trimpath", "-mod=readonly", "-ldflags=-s -w", "-o", making, _PACKAGE],
            cwd=_MODULE,
            env=go_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode != 0:
            raise Unbuildable(f"{_PACKAGE} does not build:\n{ended.stderr.strip()}")
        making.replace(done)
    return done
