"""Disturbances of the cluster: stopped parts, drained nodes, and its end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tools.cluster import starting
from tools.cluster.handle import ClusterError
from tools.cluster.images import SHELL, shell_image
from tools.cluster.manifests import container, pod, python, shell, web
from tools.cluster.recovery import catch_up

if TYPE_CHECKING:
    from pathlib import Path

    from tools.cluster.handle import OwnCluster


def test_the_pods_of_a_drained_node_move_to_the_other(
    own_cluster: OwnCluster, namespace: str
) -> None:
    own_cluster.apply(web("web", replicas=4), "-n", namespace)
    own_cluster.wait("jsonpath={.status.readyReplicas}=4", "deployment/web", "-n", namespace)
    try:
        own_cluster.kubectl("drain", "node-1", "--pod-selector=app=web", "--timeout=100s")
        own_cluster.wait("jsonpath={.status.readyReplicas}=4", "deployment/web", "-n", namespace)
        pods = own_cluster.get("pods", "-n", namespace)["items"]
        remaining = [p for p in pods if "deletionTimestamp" not in p["metadata"]]
        assert {p["spec"]["nodeName"] for p in remaining} == {"node-2"}
    finally:
        own_cluster.kubectl("uncordon", "node-1")


def test_a_killed_node_ends_its_pods_and_restarts_them_when_it_returns(
    own_cluster: OwnCluster, namespace: str
) -> None:
    process_name = f"power-{namespace}"
    main = container(SHELL, "bash", "-c", f"exec -a {process_name} sleep 1000")
    powered = pod("powered", main, restartPolicy="Always", nodeName="node-2")
    own_cluster.apply(powered, "-n", namespace)
    own_cluster.wait("condition=Ready", "pod/powered", "-n", namespace)
    assert len(processes_called(process_name)) == 1
    own_cluster.kill("node-2")
    try:
        wait_until_ended(time.monotonic() + 10, process_name)
    finally:
        own_cluster.start("node-2")
    restarted = "jsonpath={.status.containerStatuses[0].restartCount}=1"
    own_cluster.wait(restarted, "pod/powered", "-n", namespace)
    own_cluster.wait("condition=Ready", "nodes", "--all")


def test_pods_survive_a_restart_of_the_api_server(own_cluster: OwnCluster, namespace: str) -> None:
    own_cluster.apply(web("web"), "-n", namespace)
    own_cluster.wait("condition=Available", "deployment/web", "-n", namespace)
    before = own_cluster.get("pods", "-n", namespace)["items"][0]["metadata"]["uid"]
    own_cluster.stop("kube-apiserver")
    try:
        ended = {"kube-apiserver": 0}
        assert own_cluster.exited() == ended, "it exited with code 0, and no other part"
        with pytest.raises(ClusterError):
            own_cluster.kubectl("get", "pods", "-n", namespace)
    finally:
        own_cluster.start("kube-apiserver")
        own_cluster.wait_until("get", "--raw", "/readyz")
    after = own_cluster.get("pods", "-n", namespace)["items"][0]
    status = after["status"]["containerStatuses"][0]
    assert (after["metadata"]["uid"], status["restartCount"]) == (before, 0)


def test_a_cluster_that_caught_up_resolves_new_names_after_restarts_of_its_api_server(
    own_cluster: OwnCluster, namespace: str
) -> None:
    def dns() -> dict[str, Any]:
        pods = own_cluster.get("pods", "-n", "kube-system", "-l", "k8s-app=kube-dns")["items"]
        found: dict[str, Any] = pods[0]
        return found

    # The pod of the name service may get another address. After a second restart within two
    # minutes, watches resume only after a minute or more.
    node = dns()["spec"]["nodeName"]
    own_cluster.kill(node)
    own_cluster.start(node)
    for _ in range(2):
        own_cluster.kill("kube-apiserver")
        own_cluster.start("kube-apiserver")
        own_cluster.wait_until("get", "--raw", "/readyz")
    lagging = ("kube-controller-manager", "kube-scheduler", "kube-proxy")
    starts = {part: own_cluster.starts(part) for part in lagging}
    pods = {node: own_cluster.starts(node) for node in ("node-1", "node-2")}
    catch_up(own_cluster)
    assert {part: own_cluster.starts(part) - 1 for part in lagging} == starts
    assert {node: own_cluster.starts(node) for node in pods} == pods, "pods keep running"
    [container] = dns()["status"]["containerStatuses"]
    assert (container["ready"], container["restartCount"] >= 2) == (True, True)
    own_cluster.apply(web("web"), "-n", namespace)
    own_cluster.wait("condition=Available", "deployment/web", "-n", namespace)
    script = "import socket, sys; print(socket.getaddrinfo(sys.argv[1], 80)[0][4][0])"
    once = pod("once", python(script, args=[f"web.{namespace}.svc.cluster.local"]))
    own_cluster.apply(once, "-n", namespace)
    ended = "jsonpath={.status.containerStatuses[0].state.terminated}"
    own_cluster.wait(ended, "pod/once", "-n", namespace)
    address = own_cluster.get("service", "web", "-n", namespace)["spec"]["clusterIP"]
    assert own_cluster.kubectl("logs", "once", "-n", namespace).strip() == address


def test_an_image_can_be_published_while_the_cluster_runs(
    own_cluster: OwnCluster, namespace: str
) -> None:
    late = pod("late", shell("true") | {"image": "example.test/late:1"})
    own_cluster.apply(late, "-n", namespace)
    waiting = "jsonpath={.status.containerStatuses[0].state.waiting.message}"
    own_cluster.wait(waiting, "pod/late", "-n", namespace)
    own_cluster.publish({"example.test/late:1": shell_image()})
    own_cluster.wait("jsonpath={.status.phase}=Succeeded", "pod/late", "-n", namespace)


def test_the_audit_log_has_every_request_with_its_user(
    own_cluster: OwnCluster, namespace: str
) -> None:
    own_cluster.kubectl("create", "configmap", "watched", "-n", namespace)
    requests = {
        (line["user"]["username"], line["verb"], line["objectRef"]["resource"])
        for line in own_cluster.audit()
        if line.get("objectRef", {}).get("namespace") == namespace
    }
    assert ("admin", "create", "configmaps") in requests
    assert not any(user.startswith("system:node:") for user, _, _ in requests)


def test_a_part_that_does_not_exist_is_named(own_cluster: OwnCluster) -> None:
    with pytest.raises(ClusterError, match="no part 'node-9'; there are etcd, kube-apiserver"):
        own_cluster.kill("node-9")


START = """
import sys, time
from pathlib import Path
from tools.cluster import binaries
from tools.cluster import starting
from tools.cluster.manifests import pod, shell
state = Path(sys.argv[1])
cluster = starting.start(state, binaries.folder())
cluster.apply(pod("pod", shell("sleep 1000")))
cluster.wait("condition=Ready", "pod/pod")
print("up", flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["stopped", "starter killed"])
def test_an_ended_cluster_leaves_no_process(
    end: str, own_cluster: OwnCluster, tmp_path: Path
) -> None:
    root = starting.ROOT
    with subprocess.Popen(
        [sys.executable, "-c", START, tmp_path], cwd=root, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "up\n"
        other = starting.attach(tmp_path)
        assert other is not None
        below = [psutil.Process(other.pid), *psutil.Process(other.pid).children(recursive=True)]
        names = {process.name() for process in below}
        assert {"etcd", "kube-apiserver", "kubelet", "sleep"} <= names
        if end == "stopped":
            starting.stop(other)
        starter.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(below, timeout=20)
    assert alive == []
    assert own_cluster.exited() == {}, "another cluster still runs"


def processes_called(name: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if name in " ".join(cmdline_of(p))]


def cmdline_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def wait_until_ended(deadline: float, name: str) -> None:
    _, alive = psutil.wait_procs(processes_called(name), timeout=deadline - time.monotonic())
    assert alive == []
