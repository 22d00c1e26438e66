"""The fleet in virtual time: a deterministic event loop over the replicas of a service.

An external event is an arrival, a timeout or cancellation of a request, or an action of an actor.
Between two external events replicas do not interact, so each replica runs up to the next event on
its own.

Events at the same time are processed in this order:

1. Arrivals, in trace order. Each is placed by the current load of the replicas.
2. Steps that end, and the plans of the next steps.
3. Timeouts and cancellations. A request that completed at its deadline counts as complete.
4. Actors.

The same requests and settings therefore give the same records in the same order.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final, Protocol

from goodput_core.engine_state import NO_STATISTICS
from goodput_core.placement import PLACEMENTS, PlacementState
from goodput_core.slo.conformance import Deviation
from goodput_core.slo.importance import Importance
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import LateRequests
from goodput_core.units import NS_PER_S
from goodput_engine.core.build import build_core
from goodput_engine.messages import ExecutorInput, Submit
from goodput_engine.openai.errors import APIError, not_placed
from goodput_engine.openai.headers import RequestSLO, ServiceClasses
from goodput_engine.openai.rejections import rejection_error
from goodput_engine.router.retry import RetryBudget
from goodput_engine.router.settings import RouterLimits
from goodput_engine.scheduler.policies.sjf import SjfPolicy
from goodput_engine.scheduler.prediction import KnownLengths
from goodput_replay.emulation.arrivals import ArrivalQueue
from goodput_replay.emulation.replica import ReplicaRequest, VirtualReplica
from goodput_replay.emulation.requests import (
    NO_TIMES,
    Deadlines,
    block_keys,
    make_record,
    make_rejected_record,
)
from goodput_replay.emulation.settings import FleetOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from goodput_core.placement import PlacementReason
    from goodput_core.slo.record import RequestRecord
    from goodput_core.spec.choices import RouterPolicy
    from goodput_engine.messages import Configure, Rejected
    from goodput_engine.scheduler.policy import SchedulingPolicy
    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.plan import PlannedRequest
    from goodput_replay.sessions import FollowUps

__all__ = ["Actor", "VirtualFleet", "VirtualRouter"]

_NO_CLASS: Final = RequestSLO(slo_class="", targets=Targets())


class Actor(Protocol):
    """A component that changes a fleet at times of its own choice, such as a control loop."""

    def next_ns(self) -> int:
        """Return the next action time, which is later than the previous one."""
        ...

    def act(self, fleet: VirtualFleet, now_ns: int) -> None:
        """Observe the fleet and change it."""
        ...


class VirtualFleet:
    """Replicas, their requests, and the virtual clock.

    Args:
        settings: fleet configuration.
        on_record: called when a request has ended, with the request and its record.

    Attributes:
        replicas: current replicas, including starting and draining ones, oldest first.
        arrived: number of requests received so far, including rejected ones.
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
        self._drops_late = settings.configure.late_requests == LateRequests.DROP
        self._classes = ServiceClasses(
            classes=settings.slo.by_name(), default=settings.slo.default or ""
        )
        self._slos: dict[str, RequestSLO] = {}
        self._router = VirtualRouter(settings.placement, seed=settings.seed)
        self._deadlines = Deadlines(settings.timeout_ns)
        self._live: dict[int, ReplicaRequest] = {}
        self._ended: list[tuple[int, int, PlannedRequest, RequestRecord]] = []
        self._created = 0
        self._arrivals = ArrivalQueue(iter(()))
        self._input_open = True
        self._end_ns = 0
        self._peak_in_flight = 0
        self._peak_replicas = 0
        self._replica_ns = 0
        self._events = 0
        self._statistics = NO_STATISTICS
        for _ in range(settings.replicas):
            self._add(0, 0)

    def run(
        self,
        requests: Iterator[PlannedRequest],
        actors: Sequence[Actor],
        follow_ups: FollowUps | None = None,
    ) -> FleetOutcome:
        """Run from time zero until the last request has ended; see `emulate`."""
        self._peak_replicas = len(self._all_replicas())
        arrivals = self._arrivals = ArrivalQueue(requests, follow_ups)
        while arrivals.open or self._live:
            now_ns = self._next_event_ns(actors)
            for replica in self._all_replicas():
                replica.run(now_ns)
            self._end_removed()
            while (planned := arrivals.take(now_ns)) is not None:
                self.arrived += 1
                self._receive(planned, self.arrived, now_ns)
            if self._input_open and not arrivals.open:
                self._input_open = False
                for replica in self._all_replicas():
                    replica.end_input()
            self._settle(now_ns)
            self._expire(now_ns)
            for actor in actors:
                if actor.next_ns() <= now_ns:
                    self._report_ended()  # before the actor observes the fleet
                    actor.act(self, now_ns)
                    for replica in self.replicas:
                        replica.changed = True
                    self._settle(now_ns)
            self._report_ended()
        remaining = self._all_replicas()
        for replica in remaining:
            self._add_totals(replica, self._end_ns)
        return FleetOutcome(
            **asdict(self._statistics),
            end_ns=self._end_ns,
            requests=self.arrived,
            peak_in_flight=self._peak_in_flight,
            replica_ns=self._replica_ns,
            peak_replicas=self._peak_replicas,
            final_replicas=sum(not replica.draining for replica in remaining),
            events=self.arrived + self._events,
        )

    def start_replica(self, now_ns: int) -> VirtualReplica:
        """Add a replica that becomes ready after the device's start-up time."""
        startup_ns = round(self.settings.profile.startup_seconds * NS_PER_S)
        replica = self._add(now_ns, now_ns + startup_ns)
        self._peak_replicas = max(self._peak_replicas, len(self._all_replicas()))
        return replica

    def drain_replica(self, replica: VirtualReplica, now_ns: int) -> None:
        """Stop admitting requests to a replica, and remove the replica after its last request."""
        replica.draining = True
        replica.core.drain()
        self._remove_if_drained(replica, now_ns)

    def complete_move(self, source: ReplicaRequest, target: ReplicaRequest, now_ns: int) -> None:
        """Assign a migrated request to its new replica."""
        source.replica.release(source.rid)
        self._live[target.rid] = target
        self._remove_if_drained(source.replica, now_ns)

    def _all_replicas(self) -> list[VirtualReplica]:
        """Return the replicas of every pool."""
        return self.replicas

    # --- events ----------------------------------------------------------------------------
    def _next_event_ns(self, actors: Iterable[Actor]) -> int:
        times_ns = [actor.next_ns() for actor in actors]
        if self._arrivals.next_ns is not None:
            times_ns.append(self._arrivals.next_ns)
        deadline_ns = self._deadlines.next_ns(self._live)
        if deadline_ns is not None:
            times_ns.append(deadline_ns)
        dropped_by_steps = self._drops_late and (
            len(self.replicas) > 1 or any(r.draining for r in self.replicas)
        )
        if dropped_by_steps or self._arrivals.depend_on_ends:
            # A step can drop a request, which another replica then receives, or which is the last
            # one of a draining replica. It can also end a request that others follow.
            times_ns += [r.due_ns for r in self._all_replicas() if r.due_ns is not None]
        return min(times_ns)

    def _receive(self, planned: PlannedRequest, rid: int, now_ns: int) -> None:
        """Place and submit a request, with one retry, or record the reason for not serving it."""
        try:
            submit = self._make_submit(planned, rid)
            replica = self._router.place(self.replicas, submit, now_ns)
        except APIError as error:
            self._end(rid, planned, make_rejected_record(planned, error, now_ns))
            return
        request = ReplicaRequest(planned, submit, replica)
        rejected = self._submit(request, now_ns)
        if rejected is not None:
            request, rejected = self._retry(request, rejected, now_ns)
        if rejected is None:
            self._peak_in_flight = max(self._peak_in_flight, len(self._live))
            self._deadlines.add(planned, rid)
        else:
            self._end_rejected(request, rejected, now_ns)
        self._end_removed()

    def _retry(
        self, request: ReplicaRequest, rejected: Rejected, now_ns: int
    ) -> tuple[ReplicaRequest, Rejected | None]:
        """Submit a rejected request to another replica, unless that cannot help.

        Returns:
            The request on its last replica, and the rejection by that replica.
        """
        submit = request.submit
        due_ns = submit.targets.first_token_ns
        overdue = due_ns is not None and now_ns - submit.arrival_ns > due_ns
        if request.retried or overdue or not rejected.retry_after_s:
            return request, rejected
        other = self._router.retry(self.replicas, request.replica, submit, now_ns)
        if other is None:
            return request, rejected
        request = ReplicaRequest(request.planned, submit, other, retried=True)
        return request, self._submit(request, now_ns)

    def _end_rejected(
        self,
        request: ReplicaRequest,
        rejected: Rejected,
        at_ns: int,
        times: NDArray[np.int64] = NO_TIMES,
    ) -> None:
        """Record a request that its last replica rejected."""
        planned, name = request.planned, request.replica.name
        error = rejection_error(rejected)
        record = make_rejected_record(planned, error, at_ns, times=times, replica=name)
        self._end(request.rid, planned, record)

    def _end_removed(self) -> bool:
        """Retry or record the requests that replicas rejected after their admission.

        Returns:
            True if a request was retried, so that its new replica must plan.
        """
        retried = False
        for replica in self._all_replicas():
            while replica.removed:
                request, rejected, times, at_ns = replica.removed.pop(0)
                self._live.pop(request.rid, None)
                again: Rejected | None = rejected
                if not len(times):
                    request, again = self._retry(request, rejected, at_ns)
                if again is None:
                    retried = True
                else:
                    self._end_rejected(request, again, at_ns, times)
                self._remove_if_drained(replica, at_ns)
        return retried

    def _submit(self, request: ReplicaRequest, now_ns: int) -> Rejected | None:
        self._live[request.rid] = request  # first, as the oracle reads the length from `_live`
        rejected = self._submit_to_engine(request, now_ns)
        if rejected is not None:
            del self._live[request.rid]
        return rejected

    def _submit_to_engine(self, request: ReplicaRequest, now_ns: int) -> Rejected | None:
        return request.replica.submit(request, request.submit, now_ns)

    def _settle(self, now_ns: int) -> None:
        """Complete the steps that end now, and plan on every replica that changed."""
        while True:
            for replica in self._all_replicas():
                if replica.changed or replica.due_ns == now_ns:
                    replica.settle(now_ns)
            if not self._end_removed():
                return

    def _expire(self, now_ns: int) -> None:
        """End the requests that are cancelled or time out now."""
        expired = self._deadlines.take(now_ns)
        if not expired:
            return
        for rid, outcome in expired:
            request = self._live.get(rid)
            if request is None:  # ended before its deadline
                continue
            replica, planned = request.replica, request.planned
            detail = ""
            if outcome is Outcome.TIMEOUT:
                detail = f"nothing complete within {self.settings.timeout_ns / NS_PER_S:g} s"
            times = self._cancel(request)
            record = make_record(
                planned, outcome, now_ns, times=times, replica=replica.name, detail=detail
            )
            self._end(rid, planned, record)
            self._remove_if_drained(replica, now_ns)
        self._settle(now_ns)

    def _cancel(self, request: ReplicaRequest) -> NDArray[np.int64]:
        """Cancel a request on its replicas and return its token times."""
        return request.replica.cancel(request)

    # --- requests --------------------------------------------------------------------------
    def _make_submit(self, planned: PlannedRequest, rid: int) -> Submit:
        """Return the same submission that the engine's HTTP server would create.

        Raises:
            APIError: 400 for an unknown class.
        """
        name = planned.slo_class
        slo = self._slos.get(name, _NO_CLASS)
        if slo is _NO_CLASS and self._classes.classes:
            slo = self._classes.resolve(Targets(), header=name or None, body=None)
            self._slos[name] = slo
        targets, priority = slo.targets, planned.priority
        if not planned.targets.empty:
            targets = targets.overridden_by(planned.targets)
        return Submit(
            rid=rid,
            arrival_ns=planned.scheduled_ns,
            input_tokens=planned.prompt.input_tokens,
            max_output_tokens=planned.max_output_tokens,
            block_hashes=block_keys(planned.prompt, self.settings.profile.block_size),
            slo_class=name,
            targets=targets,
            priority=slo.priority if priority is None else priority,
            weight=slo.weight,
            executor=ExecutorInput(output_tokens=planned.output_tokens),
        )

    def _true_length(self, rid: int) -> int:
        """Return a request's true output length. Only the oracle may use it."""
        return self._live[rid].planned.output_tokens

    def _finished(
        self, request: ReplicaRequest, times: NDArray[np.int64], cached_tokens: int
    ) -> None:
        """Record a request that a replica completed."""
        replica, end_ns = request.replica, int(times[-1])
        is_cut_off = len(times) < request.planned.output_tokens
        record = make_record(
            request.planned,
            Outcome.OK,
            end_ns,
            times=times,
            replica=replica.name,
            cached_tokens=cached_tokens,
            deviations=(Deviation.CUT_OFF,) if is_cut_off else (),
        )
        self._end(request.rid, request.planned, record)
        self._remove_if_drained(replica, end_ns)

    def _end(self, rid: int, planned: PlannedRequest, record: RequestRecord) -> None:
        self._live.pop(rid, None)
        assert record.end_ns is not None
        self._arrivals.ended(planned, record.end_ns)
        self._ended.append((record.end_ns, rid, planned, record))

    def _report_ended(self) -> None:
        """Pass the requests that ended since the last call to `on_record`, by end time."""
        if not self._ended:
            return
        self._ended.sort(key=lambda entry: entry[:2])
        self._end_ns = self._ended[-1][0]
        for _, _, planned, record in self._ended:
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
        ended: Callable[[ReplicaRequest, NDArray[np.int64], int], None],
    ) -> VirtualReplica:
        settings = self.settings
        replica = VirtualReplica(
            name,
            build_core(configure, settings.profile, policy=self._policy(configure)),
            created_ns=created_ns,
            ready_ns=ready_ns,
            fast_forward=settings.fast_forward,
            ended=ended,
        )
        if not self._input_open:
            replica.end_input()
        return replica

    def _policy(self, configure: Configure) -> SchedulingPolicy | None:
        """Return a policy to run instead of the configured one; None for the configured one."""
        if self.settings.oracle:
            return SjfPolicy(
                predictor=KnownLengths(self._true_length), ageing_ns=configure.ageing_ns
            )
        build = self.settings.build_policy
        return None if build is None else build()

    def _remove_if_drained(self, replica: VirtualReplica, now_ns: int) -> None:
        """Remove a draining replica that has no requests left, recorded or not."""
        if replica.draining and not replica.in_flight and not replica.removed:
            self.replicas = [r for r in self.replicas if r is not replica]
            self._add_totals(replica, now_ns)

    def _add_totals(self, replica: VirtualReplica, removed_ns: int) -> None:
        """Add the totals of a replica that was removed or reached the end of the run."""
        self._replica_ns += max(0, removed_ns - replica.created_ns)
        self._events += replica.events
        self._statistics = self._statistics.plus(replica.core.scheduler.stats)


