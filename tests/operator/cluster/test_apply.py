"""Actions become calls: ours is kept as it should be, what is not ours is never touched."""

from __future__ import annotations

import asyncio
import copy
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from goodput_operator.kube.errors import LeaseLostError
from goodput_operator.kube.managed_fields import Conflict
from goodput_operator.reconcile.actions import (
    Action,
    Apply,
    CreateToken,
    Delete,
    Emit,
    Push,
    WriteStatus,
)
from goodput_operator.reconcile.apply import Applier, ApplyResult, EventRecorder
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
    "nobody's": [],
    "of a namesake": [{"kind": "LLMService", "name": "chat", "uid": "before", "controller": True}],
    "owned, not controlled": [{"kind": "LLMService", "name": "chat", "uid": UID}],
}
CONFIG_MAPS = "/api/v1/namespaces/ns/configmaps"


class Engines:
    """Stands for the pushes; their own tests are elsewhere."""

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


def wanted(name: str, **data: str) -> Apply:
    """An action of `decide`."""
    return Apply(body=config_map(name, **data))


async def carry_out(
    memory: Any,
    *actions: Action,
    record: ServiceRecord | None = None,
    engines: Engines | None = None,
) -> ApplyResult:
    snapshot = snapshot_of(memory)
    return await applier_of(memory, engines).carry_out(
        snapshot, actions, record or ServiceRecord(uid=UID)
    )


def snapshot_of(memory: Any) -> Snapshot:
    objects = [o for path, o in memory.server.objects.items() if path.startswith(CONFIG_MAPS)]
    watched = tuple(o for o in objects if o["metadata"]["ownerReferences"] == OURS)
    return Snapshot(now_ns=memory.clock.ns, unix_s=0, service=SERVICE, objects=watched)


def applier_of(memory: Any, engines: Engines | None = None) -> Applier:
    return Applier(
        client=memory.client,
        pusher=engines or Engines(),  # type: ignore[arg-type]
        recorder=EventRecorder(memory.client, clock=memory.clock, instance="op"),
        key=KEY,
    )


def events_of(memory: Any) -> list[tuple[str, str]]:
    return [
        (o["reason"], o["message"])
        for path, o in memory.server.objects.items()
        if "/events/" in path
    ]


async def test_a_missing_child_is_looked_for_and_then_made(memory: Any) -> None:
    outcome = await carry_out(memory, wanted("chat", a="1"))
    assert outcome.failures == {}
    assert memory.server.calls == [
        ("GET", f"{CONFIG_MAPS}/chat", False),
        ("PATCH", f"{CONFIG_MAPS}/chat", False),
    ]
    assert memory.server.objects[f"{CONFIG_MAPS}/chat"]["data"] == {"a": "1"}


@pytest.mark.parametrize("owners", FOREIGN.values(), ids=FOREIGN.keys())
async def test_a_foreign_object_in_the_way_is_named_and_never_touched(
    memory: Any, owners: Any
) -> None:
    memory.server.put(f"{CONFIG_MAPS}/chat", config_map("chat", owners, theirs="x"))
    before = dict(memory.server.objects[f"{CONFIG_MAPS}/chat"])
    record = ServiceRecord(uid=UID)
    outcome = await carry_out(memory, wanted("chat", a="1"), record=record)
    assert memory.server.writes == []
    assert memory.server.objects[f"{CONFIG_MAPS}/chat"] == before
    assert outcome.failures == {
        ("ConfigMap", "chat"): "ConfigMap chat exists and is not controlled by LLMService chat"
    }
    assert list(record.foreign) == [("ConfigMap", "chat")], "the next snapshot shows it"
    assert not outcome.transient, "an early retry would not help"


async def test_fields_of_another_manager_are_reset_and_both_are_named(memory: Any) -> None:
    memory.server.put(f"{CONFIG_MAPS}/chat", config_map("chat", a="edited"), "kubectl-edit")
    outcome = await carry_out(memory, wanted("chat", a="1"))
    assert outcome.failures == {}
    assert memory.server.objects[f"{CONFIG_MAPS}/chat"]["data"] == {"a": "1"}
    assert events_of(memory) == [
        (
            "Overwritten",
            'ConfigMap chat was reset to its LLMService: "kubectl-edit" had set .data.a',
        )
    ]


