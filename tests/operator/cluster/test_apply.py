"""Actions become calls: our objects are applied, and objects of others are never changed."""

from __future__ import annotations

import asyncio
import copy
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_operator.kube.errors import LeaseLostError
from goodput_operator.kube.managed_fields import Conflict
from goodput_operator.reconcile.actions import (
    Action,
    Apply,
    Create,
    CreateToken,
    Delete,
    Emit,
    Push,
    WriteStatus,
)
from goodput_operator.reconcile.apply import Applier, ApplyResult
from goodput_operator.reconcile.event_recorder import EventRecorder
from goodput_operator.reconcile.observe import ServiceRecord
from goodput_operator.reconcile.snapshot import Snapshot
from goodput_operator.render.secrets import control_token

if TYPE_CHECKING:
    from collections.abc import Sequence

UID = "uid-of-chat"
KEY = b"k" * 32
SERVICE = {
    "apiVersion": "goodput.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "chat", "namespace": "ns", "uid": UID, "resourceVersion": "7"},
}
OURS = [{"kind": "LLMService", "name": "chat", "uid": UID, "controller": True}]
FOREIGN = {
    "no owner": [],
    "earlier service": [
        {"kind": "LLMService", "name": "chat", "uid": "before", "controller": True}
    ],
    "owner is not controller": [{"kind": "LLMService", "name": "chat", "uid": UID}],
}
CONFIG_MAPS = "/api/v1/namespaces/ns/configmaps"


class RecordedPushes:
    """Records pushes; `test_limits_pusher.py` tests real ones."""

    def __init__(self) -> None:
        self.pushed: list[str] = []
        self.failing: dict[str, str] = {}

    async def push(self, service_uid: str, pushes: Sequence[Push]) -> dict[str, str]:
        assert service_uid == UID
        self.pushed += [push.pod for push in pushes]
        return {p.pod: self.failing[p.pod] for p in pushes if p.pod in self.failing}


def config_map(name: str, owners: Any = None, **data: str) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "ns",
        "ownerReferences": OURS if owners is None else owners,
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def apply_of(name: str, **data: str) -> Apply:
    """Return an action of `decide`."""
    return Apply(body=config_map(name, **data))


def create_of(name: str) -> Create:
    """Return an action of `decide` that creates an object once."""
    body = config_map(name)
    body["metadata"]["labels"] = {"a": "1"}
    return Create(body=body)


async def carry_out(
    bench: Any,
    *actions: Action,
    record: ServiceRecord | None = None,
    engines: RecordedPushes | None = None,
) -> ApplyResult:
    snapshot = snapshot_of(bench)
    return await applier_of(bench, engines).carry_out(
        snapshot, actions, record or ServiceRecord(uid=UID)
    )


def snapshot_of(bench: Any) -> Snapshot:
    objects = [o for path, o in bench.server.objects.items() if path.startswith(CONFIG_MAPS)]
    watched = tuple(o for o in objects if o["metadata"]["ownerReferences"] == OURS)
    return Snapshot(now_ns=bench.clock.ns, unix_s=0, service=SERVICE, objects=watched)


def applier_of(bench: Any, engines: RecordedPushes | None = None) -> Applier:
    return Applier(
        client=bench.client,
        pusher=engines or RecordedPushes(),  # type: ignore[arg-type]
        recorder=EventRecorder(bench.client, clock=bench.clock, instance="op"),
        key=KEY,
    )


def events_of(bench: Any) -> list[tuple[str, str]]:
    return [
        (o["reason"], o["message"])
        for path, o in bench.server.objects.items()
        if "/events/" in path
    ]


async def test_a_missing_child_is_read_and_then_created(bench: Any) -> None:
    outcome = await carry_out(bench, apply_of("chat", a="1"))
    assert outcome.failures == {}
    assert bench.server.calls == [
        ("GET", f"{CONFIG_MAPS}/chat", False),
        ("PATCH", f"{CONFIG_MAPS}/chat", False),
    ]
    assert bench.server.objects[f"{CONFIG_MAPS}/chat"]["data"] == {"a": "1"}


