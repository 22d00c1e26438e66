"""Events: said once, counted after, and never a call a second."""

from __future__ import annotations

from typing import Any

import pytest

from goodput_core.units import NS_PER_S
from goodput_operator.reconcile.actions import Emit
from goodput_operator.reconcile.event_recorder import Events

SERVICE = {
    "apiVersion": "goodput.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "chat", "namespace": "ns", "uid": "u", "resourceVersion": "7"},
}
SCALED = Emit(warning=False, reason="Scaled", message="from 1 to 2 replicas")


@pytest.fixture
def events(memory: Any) -> Events:
    return Events(memory.client, clock=memory.clock, instance="op-1")


async def test_an_event_names_the_service_and_who_says_it(memory: Any, events: Events) -> None:
    await events.emit(SERVICE, SCALED)
    (event,) = memory.server.objects.values()
    assert event["involvedObject"]["uid"] == "u"
    assert event["involvedObject"]["kind"] == "LLMService"
    assert event["metadata"]["namespace"] == "ns"
    assert (event["type"], event["reason"]) == ("Normal", "Scaled")
    assert event["source"] == {"component": "goodput-operator"}
    assert event["reportingInstance"] == "op-1"
    assert event["firstTimestamp"].endswith("Z")


async def test_the_same_words_within_ten_minutes_are_counted(memory: Any, events: Events) -> None:
    for _ in range(30):
        await events.emit(SERVICE, SCALED)
        memory.clock.ns += 10 * NS_PER_S
    posts = [call for call in memory.server.calls if call[0] == "POST"]
    patches = [body for body in memory.server.bodies if "involvedObject" not in body]
    assert len(posts) == 1
    assert [patch["count"] for patch in patches] == [7, 13, 19, 25], "a call a minute"


async def test_after_ten_minutes_it_is_said_again(memory: Any, events: Events) -> None:
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
async def test_other_words_are_another_event(memory: Any, events: Events, other: Emit) -> None:
    await events.emit(SERVICE, SCALED)
    await events.emit(SERVICE, other)
    assert len(memory.server.objects) == 2


async def test_an_event_that_was_refused_is_said_again_next_time(
    memory: Any, events: Events
) -> None:
    path = "/api/v1/namespaces/ns/events"
    memory.server.refuse["POST", path] = (503, {"message": "busy"})
    assert await events.emit(SERVICE, SCALED) is not None
    del memory.server.refuse["POST", path]
    assert await events.emit(SERVICE, SCALED) is None
    assert len(memory.server.objects) == 1


async def test_a_sentence_is_cut_to_what_the_api_server_takes(memory: Any, events: Events) -> None:
    await events.emit(SERVICE, Emit(warning=True, reason="Long", message="x" * 5000))
    (event,) = memory.server.objects.values()
    assert len(event["message"]) == 1024
