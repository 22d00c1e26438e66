"""A cluster of dictionaries that applies and deletes objects, and runs Deployments.

It models only the state that `decide` reads, with the changes of the API server that are not drift:
defaults are filled in, quantities rewritten, empty values dropped.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.operator.reconcile.gates import GATE

from goodput_core.control import ClassOutcomes, EngineReading, Signal, Traffic
from goodput_core.engine_state import EngineState
from goodput_core.replay_job import ABState
from goodput_core.units import NS_PER_S
from goodput_operator.control.measures import Measures
from goodput_operator.control.window import ServiceWindow
from goodput_operator.reconcile.actions import (
    Apply,
    Create,
    CreateToken,
    Decision,
    Delete,
    Emit,
    Push,
    WriteStatus,
)
from goodput_operator.reconcile.decide import decide
from goodput_operator.reconcile.snapshot import Memory, Snapshot
from goodput_operator.render.pods import Installation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NAME = "chat"
UID = "service-uid"
STEP_NS = 5 * NS_PER_S
INSTALLATION = Installation(
    engine_image="engine:1", router_image="engine:1", replay_image="replay:1"
)
MINIMAL: dict[str, Any] = {
    "model": {"source": "emulated://unit"},
    "replicas": 2,
    "slo": {"classes": [{"name": "a", "ttftMs": 500, "tpotMs": 50, "objective": "99%"}]},
}


@dataclass
class Cluster:
    """One service in a cluster.

    Attributes:
        spec: spec of the service; `update_spec` changes it.
        broken: revisions whose pods never become ready.
        full: roles whose pods are refused.
        refusal: the words of the refusal.
        rejections: messages with which the API server rejects new objects, by kind.
        annotations: annotations of the service.
        gate_state: progress that the pod of a gate's Job reports.
        nodes: nodes that the operator can read.
        node_of: name of the node of new pods by role; another role runs on `node-1`.
        secrets: names of the created Secrets.
        written: kind and name of each applied or deleted object.
    """

    spec: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(MINIMAL))
    installation: Installation = INSTALLATION
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    secrets: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    full: set[str] = field(default_factory=set)
    refusal: str = "exceeded quota: pods, requested: pods=1, used: pods=4, limited: pods=4"
    annotations: dict[str, str] = field(default_factory=dict)
    gate_state: ABState | None = None
    nodes: list[dict[str, Any]] = field(default_factory=list)
    node_of: dict[str, str] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    delayed: dict[tuple[str, str], str] = field(default_factory=dict)
    now_ns: int = 10_000 * NS_PER_S
    window: ServiceWindow = field(default_factory=ServiceWindow)
    undeclared: frozenset[str] = frozenset()
    rejections: dict[str, str] = field(default_factory=dict)
    generation: int = 1
    counter: int = 0
    events: list[Emit] = field(default_factory=list)
    rollout: list[Emit] = field(default_factory=list)
    pushed: list[Push] = field(default_factory=list)
    written: list[tuple[str, str]] = field(default_factory=list)

    # --- changes by tests -----------------------------------------------------------------
    def update_spec(self, **spec: Any) -> None:
        """Change the spec; None removes a field."""
        self.spec = {k: v for k, v in {**self.spec, **spec}.items() if v is not None}
        self.generation += 1

    def restart_operator(self) -> None:
        self.memory = Memory()
        self.failures, self.delayed = {}, {}

    def put(self, body: dict[str, Any]) -> None:
        """Create an object of another owner."""
        self.counter += 1
        body["metadata"]["uid"] = f"foreign-{self.counter}"
        self.objects[body["kind"], body["metadata"]["name"]] = body
        self._bump_version(body)

    def edit(self, kind: str, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Edit an object by hand."""
        body = self.objects[kind, name]
        change(body)
        self._bump_version(body)

    def remove(self, kind: str, name: str) -> None:
        del self.objects[kind, name]
        if kind == "Job":
            for pod in [one for one in self.pods.values() if one["metadata"].get("job") == name]:
                del self.pods[pod["metadata"]["name"]]

    def condition(self, kind: str) -> tuple[str, str]:
        (one,) = [c for c in self.status["conditions"] if c["type"] == kind]
        return one["status"], one["reason"]

    def message(self, kind: str) -> str:
        (one,) = [c for c in self.status["conditions"] if c["type"] == kind]
        return str(one.get("message", ""))

    def secrets_read(self) -> set[str]:
        """Return the names of the Secrets from which engines read their token."""
        return {
            variable["valueFrom"]["secretKeyRef"]["name"]
            for (kind, name), body in self.objects.items()
            if kind == "Deployment" and not name.endswith("-router")
            for variable in body["spec"]["template"]["spec"]["containers"][0]["env"]
            if variable["name"] == "GOODPUT_CONTROL_TOKEN"
        }

    def engines(self, *, ready: bool | None = None) -> list[dict[str, Any]]:
        return [
            pod
            for pod in self.pods.values()
            if pod["metadata"]["labels"]["goodput.dev/role"] == "engine"
            and (ready is None or _ready(pod) == ready)
        ]

    def deployments(self, role: str = "engine") -> dict[str, int]:
        return {
            name: body["spec"]["replicas"]
            for (kind, name), body in self.objects.items()
            if kind == "Deployment"
            and body["spec"]["selector"]["matchLabels"]["goodput.dev/role"] == role
        }

    # --- reconciliations ------------------------------------------------------------------
    def snapshot(self, measures: Measures | None = None) -> Snapshot:
        service = {
            "apiVersion": "goodput.dev/v1alpha1",
            "kind": "LLMService",
            "metadata": {
                "name": NAME,
                "namespace": "models",
                "uid": UID,
                "generation": self.generation,
                "resourceVersion": "1",
                "labels": {"team": "x"},
                "annotations": self.annotations,
            },
            "spec": self.spec,
            "status": self.status,
        }
        return Snapshot(
            now_ns=self.now_ns,
            unix_s=1_800_000_000 + self.now_ns // NS_PER_S,
            service=copy.deepcopy(service),
            objects=tuple(copy.deepcopy(list(self.objects.values()))),
            pods=tuple(copy.deepcopy(list(self.pods.values()))),
            measures=measures,
            memory=self.memory,
            failures=self.failures,
            delayed=self.delayed,
            undeclared=self.undeclared,
            gate_state=self.gate_state,
            nodes=tuple(copy.deepcopy(self.nodes)),
        )

    def decide(self, measures: Measures | None = None) -> Decision:
        """Decide and apply, without a change of pods."""
        decision = decide(self.snapshot(measures), self.installation)
        self.failures, self.delayed = {}, {}
        for action in decision.actions:
            self._carry_out(action)
        self.rollout += decision.rollout
        self.memory = decision.memory
        return decision

    def reconcile(self, measures: Measures | None = None, *, ready: int = 99) -> Decision:
        """Decide and apply, and then run Deployments and pods."""
        decision = self.decide(measures)
        self.run_deployments(ready=ready)
        self.now_ns += STEP_NS
        return decision

    def crash_after(self, writes: int) -> None:
        """Decide, end the operator after its first writes, and then run Deployments and pods."""
        for action in decide(self.snapshot(), self.installation).actions[:writes]:
            self._carry_out(action)
        self.restart_operator()
        self.run_deployments()
        self.now_ns += STEP_NS

    def settle(self, most: int = 60) -> int:
        """Reconcile until there is nothing to do; return the number of attempts."""
        for count in range(most):
            if not self.reconcile().actions and not self.reconcile().actions:
                return count
        raise AssertionError(f"not settled: {self.reconcile().actions}")

    # --- the API server -------------------------------------------------------------------
    def _carry_out(self, action: object) -> None:
        match action:
            case Apply():
                self._apply(action)
            case Create():
                key = (action.body["kind"], action.body["metadata"]["name"])
                if key[0] in self.rejections:
                    self.failures[key] = self.rejections[key[0]]
                elif key not in self.objects:
                    self.objects[key] = self._stored(copy.deepcopy(dict(action.body)))
                    self.written.append(key)
            case CreateToken():
                self.secrets.add(action.body["metadata"]["name"])
            case Delete():
                body = self.objects.get((action.kind, action.name))
                if body is not None and body["metadata"]["uid"] == action.uid:
                    self.remove(action.kind, action.name)
                    self.written.append((action.kind, action.name))
            case WriteStatus():
                self.status = copy.deepcopy(dict(action.status))
            case Emit():
                self.events.append(action)
            case Push():
                self.pushed.append(action)
            case _:
                raise AssertionError(action)

    def _apply(self, action: Apply) -> None:
        body = copy.deepcopy(dict(action.body))
        key = (body["kind"], body["metadata"]["name"])
        live = self.objects.get(key)
        if live is None and key[0] in self.rejections:
            self.failures[key] = self.rejections[key[0]]
            return
        self.written.append(key)
        if live is None:
            self.objects[key] = self._stored(body)
            return
        merged = _merged(live, _normal(body))
        if "data" in body and body["kind"] == "ConfigMap":
            merged["data"] = body["data"]
        if merged != live:
            self.objects[key] = merged
            self._bump_version(merged)

    def _stored(self, body: dict[str, Any]) -> dict[str, Any]:
        self.counter += 1
        body = _normal(body)
        body["metadata"] |= {"uid": f"uid-{self.counter}", "generation": 0}
        if body["kind"] == "Deployment":
            spec = body["spec"]
            spec.setdefault("progressDeadlineSeconds", 600)
            spec["template"]["spec"].setdefault("dnsPolicy", "ClusterFirst")
            for container in spec["template"]["spec"]["containers"]:
                container.setdefault("imagePullPolicy", "IfNotPresent")
                for probe in ("livenessProbe", "readinessProbe"):
                    container[probe].setdefault("successThreshold", 1)
        if body["kind"] == "ControllerRevision":
            body["data"] = json.loads(json.dumps(body["data"], sort_keys=True))
        if body["kind"] == "Service":
            body["spec"].setdefault("sessionAffinity", "None")
        self._bump_version(body)
        return body

    def _bump_version(self, body: dict[str, Any]) -> None:
        self.counter += 1
        body["metadata"]["resourceVersion"] = str(self.counter)
        body["metadata"]["generation"] = body["metadata"].get("generation", 0) + 1

    # --- Deployments and kubelets ---------------------------------------------------------
    def run_deployments(self, *, ready: int = 99) -> None:
        ours = [
            body
            for (kind, _), body in self.objects.items()
            if kind == "Deployment" and not body["metadata"]["uid"].startswith("foreign")
        ]
        for body in ours:
            self._run(body)
        self._run_jobs()
        for pod in [one for one in self.pods.values() if "deployment" in one["metadata"]]:
            owner = pod["metadata"]["deployment"]
            if ("Deployment", owner) not in self.objects:
                del self.pods[pod["metadata"]["name"]]
            elif ready and not _ready(pod) and self._revision(pod) not in self.broken:
                pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
                ready -= 1
        for body in ours:
            self._report(body)

    # --- Jobs -----------------------------------------------------------------------------
    def jobs(self) -> list[dict[str, Any]]:
        """Return the Jobs that exist."""
        return [body for (kind, _), body in self.objects.items() if kind == "Job"]

    def _run_jobs(self) -> None:
        """Start the pod of each new Job."""
        for job in self.jobs():
            name = job["metadata"]["name"]
            if any(one["metadata"].get("job") == name for one in self.pods.values()):
                continue
            if job.get("status"):
                continue
            self.counter += 1
            template = job["spec"]["template"]
            owner = {"kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
            self.pods[f"{name}-x"] = {
                "kind": "Pod",
                "metadata": {
                    "name": f"{name}-x",
                    "uid": f"pod-{self.counter}",
                    "labels": dict(template["metadata"]["labels"]),
                    "ownerReferences": [{**owner, "controller": True}],
                    "job": name,
                },
                "status": {
                    "phase": "Running",
                    "podIP": "10.9.9.9",
                    "containerStatuses": [{"name": "replay", "state": {"running": {}}}],
                },
            }

    def end_job(self, message: str | None, *, code: int = 0) -> None:
        """End the only Job; without a message, its pod is deleted."""
        (job,) = self.jobs()
        name = job["metadata"]["name"]
        kind = "Failed" if code or message is None else "Complete"
        job["status"] = {"conditions": [{"type": kind, "status": "True"}]}
        self._bump_version(job)
        if message is None:
            del self.pods[f"{name}-x"]
            return
        ended = {"exitCode": code, "message": message, "finishedAt": "2026-01-01T00:00:00Z"}
        self.pods[f"{name}-x"]["status"] = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"name": "replay", "state": {"terminated": ended}}],
        }

    def _run(self, body: dict[str, Any]) -> None:
        mine = self._pods_of(body)
        desired = body["spec"]["replicas"]
        role = body["spec"]["selector"]["matchLabels"]["goodput.dev/role"]
        if role in self.full:
            desired = min(desired, len(mine))
        # As the real controller does, delete pods that are not ready first.
        for pod in sorted(mine, key=_ready)[: max(0, len(mine) - desired)]:
            del self.pods[pod["metadata"]["name"]]
        for _ in range(desired - len(mine)):
            self.counter += 1
            name = f"{body['metadata']['name']}-{self.counter}"
            labels = body["spec"]["template"]["metadata"]["labels"]
            self.pods[name] = {
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "uid": f"pod-{self.counter}",
                    "labels": dict(labels),
                    "deployment": body["metadata"]["name"],
                    "ownerReferences": [
                        {
                            "kind": "ReplicaSet",
                            "name": f"{body['metadata']['name']}-6d4cf56db6",
                            "uid": f"rs-{body['metadata']['uid']}",
                            "controller": True,
                        }
                    ],
                },
                "spec": {"nodeName": self.node_of.get(role, "node-1")},
                "status": {"podIP": f"10.0.0.{self.counter % 250}"},
            }

    def _report(self, body: dict[str, Any]) -> None:
        mine = self._pods_of(body)
        ready = sum(map(_ready, mine))
        conditions = body.get("status", {}).get("conditions", [])
        role = body["spec"]["selector"]["matchLabels"]["goodput.dev/role"]
        conditions = [one for one in conditions if one["type"] != "ReplicaFailure"]
        if role in self.full:
            failure = {"type": "ReplicaFailure", "status": "True", "message": self.refusal}
            conditions = [*conditions, failure]
        body["status"] = {
            "observedGeneration": body["metadata"]["generation"],
            "replicas": len(mine),
            "updatedReplicas": len(mine),
            "readyReplicas": ready,
            "availableReplicas": ready,
            "conditions": conditions,
        }

    def _pods_of(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        name = body["metadata"]["name"]
        return [pod for pod in self.pods.values() if pod["metadata"].get("deployment") == name]

    def _revision(self, pod: Mapping[str, Any]) -> str:
        return str(pod["metadata"]["labels"]["goodput.dev/revision"])

    # --- measurements ---------------------------------------------------------------------
    def measured(
        self,
        good: int = 0,
        total: int = 0,
        *,
        signal: Signal = Signal.FRESH,
        over_s: int = 10,
        limits: int = 1,
        **state: Any,
    ) -> Measures:
        """Return measurements of ten seconds, with a response of every ready engine.

        Routers deliver the counts of `over_s` seconds, as after an operator's start.
        """
        seconds = None
        if signal is Signal.FRESH:
            counted = ClassOutcomes(name="a", good=good, total=total)
            self.window.add_interval([counted], over_s * NS_PER_S, self.now_ns)
            seconds = self.window.counts(["a"])
        return Measures(
            seconds=seconds,
            interval_ns=10 * NS_PER_S,
            traffic=Traffic(signal=signal, arrivals=total),
            outcomes=(ClassOutcomes(name="a", good=good, total=total),),
            engines=tuple(
                EngineReading(
                    name=pod["metadata"]["name"],
                    signal=Signal.FRESH,
                    state=EngineState(limits_revision=limits, **state),
                )
                for pod in self.engines(ready=True)
            ),
        )


def _ready(pod: Mapping[str, Any]) -> bool:
    return any(c["status"] == "True" for c in pod["status"].get("conditions", ()))


def _normal(value: Any, key: str = "") -> Any:
    """Return a value as the API server stores it: no empty values, canonical quantities."""
    if isinstance(value, dict):
        return {
            k: _normal(v, k)
            for k, v in value.items()
            if v not in ([], "", None) or key in {"data", "matchLabels"}
        }
    if isinstance(value, list):
        return [_normal(one) for one in value]
    return {"0.5": "500m", "1000m": "1", "1024Mi": "1Gi"}.get(value, value)


_MAPS = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}