@pytest.mark.parametrize("owners", FOREIGN.values(), ids=FOREIGN.keys())
async def test_a_foreign_object_of_the_same_name_is_reported_and_never_changed(
    bench: Any, owners: Any
) -> None:
    bench.server.put(f"{CONFIG_MAPS}/chat", config_map("chat", owners, other="x"))
    before = dict(bench.server.objects[f"{CONFIG_MAPS}/chat"])
    record = ServiceRecord(uid=UID)
    outcome = await carry_out(bench, apply_of("chat", a="1"), record=record)
    assert bench.server.writes == []
    assert bench.server.objects[f"{CONFIG_MAPS}/chat"] == before
    assert outcome.failures == {
        ("ConfigMap", "chat"): "ConfigMap chat exists and is not controlled by LLMService chat"
    }
    assert list(record.foreign) == [("ConfigMap", "chat")], "the next snapshot contains it"
    assert not outcome.transient, "an early retry would not help"


@pytest.mark.parametrize("owners", FOREIGN.values(), ids=FOREIGN.keys())
async def test_a_foreign_object_under_the_name_of_a_new_one_is_reported_and_never_changed(
    bench: Any, owners: Any
) -> None:
    theirs = config_map("chat", owners, other="x")
    bench.server.put(f"{CONFIG_MAPS}/chat", theirs)
    before = dict(bench.server.objects[f"{CONFIG_MAPS}/chat"])
    record = ServiceRecord(uid=UID)
    outcome = await carry_out(bench, create_of("chat"), record=record)
    assert bench.server.objects[f"{CONFIG_MAPS}/chat"] == before
    assert outcome.failures == {
        ("ConfigMap", "chat"): "ConfigMap chat exists and is not controlled by LLMService chat"
    }
    assert list(record.foreign) == [("ConfigMap", "chat")]


async def test_an_object_that_was_created_before_is_no_failure_unless_its_labels_changed(
    bench: Any,
) -> None:
    assert (await carry_out(bench, create_of("chat"))).failures == {}
    assert (await carry_out(bench, create_of("chat"))).failures == {}
    del bench.server.objects[f"{CONFIG_MAPS}/chat"]["metadata"]["labels"]["a"]
    record = ServiceRecord(uid=UID)
    outcome = await carry_out(bench, create_of("chat"), record=record)
    assert outcome.failures == {
        ("ConfigMap", "chat"): "ConfigMap chat exists, but its labels were changed; delete it"
    }
    assert not record.foreign


async def test_fields_of_another_manager_are_reset_and_reported_with_it(bench: Any) -> None:
    bench.server.put(f"{CONFIG_MAPS}/chat", config_map("chat", a="edited"), "kubectl-edit")
    outcome = await carry_out(bench, apply_of("chat", a="1"))
    assert outcome.failures == {}
    assert bench.server.objects[f"{CONFIG_MAPS}/chat"]["data"] == {"a": "1"}
    assert events_of(bench) == [
        (
            "Overwritten",
            'ConfigMap chat was reset to its LLMService: "kubectl-edit" had set .data.a',
        )
    ]


async def test_an_apply_without_conflict_is_not_forced_and_emits_nothing(bench: Any) -> None:
    bench.server.put(f"{CONFIG_MAPS}/chat", config_map("chat", b="other"), "kubectl-edit")
    await carry_out(bench, apply_of("chat", a="1"))
    assert bench.server.writes == [("PATCH", f"{CONFIG_MAPS}/chat", False)]
    assert bench.server.objects[f"{CONFIG_MAPS}/chat"]["data"] == {"a": "1", "b": "other"}
    assert events_of(bench) == []


async def test_incompatible_fields_are_removed_and_reported(bench: Any) -> None:
    bench.server.exclusive = {"a", "b"}
    path = f"{CONFIG_MAPS}/chat"
    bench.server.put(path, config_map("chat", b="other", c="other"), "kubectl-edit")
    outcome = await carry_out(bench, apply_of("chat", a="1"))
    assert outcome.failures == {}
    assert bench.server.objects[path]["data"] == {"a": "1"}
    [(reason, message)] = events_of(bench)
    assert reason == "Overwritten"
    assert message.endswith('"kubectl-edit" had set .data.b, .data.c')


async def test_overwritten_fields_are_reported_even_without_a_conflict(
    bench: Any,
) -> None:
    bench.server.put(f"{CONFIG_MAPS}/chat", config_map("chat", a="0"), "goodput-operator")
    scaled = Conflict(manager="kubectl", field=".data.a")
    apply = Apply(body=config_map("chat", a="1"), overwrites=(scaled,))
    assert (await carry_out(bench, apply)).failures == {}
    assert bench.server.writes[0] == ("PATCH", f"{CONFIG_MAPS}/chat", False)
    assert events_of(bench) == [
        (
            "Overwritten",
            'ConfigMap chat was reset to its LLMService: "kubectl" had set .data.a',
        )
    ]


