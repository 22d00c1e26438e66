"""Deletions that no watch tells of: they happen while the operator hears nothing.

Its watches break, and the API server that it finds afterwards knows nothing of the time before
its own start: it answers `410 Gone`, and everything is listed again.
"""

from __future__ import annotations

import signal
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.operator.conftest import Process
    from tools.cluster.handle import OwnCluster


def looked_after(operator: Process) -> set[str]:
    """The services that the operator remembers, as its metrics name them."""
    [port] = [line["probe_port"] for line in operator.log() if line["event"] == "started"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {name for name in ("kept", "deleted") if f'llmservice="{name}"' in text}


@pytest.mark.slow
def test_what_was_deleted_while_nothing_was_heard_is_noticed_by_the_same_process(
    own_cluster: OwnCluster,
    namespace: str,
    start_operator: Callable[..., Process],
    make_service: Callable[..., None],
    until: Callable[..., Any],
) -> None:
    operator = start_operator("op")
    for name in ("kept", "deleted"):
        make_service(name, "hello")
    until(lambda: operator.said("leading"), "it leads")
    until(lambda: looked_after(operator) == {"kept", "deleted"}, "both are looked after")
    own_cluster.get("configmap", "kept-config", "-n", namespace)

    operator.signal(signal.SIGSTOP)
    own_cluster.kill("kube-apiserver")
    own_cluster.start("kube-apiserver")
    own_cluster.wait_until("get", "--raw", "/readyz")
    deleted = ("llmservice/deleted", "configmap/kept-config")
    own_cluster.kubectl("delete", *deleted, "-n", namespace, "--wait=false")
    operator.signal(signal.SIGCONT)

    until(lambda: looked_after(operator) == {"kept"}, "the service is given up")
    own_cluster.wait("create", "configmap/kept-config", "-n", namespace)
    assert not operator.said("ended"), "and what it has measured is not lost"
