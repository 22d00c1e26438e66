"""What one round of decisions asks to be done: frozen, complete, in order.

`apply` carries them out and must not know why. Each can be done again without harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from goodput_operator.control.words import Change
from goodput_operator.reconcile.memory import Memory

__all__ = ["Action", "Apply", "CreateToken", "Decision", "Delete", "Emit", "Push", "WriteStatus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Server-side apply of one child under our field manager.

    To the very object of that name that the snapshot holds, which carries our controller
    reference. Where it holds none, one is looked for first. Fields are taken from other managers
    where it turns out to be ours, and only there; the overwritten manager and field become an
    Event.

    Args:
        body: the whole object as it should be, owner reference included.
    """

    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateToken:
    """Create the Secret with the admin token of one revision, unless it exists.

    The token is an HMAC of the service's uid and the revision's name by the operator's key, so it
    never needs to be read back. That it exists already is success: the name is
    only this service's.

    Args:
        revision: the revision's name.
        body: the Secret without its token, which goes to `TOKEN_KEY` of its `stringData`.
    """

    revision: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete one child, only this very one.

    Args:
        kind, name: which.
        uid: a precondition: a successor of the same name stays.
    """

    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Tell one engine its limits, by PATCH /control/limits.

    Args:
        pod: the pod's name.
        url: of its admin port.
        revision: its revision's name, from which the token is derived.
        limits: what is sent, `revision` included, which rises with each change.
    """

    pod: str
    url: str
    revision: str
    limits: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStatus:
    """Write the status subresource, whole."""

    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Write an Event on the service; the same words within ten minutes are counted, not repeated.

    Args:
        warning: type Warning instead of Normal.
        reason: CamelCase, one of few.
        message: one sentence.
    """

    warning: bool
    reason: str
    message: str


Action = Apply | CreateToken | Delete | Push | WriteStatus | Emit


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One round.

    Args:
        actions: in this order.
        memory: for the next round.
        wake_at_ns: decide again at the latest then; None: only when something changes.
        changes: what the control laws put in force, or would: to be counted.
        foreign: (kind, name) of objects of others in our places. They are not watched: whoever
            makes the next snapshot looks at these again, and at no others.
    """

    actions: tuple[Action, ...]
    memory: Memory
    wake_at_ns: int | None
    changes: tuple[Change, ...] = ()
    foreign: tuple[tuple[str, str], ...] = ()
