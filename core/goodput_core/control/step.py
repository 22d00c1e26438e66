"""The body of the control loop: one interval of one service, as a pure function of one value.

Each driver observes its engines, calls `control_step`, and applies the result: it pushes limits to
engines, sets the replicas and reports the changes. Around the laws this module keeps what every
driver needs: the rising revision of the limits, and which engines do not have them yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from goodput_core.contract import MAX_LIMITS_REVISION
from goodput_core.control.changes import Change, replicas_change, token_budget_change
from goodput_core.control.decision import ServiceDecision, ServiceState, service_law
from goodput_core.control.observation import (
    DeviceCapacity,
    ReplicaPhase,
    ReplicaWindow,
    ServiceObservation,
    ServiceParams,
    Signal,
    Traffic,
)
from goodput_core.control.slo_window import ClassWindow
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
"""A higher revision at an engine, which only another client can have set, is not exceeded: beyond
the maximum no later change would be possible."""

Law = Callable[
    [ServiceState, ServiceObservation, ServiceParams, int], tuple[ServiceState, ServiceDecision]
]
"""A law in the place of `service_law`, for comparisons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setpoint:
    """Limits and replicas in force. It outlives the controller that decided it.

    Args:
        limits_revision: rises with each change of `bounds`.
        bounds: the limits of every engine.
        replicas: desired engines.
    """

    limits_revision: int
    bounds: Bounds
    replicas: int

    @classmethod
    def initial(cls, params: ServiceParams) -> Setpoint:
        """Return the manifest's own limits, with which engines start without any revision."""
        return cls(
            limits_revision=0, bounds=Bounds.initial(params), replicas=params.initial_replicas
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """One engine at the end of an interval.

    Args:
        name: of its pod, process or emulated replica.
        signal: the rest is valid only if this is FRESH.
        state: its counters, requests and limits.
        preemptions: in the interval.
        settled: False while its token budget adapts to a change of the device.
        token_bounds: lower and upper bound of its token budget in the manifest that it has read;
            None if not known.
        max_width: upper bound of its batch width, likewise.
        device: its step-time law; None if not known yet.
    """

    name: str
    signal: Signal
    state: EngineState = field(default_factory=EngineState)
    preemptions: int = 0
    settled: bool = True
    token_bounds: tuple[int, int] | None = None
    max_width: int | None = None
    device: DeviceCapacity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """State of the control loop between two intervals.

    Args:
        setpoint: limits and replicas in force.
        law: state of the laws; a new one after a restart continues from the setpoint.
        reported: the limits of the last reported change; a difference to them is a new change.
        recommended: replicas of the last decision; None without one.
    """

    setpoint: Setpoint
    law: ServiceState = field(default_factory=ServiceState)
    reported: Bounds | None = None
    recommended: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlInput:
    """Everything that one step of control depends on.

    Args:
        state: of the last step.
        params: of the manifest.
        interval_ns: time over which counters were counted, above 0.
        traffic: of all routers.
        classes: met and missed targets of the requests that ended in the interval.
        engines: readings of the engines that have an address.
        phases: every engine that exists, by name.
        replicas_asked: desired replicas of the workload.
        startups_ns: from created to routable, of the latest engines that started.
        now_ns: end of the interval on a monotonic clock.
        law: decides; another one for comparisons.
    """

    state: ControlState
    params: ServiceParams
    interval_ns: int
    traffic: Traffic
    classes: tuple[ClassWindow, ...]
    engines: tuple[EngineReading, ...]
    phases: Mapping[str, ReplicaPhase]
    replicas_asked: int
    startups_ns: tuple[int, ...]
    now_ns: int
    law: Law = service_law


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsPush:
    """Limits to push to one engine.

    Args:
        name: of the engine.
        limits: body of `PATCH /control/limits`.
    """

    name: str
    limits: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlStep:
    """Result of one step.

    Args:
        state: for the next step; its setpoint is to be put in force.
        pushes: for the engines that do not have the limits of the setpoint yet.
        changes: to report, token budget first.
        decision: of the laws, with its inputs.
    """

    state: ControlState
    pushes: tuple[LimitsPush, ...]
    changes: tuple[Change, ...]
    decision: ServiceDecision


def control_step(given: ControlInput) -> ControlStep:
    """Run one interval of control."""
    state, params, last = given.state, given.params, given.state.setpoint
    law_state = state.law
    if law_state.bounds.bounds is None and params.mode is ControlMode.AUTO:
        # With the routable replicas of now: a restart is no change of their number.
        ready = sum(phase is ReplicaPhase.READY for phase in given.phases.values())
        law_state = replace(law_state, bounds=TokenBudgetState(bounds=last.bounds, ready=ready))
    readings = {reading.name: reading for reading in given.engines}
    observation = ServiceObservation(
        interval_ns=given.interval_ns,
        traffic=given.traffic,
        classes=given.classes,
        replicas=tuple(_window(n, phase, readings.get(n)) for n, phase in given.phases.items()),
        replicas_asked=given.replicas_asked,
        startups_ns=given.startups_ns,
        device=_device(given.engines),
    )
    after, decision = given.law(law_state, observation, params, given.now_ns)
    setpoint = Setpoint(
        limits_revision=_revision(last, decision.apply_bounds, given.engines),
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
            law=after,
            reported=setpoint.bounds,
            recommended=None if decision.replicas is None else decision.replicas.replicas,
        ),
        pushes=tuple(_pushes(setpoint, given.engines)),
        changes=tuple(change for change in changes if change is not None),
        decision=decision,
    )


