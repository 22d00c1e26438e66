"""A claim of a test's namespace to a folder of this machine."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.e2e.installation import ChartRelease

__all__ = ["claim_to"]


@contextmanager
def claim_to(
    folder: Path, installation: ChartRelease, name: str, *, read_only: bool = False
) -> Iterator[str]:
    """Create a claim and its volume in the cluster, and delete both after the block.

    Args:
        folder: content of the volume.
        installation: installation whose namespace gets the claim.
        name: name of the claim, unique among all tests.
        read_only: True for the access mode ReadOnlyMany.
    """
    volume = f"{name}-{installation.namespace}"
    mode = "ReadOnlyMany" if read_only else "ReadWriteMany"
    shared: dict[str, Any] = {"accessModes": [mode], "storageClassName": ""}
    size = {"storage": "1Gi"}
    host_path = {"path": str(folder), "type": "Directory"}
    spec = {**shared, "volumeName": volume, "resources": {"requests": size}}
    metadata = {"name": name, "namespace": installation.namespace}
    installation.cluster.apply(
        [
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": volume},
                "spec": {**shared, "capacity": size, "hostPath": host_path},
            },
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": metadata,
                "spec": spec,
            },
        ]
    )
    yield name
    installation.kubectl("delete", f"pvc/{name}", "--wait=false")
    installation.cluster.kubectl("delete", f"pv/{volume}", "--wait=false")
