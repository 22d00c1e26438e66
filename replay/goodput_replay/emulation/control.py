"""Run the control loop over an emulated fleet, and write its decisions to the run folder.

`ControlLoop` reads the fleet's objects where the operator reads metrics, and runs any control law.
Each decision is recorded with its inputs, so that it can be recomputed.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from goodput_core.control import (
    MAX_STARTUPS,
    ControlInput,
    ControlState,
    DeviceCapacity,
    EngineReading,
    LimitsPush,
    OutcomeTally,
    ReplicaPhase,
    ServiceDecision,
    ServiceParams,
    Setpoint,
    Signal,
    Traffic,
    WindowTally,
    control_step,
    service_law,
)
from goodput_core.control.decision import json_value
from goodput_core.files import partial_path
from goodput_core.histogram import LengthMix
from goodput_core.slo.judging import judge
from goodput_engine.messages import Limits, SetLimits
from goodput_replay.runs.files import DECISIONS_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from goodput_core.control.step import Law
    from goodput_core.slo.record import RequestRecord
    from goodput_replay.emulation.fleet import VirtualFleet
    from goodput_replay.emulation.replica import VirtualReplica
    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.plan import PlannedRequest

__all__ = ["ControlLoop", "control_loop", "decision_line"]


class ControlLoop:
    """An actor: the control loop of a fleet of identical replicas.

    Args:
        params: parameters from the manifest. In mode Recommend, decisions are not applied.
        interval_ns: time between two decisions, above 0.
        decided: called with each decision.
        signal: returns the freshness of the router metrics at a time; None if they are always
            fresh.
        law: control law.
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
        self._targets = {c.name: c.targets for c in params.classes}
        self._interval_ns = interval_ns
        self._decided = decided
        self._signal = signal
        self._law = law
        self._next_ns = interval_ns
        self._state = ControlState(setpoint=Setpoint.initial(params))
        self._arrived = 0
        self._tally = WindowTally()
        self._outcomes = OutcomeTally()
        self._finished: list[tuple[int, int, int]] = []
        self._preemptions: dict[str, int] = {}
        self._startups_ns: dict[str, int] = {}

    def next_ns(self) -> int:
        """Return the time of the next decision."""
        return self._next_ns

    def ended(self, planned: PlannedRequest, record: RequestRecord) -> None:
        """Count a request that ended, for the next decision."""
        targets = self._targets.get(record.slo_class)
        if targets is not None:
            targets = targets.overridden_by(planned.targets)
            judgement = judge(record, targets)
            self._tally.add(record, targets, judgement)
            self._outcomes.add(record.slo_class, judgement)
        if record.output_tokens:
            cached = record.cached_tokens or 0
            self._finished.append((planned.prompt.input_tokens, cached, record.output_tokens))

    def act(self, fleet: VirtualFleet, now_ns: int) -> None:
        """Observe the fleet, decide, and apply the decision."""
        self._next_ns = now_ns + self._interval_ns
        step = control_step(self._observe(fleet, now_ns))
        self._state = step.state
        self._apply(fleet, step.pushes, now_ns)
        self._decided(step.decision)

    def _observe(self, fleet: VirtualFleet, now_ns: int) -> ControlInput:
        finished, self._finished = self._finished, []
        arrivals, self._arrived = fleet.arrived - self._arrived, fleet.arrived
        desired = [r for r in fleet.replicas if not r.draining]
        for replica in desired:
            if replica.ready_ns <= now_ns and replica.ready_ns > replica.created_ns:
                self._startups_ns[replica.name] = replica.ready_ns - replica.created_ns
        profile = fleet.settings.profile
        device = DeviceCapacity(
            form=profile.form,
            kv_tokens=profile.kv_blocks * profile.block_size,
            host_ns_per_step=profile.host_ns_per_step,
            host_ns_per_request=profile.host_ns_per_request,
        )
        return ControlInput(
            state=self._state,
            params=self._params,
            interval_ns=self._interval_ns,
            traffic=Traffic(
                signal=Signal.FRESH if self._signal is None else self._signal(now_ns),
                arrivals=arrivals,
                in_flight=sum(r.in_flight for r in fleet.replicas),
                finished=LengthMix.of_requests(finished),
            ),
            classes=self._tally.take(),
            outcomes=self._outcomes.take(),
            engines=tuple(self._reading(r, device, now_ns) for r in fleet.replicas),
            phases={r.name: _phase(r, now_ns) for r in fleet.replicas},
            desired_replicas=len(desired),
            startups_ns=tuple(self._startups_ns.values())[-MAX_STARTUPS:],
            now_ns=now_ns,
            law=self._law,
        )

    def _reading(
        self, replica: VirtualReplica, device: DeviceCapacity, now_ns: int
    ) -> EngineReading:
        state = replica.core.state(now_ns)
        # Requests that have ended hold their blocks until the step in flight ends: exclude them.
        state = replace(state, running=replica.in_flight - state.waiting)
        previous_preemptions = self._preemptions.get(replica.name, 0)
        self._preemptions[replica.name] = state.preemptions
        return EngineReading(
            name=replica.name,
            signal=Signal.FRESH,
            state=state,
            preemptions=state.preemptions - previous_preemptions,
            device=device,
        )

    def _apply(self, fleet: VirtualFleet, pushes: tuple[LimitsPush, ...], now_ns: int) -> None:
        setpoint = self._state.setpoint
        desired = [r for r in fleet.replicas if not r.draining]
        replicas_to_update = {push.name for push in pushes}
        for replica in desired:
            if replica.name in replicas_to_update:
                replica.core.set_limits(_limits(setpoint))
        for _ in range(setpoint.replicas - len(desired)):
            # A new replica starts with the current limits, as a pod reads them from its ConfigMap.
            fleet.start_replica(now_ns).core.set_limits(_limits(setpoint))
        # Drain the newest replicas first, as those that are still starting serve no request.
        for replica in reversed(desired[setpoint.replicas :]):
            fleet.drain_replica(replica, now_ns)


def _phase(replica: VirtualReplica, now_ns: int) -> ReplicaPhase:
    if replica.draining:
        return ReplicaPhase.DRAINING
    return ReplicaPhase.READY if replica.ready_ns <= now_ns else ReplicaPhase.STARTING


def _limits(setpoint: Setpoint) -> SetLimits:
    limits = Limits(
        token_budget=setpoint.bounds.max_tokens,
        max_num_seqs=setpoint.bounds.max_num_seqs,
        safety_percent=setpoint.bounds.safety_percent,
    )
    return SetLimits(revision=setpoint.limits_revision, limits=limits)


def decision_line(decision: ServiceDecision) -> bytes:
    """Return a line of `decisions.jsonl`, which has the decision and its inputs."""
    return msgspec.json.encode(decision, enc_hook=json_value) + b"\n"


@contextmanager
def control_loop(settings: FleetSettings, folder: Path) -> Iterator[ControlLoop | None]:
    """Open the control loop of a run. The loop writes its decisions to `decisions.jsonl`.

    Args:
        settings: fleet configuration.
        folder: run folder.

    Yields:
        The loop; None if the manifest's control mode is `Manual`.

    Raises:
        OSError: the file could not be written.
    """
    control = settings.control
    if control is None:
        yield None
        return
    # The run's writer renames the file when the records are complete.
    with partial_path(folder / DECISIONS_FILE).open("wb") as file:

        def write(decision: ServiceDecision) -> None:
            file.write(decision_line(decision))

        yield ControlLoop(control.params, interval_ns=control.interval_ns, decided=write)