def _merged(live: Any, desired: Any, key: str = "") -> Any:
    """Return the result of a forced server-side apply."""
    if isinstance(live, dict) and isinstance(desired, dict) and key != "selector":
        return {
            k: _merged(live[k], desired[k], k)
            if k in live and k in desired
            else copy.deepcopy(desired.get(k, live.get(k)))
            for k in {**live, **desired}
        }
    if key in _MAPS:
        by = {one[_MAPS[key]]: one for one in live}
        mine = [_merged(by.get(one[_MAPS[key]], {}), one) for one in desired]
        names = {one[_MAPS[key]] for one in desired}
        return mine + [one for one in live if one[_MAPS[key]] not in names]
    return copy.deepcopy(desired)


@pytest.fixture(scope="session")
def new_cluster() -> type[Cluster]:
    """Return the class, for tests with several clusters."""
    return Cluster


@pytest.fixture
def cluster() -> Cluster:
    """Return an empty cluster with a service of two engines."""
    return Cluster()


@pytest.fixture
def running(cluster: Cluster) -> Cluster:
    """Return a settled cluster with a service of two engines."""
    cluster.settle()
    return cluster


@pytest.fixture(scope="session")
def other_installation() -> Installation:
    """Return an installation with a later version of all images."""
    return replace(INSTALLATION, engine_image="engine:2", router_image="engine:2")


@pytest.fixture
def gated(cluster: Cluster) -> Cluster:
    """A settled service of two engines with a gate."""
    cluster.update_spec(rollout={"gate": GATE})
    cluster.settle()
    return cluster
