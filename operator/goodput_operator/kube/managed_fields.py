"""Field ownership in `metadata.managedFields`: other managers' fields, and how to take them over.

A forced server-side apply takes over the fields that it sets. It never removes a field that only
another manager set, such as a second port of the same name or `valueFrom` beside our `value`, and
the API server may then reject the object. Once our entry also owns such a field, the next apply
removes the field, because that apply does not set it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from goodput_operator.kube.objects import Object

__all__ = [
    "ABSENT",
    "Conflict",
    "ManagedField",
    "entries_of_others",
    "fields_of_others",
    "take_over",
]

Path = tuple[str, ...]
"""Keys of `fieldsV1` from the root, such as `("f:spec", "f:replicas")`."""

ABSENT: Final = object()
"""Value of a field that an object does not have."""
_STATUS: Final = "status"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """A field that another manager set to another value.

    Args:
        manager: name of the manager as reported by the API server.
        field: path of the field.
    """

    manager: str
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedField:
    """A field that a manager owns.

    Args:
        manager: name of the manager.
        path: keys of `fieldsV1` from the root.
    """

    manager: str
    path: Path

    def conflict(self) -> Conflict:
        """Return the field as a conflict, its path in the API server's notation."""
        return Conflict(manager=self.manager, field="".join(map(_format_key, self.path)))

    def value_in(self, body: Object) -> Any:
        """Return the field's value in an object, or `ABSENT`."""
        value: Any = body
        for key in self.path:
            value = _get(value, key)
        return value


def entries_of_others(body: Object, manager: str) -> list[Mapping[str, Any]]:
    """Return the entries of other managers, except entries of the status."""
    return [
        entry
        for entry in body["metadata"].get("managedFields") or ()
        if entry.get("manager") != manager and entry.get("subresource") != _STATUS
    ]


def fields_of_others(body: Object, manager: str) -> tuple[ManagedField, ...]:
    """Return the fields that other managers own, except fields of the status."""
    return tuple(
        ManagedField(manager=str(entry.get("manager")), path=path)
        for entry in entries_of_others(body, manager)
        for path in _paths(entry.get("fieldsV1") or {})
    )


def take_over(
    live: Object, manager: str, *, below: tuple[Path, ...] = ((),)
) -> tuple[tuple[Conflict, ...], list[dict[str, Any]]]:
    """Move the fields of other managers, except fields of the status, to one manager.

    Args:
        live: the object with its `metadata.managedFields`.
        manager: the new owner, which uses server-side apply.
        below: paths below which fields are moved; by default all fields.

    Returns:
        The moved fields with their former managers, and the new `metadata.managedFields`. If no
        field is moved, the object needs no change.
    """
    version = live["apiVersion"]
    ours: dict[str, Any] = {}
    rest: list[dict[str, Any]] = []
    moved: list[Conflict] = []
    for entry in live["metadata"].get("managedFields") or ():
        fields = entry.get("fieldsV1") or {}
        if entry.get("subresource") == _STATUS or entry.get("apiVersion") != version:
            rest.append(dict(entry))
        elif entry.get("manager") == manager:
            ours = _union(ours, fields)
        else:
            name = str(entry.get("manager"))
            remaining: Mapping[str, Any] = fields
            for at in below:
                subtree, remaining = _split(remaining, at)
                ours = _union(ours, subtree)
                moved += (
                    ManagedField(manager=name, path=path).conflict() for path in _paths(subtree)
                )
            if remaining:
                rest.append({**entry, "fieldsV1": remaining})
    entry = {
        "manager": manager,
        "operation": "Apply",
        "apiVersion": version,
        "fieldsType": "FieldsV1",
        "fieldsV1": ours,
    }
    return tuple(moved), [entry, *rest]


def _split(fields: Mapping[str, Any], at: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a field set into the fields below a path and the other fields."""
    if not at:
        return dict(fields), {}
    key, *deeper = at
    if key not in fields:
        return {}, dict(fields)
    inside, outside = _split(fields[key], tuple(deeper))
    others = {k: v for k, v in fields.items() if k != key}
    return {key: inside} if inside else {}, {key: outside, **others} if outside else others


def _union(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    keys = dict.fromkeys([*first, *second])
    return {key: _union(first.get(key, {}), second.get(key, {})) for key in keys}


def _paths(fields: Mapping[str, Any], at: Path = ()) -> Iterator[Path]:
    """Yield the paths of owned fields; a list item or map that is owned completely is one field."""
    below = {key: value for key, value in fields.items() if key != "."}
    if at and (not below or "." in fields):
        yield at
        return
    for key, value in below.items():
        yield from _paths(value, (*at, key))


def _format_key(key: str) -> str:
    kind, _, name = key.partition(":")
    if kind == "f":
        return f".{name}"
    if kind != "k":
        return f"[={name}]"
    return "[" + ",".join(f"{k}={json.dumps(v)}" for k, v in json.loads(name).items()) + "]"


def _get(value: Any, key: str) -> Any:
    kind, _, name = key.partition(":")
    if kind == "f":
        return value.get(name, ABSENT) if isinstance(value, dict) else ABSENT
    if not isinstance(value, list):
        return ABSENT
    if kind == "k":
        keys = json.loads(name).items()
        items = (item for item in value if all(item.get(k) == v for k, v in keys))
        return next(items, ABSENT)
    item = json.loads(name)
    return item if item in value else ABSENT
