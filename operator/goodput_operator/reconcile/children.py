"""Brings the objects of a service to what they should be, and touches nobody else's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import ANNOTATION_APPLIED
from goodput_operator.reconcile.actions import Apply
from goodput_operator.reconcile.drift import differs
from goodput_operator.reconcile.memory import Memory, Settled, Tried
from goodput_operator.render.metadata import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

    from goodput_operator.reconcile.view import View

__all__ = ["Repairs", "repairs"]

_DIGEST_CHARACTERS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Repairs:
    """What is to be applied.

    Args:
        applies: in the order of the wanted objects.
        missing: how many of them make an object that is not there.
        foreign: (kind, name) of objects of others in our places.
        tried: to be remembered.
        settled: likewise; None: something is to be applied, or cannot be.
    """

    applies: tuple[Apply, ...]
    missing: int
    foreign: tuple[tuple[str, str], ...]
    tried: tuple[Tried, ...]
    settled: Settled | None


def repairs(
    view: View,
    made_of: tuple[object, ...],
    render: Callable[[], Iterable[Mapping[str, Any]]],
    memory: Memory,
    undone: Container[tuple[str, str]],
) -> Repairs:
    """Compare what is wanted with what there is.

    Args:
        view: what there is.
        made_of: everything that the wanted objects are made from.
        render: makes them: whole objects, each once. Nothing is rendered where neither they nor
            what there is can have changed since all was well.
        memory: of the last round.
        undone: (kind, name) of what the last round could not do: it is tried again.
    """
    settled = memory.settled
    if settled is not None and settled.wanted == made_of and _untouched(view, settled):
        return Repairs(applies=(), missing=0, foreign=(), tried=memory.tried, settled=settled)
    missing = 0
    applies: list[Apply] = []
    foreign: list[tuple[str, str]] = []
    tried: list[Tried] = []
    versions: list[tuple[str, str, str]] = []
    for one in render():
        key = (one["kind"], one["metadata"]["name"])
        digest = digest_of(one, _DIGEST_CHARACTERS)
        metadata = {**one["metadata"], "annotations": {ANNOTATION_APPLIED: digest}}
        body = {**one, "metadata": metadata}
        child = view.children.get(key)
        if child is None:
            applies.append(Apply(body=body))
            missing += 1
            continue
        versions.append((*key, child.version))
        if not child.ours:
            foreign.append(key)
        elif not child.leaving and differs(body, child.body):
            now = Tried(kind=key[0], name=key[1], digest=digest, version=child.version)
            tried.append(now)
            if now not in memory.tried or key in undone:
                applies.append(Apply(body=body))
    well = not applies and not foreign
    return Repairs(
        applies=tuple(applies),
        missing=missing,
        foreign=tuple(foreign),
        tried=tuple(tried),
        settled=Settled(wanted=made_of, versions=tuple(versions)) if well else None,
    )


def _untouched(view: View, settled: Settled) -> bool:
    return all(
        (child := view.children.get((kind, name))) is not None and child.version == version
        for kind, name, version in settled.versions
    )
