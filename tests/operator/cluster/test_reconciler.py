"""A reconciliation: observe, decide, apply, and keep the state for the next."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from pythonjsonlogger.json import JsonFormatter

from goodput_core.contract import OBJECT_LABEL_LLMSERVICE, OBJECT_LABEL_ROLE
from goodput_core.control import (
    Change,
    Knob,
    ReplicaPhase,
    ReplicaWindow,
    ServiceDecision,
    ServiceObservation,
    ServiceParams,
    ServiceState,
    Signal,
    Traffic,
    service_law,
)
from goodput_core.spec.codec import decode
from goodput_core.spec.llmservice import LLMServiceSpec
from goodput_core.units import NS_PER_S
from goodput_operator.kube.cache import Cache, key_of, service_of, trim
from goodput_operator.reconcile.actions import Action, Apply, Decision, Emit, WriteStatus
from goodput_operator.reconcile.apply import Applier
from goodput_operator.reconcile.event_recorder import EventRecorder
from goodput_operator.reconcile.metrics import OperatorMetrics
from goodput_operator.reconcile.observe import Observer
from goodput_operator.reconcile.reconciler import EVENT_DECISION, EVENT_ROLLOUT, Reconciler
from goodput_operator.reconcile.snapshot import ImagePin, Memory
from goodput_operator.registry import UnresolvedTagError

if TYPE_CHECKING:
    from goodput_operator.reconcile.snapshot import Snapshot
    from goodput_operator.render.image_names import TagName

KEY = ("ns", "chat")
CHAT = "/apis/goodput.dev/v1alpha1/namespaces/ns/llmservices/chat"
CONFIG_MAP = "/api/v1/namespaces/ns/configmaps/chat"


def service(uid: str = "u1", version: int = 7, **status: Any) -> dict[str, Any]:
    metadata = {"name": "chat", "namespace": "ns", "uid": uid, "resourceVersion": str(version)}
    return {
        "apiVersion": "goodput.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": metadata,
        "status": status,
    }


@dataclass
class ForgottenServices:
    """Measures nothing, and records deleted services."""

    forgotten: list[str] = field(default_factory=list)

    async def measure(self, service: Any, pods: Any, now_ns: int) -> None:
        return None

    def forget(self, uid: str) -> None:
        self.forgotten.append(uid)


async def no_gate(_: str) -> None:
    """No pod of a gate runs."""


class Tags:
    """A registry whose digests tests set.

    Attributes:
        answers: the answers in order, of which the last one is repeated.
        asked: the tags that were asked for.
    """

    def __init__(self) -> None:
        self.answers: list[str | UnresolvedTagError] = []
        self.asked: list[TagName] = []

    async def resolve(self, image: TagName) -> str:
        self.asked.append(image)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, UnresolvedTagError):
            raise answer
        return answer


class Harness:
    """A reconciler with a cache and a decision that tests set."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        self.cache = cache = Cache((kind, "") for kind in ("LLMService", "Deployment", "Pod"))
        self.lists = 0
        self.actions: tuple[Action, ...] = ()
        self.changes: tuple[Change, ...] = ()
        self.rollout: tuple[Emit, ...] = ()
        self.foreign: tuple[tuple[str, str], ...] = ()
        self.tagged_image = ""
        self.tags = Tags()
        self.law: ServiceDecision | None = None
        self.seen: list[Snapshot] = []
        self.measures = ForgottenServices()
        self.metrics = OperatorMetrics()
        client = bench.client
        self.reconciler = Reconciler(
            cache=cache,
            observer=Observer(
                cache=cache,
                client=client,
                measure=self.measures,
                read_gate=no_gate,
                resolve_tag=self.tags.resolve,
                clock=bench.clock,
            ),
            decide=self.decide,
            applier=Applier(
                client=client,
                pusher=None,  # type: ignore[arg-type]
                recorder=EventRecorder(client, clock=bench.clock, instance="op"),
                key=b"k" * 32,
            ),
            measure=self.measures,
            metrics=self.metrics,
        )

    def list_services(self, *services: dict[str, Any]) -> None:
        """Replace the cached services, as a list of the API server does."""
        self.lists += 1
        version = {"resourceVersion": str(1000 + self.lists)}
        content = {"apiVersion": "v1", "metadata": version, "items": services}
        self.cache.replace("LLMService", "", content)

    def decide(self, snapshot: Snapshot) -> Decision:
        self.seen.append(snapshot)
        remembered = replace(snapshot.memory, startups_ns=(*snapshot.memory.startups_ns, 1))
        return Decision(
            actions=self.actions,
            memory=remembered,
            wake_at_ns=42,
            changes=self.changes,
            rollout=self.rollout,
            foreign=self.foreign,
            control_decision=self.law,
            tagged_image=self.tagged_image,
        )


