"""The fleet in virtual time: a plain loop over instants, in which everything has its order.

Between two instants at which something happens from outside (an arrival, a client that gives
up, an actor's turn) replicas do not touch each other, so each one runs up to the next such
instant by itself. At an instant the order is: arrivals in the order of the trace, each placed
on what it finds; then steps that end and plans that are made; then clients that give up (what
was complete at its deadline is complete); then actors. So a run is a function of its inputs:
the same requests and settings give the same records, in the same order.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Protocol

from goodput_core.placement import PLACEMENTS, PlacementReason, PlacementState
from goodput_core.slo.record import Outcome
from goodput_core.units import NS_PER_S
from goodput_engine.core.build import build_core
from goodput_engine.messages import ExecutorInput, Submit
from goodput_engine.router.retry import RetryBudget
from goodput_engine.router.settings import RouterLimits
from goodput_replay.emulation.replica import VirtualReplica, Visit
from goodput_replay.emulation.requests import Deadlines, block_keys, record_of
from goodput_replay.emulation.settings import FleetOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from goodput_core.slo.record import RequestRecord
    from goodput_core.slo.targets import Targets
    from goodput_core.spec.choices import RouterPolicy
    from goodput_engine.messages import Configure, Rejected
    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.plan import PlannedRequest

__all__ = ["Actor", "Totals", "VirtualFleet", "VirtualRouter"]


class Actor(Protocol):
    """Something that acts on a fleet at instants of its own, such as a control law."""

    def next_ns(self) -> int:
        """When it acts next; later than the last time."""
        ...

    def act(self, fleet: VirtualFleet, now_ns: int) -> None:
        """Look at the fleet and change it."""
        ...


class VirtualFleet:
    """Replicas, the requests on them, and the clock that moves them all.

    Args:
        settings: the fleet.
        on_record: told of each request that ended.

    Attributes:
        replicas: those that are there, starting and draining ones too, oldest first.
        arrived: requests that came so far, refused ones too.
    """

    def __init__(
        self,
        settings: FleetSettings,
        on_record: Callable[[PlannedRequest, RequestRecord], None],
    ) -> None:
        self.settings: Final = settings
        self.replicas: list[VirtualReplica] = []
        self.arrived = 0
        self._on_record = on_record
        self._targets = {c.name: c.targets for c in settings.slo.classes}
        self._router = VirtualRouter(settings.placement, seed=settings.seed)
        self._deadlines = Deadlines(settings.timeout_ns)
        self._live: dict[int, Visit] = {}
        self._ended: list[tuple[int, int, PlannedRequest, RequestRecord]] = []
        self._totals = Totals()
        self._created = 0
        self._input_open = True
        for _ in range(settings.replicas):
            self._add(0, 0)

    def run(self, requests: Iterator[PlannedRequest], actors: Sequence[Actor]) -> FleetOutcome:
        """Everything, from zero until the last request has ended; see `emulate`."""
        self._totals.replicas(len(self._everyone()))
        coming = next(requests, None)
        while coming is not None or self._live:
            now_ns = self._next_instant(coming, actors)
            for replica in self._everyone():
                replica.run(now_ns)
            touched: dict[str, VirtualReplica] = {}
            while coming is not None and coming.scheduled_ns <= now_ns:
                self.arrived += 1
                self._arrive(coming, self.arrived, now_ns, touched)
                coming = next(requests, None)
            if coming is None and self._input_open:
                self._close_input(touched)
            self._settle(touched, now_ns)
            self._give_up(now_ns)
            for actor in actors:
                if actor.next_ns() <= now_ns:
                    self._tell()  # it decides on everything that has ended
                    actor.act(self, now_ns)
                    self._settle({r.name: r for r in self.replicas}, now_ns)
            self._tell()
        left = self._everyone()
        for replica in left:
            self._totals.add(replica, self._totals.end_ns)
        return self._totals.outcome(
            requests=self.arrived, final_replicas=sum(not r.draining for r in left)
        )

    def start_replica(self, now_ns: int) -> VirtualReplica:
        """One more replica, ready when the device's start-up time has passed."""
        startup_ns = round(self.settings.profile.startup_seconds * NS_PER_S)
        started = self._add(now_ns, now_ns + startup_ns)
        self._totals.replicas(len(self._everyone()))
        return started

    def drain_replica(self, replica: VirtualReplica, now_ns: int) -> None:
        """It gets nothing new, finishes what it has, and is gone."""
        replica.draining = True
        replica.core.drain()
        self._part_with(replica, now_ns)

    def submit_of(self, visit: Visit) -> Submit:
        """What another replica is told of a request that moves there."""
        targets = self._promised(visit.planned)
        assert targets is not None, visit.planned.slo_class
        return self._submit(visit.planned, visit.rid, targets)

    def moved(self, visit: Visit, target: Visit, now_ns: int) -> None:
        """A request is on another replica from now on; both are to be settled."""
        visit.replica.let_go(visit)
        self._live[target.rid] = target
        self._part_with(visit.replica, now_ns)

    def _everyone(self) -> list[VirtualReplica]:
        """All replicas, whatever they do."""
        return self.replicas

    # --- an instant ------------------------------------------------------------------------
    def _next_instant(self, coming: PlannedRequest | None, actors: Iterable[Actor]) -> int:
        instants = [actor.next_ns() for actor in actors]
        if coming is not None:
            instants.append(coming.scheduled_ns)
        deadline_ns = self._deadlines.next_ns(self._live)
        if deadline_ns is not None:
            instants.append(deadline_ns)
        return min(instants)

    def _arrive(
        self, planned: PlannedRequest, rid: int, now_ns: int, touched: dict[str, VirtualReplica]
    ) -> None:
        targets = self._promised(planned)
        if targets is None:
            classes = ", ".join(self._targets)
            detail = (
                f"{planned.slo_class!r} is not an SLO class of this service; there are {classes}"
            )
            self._end(rid, planned, record_of(planned, Outcome.ERROR, now_ns, detail=detail))
            return
        submit = self._submit(planned, rid, targets)
        replica = self._router.first(self.replicas, submit.block_hashes, now_ns)
        if isinstance(replica, str):
            self._end(rid, planned, record_of(planned, Outcome.SHED, now_ns, detail=replica))
            return
        refused = self._enter(replica, planned, submit, now_ns, touched)
        if refused is not None and refused.retry_after_s:
            other = self._router.elsewhere(self.replicas, replica, submit.block_hashes, now_ns)
            if other is not None:
                replica = other
                refused = self._enter(replica, planned, submit, now_ns, touched)
        if refused is not None:
            outcome = Outcome.SHED if refused.retry_after_s else Outcome.ERROR
            record = record_of(
                planned, outcome, now_ns, replica=replica.name, detail=refused.detail
            )
            self._end(rid, planned, record)

    def _enter(
        self,
        replica: VirtualReplica,
        planned: PlannedRequest,
        submit: Submit,
        now_ns: int,
        touched: dict[str, VirtualReplica],
    ) -> Rejected | None:
        visit = Visit(planned, submit.rid, replica)
        self._live[submit.rid] = visit
        refused = self._submit_to(replica, visit, submit, now_ns)
        if refused is not None:
            del self._live[submit.rid]
        else:
            self._totals.in_flight(len(self._live))
            self._deadlines.add(planned, submit.rid)
            touched[replica.name] = replica
        return refused

    def _submit_to(
        self, replica: VirtualReplica, visit: Visit, submit: Submit, now_ns: int
    ) -> Rejected | None:
        return replica.submit(visit, submit, now_ns)

    def _settle(self, touched: dict[str, VirtualReplica], now_ns: int) -> None:
        for replica in self._everyone():
            if replica.due_ns == now_ns or replica.name in touched:
                replica.settle(now_ns)

    def _give_up(self, now_ns: int) -> None:
        given_up = self._deadlines.take(now_ns)
        if not given_up:
            return
        touched: dict[str, VirtualReplica] = {}
        for rid, outcome in given_up:
            visit = self._live.get(rid)
            if visit is None:
                continue
            replica, planned = visit.replica, visit.planned
            detail = ""
            if outcome is Outcome.TIMEOUT:
                detail = f"nothing complete within {self.settings.timeout_ns / NS_PER_S:g} s"
            times, left = self._cancel(visit)
            record = record_of(
                planned, outcome, now_ns, times=times, replica=replica.name, detail=detail
            )
            touched |= {r.name: r for r in left}
            self._end(rid, planned, record)
            self._part_with(replica, now_ns)
        self._settle(touched, now_ns)

    def _cancel(self, visit: Visit) -> tuple[NDArray[np.int64], list[VirtualReplica]]:
        """Give a request up: the times of its tokens, and the replicas that it leaves."""
        return visit.replica.cancel(visit), [visit.replica]

    def _close_input(self, touched: dict[str, VirtualReplica]) -> None:
        """No request comes any more: nobody needs to wait for company."""
        self._input_open = False
        for replica in self._everyone():
            replica.core.scheduler.end_input()
            touched[replica.name] = replica

    # --- requests --------------------------------------------------------------------------
    def _promised(self, planned: PlannedRequest) -> Targets | None:
        """What a request is held to, its own targets applied; None: nobody promised its class."""
        promised = self._targets.get(planned.slo_class)
        if promised is None:
            return None if self._targets else planned.targets
        return promised if planned.targets.empty else promised.overridden_by(planned.targets)

    def _submit(self, planned: PlannedRequest, rid: int, targets: Targets) -> Submit:
        """What the engine's front would make of this request."""
        return Submit(
            rid=rid,
            arrival_ns=planned.scheduled_ns,
            input_tokens=planned.prompt.input_tokens,
            max_output_tokens=planned.max_output_tokens,
            block_hashes=block_keys(planned.prompt, self.settings.profile.block_size),
            slo_class=planned.slo_class,
            ttft_ns=targets.ttft_ns,
            tpot_ns=targets.tpot_ns,
            tbt_p99_ns=targets.tbt_p99_ns,
            e2e_ns=targets.e2e_ns,
            priority=planned.priority or 0,
            executor=ExecutorInput(output_tokens=planned.output_tokens),
        )

    def _true_length(self, rid: int) -> int:
        """For the oracle alone: no policy may ask."""
        return self._live[rid].planned.output_tokens

    def _finished(self, visit: Visit, times: NDArray[np.int64], cached_tokens: int) -> None:
        """A replica is done with a request."""
        replica, end_ns = visit.replica, int(times[-1])
        record = record_of(
            visit.planned,
            Outcome.OK,
            end_ns,
            times=times,
            replica=replica.name,
            cached_tokens=cached_tokens,
        )
        self._end(visit.rid, visit.planned, record)
        self._part_with(replica, end_ns)

    def _end(self, rid: int, planned: PlannedRequest, record: RequestRecord) -> None:
        self._live.pop(rid, None)
        assert record.end_ns is not None
        self._ended.append((record.end_ns, rid, planned, record))

    def _tell(self) -> None:
        """Hand over who ended since the last instant, in the order of the ends."""
        if not self._ended:
            return
        self._ended.sort(key=lambda ended: ended[:2])
        for end_ns, _, planned, record in self._ended:
            self._totals.ended(end_ns)
            self._on_record(planned, record)
        self._ended.clear()

    # --- replicas --------------------------------------------------------------------------
    def _add(self, created_ns: int, ready_ns: int) -> VirtualReplica:
        settings = self.settings
        name = f"{settings.service}-{self._created}"
        replica = self._build(name, settings.configure, created_ns, ready_ns, self._finished)
        self._created += 1
        self.replicas.append(replica)
        return replica

    def _build(
        self,
        name: str,
        configure: Configure,
        created_ns: int,
        ready_ns: int,
        ended: Callable[[Visit, NDArray[np.int64], int], None],
    ) -> VirtualReplica:
        settings = self.settings
        oracle = self._true_length if settings.oracle else None
        replica = VirtualReplica(
            name,
            build_core(configure, settings.profile, oracle=oracle),
            created_ns=created_ns,
            ready_ns=ready_ns,
            folds=settings.folds,
            ended=ended,
        )
        if not self._input_open:
            replica.core.scheduler.end_input()
        return replica

    def _part_with(self, replica: VirtualReplica, now_ns: int) -> None:
        """A draining replica goes with its last request."""
        if replica.draining and not replica.in_flight:
            self.replicas = [r for r in self.replicas if r is not replica]
            self._totals.add(replica, now_ns)