async def test_added_fields_are_removed_and_reported_once(bench: Any) -> None:
    path = f"{CONFIG_MAPS}/chat"
    bench.server.put(path, config_map("chat", a="1", b="other"), "kubectl-set")
    added = Conflict(manager="kubectl-set", field=".data.b")
    body = config_map("chat", a="1")
    apply = Apply(body=body, overwrites=(added,), take_over=(("f:data",),))
    assert (await carry_out(bench, apply)).failures == {}
    assert bench.server.objects[path]["data"] == {"a": "1"}
    [(reason, message)] = events_of(bench)
    assert reason == "Overwritten"
    assert message.endswith('"kubectl-set" had set .data.b')


async def test_fields_of_a_foreign_object_are_never_taken_over(bench: Any) -> None:
    path = f"{CONFIG_MAPS}/chat"
    bench.server.put(path, config_map("chat", [], b="other"), "kubectl-set")
    before = copy.deepcopy(bench.server.objects[path])
    apply = Apply(body=config_map("chat", a="1"), take_over=(("f:data",),))
    assert ("ConfigMap", "chat") in (await carry_out(bench, apply)).failures
    assert bench.server.writes == []
    assert bench.server.objects[path] == before


async def test_an_invalid_apply_without_other_managers_is_a_failure(bench: Any) -> None:
    bench.server.exclusive = {"a", "b"}
    bench.server.put(f"{CONFIG_MAPS}/chat", config_map("chat", a="0"), "goodput-operator")
    outcome = await carry_out(bench, apply_of("chat", a="1", b="1"))
    assert outcome.failures == {("ConfigMap", "chat"): "rejected: Invalid"}
    assert bench.server.objects[f"{CONFIG_MAPS}/chat"]["data"] == {"a": "0"}


async def test_an_owned_object_without_its_label_is_reset(
    bench: Any,
) -> None:
    bench.server.put(f"{CONFIG_MAPS}/chat", config_map("chat", a="edited"), "kubectl-label")
    snapshot = Snapshot(now_ns=bench.clock.ns, unix_s=0, service=SERVICE)
    outcome = await applier_of(bench).carry_out(
        snapshot, [apply_of("chat", a="1")], ServiceRecord(uid=UID)
    )
    assert outcome.failures == {}
    assert bench.server.objects[f"{CONFIG_MAPS}/chat"]["data"] == {"a": "1"}
    assert [reason for reason, _ in events_of(bench)] == ["Overwritten"]


async def test_a_later_object_of_the_same_name_stays_until_the_cache_has_it(bench: Any) -> None:
    bench.server.put(f"{CONFIG_MAPS}/chat", config_map("chat", a="0"))
    snapshot = copy.deepcopy(snapshot_of(bench))
    bench.server.objects[f"{CONFIG_MAPS}/chat"]["metadata"]["uid"] = "another"
    actions = [apply_of("chat", a="1")]
    outcome = await applier_of(bench).carry_out(snapshot, actions, ServiceRecord(uid=UID))
    assert bench.server.objects[f"{CONFIG_MAPS}/chat"]["data"] == {"a": "0"}
    assert outcome.failures == {}, "a stale cache is not reported"
    assert outcome.transient


async def test_a_quota_is_reported_with_the_servers_message_and_other_actions_continue(
    bench: Any,
) -> None:
    message = 'configmaps "chat" is forbidden: exceeded quota: q, requested: count=1'
    rejection = {"kind": "Status", "reason": "Forbidden", "message": message}
    bench.server.rejections["PATCH", f"{CONFIG_MAPS}/chat"] = (403, rejection)
    outcome = await carry_out(bench, apply_of("chat", a="1"), apply_of("other", a="1"))
    assert outcome.failures == {("ConfigMap", "chat"): message}
    assert not outcome.transient
    assert f"{CONFIG_MAPS}/other" in bench.server.objects


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_temporary_failure_is_retried(bench: Any, status: int) -> None:
    bench.server.rejections["PATCH", f"{CONFIG_MAPS}/chat"] = (status, {"message": "busy"})
    outcome = await carry_out(bench, apply_of("chat", a="1"))
    assert outcome.transient
    assert outcome.failures == {}, "nothing to report yet"
    assert outcome.delayed == {("ConfigMap", "chat"): "busy"}


