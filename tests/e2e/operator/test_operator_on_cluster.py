"""The operator against a real API server: what it writes, what it leaves alone, who writes."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
from tests.e2e.cluster.handle import Cluster, ClusterError, OwnCluster

if TYPE_CHECKING:
    from collections.abc import Callable

    Until = Callable[..., Any]

WRITES = {"create", "update", "patch", "delete"}


def text_of(cluster: Cluster, namespace: str, name: str = "chat-config") -> str | None:
    try:
        found = cluster.get("configmap", name, "-n", namespace)
    except ClusterError:
        return None
    text: str | None = found["data"].get("text")
    return text


def writers(own: OwnCluster, namespace: str) -> list[str]:
    """Who wrote a child or a status, in the API server's own record, in this order."""
    return [
        entry["user"]["username"]
        for entry in own.audit()
        if entry["verb"] in WRITES
        and entry["responseStatus"]["code"] < 300
        and (reference := entry.get("objectRef", {})).get("namespace") == namespace
        and reference.get("resource") in {"configmaps", "llmservices"}
        and "serviceaccount" in entry["user"]["username"]
    ]


def test_a_users_object_carries_no_mark_of_the_operator_and_is_deleted_while_it_is_away(
    cluster: Cluster,
    namespace: str,
    start_operator: Callable[..., Any],
    make_service: Callable[..., None],
    until: Until,
) -> None:
    operator = start_operator("op")
    make_service("chat", "hello")
    until(lambda: text_of(cluster, namespace) == "hello", "the child")
    until(lambda: cluster.get("llmservice", "chat", "-n", namespace).get("status"), "the status")
    service = cluster.get("llmservice", "chat", "-n", namespace, "--show-managed-fields")
    metadata = service["metadata"]
    assert "finalizers" not in metadata
    assert metadata["annotations"] == {"text": "hello"}
    assert "labels" not in metadata
    managers = [(m["manager"], m.get("subresource")) for m in metadata["managedFields"]]
    assert sorted(managers) == [("a-user", None), ("goodput-operator", "status")]

    operator.signal(signal.SIGTERM)
    assert operator.wait() == 0
    cluster.kubectl("delete", "llmservice", "chat", "-n", namespace, "--timeout=30s")
    until(lambda: text_of(cluster, namespace) is None, "the child goes with its owner")


def test_what_somebody_changed_is_put_back_and_who_and_what_is_said(
    cluster: Cluster,
    namespace: str,
    start_operator: Callable[..., Any],
    make_service: Callable[..., None],
    until: Until,
) -> None:
    start_operator("op")
    make_service("chat", "hello")
    until(lambda: text_of(cluster, namespace) == "hello", "the child")
    patch = {"data": {"text": "edited", "theirs": "stays"}}
    cluster.kubectl(
        *("patch", "configmap", "chat-config", "-n", namespace, "--type=merge"),
        *("--field-manager=somebody", "-p", json.dumps(patch)),
    )
    until(lambda: text_of(cluster, namespace) == "hello", "it is put back")
    kept = cluster.get("configmap", "chat-config", "-n", namespace)["data"]
    assert kept == {"text": "hello", "theirs": "stays"}

    def events() -> list[str]:
        found = cluster.get("events", "-n", namespace)["items"]
        return [event["message"] for event in found if event["reason"] == "Overwritten"]

    assert until(events, "the Event") == [
        'ConfigMap chat-config was put back as the LLMService says: "somebody" had set .data.text'
    ]
    cluster.kubectl("delete", "configmap", "chat-config", "-n", namespace)
    until(lambda: text_of(cluster, namespace) == "hello", "a child that is deleted returns")


def test_a_foreign_object_in_the_way_stays_as_it_is_until_somebody_removes_it(
    cluster: Cluster,
    namespace: str,
    start_operator: Callable[..., Any],
    make_service: Callable[..., None],
    until: Until,
) -> None:
    # Without a field in common a server-side apply would meet no conflict, and join it.
    cluster.kubectl("create", "configmap", "chat-config", "-n", namespace)
    before = cluster.get("configmap", "chat-config", "-n", namespace)
    start_operator("op")
    make_service("chat", "hello")

    def said() -> str:
        status = cluster.get("llmservice", "chat", "-n", namespace).get("status", {})
        return "".join(c["message"] for c in status.get("conditions", []))

    until(said, "the condition names it")
    assert said() == (
        "ConfigMap chat-config ConfigMap chat-config exists and is not controlled by "
        "LLMService chat"
    )
    assert cluster.get("configmap", "chat-config", "-n", namespace) == before
    cluster.kubectl("delete", "configmap", "chat-config", "-n", namespace)
    until(lambda: text_of(cluster, namespace) == "hello", "then ours is made")
    until(lambda: not said(), "and nothing is wrong any more")


