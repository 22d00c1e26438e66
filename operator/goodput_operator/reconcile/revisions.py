"""Which revisions a service has: kept ones as they were kept, a new one where none fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.contract import ROLE_ENGINE, ROLE_ROUTER
from goodput_operator.reconcile.actions import Delete
from goodput_operator.render.revisions import (
    Revision,
    engine_revision,
    read_revision,
    router_revision,
)

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_operator.reconcile.view import View
    from goodput_operator.render.pods import Installation

__all__ = ["Revisions", "outdated", "revisions_of"]

_HISTORY: Final = 5
"""So many revisions that nobody uses are kept, to go back to with their own template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revisions:
    """The revisions of a service.

    Args:
        engines: that are kept or to be kept, by name.
        update: of these, the one that the spec asks for.
        routers: the one of the routers that the spec asks for.
        uids: of the ControllerRevisions that exist, by name.
    """

    engines: Mapping[str, Revision]
    update: Revision
    routers: Revision
    uids: Mapping[str, str]


def revisions_of(view: View, spec: LLMServiceSpec, installation: Installation) -> Revisions:
    """The kept revisions, and what the spec asks for.

    Args:
        view: what there is.
        spec: what is asked for.
        installation: what a new revision is rendered with.
    """
    stored = view.ours("ControllerRevision")
    kept = _read(view, ROLE_ENGINE)
    number = 1 + max((child.body.get("revision", 0) for child in stored), default=0)
    update = engine_revision(view.owner, spec, installation, number=number, stored=kept)
    routers = router_revision(
        view.owner, spec, installation, number=number, stored=_read(view, ROLE_ROUTER)
    )
    return Revisions(
        engines={**kept, update.name: update},
        update=update,
        routers=routers,
        uids={child.body["metadata"]["name"]: child.uid for child in stored},
    )


def outdated(view: View, revisions: Revisions, used: Iterable[str]) -> list[Delete]:
    """Deletions of kept revisions that nobody uses, but for the latest few.

    Args:
        view: what there is.
        revisions: the service's.
        used: names of those that have engines or routers, or are about to.
    """
    spared = {*used, revisions.update.name, revisions.routers.name}
    deletions = []
    for role in (ROLE_ENGINE, ROLE_ROUTER):
        unused = [one for one in _read(view, role).values() if one.name not in spared]
        unused.sort(key=lambda one: one.number, reverse=True)
        deletions += [
            Delete(kind="ControllerRevision", name=one.name, uid=revisions.uids[one.name])
            for one in unused[_HISTORY:]
        ]
    return deletions


def _read(view: View, role: str) -> dict[str, Revision]:
    read = (read_revision(child.body, role) for child in view.ours("ControllerRevision"))
    return {one.name: one for one in read if one is not None}
