"""A cache of the watched objects, indexed by service or replay, filled by Kopf's lists and events.

Kopf's own indexes are not used, for two reasons. First, they drop an object only at its deletion
event. After a gap in the watch, Kopf lists again but reports no deletion of objects that the list
lacks, so its indexes keep them. A restart of the API server leaves such a gap, and so does a watch
history that is too short. Second, while Kopf's indexes fill, each object wakes all waiting tasks,
which takes quadratic time (docs/benchmarks.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from goodput_core.contract import (
    ANNOTATION_SERVICE_UID,
    OBJECT_LABEL_LLMSERVICE,
    OBJECT_LABEL_TRACEREPLAY,
)
from goodput_operator.kube.managed_fields import entries_of_others
from goodput_operator.kube.objects import CHILDREN, JOB, LLMSERVICE, MANAGER, POD, TRACEREPLAY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from goodput_operator.kube.objects import Object

__all__ = ["Cache", "Key", "OwnerKey", "ReplayKey", "key_of", "owner_of", "service_of", "trim"]

Key = tuple[str, str]
"""Namespace and name of a service."""


@dataclass(frozen=True, slots=True)
class ReplayKey:
    """Namespace and name of a TraceReplay, which is not equal to the key of a service."""

    namespace: str
    name: str


OwnerKey = Key | ReplayKey
"""Key of an object whose reconciliation its children require."""

_CHILD_KINDS = frozenset(kind.name for kind in CHILDREN)


def key_of(body: Object) -> Key:
    """Return the key of an LLMService."""
    return body["metadata"]["namespace"], body["metadata"]["name"]


def service_of(body: Object) -> Key | None:
    """Return the key of the service in an object's label; None without the label."""
    name = (body["metadata"].get("labels") or {}).get(OBJECT_LABEL_LLMSERVICE)
    return None if name is None else (body["metadata"]["namespace"], name)


def owner_of(body: Object) -> OwnerKey | None:
    """Return the key of a service or replay, or of the one in an object's label."""
    if body["kind"] == LLMSERVICE.name:
        return key_of(body)
    if body["kind"] == TRACEREPLAY.name:
        return ReplayKey(*key_of(body))
    replay = (body["metadata"].get("labels") or {}).get(OBJECT_LABEL_TRACEREPLAY)
    if replay is not None and body["kind"] in {POD.name, JOB.name}:
        return ReplayKey(body["metadata"]["namespace"], replay)
    return service_of(body)


def trim(body: Mapping[str, Any]) -> dict[str, Any]:
    """Drop `managedFields`, often half of an object; for children, keep other managers' entries."""
    metadata = {k: v for k, v in body["metadata"].items() if k != "managedFields"}
    if body["kind"] in _CHILD_KINDS and (others := entries_of_others(body, MANAGER)):
        metadata["managedFields"] = others
    return {**body, "metadata": metadata}


class _List:
    """The objects of one kind in one namespace, or in all namespaces.

    Attributes:
        version: resourceVersion of the last list; None before the first list.
        objects: objects by uid.
    """

    __slots__ = ("objects", "version")

    def __init__(self) -> None:
        self.version: int | None = None
        self.objects: dict[str, Object] = {}


