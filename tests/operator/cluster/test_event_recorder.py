"""Events: written once, then counted, with at most one call per minute."""

from __future__ import annotations

from typing import Any

import pytest

from goodput_core.units import NS_PER_S
from goodput_operator.reconcile.actions import Emit
from goodput_operator.reconcile.event_recorder import EventRecorder

SERVICE = {
    "apiVersion": "goodput.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "chat", "namespace": "ns", "uid": "u", "resourceVersion": "7"},
}
SCALED = Emit(warning=False, reason="Scaled", message="from 1 to 2 replicas")


@pytest.fixture
def events(bench: Any) -> EventRecorder:
    return EventRecorder(bench.client, clock=bench.clock, instance="op-1")


async def test_an_event_names_the_service_and_the_operator(
    bench: Any, events: EventRecorder
) -> None:
    await events.emit(SERVICE, SCALED)
    (event,) = bench.server.objects.values()
    assert event["involvedObject"]["uid"] == "u"
    assert event["involvedObject"]["kind"] == "LLMService"
    assert event["metadata"]["namespace"] == "ns"
    assert (event["type"], event["reason"]) == ("Normal", "Scaled")
    assert event["source"] == {"component": "goodput-operator"}
    assert event["reportingInstance"] == "op-1"
    assert event["firstTimestamp"].endswith("Z")


async def test_the_same_message_within_ten_minutes_is_counted(
    bench: Any, events: EventRecorder
) -> None:
    for _ in range(30):
        await events.emit(SERVICE, SCALED)
        bench.clock.ns += 10 * NS_PER_S
    posts = [call for call in bench.server.calls if call[0] == "POST"]
    patches = [body for body in bench.server.bodies if "involvedObject" not in body]
    assert len(posts) == 1
    assert [patch["count"] for patch in patches] == [7, 13, 19, 25], "one call per minute"


async def test_after_ten_minutes_a_new_event_is_written(bench: Any, events: EventRecorder) -> None:
    await events.emit(SERVICE, SCALED)
    bench.clock.ns += 600 * NS_PER_S
    await events.emit(SERVICE, SCALED)
    assert [call[0] for call in bench.server.calls] == ["POST", "POST"]
    assert len(bench.server.objects) == 2, "each has its own name"


@pytest.mark.parametrize(
    "other",
    [
        Emit(warning=True, reason="Scaled", message="from 1 to 2 replicas"),
        Emit(warning=False, reason="Shrunk", message="from 1 to 2 replicas"),
        Emit(warning=False, reason="Scaled", message="from 2 to 3 replicas"),
    ],
    ids=["type", "reason", "message"],
)
async def test_a_different_message_is_a_new_event(
    bench: Any, events: EventRecorder, other: Emit
) -> None:
    await events.emit(SERVICE, SCALED)
    await events.emit(SERVICE, other)
    assert len(bench.server.objects) == 2


async def test_a_rejected_event_is_written_again(bench: Any, events: EventRecorder) -> None:
    path = "/api/v1/namespaces/ns/events"
    bench.server.rejections["POST", path] = (503, {"message": "busy"})
    assert await events.emit(SERVICE, SCALED) is not None
    del bench.server.rejections["POST", path]
    assert await events.emit(SERVICE, SCALED) is None
    assert len(bench.server.objects) == 1


async def test_a_message_is_cut_to_the_api_servers_limit(bench: Any, events: EventRecorder) -> None:
    await events.emit(SERVICE, Emit(warning=True, reason="Long", message="x" * 5000))
    (event,) = bench.server.objects.values()
    assert len(event["message"]) == 1024
