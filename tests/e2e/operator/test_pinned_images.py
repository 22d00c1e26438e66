"""A tag that moves in a real registry reaches only the next revision."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tools.cluster.handle import wait_for
from tools.cluster.images import checkout_image
from tools.cluster.layout import API_ADDRESS
from tools.cluster.starting import ROOT
from tools.e2e.installation import ChartRelease
from tools.e2e.registry import registry_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.cluster.handle import OwnCluster

ADDRESS = f"{API_ADDRESS}:5000"
REPOSITORY = "team/engine"
TAG = f"{ADDRESS}/{REPOSITORY}:1"


@dataclass(frozen=True, kw_only=True)
class ClusterRegistry:
    """A registry in the network of the cluster.

    Args:
        installation: the operator that resolves tags of the registry.
        folder: the registry's folder, which outlives its processes.
    """

    installation: ChartRelease
    folder: Path

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the registry during the block."""
        command = self.installation.own.inside(*registry_command(self.folder, ADDRESS))
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            retries = ("--retry", "60", "--retry-delay", "1", "--retry-all-errors")
            self.installation.run_inside("curl", "-sf", *retries, f"http://{ADDRESS}/v2/")
            yield
        finally:
            process.terminate()
            process.wait(timeout=30)

    def push(self, content: str) -> str:
        """Move the tag to another image, and return its name with the digest.

        The nodes take the image from their catalogue, because they have no registry client.
        """
        module = (sys.executable, "-m", "tools.e2e.registry", "push")
        arguments = (f"http://{ADDRESS}", REPOSITORY, "1", content)
        digest = self.installation.run_inside(*module, *arguments).strip()
        image = f"{ADDRESS}/{REPOSITORY}@{digest}"
        self.installation.own.publish({image: checkout_image(ROOT)})
        return image


@pytest.fixture
def registry(
    installation: ChartRelease, own_cluster: OwnCluster, tmp_path: Path
) -> ClusterRegistry:
    """A registry without a process."""
    assert own_cluster is installation.cluster
    return ClusterRegistry(installation=installation, folder=tmp_path)


def images(installation: ChartRelease) -> set[str]:
    """Return the images of the service's engines."""
    pods = installation.pods("pinned", "engine")
    return {pod["spec"]["containers"][0]["image"] for pod in pods}


@pytest.mark.slow
def test_a_revision_keeps_the_image_that_its_tag_had(
    installation: ChartRelease, registry: ClusterRegistry, apply_service: Callable[..., None]
) -> None:
    with registry.running():
        first = registry.push("first")
        apply_service("pinned", engine={"policy": "sarathi", "image": TAG}, replicas=1)
        installation.wait_settled("pinned")
        assert images(installation) == {first}
        second = registry.push("second")
        [old] = installation.pods("pinned", "engine")
        installation.kill_pod(old["metadata"]["name"])
        installation.wait("delete", f"pod/{old['metadata']['name']}")
        installation.wait_settled("pinned")
        assert images(installation) == {first}, "a later pod of the revision"
    stable = installation.status("pinned")["currentRevision"]
    installation.patch("pinned", engine={"policy": "orca"})
    wait_for(
        lambda: installation.condition("pinned", "Reconciling")[0] == "Retrying",
        "the registry does not respond",
    )
    message = installation.condition("pinned", "Reconciling")[1]
    assert f"waits for the digest of {TAG}" in message
    assert images(installation) == {first}
    assert installation.status("pinned")["updateRevision"] == stable
    with registry.running():
        wait_for(
            lambda: installation.status("pinned")["currentRevision"] != stable, "the rollout ends"
        )
        installation.wait_settled("pinned")
        assert images(installation) == {second}
    installation.patch("pinned", engine={"policy": "sarathi"})
    wait_for(
        lambda: installation.status("pinned")["currentRevision"] == stable,
        "the earlier revision serves again, without the registry",
    )
    installation.wait_settled("pinned")
    assert images(installation) == {first}
