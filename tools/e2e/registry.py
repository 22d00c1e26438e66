"""A real image registry (Debian's docker-registry), and images with one layer to push to it.

    python -m tools.e2e.registry push URL REPOSITORY TAG CONTENT

pushes an image and prints its digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sys
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import pytest
from yarl import URL

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MANIFEST", "push_image", "registry_command"]

_MEDIA: Final = "application/vnd.oci.image"
MANIFEST: Final = f"{_MEDIA}.manifest.v1+json"


def registry_command(folder: Path, address: str) -> list[str]:
    """Return the command line of a registry; skip the test if the program is missing.

    Args:
        folder: folder for its configuration and its images.
        address: host and port.
    """
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("NOT RUN: docker-registry is missing; apt-get install docker-registry")
    configuration = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(folder)}},
        "http": {"addr": address},
    }
    path = folder / "config.yml"
    path.write_text(json.dumps(configuration), encoding="utf-8")
    return [program, "serve", str(path)]


async def push_image(url: URL, repository: str, tag: str, content: bytes) -> str:
    """Push an image with one layer, and return its digest.

    Args:
        url: URL of the registry.
        repository, tag: name of the image.
        content: content of the layer.
    """
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        for blob in (b"{}", content):
            begun = await session.post(url / f"v2/{repository}/blobs/uploads/")
            place = url.join(URL(begun.headers["Location"]))
            digest = _descriptor("", blob)["digest"]
            await session.put(place.update_query(digest=digest), data=blob)
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": _descriptor("config.v1+json", b"{}"),
            "layers": [_descriptor("layer.v1.tar", content)],
        }
        stored = await session.put(
            url / f"v2/{repository}/manifests/{tag}",
            data=json.dumps(manifest).encode(),
            headers={"Content-Type": MANIFEST},
        )
        return stored.headers["Docker-Content-Digest"]


def _descriptor(kind: str, blob: bytes) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
    return {"mediaType": f"{_MEDIA}.{kind}", "digest": digest, "size": len(blob)}


if __name__ == "__main__":
    _, url, repository, tag, content = sys.argv[1:]
    print(asyncio.run(push_image(URL(url), repository, tag, content.encode())))
