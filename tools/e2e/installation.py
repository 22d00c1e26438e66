"""The operator as users install it: from the chart, with the chart's own permissions.

A `ChartRelease` is the namespace that the operator manages. Its methods read the cluster each
time, so they show the present state of the services in that namespace.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import yaml
from tools.cluster.handle import NamespaceHandle, OwnCluster
from tools.cluster.starting import ROOT
from tools.e2e.clients import CompletionStreams, PortForwards

from goodput_core.contract import PATH_CONTROL_STATE
from goodput_operator.kube.objects import ADMIN_PORT

__all__ = ["CHAT", "OPERATOR_PODS", "RESTRICTED", "ChartRelease", "conditions_of"]

CHAT = ROOT / "examples" / "chat.yaml"
OPERATOR_PODS = ("pods", "-l", "app.kubernetes.io/name=goodput-operator")
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
"""Label of a namespace that admits only hardened pods."""


@dataclass(frozen=True, kw_only=True)
class ChartRelease(NamespaceHandle):
    """A namespace and the operator that manages only this namespace.

    In our own cluster, clients of the services run inside the cluster's network. For another
    cluster they run on this machine and use `forwards`.
    """

    @cached_property
    def forwards(self) -> PortForwards:
        """Port forwards to the services."""
        return PortForwards(self.cluster, self.namespace)

    @property
    def own(self) -> OwnCluster:
        """The cluster as an `OwnCluster`, for tests with the fixture `own_cluster`."""
        assert isinstance(self.cluster, OwnCluster), "this test lacks the fixture own_cluster"
        return self.cluster

    def apply(self, name: str, **spec: Any) -> None:
        """Apply `examples/chat.yaml` under another name.

        Args:
            name: name of the service.
            spec: fields that replace those of the example's spec; None removes a field.
        """
        manifest = yaml.safe_load(CHAT.read_text(encoding="utf-8"))
        manifest["metadata"]["name"] = name
        merged = {**manifest["spec"], **spec}
        manifest["spec"] = {key: value for key, value in merged.items() if value is not None}
        words = ("apply", "--server-side", "--field-manager=a-user", "-f", "-")
        self.kubectl(*words, stdin=json.dumps(manifest))

    def patch(self, name: str, **spec: Any) -> None:
        """Merge fields into a service's spec."""
        patch = json.dumps({"spec": spec})
        self.kubectl("patch", f"llmservice/{name}", "--type=merge", "-p", patch)

    def wait_settled(self, name: str, timeout_s: int = 180) -> None:
        """Wait until a service is ready and the operator has completed all changes."""
        for condition in ("Ready", "Reconciling=false"):
            self.wait(f"condition={condition}", f"llmservice/{name}", timeout_s=timeout_s)

    def wait_deleted(self, *names: str) -> None:
        """Wait until no pod of these services exists."""
        for name in names:
            self.wait("delete", "pods", "-l", f"goodput.dev/llmservice={name}", timeout_s=180)

    def status(self, name: str) -> dict[str, Any]:
        """Return a service's status; empty before the operator has written it."""
        status: dict[str, Any] = self.get("llmservice", name).get("status", {})
        return status

    def condition(self, name: str, kind: str) -> tuple[str, str]:
        """Return the reason and the message of a service's condition."""
        [one] = [c for c in self.status(name)["conditions"] if c["type"] == kind]
        return one["reason"], one["message"]

    def pods(self, name: str, component: str) -> list[dict[str, Any]]:
        """Return a service's pods, without those being deleted.

        Args:
            name: name of the service.
            component: `engine` or `router`.
        """
        labels = f"goodput.dev/llmservice={name},app.kubernetes.io/component={component}"
        pods = self.get("pods", "-l", labels)["items"]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def state(self, pod: str) -> dict[str, Any]:
        """Return `/control/state` of an engine or a router, read through the API server."""
        proxy = f"/api/v1/namespaces/{self.namespace}/pods/{pod}:{ADMIN_PORT}/proxy"
        state: dict[str, Any] = json.loads(
            self.kubectl("get", "--raw", f"{proxy}{PATH_CONTROL_STATE}")
        )
        return state

    def url(self, name: str) -> str:
        """Return the URL for a service's clients, after a request to it has succeeded.

        Nodes update their rules a moment after the service is ready.
        """
        if not isinstance(self.cluster, OwnCluster):
            return self.forwards.url(name)
        url = f"http://{self.get('service', name)['spec']['clusterIP']}"
        retries = ("--retry", "30", "--retry-delay", "1", "--retry-all-errors", "--max-time", "5")
        self.run_inside("curl", "--silent", "--fail", *retries, f"{url}/v1/models", timeout_s=200)
        return url

    def run_command(
        self, *command: str, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of a user, such as `goodput wait`, with the namespace as its last words.

        kubectl finds its plugins in the folder of this process's Python.
        """
        environment = self.cluster.environment
        path = f"{Path(sys.executable).parent}:{environment['PATH']}"
        return subprocess.run(
            [*command, "--namespace", self.namespace],
            env={**environment, "PATH": path},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def client_command(self, *command: str) -> list[str]:
        """Return the command line that runs a client of the services."""
        if isinstance(self.cluster, OwnCluster):
            return self.cluster.inside(*command)
        return list(command)

    def start_replay(self, name: str, out: Path, *options: str) -> subprocess.Popen[str]:
        """Start a replay against a service.

        Args:
            name: name of the service.
            out: folder of the run.
            options: further options of `replay`; without `--trace` and `--rate`, the sample trace
                is replayed.
        """
        trace = () if {"--trace", "--rate"} & set(options) else ("--trace", "sample")
        return subprocess.Popen(
            self.client_command(
                str(Path(sys.executable).parent / "replay"),
                *(*trace, "--slo", str(CHAT), "--yes", "--target", self.url(name)),
                *("--out", str(out), *options),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def start_streams(self, name: str, count: int, tokens: int) -> CompletionStreams:
        """Start streamed completions and wait for the first token of each.

        Args:
            name: name of the service.
            count: number of concurrent requests.
            tokens: output tokens of each.
        """
        client = str(Path(__file__).with_name("client_process.py"))
        arguments = (self.url(name), name, str(count), str(tokens))
        # Unbuffered: `communicate` with a time-out would miss lines in a buffer.
        process = subprocess.Popen(
            self.client_command(sys.executable, client, "burst", *arguments),
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        streams = CompletionStreams(process)
        streams.wait_for_first_tokens(count)
        return streams

    def run_streams(self, name: str, count: int, tokens: int) -> list[str]:
        """Run streamed completions to their end; see `start_streams` and `CompletionStreams`."""
        return self.start_streams(name, count, tokens).outcomes()

    def run_inside(self, *command: str, timeout_s: float = 120) -> str:
        """Run a command in the network of our own cluster and return its output."""
        return subprocess.run(
            self.own.inside(*command),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        ).stdout

    def read_admin(self, pod: dict[str, Any], path: str) -> str:
        """Return a page of a pod's admin port, read inside the network of our own cluster."""
        url = f"http://{pod['status']['podIP']}:{ADMIN_PORT}{path}"
        return self.run_inside("curl", "--silent", "--fail", "--max-time", "5", url)

    def kill_process(self, pod: str) -> None:
        """Kill all processes of a pod; the pod remains and restarts them."""
        processes = self.own.processes_of(pod)
        assert processes, f"{pod} has no process"
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def kill_pod(self, pod: str) -> None:
        """Delete a pod at once; its processes end two seconds later."""
        self.kubectl("delete", "pod", pod, "--grace-period=0", "--force")

    def scale_operator(self, replicas: int) -> None:
        """Scale the operator's Deployment and wait for its pods."""
        self.kubectl("scale", "deployment/goodput", f"--replicas={replicas}")
        self.kubectl("rollout", "status", "deployment/goodput", "--timeout=120s", timeout_s=130)
        if replicas == 0:
            self.wait("delete", *OPERATOR_PODS)

    def operator_log(self) -> list[dict[str, Any]]:
        """Return the events in the operator's log."""
        lines = self.kubectl("logs", "deployment/goodput").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def audited_requests(self) -> list[dict[str, Any]]:
        """Return the operator's requests to the API server of our own cluster."""
        user = f"system:serviceaccount:{self.namespace}:goodput"
        return [line for line in self.own.audit() if line["user"]["username"] == user]


def conditions_of(body: dict[str, Any]) -> dict[str, str]:
    """Return the status of each condition of an object by type."""
    return {c["type"]: c["status"] for c in body.get("status", {}).get("conditions", ())}
