"""One round of one service: from a snapshot to all that is to be done about it.

Level-triggered: it looks at what there is and not at what happened, so a round that is repeated,
or missed, or cut off in the middle, leads to the same end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import ROLE_ENGINE
from goodput_core.units import NS_PER_S
from goodput_operator.kube.objects import format_time
from goodput_operator.reconcile import events
from goodput_operator.reconcile.actions import Action, Decision, Delete, WriteStatus
from goodput_operator.reconcile.children import repairs
from goodput_operator.reconcile.control_step import controlled
from goodput_operator.reconcile.engines import missing_tokens, pushes
from goodput_operator.reconcile.parse_spec import asked
from goodput_operator.reconcile.plan import (
    base_objects,
    rollout_of,
    workload_objects,
)
from goodput_operator.reconcile.problems import Reason, Trouble, troubles
from goodput_operator.reconcile.revisions import outdated, revisions_of
from goodput_operator.reconcile.saying import Known, conditions_of, refused_conditions, status_of
from goodput_operator.reconcile.starting import begun
from goodput_operator.reconcile.status import due_ns
from goodput_operator.reconcile.view import view_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_operator.reconcile.conditions import Said
    from goodput_operator.reconcile.memory import Memory
    from goodput_operator.reconcile.plan import Rollout
    from goodput_operator.reconcile.snapshot import Snapshot
    from goodput_operator.reconcile.view import View
    from goodput_operator.render.pods import Installation

__all__ = ["decide"]

_AGAIN_NS: Final = 2 * NS_PER_S
"""After something was changed it is looked at again, whatever the watches bring; so it is while an
interval that should be over is not."""


def decide(snapshot: Snapshot, installation: Installation) -> Decision:
    """One round.

    Args:
        snapshot: the service and all that stands around it.
        installation: what new revisions are rendered with.
    """
    if "deletionTimestamp" in snapshot.service["metadata"]:
        # Owner references take everything along; engines and routers drain by themselves.
        return Decision(actions=(), memory=snapshot.memory, wake_at_ns=None)
    view = view_of(snapshot)
    kept = snapshot.memory.spec
    spec = kept[1] if kept and kept[0] == view.generation else asked(snapshot.service)
    if isinstance(spec, Trouble):
        said = refused_conditions(view, spec)
        return _closed(snapshot, view, said, None, actions=[], memory=snapshot.memory, wakes=[])
    return _round(snapshot, view, spec, installation)


def _round(
    snapshot: Snapshot, view: View, spec: LLMServiceSpec, installation: Installation
) -> Decision:
    memory, now_ns = snapshot.memory, snapshot.now_ns
    control = controlled(snapshot, view, spec)
    decided = control.decided
    revisions = revisions_of(view, spec, installation)
    rollout = rollout_of(view, revisions, 0 if spec.suspend else decided.replicas)
    made_of = (
        view.generation,
        installation,
        decided,
        rollout,
        revisions.update.name,
        revisions.routers.name,
        frozenset(revisions.uids),
    )

    def render() -> list[dict[str, Any]]:
        return [
            *base_objects(view, spec, revisions, rollout, decided),
            *workload_objects(view, spec, revisions, rollout),
        ]

    undone = snapshot.failures.keys() | snapshot.delayed.keys()
    found_amiss = repairs(view, made_of, render, memory, undone)
    applies, foreign = found_amiss.applies, found_amiss.foreign
    failures = {key: words for key, words in snapshot.failures.items() if key not in foreign}
    trouble = [
        *_conflicts(foreign),
        *troubles(view, failures, snapshot.delayed),
        *_unasked(spec, installation),
    ]
    used = [revisions.engines[name] for name in rollout.counts if name in revisions.engines]
    tokens = missing_tokens(
        view,
        used,
        revisions.uids,
        known=memory.tokens,
        begun=begun(memory, view.engines),
        undone=undone,
        found=trouble,
    )
    actions: list[Action] = [
        *(one for one in applies if one.body["kind"] != "Deployment"),
        *tokens,
        *pushes(view, () if control.law is None else control.law.pushes),
        *(one for one in applies if one.body["kind"] == "Deployment"),
        *(Delete(kind="Deployment", name=one.name, uid=one.uid) for one in rollout.over),
        *outdated(view, revisions, _used(view, rollout)),
    ]
    known = Known(
        suspended=spec.suspend,
        routers=0 if spec.suspend else spec.router.replicas,
        update=revisions.update.name,
        rollout=rollout,
        decided=decided,
        troubles=trouble,
        missing=found_amiss.missing,
        attainment=control.attainment,
        law=control.law,
    )
    next_memory = replace(
        control.memory,
        tokens=tuple(revisions.uids[one.name] for one in used if one.name in revisions.uids),
        spec=(view.generation, spec),
        settled=found_amiss.settled,
        tried=found_amiss.tried,
    )
    wakes = [now_ns + _AGAIN_NS] if actions else []
    if not spec.suspend:
        measured_ns = control.memory.measured_ns
        since_ns = now_ns if measured_ns is None else measured_ns
        over_ns = since_ns + spec.control.interval_seconds * NS_PER_S
        wakes.append(over_ns if over_ns > now_ns else now_ns + _AGAIN_NS)
    said = conditions_of(view, known)
    decision = _closed(
        snapshot, view, said, known, actions=actions, memory=next_memory, wakes=wakes
    )
    return replace(decision, foreign=foreign)


def _closed(
    snapshot: Snapshot,
    view: View,
    said: Sequence[Said],
    known: Known | None,
    *,
    actions: list[Action],
    memory: Memory,
    wakes: list[int],
) -> Decision:
    """What is said of the round, after what is done."""
    stored, now_ns, told = view.status, snapshot.now_ns, snapshot.memory.told
    status = status_of(view, said, known, at=format_time(snapshot.unix_s))
    due = due_ns(status, stored, written_ns=memory.status_written_ns, now_ns=now_ns)
    if due == now_ns:
        actions.append(WriteStatus(status=status))
        memory = replace(memory, status_written_ns=now_ns)
    elif due is not None:
        wakes.append(due)
    actions += events.of_conditions(said, stored)
    if known is not None:
        actions += events.of_revisions(stored, update=known.update, current=known.rollout.current)
        actions += events.of_changes(() if known.law is None else known.law.changes)
        silent = () if snapshot.measures is None else snapshot.measures.silent
        actions += events.of_refusals(snapshot.failures, told.refusing)
        actions += events.of_silence(silent, told.silent)
    return Decision(
        actions=tuple(actions),
        memory=memory,
        wake_at_ns=min(wakes, default=None),
        changes=() if known is None or known.law is None else known.law.changes,
    )


def _unasked(spec: LLMServiceSpec, installation: Installation) -> list[Trouble]:
    server = spec.control.prometheus
    if server is None or server.url in installation.prometheus_urls:
        return []
    message = (
        "spec.control.prometheus.url: none of the servers that this operator may ask; take it "
        "out, or have it allowed (the chart's prometheus.allowedUrls)"
    )
    return [Trouble(reason=Reason.PROMETHEUS_NOT_ALLOWED, message=message)]


def _used(view: View, rollout: Rollout) -> set[str]:
    return {*rollout.counts, *(one.revision for one in view.workloads(ROLE_ENGINE))}


def _conflicts(foreign: Iterable[tuple[str, str]]) -> list[Trouble]:
    named = [f"{kind} {name}" for kind, name in foreign]
    if not named:
        return []
    message = f"not controlled by this service: {', '.join(named)}; rename or delete them"
    return [Trouble(reason=Reason.NAME_CONFLICT, message=message)]
