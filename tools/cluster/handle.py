"""Handles of a cluster for tests: its kubectl and, for a cluster of our own, its processes.

Nothing in `Cluster` needs control over the cluster's machines; `OwnCluster` adds what does, and a
test that uses it cannot run against a cluster that was given.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from tools.cluster.images import publish
from tools.cluster.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.cluster.images import Image

__all__ = ["Cluster", "ClusterError", "OwnCluster"]


class ClusterError(Exception):
    """A command of the cluster failed; the text is the cluster's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Any cluster, by its kubeconfig."""

    kubeconfig: Path
    binaries: Path

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, for a program that talks to the cluster: helm, kopf, ours."""
        path = f"{self.binaries}:{os.environ['PATH']}"
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": path}

    def kubectl(self, *words: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        """Run kubectl and return what it printed.

        Raises:
            ClusterError: with kubectl's own words, when it failed.
        """
        ended = subprocess.run(
            [self.binaries / "kubectl", *words],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if ended.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(words)}: {ended.stderr.strip()}")
        return ended.stdout

    def apply(self, manifest: str | dict[str, Any] | list[dict[str, Any]], *words: str) -> str:
        """Apply objects: YAML or JSON text, one object, or several."""
        if isinstance(manifest, list):
            manifest = {"apiVersion": "v1", "kind": "List", "items": manifest}
        text = manifest if isinstance(manifest, str) else json.dumps(manifest)
        return self.kubectl("apply", "-f", "-", *words, stdin=text)

    def get(self, *words: str) -> dict[str, Any]:
        """An object, or a list of them with `items`, as `kubectl get … -o json` reads it."""
        decoded: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json"))
        return decoded

    def wait(self, condition: str, *words: str, timeout_s: int = 60) -> None:
        """Wait as `kubectl wait --for=CONDITION` does.

        Raises:
            ClusterError: the time is over; includes the cluster's description of the object.
        """
        limit = f"--timeout={timeout_s}s"
        try:
            self.kubectl("wait", f"--for={condition}", limit, *words, timeout_s=timeout_s + 10)
        except ClusterError as error:
            described = ""
            with contextlib.suppress(ClusterError):  # there may be nothing to describe
                described = self.kubectl("describe", *words)
            raise ClusterError(f"{error}\n{described}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCluster(Cluster):
    """A cluster whose processes are ours to stop, kill and start again.

    `pid` is the first process inside its namespaces; `process` is set where it was started, and
    holds the pipe whose end is the cluster's.
    """

    layout: Layout
    pid: int
    process: subprocess.Popen[bytes] | None = None

    def publish(self, images: dict[str, Image]) -> None:
        """Make images pullable."""
        publish(self.layout.catalogue, images)

    def inside(self, *command: str) -> list[str]:
        """The command line that runs a command in the cluster's network.

        There, service and pod addresses answer and `inner_kubeconfig` holds; the disk is this
        machine's.
        """
        enter = ["nsenter", f"--target={self.pid}", "--user", "--net", "--preserve-credentials"]
        return [*enter, "--", *command]

    def processes_of(self, pod: str) -> list[psutil.Process]:
        """The processes of a pod's containers, each before those that it started."""
        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it may have ended meanwhile
                if process.environ().get("HOSTNAME") == pod:
                    found.append(process)
        return found

    @property
    def inner_kubeconfig(self) -> Path:
        """The administrator's credentials for a command that runs `inside`."""
        return self.layout.kubeconfig("admin")

    def start(self, part: str) -> None:
        """Start a part (`kube-apiserver`, `node-1`, …) that was stopped."""
        self.order(do="start", part=part)

    def stop(self, part: str) -> None:
        """Ask a part to end, and wait until it has."""
        self.order(do="stop", part=part)

    def kill(self, part: str) -> None:
        """End a part at once; with a node, all its pods, as when a machine loses power."""
        self.order(do="kill", part=part)

    def exited(self) -> dict[str, int]:
        """The parts that are down, with their exit codes."""
        found: dict[str, int] = self.order(do="status")["exited"]
        return found

    def order(self, **order: str) -> dict[str, Any]:
        """Give the supervisor an order and return its answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(self.layout.control))
            with connection.makefile("rwb") as stream:
                stream.write(json.dumps(order).encode() + b"\n")
                stream.flush()
                answer: dict[str, Any] = json.loads(stream.readline() or b"{}")
        if "error" in answer:
            raise ClusterError(answer["error"])
        return answer

    def audit(self) -> Iterator[dict[str, Any]]:
        """Every request that the API server has answered, but for those of its own parts.

        The user's name is empty if the request was refused before authentication.
        """
        with self.layout.audit_log.open(encoding="utf-8") as log:
            for line in log:
                if line.endswith("\n"):  # the last one may be half written
                    entry: dict[str, Any] = json.loads(line)
                    entry["user"].setdefault("username", "")
                    yield entry

    def wait_until(self, *words: str, timeout_s: float = 60) -> None:
        """Wait until kubectl succeeds at something.

        Raises:
            ClusterError: when a part of the cluster has ended, or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.kubectl(*words, timeout_s=10)
                return
            except (ClusterError, subprocess.TimeoutExpired) as error:
                for name, code in self.exited().items():
                    tail = self.layout.log(name).read_text(errors="replace")[-2000:]
                    raise ClusterError(f"{name} ended with code {code}:\n{tail}") from error
                if time.monotonic() > deadline:
                    raise ClusterError(f"still not after {timeout_s:.0f} s: {error}") from error
                time.sleep(0.1)
