"""The API server takes every child of a service that asks for all there is, or for nothing.

The children are those of the golden files, and nothing of them is kept. A namespace that enforces
the level `restricted` judges pods alone, so each pod template is sent as a pod, too.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.e2e.operator.installed import RESTRICTED
from tools.cluster.handle import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.cluster.handle import Cluster

GOLDEN = Path(__file__).resolve().parents[2] / "operator" / "golden"
DRY_RUN = ("--server-side", "--dry-run=server", "--validate=strict", "--warnings-as-errors")
CHILDREN = {
    path.stem.removeprefix("resources-"): list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for path in sorted(GOLDEN.glob("resources-*.yaml"))
}


@pytest.fixture
def restricted(cluster: Cluster, namespace: str) -> Iterator[str]:
    """A namespace with what pods name and no service brings; their two classes have its name."""
    cluster.kubectl("label", "namespace", namespace, RESTRICTED)
    scheduling = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1}
    node = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "any"}
    account = {"apiVersion": "v1", "kind": "ServiceAccount"}
    cluster.apply(
        [
            {**account, "metadata": {"name": "chat-router", "namespace": namespace}},
            *({**one, "metadata": {"name": namespace}} for one in (scheduling, node)),
        ]
    )
    yield namespace
    cluster.kubectl("delete", f"priorityclass/{namespace}", f"runtimeclass/{namespace}")


def here(child: dict[str, Any], namespace: str) -> dict[str, Any]:
    """A child, in this namespace."""
    body = copy.deepcopy(child)
    body["metadata"]["namespace"] = namespace
    return body


def pod_of(deployment: dict[str, Any], namespace: str) -> dict[str, Any]:
    """The pod that a Deployment's controllers would make."""
    template = copy.deepcopy(deployment["spec"]["template"])
    for name in {"priorityClassName", "runtimeClassName"} & set(template["spec"]):
        template["spec"][name] = namespace
    metadata = {
        **template["metadata"],
        "name": deployment["metadata"]["name"],
        "namespace": namespace,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


@pytest.mark.parametrize("name", CHILDREN)
def test_the_api_server_takes_every_child_and_admits_its_pods_where_only_hardened_ones_are(
    cluster: Cluster, restricted: str, name: str
) -> None:
    children = [here(child, restricted) for child in CHILDREN[name]]
    pods = [pod_of(child, restricted) for child in children if child["kind"] == "Deployment"]
    assert len(pods) == 2, "engines and routers"
    said = cluster.apply([*children, *pods], *DRY_RUN)
    assert len(said.splitlines()) == len(children) + len(pods)


def test_what_the_api_server_must_refuse_it_refuses(cluster: Cluster, restricted: str) -> None:
    deployment = next(one for one in CHILDREN["gpu"] if one["kind"] == "Deployment")
    pod = pod_of(deployment, restricted)
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(ClusterError, match="violates PodSecurity"):
        cluster.apply(pod, *DRY_RUN)
    child = here(deployment, restricted)
    child["spec"]["template"]["spec"]["unknown"] = 1
    with pytest.raises(ClusterError, match="unknown"):
        cluster.apply(child, *DRY_RUN)