async def test_a_hanging_server_costs_one_timeout_per_call(bench: Any) -> None:
    bench.server.hanging.add(f"{CONFIG_MAPS}/chat")
    outcome = await carry_out(bench, apply_of("chat", a="1"), apply_of("other", a="1"))
    assert outcome.transient
    assert list(outcome.delayed.values()) == ["the API server did not respond within 0.05 s"]
    assert f"{CONFIG_MAPS}/other" in bench.server.objects


async def test_nothing_is_written_once_the_fence_is_closed(bench: Any) -> None:
    bench.fence.close()
    with pytest.raises(LeaseLostError):
        await carry_out(bench, apply_of("chat", a="1"), WriteStatus(status={}))
    assert bench.server.writes == []


async def test_a_deletion_names_the_uid_and_ignores_a_missing_object(bench: Any) -> None:
    bench.server.put(f"{CONFIG_MAPS}/old", config_map("old"))
    uid = bench.server.objects[f"{CONFIG_MAPS}/old"]["metadata"]["uid"]
    successor = Delete(kind="ConfigMap", name="old", uid="of one before")
    gone = Delete(kind="ConfigMap", name="never", uid="x")
    outcome = await carry_out(bench, successor, gone)
    assert outcome.failures == {}
    assert f"{CONFIG_MAPS}/old" in bench.server.objects, "a successor stays"
    await carry_out(bench, Delete(kind="ConfigMap", name="old", uid=uid))
    assert f"{CONFIG_MAPS}/old" not in bench.server.objects


async def test_an_existing_job_counts_as_created_and_a_rejection_is_a_failure(bench: Any) -> None:
    metadata = {"name": "chat-gate", "ownerReferences": OURS}
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
    create = Create(body=body)
    assert (await carry_out(bench, create)).failures == {}
    assert "/apis/batch/v1/namespaces/ns/jobs/chat-gate" in bench.server.objects
    assert (await carry_out(bench, create)).failures == {}
    rejection = {"kind": "Status", "reason": "Forbidden", "message": "exceeded quota: jobs"}
    bench.server.rejections["POST", "/apis/batch/v1/namespaces/ns/jobs"] = (403, rejection)
    outcome = await carry_out(bench, create)
    assert outcome.failures == {("Job", "chat-gate"): "exceeded quota: jobs"}
    methods = [call[0] for call in bench.server.calls]
    assert methods == ["POST", "POST", "GET", "POST"], "only an existing Job is read"


async def test_a_token_is_derived_and_an_existing_secret_counts_as_success(bench: Any) -> None:
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "chat-1"}}
    create = CreateToken(revision="chat-1", body=body)
    assert (await carry_out(bench, create)).failures == {}
    secret = bench.server.objects["/api/v1/namespaces/ns/secrets/chat-1"]
    token = control_token(KEY, service_uid=UID, revision="chat-1")
    assert secret["stringData"] == {"token": token}
    assert (await carry_out(bench, create)).failures == {}
    assert {call[0] for call in bench.server.calls} == {"POST"}, "Secrets are only created"


async def test_the_complete_status_is_written_to_the_uid_of_the_service_and_remembered(
    bench: Any,
) -> None:
    path = "/apis/goodput.dev/v1alpha1/namespaces/ns/llmservices/chat"
    bench.server.put(path, SERVICE)
    record = ServiceRecord(uid=UID)
    status = {"replicas": 2}
    assert (await carry_out(bench, WriteStatus(status=status), record=record)).failures == {}
    assert bench.server.bodies[-1]["metadata"]["uid"] == UID
    assert record.written is not None
    assert record.written["status"] == status
    del bench.server.objects[path]
    outcome = await carry_out(bench, WriteStatus(status=status))
    assert outcome.failures == {}, "a deleted service has no conditions"


