"""The cluster and the custom resource definition of the end-to-end tests."""

from __future__ import annotations

import os
import shutil
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from tools.cluster import binaries, starting
from tools.cluster.handle import ClusterHandle, OwnCluster
from tools.cluster.host import lacks_for_running
from tools.cluster.recovery import API_SERVER, catch_up

from goodput_operator.render.crd import render_crd, render_replay_crd

if TYPE_CHECKING:
    from collections.abc import Iterator


_FIRST_FILES: Final = (
    "test_control_on_cluster.py",
    "test_gated_rollout.py",
    "test_local_control.py",
    "test_other_servers.py",
    # A worker with at most two tests left already gets its next file. These are short, so none of
    # the longer ones below waits behind the files above.
    "test_gateway_route.py",
    "test_missed_deletions.py",
    "test_builds.py",
    "test_aggregate_roles.py",
    "test_disturbances.py",
    "test_service_from_chart.py",
    "test_killed_operator.py",
    "test_two_operators.py",
    "test_real_servers_in_pods.py",
    "test_monitoring_on_cluster.py",
    "test_leader_election.py",
    "test_real_model_in_pods.py",
    "test_trace_replay.py",
    "test_one_manifest.py",
)
"""Files with long tests, in the order of their start."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A worker gets one file after the other. The longest come first, so that no worker begins a
    # long one when the others have ended; the rest are short, and those with many tests come first.
    first = {name: place for place, name in enumerate(_FIRST_FILES)}
    tests_in = Counter(item.path for item in items)
    items.sort(key=lambda item: (first.get(item.path.name, len(first)), -tests_in[item.path]))
    for item in items:
        if isinstance(item, pytest.Function) and "cluster" in item.fixturenames:
            item.add_marker(pytest.mark.cluster)
            # The first test starts the cluster, possibly on a busy machine.
            item.add_marker(pytest.mark.timeout(600))


def _skip_or_fail(reason: str) -> None:
    """Skip the test, or fail it if the environment requires a cluster."""
    if os.environ.get("GOODPUT_REQUIRE_CLUSTER"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterHandle]:
    """The cluster of `GOODPUT_KUBECONFIG`, or else a cluster of our own."""
    given = os.environ.get("GOODPUT_KUBECONFIG")
    if given:
        kubectl = shutil.which("kubectl")
        if kubectl is None and not binaries.is_built():
            _skip_or_fail("kubectl is missing: install it, or build it with make e2e")
        folder = Path(kubectl).parent if kubectl else binaries.folder()
        yield ClusterHandle(kubeconfig=Path(given).resolve(), binaries=folder)
        return
    if lacks := lacks_for_running():
        _skip_or_fail("no cluster can run here: " + "; ".join(lacks))
    if not binaries.is_built():
        _skip_or_fail("the cluster's programs are not built yet: `make e2e` builds and tests them")
    with starting.running(tmp_path_factory.mktemp("cluster"), binaries.folder()) as own:
        yield own


@pytest.fixture(scope="session")
def own_cluster(cluster: ClusterHandle) -> OwnCluster:
    """Our own cluster, for tests that control its processes, nodes or network or read its audit.

    Tests are skipped on any other cluster.
    """
    if not isinstance(cluster, OwnCluster):
        pytest.skip("the test needs control over nodes and processes of the cluster")
    return cluster


@pytest.fixture(autouse=True)
def caught_up(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that restarted the API server, the cluster acts on new objects again."""
    if "cluster" not in request.fixturenames:
        yield
        return
    cluster: ClusterHandle = request.getfixturevalue("cluster")
    if not isinstance(cluster, OwnCluster):
        yield
        return
    before = cluster.starts(API_SERVER)
    yield
    if cluster.starts(API_SERVER) > before:
        catch_up(cluster)


@pytest.fixture(scope="session")
def no_other_operator(cluster: ClusterHandle) -> None:
    """Skip tests that start an operator if another one manages all namespaces."""
    if isinstance(cluster, OwnCluster):
        return
    label = "app.kubernetes.io/name=goodput-operator"
    for found in cluster.get("deployments", "--all-namespaces", "-l", label)["items"]:
        (container,) = found["spec"]["template"]["spec"]["containers"]
        all_namespaces = not any(word.startswith("--namespace=") for word in container["args"])
        if all_namespaces and found["spec"]["replicas"]:
            name = f"{found['metadata']['namespace']}/{found['metadata']['name']}"
            pytest.skip(
                f"the operator {name} of this cluster manages all namespaces, and the test "
                "starts another one; uninstall it first"
            )


@pytest.fixture
def namespace(cluster: ClusterHandle) -> Iterator[str]:
    """A new namespace, deleted after the test."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    # Pods need the service account.
    cluster.wait("create", "serviceaccount/default", "-n", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def crd_created(cluster: ClusterHandle) -> Iterator[bool]:
    """True if this session created the custom resource definitions, which it then deletes."""
    names = ("crd/llmservices.goodput.dev", "crd/tracereplays.goodput.dev")
    created = not cluster.kubectl("get", names[0], "--ignore-not-found")
    if created:
        for definition in (render_crd(), render_replay_crd()):
            cluster.apply(definition, "--server-side")
    for name in names:
        cluster.wait("condition=Established", name)
    yield created
    if created:
        cluster.kubectl("delete", *names, "--wait=false")


@pytest.fixture(scope="session")
def crd(crd_created: bool) -> None:
    """The established custom resource definitions; existing ones are not changed."""
