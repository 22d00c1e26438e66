"""A reconciliation: observe, decide, apply, and keep the memory for the next."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from pythonjsonlogger.json import JsonFormatter

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
from goodput_operator.kube.cache import Cache, Key, key_of, service_of, trim
from goodput_operator.reconcile.actions import Action, Apply, Decision, WriteStatus
from goodput_operator.reconcile.apply import Applier, EventRecorder
from goodput_operator.reconcile.metrics import OperatorMetrics
from goodput_operator.reconcile.observe import Observer
from goodput_operator.reconcile.reconciler import EVENT_DECISION, Reconciler
from goodput_operator.reconcile.snapshot import Memory

if TYPE_CHECKING:
    from goodput_operator.reconcile.snapshot import Snapshot

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
class Numbers:
    """Measures nothing; records forgotten services."""

    forgotten: list[str] = field(default_factory=list)

    async def measure(self, service: Any, pods: Any, now_ns: int) -> None:
        return None

    def forget(self, uid: str) -> None:
        self.forgotten.append(uid)


class Held(Cache):
    """A cache filled by a test."""

    def __init__(self) -> None:
        super().__init__(())
        self.asked: dict[Key, list[dict[str, Any]]] = {}
        self.parts: dict[Key, list[dict[str, Any]]] = {}

    def _objects(self, key: Key) -> list[Any]:
        return [*self.asked.get(key, ()), *self.parts.get(key, ())]


class Parts:
    """Reconciler over a cache and a decision that tests set."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.held = held = Held()
        self.actions: tuple[Action, ...] = ()
        self.changes: tuple[Change, ...] = ()
        self.foreign: tuple[tuple[str, str], ...] = ()
        self.law: ServiceDecision | None = None
        self.seen: list[Snapshot] = []
        self.numbers = Numbers()
        self.metrics = OperatorMetrics()
        client = memory.client
        self.rounds = Reconciler(
            cache=held,
            observer=Observer(cache=held, client=client, measure=self.numbers, clock=memory.clock),
            decide=self.decide,
            applier=Applier(
                client=client,
                pusher=None,  # type: ignore[arg-type]
                recorder=EventRecorder(client, clock=memory.clock, instance="op"),
                key=b"k" * 32,
            ),
            measure=self.numbers,
            metrics=self.metrics,
        )

    def decide(self, snapshot: Snapshot) -> Decision:
        self.seen.append(snapshot)
        remembered = replace(snapshot.memory, startups_ns=(*snapshot.memory.startups_ns, 1))
        return Decision(
            actions=self.actions,
            memory=remembered,
            wake_at_ns=42,
            changes=self.changes,
            foreign=self.foreign,
            law=self.law,
        )


@pytest.fixture
def parts(memory: Any) -> Parts:
    parts = Parts(memory)
    parts.held.asked[KEY] = [service()]
    return parts


def apply_config_map() -> Apply:
    owner = {"kind": "LLMService", "name": "chat", "uid": "u1", "controller": True}
    metadata = {"name": "chat", "namespace": "ns", "ownerReferences": [owner]}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": "1"}}
    return Apply(body=body)


async def test_a_snapshot_holds_the_service_and_what_is_labelled_with_it(parts: Parts) -> None:
    child = {"kind": "Deployment", "metadata": {"name": "chat-1", "namespace": "ns"}}
    pod = {"kind": "Pod", "metadata": {"name": "chat-1-x", "namespace": "ns"}}
    parts.held.parts[KEY] = [child, pod]
    parts.held.parts["ns", "other"] = [{"kind": "Deployment", "metadata": {"name": "other"}}]
    turn = await parts.rounds.reconcile(KEY)
    (snapshot,) = parts.seen
    assert snapshot.service == service()
    assert (snapshot.objects, snapshot.pods) == ((child,), (pod,))
    assert snapshot.memory == Memory()
    assert (turn.again_at_ns, turn.failed, turn.deleted) == (42, False, False)


