"""Operators against a real API server: who writes, and when nobody does."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
from tools.cluster.handle import ClusterError, OwnCluster

if TYPE_CHECKING:
    from collections.abc import Callable

    Until = Callable[..., Any]

WRITES = {"create", "update", "patch", "delete"}


def text_of(own: OwnCluster, namespace: str) -> str | None:
    try:
        found = own.get("configmap", "chat-config", "-n", namespace)
    except ClusterError:
        return None
    text: str = found["data"]["text"]
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


def test_an_operator_that_stops_gives_the_lease_back_at_once(
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
