"""Behaviour of the kubelets towards the API server."""

from __future__ import annotations

import json
import subprocess
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from tools.cluster.layout import NODES
from tools.cluster.manifests import pod, shell

if TYPE_CHECKING:
    from tools.cluster.handle import OwnCluster

MARK = "goodput.test/mark"


def test_a_kubelet_may_change_its_own_node_and_no_other(own_cluster: OwnCluster) -> None:
    def annotate(name: str) -> subprocess.CompletedProcess[str]:
        """Annotate a node with the credentials of node-1's kubelet."""
        node = own_cluster.get("node", name)
        del node["metadata"]["resourceVersion"]  # its own kubelet may update it meanwhile
        node["metadata"].setdefault("annotations", {})[MARK] = "set"
        # Not a patch: kubectl would read the object first, which is already forbidden.
        words = ("replace", "--raw", f"/api/v1/nodes/{name}", "-f", "-")
        credentials = f"--kubeconfig={own_cluster.layout.kubeconfig('node-1')}"
        command = own_cluster.inside(str(own_cluster.binaries / "kubectl"), credentials, *words)
        return subprocess.run(
            command, input=json.dumps(node), capture_output=True, text=True, check=False
        )

    own, other = annotate("node-1"), annotate("node-2")
    assert own.returncode == 0, own.stderr
    assert 'node "node-1" is not allowed to modify node "node-2"' in other.stderr
    assert MARK not in own_cluster.get("node", "node-2")["metadata"].get("annotations", {})


def test_every_node_renews_its_lease(own_cluster: OwnCluster) -> None:
    renewed = set[str]()
    with subprocess.Popen(
        [
            *(own_cluster.binaries / "kubectl", "get", "leases", "-n", "kube-node-lease"),
            *("--watch", "--request-timeout=60s", "-o"),
            r'jsonpath={.metadata.name} {.metadata.creationTimestamp} {.spec.renewTime}{"\n"}',
        ],
        env=own_cluster.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as watch:
        assert watch.stdout is not None
        for line in watch.stdout:
            name, *times = line.split()
            created, renewed_at = map(datetime.fromisoformat, times)
            if renewed_at - created > timedelta(seconds=5):  # not the creation itself
                renewed.add(name)
            if renewed == {node.name for node in NODES}:
                break
        watch.terminate()
    assert renewed == {node.name for node in NODES}


@pytest.mark.timeout(400)
def test_a_pod_that_exceeds_its_volumes_size_limit_is_evicted(
    own_cluster: OwnCluster, namespace: str
) -> None:
    volumes = [{"name": "small", "emptyDir": {"sizeLimit": "1Mi"}}]
    mounts = [{"name": "small", "mountPath": "/small"}]
    for name, size in {"growing": "4M", "small": "512K"}.items():
        script = f"head -c {size} /dev/zero > /small/file; sleep 1000"
        own_cluster.apply(
            pod(name, shell(script, volumeMounts=mounts), volumes=volumes), "-n", namespace
        )
    running = "jsonpath={.status.phase}=Running"
    own_cluster.wait(running, "pod/small", "-n", namespace, timeout_s=120)
    # The kubelet measures volumes once a minute and evicts every ten seconds.
    evicted = "jsonpath={.status.reason}=Evicted"
    own_cluster.wait(evicted, "pod/growing", "-n", namespace, timeout_s=200)
    growing, small = (
        own_cluster.get("pod", name, "-n", namespace)["status"] for name in ("growing", "small")
    )
    assert growing["phase"] == "Failed"
    assert 'EmptyDir volume "small" exceeds the limit "1Mi"' in growing["message"]
    assert small["phase"] == "Running"
