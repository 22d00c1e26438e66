"""What a service is to have now: limits, replicas, how they are spread, and every object.

It looks at what there is only where that decides what is wanted; comparing and repairing come
after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from goodput_core.contract import ROLE_ENGINE
from goodput_core.control import Bounds
from goodput_core.spec.choices import ControlMode
from goodput_operator.control.decided import Decided
from goodput_operator.reconcile.rollout import Part, spread
from goodput_operator.reconcile.view import Workload
from goodput_operator.render.base_resources import base_resources
from goodput_operator.render.config_map import config_map, read_decided
from goodput_operator.render.revisions import engine_deployment, router_deployment

if TYPE_CHECKING:
    from goodput_core.control import ServiceParams
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_operator.reconcile.revisions import Revisions
    from goodput_operator.reconcile.view import View

__all__ = [
    "Rollout",
    "base_objects",
    "followed",
    "rollout_of",
    "stored_decided",
    "workload_objects",
]


def stored_decided(view: View) -> Decided | None:
    """What the ConfigMap says was decided last."""
    child = view.children.get(("ConfigMap", view.owner.names.config))
    return None if child is None or not child.ours else read_decided(child.body)


def followed(last: Decided | None, params: ServiceParams) -> Decided:
    """What is in force while nothing is measured: the last decision, within the manifest.

    Where the law does not act, the manifest's own numbers hold at once.

    Args:
        last: what was decided last; None: nothing yet.
        params: the manifest's bounds.
    """
    bounds, replicas = Bounds.initial(params), params.initial_replicas
    if last is None:
        return Decided(limits_revision=1, bounds=bounds, replicas=replicas)
    if params.mode is ControlMode.AUTO:
        bounds = last.bounds.within(params)
        if params.replicas is None:
            replicas = min(max(last.replicas, params.min_replicas), params.max_replicas)
    number = last.limits_revision + (bounds != last.bounds)
    return Decided(limits_revision=number, bounds=bounds, replicas=replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How engines are spread over revisions.

    Args:
        replicas: that the service is to have.
        counts: by revision, the one that is asked for among them.
        current: the revision that serves; None: none has yet.
        finished: whether the one that is asked for serves alone and whole.
        over: Deployments of other revisions that nobody needs any more.
    """

    replicas: int
    counts: Mapping[str, int]
    current: str | None
    finished: bool
    over: tuple[Workload, ...]


def rollout_of(view: View, revisions: Revisions, replicas: int) -> Rollout:
    """Spread the engines over the revisions that there are.

    A Deployment whose revision was lost can be neither scaled nor repaired: it counts for
    nothing, stays as it is until the revision that is asked for serves, and then goes.

    Args:
        view: what there is.
        revisions: that are kept, and the one that is asked for.
        replicas: that the service is to have.
    """
    update = revisions.update.name
    workloads = {one.revision: one for one in view.workloads(ROLE_ENGINE)}
    parts = [
        Part(revision=name, wanted=one.wanted, pods=one.pods, available=one.available)
        for name, one in workloads.items()
        if name in revisions.engines
    ]
    stable = view.status.get("currentRevision")
    if stable not in workloads:
        others = [part for part in parts if part.revision != update and part.available]
        stable = max(others, key=lambda part: part.available).revision if others else None
    counts = spread(replicas, update=update, stable=stable, parts=parts)
    new = workloads.get(update)
    served = new is not None and replicas > 0 and min(new.available, new.wanted) >= replicas
    others = [part for part in parts if part.revision != update]
    finished = served and all(not part.wanted and not part.pods for part in others)
    return Rollout(
        replicas=replicas,
        counts=counts,
        current=update if finished else stable,
        finished=finished,
        over=tuple(
            one
            for name, one in workloads.items()
            if name != update and (finished or (not replicas and name not in revisions.engines))
        ),
    )


def base_objects(
    view: View, spec: LLMServiceSpec, revisions: Revisions, rollout: Rollout, decided: Decided
) -> list[dict[str, Any]]:
    """What pods need before they start, in order."""
    used = [revisions.engines[name] for name in rollout.counts if name in revisions.engines]
    return [
        *base_resources(view.owner),
        *(one.render(view.owner) for one in (*used, revisions.routers)),
        config_map(view.owner, spec, used, decided),
    ]


def workload_objects(
    view: View, spec: LLMServiceSpec, revisions: Revisions, rollout: Rollout
) -> list[dict[str, Any]]:
    """The Deployments, of engines whose revision is kept already, and of routers."""
    over = {one.revision for one in rollout.over}
    deadline_s = spec.rollout.progress_deadline_seconds
    engines = [
        engine_deployment(
            view.owner, revisions.engines[name], replicas=count, progress_deadline_s=deadline_s
        )
        for name, count in rollout.counts.items()
        if name in revisions.uids and name in revisions.engines and name not in over
    ]
    routers = 0 if spec.suspend else spec.router.replicas
    return [*engines, router_deployment(view.owner, revisions.routers, replicas=routers)]
