"""The cluster that the end-to-end tests stand on does what they take for granted."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from tools.cluster.handle import ClusterError
from tools.cluster.layout import NODES
from tools.cluster.manifests import pod, python, shell, template_of, web

if TYPE_CHECKING:
    from pathlib import Path

    from tools.cluster.handle import Cluster, OwnCluster

ENDED = "jsonpath={.status.containerStatuses[0].state.terminated}"

LOOK_AROUND = """
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

ASK_THE_API = """
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


class Scene:
    """A namespace of a cluster."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    def kubectl(self, *words: str, **options: Any) -> str:
        return self.cluster.kubectl("-n", self.namespace, *words, **options)

    def apply(self, *manifests: dict[str, Any]) -> None:
        self.cluster.apply(list(manifests), "-n", self.namespace)

    def wait(self, condition: str, what: str, timeout_s: int = 60) -> None:
        self.cluster.wait(condition, what, "-n", self.namespace, timeout_s=timeout_s)

    def get(self, *words: str) -> dict[str, Any]:
        return self.cluster.get("-n", self.namespace, *words)

    def state_of(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = self.get("pod", name)["status"]["containerStatuses"][0]["state"]
        return state

    def run(self, name: str, main: dict[str, Any], **fields: Any) -> str:
        """Run a pod to its end and return what it printed."""
        self.apply(pod(name, main, **fields))
        self.wait(ENDED, f"pod/{name}")
        return self.kubectl("logs", name)


@pytest.fixture
def scene(own_cluster: OwnCluster, namespace: str) -> Scene:
    return Scene(own_cluster, namespace)


def test_two_nodes_are_ready(own_cluster: OwnCluster) -> None:
    nodes = own_cluster.get("nodes")["items"]
    assert {node["metadata"]["name"] for node in nodes} == {node.name for node in NODES}
    for node in nodes:
        conditions = {c["type"]: c["status"] for c in node["status"]["conditions"]}
        assert conditions["Ready"] == "True"
    assert own_cluster.exited() == {}


def test_a_pod_with_an_init_container_and_probes_becomes_ready(scene: Scene) -> None:
    shared = [{"name": "shared", "mountPath": "/shared"}]
    main = shell(
        "sleep 1000",
        volumeMounts=shared,
        readinessProbe={"exec": {"command": ["cat", "/shared/made"]}, "periodSeconds": 1},
        livenessProbe={"exec": {"command": ["true"]}, "periodSeconds": 1},
    )
    first = shell("echo made > /shared/made", volumeMounts=shared) | {"name": "first"}
    volumes = [{"name": "shared", "emptyDir": {}}]
    scene.apply(pod("probed", main, initContainers=[first], volumes=volumes))
    scene.wait("condition=Ready", "pod/probed")
    scene.kubectl("exec", "probed", "--", "rm", "/shared/made")
    scene.wait("condition=Ready=false", "pod/probed")


def test_a_liveness_probe_that_fails_restarts_its_container(scene: Scene) -> None:
    probe = {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1}
    manifest = pod("dying", shell("sleep 1000", livenessProbe=probe), restartPolicy="Always")
    scene.apply(manifest)
    scene.wait("jsonpath={.status.containerStatuses[0].restartCount}=1", "pod/dying")


def test_a_service_answers_by_its_address_and_by_its_name(
    scene: Scene, own_cluster: OwnCluster
) -> None:
    scene.apply(*web("web", replicas=2))
    scene.wait("condition=Available", "deployment/web")
    address = scene.get("service", "web")["spec"]["clusterIP"]
    names = ["web", f"web.{scene.namespace}.svc.cluster.local", address]
    ask = (
        "import urllib.request as r\nfor n in {!r}: print(r.urlopen(f'http://{{n}}/hello').read())"
    )
    said = scene.run("asking", python(ask.format(names)))
    assert said.count("hello from web-") == 3, said
    # And from the test's own side, through the cluster's network.
    reached = subprocess.run(
        own_cluster.inside("python3", "-c", ask.format([address])),
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert "hello from web-" in reached.stdout


# Endpoints and rules follow a pod's readiness after a moment: rounds of sixty, until so many
# answer and the one that says 404 is asked no more.
SPREAD = """
import time, urllib.error, urllib.request
def answer():
    try: return urllib.request.urlopen('http://web/hello').read()
    except urllib.error.HTTPError as error: return error.code
ends = time.monotonic() + 20
while True:
    found = {{answer() for _ in range(60)}}
    if time.monotonic() > ends or len(found) == {} and 404 not in found: break
print(len(found) if 404 not in found else found)
"""


def test_a_service_spreads_over_its_pods_and_leaves_out_the_unready(scene: Scene) -> None:
    scene.apply(*web("web", replicas=3))
    scene.wait("jsonpath={.status.readyReplicas}=3", "deployment/web")
    assert scene.run("asking", python(SPREAD.format(3))).strip() == "3"
    pods = scene.get("pods", "-l", "app=web")["items"]
    name = pods[0]["metadata"]["name"]
    scene.kubectl("exec", name, "--", "rm", "/tmp/hello")
    scene.wait("condition=Ready=false", f"pod/{name}")
    assert scene.run("asking-again", python(SPREAD.format(2))).strip() == "2"


def test_a_container_that_ends_at_once_is_backed_off(scene: Scene) -> None:
    scene.apply(pod("crashing", shell("echo going; exit 3"), restartPolicy="Always"))
    waiting = "jsonpath={.status.containerStatuses[0].state.waiting.reason}=CrashLoopBackOff"
    scene.wait(waiting, "pod/crashing")
    last = scene.get("pod", "crashing")["status"]["containerStatuses"][0]["lastState"]
    assert last["terminated"]["exitCode"] == 3
    assert "going" in scene.kubectl("logs", "crashing")


def test_logs_and_exec_show_what_happens_inside(scene: Scene) -> None:
    scene.apply(pod("talking", shell("echo out; echo err >&2; sleep 1000")))
    scene.wait("condition=Ready", "pod/talking")
    assert sorted(scene.kubectl("logs", "talking").split()) == ["err", "out"]
    assert scene.kubectl("exec", "talking", "--", "hostname").strip() == "talking"
    assert scene.kubectl("exec", "-i", "talking", "--", "cat", stdin="to and fro") == "to and fro"
    with pytest.raises(ClusterError, match="exit code 7"):
        scene.kubectl("exec", "talking", "--", "sh", "-c", "exit 7")
    with pytest.raises(ClusterError, match="executable file not found"):
        scene.kubectl("exec", "talking", "--", "no-such-command")


def test_a_port_is_forwarded_from_this_machine(scene: Scene) -> None:
    scene.apply(*web("web"))
    scene.wait("condition=Available", "deployment/web")
    command: list[str | Path] = [scene.cluster.binaries / "kubectl", "-n", scene.namespace]
    with subprocess.Popen(
        [*command, "port-forward", "service/web", ":80"],
        env=scene.cluster.environment, stdout=subprocess.PIPE, text=True,
    ) as forwarding:  # fmt: skip
        assert forwarding.stdout is not None
        where = forwarding.stdout.readline().split()[2]
        said = subprocess.run(
            ["curl", "-sS", "--max-time", "10", f"http://{where}/hello"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        forwarding.terminate()
    assert said.stdout.startswith("hello from web-")


def test_a_job_leaves_its_termination_message(scene: Scene) -> None:
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "saying"},
        "spec": {
            "backoffLimit": 0,
            "template": template_of(pod("saying", shell("echo PASS > /dev/termination-log"))),
        },
    }
    scene.apply(job)
    scene.wait("condition=Complete", "job/saying")
    [ended] = scene.get("pods", "-l", "job-name=saying")["items"]
    state = ended["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (state["message"].strip(), state["reason"], state["exitCode"]) == (
        "PASS",
        "Completed",
        0,
    )


def test_an_unknown_image_is_not_pulled_and_the_known_ones_are_named(scene: Scene) -> None:
    scene.apply(pod("imageless", shell("true") | {"image": "example.test/nothing:1"}))
    scene.wait("jsonpath={.status.containerStatuses[0].state.waiting.message}", "pod/imageless")
    waiting = scene.state_of("imageless")["waiting"]
    assert waiting["reason"] in {"ErrImagePull", "ImagePullBackOff"}
    assert (
        'image "example.test/nothing:1" is not in this cluster\'s catalogue' in waiting["message"]
    )


def test_a_command_that_is_not_there_is_an_error_of_the_container(scene: Scene) -> None:
    scene.apply(pod("commandless", shell("true") | {"command": ["no-such-command"]}))
    scene.wait(ENDED, "pod/commandless")
    ended = scene.state_of("commandless")["terminated"]
    assert "no-such-command" in ended["message"]


def test_a_container_is_asked_to_end_before_it_is_killed(scene: Scene) -> None:
    volumes = [{"name": "kept", "persistentVolumeClaim": {"claimName": "kept"}}]
    mounts = [{"name": "kept", "mountPath": "/kept"}]
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "kept"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    # Deaf to TERM: it is killed once the period of grace is over.
    script = "trap 'echo asked >> /kept/log' TERM; while true; do sleep 0.1; done"
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "echo hook >> /kept/log"]}}}
    main = shell(script, volumeMounts=mounts, lifecycle=hook)
    scene.apply(claim, pod("ending", main, volumes=volumes, terminationGracePeriodSeconds=3))
    scene.wait("condition=Ready", "pod/ending")
    scene.kubectl("delete", "pod", "ending")
    # Another pod finds on the same volume what the first one left there.
    assert scene.run(
        "reading", shell("cat /kept/log", volumeMounts=mounts), volumes=volumes
    ).split() == ["hook", "asked"]


