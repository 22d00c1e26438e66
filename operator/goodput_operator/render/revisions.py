"""Revisions: what was asked for and the pod template made of it, kept and never changed.

Whoever upgrades the operator keeps every pod: the template of a revision that exists is taken
from its ControllerRevision, not rendered again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import (
    OBJECT_LABEL_REVISION,
    OBJECT_LABEL_ROLE,
    ROLE_ENGINE,
    ROLE_ROUTER,
)
from goodput_core.spec.encode import encode
from goodput_core.spec.llmservice import RouterSpec, TokenBudgetSpec
from goodput_operator.render.digest import digest_of
from goodput_operator.render.engine_pod import engine_pod
from goodput_operator.render.router_pod import router_pod

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_operator.render.installation import Installation
    from goodput_operator.render.metadata import Owner

__all__ = ["Revision", "engine_revision", "read_revision", "router_revision"]

_DIGEST_CHARACTERS: Final = 8
_NO_REPLICAS: Final = RouterSpec().replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """One revision of the engines or of the routers of a service.

    Args:
        name: also of what belongs to it alone.
        role: engine or router.
        number: rises with each revision of a service.
        asked: the part of the spec that it was made of, without defaults.
        template: of its pods.
    """

    name: str
    role: str
    number: int
    asked: Mapping[str, Any]
    template: Mapping[str, Any]

    def render(self, owner: Owner) -> dict[str, Any]:
        """The ControllerRevision that keeps it."""
        return {
            "apiVersion": "apps/v1",
            "kind": "ControllerRevision",
            "metadata": owner.metadata(self.name, role=self.role, revision=self.name),
            "revision": self.number,
            "data": {"asked": self.asked, "template": self.template},
        }


_NONE: Final[Mapping[str, Revision]] = MappingProxyType({})


def read_revision(stored: Mapping[str, Any], role: str) -> Revision | None:
    """The revision that a ControllerRevision keeps; None: it is none of this role."""
    metadata, data = stored["metadata"], stored.get("data") or {}
    labels = metadata.get("labels") or {}
    name = metadata["name"]
    if labels.get(OBJECT_LABEL_ROLE) != role or labels.get(OBJECT_LABEL_REVISION) != name:
        return None
    if "asked" not in data or "template" not in data:
        return None
    return Revision(
        name=name,
        role=role,
        number=stored["revision"],
        asked=data["asked"],
        template=data["template"],
    )


def engine_revision(
    owner: Owner,
    spec: LLMServiceSpec,
    installation: Installation,
    *,
    number: int,
    kept: Mapping[str, Revision] = _NONE,
) -> Revision:
    """The revision that `model` and `engine` ask for; the token budget is none of it.

    Args:
        owner: the service.
        spec: what it asks for.
        installation: what a new revision is rendered with.
        number: of a new one.
        kept: those that are kept, by name; one of them is taken as it is.
    """
    engine = replace(spec.engine, token_budget=TokenBudgetSpec())
    asked = {"model": encode(spec.model), "engine": encode(engine)}
    name = owner.names.engine_revision(digest_of(asked, _DIGEST_CHARACTERS))
    if name in kept:
        return kept[name]
    return Revision(
        name=name,
        role=ROLE_ENGINE,
        number=number,
        asked=asked,
        template=engine_pod(owner, spec, installation, name),
    )


def router_revision(
    owner: Owner,
    spec: LLMServiceSpec,
    installation: Installation,
    *,
    number: int,
    kept: Mapping[str, Revision] = _NONE,
) -> Revision:
    """The revision that routers ask for: all that they read when they start.

    Arguments as of `engine_revision`.
    """
    asked = {
        "router": encode(replace(spec.router, replicas=_NO_REPLICAS)),
        "slo": encode(spec.slo),
    }
    name = owner.names.router_revision(digest_of(asked, _DIGEST_CHARACTERS))
    if name in kept:
        return kept[name]
    return Revision(
        name=name,
        role=ROLE_ROUTER,
        number=number,
        asked=asked,
        template=router_pod(owner, spec, installation, name),
    )