_SUMMED: Final = (
    "steps",
    "step_ns",
    "scheduled_tokens",
    "output_tokens",
    "preemptions",
    "recomputed_tokens",
    "swapped_tokens",
    "prefix_queried_tokens",
    "prefix_hit_tokens",
)


class Totals:
    """Sums over replicas and requests.

    Attributes:
        end_ns: when the last request so far ended.
    """

    def __init__(self) -> None:
        self.end_ns = 0
        self._peak = 0
        self._peak_replicas = 0
        self._replica_ns = 0
        self._events = 0
        self._sums: Counter[str] = Counter()

    def in_flight(self, count: int) -> None:
        """So many requests are on replicas now."""
        self._peak = max(self._peak, count)

    def replicas(self, count: int) -> None:
        """So many replicas exist now."""
        self._peak_replicas = max(self._peak_replicas, count)

    def ended(self, at_ns: int) -> None:
        """A request ended; in the order of time."""
        self.end_ns = at_ns

    def add(self, replica: VirtualReplica, gone_ns: int) -> None:
        """A replica is gone, or the run is over."""
        self._replica_ns += max(0, gone_ns - replica.created_ns)
        self._events += replica.events
        stats = replica.core.scheduler.stats
        self._sums.update({name: getattr(stats, name) for name in _SUMMED})

    def outcome(self, *, requests: int, final_replicas: int) -> FleetOutcome:
        """The run's."""
        return FleetOutcome(
            end_ns=self.end_ns,
            requests=requests,
            peak_in_flight=self._peak,
            replica_ns=self._replica_ns,
            peak_replicas=self._peak_replicas,
            final_replicas=final_replicas,
            events=requests + self._events,
            **{name: self._sums[name] for name in _SUMMED},
        )


