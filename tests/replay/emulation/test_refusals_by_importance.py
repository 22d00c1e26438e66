"""Under overload the least important requests are shed, in virtual time: a step takes 1 ms."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.builders.fleets import make_fleet, plan, run_fleet

from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import RouterPolicy
from goodput_core.units import NS_PER_MS
from goodput_engine.scheduler.admission import Rejection, Removal
from goodput_engine.scheduler.policies.registry import POLICIES
from goodput_engine.scheduler.policies.sarathi import SarathiPolicy
from goodput_replay.runs.slo import SLOClasses

if TYPE_CHECKING:
    from tests.builders.fleets import FleetRun

    from goodput_engine.scheduler.request_table import ScheduledRequest
    from goodput_replay.plan import PlannedRequest

CLASSES = SLOClasses(
    classes=(
        SLOClass(name="interactive", ttft_ms=60_000, tpot_ms=1_000, priority=1),
        SLOClass(name="batch", ttft_ms=60_000, tpot_ms=1_000),
    ),
    default="batch",
)


def _overload(
    seed: int, *, classes: tuple[str, str] = ("interactive", "batch")
) -> list[PlannedRequest]:
    """Return requests at twice the capacity of four slots; each class alone is 80 % or 120 %.

    An output takes 20 ms, so four slots serve 200 requests/s. For two seconds, 160 requests/s of
    the first class arrive, and 240 requests/s of the second.
    """
    draw = random.Random(seed)
    arrivals: list[tuple[float, str]] = []
    for name, per_ms in zip(classes, (0.16, 0.24), strict=True):
        at_ms = 0.0
        while (at_ms := at_ms + draw.expovariate(per_ms)) < 2_000:
            arrivals.append((at_ms, name))
    arrivals.sort()
    return [
        plan(f"{name}{i}", at_ms, 8, 20, slo_class=name, max_output_tokens=20)
        for i, (at_ms, name) in enumerate(arrivals)
    ]


def _shed(run: FleetRun, name: str) -> float:
    """Return the share of the requests of a class that was shed."""
    records = [record for record in run.records if record.slo_class == name]
    return sum(record.outcome is Outcome.SHED for record in records) / len(records)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_at_twice_the_capacity_every_policy_sheds_the_less_important_class(policy: str) -> None:
    settings = make_fleet(policy=policy, max_num_seqs=4, max_waiting=16, slo=CLASSES)
    run = run_fleet(_overload(3), settings)
    assert _shed(run, "batch") > 0.5
    assert _shed(run, "interactive") < _shed(run, "batch")
    if policy == "priority":
        assert _shed(run, "interactive") == 0, "alone, this class would fit"
    elif policy in {"vllm", "sarathi", "splitfuse", "sjf", "slo"}:
        # Both classes are served in the same order, so the queue is sometimes full of requests of
        # this class. (`orca` reserves blocks for the longest output, and `fastserve` fills its
        # queue with preempted requests.)
        assert _shed(run, "interactive") < 0.1
    assert run.outcome.shed <= sum(r.outcome is Outcome.SHED for r in run.records)


@pytest.mark.parametrize("placement", list(RouterPolicy))
def test_saturated_replicas_still_get_the_more_important_requests(placement: RouterPolicy) -> None:
    # Two replicas of two slots have the same capacity.
    settings = make_fleet(
        policy="priority",
        replicas=2,
        max_num_seqs=2,
        max_waiting=8,
        slo=CLASSES,
        placement=placement,
    )
    run = run_fleet(_overload(5), settings)
    assert _shed(run, "interactive") < 0.02
    assert _shed(run, "batch") > 0.5


def test_equal_requests_are_shed_by_arrival_as_before() -> None:
    requests = [replace(r, slo_class="batch") for r in _overload(7)]
    run = run_fleet(requests, make_fleet(max_num_seqs=4, max_waiting=16, slo=CLASSES))
    shed = [record for record in run.records if record.outcome is Outcome.SHED]
    assert 0.3 < len(shed) / len(requests) < 0.6
    assert all(record.end_ns == record.scheduled_ns for record in shed), "at once"


def test_a_displaced_request_is_shed_when_the_more_important_one_arrives() -> None:
    requests = [
        plan("running", 0, 8, 100, slo_class="batch"),
        plan("displaced", 1, 8, 5, slo_class="batch"),
        plan("important", 3.5, 8, 5, slo_class="interactive"),
        plan("by-header", 5.5, 8, 5, slo_class="batch", priority=2),
    ]
    run = run_fleet(requests, make_fleet(max_num_seqs=1, max_waiting=1, slo=CLASSES))
    assert run["displaced"].outcome is Outcome.SHED
    assert run["displaced"].end_ns == run["important"].scheduled_ns
    assert "more important" in run["displaced"].detail
    assert run["important"].end_ns == run["by-header"].scheduled_ns
    assert run["by-header"].outcome is Outcome.OK
    assert run.outcome.shed == 2


def test_a_displaced_request_is_retried_once_on_another_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def displaced_waiting(policy: SarathiPolicy, request: ScheduledRequest) -> list[Removal]:
        rejection = Rejection(reason="displaced", detail="for a test", retry_after_s=1)
        return [
            Removal(request=waiting, rejection=rejection)
            for waiting in policy.view.waiting
            if waiting.priority < request.priority
        ]

    monkeypatch.setattr(SarathiPolicy, "displaced_waiting", displaced_waiting)
    requests = [
        plan("a", 0, 8, 100, slo_class="batch"),
        plan("b", 0, 8, 4, slo_class="batch"),
        plan("moves", 1, 8, 5, slo_class="batch"),
        plan("c", 1, 8, 10, slo_class="batch"),
        plan("important", 20, 8, 5, slo_class="interactive"),
    ]
    run = run_fleet(requests, make_fleet(replicas=2, max_num_seqs=1, slo=CLASSES))
    assert [run[name].replica for name in ("a", "b", "c")] == ["chat-0", "chat-1", "chat-1"]
    moved = run["moves"]
    assert (moved.outcome, moved.replica) == (Outcome.OK, "chat-1")
    assert moved.scheduled_ns == requests[2].scheduled_ns
    assert moved.first_token_ns == 21 * NS_PER_MS
    assert run["important"].replica == "chat-0"
    assert run.outcome.shed == 1, "the first replica counts the removal"


def test_priority_and_weight_of_a_class_reach_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[int, tuple[int, int]] = {}

    def reject(policy: SarathiPolicy, request: ScheduledRequest) -> None:
        seen[request.rid] = (request.priority, request.weight)

    monkeypatch.setattr(SarathiPolicy, "reject", reject)
    interactive, batch = CLASSES.classes
    slo = replace(CLASSES, classes=(replace(interactive, weight=5), batch))
    requests = [
        plan("a", 0, 8, 1, slo_class="interactive"),
        plan("b", 0, 8, 1, slo_class="batch"),
        plan("c", 0, 8, 1, slo_class="interactive", priority=0),
    ]
    run_fleet(requests, make_fleet(slo=slo))
    assert list(seen.values()) == [(1, 5), (0, 1), (0, 5)]


def test_a_class_of_higher_weight_is_kept_within_the_same_priority() -> None:
    interactive, batch = CLASSES.classes
    weighted = replace(CLASSES, classes=(replace(interactive, priority=0, weight=5), batch))
    settings = make_fleet(max_num_seqs=4, max_waiting=16, slo=weighted)
    run = run_fleet(_overload(3), settings)
    assert _shed(run, "interactive") < 0.1
    assert _shed(run, "batch") > 0.5