async def test_memory_and_failures_reach_the_next_reconciliation(parts: Parts) -> None:
    parts.actions = (apply_config_map(),)
    refusal = (403, {"reason": "Forbidden", "message": "exceeded quota"})
    parts.memory.server.refuse["PATCH", CONFIG_MAP] = refusal
    await parts.rounds.reconcile(KEY)
    parts.actions = ()
    await parts.rounds.reconcile(KEY)
    await parts.rounds.reconcile(KEY)
    assert [s.memory.startups_ns for s in parts.seen] == [(), (1,), (1, 1)]
    assert [dict(s.failures) for s in parts.seen] == [
        {},
        {("ConfigMap", "chat"): "exceeded quota"},
        {},
    ]


async def test_a_temporary_failure_fails_the_reconciliation(parts: Parts) -> None:
    parts.actions = (apply_config_map(),)
    parts.memory.server.refuse["PATCH", CONFIG_MAP] = (503, {"message": "busy"})
    assert (await parts.rounds.reconcile(KEY)).failed
    await parts.rounds.reconcile(KEY)
    assert parts.seen[1].delayed == {("ConfigMap", "chat"): "busy"}
    assert parts.seen[1].failures == {}


async def test_a_foreign_object_is_in_the_snapshot_until_it_is_gone(parts: Parts) -> None:
    parts.memory.server.put(CONFIG_MAP, {"kind": "ConfigMap", "data": {}})
    parts.actions = (apply_config_map(),)
    await parts.rounds.reconcile(KEY)
    parts.actions, parts.foreign = (), (("ConfigMap", "chat"),)
    await parts.rounds.reconcile(KEY)
    del parts.memory.server.objects[CONFIG_MAP]
    await parts.rounds.reconcile(KEY)
    names = [[(o["kind"], o["metadata"]["name"]) for o in s.objects] for s in parts.seen]
    assert names == [[], [("ConfigMap", "chat")], []]
    assert ("ConfigMap", "chat") in parts.seen[1].failures


async def test_a_foreign_object_in_a_place_that_is_wanted_no_more_is_not_asked_for(
    parts: Parts,
) -> None:
    parts.memory.server.put(CONFIG_MAP, {"kind": "ConfigMap", "data": {}})
    parts.actions = (apply_config_map(),)
    await parts.rounds.reconcile(KEY)
    parts.actions = ()
    await parts.rounds.reconcile(KEY)
    parts.memory.server.calls.clear()
    await parts.rounds.reconcile(KEY)
    assert parts.memory.server.calls == []
    assert parts.seen[-1].objects == ()


async def test_a_namesake_starts_afresh(parts: Parts) -> None:
    await parts.rounds.reconcile(KEY)
    parts.held.asked[KEY] = [service(uid="u2")]
    await parts.rounds.reconcile(KEY)
    assert parts.seen[1].memory == Memory()
    assert parts.numbers.forgotten == ["u1"]


async def test_while_two_namesakes_are_seen_the_later_one_counts(parts: Parts) -> None:
    parts.held.asked[KEY] = [service(uid="u2", version=100), service(uid="u1", version=99)]
    await parts.rounds.reconcile(KEY)
    assert parts.seen[0].service["metadata"]["uid"] == "u2"


async def test_a_service_that_is_gone_leaves_nothing(parts: Parts) -> None:
    parts.held.asked[KEY] = [service(replicas=3)]
    await parts.rounds.reconcile(KEY)
    assert b'llmservice="chat"' in parts.metrics.expose(leading=True, waiting=0)
    parts.held.asked.clear()
    turn = await parts.rounds.reconcile(KEY)
    assert turn.deleted
    assert len(parts.seen) == 1
    assert parts.numbers.forgotten == ["u1"]
    assert b'llmservice="chat"' not in parts.metrics.expose(leading=True, waiting=0)


async def test_metrics_follow_the_status_after_a_reconciliation(parts: Parts) -> None:
    def says(name: str) -> bool:
        text = parts.metrics.expose(leading=True, waiting=0).decode()
        return f'goodput_service_{name}{{llmservice="chat",namespace="ns"}}' in text

    parts.memory.server.put(CHAT, service(version=7))
    parts.held.asked[KEY] = [service(replicas=1, recommendedReplicas=4)]
    parts.actions = (WriteStatus(status={"replicas": 2, "recommendedReplicas": 3}),)
    await parts.rounds.reconcile(KEY)
    assert says("replicas")
    assert b'goodput_service_recommended_replicas{llmservice="chat",namespace="ns"} 3.0' in (
        parts.metrics.expose(leading=True, waiting=0)
    )
    parts.actions = (WriteStatus(status={"replicas": 2}),)
    await parts.rounds.reconcile(KEY)
    assert says("replicas")
    assert not says("recommended_replicas"), "nothing is recommended any more"


