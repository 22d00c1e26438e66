"""What Kopf's indexes hold of the cluster, trimmed, and how it is looked up.

An index maps the service's namespace and name to objects; the same object stands once. What is
kept is what decisions read: who manages which field is never asked, and often half of an object.

Kopf takes an object out of its indexes when it hears of the deletion and at no other time. Where a
watch could not go on (the API server was restarted, or keeps too little of what happened) Kopf
lists again, and never hears of what was deleted meanwhile. What such a list lacks is therefore left
out here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from goodput_core.contract import OBJECT_LABEL_LLMSERVICE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from goodput_operator.resources.stored import Object

__all__ = ["Cache", "Index", "Key", "key_of", "service_of", "trimmed"]

Key = tuple[str, str]
"""A service: its namespace and its name."""


class Index(Protocol):
    """As much of `kopf.Index` as is read here."""

    def __contains__(self, key: object) -> bool: ...

    def __getitem__(self, key: Key) -> Iterable[Any]: ...

    def __iter__(self) -> Any: ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """What the last list of a kind held.

    Args:
        version: of the list; whatever has a higher one came later.
        uids: of all its objects.
    """

    version: int
    uids: frozenset[str]


class Cache:
    """The indexes, once Kopf has made them, and what was last listed.

    Args:
        services: by their own key, one each.
        children: by the key of the service that they are labelled with.
        pods: the same.
    """

    def __init__(self, *, services: Index, children: Index, pods: Index) -> None:
        self._services = services
        self._children = children
        self._pods = pods
        self._lists: dict[tuple[str, str], _Listed] = {}

    def keys(self) -> list[Key]:
        """Every service."""
        return [key for key in self._services if self.service(key) is not None]

    def service(self, key: Key) -> Object | None:
        """The service as it was last seen; None: there is none."""
        # A namesake may be seen before the end of the one before it: the later one counts.
        return max(self._standing(self._services, key), key=_version, default=None)

    def children(self, key: Key) -> tuple[Object, ...]:
        """The objects that are labelled with a service."""
        return self._standing(self._children, key)

    def pods(self, key: Key) -> tuple[Object, ...]:
        """The pods that are labelled with a service."""
        return self._standing(self._pods, key)

    def listed(self, kind: str, namespace: str, content: Object) -> set[Key]:
        """Take note of a list: what is older and not in it stands no more.

        Args:
            kind: of the objects.
            namespace: that was listed; empty: all.
            content: the API server's answer, complete.

        Returns:
            The services that lack an object of this kind that Kopf did not hear the end of.
        """
        self._lists[kind, namespace] = _Listed(
            version=_version(content),
            uids=frozenset(item["metadata"]["uid"] for item in content["items"]),
        )
        return {
            key
            for index in (self._services, self._children, self._pods)
            for key in index
            for body in index[key]
            if body["kind"] == kind and not self._stands(body)
        }

    def _standing(self, index: Index, key: Key) -> tuple[Object, ...]:
        if key not in index:
            return ()
        return tuple(body for body in index[key] if self._stands(body))

    def _stands(self, body: Object) -> bool:
        kind, metadata = body["kind"], body["metadata"]
        listed = self._lists.get((kind, metadata["namespace"])) or self._lists.get((kind, ""))
        return listed is None or metadata["uid"] in listed.uids or _version(body) > listed.version


def _version(body: Object) -> int:
    return int(body["metadata"]["resourceVersion"])
