"""Brings the objects of a service to what they should be, and touches nobody else's."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import ANNOTATION_APPLIED
from goodput_operator.decide.actions import Apply
from goodput_operator.decide.drift import differs
from goodput_operator.decide.memory import Tried

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from goodput_operator.decide.view import View

__all__ = ["Repairs", "repairs"]

_DIGEST_CHARACTERS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Repairs:
    """What is to be applied.

    Args:
        applies: in the order of the wanted objects.
        foreign: (kind, name) of objects of others in our places.
        tried: to be remembered.
    """

    applies: tuple[Apply, ...]
    foreign: tuple[tuple[str, str], ...]
    tried: tuple[Tried, ...]


def repairs(view: View, wanted: Iterable[Mapping[str, Any]], tried: Sequence[Tried]) -> Repairs:
    """Compare what is wanted with what there is.

    Args:
        view: what there is.
        wanted: whole objects, each once.
        tried: what the last round remembered.
    """
    applies: list[Apply] = []
    foreign: list[tuple[str, str]] = []
    trying: list[Tried] = []
    for one in wanted:
        key = (one["kind"], one["metadata"]["name"])
        digest = _digest(one)
        body = _with(one, annotations={ANNOTATION_APPLIED: digest})
        child = view.children.get(key)
        if child is None:
            applies.append(Apply(body=body, force=False))
        elif not child.ours:
            foreign.append(key)
        elif not child.leaving and differs(body, child.body):
            now = Tried(kind=key[0], name=key[1], digest=digest, version=child.version)
            trying.append(now)
            if now not in tried:
                applies.append(Apply(body=_with(body, uid=child.uid), force=True))
    return Repairs(applies=tuple(applies), foreign=tuple(foreign), tried=tuple(trying))


def _with(body: Mapping[str, Any], **metadata: Any) -> dict[str, Any]:
    return {**body, "metadata": {**body["metadata"], **metadata}}


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]
