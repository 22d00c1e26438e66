"""The cluster that end-to-end tests share, and what they do on a machine that cannot run one."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tools.cluster import binaries, starting
from tools.cluster.handle import Cluster, OwnCluster
from tools.cluster.host import lacks_for_running

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and "cluster" in item.fixturenames:
            item.add_marker(pytest.mark.cluster)
            # The first one starts the cluster, and the machine may be busy with others.
            item.add_marker(pytest.mark.timeout(300))


def _unavailable(reason: str) -> None:
    """Skip loudly, or fail where a cluster was promised."""
    if os.environ.get("GOODPUT_REQUIRE_CLUSTER"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster: the one whose kubeconfig was given, else one of our own."""
    given = os.environ.get("GOODPUT_KUBECONFIG")
    if given:
        kubectl = shutil.which("kubectl")
        if kubectl is None and not binaries.is_built():
            _unavailable("kubectl is missing: install it, or build it with make e2e")
        folder = Path(kubectl).parent if kubectl else binaries.folder()
        yield Cluster(kubeconfig=Path(given).resolve(), binaries=folder)
        return
    if lacks := lacks_for_running():
        _unavailable("no cluster can run here: " + "; ".join(lacks))
    if not binaries.is_built():
        _unavailable("the cluster's programs are not built yet: `make e2e` builds and tests them")
    with starting.running(tmp_path_factory.mktemp("cluster"), binaries.folder()) as own:
        yield own


@pytest.fixture(scope="session")
def own_cluster(cluster: Cluster) -> OwnCluster:
    """The same, for tests that need control over its processes, nodes, network or audit log."""
    if not isinstance(cluster, OwnCluster):
        pytest.skip("needs control over nodes, which is taken of no given cluster")
    return cluster


@pytest.fixture(scope="session")
def unattended(cluster: Cluster) -> None:
    """Nobody else looks after services: for tests that bring an operator."""
    if isinstance(cluster, OwnCluster):
        return
    label = "app.kubernetes.io/name=goodput-operator"
    for found in cluster.get("deployments", "--all-namespaces", "-l", label)["items"]:
        (container,) = found["spec"]["template"]["spec"]["containers"]
        everywhere = not any(word.startswith("--namespace=") for word in container["args"])
        if everywhere and found["spec"]["replicas"]:
            where = f"{found['metadata']['namespace']}/{found['metadata']['name']}"
            pytest.skip(
                f"the operator {where} of the given cluster looks after every namespace, and "
                "this test brings one; uninstall it for the while"
            )


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own, deleted with all that is in it."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    # No pod can be created before its service account.
    cluster.wait("create", "serviceaccount/default", "-n", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
