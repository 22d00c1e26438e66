"""The cache has the latest listed or watched state of objects, in any order of arrival."""

from __future__ import annotations

from typing import Any

import pytest

from goodput_core.contract import (
    ANNOTATION_SERVICE_UID,
    OBJECT_LABEL_LLMSERVICE,
    OBJECT_LABEL_TRACEREPLAY,
)
from goodput_operator.kube.cache import Cache, ReplayKey

KEY = ("ns", "chat")
OTHER = ("elsewhere", "chat")
KINDS = ("LLMService", "Pod", "Deployment", "Service")


def body(
    uid: str, version: int, *, kind: str = "Deployment", namespace: str = "ns", name: str = "chat"
) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": uid,
        "resourceVersion": str(version),
        "labels": {OBJECT_LABEL_LLMSERVICE: "chat"},
        "managedFields": [{}],
    }
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata}


def listing(*items: dict[str, Any], version: int) -> dict[str, Any]:
    """A response of the API server: listed items have no kind."""
    bare = [{k: v for k, v in item.items() if k not in ("apiVersion", "kind")} for item in items]
    metadata = {"resourceVersion": str(version)}
    return {"apiVersion": "v1", "metadata": metadata, "items": bare}


def uids(bodies: Any) -> list[str]:
    return [one["metadata"]["uid"] for one in bodies]


@pytest.fixture
def cache() -> Cache:
    """Return a cache in which every kind was listed without objects."""
    cache = Cache((kind, "") for kind in KINDS)
    for kind in KINDS:
        cache.replace(kind, "", listing(version=1))
    return cache


def test_the_cache_is_complete_when_every_kind_is_listed() -> None:
    cache = Cache((kind, "") for kind in KINDS)
    for kind in KINDS:
        assert not cache.complete
        cache.replace(kind, "", listing(version=1))
    assert cache.complete


def test_listed_objects_are_found_by_service_and_have_no_managed_fields(cache: Cache) -> None:
    cache.replace("LLMService", "", listing(body("s", 2), version=5))
    cache.replace("Deployment", "", listing(body("d", 3), version=5))
    cache.replace("Service", "", listing(body("e", 3), body("f", 3, namespace="b"), version=5))
    cache.replace("Pod", "", listing(body("p", 4), version=5))
    assert cache.services() == [KEY]
    assert uids(cache.children(KEY)) == ["d", "e"]
    (pod,) = cache.pods(KEY)
    expected = body("p", 4, kind="Pod")
    del expected["metadata"]["managedFields"]
    assert pod == expected
    assert uids(cache.children(("b", "chat"))) == ["f"]


def test_the_pods_of_a_deleted_service_are_not_those_of_another_of_its_name(cache: Cache) -> None:
    def pod(name: str, service: str | None) -> None:
        found = body(name, 3, kind="Pod")
        if service is not None:
            found["metadata"]["annotations"] = {ANNOTATION_SERVICE_UID: service}
        cache.update(found, deleted=False)

    cache.update(body("first", 2, kind="LLMService"), deleted=False)
    pod("old", "first")
    pod("of an earlier version", None)
    assert uids(cache.pods(KEY)) == ["old", "of an earlier version"]
    cache.update(body("second", 4, kind="LLMService"), deleted=False)
    pod("new", "second")
    assert uids(cache.pods(KEY)) == ["of an earlier version", "new"]
    cache.update(body("first", 2, kind="LLMService"), deleted=True)
    assert uids(cache.pods(KEY)) == ["of an earlier version", "new"]


def test_the_job_of_a_gate_belongs_to_its_service_and_that_of_a_replay_to_the_replay() -> None:
    cache = Cache([("Job", "")])
    cache.replace("Job", "", listing(version=1))
    cache.update(body("gate", 2, kind="Job"), deleted=False)
    replayed = body("shards", 3, kind="Job")
    replayed["metadata"]["labels"] = {OBJECT_LABEL_TRACEREPLAY: "july"}
    cache.update(replayed, deleted=False)
    assert uids(cache.children(KEY)) == ["gate"]
    assert uids(cache.jobs(ReplayKey("ns", "july"))) == ["shards"]