_FULL = "every replica is full; try again shortly"
_NONE_READY = "no replica is ready; try again shortly"


class VirtualRouter:
    """Places requests.

    Args:
        policy: by which law.
        seed: of what the law draws at random.
    """

    def __init__(self, policy: RouterPolicy, *, seed: int) -> None:
        self._place = PLACEMENTS[policy]
        self._state = PlacementState(seed=seed)
        bounds = RouterLimits()
        self._budget = RetryBudget(percent=bounds.retry_percent, burst=bounds.retry_burst)

    def first(
        self, replicas: Iterable[VirtualReplica], keys: Sequence[int], now_ns: int
    ) -> VirtualReplica | str:
        """Where a new request goes, or why nowhere."""
        self._budget.earn()
        return self._choose({r.name: r for r in replicas}, keys, now_ns)

    def elsewhere(
        self,
        replicas: Iterable[VirtualReplica],
        tried: VirtualReplica,
        keys: Sequence[int],
        now_ns: int,
    ) -> VirtualReplica | None:
        """Where a request goes that was refused for load, if anywhere."""
        others = {r.name: r for r in replicas if r is not tried}
        chosen = self._choose(others, keys, now_ns)
        return None if isinstance(chosen, str) or not self._budget.spend() else chosen

    def _choose(
        self, replicas: dict[str, VirtualReplica], keys: Sequence[int], now_ns: int
    ) -> VirtualReplica | str:
        loads = [replica.load(now_ns) for replica in replicas.values()]
        self._state, placement = self._place(self._state, loads, keys, now_ns)
        if placement.replica is not None:
            return replicas[placement.replica]
        return _FULL if placement.reason is PlacementReason.ALL_SATURATED else _NONE_READY
