"""Operators of the end-to-end tests.

`start_operator` gives processes beside the cluster, each with a service account of its own and
decisions that a test can foresee; `installed` gives the real one, from the chart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.e2e.operator.installed import RESTRICTED, Installed
from tools.cluster.handle import OwnCluster
from tools.cluster.installing import install_chart, publish_ours, uninstall_chart
from tools.cluster.layout import API_ADDRESS

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator

    from tools.cluster.handle import Cluster

HERE = Path(__file__).parent


@dataclass
class Process:
    """One operator: its process, its user, its log."""

    process: subprocess.Popen[bytes]
    user: str
    log_file: Path

    def log(self) -> list[dict[str, Any]]:
        """Every event so far; the last line may be half written."""
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def said(self, event: str) -> bool:
        return any(line["event"] == event for line in self.log())

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60) -> int:
        return self.process.wait(timeout=timeout_s)


def until(holds: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
    """Wait for something that another process does; what it returned."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = holds()
        if found:
            return found
        assert time.monotonic() < deadline, f"still not after {timeout_s:g} s: {what}"
        time.sleep(0.05)


@pytest.fixture(name="until", scope="session")
def until_fixture() -> Callable[..., Any]:
    return until


@pytest.fixture(scope="session")
def crd_is_ours(cluster: Cluster) -> Iterator[bool]:
    """Whether these tests brought the custom resource definition; then they take it away again."""
    name = "crd/llmservices.goodput.dev"
    ours = not cluster.kubectl("get", name, "--ignore-not-found")
    if ours:
        made = subprocess.run(
            [sys.executable, "-m", "goodput_operator.render.crd"],
            capture_output=True,
            text=True,
            check=True,
        )
        cluster.apply(made.stdout, "--server-side")
    cluster.wait("condition=Established", name)
    yield ours
    if ours:
        cluster.kubectl("delete", name, "--wait=false")


@pytest.fixture(scope="session")
def crd(crd_is_ours: bool) -> None:
    """The custom resource definition, established; where it was there it stays as it is."""


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> tuple[str, ...]:
    """What makes our images pullable, as flags of Helm; in our own cluster they are published."""
    if isinstance(cluster, OwnCluster):
        publish_ours(cluster)
        return ()
    values = os.environ.get("GOODPUT_VALUES")
    return ("--values", values) if values else ()


@pytest.fixture(scope="session")
def installed(
    cluster: Cluster, unattended: None, crd: None, images: tuple[str, ...]
) -> Iterator[Installed]:
    """The operator from the chart, for all tests of the session.

    The namespace admits hardened pods alone, so each test with pods shows that ours are: its
    level is Kubernetes' `restricted`, which OpenShift's restricted-v2 is made after.
    """
    namespace = f"from-chart-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", namespace)
    cluster.kubectl("label", "namespace", namespace, RESTRICTED)
    values = (
        f"crds.install=false,verbose=true,watchNamespaces={{{namespace}}},"
        f"prometheus.allowedUrls={{http://{API_ADDRESS}:9090}}"
    )
    installed = Installed(cluster=cluster, namespace=namespace)
    try:
        install_chart(cluster, *images, "--set", values, namespace=namespace)
        yield installed
        uninstall_chart(cluster, namespace=namespace)
    finally:
        installed.forwards.close()
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture
def asked(installed: Installed) -> Iterator[Callable[..., None]]:
    """Apply a service (as `Installed.apply` does), to be deleted after the test.

    Neither is waited for: use a name that no other test uses.
    """
    made: list[str] = []

    def ask(name: str, **spec: Any) -> None:
        made.append(name)
        installed.apply(name, **spec)

    yield ask
    for name in made:
        installed.kubectl("delete", "llmservice", name, "--ignore-not-found")


@pytest.fixture
def serve(installed: Installed) -> Iterator[Callable[..., None]]:
    """Apply a service and wait until it has settled.

    It is deleted after the test, and its pods are gone when the next one begins.
    """
    served: list[str] = []

    def make(name: str, **spec: Any) -> None:
        served.append(name)
        installed.apply(name, **spec)
        installed.settled(name)

    yield make
    for name in served:
        installed.kubectl("delete", "llmservice", name, "--ignore-not-found")
    for name in served:
        installed.wait("delete", "pods", "-l", f"goodput.dev/llmservice={name}", timeout_s=90)


@pytest.fixture
def start_operator(
    cluster: Cluster, unattended: None, crd: None, namespace: str, tmp_path: Path
) -> Iterator[Callable[..., Process]]:
    """Start an operator that looks after the test's namespace and holds its Lease there."""
    (tmp_path / "key").write_bytes(b"0123456789abcdef" * 2)
    started: list[Process] = []

    def start(name: str, *options: str) -> Process:
        kubeconfig = _kubeconfig(cluster, namespace, name, tmp_path)
        log = tmp_path / f"{name}-{len(started)}.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [
                    *(sys.executable, HERE / "stand_in.py"),
                    *("--kubeconfig", kubeconfig, "--key-file", tmp_path / "key"),
                    *("--engine-image", "engine", "--router-image", "router"),
                    *("--namespace", namespace, "--lease-namespace", namespace),
                    *("--probe-port", "0", "--verbose", *options),
                ],
                stderr=stderr,
                env=os.environ,
            )
        user = f"system:serviceaccount:{namespace}:{name}"
        started.append(Process(process=process, user=user, log_file=log))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait(timeout=30)


def _kubeconfig(cluster: Cluster, namespace: str, name: str, folder: Path) -> Path:
    """Credentials of a service account that may do what operators do, in this namespace."""
    cluster.apply(
        [
            _object("ServiceAccount", "v1", namespace, name),
            {
                **_object("RoleBinding", "rbac.authorization.k8s.io/v1", namespace, name),
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "ClusterRole",
                    "name": "cluster-admin",
                },
                "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
            },
        ]
    )
    token = cluster.kubectl("create", "token", name, "-n", namespace).strip()
    config = yaml.safe_load(cluster.kubeconfig.read_text(encoding="utf-8"))
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    path = folder / f"{name}.kubeconfig"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def _object(kind: str, version: str, namespace: str, name: str) -> dict[str, Any]:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace},
    }


@pytest.fixture
def make_service(cluster: Cluster, namespace: str) -> Callable[..., None]:
    """Apply a service; the stand-in's decisions read its annotation `text`."""

    def make(name: str, text: str) -> None:
        cluster.apply(
            {
                "apiVersion": "goodput.dev/v1alpha1",
                "kind": "LLMService",
                "metadata": {
                    "name": name,
                    "namespace": namespace,
                    "annotations": {"text": text},
                },
                "spec": {
                    "model": {"source": "emulated://unit"},
                    "slo": {
                        "classes": [{"name": "chat", "ttftMs": 500, "tpotMs": 50}],
                        "default": "chat",
                    },
                },
            },
            "--server-side",
            "--force-conflicts",
            "--field-manager=a-user",
        )

    return make