async def test_an_apply_without_conflict_is_not_forced_and_says_nothing(memory: Any) -> None:
    memory.server.put(f"{CONFIG_MAPS}/chat", config_map("chat", b="theirs"), "kubectl-edit")
    await carry_out(memory, wanted("chat", a="1"))
    assert memory.server.writes == [("PATCH", f"{CONFIG_MAPS}/chat", False)]
    assert memory.server.objects[f"{CONFIG_MAPS}/chat"]["data"] == {"a": "1", "b": "theirs"}
    assert events_of(memory) == []


async def test_incompatible_fields_are_removed_and_named(memory: Any) -> None:
    memory.server.rivals = {"a", "b"}
    path = f"{CONFIG_MAPS}/chat"
    memory.server.put(path, config_map("chat", b="theirs", c="theirs"), "kubectl-edit")
    outcome = await carry_out(memory, wanted("chat", a="1"))
    assert outcome.failures == {}
    assert memory.server.objects[path]["data"] == {"a": "1"}
    [(reason, message)] = events_of(memory)
    assert reason == "Overwritten"
    assert message.endswith('"kubectl-edit" had set .data.b, .data.c')


async def test_overwritten_fields_are_named_even_if_the_server_reports_no_conflict(
    memory: Any,
) -> None:
    memory.server.put(f"{CONFIG_MAPS}/chat", config_map("chat", a="0"), "goodput-operator")
    scaled = Conflict(manager="kubectl", field=".data.a")
    apply = Apply(body=config_map("chat", a="1"), overwrites=(scaled,))
    assert (await carry_out(memory, apply)).failures == {}
    assert memory.server.writes[0] == ("PATCH", f"{CONFIG_MAPS}/chat", False)
    assert events_of(memory) == [
        (
            "Overwritten",
            'ConfigMap chat was reset to its LLMService: "kubectl" had set .data.a',
        )
    ]


async def test_added_fields_are_removed_and_named_once(memory: Any) -> None:
    path = f"{CONFIG_MAPS}/chat"
    memory.server.put(path, config_map("chat", a="1", b="theirs"), "kubectl-set")
    added = Conflict(manager="kubectl-set", field=".data.b")
    body = config_map("chat", a="1")
    apply = Apply(body=body, overwrites=(added,), take_over=(("f:data",),))
    assert (await carry_out(memory, apply)).failures == {}
    assert memory.server.objects[path]["data"] == {"a": "1"}
    [(reason, message)] = events_of(memory)
    assert reason == "Overwritten"
    assert message.endswith('"kubectl-set" had set .data.b')


async def test_fields_of_a_foreign_object_are_never_taken_over(memory: Any) -> None:
    path = f"{CONFIG_MAPS}/chat"
    memory.server.put(path, config_map("chat", [], b="theirs"), "kubectl-set")
    before = copy.deepcopy(memory.server.objects[path])
    apply = Apply(body=config_map("chat", a="1"), take_over=(("f:data",),))
    assert ("ConfigMap", "chat") in (await carry_out(memory, apply)).failures
    assert memory.server.writes == []
    assert memory.server.objects[path] == before


async def test_an_invalid_apply_without_other_managers_is_a_failure(memory: Any) -> None:
    memory.server.rivals = {"a", "b"}
    memory.server.put(f"{CONFIG_MAPS}/chat", config_map("chat", a="0"), "goodput-operator")
    outcome = await carry_out(memory, wanted("chat", a="1", b="1"))
    assert outcome.failures == {("ConfigMap", "chat"): "the server says Invalid"}
    assert memory.server.objects[f"{CONFIG_MAPS}/chat"]["data"] == {"a": "0"}


async def test_an_owned_object_without_its_label_is_reset_like_any_other(
    memory: Any,
) -> None:
    memory.server.put(f"{CONFIG_MAPS}/chat", config_map("chat", a="edited"), "kubectl-label")
    snapshot = Snapshot(now_ns=memory.clock.ns, unix_s=0, service=SERVICE)
    outcome = await applier_of(memory).carry_out(
        snapshot, [wanted("chat", a="1")], ServiceRecord(uid=UID)
    )
    assert outcome.failures == {}
    assert memory.server.objects[f"{CONFIG_MAPS}/chat"]["data"] == {"a": "1"}
    assert [reason for reason, _ in events_of(memory)] == ["Overwritten"]


