"""What one round of decisions asks to be done: frozen, complete, in order.

`apply` carries them out and must not know why. Each can be done again without harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from goodput_core.control import Bounds
from goodput_operator.decide.memory import Memory

__all__ = ["Action", "Apply", "CreateToken", "Decision", "Delete", "Emit", "Push", "WriteStatus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Server-side apply of one child under our field manager.

    Args:
        body: the whole object as it should be, owner reference included.
        force: take fields from other managers; only for children that carry our controller
            reference. The overwritten manager and field become an Event.
    """

    body: Mapping[str, Any]
    force: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateToken:
    """Create the Secret with the admin token of one revision, unless it exists.

    The token is an HMAC of the service's uid and the revision's name by the operator's key, so it
    never needs to be read back.

    Args:
        name: the Secret's.
        revision: the revision's name.
    """

    name: str
    revision: str


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
        revision: the service's revision, from which the token is derived.
        limits_revision: rises with each change; the engine refuses older ones.
        bounds: the limits.
    """

    pod: str
    url: str
    revision: str
    limits_revision: int
    bounds: Bounds


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
    """

    actions: tuple[Action, ...]
    memory: Memory
    wake_at_ns: int | None
