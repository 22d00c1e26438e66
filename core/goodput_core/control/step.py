"""The body of the control loop: one interval of one service, as a pure function of one value.

Each driver observes its engines, calls `control_step`, and applies the result: it pushes limits to
engines, sets the replicas and reports the changes. `control_step` runs the laws, and determines the
revision of the limits and the engines to which they must be pushed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from goodput_core.contract import MAX_LIMITS_REVISION
from goodput_core.control.decision import (
    Change,
    ServiceDecision,
    ServiceState,
    replicas_change,
    service_law,
    token_budget_change,
)
from goodput_core.control.observation import (
    DeviceCapacity,
    ReplicaPhase,
    ReplicaWindow,
    ServiceObservation,
    ServiceParams,
    Signal,
    Traffic,
)
from goodput_core.control.slo_window import ClassOutcomes, ClassWindow
from goodput_core.control.token_budget import Bounds, TokenBudgetState
from goodput_core.engine_state import EngineState
from goodput_core.spec.choices import ControlMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "ControlInput",
    "ControlState",
    "ControlStep",
    "EngineReading",
    "Law",
    "LimitsPush",
    "Setpoint",
    "control_step",
]

_MAX_EXCEEDED: Final = MAX_LIMITS_REVISION // 2
"""Larger revisions of an engine are ignored. Only another client can have set one, and a revision
above it could leave none for later changes."""

Law = Callable[
    [ServiceState, ServiceObservation, ServiceParams, int], tuple[ServiceState, ServiceDecision]
]
"""A function with the signature of `service_law`, so that comparisons can run another law."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setpoint:
    """Limits and replicas in force; stored, so that they survive a restart of the controller.

    Args:
        limits_revision: revision of `bounds`; increases with each change.
        bounds: limits of every engine.
        replicas: desired number of replicas.
    """

    limits_revision: int
    bounds: Bounds
    replicas: int

    @classmethod
    def initial(cls, params: ServiceParams) -> Setpoint:
        """Return the limits of the manifest at revision 0; engines start with them."""
        return cls(
            limits_revision=0, bounds=Bounds.initial(params), replicas=params.initial_replicas
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """One engine at the end of an interval.

    Args:
        name: name of the pod, process or emulated replica.
        signal: state of the reading; the following fields are valid only if this is FRESH.
        state: counters, requests and limits of the engine.
        preemptions: preemptions in the interval; None if the server does not publish them.
        token_bounds: lower and upper bound of the token budget in the manifest that the engine has
            read; None if not known.
        max_width: upper bound of the batch width in that manifest; None if not known.
        device: step times and memory of the device; None if not known yet.
        foreign: True for another server than Goodput's engine, which takes no limits.
    """

    name: str
    signal: Signal
    state: EngineState = field(default_factory=EngineState)
    preemptions: int | None = 0
    token_bounds: tuple[int, int] | None = None
    max_width: int | None = None
    device: DeviceCapacity | None = None
    foreign: bool = False

    @property
    def takes_limits(self) -> bool:
        """True if limits can be pushed to the engine."""
        return self.signal is Signal.FRESH and not self.foreign


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """State of the control loop between two intervals.

    Args:
        setpoint: limits and replicas in force.
        law: state of the laws. A new state, as after a restart, starts from the setpoint's limits.
        reported: limits after the last reported change; None before the first step.
        recommended: replicas of the last decision; None before the first one.
    """

    setpoint: Setpoint
    law: ServiceState = field(default_factory=ServiceState)
    reported: Bounds | None = None
    recommended: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlInput:
    """Inputs of one control step.

    Args:
        state: state after the last step.
        params: parameters from the manifest.
        interval_ns: length of the interval, above 0.
        traffic: traffic over all routers.
        classes: met and missed targets of the requests that ended in the interval.
        outcomes: outcomes of these requests.
        objective_missed: True if the service misses an objective in the window of its status; False
            if it has no such window.
        engines: readings of the engines that have an address.
        phases: phase of every existing engine, by name.
        desired_replicas: desired replicas of the workload.
        startups_ns: start-up times of the latest engines, from creation until routable.
        now_ns: end of the interval on a monotonic clock.
        law: control law; replaced only for comparisons.
    """

    state: ControlState
    params: ServiceParams
    interval_ns: int
    traffic: Traffic
    classes: tuple[ClassWindow, ...]
    outcomes: tuple[ClassOutcomes, ...] = ()
    objective_missed: bool = False
    engines: tuple[EngineReading, ...]
    phases: Mapping[str, ReplicaPhase]
    desired_replicas: int
    startups_ns: tuple[int, ...]
    now_ns: int
    law: Law = service_law


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsPush:
    """Limits to push to one engine.

    Args:
        name: name of the engine.
        limits: body of `PATCH /control/limits`.
    """

    name: str
    limits: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlStep:
    """Result of one control step.

    Args:
        state: state for the next step. The driver applies its setpoint.
        pushes: limits for engines that do not have those of the setpoint yet.
        changes: changes to report, token budget first.
        decision: decision of the laws with its inputs.
    """

    state: ControlState
    pushes: tuple[LimitsPush, ...]
    changes: tuple[Change, ...]
    decision: ServiceDecision


def control_step(inputs: ControlInput) -> ControlStep:
    """Run the laws for one interval, and return what the driver must do."""
    state, params, last = inputs.state, inputs.params, inputs.state.setpoint
    law_state = state.law
    if law_state.bounds.bounds is None and params.mode is ControlMode.AUTO:
        # Start with the current number of routable replicas, because a restart of the controller
        # does not change it.
        ready = sum(phase is ReplicaPhase.READY for phase in inputs.phases.values())
        law_state = replace(law_state, bounds=TokenBudgetState(bounds=last.bounds, ready=ready))
    readings = {reading.name: reading for reading in inputs.engines}
    observation = ServiceObservation(
        interval_ns=inputs.interval_ns,
        traffic=inputs.traffic,
        classes=inputs.classes,
        outcomes=inputs.outcomes,
        objective_missed=inputs.objective_missed,
        replicas=tuple(
            _replica_window(n, phase, readings.get(n)) for n, phase in inputs.phases.items()
        ),
        desired_replicas=inputs.desired_replicas,
        startups_ns=inputs.startups_ns,
        device=_find_device(inputs.engines),
    )
    new_law_state, decision = inputs.law(law_state, observation, params, inputs.now_ns)
    setpoint = Setpoint(
        limits_revision=_next_revision(last, decision.apply_bounds, inputs.engines),
        bounds=decision.apply_bounds,
        replicas=decision.apply_replicas,
    )
    reported = last.bounds if state.reported is None else state.reported
    changes = (
        token_budget_change(decision, before=reported, recommended=law_state.bounds.bounds),
        replicas_change(decision, recommended=state.recommended),
    )
    return ControlStep(
        state=ControlState(
            setpoint=setpoint,
            law=new_law_state,
            reported=setpoint.bounds,
            recommended=None if decision.replicas is None else decision.replicas.replicas,
        ),
        pushes=tuple(_list_pushes(setpoint, inputs.engines)),
        changes=tuple(change for change in changes if change is not None),
        decision=decision,
    )


def _replica_window(name: str, phase: ReplicaPhase, reading: EngineReading | None) -> ReplicaWindow:
    if reading is None:
        return ReplicaWindow(name=name, phase=phase, signal=Signal.MISSING)
    state = reading.state
    return ReplicaWindow(
        name=name,
        phase=phase,
        signal=reading.signal,
        running=state.running,
        waiting=state.waiting,
        kv_used_blocks=max(0, state.kv_total_blocks - state.kv_free_blocks),
        kv_total_blocks=state.kv_total_blocks,
        preemptions=reading.preemptions,
        settled=state.settled,
    )


def _find_device(engines: Iterable[EngineReading]) -> DeviceCapacity | None:
    """Return the first known device; all engines of a service run on equal devices."""
    return next((e.device for e in engines if e.signal is Signal.FRESH and e.device), None)


def _next_revision(last: Setpoint, bounds: Bounds, engines: Sequence[EngineReading]) -> int:
    """Return the revision of the limits, above that of every engine whose limits must change.

    Another client, or this controller before its restart, may have set a higher revision. An engine
    may also have limits of the current revision that were clamped to an earlier manifest. An engine
    ignores a second push of the same revision, so the limits need a new revision.
    """
    fresh = [engine for engine in engines if engine.takes_limits]
    revisions = (engine.state.limits_revision for engine in fresh)
    highest = max((number for number in revisions if number <= _MAX_EXCEEDED), default=0)
    if highest > last.limits_revision:
        return highest + 1
    pushed = (engine for engine in fresh if engine.state.limits_revision == last.limits_revision)
    changed = bounds != last.bounds or not all(_has_limits(engine, bounds) for engine in pushed)
    return last.limits_revision + changed


def _list_pushes(setpoint: Setpoint, engines: Iterable[EngineReading]) -> Iterator[LimitsPush]:
    revision = setpoint.limits_revision
    for engine in engines:
        if engine.takes_limits and engine.state.limits_revision < revision:
            limits = _clamp_limits(engine, setpoint.bounds)
            yield LimitsPush(name=engine.name, limits={"revision": revision, **limits})


def _clamp_limits(engine: EngineReading, bounds: Bounds) -> dict[str, int]:
    """Return the limits clamped to the engine's manifest, because it rejects limits outside."""
    min_tokens, max_tokens = engine.token_bounds or (bounds.max_tokens, bounds.max_tokens)
    width = bounds.max_num_seqs if engine.max_width is None else engine.max_width
    limits = {
        "token_budget": min(max(bounds.max_tokens, min_tokens), max_tokens),
        "max_num_seqs": min(bounds.max_num_seqs, width),
    }
    if engine.state.budget_law:  # without a budget law, nothing uses the safety factor
        limits["safety_percent"] = bounds.safety_percent
    return limits


def _has_limits(engine: EngineReading, bounds: Bounds) -> bool:
    """True if the engine reports the limits that would be pushed; 0 means not reported."""
    limits = _clamp_limits(engine, bounds)
    return all(getattr(engine.state, name) in {0, value} for name, value in limits.items())
