"""The operator as its users have it: installed from the chart, with the chart's own rights.

A test holds the namespace that it looks after; what stands there, the test asks the cluster.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tests.e2e.operator.forwarding import Forwards
from tools.cluster.handle import Cluster, OwnCluster
from tools.cluster.starting import ROOT

from goodput_core.contract import PATH_CONTROL_STATE
from goodput_operator.kube.objects import ADMIN_PORT

__all__ = ["CHAT", "RESTRICTED", "Answers", "Installed"]

CHAT = ROOT / "examples" / "chat.yaml"
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
"""The label of a namespace that admits hardened pods alone."""


class Answers:
    """Streamed answers on their way to `client.py`.

    Args:
        process: the client.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._ends: list[str] = []

    def begin(self, count: int) -> None:
        """Wait until each has its first token, or has ended without one."""
        assert self._process.stdout is not None
        begun: set[int] = set()
        while len(begun) < count:
            said = json.loads(self._process.stdout.readline())
            begun.add(said["answer"])
            self._ends += [said["end"]] if "end" in said else []

    def ends(self, timeout_s: float = 60) -> list[str]:
        """Wait until all have ended: `done`, or the code of the error, in the order of ends."""
        said, _ = self._process.communicate(timeout=timeout_s)
        events = [json.loads(line) for line in said.splitlines()]
        return self._ends + [event["end"] for event in events if "end" in event]

    def running(self) -> bool:
        """Whether one has not ended."""
        return self._process.poll() is None


@dataclass(kw_only=True)
class Installed:
    """A namespace with an operator that looks after it alone.

    Clients of its services run inside our own cluster's network; of a given cluster, on this
    machine, to which `forwards` lead.
    """

    cluster: Cluster
    namespace: str
    forwards: Forwards = field(init=False)

    def __post_init__(self) -> None:
        self.forwards = Forwards(self.cluster, self.namespace)

    @property
    def own(self) -> OwnCluster:
        """The cluster as one of our own, for tests that ask for `own_cluster`."""
        assert isinstance(self.cluster, OwnCluster), "this test lacks the fixture own_cluster"
        return self.cluster

    def kubectl(self, *words: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        return self.cluster.kubectl("-n", self.namespace, *words, stdin=stdin, timeout_s=timeout_s)

    def get(self, *words: str) -> dict[str, Any]:
        return self.cluster.get(*words, "-n", self.namespace)

    def wait(self, condition: str, *words: str, timeout_s: int = 60) -> None:
        self.cluster.wait(condition, *words, "-n", self.namespace, timeout_s=timeout_s)

    def apply(self, name: str, **spec: Any) -> None:
        """Apply a service: `examples/chat.yaml` with these fields of its spec in place of its own.

        A field whose value is None is left out.
        """
        manifest = yaml.safe_load(CHAT.read_text(encoding="utf-8"))
        manifest["metadata"]["name"] = name
        merged = {**manifest["spec"], **spec}
        manifest["spec"] = {key: value for key, value in merged.items() if value is not None}
        words = ("apply", "--server-side", "--field-manager=a-user", "-f", "-")
        self.kubectl(*words, stdin=json.dumps(manifest))

    def settled(self, name: str, timeout_s: int = 90) -> None:
        """Wait until a service is ready and nothing about it is still being changed."""
        for condition in ("Ready", "Reconciling=false"):
            self.wait(f"condition={condition}", f"llmservice/{name}", timeout_s=timeout_s)

    def status(self, name: str) -> dict[str, Any]:
        """What the operator says of a service; empty before its first word."""
        found: dict[str, Any] = self.get("llmservice", name).get("status", {})
        return found

    def condition(self, name: str, kind: str) -> tuple[str, str]:
        """The reason and the message of a service's condition."""
        [one] = [c for c in self.status(name)["conditions"] if c["type"] == kind]
        return one["reason"], one["message"]

    def pods(self, name: str, part: str) -> list[dict[str, Any]]:
        """A service's pods that are not going; `part` is `engine` or `router`."""
        labels = f"goodput.dev/llmservice={name},app.kubernetes.io/component={part}"
        found = self.get("pods", "-l", labels)["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def state(self, pod: str) -> dict[str, Any]:
        """What an engine or a router says of itself, through the API server."""
        proxied = f"/api/v1/namespaces/{self.namespace}/pods/{pod}:{ADMIN_PORT}/proxy"
        said: dict[str, Any] = json.loads(
            self.kubectl("get", "--raw", f"{proxied}{PATH_CONTROL_STATE}")
        )
        return said

    def url(self, name: str) -> str:
        """Where a service's requests go, from where its clients run, once they arrive.

        Nodes learn of an address a moment after the service is ready.
        """
        if not isinstance(self.cluster, OwnCluster):
            return self.forwards.url(name)
        url = f"http://{self.get('service', name)['spec']['clusterIP']}"
        patient = ("--retry", "30", "--retry-delay", "1", "--retry-all-errors", "--max-time", "5")
        asked = self.cluster.inside("curl", "--silent", "--fail", *patient, f"{url}/v1/models")
        subprocess.run(asked, capture_output=True, check=True, timeout=200)
        return url

    def client(self, *command: str) -> list[str]:
        """The command line of a service's client."""
        if isinstance(self.cluster, OwnCluster):
            return self.cluster.inside(*command)
        return list(command)

    def replaying(self, name: str, out: Path, *options: str) -> subprocess.Popen[str]:
        """A replay against a service, just started.

        Args:
            out: the folder of its records.
            options: more of `replay`; the sample trace unless they have `--trace`.
        """
        trace = () if "--trace" in options else ("--trace", "sample")
        return subprocess.Popen(
            self.client(
                str(Path(sys.executable).parent / "replay"),
                *(*trace, "--slo", str(CHAT), "--yes", "--target", self.url(name)),
                *("--out", str(out), *options),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def answering(self, name: str, count: int, tokens: int) -> Answers:
        """So many streamed answers of a service, all begun, on their way to a client."""
        client = str(Path(__file__).with_name("client.py"))
        words = (sys.executable, client, self.url(name), name, str(count), str(tokens))
        # Unbuffered, or waiting for its end with a time-out would miss what came with a line.
        asked = self.client(*words)
        answers = Answers(subprocess.Popen(asked, stdout=subprocess.PIPE, bufsize=0))
        answers.begin(count)
        return answers

    def inside(self, *command: str, timeout_s: float = 60) -> str:
        """What a command prints that runs in our own cluster's network."""
        return subprocess.run(
            self.own.inside(*command),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        ).stdout

    def scale_operator(self, replicas: int) -> None:
        """Run so many operators, and wait until that many pods are there, ready."""
        self.kubectl("scale", "deployment/goodput", f"--replicas={replicas}")
        self.kubectl("rollout", "status", "deployment/goodput", "--timeout=60s", timeout_s=70)
        if replicas == 0:
            pods = ("pods", "-l", "app.kubernetes.io/name=goodput-operator")
            self.wait("delete", *pods)

    def operator_log(self) -> list[dict[str, Any]]:
        """Every event of the running operator's log so far."""
        lines = self.kubectl("logs", "deployment/goodput").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def audited(self) -> list[dict[str, Any]]:
        """Every request that the operator has sent to the API server of our own cluster."""
        user = f"system:serviceaccount:{self.namespace}:goodput"
        return [line for line in self.own.audit() if line["user"]["username"] == user]
