"""Replicas that somebody asks for: by kubectl, by an autoscaler, or none at all for a while."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.operator.installed import Installed


def shown(installed: Installed, name: str) -> str:
    """What `kubectl get` has under REPLICAS."""
    head, line = installed.kubectl("get", "llmservice", name).splitlines()
    return line[head.index("REPLICAS") :].split()[0]


def has_scaled(installed: Installed, name: str, replicas: int) -> None:
    installed.settled(name)
    assert len(installed.pods(name, "engine")) == replicas
    status = installed.status(name)
    assert (status["replicas"], status["readyReplicas"]) == (replicas, replicas)
    assert shown(installed, name) == f"{replicas}/{replicas}"


@pytest.mark.slow
def test_a_service_has_as_many_engines_as_somebody_asks_for(
    installed: Installed, serve: Callable[..., None]
) -> None:
    serve("scaled", replicas=1)
    installed.kubectl("scale", "llmservice/scaled", "--replicas=2")
    has_scaled(installed, "scaled", 2)

    # As an autoscaler does: it reads and writes the subresource, and counts pods by its selector.
    services = f"/apis/goodput.dev/v1alpha1/namespaces/{installed.namespace}/llmservices"
    path = f"{services}/scaled/scale"
    scale = json.loads(installed.kubectl("get", "--raw", path))
    assert scale["status"]["replicas"] == 2
    counted = installed.get("pods", "-l", scale["status"]["selector"])["items"]
    engines = installed.pods("scaled", "engine")
    assert {p["metadata"]["uid"] for p in counted} == {p["metadata"]["uid"] for p in engines}
    scale["spec"]["replicas"] = 1
    installed.kubectl("replace", "--raw", path, "-f", "-", stdin=json.dumps(scale))
    has_scaled(installed, "scaled", 1)

    suspend = ("patch", "llmservice/scaled", "--type=merge", "-p")
    installed.kubectl(*suspend, '{"spec": {"suspend": true}}')
    installed.wait("jsonpath={.status.summary.phase}=Suspended", "llmservice/scaled")
    installed.wait("delete", "pods", "-l", "goodput.dev/llmservice=scaled")
    installed.wait("jsonpath={.status.summary.replicas}=0/0", "llmservice/scaled")
    assert shown(installed, "scaled") == "0/0"
    installed.kubectl(*suspend, '{"spec": {"suspend": false}}')
    has_scaled(installed, "scaled", 1)
    assert installed.answering("scaled", 2, 10).ends() == ["done", "done"]