async def test_a_successor_of_the_same_name_is_left_alone_until_it_is_seen(memory: Any) -> None:
    memory.server.put(f"{CONFIG_MAPS}/chat", config_map("chat", a="0"))
    snapshot = copy.deepcopy(snapshot_of(memory))
    memory.server.objects[f"{CONFIG_MAPS}/chat"]["metadata"]["uid"] = "another"
    actions = [wanted("chat", a="1")]
    outcome = await applier_of(memory).carry_out(snapshot, actions, ServiceRecord(uid=UID))
    assert memory.server.objects[f"{CONFIG_MAPS}/chat"]["data"] == {"a": "0"}
    assert outcome.failures == {}, "a stale cache is not reported"
    assert outcome.transient


async def test_a_quota_is_reported_in_the_servers_words_and_the_rest_is_done(memory: Any) -> None:
    words = 'configmaps "chat" is forbidden: exceeded quota: q, requested: count=1'
    refusal = {"kind": "Status", "reason": "Forbidden", "message": words}
    memory.server.refuse["PATCH", f"{CONFIG_MAPS}/chat"] = (403, refusal)
    outcome = await carry_out(memory, wanted("chat", a="1"), wanted("other", a="1"))
    assert outcome.failures == {("ConfigMap", "chat"): words}
    assert not outcome.transient
    assert f"{CONFIG_MAPS}/other" in memory.server.objects


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_temporary_failure_is_retried(memory: Any, status: int) -> None:
    memory.server.refuse["PATCH", f"{CONFIG_MAPS}/chat"] = (status, {"message": "busy"})
    outcome = await carry_out(memory, wanted("chat", a="1"))
    assert outcome.transient
    assert outcome.failures == {}, "no person has to act"
    assert outcome.delayed == {("ConfigMap", "chat"): "busy"}


async def test_a_server_that_hangs_costs_one_time_out_a_call(memory: Any) -> None:
    memory.server.hang.add(f"{CONFIG_MAPS}/chat")
    outcome = await carry_out(memory, wanted("chat", a="1"), wanted("other", a="1"))
    assert outcome.transient
    assert list(outcome.delayed.values()) == ["the API server did not respond within 0.05 s"]
    assert f"{CONFIG_MAPS}/other" in memory.server.objects


async def test_nothing_is_written_once_the_fence_is_closed(memory: Any) -> None:
    memory.fence.close()
    with pytest.raises(LeaseLostError):
        await carry_out(memory, wanted("chat", a="1"), WriteStatus(status={}))
    assert memory.server.writes == []


async def test_a_deletion_names_the_very_object_and_is_done_when_it_is_gone(memory: Any) -> None:
    memory.server.put(f"{CONFIG_MAPS}/old", config_map("old"))
    uid = memory.server.objects[f"{CONFIG_MAPS}/old"]["metadata"]["uid"]
    successor = Delete(kind="ConfigMap", name="old", uid="of one before")
    gone = Delete(kind="ConfigMap", name="never", uid="x")
    outcome = await carry_out(memory, successor, gone)
    assert outcome.failures == {}
    assert f"{CONFIG_MAPS}/old" in memory.server.objects, "a successor stays"
    await carry_out(memory, Delete(kind="ConfigMap", name="old", uid=uid))
    assert f"{CONFIG_MAPS}/old" not in memory.server.objects


async def test_a_token_is_derived_written_once_and_its_presence_is_success(memory: Any) -> None:
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "chat-1"}}
    create = CreateToken(revision="chat-1", body=body)
    assert (await carry_out(memory, create)).failures == {}
    secret = memory.server.objects["/api/v1/namespaces/ns/secrets/chat-1"]
    token = control_token(KEY, service_uid=UID, revision="chat-1")
    assert secret["stringData"] == {"token": token}
    assert (await carry_out(memory, create)).failures == {}
    assert {call[0] for call in memory.server.calls} == {"POST"}, "Secrets are only created"


