"""What the control laws make of a round, and what stands where nothing was measured in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from goodput_core.control import ServiceParams
from goodput_core.spec.choices import ControlMode
from goodput_operator.control.decided import Decided
from goodput_operator.control.rounds import ControlRound, control_round
from goodput_operator.reconcile import events
from goodput_operator.reconcile.attainment import Attainment, attainment, tally
from goodput_operator.reconcile.memory import Memory
from goodput_operator.reconcile.plan import followed, stored_decided
from goodput_operator.reconcile.starting import started

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_operator.reconcile.snapshot import Snapshot
    from goodput_operator.reconcile.view import View

__all__ = ["Controlled", "controlled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Controlled:
    """What is in force from this round on, and how it came to be.

    Args:
        decided: limits and replicas.
        law: what the control laws came to; None: nothing was measured.
        attainment: of the window; None: likewise.
        memory: with all of this in it.
    """

    decided: Decided
    law: ControlRound | None
    attainment: Attainment | None
    memory: Memory


def controlled(snapshot: Snapshot, view: View, spec: LLMServiceSpec) -> Controlled:
    """The part of the control laws in one round.

    Args:
        snapshot: of the service.
        view: the same taken apart.
        spec: what it asks for.
    """
    memory, now_ns, params = snapshot.memory, snapshot.now_ns, ServiceParams.of(spec)
    measures = None if spec.suspend else snapshot.measures
    last = memory.decided or stored_decided(view)
    decided = followed(last, params)
    told = memory.told.decided or last or decided
    created_ns, startups_ns = started(memory, view.engines, now_ns)
    memory = replace(memory, created_ns=created_ns, startups_ns=startups_ns)
    law, found = None, None
    if measures is not None:
        # A floor or a ceiling that has moved is the law's to tell of, so it is asked about the
        # number that stood before.
        lawful = params.mode is ControlMode.AUTO and params.replicas is None
        law = control_round(
            measures,
            params=params,
            law=memory.law,
            last=decided,
            told=told.bounds,
            recommended=view.status.get("recommendedReplicas"),
            phases={pod.name: pod.phase for pod in view.engines},
            asked=told.replicas if lawful else decided.replicas,
            startups_ns=startups_ns,
            now_ns=now_ns,
        )
        decided = law.decided
        window = tally(memory.window, measures, now_ns)
        found = attainment(window, params.classes, measures)
        memory = replace(memory, law=law.law, measured_ns=now_ns, window=window)
    told_after = events.told_after(memory.told, measures, law, snapshot.failures, told)
    memory = replace(memory, decided=decided, told=told_after)
    return Controlled(decided=decided, law=law, attainment=found, memory=memory)
