"""Liveness detects expired watches, hanging reconciliations and waiting services."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from goodput_core.units import NS_PER_S
from goodput_operator.backoff import BackOff
from goodput_operator.kube.watch import WATCH_S
from goodput_operator.manager.health import Health
from goodput_operator.reconcile.work_queue import Result, Workers, WorkQueue

PODS = "/api/v1/pods"
STUCK = "a service is due, and no reconciliation has ended for 121 s"
SERVICES = "/apis/goodput.dev/v1alpha1/namespaces/ns/llmservices"


class Parts:
    """A health, and what it watches.

    Attributes:
        turn_s: how long the turn of each service takes; without it, it takes for ever.
        hangs: set when such a reconciliation has started.
        found: the problems that there were at the end of each turn.
    """

    def __init__(self, memory: Any) -> None:
        async def turn(key: str) -> Result:
            if key not in self.turn_s:
                self.hangs.set()
                await asyncio.Event().wait()
            self.pass_s(self.turn_s[key])
            self.both_watched()
            self.found += self.health.problems()
            return Result()

        self.turn_s: dict[str, int] = {}
        self.hangs = asyncio.Event()
        self.found: list[str] = []
        self.clock = memory.clock
        self.fence = memory.fence
        self.fence.extend(self.clock.ns + 10**6 * NS_PER_S)
        self.schedule: WorkQueue[str] = WorkQueue(BackOff())
        self.workers = Workers(queue=self.schedule, reconcile=turn, clock=self.clock, count=1)
        self.health = Health(
            clock=self.clock, paths=[PODS, SERVICES], fence=self.fence, workers=self.workers
        )

    def pass_s(self, seconds: int) -> None:
        self.clock.ns += seconds * NS_PER_S

    def both_watched(self) -> None:
        self.health.note_watch(PODS)
        self.health.note_watch(SERVICES)


@pytest.fixture
def parts(memory: Any) -> Parts:
    return Parts(memory)


def test_it_is_ready_once_everything_is_watched(parts: Parts) -> None:
    assert not parts.health.ready
    parts.health.note_watch(PODS)
    parts.health.note_watch("/api/v1/namespaces/ns/secrets")
    assert not parts.health.ready
    parts.health.note_watch(SERVICES)
    assert parts.health.ready


def test_an_expired_watch_is_a_problem_and_an_idle_cluster_is_not(
    parts: Parts,
) -> None:
    parts.health.note_watch(SERVICES)
    for _ in range(4):
        parts.health.note_watch(PODS)
        parts.pass_s(WATCH_S)
    assert parts.health.problems() == [f"no watch of {SERVICES} has started for 960 s"]
    parts.health.note_watch(SERVICES)
    assert parts.health.problems() == []


def test_a_watch_that_never_began_is_a_problem(parts: Parts) -> None:
    parts.health.note_watch(PODS)
    parts.pass_s(2 * WATCH_S + 1)
    parts.health.note_watch(PODS)
    assert parts.health.problems() == [f"no watch of {SERVICES} has started for 481 s"]


def test_a_service_that_waits_too_long_is_a_problem_of_the_leader_alone(parts: Parts) -> None:
    parts.schedule.add("chat", parts.clock.ns)
    parts.pass_s(121)
    assert parts.health.problems() == [
        "a service is due, and no reconciliation has ended for 121 s"
    ]
    parts.fence.close()
    assert parts.health.problems() == []


async def test_a_long_queue_is_a_problem_only_once_it_moves_no_more(parts: Parts) -> None:
    many = [f"slow-{number}" for number in range(100)]
    parts.turn_s = dict.fromkeys(many, 4)
    for key in (*many, "hanging", "last"):
        parts.workers.add(key)
    working = asyncio.create_task(parts.workers.run())
    await parts.hangs.wait()
    assert parts.schedule.overdue_ns(parts.clock.ns) == 400 * NS_PER_S
    assert parts.found == []
    parts.pass_s(120)
    assert parts.health.problems() == []
    parts.pass_s(1)
    assert parts.health.problems() == [
        "a service is due, and no reconciliation has ended for 121 s"
    ]
    working.cancel()
    await asyncio.wait([working])


def test_a_hanging_reconciliation_is_a_problem(parts: Parts) -> None:
    parts.schedule.add("chat", parts.clock.ns)
    parts.schedule.take(parts.clock.ns)
    parts.pass_s(301)
    assert parts.health.problems() == ["a reconciliation has taken 301 s"]


def test_long_without_events_and_turns_is_a_problem_only_where_a_service_wants_one(
    parts: Parts,
) -> None:
    parts.health.note_event()
    parts.schedule.add("chat", parts.clock.ns)
    parts.schedule.take(parts.clock.ns)
    parts.schedule.finish("chat", parts.clock.ns, failed=False)
    parts.pass_s(100_000)
    parts.both_watched()
    assert parts.health.problems() == [], "nothing changes in this cluster"
    parts.schedule.add("chat", parts.clock.ns)
    parts.schedule.add("other", parts.clock.ns)
    parts.schedule.take(parts.clock.ns)
    parts.pass_s(301)
    parts.both_watched()
    assert parts.health.problems() == [
        "a service is due, and no reconciliation has ended for 301 s",
        "a reconciliation has taken 301 s",
    ]


def test_a_service_that_fails_again_and_again_is_no_problem_of_the_process(parts: Parts) -> None:
    parts.schedule.add("chat", parts.clock.ns)
    for _ in range(200):
        parts.pass_s(31)
        parts.health.note_watch(PODS)
        parts.health.note_watch(SERVICES)
        assert parts.health.problems() == []
        assert parts.schedule.take(parts.clock.ns) == "chat"
        parts.schedule.finish("chat", parts.clock.ns, failed=True)


def test_the_report_tells_ages(parts: Parts) -> None:
    parts.health.note_watch(PODS)
    parts.health.note_event()
    parts.pass_s(3)
    report = parts.health.report()
    assert report["event_age_seconds"] == 3
    assert report["reconciliation_age_seconds"] is None
    assert report["watch_age_seconds"] == {PODS: 3, SERVICES: None}
    assert (report["leading"], report["ready"], report["problems"]) == (True, False, [])
