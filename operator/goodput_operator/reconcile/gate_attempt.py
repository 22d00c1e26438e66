"""One gate without an outcome: start its engines, compare them in a Job, and follow its attempts.

An attempt without a verdict is repeated: an invalid measurement, a lost pod of the Job, and a
replaced engine. A crashed candidate gets no other pod, so the requests that it lost can fail it;
otherwise the attempt is repeated, too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import (
    ANNOTATION_GATE,
    OBJECT_LABEL_GATE,
    OBJECT_LABEL_ROLE,
    ROLE_BASELINE,
    ROLE_CANDIDATE,
)
from goodput_core.control import Setpoint
from goodput_core.errors import SpecError
from goodput_core.slo.verdict import VerdictKind
from goodput_core.spec.choices import Baseline
from goodput_core.spec.codec import decode
from goodput_core.spec.llmservice import LLMServiceSpec
from goodput_core.spec.rollout import GateSpec
from goodput_core.spec.status import GateStatus
from goodput_operator.kube.jobs import (
    ab_result_of,
    describe_failure,
    describe_stop,
    describe_unarmed,
    failure_of,
    has_started,
    pods_of,
    true_condition,
)
from goodput_operator.kube.objects import JOB, admin_url, replica_set_of, serving_url
from goodput_operator.reconcile.actions import Create
from goodput_operator.reconcile.gate_nodes import NodeComparison, compare_nodes
from goodput_operator.reconcile.gate_objects import PAIR, gate_jobs, obsolete_objects
from goodput_operator.reconcile.gate_plan import (
    GatePhase,
    GatePlan,
    GateReason,
    GateRecord,
    gate_status,
)
from goodput_operator.reconcile.images import image_digest
from goodput_operator.reconcile.problems import (
    Problem,
    ProblemReason,
    describe_unready,
    has_run,
    name_conflict,
    problems_of_workload,
    rejection_of,
)
from goodput_operator.reconcile.snapshot import Snapshot, View
from goodput_operator.render.config_map import GateConfig, read_gate_setpoint
from goodput_operator.render.gate import gate_job, job_name, serving_port
from goodput_operator.render.pods import Installation
from goodput_operator.render.replay_pod import with_places
from goodput_operator.render.revisions import Revision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_core.replay_job import ABResult
    from goodput_operator.kube.objects import Object
    from goodput_operator.reconcile.snapshot import Child, PodView

__all__ = ["MAX_ATTEMPTS", "GateAttempt"]

MAX_ATTEMPTS: Final = 3
"""Attempts without a verdict, after which the gate is paused."""
_BACKOFF_S: Final = 10
_MAX_MESSAGE: Final = 1500
_MISSED: Final = " within spec.rollout.progressDeadlineSeconds"
_POLL_S: Final = 10.0
_OUTCOMES: Final = {
    VerdictKind.PASS: GatePhase.PASSED,
    VerdictKind.FAIL: GatePhase.FAILED,
    VerdictKind.INCONCLUSIVE: GatePhase.PAUSED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GateAttempt:
    """The present attempt of a gate.

    Args:
        snapshot: the service and its objects.
        view: the classified objects.
        spec: spec of the service.
        gate: its gate.
        installation: images and platform settings.
        update: the candidate.
        stable: the baseline.
        record: record of the gate, which has no outcome.
        setpoint: limits and replicas of the service.
    """

    snapshot: Snapshot
    view: View
    spec: LLMServiceSpec
    gate: GateSpec
    installation: Installation
    update: Revision
    stable: Revision
    record: GateRecord
    setpoint: Setpoint

    def suspend(self) -> GatePlan:
        """Stop the attempt of a suspended service; the next one begins when it is resumed."""
        record = self.record
        if self._job() is not None:
            record = replace(record, attempt=record.attempt + 1)
        return GatePlan(
            target=self.stable.name,
            record=record,
            deletes=obsolete_objects(self.view, None, None),
            status=gate_status(
                self.update.name,
                record,
                self.gate,
                phase=GatePhase.SUSPENDED,
                message="spec.suspend is set, so the gate waits",
            ),
        )

    def decide(self) -> GatePlan:
        """Return the plan of the present attempt."""
        if self.gate.image is None and self.installation.replay_image is None:
            text = (
                "spec.rollout.gate.image is required, because the operator was installed without "
                "--replay-image"
            )
            return self._plan(GatePhase.PAUSED, text, reason=GateReason.NO_IMAGE, pair=False)
        job = self._job()
        return self._start() if job is None else self._follow(job.body)

    # --- before the Job -------------------------------------------------------------------

    def _start(self) -> GatePlan:
        """Start the pair, and create the Job once both engines are ready."""
        record, now_s = self.record, self.snapshot.unix_s
        if record.invalid and (wait_s := self._retry_s() - now_s) > 0:
            text = f"attempt {record.attempt} follows in {wait_s} s: {record.message}"
            return self._plan(GatePhase.WAITING, text, reason=record.reason, wake_s=wait_s)
        ready = {role: pod for role in self._roles if (pod := self._ready(role)) is not None}
        if len(ready) < len(self._roles):
            return self._wait_for_engines(ready)
        nodes = self._compare_nodes(ready)
        if nodes.by_chance:
            return self._end(GatePhase.PAUSED, GateReason.UNEQUAL_NODES, nodes.note)
        text, create = "all engines of the gate are ready", Create(body=self._render_job(ready))
        key = (JOB.name, create.body["metadata"]["name"])
        conflict = name_conflict(self.view.foreign(*key))
        rejection = self.snapshot.failures.get(key) or self.snapshot.delayed.get(key)
        if message := conflict[0].message if conflict else rejection:
            text += f", but Job {key[1]} cannot be created: {message}"
            if self._left_s(*(pod.body for pod in ready.values())) <= 0:
                reason = GateReason.NAME_CONFLICT if conflict else GateReason.REPLAY_NOT_STARTED
                return self._end(GatePhase.PAUSED, reason, text)
        return self._plan(GatePhase.STARTING, text, create=create, wake_s=2.0)

    def _wait_for_engines(self, ready: Mapping[str, PodView]) -> GatePlan:
        missing = [role for role in self._roles if role not in ready]
        problems = [problem for role in missing for problem in self._problems(role)]
        capacity = next((one for one in problems if one.is_capacity), None)
        pods = [pod for role in missing for pod in self._pods(role)]
        left_s = self._left_s(*self._deployments())
        text = f"{len(ready)} of {len(self._roles)} engines of the gate are ready"
        text += _MISSED if left_s <= 0 else ""
        if cause := describe_unready(problems if capacity is None else [capacity], pods):
            text += f"; {cause}"
        if left_s > 0:
            reason = GateReason.INSUFFICIENT_CAPACITY if capacity is not None else ""
            return self._plan(GatePhase.STARTING, text, reason=reason, wake_s=left_s)
        if any(problem.reason is ProblemReason.NAME_CONFLICT for problem in problems):
            return self._end(GatePhase.PAUSED, GateReason.NAME_CONFLICT, text)
        if capacity is not None:
            return self._end(GatePhase.PAUSED, GateReason.INSUFFICIENT_CAPACITY, text)
        if ROLE_BASELINE in missing:
            return self._end(GatePhase.PAUSED, GateReason.BASELINE_NOT_READY, text)
        if not any(map(has_run, pods)):
            return self._end(GatePhase.PAUSED, GateReason.CANDIDATE_NOT_STARTED, text)
        return self._end(GatePhase.FAILED, GateReason.PROGRESS_DEADLINE_EXCEEDED, text)

    def _render_job(self, engines: Mapping[str, PodView]) -> dict[str, Any]:
        pods = {role: _identity(pod) for role, pod in engines.items()}
        ports = {role: serving_port(one.template) for role, one in self._config().engines.items()}
        return gate_job(
            self.view.owner,
            self.spec,
            self.gate,
            self.installation,
            key=self.record.key,
            attempt=self.record.attempt,
            candidate=self.update.name,
            baseline=self.stable.name,
            targets=[serving_url(pod.body, ports[role]) or "" for role, pod in engines.items()],
            replicas=max(1, self.setpoint.replicas),
            annotations={ANNOTATION_GATE: json.dumps(pods, sort_keys=True)},
        )

    def _compare_nodes(self, engines: Mapping[str, PodView]) -> NodeComparison:
        return compare_nodes(
            {role: pod.node for role, pod in engines.items()},
            self.snapshot.nodes,
            {role: one.template for role, one in self._config().engines.items()},
        )

    def _ready(self, role: str) -> PodView | None:
        """Return the ready pod of a role; None while there is none or another one ends."""
        pods = self._pods(role)
        one = pods[0] if len(pods) == 1 else None
        return one if one is not None and one.ready and admin_url(one.body) else None

    def _pods(self, role: str) -> list[PodView]:
        """Return the pods of a role, without those of another owner that have its labels."""
        labels = {OBJECT_LABEL_GATE: self.record.key, OBJECT_LABEL_ROLE: role}
        deployment = self.view.owner.names.gate(self.record.key, role)
        return [
            pod
            for pod in self.view.trials
            if labels.items() <= (pod.body["metadata"].get("labels") or {}).items()
            and replica_set_of(pod.body).startswith(f"{deployment}-")
        ]

    @property
    def _roles(self) -> tuple[str, ...]:
        """Roles of the gate's engines, the baseline first."""
        return (ROLE_CANDIDATE,) if self.gate.baseline is Baseline.RECORDED else PAIR

    def _deployments(self) -> list[Object]:
        names = {self.view.owner.names.gate(self.record.key, role) for role in self._roles}
        return [child.body for child in self.view.ours("Deployment") if child.name in names]

    def _problems(self, role: str) -> list[Problem]:
        name = self.view.owner.names.gate(self.record.key, role)
        if conflict := name_conflict(self.view.foreign("Deployment", name)):
            return conflict
        message = self.snapshot.failures.get(("Deployment", name))
        if message is not None:
            return [rejection_of(f"Deployment {name}", message)]
        return [
            problem
            for workload in self.view.workloads(role)
            if workload.name == name
            for problem in problems_of_workload(workload, self._pods(role))
        ]

    # --- with the Job ---------------------------------------------------------------------

    def _job(self) -> Child | None:
        name = job_name(self.view.owner, self.record.key, self.record.attempt)
        return next((child for child in gate_jobs(self.view) if child.name == name), None)

    def _follow(self, job: Object) -> GatePlan:
        """Follow the Job to its result."""
        pods = pods_of(self.snapshot.pods, job["metadata"]["name"])
        result = ab_result_of(pods)
        if disturbance := self._disturbance(job, result):
            return self._repeat(disturbance, None)
        if result is not None and result.verdict in _OUTCOMES:
            return self._judge(result, _OUTCOMES[result.verdict])
        failed = failure_of(job, pods)
        # A stopped comparison leaves the error of its signal as its result.
        if failed is not None and (result is None or describe_stop(job, failed)):
            return self._repeat(describe_failure(job, failed), None)
        if result is not None:
            return self._repeat(result.message, result)
        if true_condition(job, "Complete"):
            return self._repeat(f"the pod of Job {job['metadata']['name']} left no result", None)
        if not any(has_started(pod) for pod in pods):
            name = job["metadata"]["name"]
            left_s = self._left_s(job)
            missed = _MISSED if left_s <= 0 else ""
            text = f"Job {name} has not started{missed}{describe_unarmed(name, pods)}"
            if left_s <= 0:
                return self._end(GatePhase.PAUSED, GateReason.REPLAY_NOT_STARTED, text)
            return self._plan(GatePhase.STARTING, text, wake_s=left_s)
        return self._show_progress()

    def _show_progress(self) -> GatePlan:
        state = self.snapshot.gate_state
        if state is None:
            return self._keep_progress()
        text = f"{state.pairs} of {state.planned} pairs of runs are recorded"
        if state.verdict is not None:
            text += f"; so far {state.verdict.value} ({state.reason})"
        return self._plan(
            GatePhase.REPLAYING,
            text,
            pairs=f"{state.pairs}/{state.planned}",
            verdict=state.verdict,
            interval=state.interval,
            wake_s=_POLL_S,
        )

    def _keep_progress(self) -> GatePlan:
        """Keep the stored progress of this attempt while the pod does not answer."""
        try:
            stored = decode(GateStatus, self.view.status.get("gate") or {}, "")
        except SpecError:
            stored = None
        if (
            stored is None
            or stored.phase != GatePhase.REPLAYING
            or (stored.revision, stored.attempt) != (self.update.name, self.record.attempt)
        ):
            text = f"the trace is sent to {' and '.join(reversed(self._roles))}"
            pairs = f"0/{self.gate.pairs}"
            return self._plan(GatePhase.REPLAYING, text, pairs=pairs, wake_s=_POLL_S)
        return self._plan(
            GatePhase.REPLAYING,
            stored.message or "",
            pairs=stored.pairs or "",
            verdict=stored.verdict,
            interval=stored.interval,
            wake_s=_POLL_S,
        )

    def _disturbance(self, job: Object, result: ABResult | None) -> str:
        """Return what voids the result, without one the attempt; empty if nothing does."""
        annotations = job["metadata"].get("annotations") or {}
        try:
            began = json.loads(annotations.get(ANNOTATION_GATE, ""))
        except (ValueError, RecursionError):
            began = None
        if not isinstance(began, dict):
            return f"Job {job['metadata']['name']} lacks the annotation {ANNOTATION_GATE}"
        for role in self._roles:
            known = began.get(role) or {}
            same = [pod for pod in self._pods(role) if pod.uid == known.get("uid")]
            if not same or same[0].terminating:
                return f"pod {known.get('name')} of the {role} was replaced during the comparison"
            # Requests that a crashed candidate lost can fail it, but a crash between two runs loses
            # none, and must not pass.
            judged = result is None or result.verdict is VerdictKind.FAIL
            if not (judged and role == ROLE_CANDIDATE) and _identity(same[0]) != known:
                exited = describe_unready((), same) or f"pod {same[0].name}"
                return f"the container of the {role} was restarted: {exited}"
        return ""

    # --- outcomes -------------------------------------------------------------------------

    def _judge(self, result: ABResult, phase: GatePhase) -> GatePlan:
        assert result.verdict is not None, "INVALID and errors have no outcome"
        engines = {role: pods[0] for role in self._roles if (pods := self._pods(role))}
        nodes = self._compare_nodes(engines)
        if nodes.by_chance:  # which was not known at the start
            return self._end(GatePhase.PAUSED, GateReason.UNEQUAL_NODES, nodes.note)
        message, note = result.message[:_MAX_MESSAGE], nodes.note
        return self._store(
            replace(
                self.record,
                verdict=result.verdict,
                ended=phase,
                reason=result.reason,
                message=f"{message.removesuffix('.')}; {note}" if note else message,
                pairs=self._pairs(result),
                interval=result.interval or "",
                image=image_digest(engines[ROLE_CANDIDATE]),
            )
        )

    def _pairs(self, result: ABResult) -> str:
        return f"{result.pairs}/{max(result.pairs, self.gate.pairs)}"

    def _repeat(self, message: str, result: ABResult | None) -> GatePlan:
        """Store an attempt without a verdict, and plan the next one."""
        record = self.record
        reason = GateReason.NO_VERDICT if result is None else result.reason
        record = replace(
            record,
            invalid=record.invalid + 1,
            since=self.snapshot.unix_s,
            reason=reason,
            message=" ".join(message.split())[:_MAX_MESSAGE],
        )
        if record.invalid < MAX_ATTEMPTS:
            return self._store(replace(record, attempt=record.attempt + 1))
        text = f"{MAX_ATTEMPTS} attempts gave no verdict; the last one: {record.message}"
        return self._store(
            replace(
                record,
                verdict=VerdictKind.INVALID,
                ended=GatePhase.PAUSED,
                reason=GateReason.NO_VERDICT,
                message=text[:_MAX_MESSAGE],
                pairs="" if result is None else self._pairs(result),
            )
        )

    def _end(self, phase: GatePhase, reason: GateReason, message: str) -> GatePlan:
        return self._store(
            replace(self.record, ended=phase, reason=reason, message=message[:_MAX_MESSAGE])
        )

    def _store(self, record: GateRecord) -> GatePlan:
        """Store a record; what follows from it is decided once it is stored."""
        record = replace(record, message=with_places(record.message))
        job = job_name(self.view.owner, record.key, self.record.attempt)
        phase = record.phase(self.gate)
        return GatePlan(
            target=self.stable.name,
            record=record,
            pair=self._config() if phase is None else None,
            deletes=obsolete_objects(self.view, record.key, job),
            status=gate_status(
                self.update.name,
                record,
                self.gate,
                # It passes once the record is stored.
                phase=GatePhase.REPLAYING if phase is GatePhase.PASSED else phase,
            ),
            wake_after_s=1.0,
        )

    def _plan(
        self,
        phase: GatePhase,
        message: str,
        *,
        reason: str = "",
        pairs: str = "",
        verdict: VerdictKind | None = None,
        interval: str | None = None,
        create: Create | None = None,
        pair: bool = True,
        wake_s: float | None = None,
    ) -> GatePlan:
        job = job_name(self.view.owner, self.record.key, self.record.attempt)
        status = gate_status(
            self.update.name, self.record, self.gate, phase=phase, message=message, pairs=pairs
        )
        return GatePlan(
            target=self.stable.name,
            pair=self._config() if pair else None,
            create=create,
            foreign=self.view.foreign(JOB.name, job),
            deletes=obsolete_objects(self.view, self.record.key if pair else None, job),
            status=replace(status, reason=str(reason) or None, verdict=verdict, interval=interval),
            wake_after_s=wake_s,
        )

    def _config(self) -> GateConfig:
        """Return the inputs of the pair, with the limits that the first engine started with."""
        child = self.view.children.get(("ConfigMap", self.view.owner.names.config))
        stored = None
        if child is not None and child.ours:
            stored = read_gate_setpoint(child.body, self.record.key)
        return GateConfig(
            key=self.record.key,
            engines={
                role: self.stable if role == ROLE_BASELINE else self.update for role in self._roles
            },
            setpoint=stored or self.setpoint,
        )

    def _retry_s(self) -> int:
        """Return the time of the next attempt, in seconds since 1970."""
        return self.record.since + (_BACKOFF_S << (self.record.invalid - 1))

    def _left_s(self, *objects: Object) -> int:
        """Return the seconds until the progress deadline of the latest of these objects."""
        since_s = max(self.record.since, *map(_created_s, objects), 0)
        return since_s + self.spec.rollout.progress_deadline_seconds - self.snapshot.unix_s


def _identity(pod: PodView) -> dict[str, Any]:
    """Return the values that change if a pod or its container is replaced."""
    statuses = (pod.body.get("status") or {}).get("containerStatuses") or ()
    restarts = sum(status.get("restartCount", 0) for status in statuses)
    return {"name": pod.name, "uid": pod.uid, "restarts": restarts}


def _created_s(body: Object) -> int:
    created = body["metadata"].get("creationTimestamp")
    return 0 if created is None else int(datetime.fromisoformat(created).timestamp())