@pytest.fixture
def harness(bench: Any) -> Harness:
    harness = Harness(bench)
    harness.list_services(service())
    return harness


def labelled(kind: str, name: str, *, service: str) -> dict[str, Any]:
    labels = {OBJECT_LABEL_LLMSERVICE: service}
    metadata = {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "7"}
    return {"apiVersion": "v1", "kind": kind, "metadata": {**metadata, "labels": labels}}


def apply_config_map() -> Apply:
    owner = {"kind": "LLMService", "name": "chat", "uid": "u1", "controller": True}
    metadata = {"name": "chat", "namespace": "ns", "ownerReferences": [owner]}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": "1"}}
    return Apply(body=body)


async def test_a_snapshot_states_that_the_definition_lacks_a_field(harness: Harness) -> None:
    server = harness.bench.server
    message = "failed to create typed patch object: .status.learnt: field not declared in schema"
    server.put(CHAT, service())
    server.rejections["PATCH", f"{CHAT}/status"] = (500, {"message": message})
    harness.actions = (WriteStatus(status={"learnt": {}}),)
    await harness.reconciler.reconcile(KEY)
    await harness.reconciler.reconcile(KEY)
    assert [set(snapshot.undeclared) for snapshot in harness.seen] == [set(), {"learnt"}]


async def test_a_snapshot_contains_the_service_and_its_labelled_objects(harness: Harness) -> None:
    child = labelled("Deployment", "chat-1", service="chat")
    pod = labelled("Pod", "chat-1-x", service="chat")
    for body in (child, pod, labelled("Deployment", "other-1", service="other")):
        harness.cache.update(body, deleted=False)
    result = await harness.reconciler.reconcile(KEY)
    (snapshot,) = harness.seen
    assert snapshot.service == service()
    assert (snapshot.objects, snapshot.pods) == ((child,), (pod,))
    assert snapshot.memory == Memory()
    assert (result.again_at_ns, result.failed, result.deleted) == (42, False, False)


async def test_a_snapshot_contains_the_readable_nodes_of_a_gate_on_several(
    harness: Harness,
) -> None:
    server = harness.bench.server
    for name in ("one", "two"):
        server.put(f"/api/v1/nodes/{name}", {"kind": "Node"})
    for node in ("one", "two"):
        for role in ("baseline", "candidate", "engine"):
            pod = labelled("Pod", role, service="chat")
            pod["metadata"]["labels"][OBJECT_LABEL_ROLE] = role
            pod["metadata"]["resourceVersion"] = "8" if node == "two" else "7"
            pod["spec"] = {"nodeName": "one" if role == "baseline" else node}
            harness.cache.update(pod, deleted=False)
        await harness.reconciler.reconcile(KEY)
    server.rejections["GET", "/api/v1/nodes/two"] = (403, {"reason": "Forbidden"})
    await harness.reconciler.reconcile(KEY)
    seen = [[node["metadata"]["name"] for node in one.nodes] for one in harness.seen]
    assert seen == [[], ["one", "two"], ["one"]]


async def test_memory_and_failures_reach_the_next_reconciliation(harness: Harness) -> None:
    harness.actions = (apply_config_map(),)
    rejection = (403, {"reason": "Forbidden", "message": "exceeded quota"})
    harness.bench.server.rejections["PATCH", CONFIG_MAP] = rejection
    await harness.reconciler.reconcile(KEY)
    harness.actions = ()
    await harness.reconciler.reconcile(KEY)
    await harness.reconciler.reconcile(KEY)
    assert [s.memory.startups_ns for s in harness.seen] == [(), (1,), (1, 1)]
    assert [dict(s.failures) for s in harness.seen] == [
        {},
        {("ConfigMap", "chat"): "exceeded quota"},
        {},
    ]


