"""PodDisruptionBudgets: one for engines, one for routers, no pod in both.

Two budgets on one pod block its eviction for good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from goodput_core.contract import ROLE_ENGINE, ROLE_ROUTER

if TYPE_CHECKING:
    from goodput_operator.render.metadata import Owner

__all__ = ["engines_budget", "routers_budget"]


def engines_budget(owner: Owner) -> dict[str, Any]:
    """One engine at a time may be evicted; never none, or a service of one blocks every drain."""
    return _budget(owner, owner.names.engines, ROLE_ENGINE)


def routers_budget(owner: Owner) -> dict[str, Any]:
    """One router at a time may be evicted."""
    return _budget(owner, owner.names.router, ROLE_ROUTER)


def _budget(owner: Owner, name: str, role: str) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": owner.metadata(name, role=role),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": owner.selector(role)},
            # What does not serve anyway holds nobody up.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