def test_volumes_hold_what_the_api_has(scene: Scene) -> None:
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
    scene.kubectl("create", "configmap", "config", "--from-literal=a=A", "--from-literal=b=B")
    scene.kubectl("create", "secret", "generic", "secret", "--from-literal=c=C")
    script = (
        "cat /etc/all/a /etc/one/b.txt /run/secret/c /down/name; echo; echo $D; "
        "stat --file-system --format=%T /dev/shm"
    )
    main = shell(script, volumeMounts=mounts, env=[{"name": "D", "value": "$(E)-d"}])
    assert scene.run("reading", main, volumes=volumes).split() == ["ABCreading", "$(E)-d", "tmpfs"]


def test_a_confined_container_writes_nowhere_but_into_its_volumes(scene: Scene) -> None:
    """As OpenShift's restricted-v2 and the restricted pod security level demand it."""
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
    scene.kubectl("create", "configmap", "config", "--from-literal=a=A")
    level = "pod-security.kubernetes.io/enforce=restricted"
    scene.kubectl("label", "namespace", scene.namespace, level)
    said = scene.run(
        "confined",
        python(LOOK_AROUND, securityContext=security, volumeMounts=mounts),
        volumes=volumes,
        securityContext={
            "runAsNonRoot": True,
            "runAsUser": 1000700000,
            "fsGroup": 1000700000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    )
    refused = "Read-only file system"
    assert json.loads(said) == {
        "root": refused, "tmp": refused, "usr": refused, "config": refused, "volume": "written",
        "home": [], "processes": 1, "capabilities": 0, "new_privileges": "1", "token": True,
    }  # fmt: skip


def test_a_pod_may_do_what_its_service_account_may(scene: Scene) -> None:
    scene.kubectl("create", "role", "reader", "--verb=list", "--resource=pods")
    scene.kubectl(
        "create", "rolebinding", "reader", "--role=reader",
        f"--serviceaccount={scene.namespace}:default",
    )  # fmt: skip
    assert scene.run("asking", python(ASK_THE_API)).split() == ["200", "403"]


def test_gpus_are_counted_by_the_scheduler(scene: Scene) -> None:
    for name, count in {"fits": 8, "does-not-fit": 9}.items():
        limits = {"limits": {"nvidia.com/gpu": count}}
        scene.apply(pod(name, shell("sleep 1000", resources=limits)))
    scene.wait("condition=Ready", "pod/fits")
    scene.wait("condition=PodScheduled=false", "pod/does-not-fit")
    conditions = scene.get("pod", "does-not-fit")["status"]["conditions"]
    assert any("Insufficient nvidia.com/gpu" in c.get("message", "") for c in conditions)