class Cache:
    """The watched objects as last listed or reported by an event.

    Args:
        lists: watched kinds and namespaces; an empty namespace selects all namespaces.
    """

    def __init__(self, lists: Iterable[tuple[str, str]]) -> None:
        self._lists = {kind_and_namespace: _List() for kind_and_namespace in lists}
        self._by_owner: dict[OwnerKey, dict[str, Object]] = {}

    @property
    def complete(self) -> bool:
        """True once every kind has been listed; before that, a missing object may exist."""
        return all(listed.version is not None for listed in self._lists.values())

    def services(self) -> list[Key]:
        """Return the keys of all services."""
        keys = [key for key in self._by_owner if isinstance(key, tuple)]
        return [key for key in keys if self.service(key) is not None]

    def replays(self) -> list[ReplayKey]:
        """Return the keys of all replays."""
        keys = [key for key in self._by_owner if isinstance(key, ReplayKey)]
        return [key for key in keys if self.replay(key) is not None]

    def replay(self, key: ReplayKey) -> Object | None:
        """Return the TraceReplay; None if it does not exist."""
        replays = (body for body in self._objects(key) if body["kind"] == TRACEREPLAY.name)
        return max(replays, key=_version, default=None)

    def replays_in(self, namespace: str) -> tuple[Object, ...]:
        """Return the TraceReplays of a namespace."""
        found = (self.replay(key) for key in self.replays() if key.namespace == namespace)
        return tuple(body for body in found if body is not None)

    def jobs(self, key: ReplayKey) -> tuple[Object, ...]:
        """Return the Jobs with a replay's label."""
        return tuple(body for body in self._objects(key) if body["kind"] == JOB.name)

    def service(self, key: Key) -> Object | None:
        """Return the LLMService; None if it does not exist."""
        services = (body for body in self._objects(key) if body["kind"] == LLMSERVICE.name)
        # A service that was deleted and created again may be cached twice; return the later one.
        return max(services, key=_version, default=None)

    def children(self, key: Key) -> tuple[Object, ...]:
        """Return the objects with a service's label, except pods."""
        others = (LLMSERVICE.name, POD.name)
        return tuple(body for body in self._objects(key) if body["kind"] not in others)

    def pods(self, key: OwnerKey) -> tuple[Object, ...]:
        """Return the pods with a service's or a replay's label.

        The pods of a deleted service end later than it, so they are not those of another service
        that has its name.
        """
        pods = tuple(body for body in self._objects(key) if body["kind"] == POD.name)
        service = None if isinstance(key, ReplayKey) else self.service(key)
        if service is None:
            return pods
        uid = service["metadata"]["uid"]
        return tuple(pod for pod in pods if _service_uid(pod) in {None, uid})

    def replace(self, kind: str, namespace: str, content: Object) -> set[OwnerKey]:
        """Store a list, and remove older cached objects that the list lacks.

        Args:
            kind: kind of the objects; items of a list have no `kind` of their own.
            namespace: the listed namespace; empty for all namespaces.
            content: the API server's complete response.

        Returns:
            The services and replays of the removed objects. Those of the listed objects are not
            returned, because Kopf also sends an event for each.
        """
        listed = self._lists[kind, namespace]
        listed.version = _version(content)
        items = {item["metadata"]["uid"]: item for item in content["items"]}
        deleted = [
            body
            for uid, body in listed.objects.items()
            if uid not in items and _version(body) <= listed.version
        ]
        for body in deleted:
            self._drop(listed, body)
        header = {"apiVersion": content["apiVersion"], "kind": kind}
        for item in items.values():
            self._put(listed, {**header, **item})
        return {key for body in deleted if (key := owner_of(body)) is not None}

    def update(self, body: Object, *, deleted: bool) -> None:
        """Store the object of an event, or remove it.

        Args:
            body: the object's current or last state.
            deleted: True if the object was deleted or no longer has the LLMService label.
        """
        kind, namespace = body["kind"], body["metadata"]["namespace"]
        listed = self._lists.get((kind, namespace)) or self._lists[kind, ""]
        if deleted:
            self._drop(listed, body)
        # Kopf may deliver an event that is older than the last list. If the list lacks the object,
        # the object was deleted, and is not stored again.
        elif body["metadata"]["uid"] in listed.objects or _version(body) > (listed.version or 0):
            self._put(listed, body)

    def _objects(self, key: OwnerKey) -> Iterable[Object]:
        return self._by_owner.get(key, {}).values()

    def _put(self, listed: _List, body: Object) -> None:
        uid = body["metadata"]["uid"]
        cached = listed.objects.get(uid)
        if cached is not None:
            if _version(cached) > _version(body):
                return
            self._drop(listed, cached)
        trimmed = listed.objects[uid] = trim(body)
        if (key := owner_of(trimmed)) is not None:
            self._by_owner.setdefault(key, {})[uid] = trimmed

    def _drop(self, listed: _List, body: Object) -> None:
        uid = body["metadata"]["uid"]
        cached = listed.objects.pop(uid, None)
        if cached is None or (key := owner_of(cached)) is None:
            return
        del self._by_owner[key][uid]
        if not self._by_owner[key]:
            del self._by_owner[key]


def _service_uid(pod: Object) -> str | None:
    """Return the uid of a pod's service; None for a pod of an earlier version of the operator."""
    uid: str | None = (pod["metadata"].get("annotations") or {}).get(ANNOTATION_SERVICE_UID)
    return uid


def _version(body: Object) -> int:
    return int(body["metadata"]["resourceVersion"])
