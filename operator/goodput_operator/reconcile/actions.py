"""The result of a decision: idempotent actions in order, and the memory for the next decision."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from goodput_core.control import Change, ServiceDecision
from goodput_operator.kube.managed_fields import Conflict
from goodput_operator.reconcile.snapshot import Memory

__all__ = [
    "Action",
    "Apply",
    "Create",
    "CreateToken",
    "Decision",
    "Delete",
    "Emit",
    "Push",
    "WriteStatus",
    "without_fields",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Server-side apply of one child under our field manager.

    The apply names the uid of the object in the snapshot. If the snapshot lacks the object, the
    object is first read from the API server. Fields are taken over from other managers only on an
    object with our controller reference. An Event then names the managers and fields.

    Args:
        body: the complete object, owner reference included.
        overwrites: fields that other managers set to other values, as the snapshot shows them.
        take_over: paths of `managedFields` below which fields of other managers are removed.
    """

    body: Mapping[str, Any]
    overwrites: tuple[Conflict, ...] = ()
    take_over: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Create an object unless one of its name exists."""

    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateToken:
    """Create the Secret with the admin token of one engine revision.

    The token is derived from the operator's key and never read back. If the Secret exists, the
    action has succeeded: its name contains a digest of the service's uid, so it belongs to this
    service.

    Args:
        revision: name of the revision.
        body: the Secret without its token, which is added under `TOKEN_KEY` of `stringData`.
    """

    revision: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete one child.

    Args:
        kind, name: kind and name of the child.
        uid: uid of the child, so that a later object of the same name is not deleted.
    """

    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Send limits to one engine by PATCH /control/limits.

    Args:
        pod: name of the engine's pod.
        url: URL of its admin port.
        revision: name of its revision, from which the token is derived.
        limits: the request body, with a `revision` that increases with each change.
    """

    pod: str
    url: str
    revision: str
    limits: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStatus:
    """Write the complete status subresource."""

    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Write an Event on the service; the same message within ten minutes increments its count.

    Args:
        warning: True for the type Warning, False for Normal.
        reason: reason in CamelCase.
        message: one sentence.
    """

    warning: bool
    reason: str
    message: str


Action = Apply | Create | CreateToken | Delete | Push | WriteStatus | Emit


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision of one reconciliation.

    Args:
        actions: actions in the order of execution.
        memory: memory for the next reconciliation.
        wake_at_ns: time of the next reconciliation; None to wait for a change.
        changes: changes that the control laws apply or recommend, for metrics and the log.
        rollout: Events of gates and rollouts among the actions, for the log.
        foreign: kind and name of objects that have one of our names but that the service does not
            control. They are not watched, so the next observation reads them again.
        control_decision: decision of the control laws with its inputs, for the log; None if no
            interval ended.
        tagged_image: image of a new revision whose tag the next observation replaces by a digest;
            empty if there is none. Until the revision is stored, its digest stays the same.
    """

    actions: tuple[Action, ...]
    memory: Memory
    wake_at_ns: int | None
    changes: tuple[Change, ...] = ()
    rollout: tuple[Emit, ...] = ()
    foreign: tuple[tuple[str, str], ...] = ()
    control_decision: ServiceDecision | None = None
    tagged_image: str = ""


def without_fields(status: Mapping[str, Any], paths: Collection[str]) -> dict[str, Any]:
    """Return a status without some fields.

    Args:
        status: the status.
        paths: `FIELD`, or `FIELD.FIELD` for a part of one.
    """
    kept = {name: value for name, value in status.items() if name not in paths}
    for name, _, part in (path.partition(".") for path in paths):
        if part and name in kept:
            kept[name] = {key: value for key, value in kept[name].items() if key != part}
    return kept