def _window(name: str, phase: ReplicaPhase, reading: EngineReading | None) -> ReplicaWindow:
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
        settled=reading.settled,
    )


def _device(engines: Iterable[EngineReading]) -> DeviceCapacity | None:
    """Return the device of any engine: all engines of a service run on equal devices."""
    return next((e.device for e in engines if e.signal is Signal.FRESH and e.device), None)


def _revision(last: Setpoint, bounds: Bounds, engines: Sequence[EngineReading]) -> int:
    """Return a revision above those of all engines whose limits have to change.

    An engine may have a higher revision, set by another client or before a restart. It may also
    have this revision and less than its limits: it has read a changed manifest since that allows
    more of them, and ignores limits of a revision that it has.
    """
    fresh = [engine for engine in engines if engine.signal is Signal.FRESH]
    revisions = (engine.state.limits_revision for engine in fresh)
    ahead = max((number for number in revisions if number <= _MAX_EXCEEDED), default=0)
    if ahead > last.limits_revision:
        return ahead + 1
    pushed = (engine for engine in fresh if engine.state.limits_revision == last.limits_revision)
    changed = bounds != last.bounds or not all(_has_limits(engine, bounds) for engine in pushed)
    return last.limits_revision + changed


def _pushes(setpoint: Setpoint, engines: Iterable[EngineReading]) -> Iterator[LimitsPush]:
    revision = setpoint.limits_revision
    for engine in engines:
        if engine.signal is Signal.FRESH and engine.state.limits_revision < revision:
            limits = _limits(engine, setpoint.bounds)
            yield LimitsPush(name=engine.name, limits={"revision": revision, **limits})


def _limits(engine: EngineReading, bounds: Bounds) -> dict[str, int]:
    """Return the limits, clamped to the manifest that the engine has read: it rejects others."""
    least, most = engine.token_bounds or (bounds.max_tokens, bounds.max_tokens)
    width = bounds.max_num_seqs if engine.max_width is None else engine.max_width
    limits = {
        "token_budget": min(max(bounds.max_tokens, least), most),
        "max_num_seqs": min(bounds.max_num_seqs, width),
    }
    if engine.state.budget_law:  # otherwise no law uses a safety factor
        limits["safety_percent"] = bounds.safety_percent
    return limits


def _has_limits(engine: EngineReading, bounds: Bounds) -> bool:
    """True if the engine reports the limits that would be pushed; 0 means not reported."""
    limits = _limits(engine, bounds)
    return all(getattr(engine.state, name) in {0, value} for name, value in limits.items())
