"""A new revision comes in without a moment in which fewer engines serve than the service has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from goodput_operator.reconcile.rollout import distribute
from goodput_operator.reconcile.snapshot import Workload

if TYPE_CHECKING:
    from tests.operator.reconcile.conftest import Cluster


@pytest.mark.parametrize("replicas", [1, 2, 5, 9])
@pytest.mark.parametrize("at_once", [1, 99], ids=["one by one", "all at once"])
def test_capacity_never_falls_while_a_revision_rolls(
    cluster: Cluster, replicas: int, at_once: int
) -> None:
    cluster.ask(replicas=replicas)
    cluster.settle()
    (old,) = cluster.deployments()
    cluster.ask(engine={"policy": "sarathi"})
    most = 0
    for _ in range(60):
        cluster.round(ready=at_once)
        assert len(cluster.engines(ready=True)) >= replicas
        most = max(most, len(cluster.engines()))
    (new,) = cluster.deployments()
    assert new != old
    assert cluster.status["currentRevision"] == new
    assert most <= replicas + max(1, -(-replicas // 4))
    assert [e.reason for e in cluster.events] == ["Ready", "RollingOut", "RolledOut"]


def test_a_revision_that_never_serves_takes_nothing_away(running: Cluster) -> None:
    (old,) = running.deployments()
    running.ask(engine={"policy": "sarathi"})
    running.round()
    running.broken = {running.status["updateRevision"]}
    for _ in range(20):
        running.round()
        assert len(running.engines(ready=True)) >= 2
    assert running.deployments()[old] == 2
    assert running.condition("Reconciling") == ("True", "RollingOut")
    assert running.status["currentRevision"] == old
    # The service still scales while the new revision does not come.
    running.ask(replicas=4)
    for _ in range(5):
        running.round()
    assert len(running.engines(ready=True)) == 4


def test_going_back_takes_the_kept_template(running: Cluster) -> None:
    (old,) = running.deployments()
    template = running.objects["ControllerRevision", old]["data"]
    running.ask(engine={"policy": "sarathi"})
    for _ in range(3):
        running.round(ready=0)
    assert len(running.deployments()) == 2
    running.ask(engine=None)
    running.settle()
    assert running.deployments() == {old: 2}
    assert running.objects["ControllerRevision", old]["data"] == template
    assert len(running.engines(ready=True)) == 2


def test_an_old_revision_without_its_labels_is_still_deleted(running: Cluster) -> None:
    (old,) = running.deployments()
    running.ask(engine={"policy": "sarathi"})
    running.round(ready=0)
    running.round(ready=0)
    running.edit("Deployment", old, lambda d: d["metadata"].update(labels={"x": "y"}))
    running.settle()
    assert ("Deployment", old) not in running.objects
    assert list(running.deployments().values()) == [2]


def test_a_deployment_without_a_revision_is_deleted_once_the_new_one_serves(
    running: Cluster,
) -> None:
    (old,) = running.deployments()
    running.ask(engine={"policy": "sarathi"})
    running.round(ready=0)
    running.round(ready=0)
    running.remove("ControllerRevision", old)
    for _ in range(20):
        running.round()
        assert len(running.engines(ready=True)) >= 2
    running.settle()
    assert old not in running.deployments()
    assert list(running.deployments().values()) == [2]


def test_a_first_revision_that_is_broken_is_replaced_at_once(cluster: Cluster) -> None:
    cluster.round()
    cluster.broken = {cluster.status["updateRevision"]}
    for _ in range(4):
        cluster.round()
    cluster.ask(engine={"policy": "sarathi"})
    cluster.settle()
    assert list(cluster.deployments().values()) == [2]
    assert cluster.condition("Ready") == ("True", "Serving")


def test_only_a_few_unused_revisions_are_kept(running: Cluster) -> None:
    for waiting in range(1, 10):
        running.ask(engine={"maxWaiting": waiting})
        running.settle()
    kept = [n for k, n in running.objects if k == "ControllerRevision" and "router" not in n]
    assert len(kept) == 6
    assert running.status["currentRevision"] in kept


def test_scale_to_zero_and_back(running: Cluster) -> None:
    running.ask(replicas=0)
    running.settle()
    assert running.condition("Ready") == ("True", "ScaledToZero")
    assert not running.engines()
    running.ask(replicas=3)
    running.settle()
    assert len(running.engines(ready=True)) == 3


def test_a_suspended_service_runs_nothing_and_keeps_the_rest(running: Cluster) -> None:
    objects = set(running.objects)
    running.ask(suspend=True)
    running.settle()
    assert not running.pods
    assert set(running.objects) == objects
    assert running.condition("Ready") == ("False", "Suspended")
    assert running.condition("Reconciling") == ("False", "Settled")
    running.ask(suspend=None)
    running.settle()
    assert len(running.engines(ready=True)) == 2


COUNT = st.integers(0, 12)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    replicas=COUNT,
    update=st.tuples(COUNT, COUNT, COUNT),
    others=st.lists(st.tuples(COUNT, COUNT, COUNT), max_size=3),
    has_stable=st.booleans(),
)
def test_whatever_there_is_enough_is_kept(
    replicas: int,
    update: tuple[int, int, int],
    others: list[tuple[int, int, int]],
    has_stable: bool,
) -> None:
    def part(name: str, counts: tuple[int, int, int]) -> Workload:
        wanted, pods, available = counts
        serving = min(available, pods)
        return Workload(
            name=name,
            uid=name,
            revision=name,
            wanted=wanted,
            pods=pods,
            ready=serving,
            available=serving,
            current=True,
            conditions={},
        )

    parts = [part("new", update), *(part(f"old{i}", o) for i, o in enumerate(others))]
    stable = "old0" if has_stable and others else None
    counts = distribute(replicas, update="new", stable=stable, current=parts)
    assert set(counts) == {p.revision for p in parts}
    assert min(counts.values()) >= 0
    assert counts["new"] <= replicas
    serving = min(counts["new"], parts[0].available) + sum(
        min(p.available, counts[p.revision]) for p in parts[1:]
    )
    there = sum(min(p.available, p.wanted) for p in parts)
    assert serving >= min(replicas, there), "none that is needed is taken away"
    if stable:
        kept = sum(count for name, count in counts.items() if name != "new")
        serves = min(parts[0].available, parts[0].wanted)
        assert kept >= replicas - serves, "what the new one lacks is asked of the old"
