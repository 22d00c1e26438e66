"""The API server accepts every child object of a service, with all options and with none.

The children are those of the golden files, sent as dry runs. A namespace that enforces the level
`restricted` checks only pods, so each pod template is also sent as a pod.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tools.cluster.handle import ClusterError
from tools.e2e.installation import RESTRICTED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.cluster.handle import ClusterHandle

GOLDEN = Path(__file__).resolve().parents[2] / "operator" / "golden"
DRY_RUN = ("--server-side", "--dry-run=server", "--validate=strict", "--warnings-as-errors")
CHILDREN = {
    path.stem.removeprefix("resources-"): list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for path in sorted(GOLDEN.glob("resources-*.yaml"))
}


@pytest.fixture
def restricted(cluster: ClusterHandle, namespace: str) -> Iterator[str]:
    """A hardened namespace with the objects that pods refer to and no service creates.

    The priority class and the runtime class have the namespace's name.
    """
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


def in_namespace(child: dict[str, Any], namespace: str) -> dict[str, Any]:
    """Return a copy of a child in this namespace."""
    body = copy.deepcopy(child)
    body["metadata"]["namespace"] = namespace
    return body


def pod_of(deployment: dict[str, Any], namespace: str) -> dict[str, Any]:
    """Return the pod that a Deployment's controllers would create."""
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
def test_the_api_server_accepts_every_child_and_admits_its_pods_to_a_hardened_namespace(
    cluster: ClusterHandle, restricted: str, name: str
) -> None:
    children = [in_namespace(child, restricted) for child in CHILDREN[name]]
    pods = [pod_of(child, restricted) for child in children if child["kind"] == "Deployment"]
    assert len(pods) == 2, "engines and routers"
    output = cluster.apply([*children, *pods], *DRY_RUN)
    assert len(output.splitlines()) == len(children) + len(pods)


def test_the_api_server_rejects_an_unhardened_pod_and_an_unknown_field(
    cluster: ClusterHandle, restricted: str
) -> None:
    deployment = next(one for one in CHILDREN["gpu"] if one["kind"] == "Deployment")
    pod = pod_of(deployment, restricted)
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(ClusterError, match="violates PodSecurity"):
        cluster.apply(pod, *DRY_RUN)
    child = in_namespace(deployment, restricted)
    child["spec"]["template"]["spec"]["unknown"] = 1
    with pytest.raises(ClusterError, match="unknown"):
        cluster.apply(child, *DRY_RUN)
