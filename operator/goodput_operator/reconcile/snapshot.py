"""All that one round of decisions about one service is made from, frozen at one instant.

`observe` fills it; `decide` reads it and nothing else. Objects of the cluster are the plain
dictionaries that the API server sent and are never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from goodput_operator.control.measures import Measures
from goodput_operator.kube.objects import Object
from goodput_operator.reconcile.memory import Memory

__all__ = ["Snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One service and all that stands around it.

    Args:
        now_ns: monotonic; intervals are measured by it.
        unix_s: seconds since 1970; what conditions and events are dated by.
        service: the LLMService as it is stored.
        objects: everything in its namespace that carries the service's label or stands under a
            name that the service uses (`resources.names`), ours or not: Deployments, Services,
            ConfigMaps, PodDisruptionBudgets, ServiceAccounts, Roles, RoleBindings,
            ControllerRevisions. Secrets may only be created, so none is here.
        pods: of the service's engines and routers.
        measures: of the interval that has just ended, in every control mode; None: it is not
            over, or the service is suspended.
        memory: what the last round remembered; fresh after a restart of the operator.
        failures: what the API server answered to the last round's actions, in its own words, by
            (kind, name): a quota, an admission webhook, another owner. ("Secret", name)
            after a `CreateToken`, ("Pod", name) after a `Push`.
        delayed: the same where it was only not able to: it may pass when it is tried again.
    """

    now_ns: int
    unix_s: int
    service: Object
    objects: tuple[Object, ...] = ()
    pods: tuple[Object, ...] = ()
    measures: Measures | None = None
    memory: Memory = field(default_factory=Memory)
    failures: Mapping[tuple[str, str], str] = field(default_factory=dict)
    delayed: Mapping[tuple[str, str], str] = field(default_factory=dict)
