"""Replicas set by a user or an autoscaler, and a suspended service."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tools.cluster.handle import ClusterError, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.e2e.installation import ChartRelease


def printed_replicas(installation: ChartRelease, name: str) -> str:
    """Return the column REPLICAS of `kubectl get`."""
    head, line = installation.kubectl("get", "llmservice", name).splitlines()
    return line[head.index("REPLICAS") :].split()[0]


def check_replicas(installation: ChartRelease, name: str, replicas: int) -> None:
    installation.wait_settled(name)
    assert len(installation.pods(name, "engine")) == replicas
    status = installation.status(name)
    assert (status["replicas"], status["readyReplicas"]) == (replicas, replicas)
    assert printed_replicas(installation, name) == f"{replicas}/{replicas}"


def update_scale(installation: ChartRelease, path: str, replicas: int) -> bool:
    """Read and replace the subresource; False if the service was changed meanwhile."""
    scale = json.loads(installation.kubectl("get", "--raw", path))
    scale["spec"]["replicas"] = replicas
    try:
        installation.kubectl("replace", "--raw", path, "-f", "-", stdin=json.dumps(scale))
    except ClusterError as error:
        if "(Conflict)" not in str(error):
            raise
        return False
    return True


@pytest.mark.slow
def test_a_service_is_scaled_by_kubectl_and_by_an_autoscaler_and_suspended(
    installation: ChartRelease, serve: Callable[..., None]
) -> None:
    serve("scaled", replicas=1)
    installation.kubectl("scale", "llmservice/scaled", "--replicas=2")
    check_replicas(installation, "scaled", 2)

    # An autoscaler reads and writes the subresource and counts pods by its selector.
    services = f"/apis/goodput.dev/v1alpha1/namespaces/{installation.namespace}/llmservices"
    path = f"{services}/scaled/scale"
    scale = json.loads(installation.kubectl("get", "--raw", path))
    assert scale["status"]["replicas"] == 2
    counted = installation.get("pods", "-l", scale["status"]["selector"])["items"]
    engines = installation.pods("scaled", "engine")
    assert {p["metadata"]["uid"] for p in counted} == {p["metadata"]["uid"] for p in engines}
    wait_for(lambda: update_scale(installation, path, 1), "an update without a conflict")
    check_replicas(installation, "scaled", 1)

    installation.patch("scaled", suspend=True)
    installation.wait("jsonpath={.status.summary.phase}=Suspended", "llmservice/scaled")
    installation.wait("delete", "pods", "-l", "goodput.dev/llmservice=scaled")
    installation.wait("jsonpath={.status.summary.replicas}=0/0", "llmservice/scaled")
    assert printed_replicas(installation, "scaled") == "0/0"
    installation.patch("scaled", suspend=False)
    check_replicas(installation, "scaled", 1)
    assert installation.run_streams("scaled", 2, 10) == ["done", "done"]
