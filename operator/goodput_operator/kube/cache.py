"""What the API server lists and tells of the cluster, trimmed, and how it is looked up.

Objects are found by the service that they belong to. What is kept is what decisions read: who
manages which field is never asked, and often half of an object.

Kopf's own indexes are not used. They forget an object only when they hear of its deletion, which
nobody tells of after a gap (the API server was restarted, or keeps too little of what happened):
then all is listed anew, and what is not in the list is gone. And while they fill, every object
wakes all that came before it, which grows with the square of their number (docs/benchmarks.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from goodput_core.contract import OBJECT_LABEL_LLMSERVICE
from goodput_operator.kube.kinds import LLMSERVICE, POD

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from goodput_operator.kube.objects import Object

__all__ = ["Cache", "Key", "key_of", "service_of", "trimmed"]

Key = tuple[str, str]
"""A service: its namespace and its name."""


def key_of(body: Object) -> Key:
    """The key of a service."""
    return body["metadata"]["namespace"], body["metadata"]["name"]


def service_of(body: Object) -> Key | None:
    """The key of the service that an object is labelled with; None: with none."""
    name = (body["metadata"].get("labels") or {}).get(OBJECT_LABEL_LLMSERVICE)
    return None if name is None else (body["metadata"]["namespace"], name)


def trimmed(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same object without what nobody here reads."""
    metadata = {k: v for k, v in body["metadata"].items() if k != "managedFields"}
    return {**body, "metadata": metadata}


class _List:
    """All of one kind in one namespace, or in all.

    Attributes:
        version: of the last list; whatever has a higher one came later. None: not listed yet.
        objects: by uid.
    """

    __slots__ = ("objects", "version")

    def __init__(self) -> None:
        self.version: int | None = None
        self.objects: dict[str, Object] = {}


class Cache:
    """The watched objects, as they were last listed or told of.

    Args:
        lists: each kind and namespace that is listed; an empty namespace: all.
    """

    def __init__(self, lists: Iterable[tuple[str, str]]) -> None:
        self._lists = {one: _List() for one in lists}
        self._of: dict[Key, dict[str, Object]] = {}

    @property
    def complete(self) -> bool:
        """Whether everything has been listed: before, what is missing may only be unknown."""
        return all(one.version is not None for one in self._lists.values())

    def services(self) -> list[Key]:
        """The key of every service."""
        return [key for key in self._of if self.service(key) is not None]

    def service(self, key: Key) -> Object | None:
        """The service as it was last seen; None: there is none."""
        found = (body for body in self._standing(key) if body["kind"] == LLMSERVICE.name)
        # A namesake may be seen before the end of the one before it: the later one counts.
        return max(found, key=_version, default=None)

    def children(self, key: Key) -> tuple[Object, ...]:
        """The objects that are labelled with a service, pods apart."""
        others = (LLMSERVICE.name, POD.name)
        return tuple(body for body in self._standing(key) if body["kind"] not in others)

    def pods(self, key: Key) -> tuple[Object, ...]:
        """The pods that are labelled with a service."""
        return tuple(body for body in self._standing(key) if body["kind"] == POD.name)

    def listed(self, kind: str, namespace: str, content: Object) -> set[Key]:
        """Take in a list: what it lacks and is older stands no more.

        Args:
            kind: of the objects, which do not name it themselves.
            namespace: that was listed; empty: all.
            content: the API server's answer, complete.

        Returns:
            The services that lack an object now. Of the others Kopf tells.
        """
        into = self._lists[kind, namespace]
        into.version = _version(content)
        items = {item["metadata"]["uid"]: item for item in content["items"]}
        gone = [
            body
            for uid, body in into.objects.items()
            if uid not in items and _version(body) <= into.version
        ]
        for body in gone:
            self._drop(into, body)
        named = {"apiVersion": content["apiVersion"], "kind": kind}
        for item in items.values():
            self._put(into, {**named, **item})
        return {key for body in gone if (key := _owner(body)) is not None}

    def told(self, body: Object, *, deleted: bool) -> None:
        """Take in what Kopf tells of one object.

        Args:
            body: as it is, or was last.
            deleted: whether it stands no more, or is not among ours any more.
        """
        kind, namespace = body["kind"], body["metadata"]["namespace"]
        into = self._lists.get((kind, namespace)) or self._lists[kind, ""]
        if deleted:
            self._drop(into, body)
        # Kopf may come late with an object that is older than a list without it.
        elif body["metadata"]["uid"] in into.objects or _version(body) > (into.version or 0):
            self._put(into, body)

    def _standing(self, key: Key) -> Iterable[Object]:
        return self._of.get(key, {}).values()

    def _put(self, into: _List, body: Object) -> None:
        uid = body["metadata"]["uid"]
        known = into.objects.get(uid)
        if known is not None:
            if _version(known) > _version(body):
                return
            self._drop(into, known)
        kept = into.objects[uid] = trimmed(body)
        if (key := _owner(kept)) is not None:
            self._of.setdefault(key, {})[uid] = kept

    def _drop(self, into: _List, body: Object) -> None:
        uid = body["metadata"]["uid"]
        known = into.objects.pop(uid, None)
        if known is None or (key := _owner(known)) is None:
            return
        del self._of[key][uid]
        if not self._of[key]:
            del self._of[key]


def _owner(body: Object) -> Key | None:
    return key_of(body) if body["kind"] == LLMSERVICE.name else service_of(body)


def _version(body: Object) -> int:
    return int(body["metadata"]["resourceVersion"])