class VirtualRouter:
    """Assigns requests to replicas.

    Args:
        policy: placement policy.
        seed: seed of the policy's random choices.
    """

    def __init__(self, policy: RouterPolicy, *, seed: int) -> None:
        self._place = PLACEMENTS[policy]
        self._state = PlacementState(seed=seed)
        limits = RouterLimits()
        self._budget = RetryBudget(percent=limits.retry_percent, burst=limits.retry_burst)

    def place(
        self, replicas: Iterable[VirtualReplica], submit: Submit, now_ns: int
    ) -> VirtualReplica:
        """Return the replica for a new request.

        Raises:
            APIError: 429 or 503 if no replica can take it.
        """
        self._budget.earn()
        replica, reason = self._choose(replicas, submit, now_ns)
        if replica is None:
            raise not_placed(reason)
        return replica

    def retry(
        self,
        replicas: Iterable[VirtualReplica],
        tried: VirtualReplica,
        submit: Submit,
        now_ns: int,
    ) -> VirtualReplica | None:
        """Return another replica for a request rejected under load; None without a retry."""
        chosen, _ = self._choose((r for r in replicas if r is not tried), submit, now_ns)
        return None if chosen is None or not self._budget.spend() else chosen

    def _choose(
        self, replicas: Iterable[VirtualReplica], submit: Submit, now_ns: int
    ) -> tuple[VirtualReplica | None, PlacementReason]:
        by_name = {replica.name: replica for replica in replicas}
        loads = [replica.load(now_ns) for replica in by_name.values()]
        importance = None
        if any(load.saturated for load in loads):
            importance = Importance.of(
                submit.targets,
                priority=submit.priority,
                weight=submit.weight,
                waited_ns=now_ns - submit.arrival_ns,
            )
        self._state, placement = self._place(
            self._state, loads, submit.block_hashes, now_ns, importance=importance
        )
        chosen = None if placement.replica is None else by_name[placement.replica]
        return chosen, placement.reason