async def test_a_temporary_failure_fails_the_reconciliation(harness: Harness) -> None:
    harness.actions = (apply_config_map(),)
    harness.bench.server.rejections["PATCH", CONFIG_MAP] = (503, {"message": "busy"})
    assert (await harness.reconciler.reconcile(KEY)).failed
    await harness.reconciler.reconcile(KEY)
    assert harness.seen[1].delayed == {("ConfigMap", "chat"): "busy"}
    assert harness.seen[1].failures == {}


async def test_a_foreign_object_is_in_the_snapshot_until_it_is_deleted(harness: Harness) -> None:
    harness.bench.server.put(CONFIG_MAP, {"kind": "ConfigMap", "data": {}})
    harness.actions = (apply_config_map(),)
    await harness.reconciler.reconcile(KEY)
    harness.actions, harness.foreign = (), (("ConfigMap", "chat"),)
    await harness.reconciler.reconcile(KEY)
    del harness.bench.server.objects[CONFIG_MAP]
    await harness.reconciler.reconcile(KEY)
    names = [[(o["kind"], o["metadata"]["name"]) for o in s.objects] for s in harness.seen]
    assert names == [[], [("ConfigMap", "chat")], []]
    assert ("ConfigMap", "chat") in harness.seen[1].failures


async def test_a_foreign_object_whose_name_is_no_longer_needed_is_not_read(
    harness: Harness,
) -> None:
    harness.bench.server.put(CONFIG_MAP, {"kind": "ConfigMap", "data": {}})
    harness.actions = (apply_config_map(),)
    await harness.reconciler.reconcile(KEY)
    harness.actions = ()
    await harness.reconciler.reconcile(KEY)
    harness.bench.server.calls.clear()
    await harness.reconciler.reconcile(KEY)
    assert harness.bench.server.calls == []
    assert harness.seen[-1].objects == ()


async def test_a_later_service_of_the_same_name_starts_with_an_empty_record(
    harness: Harness,
) -> None:
    await harness.reconciler.reconcile(KEY)
    harness.list_services(service(uid="u2"))
    await harness.reconciler.reconcile(KEY)
    assert harness.seen[1].memory == Memory()
    assert harness.measures.forgotten == ["u1"]


async def test_the_later_of_two_cached_services_of_one_name_is_reconciled(harness: Harness) -> None:
    harness.list_services(service(uid="u2", version=100), service(uid="u1", version=99))
    await harness.reconciler.reconcile(KEY)
    assert harness.seen[0].service["metadata"]["uid"] == "u2"


async def test_a_deleted_service_leaves_no_state(harness: Harness) -> None:
    harness.list_services(service(replicas=3))
    await harness.reconciler.reconcile(KEY)
    assert b'llmservice="chat"' in harness.metrics.expose(leading=True, waiting=0, overdue_s=0)
    harness.list_services()
    result = await harness.reconciler.reconcile(KEY)
    assert result.deleted
    assert len(harness.seen) == 1
    assert harness.measures.forgotten == ["u1"]
    assert b'llmservice="chat"' not in harness.metrics.expose(leading=True, waiting=0, overdue_s=0)


async def test_metrics_follow_the_status_after_a_reconciliation(harness: Harness) -> None:
    def exposed(name: str) -> bool:
        text = harness.metrics.expose(leading=True, waiting=0, overdue_s=0).decode()
        return f'goodput_service_{name}{{llmservice="chat",namespace="ns"}}' in text

    harness.bench.server.put(CHAT, service(version=7))
    harness.list_services(service(replicas=1, recommendedReplicas=4))
    harness.actions = (WriteStatus(status={"replicas": 2, "recommendedReplicas": 3}),)
    await harness.reconciler.reconcile(KEY)
    assert exposed("replicas")
    assert b'goodput_service_recommended_replicas{llmservice="chat",namespace="ns"} 3.0' in (
        harness.metrics.expose(leading=True, waiting=0, overdue_s=0)
    )
    harness.actions = (WriteStatus(status={"replicas": 2}),)
    await harness.reconciler.reconcile(KEY)
    assert exposed("replicas")
    assert not exposed("recommended_replicas"), "there is no recommendation any more"


