"""The existing objects of the gates of a service: the engines of a pair, and Jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goodput_core.contract import OBJECT_LABEL_ROLE, ROLE_BASELINE, ROLE_CANDIDATE, ROLE_REPLAY
from goodput_operator.kube.objects import JOB
from goodput_operator.reconcile.actions import Delete

if TYPE_CHECKING:
    from goodput_operator.reconcile.snapshot import Child, View

__all__ = ["PAIR", "gate_jobs", "obsolete_objects"]

PAIR: Final = (ROLE_BASELINE, ROLE_CANDIDATE)
"""Roles of the engines of a gate with a fresh baseline."""


def obsolete_objects(view: View, key: str | None, job: str | None) -> tuple[Delete, ...]:
    """Return deletions of the objects of other gates and of earlier attempts.

    Args:
        view: classified objects of the service.
        key: key of the gate whose engines are kept; None to keep none.
        job: name of the Job that is kept; None to keep none.
    """
    names = {view.owner.names.gate(key, role) for role in PAIR} if key is not None else set()
    deletes = [
        Delete(kind="Deployment", name=workload.name, uid=workload.uid)
        for role in PAIR
        for workload in view.workloads(role)
        if workload.name not in names
    ]
    return (*deletes, *(_delete(child) for child in gate_jobs(view) if child.name != job))


def gate_jobs(view: View) -> list[Child]:
    """Return the Jobs of the service's gates."""
    return [
        child
        for child in view.ours(JOB.name)
        if (child.body["metadata"].get("labels") or {}).get(OBJECT_LABEL_ROLE) == ROLE_REPLAY
    ]


def _delete(child: Child) -> Delete:
    return Delete(kind=child.body["kind"], name=child.name, uid=child.uid)
