"""Who owns which field of an object, as the API server keeps it, and how all of it becomes ours.

A server-side apply takes fields from other managers, but never what only they have set: a second
port of the same name, or `valueFrom` beside our `value`, stays, and the API server refuses the
two together. Once those fields are ours as well, the next apply, which does not have them, takes
them away. What makes an object ours is not known here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from goodput_operator.kube.answers import Conflict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from goodput_operator.kube.objects import Object

__all__ = ["taken_over"]

_STATUS: Final = "status"


def taken_over(live: Object, manager: str) -> tuple[tuple[Conflict, ...], list[dict[str, Any]]]:
    """All fields of an object in one manager's hands, but for those of its status.

    Args:
        live: the object, its `metadata.managedFields` included.
        manager: who is to own them, by server-side apply.

    Returns:
        Who had owned which of them, and `metadata.managedFields` as they are to be. Nobody else:
        nothing is to be changed.
    """
    version = live["apiVersion"]
    fields: dict[str, Any] = {}
    kept: list[dict[str, Any]] = []
    taken: list[Conflict] = []
    for entry in live["metadata"].get("managedFields") or ():
        owned = entry.get("fieldsV1") or {}
        if entry.get("subresource") == _STATUS or entry.get("apiVersion") != version:
            kept.append(dict(entry))
            continue
        fields = _union(fields, owned)
        if entry.get("manager") != manager:
            name = str(entry.get("manager"))
            taken += (Conflict(manager=name, field=path) for path in _paths(owned))
    ours = {
        "manager": manager,
        "operation": "Apply",
        "apiVersion": version,
        "fieldsType": "FieldsV1",
        "fieldsV1": fields,
    }
    return tuple(taken), [ours, *kept]


def _union(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _union(one.get(key, {}), other.get(key, {})) for key in dict.fromkeys([*one, *other])
    }


def _paths(fields: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """The fields in the API server's own words; what was set as a whole is one."""
    below = {key: value for key, value in fields.items() if key != "."}
    if at and (not below or "." in fields):
        yield at
        return
    for key, value in below.items():
        yield from _paths(value, at + _step(key))


def _step(key: str) -> str:
    kind, _, name = key.partition(":")
    if kind == "f":
        return f".{name}"
    if kind != "k":
        return f"[={name}]"
    return "[" + ",".join(f"{k}={json.dumps(v)}" for k, v in json.loads(name).items()) + "]"
