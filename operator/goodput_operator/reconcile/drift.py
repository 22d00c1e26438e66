"""Compares the rendered objects of a service with the cluster, and returns applies of differences.

Only rendered fields are compared. The API server fills in defaults, rewrites quantities and drops
empty values. Other managers may add fields, list items and annotations beside ours. None of these
counts as drift; otherwise every reconciliation would write. The one exception is a field that
another manager adds to a pod template. It would replace the pods, so it is removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import ANNOTATION_APPLIED
from goodput_core.quantities import parse_quantity
from goodput_operator.kube.managed_fields import ABSENT
from goodput_operator.reconcile.actions import Apply
from goodput_operator.reconcile.snapshot import ApplyAttempt, Memory, Settled
from goodput_operator.render.metadata import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

    from goodput_operator.kube.managed_fields import Conflict, ManagedField
    from goodput_operator.reconcile.snapshot import Child, View

__all__ = ["Repairs", "find_repairs"]

_DIGEST_CHARACTERS: Final = 16
_POD_TEMPLATE: Final = (
    ("f:spec", "f:template", "f:spec"),
    ("f:spec", "f:template", "f:metadata", "f:labels"),
)
"""Paths below which fields of other managers are removed. Annotations of the template stay, because
`kubectl rollout restart` replaces pods by setting one."""
_NOT_COMPARED: Final = frozenset({"apiVersion", "kind", "metadata", "name", "namespace", "uid"})
"""Fields that identify an object, and its metadata, which is compared separately."""
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "claims": ("name",),
    "containers": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "ownerReferences": ("uid",),
    "ports": ("containerPort", "port", "protocol"),
    "resourceClaims": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
"""Lists whose items the API server identifies by these keys, so other managers may add items."""
_ATOMIC: Final = frozenset({"selector", "labelSelector", "nodeSelector"})
"""Maps that are compared completely, because an additional label makes a different selector."""
_QUANTITY_MAPS: Final = frozenset({"limits", "requests"})
_QUANTITIES: Final = frozenset({"sizeLimit", "divisor"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Repairs:
    """The applies of one reconciliation.

    Args:
        applies: applies in the order of the rendered objects.
        missing: number of rendered objects that do not exist.
        foreign: kind and name of existing objects that the service does not control.
        attempts: `attempts` of the next memory.
        settled: `settled` of the next memory.
    """

    applies: tuple[Apply, ...]
    missing: int
    foreign: tuple[tuple[str, str], ...]
    attempts: tuple[ApplyAttempt, ...]
    settled: Settled | None


def find_repairs(
    view: View,
    inputs: tuple[object, ...],
    render: Callable[[], Iterable[Mapping[str, Any]]],
    memory: Memory,
    failed: Container[tuple[str, str]],
) -> Repairs:
    """Compare the rendered objects with the cluster.

    Args:
        view: classified objects of the service.
        inputs: all inputs of the rendering.
        render: renders the objects. It is called only if the inputs or the objects have changed
            since all objects matched.
        memory: memory of the last reconciliation.
        failed: kind and name of the last reconciliation's failed actions, which are repeated.
    """
    settled = memory.settled
    if settled is not None and settled.inputs == inputs and _unchanged(view, settled):
        return Repairs(applies=(), missing=0, foreign=(), attempts=memory.attempts, settled=settled)
    missing = 0
    applies: list[Apply] = []
    foreign: list[tuple[str, str]] = []
    attempts: list[ApplyAttempt] = []
    versions: list[tuple[str, str, str]] = []
    for rendered in render():
        key = (rendered["kind"], rendered["metadata"]["name"])
        digest = digest_of(rendered, _DIGEST_CHARACTERS)
        annotations = {**rendered["metadata"].get("annotations", {}), ANNOTATION_APPLIED: digest}
        metadata = {**rendered["metadata"], "annotations": annotations}
        body = {**rendered, "metadata": metadata}
        child = view.children.get(key)
        if child is None:
            applies.append(Apply(body=body))
            missing += 1
            continue
        versions.append((*key, child.version))
        if not child.ours:
            foreign.append(key)
            continue
        additions = _template_additions(body, child)
        if not child.deleting and (additions or _differs(body, child.body)):
            attempt = ApplyAttempt(kind=key[0], name=key[1], digest=digest, version=child.version)
            attempts.append(attempt)
            if attempt not in memory.attempts or key in failed:
                applies.append(
                    Apply(
                        body=body,
                        overwrites=_overwrites(body, child, additions),
                        take_over=_POD_TEMPLATE if additions else (),
                    )
                )
    matching = not applies and not foreign
    return Repairs(
        applies=tuple(applies),
        missing=missing,
        foreign=tuple(foreign),
        attempts=tuple(attempts),
        settled=Settled(inputs=inputs, versions=tuple(versions)) if matching else None,
    )


def _unchanged(view: View, settled: Settled) -> bool:
    return all(
        (child := view.children.get((kind, name))) is not None and child.version == version
        for kind, name, version in settled.versions
    )


def _template_additions(body: Mapping[str, Any], child: Child) -> list[ManagedField]:
    """Return the fields that other managers added to a Deployment's pod template."""
    if child.body["kind"] != "Deployment":
        return []
    return [
        field
        for field in child.foreign_fields
        if any(field.path[: len(at)] == at for at in _POD_TEMPLATE)
        and field.value_in(body) is ABSENT
    ]


