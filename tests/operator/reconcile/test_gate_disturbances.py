"""The service keeps its capacity, and a gate reaches an outcome, whatever ends or changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.operator.reconcile.gates import (
    FAIL,
    GATE,
    INVALID,
    PASS,
    change,
    delete_pod,
    gate_of,
    trials,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.operator.reconcile.conftest import Cluster


@pytest.mark.parametrize("message", [PASS, FAIL, INVALID], ids=["PASS", "FAIL", "INVALID"])
@pytest.mark.parametrize("writes", [0, 1, 2, 3])
def test_an_operator_that_ends_after_any_write_reaches_the_same_outcome(
    gated: Cluster, writes: int, message: str
) -> None:
    (stable,) = gated.deployments()
    change(gated)
    for _ in range(200):
        # Each process ends after some writes; the last ones complete a step, or nothing would.
        for count in (writes, writes, 99):
            gated.crash_after(count)
            assert len(gated.engines(ready=True)) >= 2
            assert len(gated.jobs()) <= 1
        end_job(gated, message)
        if gate_of(gated).get("phase") in {"Passed", "Failed", "Paused"}:
            break
    gated.settle()
    phase = {PASS: "Passed", FAIL: "Failed", INVALID: "Paused"}[message]
    assert gate_of(gated)["phase"] == phase
    assert (gated.status["currentRevision"] == stable) == (phase != "Passed")
    assert trials(gated) == {"baseline": {}, "candidate": {}}


STEPS: dict[str, Callable[[Cluster], object]] = {
    "reconcile": lambda cluster: None,
    "kill operator after a write": lambda cluster: cluster.crash_after(1),
    "kill operator after two writes": lambda cluster: cluster.crash_after(2),
    "kill operator": lambda cluster: cluster.restart_operator(),
    "delete candidate": lambda cluster: delete_pod(cluster, "candidate"),
    "delete baseline": lambda cluster: delete_pod(cluster, "baseline"),
    "delete engine": lambda cluster: delete_pod(cluster, "engine"),
    "delete job pod": lambda cluster: end_job(cluster, None),
    "pass": lambda cluster: end_job(cluster, PASS),
    "fail": lambda cluster: end_job(cluster, FAIL),
    "invalid": lambda cluster: end_job(cluster, INVALID),
    "change": change,
    "other change": lambda cluster: change(cluster, "orca"),
    "change back": lambda cluster: cluster.update_spec(engine=None),
    "retry": lambda cluster: cluster.annotations.update(
        {"goodput.dev/retry": str(cluster.counter)}
    ),
    "remove retry": lambda cluster: cluster.annotations.clear(),
    "other rules": lambda cluster: cluster.update_spec(
        rollout={"gate": {**GATE, "pairs": 1 + cluster.counter % 8}}
    ),
    "recorded": lambda cluster: cluster.update_spec(
        rollout={"gate": {**GATE, "baseline": "Recorded", "pairs": 1, "history": "pvc://h/aa"}}
    ),
    "lose the Job": lambda cluster: lose_job(cluster),  # noqa: PLW0108 - defined below
    "drop the gate": lambda cluster: cluster.spec.update(rollout={}),
    "suspend": lambda cluster: cluster.update_spec(suspend=True),
    "resume": lambda cluster: cluster.update_spec(suspend=None),
    "lose status": lambda cluster: cluster.status.clear(),
    "scale up": lambda cluster: cluster.update_spec(replicas=3),
    "scale down": lambda cluster: cluster.update_spec(replicas=2),
    "fill": lambda cluster: cluster.full.add("candidate"),
    "empty": lambda cluster: cluster.full.clear(),
}


def end_job(cluster: Cluster, message: str | None) -> None:
    """End a running Job."""
    running = [job for job in cluster.jobs() if not job.get("status")]
    if running and f"{running[0]['metadata']['name']}-x" in cluster.pods:
        cluster.end_job(message)


def lose_job(cluster: Cluster) -> None:
    """Delete all Jobs with their pods."""
    for job in cluster.jobs():
        cluster.remove("Job", job["metadata"]["name"])


@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(st.sampled_from(tuple(STEPS)), max_size=40), final=st.sampled_from([PASS, FAIL])
)
def test_the_service_keeps_its_capacity_and_the_gate_converges_after_any_disturbances(
    new_cluster: type[Cluster], steps: list[str], final: str
) -> None:
    cluster = new_cluster()
    cluster.update_spec(rollout={"gate": GATE})
    cluster.settle()
    served, ungated = set(cluster.deployments()), False
    for step in steps:
        generation = cluster.generation
        STEPS[step](cluster)
        # A changed spec without a gate needs no PASS.
        gate = (cluster.spec.get("rollout") or {}).get("gate")
        ungated = ungated or (gate is None and cluster.generation != generation)
        replicas: int = cluster.spec["replicas"]
        before = len(cluster.engines(ready=True))
        cluster.reconcile()
        serving = len(cluster.engines(ready=True))
        suspended = cluster.spec.get("suspend", False)
        assert suspended or serving >= min(before, replicas), "no serving engine is lost"
        assert len(cluster.jobs()) <= 1
        served |= {e["metadata"]["labels"]["goodput.dev/revision"] for e in cluster.engines()}
    cluster.full.clear()
    cluster.update_spec(suspend=None)
    for _ in range(40):
        end_job(cluster, final)
        cluster.reconcile()
    cluster.settle()
    assert len(cluster.engines(ready=True)) == cluster.spec["replicas"]
    assert trials(cluster) == {"baseline": {}, "candidate": {}}
    update, current = cluster.status["updateRevision"], cluster.status["currentRevision"]
    phase = gate_of(cluster).get("phase")
    assert phase in {None, "Passed", "Failed", "Paused"}
    assert (update == current) == (phase in {None, "Passed"})
    assert list(cluster.deployments()) == [current]
    if final == FAIL and "pass" not in steps and not ungated:
        assert len(served) == 1, "no revision served without a PASS"