def test_an_event_changes_the_cache_at_once(cache: Cache) -> None:
    cache.update(body("d", 3), deleted=False)
    cache.update(body("d", 5) | {"spec": 1}, deleted=False)
    assert [one.get("spec") for one in cache.children(KEY)] == [1]
    cache.update(body("d", 6), deleted=True)
    assert cache.children(KEY) == ()
    cache.update(body("d", 6), deleted=True)


def test_a_late_event_does_not_undo_a_list(cache: Cache) -> None:
    cache.replace("Deployment", "", listing(body("d", 7) | {"spec": "new"}, version=9))
    cache.update(body("d", 3) | {"spec": "old"}, deleted=False)
    assert [one["spec"] for one in cache.children(KEY)] == ["new"]


def test_a_slow_list_does_not_undo_an_earlier_event(cache: Cache) -> None:
    cache.update(body("d", 7) | {"spec": "new"}, deleted=False)
    assert cache.replace("Deployment", "", listing(body("d", 3), version=5)) == set()
    assert [one["spec"] for one in cache.children(KEY)] == ["new"]
    assert cache.replace("Deployment", "", listing(version=6)) == set()
    assert uids(cache.children(KEY)) == ["d"], "the object is newer than the list"


def test_a_relabelled_object_moves_to_its_new_service(cache: Cache) -> None:
    cache.update(body("d", 3), deleted=False)
    moved = body("d", 4)
    moved["metadata"]["labels"] = {OBJECT_LABEL_LLMSERVICE: "other"}
    cache.update(moved, deleted=False)
    assert cache.children(KEY) == ()
    assert uids(cache.children(("ns", "other"))) == ["d"]
    moved = body("d", 5)
    del moved["metadata"]["labels"]
    cache.update(moved, deleted=False)
    assert cache.children(("ns", "other")) == ()


def test_a_child_missing_from_a_list_is_deleted_and_its_service_returned(cache: Cache) -> None:
    cache.update(body("kept", 3), deleted=False)
    cache.update(body("deleted", 4), deleted=False)
    response = listing(body("kept", 3), body("new", 6), version=9)
    assert cache.replace("Deployment", "", response) == {KEY}
    assert uids(cache.children(KEY)) == ["kept", "new"]


def test_a_service_missing_from_a_list_is_deleted(cache: Cache) -> None:
    cache.update(body("deleted", 4, kind="LLMService"), deleted=False)
    assert cache.services() == [KEY]
    assert cache.replace("LLMService", "", listing(version=9)) == {KEY}
    assert cache.service(KEY) is None
    assert cache.services() == []


def test_the_later_of_two_services_of_one_name_is_returned(cache: Cache) -> None:
    for uid, version in (("namesake", 8), ("deleted", 4)):
        cache.update(body(uid, version, kind="LLMService"), deleted=False)
    service = cache.service(KEY)
    assert service is not None
    assert service["metadata"]["uid"] == "namesake"
    cache.replace("LLMService", "", listing(body("namesake", 8), version=9))
    assert cache.service(KEY) == service


def test_an_event_older_than_a_list_without_the_object_is_ignored(cache: Cache) -> None:
    cache.replace("Pod", "", listing(version=9))
    cache.update(body("late event", 8, kind="Pod"), deleted=False)
    assert cache.pods(KEY) == ()
    cache.update(body("came later", 10, kind="Pod"), deleted=False)
    assert uids(cache.pods(KEY)) == ["came later"]


@pytest.mark.parametrize(
    ("kind", "namespace", "lost"),
    [("Deployment", "ns", {KEY}), ("Deployment", "elsewhere", {OTHER}), ("Service", "ns", set())],
)
def test_a_list_does_not_affect_other_namespaces_and_kinds(
    kind: str, namespace: str, lost: set[tuple[str, str]]
) -> None:
    lists = [(kind, namespace) for kind in KINDS for namespace in ("ns", "elsewhere")]
    cache = Cache(lists)
    for one in lists:
        cache.replace(*one, listing(version=1))
    cache.update(body("a", 3), deleted=False)
    cache.update(body("b", 4, namespace="elsewhere"), deleted=False)
    assert cache.replace(kind, namespace, listing(version=9)) == lost
    existing = {key for key in (KEY, OTHER) if cache.children(key)}
    assert existing == {KEY, OTHER} - lost
