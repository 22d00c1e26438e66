"""Deletions while the operator is suspended, which none of its watches reports.

Its watches break, and the restarted API server has no history from before its start. It responds
with `410 Gone`, and the operator lists everything again.
"""

from __future__ import annotations

import signal
import urllib.request
from typing import TYPE_CHECKING

import pytest
from tools.cluster.handle import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.cluster.handle import OwnCluster
    from tools.e2e.operator_process import OperatorProcess


def managed_services(operator: OperatorProcess) -> set[str]:
    """Return the names of the services in the operator's metrics."""
    [port] = [line["probe_port"] for line in operator.log() if line["event"] == "started"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {name for name in ("kept", "deleted") if f'llmservice="{name}"' in text}


@pytest.mark.slow
def test_a_suspended_operator_finds_deletions_afterwards_without_a_restart(
    own_cluster: OwnCluster,
    namespace: str,
    start_operator: Callable[[str], OperatorProcess],
    apply_text: Callable[[str, str], None],
) -> None:
    operator = start_operator("op")
    for name in ("kept", "deleted"):
        apply_text(name, "hello")
    wait_for(lambda: operator.has_logged("leading"), "the operator leads")
    wait_for(lambda: managed_services(operator) == {"kept", "deleted"}, "it manages both services")
    own_cluster.get("configmap", "kept-config", "-n", namespace)

    operator.signal(signal.SIGSTOP)
    own_cluster.kill("kube-apiserver")
    own_cluster.start("kube-apiserver")
    own_cluster.wait_until("get", "--raw", "/readyz")
    deleted = ("llmservice/deleted", "configmap/kept-config")
    own_cluster.kubectl("delete", *deleted, "-n", namespace, "--wait=false")
    operator.signal(signal.SIGCONT)

    wait_for(lambda: managed_services(operator) == {"kept"}, "the deleted service is removed")
    own_cluster.wait("create", "configmap/kept-config", "-n", namespace)
    assert not operator.has_logged("ended"), "the same process, with its measurements"