async def test_decisions_are_counted_as_long_as_the_service_is_there(parts: Parts) -> None:
    parts.changes = (
        Change(knob=Knob.REPLICAS, reason="Demand", message="more", applied=True),
        Change(knob=Knob.TOKEN_BUDGET, reason="TPOTMissed", message="less", applied=False),
    )
    await parts.rounds.reconcile(KEY)
    await parts.rounds.reconcile(KEY)
    name = 'goodput_service_decisions_total{applied="%s",knob="%s",llmservice="chat",%s} 2.0'
    text = parts.metrics.expose(leading=True, waiting=0).decode()
    assert name % ("true", "Replicas", 'namespace="ns",reason="Demand"') in text
    assert name % ("false", "TokenBudget", 'namespace="ns",reason="TPOTMissed"') in text
    parts.held.asked.clear()
    await parts.rounds.reconcile(KEY)
    assert (
        "goodput_service_decisions_total{"
        not in parts.metrics.expose(leading=True, waiting=0).decode()
    )


async def test_a_decision_is_logged_with_its_inputs_as_json(
    parts: Parts, caplog: pytest.LogCaptureFixture
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
    _, parts.law = service_law(ServiceState(), seen, ServiceParams.of(spec), 5)
    parts.changes = (Change(knob=Knob.REPLICAS, reason="Demand", message="more", applied=True),)
    with caplog.at_level(logging.INFO, logger="goodput_operator"):
        await parts.rounds.reconcile(KEY)
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


async def test_a_status_that_was_just_written_is_seen_before_the_watch_brings_it(
    parts: Parts,
) -> None:
    parts.memory.server.put(CHAT, service(version=7))
    parts.memory.server.objects[CHAT]["metadata"]["resourceVersion"] = "7"
    parts.actions = (WriteStatus(status={"replicas": 2}),)
    await parts.rounds.reconcile(KEY)
    parts.actions = ()
    await parts.rounds.reconcile(KEY)
    assert parts.seen[1].service["status"] == {"replicas": 2}
    parts.held.asked[KEY] = [service(version=9, replicas=5)]
    await parts.rounds.reconcile(KEY)
    assert parts.seen[2].service["status"] == {"replicas": 5}, "what is newer counts"


async def test_an_exception_leaves_the_service_as_it_was_remembered(parts: Parts) -> None:
    await parts.rounds.reconcile(KEY)

    def broken(_: Snapshot) -> Decision:
        raise ValueError("a bug")

    parts.rounds._decide = broken
    with pytest.raises(ValueError, match="a bug"):
        await parts.rounds.reconcile(KEY)
    parts.rounds._decide = parts.decide
    await parts.rounds.reconcile(KEY)
    assert parts.seen[-1].memory.startups_ns == (1,)
    text = parts.metrics.expose(leading=True, waiting=0)
    assert b'goodput_operator_turns_total{outcome="error"} 1.0' in text
    assert b'goodput_operator_turns_total{outcome="ok"} 2.0' in text


def test_a_cached_pod_has_no_managed_fields() -> None:
    body = {"kind": "Pod", "metadata": {"name": "p", "managedFields": [1]}, "spec": {"a": 1}}
    assert trim(body) == {"kind": "Pod", "metadata": {"name": "p"}, "spec": {"a": 1}}
    assert body["metadata"] == {"name": "p", "managedFields": [1]}, "the original is not ours"


def test_an_object_belongs_to_the_service_that_it_is_labelled_with() -> None:
    labels = {"goodput.dev/llmservice": "chat"}
    assert service_of({"metadata": {"namespace": "ns", "name": "x", "labels": labels}}) == KEY
    assert service_of({"metadata": {"namespace": "ns", "name": "x"}}) is None
    assert key_of(service()) == KEY
