"""Events: said once, counted after, and never a call a second."""

from __future__ import annotations

from typing import Any

import pytest

from goodput_core.units import NS_PER_S
from goodput_operator.reconcile.actions import Emit
from goodput_operator.reconcile.apply import EventRecorder

SERVICE = {
    "apiVersion": "goodput.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "chat", "namespace": "ns", "uid": "u", "resourceVersion": "7"},
}
SCALED = Emit(warning=False, reason="Scaled", message="from 1 to 2 replicas")


@pytest.fixture
def events(memory: Any) -> EventRecorder:
    return EventRecorder(memory.client, clock=memory.clock, instance="op-1")


async def test_an_event_names_the_service_and_the_operator(
    memory: Any, events: EventRecorder
) -> None:
    await events.emit(SERVICE, SCALED)
    (event,) = memory.server.objects.values()
    assert event["involvedObject"]["uid"] == "u"
    assert event["involvedObject"]["kind"] == "LLMService"
    assert event["metadata"]["namespace"] == "ns"
    assert (event["type"], event["reason"]) == ("Normal", "Scaled")
    assert event["source"] == {"component": "goodput-operator"}
    assert event["reportingInstance"] == "op-1"
    assert event["firstTimestamp"].endswith("Z")


async def test_the_same_message_within_ten_minutes_is_counted(
    memory: Any, events: EventRecorder
) -> None:
    for _ in range(30):
        await events.emit(SERVICE, SCALED)
        memory.clock.ns += 10 * NS_PER_S
    posts = [call for call in memory.server.calls if call[0] == "POST"]
    patches = [body for body in memory.server.bodies if "involvedObject" not in body]
    assert len(posts) == 1
    assert [patch["count"] for patch in patches] == [7, 13, 19, 25], "a call a minute"


async def test_after_ten_minutes_a_new_event_is_written(memory: Any, events: EventRecorder) -> None:
    await events.emit(SERVICE, SCALED)
    memory.clock.ns += 600 * NS_PER_S
    await events.emit(SERVICE, SCALED)
    assert [call[0] for call in memory.server.calls] == ["POST", "POST"]
    assert len(memory.server.objects) == 2, "each has a name of its own"


@pytest.mark.parametrize(
    "other",
    [
        Emit(warning=True, reason="Scaled", message="from 1 to 2 replicas"),
        Emit(warning=False, reason="Shrunk", message="from 1 to 2 replicas"),
        Emit(warning=False, reason="Scaled", message="from 2 to 3 replicas"),
    ],
    ids=["type", "reason", "message"],
)
async def test_another_message_is_another_event(
    memory: Any, events: EventRecorder, other: Emit
) -> None:
    await events.emit(SERVICE, SCALED)
    await events.emit(SERVICE, other)
    assert len(memory.server.objects) == 2


async def test_a_refused_event_is_written_again_next_time(
    memory: Any, events: EventRecorder
) -> None:
    path = "/api/v1/namespaces/ns/events"
    memory.server.refuse["POST", path] = (503, {"message": "busy"})
    assert await events.emit(SERVICE, SCALED) is not None
    del memory.server.refuse["POST", path]
    assert await events.emit(SERVICE, SCALED) is None
    assert len(memory.server.objects) == 1


async def test_a_message_is_cut_to_the_api_servers_limit(
    memory: Any, events: EventRecorder
) -> None:
    await events.emit(SERVICE, Emit(warning=True, reason="Long", message="x" * 5000))
    (event,) = memory.server.objects.values()
    assert len(event["message"]) == 1024
