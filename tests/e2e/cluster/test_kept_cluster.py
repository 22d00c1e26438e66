"""`make cluster` and `make cluster-down`: a cluster with the chart's default values.

No other test installs the default values: the operator manages all namespaces, with the permissions
of a ClusterRole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from tools.cluster import binaries, starting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.cluster.handle import OwnCluster

CHAT = starting.ROOT / "examples" / "chat.yaml"
OPERATOR = "system:serviceaccount:goodput-system:goodput"
CREATED_FOR_A_SERVICE = {
    *("deployments", "controllerrevisions", "services", "configmaps", "secrets"),
    *("serviceaccounts", "roles", "rolebindings", "poddisruptionbudgets"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A separate cache for the cluster of `make cluster`."""

    cache: Path

    @property
    def state(self) -> Path:
        return self.cache / "cluster" / "kept"

    def make(self, target: str) -> str:
        """Run the last command of `make TARGET` and return its output."""
        planned = subprocess.run(
            ["make", "--dry-run", "--no-print-directory", target],
            cwd=starting.ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        _, *words = planned.splitlines()[-1].split()
        ended = subprocess.run(
            [sys.executable, *words],
            cwd=starting.ROOT,
            env={**os.environ, "GOODPUT_CACHE": str(self.cache)},
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout


@pytest.fixture
def kept(own_cluster: OwnCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """A cache with the build and without a cluster."""
    cache = tmp_path_factory.mktemp("kept")  # a short name: a socket's path is bounded
    (cache / "cluster").mkdir()
    (cache / "cluster" / binaries.folder().name).symlink_to(binaries.folder())
    kept = Kept(cache=cache)
    yield kept
    kept.make("cluster-down")


@pytest.mark.slow
def test_a_kept_cluster_serves_in_every_namespace_and_leaves_no_process(kept: Kept) -> None:
    output = kept.make("cluster")
    exports = [line.strip() for line in output.splitlines() if line.startswith("  export ")]

    def user(script: str) -> str:
        """Run a command as in another terminal, after the printed exports; return its output."""
        lines = "\n".join([*exports, script])
        ended = subprocess.run(["bash", "-ec", lines], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    ready = "--for=condition=Ready --timeout=180s llmservice/chat"
    user(f"kubectl wait {ready}")
    assert user("which kubectl helm").split() == [
        str(kept.cache / "cluster" / binaries.folder().name / name) for name in ("kubectl", "helm")
    ]
    ours = Path(sys.executable).parent
    assert user("which goodput kubectl-goodput").split() == [
        str(ours / name) for name in ("goodput", "kubectl-goodput")
    ]
    user("kubectl create namespace elsewhere")
    user(f"kubectl apply -n elsewhere -f {CHAT}; kubectl wait -n elsewhere {ready}")
    bindings = json.loads(user("kubectl get rolebindings,clusterrolebindings -A -o json"))["items"]
    granted = {
        (binding["kind"], binding["roleRef"]["name"])
        for binding in bindings
        if {"kind": "ServiceAccount", "name": "goodput", "namespace": "goodput-system"}
        in binding.get("subjects", [])
    }
    assert granted == {("ClusterRoleBinding", "goodput"), ("RoleBinding", "goodput-lease")}

    cluster = starting.attach(kept.state)
    assert cluster is not None
    requests = [line for line in cluster.audit() if line["user"]["username"] == OPERATOR]
    assert [line for line in requests if line["responseStatus"]["code"] in {401, 403}] == []
    for namespace in ("default", "elsewhere"):
        created = {
            line["objectRef"]["resource"]
            for line in requests
            if line["responseStatus"]["code"] == 201
            and line["objectRef"].get("namespace") == namespace
        }
        assert created >= CREATED_FOR_A_SERVICE, namespace

    first = psutil.Process(cluster.pid)
    processes = [first, *first.parents()[:1], *first.children(recursive=True)]
    kept.make("cluster-down")
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    assert [path.name for path in (kept.cache / "cluster").iterdir()] == [binaries.folder().name]
