"""Liveness detects expired watches, hanging reconciliations and overdue services."""

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


class WatchedOperator:
    """The health of an operator with two watched paths and one worker.

    Attributes:
        duration_s: duration of reconciliations by service; those of other services never end.
        hangs: set when an endless reconciliation has started.
        found: problems found at the end of reconciliations.
    """

    def __init__(self, bench: Any) -> None:
        async def reconcile(key: str) -> Result:
            if key not in self.duration_s:
                self.hangs.set()
                await asyncio.Event().wait()
            self.pass_s(self.duration_s[key])
            self.renew_watches()
            self.found += self.health.problems()
            return Result()

        self.duration_s: dict[str, int] = {}
        self.hangs = asyncio.Event()
        self.found: list[str] = []
        self.clock = bench.clock
        self.fence = bench.fence
        self.fence.extend(self.clock.ns + 10**6 * NS_PER_S)
        self.queue: WorkQueue[str] = WorkQueue(BackOff())
        self.workers = Workers(queue=self.queue, reconcile=reconcile, clock=self.clock, count=1)
        self.health = Health(
            clock=self.clock, paths=[PODS, SERVICES], fence=self.fence, workers=self.workers
        )

    def pass_s(self, seconds: int) -> None:
        self.clock.ns += seconds * NS_PER_S

    def renew_watches(self) -> None:
        self.health.note_watch(PODS)
        self.health.note_watch(SERVICES)


@pytest.fixture
def harness(bench: Any) -> WatchedOperator:
    return WatchedOperator(bench)


def test_the_operator_is_ready_once_all_paths_are_watched(harness: WatchedOperator) -> None:
    assert not harness.health.ready
    harness.health.note_watch(PODS)
    harness.health.note_watch("/api/v1/namespaces/ns/secrets")
    assert not harness.health.ready
    harness.health.note_watch(SERVICES)
    assert harness.health.ready


def test_an_expired_watch_is_a_problem_and_an_idle_cluster_is_not(
    harness: WatchedOperator,
) -> None:
    harness.health.note_watch(SERVICES)
    for _ in range(4):
        harness.health.note_watch(PODS)
        harness.pass_s(WATCH_S)
    assert harness.health.problems() == [f"no watch of {SERVICES} has started for 960 s"]
    harness.health.note_watch(SERVICES)
    assert harness.health.problems() == []


def test_a_watch_that_never_started_is_a_problem(harness: WatchedOperator) -> None:
    harness.health.note_watch(PODS)
    harness.pass_s(2 * WATCH_S + 1)
    harness.health.note_watch(PODS)
    assert harness.health.problems() == [f"no watch of {SERVICES} has started for 481 s"]


def test_a_service_that_is_overdue_is_a_problem_of_the_leader_only(
    harness: WatchedOperator,
) -> None:
    harness.queue.add("chat", harness.clock.ns)
    harness.pass_s(121)
    assert harness.health.problems() == [
        "a service is due, and no reconciliation has ended for 121 s"
    ]
    harness.fence.close()
    assert harness.health.problems() == []


async def test_a_long_queue_is_a_problem_only_when_it_stops_moving(
    harness: WatchedOperator,
) -> None:
    many = [f"slow-{number}" for number in range(100)]
    harness.duration_s = dict.fromkeys(many, 4)
    for key in (*many, "hanging", "last"):
        harness.workers.add(key)
    working = asyncio.create_task(harness.workers.run())
    await harness.hangs.wait()
    assert harness.queue.overdue_ns(harness.clock.ns) == 400 * NS_PER_S
    assert harness.found == []
    harness.pass_s(120)
    assert harness.health.problems() == []
    harness.pass_s(1)
    assert harness.health.problems() == [
        "a service is due, and no reconciliation has ended for 121 s"
    ]
    working.cancel()
    await asyncio.wait([working])


def test_a_hanging_reconciliation_is_a_problem(harness: WatchedOperator) -> None:
    harness.queue.add("chat", harness.clock.ns)
    harness.queue.take(harness.clock.ns)
    harness.pass_s(301)
    assert harness.health.problems() == ["a reconciliation has taken 301 s"]


def test_a_time_without_reconciliations_is_a_problem_only_if_a_service_is_due(
    harness: WatchedOperator,
) -> None:
    harness.health.note_event()
    harness.queue.add("chat", harness.clock.ns)
    harness.queue.take(harness.clock.ns)
    harness.queue.finish("chat", harness.clock.ns, failed=False)
    harness.pass_s(100_000)
    harness.renew_watches()
    assert harness.health.problems() == [], "an idle cluster"
    harness.queue.add("chat", harness.clock.ns)
    harness.queue.add("other", harness.clock.ns)
    harness.queue.take(harness.clock.ns)
    harness.pass_s(301)
    harness.renew_watches()
    assert harness.health.problems() == [
        "a service is due, and no reconciliation has ended for 301 s",
        "a reconciliation has taken 301 s",
    ]


def test_a_service_that_fails_repeatedly_is_not_a_problem_of_the_process(
    harness: WatchedOperator,
) -> None:
    harness.queue.add("chat", harness.clock.ns)
    for _ in range(200):
        harness.pass_s(31)
        harness.health.note_watch(PODS)
        harness.health.note_watch(SERVICES)
        assert harness.health.problems() == []
        assert harness.queue.take(harness.clock.ns) == "chat"
        harness.queue.finish("chat", harness.clock.ns, failed=True)


def test_the_report_contains_ages(harness: WatchedOperator) -> None:
    harness.health.note_watch(PODS)
    harness.health.note_event()
    harness.pass_s(3)
    report = harness.health.report()
    assert report["event_age_seconds"] == 3
    assert report["reconciliation_age_seconds"] is None
    assert report["watch_age_seconds"] == {PODS: 3, SERVICES: None}
    assert (report["leading"], report["ready"], report["problems"]) == (True, False, [])
