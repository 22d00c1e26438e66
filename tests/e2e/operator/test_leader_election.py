"""Leader election against a real API server: only the leader writes."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from tools.cluster.handle import ClusterError, OwnCluster, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.e2e.operator_process import OperatorProcess

    StartOperator = Callable[[str], OperatorProcess]
    ApplyText = Callable[[str, str], None]

WRITES = {"create", "update", "patch", "delete"}


def written_text(own: OwnCluster, namespace: str) -> str | None:
    try:
        found = own.get("configmap", "chat-config", "-n", namespace)
    except ClusterError:
        return None
    text: str = found["data"]["text"]
    return text


def writers(own: OwnCluster, namespace: str) -> list[str]:
    """Return the user of each write of a child or a status, in the order of the audit log."""
    return [
        entry["user"]["username"]
        for entry in own.audit()
        if entry["verb"] in WRITES
        and entry["responseStatus"]["code"] < 300
        and (reference := entry.get("objectRef", {})).get("namespace") == namespace
        and reference.get("resource") in {"configmaps", "llmservices"}
        and "serviceaccount" in entry["user"]["username"]
    ]


def test_a_stopping_operator_releases_the_lease_at_once(start_operator: StartOperator) -> None:
    one = start_operator("one")
    wait_for(lambda: one.has_logged("leading"), "one leads")
    two = start_operator("two")
    wait_for(lambda: two.has_logged("started"), "two stands by")
    one.signal(signal.SIGTERM)
    assert one.wait() == 0
    wait_for(lambda: two.has_logged("leading"), "two leads", timeout_s=6)


@pytest.mark.slow
def test_an_operator_that_lost_its_lease_while_suspended_writes_nothing_and_exits(
    own_cluster: OwnCluster, namespace: str, start_operator: StartOperator, apply_text: ApplyText
) -> None:
    one = start_operator("one")
    apply_text("chat", "before")
    wait_for(lambda: written_text(own_cluster, namespace) == "before", "one writes")
    two = start_operator("two")
    wait_for(lambda: two.has_logged("started"), "two stands by")
    one.signal(signal.SIGSTOP)
    apply_text("chat", "while it is suspended")
    wait_for(
        lambda: written_text(own_cluster, namespace) == "while it is suspended", "two takes over"
    )
    apply_text("chat", "more work")
    one.signal(signal.SIGCONT)
    assert one.wait() == 70
    wait_for(lambda: written_text(own_cluster, namespace) == "more work", "two continues")
    users = writers(own_cluster, namespace)
    assert users == sorted(users, key=[one.user, two.user].index), "one did not write after two"


@pytest.mark.slow
def test_an_operator_exits_when_it_cannot_renew_its_lease(
    own_cluster: OwnCluster, start_operator: StartOperator
) -> None:
    operator = start_operator("op")
    wait_for(lambda: operator.has_logged("leading"), "the operator leads")
    own_cluster.stop("kube-apiserver")
    try:
        assert operator.wait() == 70
    finally:
        own_cluster.start("kube-apiserver")
        own_cluster.wait_until("get", "--raw", "/readyz")
    assert "the Lease" in operator.log_file.read_text()
    assert "was not renewed" in operator.log_file.read_text()


def test_only_the_lease_is_written_while_nothing_changes(
    own_cluster: OwnCluster, namespace: str, start_operator: StartOperator, apply_text: ApplyText
) -> None:
    operator = start_operator("op")
    apply_text("chat", "hello")
    wait_for(lambda: written_text(own_cluster, namespace) == "hello", "the child")

    def reconciliations() -> int:
        return sum(line.get("phase") == "done" for line in operator.log())

    settled = reconciliations() + 3
    wait_for(lambda: reconciliations() >= settled, "the service has settled")
    before = len(list(own_cluster.audit()))
    wait_for(lambda: reconciliations() >= settled + 5, "five more reconciliations")
    calls = [
        (entry["verb"], entry["objectRef"]["resource"])
        for entry in list(own_cluster.audit())[before:]
        if entry["user"]["username"] == operator.user
    ]
    assert {resource for _, resource in calls} <= {"leases"}, calls
