"""The operator as its users have it: installed from the chart, with the chart's own rights.

A test holds the namespace that it looks after; what stands there, the test asks the cluster.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.e2e.cluster.handle import OwnCluster
from tests.e2e.cluster.starting import ROOT

__all__ = ["CHAT", "Answers", "Installed"]

CHAT = ROOT / "examples" / "chat.yaml"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A namespace with an operator that looks after it alone."""

    cluster: OwnCluster
    namespace: str

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

    def url(self, name: str) -> str:
        """Where a service's requests go, from inside the cluster's network, once they arrive.

        Nodes learn of an address a moment after the service is ready.
        """
        url = f"http://{self.get('service', name)['spec']['clusterIP']}"
        patient = ("--retry", "30", "--retry-delay", "1", "--retry-all-errors", "--max-time", "5")
        asked = self.cluster.inside("curl", "--silent", "--fail", *patient, f"{url}/v1/models")
        subprocess.run(asked, capture_output=True, check=True, timeout=200)
        return url

    def replaying(self, name: str, out: Path, *options: str) -> subprocess.Popen[str]:
        """A replay against a service, just started, inside the cluster's network.

        Args:
            out: the folder of its records.
            options: more of `replay`; the sample trace unless they have `--trace`.
        """
        trace = () if "--trace" in options else ("--trace", "sample")
        return subprocess.Popen(
            self.cluster.inside(
                str(Path(sys.executable).parent / "replay"),
                *(*trace, "--slo", str(CHAT), "--yes", "--target", self.url(name)),
                *("--out", str(out), *options),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def answering(self, name: str, count: int, tokens: int) -> Answers:
        """So many streamed answers of a service, all begun, on their way to a client inside."""
        client = str(Path(__file__).with_name("client.py"))
        words = (sys.executable, client, self.url(name), name, str(count), str(tokens))
        # Unbuffered, or waiting for its end with a time-out would miss what came with a line.
        asked = self.cluster.inside(*words)
        answers = Answers(subprocess.Popen(asked, stdout=subprocess.PIPE, bufsize=0))
        answers.begin(count)
        return answers

    def inside(self, *command: str, timeout_s: float = 60) -> str:
        """What a command prints that runs in the cluster's network."""
        return subprocess.run(
            self.cluster.inside(*command),
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
        """Every request that the operator has sent to the API server."""
        user = f"system:serviceaccount:{self.namespace}:goodput"
        return [line for line in self.cluster.audit() if line["user"]["username"] == user]
