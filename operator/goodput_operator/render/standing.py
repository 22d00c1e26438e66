"""The objects of a service that depend on nothing but its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from goodput_operator.render.access import router_account, router_binding, router_role
from goodput_operator.render.disruption import engines_budget, routers_budget
from goodput_operator.render.network import engines_service, serving_service

if TYPE_CHECKING:
    from goodput_operator.render.metadata import Owner

__all__ = ["standing_objects"]


def standing_objects(owner: Owner) -> tuple[dict[str, Any], ...]:
    """All of them, in the order in which they are to be made: what pods need comes first."""
    return (
        router_account(owner),
        router_role(owner),
        router_binding(owner),
        engines_service(owner),
        serving_service(owner),
        engines_budget(owner),
        routers_budget(owner),
    )
