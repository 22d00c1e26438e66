"""The decision of one reconciliation: from a snapshot to actions, without I/O or a clock.

The decision is level-triggered: it depends on the current state and not on events. A repeated,
missed or interrupted reconciliation therefore leads to the same result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import ROLE_ENGINE
from goodput_core.control import (
    MAX_STARTUPS,
    Bounds,
    ControlInput,
    ControlState,
    ControlStep,
    ReplicaPhase,
    ReplicaState,
    ServiceParams,
    ServiceState,
    Setpoint,
    control_step,
)
from goodput_core.errors import SpecError, UnsupportedError
from goodput_core.spec.choices import ControlMode
from goodput_core.spec.llmservice import LLMService
from goodput_core.spec.status import Truth
from goodput_core.spec.support import require_mounted_profile, require_servable
from goodput_core.units import NS_PER_S
from goodput_operator.kube.objects import admin_url, format_time
from goodput_operator.reconcile import events
from goodput_operator.reconcile.actions import (
    Action,
    CreateToken,
    Decision,
    Delete,
    Emit,
    Push,
    WriteStatus,
    without_fields,
)
from goodput_operator.reconcile.attainment import judge_attainment
from goodput_operator.reconcile.drift import find_repairs
from goodput_operator.reconcile.gate import plan_gate
from goodput_operator.reconcile.images import revision_pinned
from goodput_operator.reconcile.learnt import learnt_status, restore_learnt
from goodput_operator.reconcile.problems import (
    Problem,
    ProblemReason,
    image_not_resolved,
    name_conflict,
    problems_of,
    prometheus_not_allowed,
    rollout_paused,
    tenants_not_replaced,
)
from goodput_operator.reconcile.rollout import (
    delete_outdated_revisions,
    desired_objects,
    revisions_of,
    rollout_of,
    stable_revision,
)
from goodput_operator.reconcile.snapshot import Memory, view_of
from goodput_operator.reconcile.status import (
    StatusInput,
    conditions_of,
    rejected_conditions,
    status_of,
)
from goodput_operator.reconcile.status_writes import write_due_ns
from goodput_operator.render.config_map import read_setpoint
from goodput_operator.render.secrets import secret_of, token_secret

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from goodput_core.control import LimitsPush
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_operator.kube.objects import Object
    from goodput_operator.reconcile.rollout import Revisions
    from goodput_operator.reconcile.snapshot import PodView, Snapshot, View
    from goodput_operator.reconcile.status import Condition
    from goodput_operator.render.pods import Installation
    from goodput_operator.render.revisions import Revision

__all__ = ["decide"]

_RECHECK_NS: Final = 2 * NS_PER_S
"""Time to the next reconciliation after an action, or while an interval has ended but has no
measurements yet."""


def decide(snapshot: Snapshot, installation: Installation) -> Decision:
    """Return the actions and the next memory for a snapshot of one service.

    Args:
        snapshot: the service and its objects.
        installation: settings that new revisions are rendered with.
    """
    if "deletionTimestamp" in snapshot.service["metadata"]:
        # Kubernetes deletes the objects of the service; engines and routers drain on SIGTERM.
        return Decision(actions=(), memory=snapshot.memory, wake_at_ns=None)
    view = view_of(snapshot)
    parsed = snapshot.memory.spec
    if (
        parsed
        and parsed[0] == view.generation
        and _has_gate(snapshot.service) == (parsed[1].rollout.gate is not None)
    ):
        spec: LLMServiceSpec | Problem = parsed[1]
    else:
        spec = _parse_spec(snapshot.service)
    if isinstance(spec, Problem):
        conditions = rejected_conditions(view, spec)
        return _finish(
            snapshot, view, conditions, None, actions=[], memory=snapshot.memory, wakes=[]
        )
    return _reconcile(snapshot, view, spec, installation)


def _has_gate(service: Object) -> bool:
    """True if the spec has a gate; an API server may drop it without another generation."""
    return bool(((service.get("spec") or {}).get("rollout") or {}).get("gate"))


def _parse_spec(service: Object) -> LLMServiceSpec | Problem:
    """Validate a stored spec as `goodput up` does, without metadata other than the name."""
    manifest = {
        "apiVersion": service["apiVersion"],
        "kind": service["kind"],
        "metadata": {"name": service["metadata"]["name"]},
        "spec": service.get("spec"),
    }
    try:
        service_manifest = LLMService.from_dict(manifest)
        require_servable(service_manifest)
        require_mounted_profile(service_manifest)
    except UnsupportedError as error:
        return Problem(reason=ProblemReason.NOT_BUILT, message=str(error))
    except SpecError as error:
        return Problem(reason=ProblemReason.INVALID_SPEC, message=str(error))
    return service_manifest.spec


def _reconcile(
    snapshot: Snapshot, view: View, spec: LLMServiceSpec, installation: Installation
) -> Decision:
    memory, now_ns = snapshot.memory, snapshot.now_ns
    setpoint, step, next_memory = _run_control_step(snapshot, view, spec)
    revisions = revisions_of(view, spec, installation, snapshot.pin)
    gate = plan_gate(
        snapshot,
        view,
        spec,
        installation,
        update=revisions.update,
        stable=stable_revision(view, revisions),
        known=revisions.engines,
        stored=revisions.update.name in revisions.uids,
        unresolved=revisions.unresolved,
        setpoint=setpoint,
    )
    if gate.record is not None:
        revisions = revisions.with_gate(gate.record.encode())
    replicas = 0 if spec.suspend else setpoint.replicas
    rollout = rollout_of(view, revisions, replicas, target=gate.target)
    # The objects depend only on these values, and are rendered again only when one changes.
    inputs = (
        view.generation,
        installation,
        setpoint,
        rollout,
        gate.pair,
        revisions.update.name,
        revisions.update.gate,
        revisions.routers.name,
        frozenset(revisions.uids),
    )

    def render() -> list[dict[str, Any]]:
        return desired_objects(view, spec, revisions, rollout, setpoint, pair=gate.pair)

    failed = snapshot.failures.keys() | snapshot.delayed.keys()
    repairs = find_repairs(view, inputs, render, memory, failed)
    applies, foreign = repairs.applies, tuple(dict.fromkeys((*repairs.foreign, *gate.foreign)))
    failures = {key: message for key, message in snapshot.failures.items() if key not in foreign}
    problems = [
        *name_conflict(foreign),
        *problems_of(view, failures, snapshot.delayed),
        *prometheus_not_allowed(spec, installation.prometheus_urls),
        *tenants_not_replaced(spec, next_memory.tenants_problem),
        *image_not_resolved(revisions, snapshot.pin),
        *rollout_paused(gate.status),
    ]
    with_pods = {**rollout.counts, **({revisions.update.name: 1} if gate.pair else {})}
    used = revisions.of_engines(with_pods)
    tokens = _tokens_to_create(
        view,
        used,
        revisions,
        created=memory.tokens,
        starting=_revisions_with_new_pods(memory, view.engines),
        failed=failed,
        problems=problems,
    )
    serving = (engine.revision for engine in view.workloads(ROLE_ENGINE))
    used_names = {gate.target, rollout.current or "", *rollout.counts, *serving}
    actions: list[Action] = [
        *(apply for apply in applies if apply.body["kind"] != "Deployment"),
        *tokens,
        *_pushes(view, () if step is None else step.pushes),
        *(apply for apply in applies if apply.body["kind"] == "Deployment"),
        *(Delete(kind="Deployment", name=old.name, uid=old.uid) for old in rollout.obsolete),
        *gate.deletes,
        *([] if gate.create is None else [gate.create]),
        *delete_outdated_revisions(view, revisions, used_names),
    ]
    status_input = StatusInput(
        spec=spec,
        update=revisions.update.name,
        unresolved=revisions.unresolved,
        rollout=rollout,
        gate=gate,
        setpoint=setpoint,
        problems=problems,
        repairs=repairs,
        attainment=next_memory.attainment,
        step=step,
        learnt=learnt_status(
            next_memory.law.replicas.learnt,
            next_memory.startups_ns,
            view.status.get("learnt") or {},
            now_ns=now_ns,
            unix_s=snapshot.unix_s,
        ),
        unmeasured_engines=_unmeasured_engines(view, next_memory),
    )
    next_memory = replace(
        next_memory,
        tokens=tuple(
            revisions.uids[revision.name] for revision in used if revision.name in revisions.uids
        ),
        spec=(view.generation, spec),
        settled=repairs.settled,
        attempts=repairs.attempts,
    )
    wakes = [now_ns + _RECHECK_NS] if actions else []
    if gate.wake_after_s is not None:
        wakes.append(now_ns + round(gate.wake_after_s * NS_PER_S))
    if not spec.suspend:
        measured_ns = next_memory.measured_ns
        since_ns = now_ns if measured_ns is None else measured_ns
        interval_end_ns = since_ns + spec.control.interval_seconds * NS_PER_S
        wakes.append(interval_end_ns if interval_end_ns > now_ns else now_ns + _RECHECK_NS)
    gated = spec.rollout.gate is not None
    update = revisions.engines.get(status_input.shown_update)
    pinned = revision_pinned(view, revisions.engines.values(), update, gated=gated)
    decision = _finish(
        snapshot,
        view,
        [*conditions_of(view, status_input), *pinned],
        status_input,
        actions=actions,
        memory=next_memory,
        wakes=wakes,
    )
    return replace(decision, foreign=foreign, tagged_image=revisions.tagged_image)


def _finish(
    snapshot: Snapshot,
    view: View,
    conditions: Sequence[Condition],
    status_input: StatusInput | None,
    *,
    actions: list[Action],
    memory: Memory,
    wakes: list[int],
) -> Decision:
    """Add the status write and the Events to the other actions."""
    stored, now_ns, reported = view.status, snapshot.now_ns, snapshot.memory.reported
    status = without_fields(
        status_of(view, conditions, status_input, at=format_time(snapshot.unix_s)),
        snapshot.undeclared,
    )
    due_ns = write_due_ns(status, stored, written_ns=memory.status_written_ns, now_ns=now_ns)
    if due_ns == now_ns:
        actions.append(WriteStatus(status=status))
        memory = replace(memory, status_written_ns=now_ns)
    elif due_ns is not None:
        wakes.append(due_ns)
    actions += events.of_conditions(conditions, stored)
    step = None if status_input is None else status_input.step
    changes = () if step is None else step.changes
    rollout: list[Emit] = []
    if status_input is not None:
        gate = status_input.gate
        if "gate" not in snapshot.undeclared:  # otherwise nothing shows what was reported
            rollout += events.of_gate(stored.get("gate") or {}, gate.status)
        rollout += events.of_revisions(
            stored,
            update=status_input.shown_update,
            current=status_input.rollout.current,
            holds=gate.holds,
        )
        actions += rollout
        actions += events.of_changes(changes)
        unmeasured = () if snapshot.measures is None else snapshot.measures.unmeasured
        actions += events.of_rejections(snapshot.failures, reported.rejecting)
        actions += events.of_unmeasured_pods(unmeasured, reported.unmeasured)
    return Decision(
        actions=tuple(actions),
        memory=memory,
        wake_at_ns=min(wakes, default=None),
        changes=changes,
        rollout=tuple(rollout),
        control_decision=None if step is None else step.decision,
    )


def _run_control_step(
    snapshot: Snapshot, view: View, spec: LLMServiceSpec
) -> tuple[Setpoint, ControlStep | None, Memory]:
    """Run the control laws if an interval ended.

    Returns:
        Limits and replicas in force from now on; the result of the step, None if no interval ended;
        and the memory after the step.
    """
    memory, now_ns, params = snapshot.memory, snapshot.now_ns, ServiceParams.of(spec)
    if memory.setpoint is None:
        memory = _restored(memory, view, now_ns=now_ns, unix_s=snapshot.unix_s)
    measures = None if spec.suspend else snapshot.measures
    last_setpoint = memory.setpoint or _stored_setpoint(view)
    setpoint = _within_spec(last_setpoint, params)
    reported_setpoint = memory.reported.setpoint or last_setpoint or setpoint
    first_seen_ns, startups_ns = _startups(memory, view.engines, now_ns)
    memory = replace(memory, first_seen_ns=first_seen_ns, startups_ns=startups_ns)
    step, attainment = None, None if spec.suspend else memory.attainment
    if measures is not None:
        if measures.tenants_problem is not None:
            memory = replace(memory, tenants_problem=measures.tenants_problem)
        attainment = judge_attainment(
            measures,
            params.classes,
            now_ns=now_ns,
            outage_s=spec.slo.outage_seconds or 0,
            last=memory.attainment,
        )
        # Changes are measured against the replicas last reported, so that a change caused by new
        # bounds in the spec is reported, too.
        scales = params.mode is ControlMode.AUTO and params.replicas is None
        step = control_step(
            ControlInput(
                state=ControlState(
                    setpoint=setpoint,
                    law=memory.law,
                    reported=reported_setpoint.bounds,
                    recommended=view.status.get("recommendedReplicas"),
                ),
                params=params,
                interval_ns=measures.interval_ns,
                traffic=measures.traffic,
                classes=measures.classes,
                outcomes=measures.outcomes,
                objective_missed=attainment.status is Truth.FALSE,
                engines=measures.engines,
                phases={pod.name: pod.phase for pod in view.engines},
                desired_replicas=reported_setpoint.replicas if scales else setpoint.replicas,
                startups_ns=startups_ns,
                now_ns=now_ns,
            )
        )
        setpoint = step.state.setpoint
        memory = replace(memory, law=step.state.law, measured_ns=now_ns)
    reported = events.update_reported(
        memory.reported, measures, step, snapshot.failures, reported_setpoint
    )
    memory = replace(memory, setpoint=setpoint, reported=reported, attainment=attainment)
    return setpoint, step, memory


def _restored(memory: Memory, view: View, *, now_ns: int, unix_s: int) -> Memory:
    """Return the memory of a restarted operator with the stored learnt capacity."""
    learnt, startups_ns = restore_learnt(view.status.get("learnt"), now_ns=now_ns, unix_s=unix_s)
    law = ServiceState(replicas=ReplicaState(learnt=learnt))
    return replace(memory, law=law, startups_ns=startups_ns)


def _stored_setpoint(view: View) -> Setpoint | None:
    """Return the setpoint stored in the ConfigMap; None without a valid one."""
    child = view.children.get(("ConfigMap", view.owner.names.config))
    return None if child is None or not child.ours else read_setpoint(child.body)


def _within_spec(last: Setpoint | None, params: ServiceParams) -> Setpoint:
    """In Auto, clamp the last setpoint to the spec's bounds; otherwise use the spec's own values.

    The replicas are also the spec's own in Auto if `spec.replicas` is set.
    """
    bounds, replicas = Bounds.initial(params), params.initial_replicas
    if last is None:
        return Setpoint(limits_revision=1, bounds=bounds, replicas=replicas)
    if params.mode is ControlMode.AUTO:
        bounds = last.bounds.within(params)
        if params.replicas is None:
            replicas = min(max(last.replicas, params.min_replicas), params.max_replicas)
    revision = last.limits_revision + (bounds != last.bounds)
    return Setpoint(limits_revision=revision, bounds=bounds, replicas=replicas)


def _startups(
    memory: Memory, engines: Sequence[PodView], now_ns: int
) -> tuple[tuple[tuple[str, int | None], ...], tuple[int, ...]]:
    """Return `first_seen_ns` and `startups_ns` of the next memory.

    A pod that existed before the operator started, or was ready at its first observation, has no
    start-up time, since its start was not observed. A pod that becomes ready again has no second
    start-up time, since it only failed some probes.
    """
    earlier = dict(memory.first_seen_ns)
    new_ns = None if memory.setpoint is None else now_ns
    startups = list(memory.startups_ns)
    first_seen = []
    for pod in engines:
        seen_ns = earlier.get(pod.uid, new_ns)
        if pod.ready and pod.uid in earlier and seen_ns is not None:
            startups.append(now_ns - seen_ns)
        first_seen.append((pod.uid, seen_ns if pod.phase is ReplicaPhase.STARTING else None))
    return tuple(first_seen), tuple(startups[-MAX_STARTUPS:])


def _revisions_with_new_pods(memory: Memory, engines: Sequence[PodView]) -> set[str]:
    """Return the names of revisions with a starting pod that was not observed before."""
    earlier = dict(memory.first_seen_ns)
    new = (pod for pod in engines if pod.uid not in earlier)
    return {pod.revision for pod in new if pod.phase is ReplicaPhase.STARTING}


def _tokens_to_create(
    view: View,
    used: Iterable[Revision],
    revisions: Revisions,
    *,
    created: Container[str],
    starting: Container[str],
    failed: Container[tuple[str, str]],
    problems: Iterable[Problem],
) -> list[CreateToken]:
    """Return creations of the token Secrets that could be missing.

    The operator is not allowed to read Secrets, so it cannot check. A running engine no longer
    needs its Secret. A deleted Secret is created again when a pod of its revision starts, or when a
    pod reports that the Secret is missing.

    Args:
        view: classified objects of the service.
        used: revisions that have or will have engines.
        revisions: revisions of the service.
        created: uids of the ControllerRevisions whose Secret was already created.
        starting: names of revisions with a starting pod that was not observed before.
        failed: kind and name of the last reconciliation's failed actions.
        problems: problems of the service.
    """
    reported = " ".join(
        problem.message for problem in problems if problem.reason is ProblemReason.CONTAINER_CONFIG
    )
    creations = []
    for revision in used:
        uid, name = revisions.uids.get(revision.name), secret_of(revision.template)
        if uid is None or name is None:
            continue
        again = revision.name in starting or ("Secret", name) in failed or f'"{name}"' in reported
        if again or uid not in created:
            body = token_secret(view.owner, name, revision=revision.name, revision_uid=uid)
            creations.append(CreateToken(revision=revision.name, body=body))
    return creations


def _unmeasured_engines(view: View, memory: Memory) -> int:
    """Return the number of ready engines that had no measurements in the last interval."""
    names = {name for name, _ in memory.reported.unmeasured}
    return sum(engine.ready and engine.name in names for engine in view.engines)


def _pushes(view: View, limits: Iterable[LimitsPush]) -> list[Push]:
    """Return a push of limits to each pod that has an address."""
    pods = {pod.name: pod for pod in view.engines if not pod.terminating}
    pushes = []
    for push in limits:
        pod = pods.get(push.name)
        url = None if pod is None else admin_url(pod.body)
        if pod is None or url is None:
            continue
        pushes.append(Push(pod=pod.name, url=url, revision=pod.revision, limits=push.limits))
    return pushes
