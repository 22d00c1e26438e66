"""Behaviour of the cluster that the other end-to-end tests rely on."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest
from tools.cluster.handle import ClusterError, NamespaceHandle
from tools.cluster.layout import NODES
from tools.cluster.manifests import pod, python, shell, template_of, web
from tools.e2e.clients import PortForward

if TYPE_CHECKING:
    from tools.cluster.handle import OwnCluster

ENDED = "jsonpath={.status.containerStatuses[0].state.terminated}"

PROBE_SANDBOX = """
import json, os, pathlib

def writes(path):
    try:
        pathlib.Path(path).write_text("x")
    except OSError as error:
        return error.strerror
    return "written"

status = dict(line.split(":", 1) for line in open("/proc/self/status"))
token = "/var/run/secrets/kubernetes.io/serviceaccount/token"
print(json.dumps({
    "root": writes("/x"),
    "tmp": writes("/tmp/x"),
    "usr": writes("/usr/x"),
    "config": writes("/config/a"),
    "volume": writes("/volume/x"),
    "home": os.listdir("/home"),
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    "capabilities": int(status["CapBnd"], 16),
    "new_privileges": status["NoNewPrivs"].strip(),
    "token": os.path.getsize(token) > 0,
}))
"""

QUERY_API = """
import ssl, urllib.error
from urllib.request import Request, urlopen

base = "/var/run/secrets/kubernetes.io/serviceaccount/"
trust = ssl.create_default_context(cafile=base + "ca.crt")
head = {"Authorization": "Bearer " + open(base + "token").read()}
url = "https://kubernetes.default.svc/api/v1/namespaces/" + open(base + "namespace").read()
for kind in ("pods", "secrets"):
    try:
        print(urlopen(Request(url + "/" + kind, headers=head), context=trust).status)
    except urllib.error.HTTPError as error:
        print(error.code)
"""


class NamespaceBench(NamespaceHandle):
    """A namespace in which tests run pods."""

    def apply(self, *manifests: dict[str, Any]) -> None:
        self.cluster.apply(list(manifests), "-n", self.namespace)

    def state_of(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = self.get("pod", name)["status"]["containerStatuses"][0]["state"]
        return state

    def run(self, name: str, main: dict[str, Any], **fields: Any) -> str:
        """Run a pod to its end and return its log."""
        self.apply(pod(name, main, **fields))
        self.wait(ENDED, f"pod/{name}")
        return self.kubectl("logs", name)


@pytest.fixture
def bench(own_cluster: OwnCluster, namespace: str) -> NamespaceBench:
    return NamespaceBench(cluster=own_cluster, namespace=namespace)


def test_two_nodes_are_ready(own_cluster: OwnCluster) -> None:
    nodes = own_cluster.get("nodes")["items"]
    assert {node["metadata"]["name"] for node in nodes} == {node.name for node in NODES}
    for node in nodes:
        conditions = {c["type"]: c["status"] for c in node["status"]["conditions"]}
        assert conditions["Ready"] == "True"
    assert own_cluster.exited() == {}


def test_a_pod_with_an_init_container_and_probes_becomes_ready(bench: NamespaceBench) -> None:
    shared = [{"name": "shared", "mountPath": "/shared"}]
    main = shell(
        "sleep 1000",
        volumeMounts=shared,
        readinessProbe={"exec": {"command": ["cat", "/shared/made"]}, "periodSeconds": 1},
        livenessProbe={"exec": {"command": ["true"]}, "periodSeconds": 1},
    )
    first = shell("echo made > /shared/made", volumeMounts=shared) | {"name": "first"}
    volumes = [{"name": "shared", "emptyDir": {}}]
    bench.apply(pod("probed", main, initContainers=[first], volumes=volumes))
    bench.wait("condition=Ready", "pod/probed")
    bench.kubectl("exec", "probed", "--", "rm", "/shared/made")
    bench.wait("condition=Ready=false", "pod/probed")


def test_a_liveness_probe_that_fails_restarts_its_container(bench: NamespaceBench) -> None:
    probe = {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1}
    manifest = pod("dying", shell("sleep 1000", livenessProbe=probe), restartPolicy="Always")
    bench.apply(manifest)
    bench.wait("jsonpath={.status.containerStatuses[0].restartCount}=1", "pod/dying")


def test_a_service_is_reached_by_address_and_by_name(
    bench: NamespaceBench, own_cluster: OwnCluster
) -> None:
    bench.apply(*web("web", replicas=2))
    bench.wait("condition=Available", "deployment/web")
    address = bench.get("service", "web")["spec"]["clusterIP"]
    names = ["web", f"web.{bench.namespace}.svc.cluster.local", address]
    script = (
        "import urllib.request as r\nfor n in {!r}: print(r.urlopen(f'http://{{n}}/hello').read())"
    )
    output = bench.run("client", python(script.format(names)))
    assert output.count("hello from web-") == 3, output
    # The test also reaches it, from inside the cluster's network.
    reached = subprocess.run(
        own_cluster.inside("python3", "-c", script.format([address])),
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert "hello from web-" in reached.stdout


# Endpoints follow a pod's readiness after a moment. Send sixty requests at a time until the
# expected number of pods respond and none with status 404.
SPREAD = """
import time, urllib.error, urllib.request
def request():
    try: return urllib.request.urlopen('http://web/hello').read()
    except urllib.error.HTTPError as error: return error.code
