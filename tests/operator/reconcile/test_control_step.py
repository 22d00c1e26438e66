"""Decisions of the control laws: pushed to engines, stored, and read by the next operator."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.contract import MAX_LIMITS_REVISION
from goodput_core.control import ClassWindow, LearntCapacity, TargetCounts
from goodput_core.units import NS_PER_S
from goodput_operator.reconcile.actions import Apply, CreateToken, Delete
from goodput_operator.reconcile.learnt import learnt_status, restore_learnt

if TYPE_CHECKING:
    from tests.operator.reconcile.conftest import Cluster

AUTO = {"replicas": None, "minReplicas": 2}
SLOW = ClassWindow(
    name="a", ttft=TargetCounts(judged=100), tpot=TargetCounts(judged=100, missed=50)
)


def test_limits_are_pushed_until_every_engine_has_them(running: Cluster) -> None:
    running.reconcile(running.measured(limits=1))
    assert running.pushed == [], "engines started with these limits"
    running.reconcile(running.measured(limits=0, budget_law="model"))
    assert [p.limits["revision"] for p in running.pushed] == [1, 1]
    assert {p.pod for p in running.pushed} == {p["metadata"]["name"] for p in running.engines()}
    assert all(
        p.url.startswith("http://10.0.0.") and p.url.endswith(":9000") for p in running.pushed
    )
    assert running.pushed[0].limits["safety_percent"] == 90
    running.reconcile(running.measured(limits=1))
    assert len(running.pushed) == 2


def test_limits_and_replicas_outlive_the_operator(running: Cluster) -> None:
    running.update_spec(**AUTO)
    running.settle()
    (name,) = running.deployments()
    memory = running.memory
    assert memory.setpoint is not None
    bounds = replace(memory.setpoint.bounds, max_tokens=512)
    setpoint = replace(memory.setpoint, limits_revision=8, bounds=bounds, replicas=5)
    running.memory = replace(memory, setpoint=setpoint)
    running.settle()
    assert running.deployments() == {name: 5}
    running.restart_operator()
    running.written.clear()
    running.settle()
    assert running.written == []
    assert running.memory.setpoint == setpoint
    running.reconcile(running.measured(limits=8))
    assert running.memory.setpoint == setpoint
    assert running.status["tokenBudget"] == 512


def test_learnt_capacity_and_start_up_times_outlive_the_operator(running: Cluster) -> None:
    running.update_spec(**AUTO)
    running.settle()
    learnt = LearntCapacity(
        proven=1.25,
        proven_ns=running.now_ns - 1800 * NS_PER_S,
        failed=1.5,
        failed_ns=running.now_ns - 600 * NS_PER_S,
        burstiness=1.4,
        peak_per_s=7.25,
        peak_ns=running.now_ns - 300 * NS_PER_S,
    )
    law = running.memory.law
    law = replace(law, replicas=replace(law.replicas, learnt=learnt))
    running.memory = replace(running.memory, law=law, startups_ns=(40 * NS_PER_S, 90 * NS_PER_S))
    running.now_ns += 60 * NS_PER_S
    running.reconcile(running.measured())
    assert running.status["learnt"]["provenPermille"] == 1250
    assert running.status["learnt"]["startupSeconds"][-2:] == [40, 90]
    running.restart_operator()
    running.now_ns += 10 * NS_PER_S
    running.reconcile(running.measured())
    kept = running.memory.law.replicas.learnt
    assert (kept.proven, kept.failed) == (1.25, 1.5)
    assert kept.burstiness == pytest.approx(1.4, abs=0.02)
    assert kept.peak_per_s == 7.25
    assert kept.peak_ns == pytest.approx(learnt.peak_ns, abs=2 * NS_PER_S)
    assert kept.proven_ns == pytest.approx(learnt.proven_ns, abs=2 * NS_PER_S)
    assert running.memory.startups_ns[-2:] == (40 * NS_PER_S, 90 * NS_PER_S)


def test_a_definition_without_learnt_capacity_gets_no_write_that_changes_nothing(
    running: Cluster,
) -> None:
    running.undeclared = frozenset({"learnt"})
    running.update_spec(**AUTO)
    running.settle()
    running.memory = replace(running.memory, startups_ns=(40 * NS_PER_S,))
    running.now_ns += 300 * NS_PER_S
    running.reconcile()
    for _ in range(3):
        running.now_ns += 300 * NS_PER_S
        assert running.reconcile().actions == ()
    assert "learnt" not in running.status


shares = st.just(0.0) | st.floats(0.001, 1e20)
seconds = st.integers(0, 10**6)


@given(
    proven=st.tuples(shares, seconds),
    failed=st.tuples(shares, seconds),
    burstiness=st.floats(0.01, 1e20),
    peak=st.tuples(shares, seconds),
    startups=st.lists(st.integers(0, 10**6), min_size=1, max_size=16),
    of_requests=st.booleans(),
)
def test_a_restarted_operator_stores_what_the_last_one_stored(
    proven: tuple[float, int],
    failed: tuple[float, int],
    burstiness: float,
    peak: tuple[float, int],
    startups: list[int],
    of_requests: bool,
) -> None:
    now_ns, unix_s = 10**15, 1_800_000_000
    learnt = LearntCapacity(
        proven=proven[0],
        proven_ns=now_ns - proven[1] * NS_PER_S,
        failed=failed[0],
        failed_ns=now_ns - failed[1] * NS_PER_S,
        burstiness=burstiness,
        peak_per_s=peak[0],
        peak_ns=now_ns - peak[1] * NS_PER_S,
        of_requests=of_requests,
    )
    startups_ns = [seconds * NS_PER_S for seconds in startups]
    stored = learnt_status(learnt, startups_ns, {}, now_ns=now_ns, unix_s=unix_s)
    assert stored is not None
    numbers = (value for value in stored.values() if isinstance(value, int))
    assert all(0 < number < 2**63 for number in numbers)
    restored, restored_ns = restore_learnt(stored, now_ns=5, unix_s=unix_s + 60)
    again = learnt_status(restored, restored_ns, stored, now_ns=5, unix_s=unix_s + 60)
    assert again == stored
    if proven[0] < 100:
        assert restored.proven == pytest.approx(proven[0], abs=0.0005)
    if proven[0] or failed[0]:
        assert restored.of_requests is of_requests


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param("text", id="text"),
        pytest.param({"provenPermille": -5, "provenTime": "2026-01-01T00:00:00Z"}, id="negative"),
        pytest.param({"provenPermille": 10**9, "provenTime": "2026-01-01T00:00:00Z"}, id="large"),
        pytest.param({"provenPermille": 900, "provenTime": "yesterday"}, id="no time"),
        pytest.param({"burstMilliRequestsPerSecond": 900}, id="bursts without a time"),
        pytest.param({"failedPermille": True, "startupSeconds": [None, 0, -1]}, id="other types"),
    ],
)
def test_an_invalid_learnt_capacity_is_ignored(stored: Any) -> None:
    learnt, startups_ns = restore_learnt(stored, now_ns=10**18, unix_s=1_800_000_000)
    assert learnt == LearntCapacity()
    assert startups_ns == ()


@pytest.mark.parametrize(
    ("foreign", "own", "reported"),
    [
        pytest.param(7, 8, [8, 8], id="a number"),
        pytest.param(18 * 10**17, 18 * 10**17 + 1, [18 * 10**17 + 1] * 2, id="nanoseconds"),
        pytest.param(MAX_LIMITS_REVISION, 2, [], id="the maximum, which stays"),
    ],
)
def test_limits_of_another_client_are_replaced_and_survive_a_restart(
    running: Cluster, foreign: int, own: int, reported: list[int]
) -> None:
    running.update_spec(**AUTO)
    running.settle()
    running.reconcile(replace(running.measured(50, 100, limits=foreign), classes=(SLOW,)))
    assert [push.limits["revision"] for push in running.pushed] == reported
    setpoint = running.memory.setpoint
    assert setpoint is not None
    assert (setpoint.limits_revision, setpoint.bounds.max_tokens) == (own, 1536)
    running.restart_operator()
    running.settle()
    assert running.memory.setpoint == setpoint


def test_a_changed_budget_reaches_running_engines_and_makes_no_revision(running: Cluster) -> None:
    (name,) = running.deployments()
    running.update_spec(engine={"tokenBudget": {"initial": 1024}}, control={"mode": "Manual"})
    running.settle()
    assert list(running.deployments()) == [name]
    running.reconcile(running.measured(limits=1))
    assert {p.limits["token_budget"] for p in running.pushed} == {1024}
    assert {p.limits["revision"] for p in running.pushed} == {2}
    assert running.status["tokenBudget"] == 1024


def test_kubectl_scale_applies_at_once_and_the_law_only_recommends(running: Cluster) -> None:
    running.update_spec(replicas=6)
    running.reconcile()
    assert list(running.deployments().values()) == [6]
    running.settle()
    running.reconcile(running.measured())
    assert list(running.deployments().values()) == [6]
    assert running.status["recommendedReplicas"] >= 1


def test_a_decision_is_in_the_status_events_and_objects(running: Cluster) -> None:
    running.update_spec(**AUTO)
    running.settle()
    running.reconcile(replace(running.measured(50, 100), classes=(SLOW,)))
    (decision,) = running.status["decisions"]
    assert (decision["knob"], decision["reason"]) == ("TokenBudget", "TPOTMissed")
    assert decision["applied"] is True
    assert running.events[-1].reason == "TokenBudget"
    config = running.objects["ConfigMap", "chat-config"]["data"]["limits.json"]
    assert json.loads(config)["token_budget"] == running.status["tokenBudget"] == 1536
    assert {p.limits["revision"] for p in running.pushed} == {2}


def test_the_status_has_the_last_ten_decisions_latest_first(running: Cluster) -> None:
    running.update_spec(**AUTO)
    running.settle()
    kept, missed = TargetCounts(judged=100), TargetCounts(judged=100, missed=50)
    late = ClassWindow(name="a", ttft=missed, tpot=kept)
    slow = ClassWindow(name="a", ttft=kept, tpot=missed)
    reported: list[str] = []
    # The budget rises six times and then falls six times.
    for _ in range(100):
        classes = (late if len(reported) < 6 else slow,)
        decision = running.reconcile(replace(running.measured(50, 100), classes=classes))
        reported += [one.message for one in decision.changes]
        if len(reported) == 12:
            break
    assert len(set(reported)) == 12
    assert [one["message"] for one in running.status["decisions"]] == reported[:-11:-1]


def test_a_recommendation_is_in_the_status_and_events_only(
    running: Cluster,
) -> None:
    running.update_spec(**AUTO, control={"mode": "Recommend"})
    running.settle()
    for _ in range(2):
        running.reconcile(replace(running.measured(50, 100), classes=(SLOW,)))
    (decision,) = running.status["decisions"]
    assert decision["applied"] is False
    reported = [event for event in running.events if event.reason == "Recommended"]
    assert [event.message for event in reported] == [f"{decision['message']} (TPOTMissed)"]
    assert running.status["tokenBudget"] == 2048
    assert running.pushed == []


def test_engines_that_reject_their_limits_are_reported(running: Cluster) -> None:
    running.failures = {("Pod", "chat-1"): "limits rejected: wrong token"}
    running.reconcile()
    assert running.events[-1].reason == "LimitsNotTaken"
    assert "chat-1" in running.events[-1].message
    assert running.condition("Stalled") == ("False", "Unhindered")


def test_engines_that_reject_limits_repeatedly_are_reported_once(running: Cluster) -> None:
    names = sorted(pod["metadata"]["name"] for pod in running.engines())

    def reported() -> list[str]:
        return [one.message for one in running.events if one.reason == "LimitsNotTaken"]

    def reject_limits() -> None:
        running.reconcile(running.measured(300, 300, limits=0))
        running.failures = {("Pod", name): "limits rejected: no" for name in names}
        running.reconcile()

    for _ in range(3):
        reject_limits()
    assert len(running.pushed) == 6, "limits are pushed again"
    assert reported() == [f"pod {names[0]}: limits rejected: no; and 1 more"]
    running.reconcile(running.measured(300, 300, limits=1))
    reject_limits()
    assert len(reported()) == 2, "the engines had accepted limits in between"


def test_start_up_times_are_measured_from_starting_pods(running: Cluster) -> None:
    running.update_spec(replicas=3)
    running.reconcile(ready=0)
    running.reconcile(ready=0)
    running.now_ns += 40 * NS_PER_S
    running.reconcile()
    running.reconcile()
    (startup_ns,) = running.memory.startups_ns
    assert 40 * NS_PER_S < startup_ns < 60 * NS_PER_S
    assert {at_ns for _, at_ns in running.memory.first_seen_ns} == {None}


def test_a_pod_that_was_starting_as_the_operator_started_has_no_start_up_time(
    running: Cluster,
) -> None:
    running.update_spec(replicas=3)
    running.reconcile(ready=0)
    running.now_ns += 40 * NS_PER_S
    running.restart_operator()
    running.reconcile(ready=0)
    assert len(running.engines(ready=False)) == 1
    running.now_ns += 5 * NS_PER_S
    for _ in range(3):
        running.reconcile()
    assert len(running.engines(ready=True)) == 3
    assert running.memory.startups_ns == (), "it took more than 40 s"


def test_a_pod_that_misses_probes_has_not_started_again(running: Cluster) -> None:
    (pod, _) = running.engines()
    for _ in range(3):
        pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
        decision = running.reconcile(ready=0)
        assert not [one for one in decision.actions if isinstance(one, CreateToken)]
        running.run_deployments()
        running.reconcile()
    assert running.memory.startups_ns == ()


def test_nothing_is_written_when_constant_load_changes_nothing(running: Cluster) -> None:
    running.update_spec(**AUTO)
    running.settle()
    for _ in range(60):
        decision = running.reconcile(running.measured(20, 20))
        assert not [a for a in decision.actions if isinstance(a, Apply | Delete)]


@pytest.mark.parametrize("at_once", [True, False], ids=["next interval", "later interval"])
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param(
            {"engine": {"tokenBudget": {"max": 1024, "initial": 1024}}},
            "token budget 2048 → 1024: the spec has changed (SpecChanged)",
            id="a lower budget",
        ),
        pytest.param(
            {"minReplicas": 3}, "replicas 2 → 3: minReplicas is 3 (BelowFloor)", id="a higher floor"
        ),
        pytest.param(
            {"maxReplicas": 1, "minReplicas": 1},
            "replicas 2 → 1: maxReplicas is 1 (AboveCeiling)",
            id="a lower ceiling",
        ),
    ],
)
def test_limits_of_a_changed_spec_are_reported_once(
    running: Cluster, spec: dict[str, Any], message: str, at_once: bool
) -> None:
    running.update_spec(**AUTO)
    running.settle()
    running.reconcile(running.measured(20, 20))
    running.events.clear()
    running.update_spec(**spec)
    if not at_once:
        running.reconcile()
        running.reconcile()
    counted = [running.reconcile(running.measured(20, 20)).changes for _ in range(3)]
    (decision,) = running.status["decisions"]
    reported = [one.message for one in running.events if one.reason in {"TokenBudget", "Scaled"}]
    assert reported == [message] == [f"{decision['message']} ({decision['reason']})"]
    assert [len(changes) for changes in counted] == [1, 0, 0]
    setpoint = running.memory.setpoint
    assert setpoint is not None
    assert list(running.deployments().values()) == [setpoint.replicas]
    assert {push.limits["revision"] for push in running.pushed} <= {setpoint.limits_revision}


@pytest.mark.parametrize("interval_s", [1, 10, 3600])
def test_the_next_reconciliation_is_due_when_the_interval_ends(
    running: Cluster, interval_s: int
) -> None:
    running.update_spec(control={"mode": "Manual", "intervalSeconds": interval_s})
    running.settle()
    measured_ns = running.now_ns
    over_ns = measured_ns + interval_s * NS_PER_S
    running.decide(running.measured(20, 20))
    for now_ns in (measured_ns, over_ns - NS_PER_S // 2):
        running.now_ns = now_ns
        assert running.decide().wake_at_ns == over_ns
    running.now_ns = over_ns
    again_ns = running.decide().wake_at_ns
    assert again_ns is not None
    assert again_ns > over_ns, "the interval is not over yet"
