"""The fate of each request of a load that the fleet of a cell serves in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from benchmarks.comparison.cells import fleet_settings, planned_requests, slo_classes

from goodput_core.slo.judging import JudgementKind, MissReason, judge
from goodput_core.slo.record import Outcome
from goodput_core.spec.choices import Policy
from goodput_replay.emulation.emulate import emulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.comparison.cells import Cell
    from benchmarks.comparison.loads import OfferedRequest

    from goodput_core.slo.record import RequestRecord
    from goodput_engine.device.profile import DeviceProfile
    from goodput_replay.emulation.fleet import Actor
    from goodput_replay.plan import PlannedRequest

__all__ = ["Fate", "Served", "serve_each"]


class Fate(StrEnum):
    """Result of a request."""

    KEPT = "kept"
    REFUSED = "refused"
    LATE = "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A request that was offered.

    Args:
        fate: its result.
        end_ns: end of the response.
        reasons: the missed targets; empty if it was kept or was cancelled at the end of the run.
    """

    fate: Fate
    end_ns: int
    reasons: tuple[MissReason, ...] = ()


def serve_each(
    cell: Cell,
    requests: Sequence[OfferedRequest],
    seed: int,
    *,
    policy: str = Policy.SLO,
    preemption: str | None = None,
    profile: DeviceProfile | None = None,
    actors: Sequence[Actor] = (),
) -> list[Served]:
    """Serve requests on the fleet of a cell, and return what became of each one, in their order.

    Args:
        cell: the cell; its load is not used.
        requests: the requests.
        seed: seed of the router.
        policy: name of the policy.
        preemption: preemption mode in place of that of the cell; None for that of the cell.
        profile: device in place of that of the cell; None for that of the cell.
        actors: components that change the fleet during the run.
    """
    by_id = {str(number): request for number, request in enumerate(requests)}
    served: dict[str, Served] = {}

    def on_record(planned: PlannedRequest, record: RequestRecord) -> None:
        judgement = judge(record, planned.targets)
        if judgement.kind is JudgementKind.ATTAINED:
            fate = Fate.KEPT
        else:
            refused = record.outcome in (Outcome.SHED, Outcome.ERROR)
            fate = Fate.REFUSED if refused else Fate.LATE
        end_ns = planned.scheduled_ns if record.end_ns is None else record.end_ns
        served[planned.request_id] = Served(fate=fate, end_ns=end_ns, reasons=judgement.reasons)

    mode = cell.preemption if preemption is None else preemption
    settings = fleet_settings(cell, policy, seed, mode, slo=slo_classes(requests))
    if profile is not None:
        settings = replace(settings, profile=profile)
    emulate(iter(planned_requests(by_id)), settings, on_record, actors=actors)
    return [served[name] for name in by_id]