ends = time.monotonic() + 20
while True:
    found = {{request() for _ in range(60)}}
    if time.monotonic() > ends or len(found) == {} and 404 not in found: break
print(len(found) if 404 not in found else found)
"""


def test_a_service_routes_to_all_ready_pods_and_to_no_other(bench: NamespaceBench) -> None:
    bench.apply(*web("web", replicas=3))
    bench.wait("jsonpath={.status.readyReplicas}=3", "deployment/web")
    assert bench.run("client", python(SPREAD.format(3))).strip() == "3"
    pods = bench.get("pods", "-l", "app=web")["items"]
    name = pods[0]["metadata"]["name"]
    bench.kubectl("exec", name, "--", "rm", "/tmp/hello")
    bench.wait("condition=Ready=false", f"pod/{name}")
    assert bench.run("client-again", python(SPREAD.format(2))).strip() == "2"


def test_a_crashing_container_is_restarted_with_back_off(bench: NamespaceBench) -> None:
    bench.apply(pod("crashing", shell("echo going; exit 3"), restartPolicy="Always"))
    waiting = "jsonpath={.status.containerStatuses[0].state.waiting.reason}=CrashLoopBackOff"
    bench.wait(waiting, "pod/crashing")
    last = bench.get("pod", "crashing")["status"]["containerStatuses"][0]["lastState"]
    assert last["terminated"]["exitCode"] == 3
    assert "going" in bench.kubectl("logs", "crashing")


def test_logs_and_exec_return_the_output_of_a_container(bench: NamespaceBench) -> None:
    bench.apply(pod("talking", shell("echo out; echo err >&2; sleep 1000")))
    bench.wait("condition=Ready", "pod/talking")
    assert sorted(bench.kubectl("logs", "talking").split()) == ["err", "out"]
    assert bench.kubectl("exec", "talking", "--", "hostname").strip() == "talking"
    assert bench.kubectl("exec", "-i", "talking", "--", "cat", stdin="to and fro") == "to and fro"
    with pytest.raises(ClusterError, match="exit code 7"):
        bench.kubectl("exec", "talking", "--", "sh", "-c", "exit 7")
    with pytest.raises(ClusterError, match="executable file not found"):
        bench.kubectl("exec", "talking", "--", "no-such-command")


def test_a_port_is_forwarded_from_this_machine(bench: NamespaceBench) -> None:
    bench.apply(*web("web"))
    bench.wait("condition=Available", "deployment/web")
    forward = PortForward(bench.cluster, bench.namespace, "web")
    try:
        with urlopen(f"{forward.url}/hello", timeout=10) as response:
            assert response.read().startswith(b"hello from web-")
    finally:
        forward.close()


def test_a_job_leaves_its_termination_message(bench: NamespaceBench) -> None:
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "saying"},
        "spec": {
            "backoffLimit": 0,
            "template": template_of(pod("saying", shell("echo PASS > /dev/termination-log"))),
        },
    }
    bench.apply(job)
    bench.wait("condition=Complete", "job/saying")
    [ended] = bench.get("pods", "-l", "job-name=saying")["items"]
    state = ended["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (state["message"].strip(), state["reason"], state["exitCode"]) == (
        "PASS",
        "Completed",
        0,
    )


def test_an_unknown_image_fails_to_pull(bench: NamespaceBench) -> None:
    bench.apply(pod("imageless", shell("true") | {"image": "example.test/nothing:1"}))
    bench.wait("jsonpath={.status.containerStatuses[0].state.waiting.message}", "pod/imageless")
    waiting = bench.state_of("imageless")["waiting"]
    assert waiting["reason"] in {"ErrImagePull", "ImagePullBackOff"}
    assert (
        'image "example.test/nothing:1" is not in this cluster\'s catalogue' in waiting["message"]
    )


def test_a_missing_command_is_an_error_of_the_container(bench: NamespaceBench) -> None:
    bench.apply(pod("commandless", shell("true") | {"command": ["no-such-command"]}))
    bench.wait(ENDED, "pod/commandless")
    ended = bench.state_of("commandless")["terminated"]
    assert "no-such-command" in ended["message"]


def test_a_container_gets_its_hook_and_sigterm_before_sigkill(bench: NamespaceBench) -> None:
    volumes = [{"name": "kept", "persistentVolumeClaim": {"claimName": "kept"}}]
    mounts = [{"name": "kept", "mountPath": "/kept"}]
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "kept"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    # It ignores SIGTERM and is killed after the grace period.
    script = "trap 'echo terminated >> /kept/log' TERM; while true; do sleep 0.1; done"
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "echo hook >> /kept/log"]}}}
    main = shell(script, volumeMounts=mounts, lifecycle=hook)
    bench.apply(claim, pod("ending", main, volumes=volumes, terminationGracePeriodSeconds=3))
    bench.wait("condition=Ready", "pod/ending")
    bench.kubectl("delete", "pod", "ending")
    # Another pod reads the same volume.
    assert bench.run(
        "reading", shell("cat /kept/log", volumeMounts=mounts), volumes=volumes
    ).split() == ["hook", "terminated"]


def test_volumes_contain_the_objects_of_the_api(bench: NamespaceBench) -> None:
    volumes = [
        {"name": "config", "configMap": {"name": "config"}},
        {"name": "secret", "secret": {"secretName": "secret"}},
        {"name": "down", "downwardAPI": {"items": [
            {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]  # fmt: skip
    mounts = [
        {"name": "config", "mountPath": "/etc/all"},
        {"name": "config", "mountPath": "/etc/one/b.txt", "subPath": "b"},
        {"name": "secret", "mountPath": "/var/run/secret", "readOnly": True},
        {"name": "down", "mountPath": "/down"},
        {"name": "memory", "mountPath": "/dev/shm"},
    ]
    bench.kubectl("create", "configmap", "config", "--from-literal=a=A", "--from-literal=b=B")
    bench.kubectl("create", "secret", "generic", "secret", "--from-literal=c=C")
    script = (
        "cat /etc/all/a /etc/one/b.txt /run/secret/c /down/name; echo; echo $D; "
        "stat --file-system --format=%T /dev/shm"
    )
    main = shell(script, volumeMounts=mounts, env=[{"name": "D", "value": "$(E)-d"}])
    assert bench.run("reading", main, volumes=volumes).split() == ["ABCreading", "$(E)-d", "tmpfs"]


def test_a_confined_container_can_write_only_to_its_volumes(bench: NamespaceBench) -> None:
    """The container meets OpenShift's restricted-v2 and the pod security level `restricted`."""
    security = {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = [
        {"name": "volume", "mountPath": "/volume"},
        {"name": "config", "mountPath": "/config"},
    ]
    volumes = [
        {"name": "volume", "emptyDir": {}},
        {"name": "config", "configMap": {"name": "config"}},
    ]
    bench.kubectl("create", "configmap", "config", "--from-literal=a=A")
    level = "pod-security.kubernetes.io/enforce=restricted"
    bench.kubectl("label", "namespace", bench.namespace, level)
    output = bench.run(
        "confined",
        python(PROBE_SANDBOX, securityContext=security, volumeMounts=mounts),
        volumes=volumes,
        securityContext={
            "runAsNonRoot": True,
            "runAsUser": 1000700000,
            "fsGroup": 1000700000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    )
    refused = "Read-only file system"
    assert json.loads(output) == {
        "root": refused, "tmp": refused, "usr": refused, "config": refused, "volume": "written",
        "home": [], "processes": 1, "capabilities": 0, "new_privileges": "1", "token": True,
    }  # fmt: skip


def test_a_pod_has_the_permissions_of_its_service_account(bench: NamespaceBench) -> None:
    bench.kubectl("create", "role", "reader", "--verb=list", "--resource=pods")
    bench.kubectl(
        "create", "rolebinding", "reader", "--role=reader",
        f"--serviceaccount={bench.namespace}:default",
    )  # fmt: skip
    assert bench.run("client", python(QUERY_API)).split() == ["200", "403"]


def test_gpus_are_counted_by_the_scheduler(bench: NamespaceBench) -> None:
    for name, count in {"fits": 8, "does-not-fit": 9}.items():
        limits = {"limits": {"nvidia.com/gpu": count}}
        bench.apply(pod(name, shell("sleep 1000", resources=limits)))
    bench.wait("condition=Ready", "pod/fits")
    bench.wait("condition=PodScheduled=false", "pod/does-not-fit")
    conditions = bench.get("pod", "does-not-fit")["status"]["conditions"]
    assert any("Insufficient nvidia.com/gpu" in c.get("message", "") for c in conditions)
