"""Let the parts of a cluster catch up after the API server was started again.

A client of the API server that loses its watches tries again after a pause, which doubles with each
failure up to a minute and becomes short again only after two minutes without a failure. After a
restart that takes seconds, Services, endpoints and names can therefore be outdated for more than a
minute: kube-proxy still routes the name service to the address of an ended pod, or the name service
does not know new names. Programs that hold no state of pods are restarted, because a new process
lists at once. A kubelet cannot be restarted without its pods, so it is waited for.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING, Final

import psutil
from tools.cluster.handle import NamespaceHandle, wait_for
from tools.cluster.layout import NODES
from tools.cluster.manifests import pod, python, web

if TYPE_CHECKING:
    from tools.cluster.handle import OwnCluster

__all__ = ["API_SERVER", "catch_up"]

API_SERVER: Final = "kube-apiserver"
_STATELESS: Final = ("kube-controller-manager", "kube-scheduler", "kube-proxy")
_DNS: Final = ("pods", "-l", "k8s-app=kube-dns")
_TIMEOUT_S: Final = 240
"""Two of the longest pauses of a kubelet, and time to start pods on a busy machine."""
_REACH: Final = """
import sys, time, urllib.request
while True:
    try:
        urllib.request.urlopen(sys.argv[1], timeout=5).read()
        break
    except OSError as error:
        print(error, flush=True)
        time.sleep(0.2)
"""


def catch_up(cluster: OwnCluster) -> None:
    """Restart the parts whose watches lag, and wait until all parts act on new objects.

    Args:
        cluster: a cluster whose API server was started again.

    Raises:
        ClusterError: a new pod did not reach a new Service by its name in time.
    """
    cluster.wait_until("get", "--raw", "/readyz")
    ended = cluster.exited()
    for part in _STATELESS:
        if part not in ended:
            cluster.kill(part)
        cluster.start(part)
    _restart_dns(cluster)
    _reach_new_service(cluster)


def _restart_dns(cluster: OwnCluster) -> None:
    """Kill the process of the name service, which its kubelet starts again."""
    system = NamespaceHandle(cluster=cluster, namespace="kube-system")
    [found] = system.get(*_DNS)["items"]
    name = found["metadata"]["name"]
    # After its node was killed, the container may not run yet.
    processes = wait_for(lambda: cluster.processes_of(name), f"{name} runs", _TIMEOUT_S)
    before = _restarts(system, name)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # ended with its parent
            process.kill()
    wait_for(lambda: _restarts(system, name) > before, f"{name} restarts", _TIMEOUT_S)
    system.wait("condition=Ready", f"pod/{name}")


def _restarts(system: NamespaceHandle, name: str) -> int:
    statuses = system.get("pod", name)["status"].get("containerStatuses", ())
    return sum(status["restartCount"] for status in statuses)


def _reach_new_service(cluster: OwnCluster) -> None:
    """Wait until a new pod on each node reaches a new Service by its name.

    This needs all parts: a service account of the new namespace, scheduled and started pods,
    endpoints, routes to them, and the name service.
    """
    name = f"catch-up-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    new = NamespaceHandle(cluster=cluster, namespace=name)
    try:
        new.wait("create", "serviceaccount/default", timeout_s=_TIMEOUT_S)
        clients = [
            pod(
                f"client-{node.name}",
                python(_REACH, args=[f"http://web.{name}.svc.cluster.local/hello"]),
                nodeSelector={"kubernetes.io/hostname": node.name},
            )
            for node in NODES
        ]
        cluster.apply([*web("web"), *clients], "-n", name)
        for client in clients:
            done = f"pod/{client['metadata']['name']}"
            new.wait("jsonpath={.status.phase}=Succeeded", done, timeout_s=_TIMEOUT_S)
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")