def _overwrites(
    body: Mapping[str, Any], child: Child, additions: Iterable[ManagedField]
) -> tuple[Conflict, ...]:
    """Return the fields of other managers that an apply of the body changes or removes.

    `kubectl scale` writes through the scale subresource, after which the API server reports no
    conflict for `spec.replicas`. `managedFields` still names the manager, even after the value was
    reset.
    """
    changed: list[ManagedField] = []
    # With another digest, the operator itself changes the object, so a difference is not an edit.
    if _applied_digest(child.body) == _applied_digest(body):
        changed = [
            field
            for field in child.foreign_fields
            if (desired := field.value_in(body)) is not ABSENT
            and not _matches(desired, field.value_in(child.body), field.path[-1].removeprefix("f:"))
        ]
    return tuple(dict.fromkeys(field.conflict() for field in (*changed, *additions)))


def _applied_digest(body: Mapping[str, Any]) -> str | None:
    annotations = body["metadata"].get("annotations") or {}
    digest: str | None = annotations.get(ANNOTATION_APPLIED)
    return digest


def _differs(desired: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """True if a stored object lacks a rendered field or has it with another value."""
    return any(
        not _matches(value, stored.get(key), key)
        for rendered, stored in ((desired, live), (desired["metadata"], live["metadata"]))
        for key, value in rendered.items()
        if key not in _NOT_COMPARED
    )


def _matches(desired: Any, live: Any, key: str) -> bool:
    if live is ABSENT:
        live = None
    if not desired and not live:
        return True  # the API server drops empty values
    if key in _ATOMIC:
        return bool(desired == live)
    if isinstance(desired, dict):
        if not isinstance(live, dict):
            return False
        if key in _QUANTITY_MAPS:
            return all(_equal_quantities(value, live.get(k)) for k, value in desired.items())
        return all(_matches(value, live.get(k), k) for k, value in desired.items())
    if isinstance(desired, list):
        return isinstance(live, list) and _list_matches(desired, live, key)
    if key in _QUANTITIES:
        return _equal_quantities(desired, live)
    return bool(desired == live)


def _list_matches(desired: list[Any], live: list[Any], key: str) -> bool:
    keys = _KEYS.get(key)
    if keys is None:
        pairs = zip(desired, live, strict=False)
        return len(desired) == len(live) and all(_matches(item, other, "") for item, other in pairs)
    live_by_key = {_key_of(item, keys): item for item in live}
    return all(_matches(item, live_by_key.get(_key_of(item, keys)), "") for item in desired)


def _key_of(item: Any, keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(item.get(key) for key in keys) if isinstance(item, dict) else (item,)


def _equal_quantities(desired: Any, live: Any) -> bool:
    quantity = parse_quantity(desired)
    return str(desired) == str(live) or (quantity is not None and quantity == parse_quantity(live))