@pytest.mark.parametrize(
    ("fields", "undeclared"),
    [
        ((".status.learnt",), {"learnt"}),
        ((".status.learnt.burstTime",), {"learnt"}),
        ((".status.gate.attempt", ".status.gate.pairs"), {"gate"}),
        ((".status.gate", ".status.summary.gate"), {"gate", "summary.gate"}),
    ],
    ids=["learnt", "a part of learnt", "parts of a gate", "a gate and its column"],
)
async def test_under_an_earlier_definition_the_status_is_written_without_fields_that_it_lacks(
    bench: Any, fields: Sequence[str], undeclared: set[str]
) -> None:
    path = "/apis/goodput.dev/v1alpha1/namespaces/ns/llmservices/chat"
    bench.server.put(path, SERVICE)
    rejected = "\n".join(f"{field}: field not declared in schema" for field in fields)
    message = f"failed to create typed patch object: errors:\n{rejected}"
    bench.server.rejections["PATCH", f"{path}/status"] = (500, {"message": message})
    record = ServiceRecord(uid=UID)
    gate = {"summary": {"gate": "Replaying", "phase": "Gating"}, "gate": {"attempt": 1}}
    status = {"replicas": 2, "learnt": {"startupSeconds": [3]}, **gate}
    await carry_out(bench, WriteStatus(status=status), record=record)
    assert record.undeclared == undeclared
    first, second = (body["status"] for body in bench.server.bodies[-2:])
    assert first == status
    assert second.keys() == status.keys() - undeclared
    assert ("gate" in second["summary"]) == ("summary.gate" not in undeclared)


async def test_pushes_run_concurrently_and_their_failures_are_stored_by_pod(bench: Any) -> None:
    engines = RecordedPushes()
    engines.failing["pod-1"] = "limits not pushed: no answer"
    pushes = [
        Push(pod=f"pod-{n}", url="http://x", revision="chat-1", limits={"revision": 1})
        for n in range(3)
    ]
    outcome = await carry_out(bench, *pushes, engines=engines)
    assert engines.pushed == ["pod-0", "pod-1", "pod-2"]
    assert outcome.failures == {("Pod", "pod-1"): "limits not pushed: no answer"}
    assert not outcome.transient


async def test_a_rejected_event_is_a_failure(bench: Any) -> None:
    rejection = (403, {"reason": "Forbidden", "message": "no"})
    bench.server.rejections["POST", "/api/v1/namespaces/ns/events"] = rejection
    outcome = await carry_out(bench, Emit(warning=True, reason="Why", message="because"))
    assert outcome.failures == {("Event", "Why"): "no"}


CHILD = st.fixed_dictionaries(
    {
        "owner": st.sampled_from(["absent", "ours", *FOREIGN]),
        "edited": st.booleans(),
        "status": st.sampled_from([None, 403, 422, 429, 500]),
    }
)


@given(children=st.lists(CHILD, max_size=6))
@settings(
    max_examples=examples(80),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_only_our_objects_change_and_every_other_outcome_is_reported(
    make_bench: type[Any], children: list[dict[str, Any]]
) -> None:
    bench = make_bench()
    before: dict[str, Any] = {}
    for number, child in enumerate(children):
        path = f"{CONFIG_MAPS}/c{number}"
        if child["owner"] != "absent":
            owners = None if child["owner"] == "ours" else FOREIGN[child["owner"]]
            manager = "kubectl-edit" if child["edited"] else "goodput-operator"
            bench.server.put(path, config_map(f"c{number}", owners, a="0"), manager)
            before[path] = bench.server.objects[path]
        if child["status"] is not None:
            rejection = {"reason": "R", "message": f"no {number}"}
            bench.server.rejections["PATCH", path] = (child["status"], rejection)
    actions = [apply_of(f"c{number}", a="1") for number in range(len(children))]
    outcome = asyncio.run(carry_out(bench, *actions))

    for number, child in enumerate(children):
        path = f"{CONFIG_MAPS}/c{number}"
        patches = [
            forced for method, at, forced in bench.server.calls if (method, at) == ("PATCH", path)
        ]
        messages = outcome.delayed if child["status"] in {429, 500} else outcome.failures
        failed = ("ConfigMap", f"c{number}") in outcome.failures
        if child["owner"] in FOREIGN:
            assert patches == []
            assert bench.server.objects[path] == before[path]
            assert failed
        elif child["status"] is not None:
            # After an invalid apply the owners of fields are read once.
            others = child["status"] == 422 and child["owner"] == "ours" and child["edited"]
            assert patches == [False] * (2 if others else 1)
            assert messages["ConfigMap", f"c{number}"] == f"no {number}"
        else:
            assert bench.server.objects[path]["data"]["a"] == "1"
            assert not failed
            reset = child["owner"] == "ours" and child["edited"]
            assert patches == ([False, True] if reset else [False]), "forced only to reset a field"
    assert outcome.transient == any(
        child["status"] in {429, 500} and child["owner"] not in FOREIGN for child in children
    )
