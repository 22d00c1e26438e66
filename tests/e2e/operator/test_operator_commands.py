"""The operator as it is shipped, by either of its commands: it makes what a service needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.cluster.handle import Cluster

BIN = Path(sys.executable).parent
GOODPUT = [sys.executable, "-m", "goodput_core", "operator"]
KOPF = [str(BIN / "kopf"), "run", "-m", "goodput_operator.manager.kopf_run"]


@pytest.fixture
def options(cluster: Cluster, namespace: str, tmp_path: Path) -> list[str]:
    (tmp_path / "key").write_bytes(b"0123456789abcdef" * 2)
    return [
        *("--engine-image", "engine:1", "--router-image", "router:1"),
        *("--key-file", str(tmp_path / "key"), "--kubeconfig", str(cluster.kubeconfig)),
        *("--namespace", namespace, "--lease-namespace", namespace, "--probe-port", "0"),
    ]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def run(*command: str, **environment: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("wb") as log:
            started.append(subprocess.Popen(command, stderr=log, env={**os.environ, **environment}))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait(timeout=30)


@pytest.mark.parametrize("which", ["goodput operator", "kopf run"])
def test_it_makes_what_a_service_needs_and_ends_when_asked(
    cluster: Cluster,
    unattended: None,
    crd: None,
    namespace: str,
    options: list[str],
    start: Callable[..., subprocess.Popen[bytes]],
    make_service: Callable[..., None],
    until: Callable[..., Any],
    which: str,
) -> None:
    if which == "goodput operator":
        process = start(*GOODPUT, *options)
    else:
        process = start(*KOPF, "-n", namespace, GOODPUT_OPERATOR_OPTIONS=" ".join(options))
    make_service("chat", "")

    def made() -> set[str]:
        kinds = "deployments,services,configmaps,poddisruptionbudgets,roles,controllerrevisions"
        found = cluster.get(kinds, "-n", namespace, "-l", "goodput.dev/llmservice=chat")
        return {one["kind"] for one in found["items"]}

    kinds = {
        *("Deployment", "Service", "ConfigMap"),
        *("PodDisruptionBudget", "Role", "ControllerRevision"),
    }
    until(lambda: made() == kinds, "all kinds of objects")
    until(lambda: cluster.get("llmservice", "chat", "-n", namespace).get("status"), "its status")
    secrets = cluster.get("secrets", "-n", namespace, "-l", "goodput.dev/llmservice=chat")
    assert len(secrets["items"]) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
