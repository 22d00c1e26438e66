"""The shipped operator, started by either of its commands, creates the objects of a service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tools.cluster.handle import wait_for
from tools.e2e.operator_process import operator_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.cluster.handle import ClusterHandle

GOODPUT = [sys.executable, "-m", "goodput_core", "operator"]
KOPF = [
    *(str(Path(sys.executable).parent / "kopf"), "run"),
    *("-m", "goodput_operator.manager.kopf_run"),
]
CHILDREN = {
    *("Deployment", "Service", "ConfigMap"),
    *("PodDisruptionBudget", "Role", "ControllerRevision"),
}


@pytest.mark.usefixtures("no_other_operator", "crd")
@pytest.mark.parametrize("command", ["goodput operator", "kopf run"])
def test_an_operator_creates_the_children_and_exits_on_sigterm(
    cluster: ClusterHandle,
    namespace: str,
    apply_text: Callable[[str, str], None],
    tmp_path: Path,
    command: str,
) -> None:
    options = operator_options(tmp_path, namespace, cluster.kubeconfig)
    environment = dict(os.environ)
    if command == "goodput operator":
        words = [*GOODPUT, *options]
    else:
        words = [*KOPF, "-n", namespace]
        environment["GOODPUT_OPERATOR_OPTIONS"] = " ".join(options)
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(words, stderr=log, env=environment) as process,
    ):
        try:
            apply_text("chat", "")
            of_service = ("-n", namespace, "-l", "goodput.dev/llmservice=chat")

            def created() -> set[str]:
                found = cluster.get(",".join(f"{kind.lower()}s" for kind in CHILDREN), *of_service)
                return {one["kind"] for one in found["items"]}

            wait_for(lambda: created() == CHILDREN, "all kinds of objects")
            wait_for(
                lambda: cluster.get("llmservice", "chat", "-n", namespace).get("status"),
                "the service's status",
            )
            assert len(cluster.get("secrets", *of_service)["items"]) == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
