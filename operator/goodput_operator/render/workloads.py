"""The Deployments: one for each revision of the engines, one for the routers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import ROLE_ENGINE, ROLE_ROUTER

if TYPE_CHECKING:
    from goodput_operator.render.metadata import Owner
    from goodput_operator.render.revisions import Revision

__all__ = ["engine_deployment", "router_deployment"]

_HISTORY: Final = 2
_SURGE: Final = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def engine_deployment(
    owner: Owner, revision: Revision, *, replicas: int, progress_deadline_s: int
) -> dict[str, Any]:
    """The Deployment of one revision's engines.

    Args:
        owner: the service.
        revision: whose template it holds.
        replicas: its own, of those that the service has.
        progress_deadline_s: after which Kubernetes says that it does not progress.
    """
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": owner.metadata(revision.name, role=ROLE_ENGINE, revision=revision.name),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": _HISTORY,
            "progressDeadlineSeconds": progress_deadline_s,
            "strategy": _SURGE,
            "selector": {"matchLabels": owner.selector(ROLE_ENGINE, revision.name)},
            "template": revision.template,
        },
    }


def router_deployment(owner: Owner, revision: Revision, *, replicas: int) -> dict[str, Any]:
    """The Deployment of the routers; a new revision of theirs rolls within it."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": owner.metadata(owner.names.router, role=ROLE_ROUTER, revision=revision.name),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": _HISTORY,
            "strategy": _SURGE,
            "selector": {"matchLabels": owner.selector(ROLE_ROUTER)},
            "template": revision.template,
        },
    }