async def test_a_status_is_written_whole_to_this_very_service_and_remembered(memory: Any) -> None:
    path = "/apis/goodput.dev/v1alpha1/namespaces/ns/llmservices/chat"
    memory.server.put(path, SERVICE)
    record = ServiceRecord(uid=UID)
    status = {"replicas": 2}
    assert (await carry_out(memory, WriteStatus(status=status), record=record)).failures == {}
    assert memory.server.bodies[-1]["metadata"]["uid"] == UID
    assert record.written is not None
    assert record.written["status"] == status
    del memory.server.objects[path]
    outcome = await carry_out(memory, WriteStatus(status=status))
    assert outcome.failures == {}, "a deleted service has no conditions"


async def test_pushes_go_together_and_their_failures_are_kept_by_pod(memory: Any) -> None:
    engines = Engines()
    engines.failing["pod-1"] = "limits not pushed: no answer"
    pushes = [
        Push(pod=f"pod-{n}", url="http://x", revision="chat-1", limits={"revision": 1})
        for n in range(3)
    ]
    outcome = await carry_out(memory, *pushes, engines=engines)
    assert engines.pushed == ["pod-0", "pod-1", "pod-2"]
    assert outcome.failures == {("Pod", "pod-1"): "limits not pushed: no answer"}
    assert not outcome.transient


async def test_an_event_that_cannot_be_written_is_a_failure_like_others(memory: Any) -> None:
    refusal = (403, {"reason": "Forbidden", "message": "no"})
    memory.server.refuse["POST", "/api/v1/namespaces/ns/events"] = refusal
    outcome = await carry_out(memory, Emit(warning=True, reason="Why", message="because"))
    assert outcome.failures == {("Event", "Why"): "no"}


CHILD = st.fixed_dictionaries(
    {
        "there": st.sampled_from(["absent", "ours", *FOREIGN]),
        "edited": st.booleans(),
        "refused": st.sampled_from([None, 403, 422, 429, 500]),
    }
)


@given(children=st.lists(CHILD, max_size=6))
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_stands_there_only_ours_changes_and_everything_else_is_accounted_for(
    make_memory: type[Any], children: list[dict[str, Any]]
) -> None:
    memory = make_memory()
    before: dict[str, Any] = {}
    for number, child in enumerate(children):
        path = f"{CONFIG_MAPS}/c{number}"
        if child["there"] != "absent":
            owners = None if child["there"] == "ours" else FOREIGN[child["there"]]
            manager = "kubectl-edit" if child["edited"] else "goodput-operator"
            memory.server.put(path, config_map(f"c{number}", owners, a="0"), manager)
            before[path] = memory.server.objects[path]
        if child["refused"] is not None:
            refusal = {"reason": "R", "message": f"no {number}"}
            memory.server.refuse["PATCH", path] = (child["refused"], refusal)
    actions = [wanted(f"c{number}", a="1") for number in range(len(children))]
    outcome = asyncio.run(carry_out(memory, *actions))

    for number, child in enumerate(children):
        path = f"{CONFIG_MAPS}/c{number}"
        patches = [
            forced for method, at, forced in memory.server.calls if (method, at) == ("PATCH", path)
        ]
        told = outcome.delayed if child["refused"] in {429, 500} else outcome.failures
        failed = ("ConfigMap", f"c{number}") in outcome.failures
        if child["there"] in FOREIGN:
            assert patches == []
            assert memory.server.objects[path] == before[path]
            assert failed
        elif child["refused"] is not None:
            # After an invalid apply the owners of fields are read once.
            others = child["refused"] == 422 and child["there"] == "ours" and child["edited"]
            assert patches == [False] * (2 if others else 1)
            assert told["ConfigMap", f"c{number}"] == f"no {number}"
        else:
            assert memory.server.objects[path]["data"]["a"] == "1"
            assert not failed
            took = child["there"] == "ours" and child["edited"]
            assert patches == ([False, True] if took else [False]), "forced only to take back"
    assert outcome.transient == any(
        child["refused"] in {429, 500} and child["there"] not in FOREIGN for child in children
    )
