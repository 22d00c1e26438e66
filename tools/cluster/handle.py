"""Handles of a cluster for tests: kubectl and, for a cluster of our own, its processes.

`ClusterHandle` needs only a kubeconfig. `OwnCluster` also controls the machines of the cluster, so
a test that uses it cannot run on another cluster.
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
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
from tools.cluster.images import publish
from tools.cluster.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.cluster.images import Image

__all__ = ["ClusterError", "ClusterHandle", "NamespaceHandle", "OwnCluster", "wait_for"]

_Found = TypeVar("_Found")


class ClusterError(Exception):
    """A command of the cluster failed; the text is the cluster's message."""


def wait_for(check: Callable[[], _Found], description: str, timeout_s: float = 120) -> _Found:
    """Repeat a check until its result is true, and return that result.

    It pauses for as long as the check took: kubectl needs a fifth of a second of CPU time, and the
    cluster that it waits for runs on the same cores. It never pauses for long, because some checks
    wait for states that last for a second.

    Raises:
        AssertionError: the check was not true within the time limit.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if found := check():
            return found
        ended = time.monotonic()
        assert ended < deadline, f"not after {timeout_s:g} s: {description}"
        time.sleep(min(max(0.05, ended - began), 0.3))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterHandle:
    """Any cluster.

    Args:
        kubeconfig: credentials of an administrator.
        binaries: folder of kubectl and helm.
    """

    kubeconfig: Path
    binaries: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a program that uses the cluster: this process's, with the kubeconfig."""
        path = f"{self.binaries}:{os.environ['PATH']}"
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": path}

    def kubectl(self, *words: str, stdin: str | None = None, timeout_s: float = 120) -> str:
        """Run kubectl and return its output.

        Raises:
            ClusterError: kubectl failed; the text is its message.
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
        """Return an object, or a list of objects with `items`, from `kubectl get … -o json`."""
        decoded: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json"))
        return decoded

    def wait(self, condition: str, *words: str, timeout_s: int = 120) -> None:
        """Wait as `kubectl wait --for=CONDITION` does.

        Raises:
            ClusterError: the condition was not met in time; the text describes the object.
        """
        limit = f"--timeout={timeout_s}s"
        try:
            self.kubectl("wait", f"--for={condition}", limit, *words, timeout_s=timeout_s + 10)
        except ClusterError as error:
            described = ""
            with contextlib.suppress(ClusterError):  # there may be nothing to describe
                described = self.kubectl("describe", *words)
            raise ClusterError(f"{error}\n{described}") from error


@dataclass(frozen=True, kw_only=True)
class NamespaceHandle:
    """One namespace of a cluster."""

    cluster: ClusterHandle
    namespace: str

    def kubectl(self, *words: str, stdin: str | None = None, timeout_s: float = 120) -> str:
        """Run kubectl in the namespace; see `ClusterHandle.kubectl`."""
        return self.cluster.kubectl("-n", self.namespace, *words, stdin=stdin, timeout_s=timeout_s)

    def get(self, *words: str) -> dict[str, Any]:
        """Return an object of the namespace, or a list; see `ClusterHandle.get`."""
        return self.cluster.get(*words, "-n", self.namespace)

    def wait(self, condition: str, *words: str, timeout_s: int = 120) -> None:
        """Wait for a condition of an object in the namespace; see `ClusterHandle.wait`."""
        self.cluster.wait(condition, *words, "-n", self.namespace, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCluster(ClusterHandle):
    """A cluster that this tool started, whose processes can be stopped, killed and restarted.

    Args:
        layout: files of the cluster.
        pid: first process inside its namespaces.
        process: the process that started it, with the pipe whose closing ends the cluster; None if
            another process started the cluster.
    """

    layout: Layout
    pid: int
    process: subprocess.Popen[bytes] | None = None

    def publish(self, images: dict[str, Image]) -> None:
        """Add images that the nodes can pull."""
        publish(self.layout.catalogue, images)

    def inside(self, *command: str) -> list[str]:
        """Return the command line that runs a command in the cluster's network.

        There, services and pods are reachable, and `inner_kubeconfig` is valid. The file system is
        this machine's.
        """
        enter = ["nsenter", f"--target={self.pid}", "--user", "--net", "--preserve-credentials"]
        return [*enter, "--", *command]

    def processes_of(self, pod: str) -> list[psutil.Process]:
        """Return the processes of a pod's containers, each before its children."""
        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it may have ended
                if process.environ().get("HOSTNAME") == pod:
                    found.append(process)
        return found

    @property
    def inner_kubeconfig(self) -> Path:
        """The administrator's credentials for a command inside the cluster's network."""
        return self.layout.kubeconfig("admin")

    def start(self, part: str) -> None:
        """Start a part (`kube-apiserver`, `node-1`, …) that does not run."""
        self.order(do="start", part=part)

    def stop(self, part: str) -> None:
        """Send SIGTERM to a part and wait for its end."""
        self.order(do="stop", part=part)

    def kill(self, part: str) -> None:
        """Kill a part; a node is killed with all its pods, as if a machine lost power."""
        self.order(do="kill", part=part)

    def exited(self) -> dict[str, int]:
        """Return the exit codes of the parts that have ended."""
        found: dict[str, int] = self.order(do="status")["exited"]
        return found

    def starts(self, part: str) -> int:
        """Return how often a part was started."""
        counts: dict[str, int] = self.order(do="status")["starts"]
        return counts.get(part, 0)

    def order(self, **order: str) -> dict[str, Any]:
        """Send an order to the supervisor and return its response."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(self.layout.control))
            with connection.makefile("rwb") as stream:
                stream.write(json.dumps(order).encode() + b"\n")
                stream.flush()
                response: dict[str, Any] = json.loads(stream.readline() or b"{}")
        if "error" in response:
            raise ClusterError(response["error"])
        return response

    def audit(self) -> Iterator[dict[str, Any]]:
        """Yield all requests to the API server except those of the cluster's parts.

        The user's name is empty if the request was rejected before authentication.
        """
        with self.layout.audit_log.open(encoding="utf-8") as log:
            for line in log:
                if line.endswith("\n"):  # the last line may be incomplete
                    entry: dict[str, Any] = json.loads(line)
                    entry["user"].setdefault("username", "")
                    yield entry

    def wait_until(self, *words: str, timeout_s: float = 120) -> None:
        """Repeat a kubectl command until it succeeds.

        Raises:
            ClusterError: a part of the cluster has ended, or the command did not succeed in time.
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
                    raise ClusterError(f"not after {timeout_s:.0f} s: {error}") from error
                time.sleep(0.1)
