"""The control laws in the loop: an actor that observes a fleet, asks the law and applies it.

It gathers what the operator would gather from metrics, from the fleet's own objects, and must not
know how the law decides. What is recorded is the decision with everything it was made from, so it
can be made again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from goodput_core.control import (
    Bounds,
    DeviceCapacity,
    ReplicaPhase,
    ReplicaWindow,
    ServiceDecision,
    ServiceObservation,
    ServiceParams,
    ServiceState,
    Signal,
    Traffic,
    WindowTally,
    service_law,
)
from goodput_core.control.decision import json_value
from goodput_core.histogram import LengthMix
from goodput_engine.messages import Limits, SetLimits

if TYPE_CHECKING:
    from goodput_core.slo.record import RequestRecord
    from goodput_replay.emulation.fleet import Fleet
    from goodput_replay.emulation.replica import Replica
    from goodput_replay.plan import PlannedRequest

__all__ = ["ControlLoop", "Law", "decision_line"]

Law: TypeAlias = Callable[
    [ServiceState, ServiceObservation, ServiceParams, int], tuple[ServiceState, ServiceDecision]
]
"""What decides; `service_law` does."""

_STARTS: Final = 16
"""So many of the latest start-up times are told to the law."""


class ControlLoop:
    """The service's law over a fleet whose replicas are all alike; an actor.

    Args:
        params: the manifest's bounds. Mode `Recommend` observes and decides, and what is applied
            stays as it was.
        interval_ns: between two decisions, above 0.
        decided: told of each decision.
        signal: whether what routers say at an instant can be believed; None: always.
        law: what decides.
    """

    def __init__(
        self,
        params: ServiceParams,
        *,
        interval_ns: int,
        decided: Callable[[ServiceDecision], None],
        signal: Callable[[int], Signal] | None = None,
        law: Law = service_law,
    ) -> None:
        self._params = params
        self._interval_ns = interval_ns
        self._decided = decided
        self._signal = signal
        self._law = law
        self._next_ns = interval_ns
        self._state = ServiceState()
        self._bounds: Bounds | None = None
        self._revision = 0
        self._arrived = 0
        self._tally = WindowTally()
        self._finished: list[tuple[int, int, int]] = []
        self._preemptions: dict[str, int] = {}
        self._started: dict[str, int] = {}

    def next_ns(self) -> int:
        """When it decides next."""
        return self._next_ns

    def ended(self, planned: PlannedRequest, record: RequestRecord) -> None:
        """A request ended; to be told of each one, before the next decision."""
        promised = {c.name: c.targets for c in self._params.classes}.get(record.slo_class)
        if promised is not None:
            self._tally.add(record, promised.overridden_by(planned.targets))
        if record.output_tokens:
            cached = record.cached_tokens or 0
            self._finished.append((planned.prompt.input_tokens, cached, record.output_tokens))

    def act(self, fleet: Fleet, now_ns: int) -> None:
        """Observe, decide, apply."""
        self._next_ns = now_ns + self._interval_ns
        observation = self._observe(fleet, now_ns)
        self._state, decision = self._law(self._state, observation, self._params, now_ns)
        self._apply(fleet, decision, now_ns)
        self._decided(decision)

    def _observe(self, fleet: Fleet, now_ns: int) -> ServiceObservation:
        finished, self._finished = self._finished, []
        arrivals, self._arrived = fleet.arrived - self._arrived, fleet.arrived
        staying = [r for r in fleet.replicas if not r.draining]
        for replica in staying:
            if replica.ready_ns <= now_ns and replica.ready_ns > replica.created_ns:
                self._started[replica.name] = replica.ready_ns - replica.created_ns
        profile = fleet.settings.profile
        return ServiceObservation(
            interval_ns=self._interval_ns,
            traffic=Traffic(
                signal=Signal.FRESH if self._signal is None else self._signal(now_ns),
                arrivals=arrivals,
                in_flight=sum(r.in_flight for r in fleet.replicas),
                finished=LengthMix.of_requests(finished),
            ),
            classes=self._tally.take(),
            replicas=tuple(self._window(r, now_ns) for r in fleet.replicas),
            replicas_asked=len(staying),
            startups_ns=tuple(self._started.values())[-_STARTS:],
            device=DeviceCapacity(
                form=profile.form,
                kv_tokens=profile.kv_blocks * profile.block_size,
                host_ns_per_step=profile.host_ns_per_step,
                host_ns_per_request=profile.host_ns_per_request,
            ),
        )

    def _window(self, replica: Replica, now_ns: int) -> ReplicaWindow:
        load = replica.load(now_ns)
        total = replica.core.scheduler.stats.preemptions
        before = self._preemptions.get(replica.name, 0)
        self._preemptions[replica.name] = total
        phase = ReplicaPhase.READY if load.ready else ReplicaPhase.STARTING
        return ReplicaWindow(
            name=replica.name,
            phase=ReplicaPhase.DRAINING if replica.draining else phase,
            signal=Signal.FRESH,
            running=load.in_flight - load.waiting,
            waiting=load.waiting,
            kv_used_blocks=load.kv_used_blocks,
            kv_total_blocks=load.kv_total_blocks,
            preemptions=total - before,
        )

    def _apply(self, fleet: Fleet, decision: ServiceDecision, now_ns: int) -> None:
        staying = [r for r in fleet.replicas if not r.draining]
        bounds = decision.apply_bounds
        told = [] if bounds == self._bounds else staying
        self._bounds = bounds
        self._revision += 1
        wanted = decision.apply_replicas
        started = [fleet.start_replica(now_ns) for _ in range(wanted - len(staying))]
        for replica in [*told, *started]:
            replica.core.set_limits(_limits(bounds, self._revision))
        # The youngest go first: those that have not started yet serve nobody.
        for replica in reversed(staying[wanted:]):
            fleet.drain_replica(replica, now_ns)


def decision_line(decision: ServiceDecision) -> bytes:
    """One line of `decisions.jsonl`: the decision and all that it was made from."""
    return msgspec.json.encode(decision, enc_hook=json_value) + b"\n"


def _limits(bounds: Bounds, revision: int) -> SetLimits:
    limits = Limits(
        token_budget=bounds.max_tokens,
        max_num_seqs=bounds.max_num_seqs,
        safety_percent=bounds.safety_percent,
    )
    return SetLimits(revision=revision, limits=limits)
