"""Operators of the end-to-end tests.

`installation` is the real operator, installed from the chart. `start_operator` starts processes
beside the cluster, each with its own service account and with predictable decisions.
"""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from tools.cluster.handle import OwnCluster
from tools.cluster.installing import install_chart, publish_ours, uninstall_chart
from tools.cluster.layout import API_ADDRESS
from tools.e2e.installation import RESTRICTED, ChartRelease
from tools.e2e.operator_process import OperatorProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tools.cluster.handle import ClusterHandle


@pytest.fixture(scope="session")
def images(cluster: ClusterHandle) -> tuple[str, ...]:
    """Helm options that name images which the cluster can pull."""
    if isinstance(cluster, OwnCluster):
        publish_ours(cluster)
        return ()
    values = os.environ.get("GOODPUT_VALUES")
    return ("--values", values) if values else ()


@pytest.fixture(scope="session")
def installation(
    cluster: ClusterHandle, no_other_operator: None, crd: None, images: tuple[str, ...]
) -> Iterator[ChartRelease]:
    """The operator from the chart, for all tests of the session.

    Its namespace admits only hardened pods, so each test with pods shows that ours are hardened.
    OpenShift's restricted-v2 corresponds to this level, `restricted`.
    """
    namespace = f"from-chart-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", namespace)
    cluster.kubectl("label", "namespace", namespace, RESTRICTED)
    values = (
        f"crds.install=false,verbose=true,page.enabled=true,watchNamespaces={{{namespace}}},"
        "rbac.readNodes=true,"
        f"prometheus.allowedUrls={{http://{API_ADDRESS}:9090}},"
        f"pinnedRegistries={{http://{API_ADDRESS}:5000}}"
    )
    installation = ChartRelease(cluster=cluster, namespace=namespace)
    try:
        install_chart(cluster, *images, "--set", values, namespace=namespace)
        yield installation
        uninstall_chart(cluster, namespace=namespace)
    finally:
        installation.forwards.close()
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture
def apply_service(installation: ChartRelease) -> Iterator[Callable[..., None]]:
    """Apply a service (`ChartRelease.apply`) and delete it after the test.

    The fixture waits for neither, so the name must be unique among all tests.
    """
    applied: list[str] = []

    def apply(name: str, **spec: Any) -> None:
        applied.append(name)
        installation.apply(name, **spec)

    yield apply
    for name in applied:
        installation.kubectl("delete", "llmservice", name, "--ignore-not-found")


@pytest.fixture
def serve(installation: ChartRelease) -> Iterator[Callable[..., None]]:
    """Apply a service and wait until it has settled; delete it and its pods after the test."""
    served: list[str] = []

    def apply(name: str, **spec: Any) -> None:
        served.append(name)
        installation.apply(name, **spec)
        installation.wait_settled(name)

    yield apply
    for name in served:
        installation.kubectl("delete", "llmservice", name, "--ignore-not-found")
    installation.wait_deleted(*served)


@pytest.fixture
def start_operator(
    cluster: ClusterHandle, no_other_operator: None, crd: None, namespace: str, tmp_path: Path
) -> Iterator[Callable[[str], OperatorProcess]]:
    """Start an operator that manages the test's namespace."""
    started: list[OperatorProcess] = []

    def start(name: str) -> OperatorProcess:
        started.append(OperatorProcess.start(cluster, namespace, name, tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait(timeout=30)


@pytest.fixture
def apply_text(cluster: ClusterHandle, namespace: str) -> Callable[[str, str], None]:
    """Apply a service with an annotation `text`, from which `start_operator` makes a ConfigMap."""

    def apply(name: str, text: str) -> None:
        metadata = {"name": name, "namespace": namespace, "annotations": {"text": text}}
        service = {
            "apiVersion": "goodput.dev/v1alpha1",
            "kind": "LLMService",
            "metadata": metadata,
            "spec": {
                "model": {"source": "emulated://unit"},
                "slo": {
                    "classes": [{"name": "chat", "ttftMs": 500, "tpotMs": 50}],
                    "default": "chat",
                },
            },
        }
        cluster.apply(service, "--server-side", "--force-conflicts", "--field-manager=a-user")

    return apply
