"""One round of control: observe a service, ask its law, and say what is to be told to whom.

The law itself is core's. Here is what surrounds it wherever engines are real: the rising
revision of limits, who must be told of them again, and which of its words are news.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from goodput_core.contract import MAX_LIMITS_REVISION
from goodput_core.control import (
    DeviceCapacity,
    ReplicaPhase,
    ReplicaWindow,
    ServiceDecision,
    ServiceObservation,
    ServiceParams,
    ServiceState,
    Signal,
    TokenBudgetState,
    service_law,
)
from goodput_core.spec.choices import ControlMode
from goodput_operator.control.decided import Decided
from goodput_operator.control.words import Change, bounds_change, replicas_change

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_core.control import Bounds
    from goodput_operator.control.measures import EngineReading, Measures

__all__ = ["ControlRound", "LimitsPush", "control_round"]


_MOST_OUTDONE: Final = MAX_LIMITS_REVISION // 2
"""An engine that has a higher revision, which only somebody else can have told it, is left alone:
beyond the highest there would be none for anybody's next change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsPush:
    """Limits that one engine is to be told.

    Args:
        name: of the engine's pod or process.
        limits: the body of PATCH /control/limits.
    """

    name: str
    limits: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRound:
    """What one round came to.

    Args:
        law: to be remembered until the next round.
        decided: in force from now on; `replicas` of it are to run.
        recommended: replicas that the law would have; None: it computes nothing.
        pushes: engines that do not have these limits yet.
        changes: what is news, budget first.
        decision: the law's own, with everything it was made from.
    """

    law: ServiceState
    decided: Decided
    recommended: int | None
    pushes: tuple[LimitsPush, ...]
    changes: tuple[Change, ...]
    decision: ServiceDecision


def control_round(
    measures: Measures,
    *,
    params: ServiceParams,
    law: ServiceState,
    last: Decided,
    told: Bounds,
    recommended: int | None,
    phases: Mapping[str, ReplicaPhase],
    asked: int,
    startups_ns: tuple[int, ...],
    now_ns: int,
) -> ControlRound:
    """One interval of control.

    Args:
        measures: of the interval that has just ended.
        params: the manifest's.
        law: what was remembered of the last round; a fresh one at the start or after a restart,
            which goes on from the limits in force.
        last: what was decided last.
        told: the bounds of which it was told last that they are in force: what differs is news.
        recommended: by the last round; None: nothing.
        phases: every engine that exists, by the name that its reading bears.
        asked: how many engines the workload is asked to have.
        startups_ns: from created to routable, of the latest engines that started.
        now_ns: the interval's end, on a clock that never goes back.
    """
    if law.bounds.bounds is None and params.mode is ControlMode.AUTO:
        # As if it had seen the replicas that there are: a restart is no change of their number.
        ready = sum(phase is ReplicaPhase.READY for phase in phases.values())
        law = replace(law, bounds=TokenBudgetState(bounds=last.bounds, ready=ready))
    readings = {reading.pod: reading for reading in measures.engines}
    observation = ServiceObservation(
        interval_ns=measures.interval_ns,
        traffic=measures.traffic,
        classes=measures.classes,
        replicas=tuple(_window(n, phase, readings.get(n)) for n, phase in phases.items()),
        replicas_asked=asked,
        startups_ns=startups_ns,
        device=_device(measures.engines),
    )
    after, decision = service_law(law, observation, params, now_ns)
    decided = Decided(
        limits_revision=_revision(last, decision.apply_bounds, measures.engines),
        bounds=decision.apply_bounds,
        replicas=decision.apply_replicas,
    )
    changes = (
        bounds_change(decision, before=told, advised=law.bounds.bounds),
        replicas_change(decision, recommended=recommended),
    )
    return ControlRound(
        law=after,
        decided=decided,
        recommended=None if decision.replicas is None else decision.replicas.replicas,
        pushes=tuple(_pushes(decided, measures.engines)),
        changes=tuple(change for change in changes if change is not None),
        decision=decision,
    )


def _window(name: str, phase: ReplicaPhase, reading: EngineReading | None) -> ReplicaWindow:
    if reading is None:
        return ReplicaWindow(name=name, phase=phase, signal=Signal.MISSING)
    return ReplicaWindow(
        name=name,
        phase=phase,
        signal=reading.signal,
        running=reading.running,
        waiting=reading.waiting,
        kv_used_blocks=reading.kv_used_blocks,
        kv_total_blocks=reading.kv_total_blocks,
        preemptions=reading.preemptions,
        settled=reading.settled,
    )


def _device(engines: Iterable[EngineReading]) -> DeviceCapacity | None:
    """Engines of a service run on like devices: any one speaks for all."""
    return next((e.device for e in engines if e.signal is Signal.FRESH and e.device), None)


def _revision(last: Decided, bounds: Bounds, engines: Sequence[EngineReading]) -> int:
    """Above every other: one that an engine got from somebody else, or before what we know.

    Also one that an engine has, where it could do more of it now than when it was told: it has
    read a manifest that was changed since, and takes nothing anew at a revision that it has.
    """
    fresh = [engine for engine in engines if engine.signal is Signal.FRESH]
    revisions = (engine.limits_revision for engine in fresh)
    ahead = max((number for number in revisions if number <= _MOST_OUTDONE), default=0)
    if ahead > last.limits_revision:
        return ahead + 1
    told = (engine for engine in fresh if engine.limits_revision == last.limits_revision)
    changed = bounds != last.bounds or not all(_has_all(engine, bounds) for engine in told)
    return last.limits_revision + changed


def _pushes(decided: Decided, engines: Iterable[EngineReading]) -> Iterable[LimitsPush]:
    for engine in engines:
        if engine.signal is Signal.FRESH and engine.limits_revision < decided.limits_revision:
            limits = _for(engine, decided.bounds)
            yield LimitsPush(
                name=engine.pod, limits={"revision": decided.limits_revision, **limits}
            )


def _for(engine: EngineReading, bounds: Bounds) -> dict[str, int]:
    """As much as the manifest allows that the engine has read: it refuses the rest."""
    least, most = engine.token_bounds or (bounds.max_tokens, bounds.max_tokens)
    widest = bounds.max_num_seqs if engine.most_seqs is None else engine.most_seqs
    limits = {
        "token_budget": min(max(bounds.max_tokens, least), most),
        "max_num_seqs": min(bounds.max_num_seqs, widest),
    }
    if engine.paced:
        limits["safety_percent"] = bounds.safety_percent
    return limits


def _has_all(engine: EngineReading, bounds: Bounds) -> bool:
    """Whether what it says of its limits is what it would be told now."""
    says = {
        "token_budget": engine.token_budget,
        "max_num_seqs": engine.max_num_seqs,
        "safety_percent": engine.safety_percent,
    }
    return all(says[name] in {None, value} for name, value in _for(engine, bounds).items())
