"""What the cache holds after Kopf has listed again, having heard nothing for a while."""

from __future__ import annotations

from typing import Any

import pytest

from goodput_operator.cluster.api.cache import Cache

KEY = ("ns", "chat")
OTHER = ("elsewhere", "chat")


def body(
    uid: str, version: int, *, kind: str = "Deployment", namespace: str = "ns"
) -> dict[str, Any]:
    metadata = {"name": "chat", "namespace": namespace, "uid": uid, "resourceVersion": str(version)}
    return {"kind": kind, "metadata": metadata}


def listing(*uids: str, version: int) -> dict[str, Any]:
    items = [{"metadata": {"uid": uid}} for uid in uids]
    return {"metadata": {"resourceVersion": str(version)}, "items": items}


class Indexes:
    """Dictionaries in place of Kopf's, from which nothing goes without an event."""

    def __init__(self) -> None:
        self.services: dict[Any, list[Any]] = {}
        self.children: dict[Any, list[Any]] = {}
        self.pods: dict[Any, list[Any]] = {}
        self.cache = Cache(services=self.services, children=self.children, pods=self.pods)


@pytest.fixture
def indexes() -> Indexes:
    return Indexes()


def uids(bodies: Any) -> list[str]:
    return [one["metadata"]["uid"] for one in bodies]


def test_a_child_that_a_list_lacks_stands_no_more_and_its_service_is_named(
    indexes: Indexes,
) -> None:
    indexes.children[KEY] = [body("kept", 3), body("gone", 4)]
    assert indexes.cache.listed("Deployment", "", listing("kept", "new", version=9)) == {KEY}
    assert uids(indexes.cache.children(KEY)) == ["kept"]


def test_a_service_that_a_list_lacks_is_none(indexes: Indexes) -> None:
    indexes.services[KEY] = [body("gone", 4, kind="LLMService")]
    assert indexes.cache.keys() == [KEY]
    assert indexes.cache.listed("LLMService", "", listing(version=9)) == {KEY}
    assert indexes.cache.service(KEY) is None
    assert indexes.cache.keys() == []


def test_a_namesake_that_came_meanwhile_is_found(indexes: Indexes) -> None:
    gone, namesake = body("gone", 4, kind="LLMService"), body("namesake", 8, kind="LLMService")
    indexes.services[KEY] = [gone, namesake]
    indexes.cache.listed("LLMService", "", listing("namesake", version=9))
    assert indexes.cache.service(KEY) == namesake


def test_what_came_after_a_list_stands(indexes: Indexes) -> None:
    indexes.cache.listed("Pod", "", listing(version=9))
    indexes.pods[KEY] = [body("late", 10, kind="Pod")]
    assert uids(indexes.cache.pods(KEY)) == ["late"]


def test_what_kopf_takes_in_only_after_a_list_that_lacks_it_does_not_stand(
    indexes: Indexes,
) -> None:
    indexes.cache.listed("Pod", "", listing(version=9))
    indexes.pods[KEY] = [body("told late", 8, kind="Pod")]
    assert indexes.cache.pods(KEY) == ()


@pytest.mark.parametrize(
    ("kind", "namespace", "lost"),
    [
        ("Deployment", "ns", {KEY}),
        ("Deployment", "elsewhere", {OTHER}),
        ("Deployment", "third", set()),
        ("Service", "", set()),
        ("Deployment", "", {KEY, OTHER}),
    ],
)
def test_a_list_says_nothing_of_other_namespaces_and_kinds(
    indexes: Indexes, kind: str, namespace: str, lost: set[tuple[str, str]]
) -> None:
    indexes.children[KEY] = [body("a", 3)]
    indexes.children[OTHER] = [body("b", 4, namespace="elsewhere")]
    assert indexes.cache.listed(kind, namespace, listing(version=9)) == lost
    standing = {key for key in (KEY, OTHER) if indexes.cache.children(key)}
    assert standing == {KEY, OTHER} - lost