async def test_decisions_are_counted_until_the_service_is_deleted(harness: Harness) -> None:
    harness.changes = (
        Change(knob=Knob.REPLICAS, reason="Demand", message="more", applied=True),
        Change(knob=Knob.TOKEN_BUDGET, reason="TPOTMissed", message="less", applied=False),
    )
    await harness.reconciler.reconcile(KEY)
    await harness.reconciler.reconcile(KEY)
    name = 'goodput_service_decisions_total{applied="%s",knob="%s",llmservice="chat",%s} 2.0'
    text = harness.metrics.expose(leading=True, waiting=0, overdue_s=0).decode()
    assert name % ("true", "Replicas", 'namespace="ns",reason="Demand"') in text
    assert name % ("false", "TokenBudget", 'namespace="ns",reason="TPOTMissed"') in text
    harness.list_services()
    await harness.reconciler.reconcile(KEY)
    assert (
        "goodput_service_decisions_total{"
        not in harness.metrics.expose(leading=True, waiting=0, overdue_s=0).decode()
    )


async def test_a_decision_is_logged_with_its_inputs_as_json(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    classes = [{"name": "a", "ttftMs": 500, "tpotMs": 50}]
    manifest = {"model": {"source": "emulated://unit"}, "slo": {"classes": classes}}
    spec = decode(LLMServiceSpec, manifest, "spec")
    seen = ServiceObservation(
        interval_ns=10 * NS_PER_S,
        traffic=Traffic(signal=Signal.FRESH, arrivals=70, in_flight=3),
        replicas=(
            ReplicaWindow(
                name="p", phase=ReplicaPhase.READY, signal=Signal.FRESH, running=2, waiting=1
            ),
        ),
        desired_replicas=1,
    )
    _, harness.law = service_law(ServiceState(), seen, ServiceParams.of(spec), 5)
    harness.changes = (Change(knob=Knob.REPLICAS, reason="Demand", message="more", applied=True),)
    with caplog.at_level(logging.INFO, logger="goodput_operator"):
        await harness.reconciler.reconcile(KEY)
    (record,) = caplog.records
    assert record.getMessage() == EVENT_DECISION
    line = json.loads(JsonFormatter().format(record))
    assert (line["namespace"], line["llmservice"]) == KEY
    assert (line["knob"], line["reason"], line["applied"]) == ("Replicas", "Demand", True)
    inputs = line["inputs"]
    assert (inputs["arrivals"], inputs["in_flight"], inputs["running"]) == (70, 3, 2)
    assert inputs["replicas"] == {ReplicaPhase.READY.value: 1}
    assert inputs["interval_seconds"] == 10
    assert inputs["replica_law"]["current"] == 1


async def test_each_step_of_a_gate_is_logged_once(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    started = Emit(warning=False, reason="GateStarted", message="b is compared with a")
    failed = Emit(warning=True, reason="GateFailed", message="a keeps serving instead of b: slow")
    with caplog.at_level(logging.INFO, logger="goodput_operator"):
        for harness.rollout in ((started,), (started,), (), (failed,)):
            await harness.reconciler.reconcile(KEY)
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert {(line["message"], line["namespace"], line["llmservice"]) for line in lines} == {
        (EVENT_ROLLOUT, *KEY)
    }
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    steps = [(line["reason"], line["detail"]) for line in lines]
    assert steps == [(one.reason, one.message) for one in (started, failed)]


async def test_a_written_status_is_observed_before_the_watch_delivers_it(
    harness: Harness,
) -> None:
    harness.bench.server.put(CHAT, service(version=7))
    harness.bench.server.objects[CHAT]["metadata"]["resourceVersion"] = "7"
    harness.actions = (WriteStatus(status={"replicas": 2}),)
    await harness.reconciler.reconcile(KEY)
    harness.actions = ()
    await harness.reconciler.reconcile(KEY)
    assert harness.seen[1].service["status"] == {"replicas": 2}
    harness.list_services(service(version=9, replicas=5))
    await harness.reconciler.reconcile(KEY)
    assert harness.seen[2].service["status"] == {"replicas": 5}, "the later version is observed"


async def test_an_exception_leaves_the_memory_of_the_service_unchanged(harness: Harness) -> None:
    await harness.reconciler.reconcile(KEY)

    def broken(_: Snapshot) -> Decision:
        raise ValueError("a bug")

    harness.reconciler._decide = broken
    with pytest.raises(ValueError, match="a bug"):
        await harness.reconciler.reconcile(KEY)
    harness.reconciler._decide = harness.decide
    await harness.reconciler.reconcile(KEY)
    assert harness.seen[-1].memory.startups_ns == (1,)
    text = harness.metrics.expose(leading=True, waiting=0, overdue_s=0)
    assert b'goodput_operator_turns_total{outcome="error"} 1.0' in text
    assert b'goodput_operator_turns_total{outcome="ok"} 2.0' in text


def test_a_cached_pod_has_no_managed_fields() -> None:
    body = {"kind": "Pod", "metadata": {"name": "p", "managedFields": [1]}, "spec": {"a": 1}}
    assert trim(body) == {"kind": "Pod", "metadata": {"name": "p"}, "spec": {"a": 1}}
    assert body["metadata"] == {"name": "p", "managedFields": [1]}, "the original is unchanged"


def test_an_object_belongs_to_the_service_in_its_label() -> None:
    labels = {"goodput.dev/llmservice": "chat"}
    assert service_of({"metadata": {"namespace": "ns", "name": "x", "labels": labels}}) == KEY
    assert service_of({"metadata": {"namespace": "ns", "name": "x"}}) is None
    assert key_of(service()) == KEY


async def test_a_tag_is_resolved_once_and_kept_until_no_decision_asks_for_it(
    harness: Harness,
) -> None:
    harness.tags.answers = [f"sha256:{digit * 64}" for digit in "12"]
    harness.tagged_image = "ghcr.io/a/b:1"
    for _ in range(3):
        await harness.reconciler.reconcile(KEY)
    first, *later = [snapshot.pin for snapshot in harness.seen]
    assert first is None, "no decision asked before"
    pinned = f"ghcr.io/a/b@sha256:{'1' * 64}"
    assert later == [ImagePin(image="ghcr.io/a/b:1", pinned=pinned)] * 2
    assert [tag.tag for tag in harness.tags.asked] == ["1"]
    harness.tagged_image = ""
    await harness.reconciler.reconcile(KEY)
    harness.tagged_image = "ghcr.io/a/b:1"
    await harness.reconciler.reconcile(KEY)
    await harness.reconciler.reconcile(KEY)
    assert harness.seen[-2].pin is None
    assert harness.seen[-1].pin == ImagePin(
        image="ghcr.io/a/b:1", pinned=f"ghcr.io/a/b@sha256:{'2' * 64}"
    )


@pytest.mark.parametrize(("temporary", "pause_s"), [(True, 10), (False, 60)])
async def test_a_registry_with_a_problem_is_asked_again_after_a_pause(
    harness: Harness, temporary: bool, pause_s: int
) -> None:
    problem = UnresolvedTagError("registry ghcr.io is down", temporary=temporary)
    harness.tags.answers = [problem, f"sha256:{'1' * 64}"]
    harness.tagged_image = "ghcr.io/a/b:1"
    await harness.reconciler.reconcile(KEY)
    for _ in range(2):
        await harness.reconciler.reconcile(KEY)
        pin = harness.seen[-1].pin
        assert pin is not None
        assert (pin.pinned, pin.problem) == ("", "registry ghcr.io is down")
        assert pin.temporary == temporary
    assert len(harness.tags.asked) == 1
    harness.bench.clock.ns += pause_s * NS_PER_S
    await harness.reconciler.reconcile(KEY)
    pin = harness.seen[-1].pin
    assert pin is not None
    assert pin.pinned
    assert len(harness.tags.asked) == 2
