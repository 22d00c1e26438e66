"""Refused requests that are admitted after all, to find false refusals of `slo`.

A load is served once, and the refusals are recorded. Then it is served again with one of the
refused requests admitted in spite of the refusal. Every other decision is the policy's. A refusal
was *false* if this request then meets its targets at no cost to the others.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from benchmarks.comparison.cells import Cell, fleet_settings, planned_requests, slo_classes
from benchmarks.comparison.design import HORIZON_SLACKS, poisson_cell
from benchmarks.comparison.loads import MIXES, offered

from goodput_core.slo.judging import JudgementKind, judge
from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.policies.slo.policy import SloPolicy
from goodput_replay.emulation.emulate import emulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_core.slo.record import RequestRecord
    from goodput_engine.scheduler.admission import Rejection, Removal
    from goodput_engine.scheduler.request_table import ScheduledRequest
    from goodput_replay.plan import PlannedRequest

__all__ = [
    "FACTORS",
    "ForcedResult",
    "RefusedRequest",
    "WatchedSloPolicy",
    "draw",
    "refusal_cells",
    "serve_forced",
    "serve_watched",
]

FACTORS: Final = (0.8, 1.2, 2.0, 4.0)
_LARGE_MIX: Final = "chat-8b"
"""A mix whose runs have too many requests for hundreds of repetitions."""


class WatchedSloPolicy(SloPolicy):
    """`slo` with a record of its refusals, and with one request that it cannot refuse.

    Args:
        rejections: receives the rejection of each refused request, by rid.
        forced: rid of a request that is neither rejected nor displaced; None for none.
    """

    def __init__(self, rejections: dict[int, Rejection], *, forced: int | None = None) -> None:
        super().__init__()
        self._rejections = rejections
        self._forced = forced

    def reject(self, request: ScheduledRequest) -> Rejection | None:
        """Reject as `slo` does, but never the forced request."""
        rejection = super().reject(request)
        if request.rid == self._forced:
            # A later request before the next step must be tested against this one, too.
            self._undecided.by_rid.pop(request.rid, None)
            self._forecast = None
            return None
        if rejection is not None:
            self._rejections[request.rid] = rejection
        return rejection

    def waiting_to_reject(self) -> Iterable[Removal]:
        """Return the requests that waited in vain, or are displaced, but never the forced one."""
        for removal in super().waiting_to_reject():
            if removal.request.rid != self._forced:
                self._rejections[removal.request.rid] = removal.rejection
                yield removal

    def displaced_waiting(self, request: ScheduledRequest) -> Iterable[Removal]:
        """Return the requests that `slo` displaces, but never the forced one."""
        for removal in super().displaced_waiting(request):
            if removal.request.rid != self._forced:
                self._rejections[removal.request.rid] = removal.rejection
                yield removal


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRequest:
    """A refused request of a cell.

    Args:
        cell: the cell.
        seed: the seed of the load.
        number: number of the request in the load, from 0.
        reason: reason and detail of its rejection.
    """

    cell: Cell
    seed: int
    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """One run of a cell.

    Args:
        offered: number of requests.
        kept: numbers of the requests that met their targets.
        refused: refused requests, by arrival.
    """

    offered: int
    kept: frozenset[int]
    refused: tuple[RefusedRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedResult:
    """The effect of one refused request that was admitted after all.

    Args:
        cell: name of the cell.
        mix: name of the mix.
        factor: rate in multiples of the knee.
        known_lengths: True if the engine knew the output lengths.
        seed, number: the request.
        slo_class: its class.
        reason: reason and detail of its rejection.
        kept: True if the request met its targets.
        lost, gained: numbers of other requests that met their targets only without, and only with
            the forced request.
        levels: change of the kept weight of all other requests, by priority level.
        change: change of the kept weight of all requests, the forced one included.
    """

    cell: str
    mix: str
    factor: float
    known_lengths: bool
    seed: int
    number: int
    slo_class: str
    reason: str
    kept: bool
    lost: int
    gained: int
    levels: Mapping[int, float]
    change: float

    @property
    def false_strict(self) -> bool:
        """True if the request met its targets, and no other request lost them."""
        return self.kept and not self.lost

    @property
    def false_net(self) -> bool:
        """True if the request met its targets, and at no level the others keep less in sum."""
        return self.kept and all(change >= 0 for change in self.levels.values())


def refusal_cells(
    knees: Mapping[str, float], *, mixes: Sequence[str] = (), factors: Sequence[float] = FACTORS
) -> list[Cell]:
    """Return the cells: Poisson arrivals on one replica, with known and with hidden lengths.

    Args:
        knees: rate of the knee of one replica, by name.
        mixes: names of mixes; all but the largest one if empty.
        factors: rates in multiples of the knee.
    """
    return [
        poisson_cell(mix, factor, knees, known_lengths=known_lengths)
        for mix in mixes or [name for name in MIXES if name != _LARGE_MIX]
        for factor in factors
        for known_lengths in (True, False)
    ]


def serve_watched(cell: Cell, seed: int, *, forced: int | None = None) -> WatchedRun:
    """Serve a cell with `slo` and return the kept and the refused requests.

    Args:
        cell: the cell.
        seed: seed of the load and of the router.
        forced: number of a request to admit in any case; None for none.
    """
    assert cell.fleet.replicas == 1, "only one replica refuses a request"
    requests = offered(cell.load, seed)
    by_id = {str(number): request for number, request in enumerate(requests)}
    rejections: dict[int, Rejection] = {}
    kept: set[int] = set()
    settings = replace(
        fleet_settings(cell, Policy.SLO, seed, cell.preemption, slo=slo_classes(requests)),
        # The fleet numbers the requests from 1, in the order of their arrival.
        build_policy=lambda: WatchedSloPolicy(
            rejections, forced=None if forced is None else forced + 1
        ),
    )

    def on_record(planned: PlannedRequest, record: RequestRecord) -> None:
        if judge(record, planned.targets).kind is JudgementKind.ATTAINED:
            kept.add(int(planned.request_id))

    emulate(iter(planned_requests(by_id)), settings, on_record)
    return WatchedRun(
        offered=len(requests),
        kept=frozenset(kept),
        refused=tuple(
            RefusedRequest(
                cell=cell,
                seed=seed,
                number=rid - 1,
                reason=f"{rejection.reason}: {rejection.detail}",
            )
            for rid, rejection in sorted(rejections.items())
            if requests[rid - 1].arrival_ns <= _counted_ns(cell)
        ),
    )


def serve_forced(request: RefusedRequest, before: frozenset[int]) -> ForcedResult:
    """Serve a cell again with one refused request admitted.

    Args:
        request: the request.
        before: numbers of the requests that met their targets without it.
    """
    cell = request.cell
    assert cell.factor is not None
    requests = offered(cell.load, request.seed)
    after = serve_watched(cell, request.seed, forced=request.number).kept
    others = after - {request.number}
    levels: defaultdict[int, float] = defaultdict(float)
    for change, numbers in ((1, others - before), (-1, before - others)):
        for number in numbers:
            levels[requests[number].priority] += change * requests[number].weight
    kept = request.number in after
    return ForcedResult(
        cell=cell.name,
        mix=cell.load.mix,
        factor=cell.factor,
        known_lengths=cell.load.known_lengths,
        seed=request.seed,
        number=request.number,
        slo_class=requests[request.number].slo_class,
        reason=request.reason,
        kept=kept,
        lost=len(before - others),
        gained=len(others - before),
        levels=dict(levels),
        change=sum(levels.values()) + kept * requests[request.number].weight,
    )


def draw(
    refused: Sequence[Sequence[RefusedRequest]], count: int, *, seed: int = 1
) -> list[RefusedRequest]:
    """Draw refused requests evenly: from each cell one by one until there are enough.

    Args:
        refused: refused requests by cell.
        count: number of requests to draw; fewer are drawn if there are not as many.
        seed: seed of the draw.
    """
    rng = random.Random(seed)
    urns = [rng.sample(requests, len(requests)) for requests in refused]
    drawn: list[RefusedRequest] = []
    while len(drawn) < count and any(urns):
        full = [urn for urn in urns if urn]
        missing = count - len(drawn)
        some = full if len(full) <= missing else rng.sample(full, missing)
        drawn.extend(urn.pop() for urn in some)
    return drawn


def _counted_ns(cell: Cell) -> int:
    """Return the last arrival of a refused request that counts.

    Capacity is held back for later requests. Near the end of a run there are no later requests, so
    that a refused one could be served at no cost.
    """
    return round(cell.load.horizon_s * (1 - 1 / HORIZON_SLACKS) * NS_PER_S)
