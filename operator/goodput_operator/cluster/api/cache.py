"""What Kopf's indexes hold of the cluster, trimmed, and how it is looked up.

An index maps the service's namespace and name to objects; the same object stands once. What is
kept is what decisions read: who manages which field is never asked, and often half of an object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from goodput_core.contract import OBJECT_LABEL_LLMSERVICE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from goodput_operator.cluster.api.answers import Object

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


class Cache:
    """The indexes, once Kopf has made them.

    Args:
        services: by their own key, one each.
        children: by the key of the service that they are labelled with.
        pods: the same.
    """

    def __init__(self, *, services: Index, children: Index, pods: Index) -> None:
        self._services = services
        self._children = children
        self._pods = pods

    def keys(self) -> list[Key]:
        """Every service."""
        return list(self._services)

    def service(self, key: Key) -> Object | None:
        """The service as it was last seen; None: there is none."""
        found: list[Object] = list(self._services[key]) if key in self._services else []
        # A namesake may be seen before the end of the one before it: the later one counts.
        return max(found, key=_version, default=None)

    def children(self, key: Key) -> tuple[Object, ...]:
        """The objects that are labelled with a service."""
        return tuple(self._children[key]) if key in self._children else ()

    def pods(self, key: Key) -> tuple[Object, ...]:
        """The pods that are labelled with a service."""
        return tuple(self._pods[key]) if key in self._pods else ()


def _version(body: Object) -> int:
    return int(body["metadata"]["resourceVersion"])