def test_a_quota_speaks_in_the_status_in_its_own_words(
    cluster: Cluster,
    namespace: str,
    start_operator: Callable[..., Any],
    make_service: Callable[..., None],
    until: Until,
) -> None:
    cluster.kubectl("create", "quota", "none", "-n", namespace, "--hard=count/configmaps=0")
    # The quota counts only once its controller has looked at it.
    until(
        lambda: cluster.get("quota", "none", "-n", namespace).get("status", {}).get("hard"),
        "the quota is in force",
    )
    start_operator("op")
    make_service("chat", "hello")

    def said() -> str:
        status = cluster.get("llmservice", "chat", "-n", namespace).get("status", {})
        return "".join(c["message"] for c in status.get("conditions", []))

    assert "exceeded quota: none" in until(said, "the condition")
    cluster.kubectl("delete", "quota", "none", "-n", namespace)
    until(lambda: text_of(cluster, namespace) == "hello", "what was refused is tried again")


def test_an_operator_that_stops_gives_the_lease_back_at_once(
    own_cluster: OwnCluster,
    namespace: str,
    start_operator: Callable[..., Any],
    make_service: Callable[..., None],
    until: Until,
) -> None:
    one = start_operator("one")
    until(lambda: one.said("leading"), "one leads")
    two = start_operator("two")
    until(lambda: two.said("started"), "two stands by")
    one.signal(signal.SIGTERM)
    assert one.wait() == 0
    until(lambda: two.said("leading"), "two leads", timeout_s=6)


@pytest.mark.slow
def test_an_operator_that_was_frozen_writes_nothing_when_it_goes_on_and_ends(
    own_cluster: OwnCluster,
    namespace: str,
    start_operator: Callable[..., Any],
    make_service: Callable[..., None],
    until: Until,
) -> None:
    one = start_operator("one")
    make_service("chat", "before")
    until(lambda: text_of(own_cluster, namespace) == "before", "one writes")
    two = start_operator("two")
    until(lambda: two.said("started"), "two stands by")
    one.signal(signal.SIGSTOP)
    make_service("chat", "while it is frozen")
    until(lambda: text_of(own_cluster, namespace) == "while it is frozen", "two takes over")
    make_service("chat", "more work")
    one.signal(signal.SIGCONT)
    assert one.wait() == 70
    until(lambda: text_of(own_cluster, namespace) == "more work", "two goes on")
    users = writers(own_cluster, namespace)
    assert users == sorted(users, key=[one.user, two.user].index), "never in turns"


@pytest.mark.slow
def test_an_api_server_that_stays_away_costs_the_lease_and_ends_the_process(
    own_cluster: OwnCluster,
    namespace: str,
    start_operator: Callable[..., Any],
    make_service: Callable[..., None],
    until: Until,
) -> None:
    operator = start_operator("op")
    until(lambda: operator.said("leading"), "it leads")
    own_cluster.stop("kube-apiserver")
    try:
        assert operator.wait() == 70
    finally:
        own_cluster.start("kube-apiserver")
        own_cluster.wait_until("get", "--raw", "/readyz")
        # It would watch again only most of a minute later, and tests that follow need it.
        own_cluster.stop("kube-controller-manager")
        own_cluster.start("kube-controller-manager")
    assert "the Lease" in operator.log_file.read_text()
    assert "was not renewed" in operator.log_file.read_text()


def test_while_nothing_changes_only_the_lease_is_written(
    own_cluster: OwnCluster,
    namespace: str,
    start_operator: Callable[..., Any],
    make_service: Callable[..., None],
    until: Until,
) -> None:
    operator = start_operator("op")
    make_service("chat", "hello")
    until(lambda: text_of(own_cluster, namespace) == "hello", "the child")

    def turns() -> int:
        return sum(line.get("phase") == "done" for line in operator.log())

    settled = turns() + 3
    until(lambda: turns() >= settled, "it has settled")
    before = len(list(own_cluster.audit()))
    until(lambda: turns() >= settled + 5, "five more turns")
    calls = [
        (entry["verb"], entry["objectRef"]["resource"])
        for entry in list(own_cluster.audit())[before:]
        if entry["user"]["username"] == operator.user
    ]
    assert {resource for _, resource in calls} <= {"leases"}, calls
