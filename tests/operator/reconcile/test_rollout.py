"""During a rollout, the number of serving engines never falls below the replicas."""

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
@pytest.mark.parametrize("at_once", [1, 99], ids=["one at a time", "all at once"])
def test_capacity_never_falls_during_a_rollout(
    cluster: Cluster, replicas: int, at_once: int
) -> None:
    cluster.update_spec(replicas=replicas)
    cluster.settle()
    (old,) = cluster.deployments()
    cluster.update_spec(engine={"policy": "sarathi"})
    most = 0
    for _ in range(60):
        cluster.reconcile(ready=at_once)
        assert len(cluster.engines(ready=True)) >= replicas
        most = max(most, len(cluster.engines()))
    (new,) = cluster.deployments()
    assert new != old
    assert cluster.status["currentRevision"] == new
    assert most <= replicas + max(1, -(-replicas // 4))
    assert [e.reason for e in cluster.events] == ["Ready", "RollingOut", "RolledOut"]


def test_a_revision_that_never_serves_does_not_reduce_capacity(running: Cluster) -> None:
    (old,) = running.deployments()
    running.update_spec(engine={"policy": "sarathi"})
    running.reconcile()
    running.broken = {running.status["updateRevision"]}
    for _ in range(20):
        running.reconcile()
        assert len(running.engines(ready=True)) >= 2
    assert running.deployments()[old] == 2
    assert running.condition("Reconciling") == ("True", "RollingOut")
    assert running.status["currentRevision"] == old
    # The service still scales while the new revision does not serve.
    running.update_spec(replicas=4)
    for _ in range(5):
        running.reconcile()
    assert len(running.engines(ready=True)) == 4


def test_a_rollback_uses_the_stored_template(running: Cluster) -> None:
    (old,) = running.deployments()
    template = running.objects["ControllerRevision", old]["data"]
    running.update_spec(engine={"policy": "sarathi"})
    for _ in range(3):
        running.reconcile(ready=0)
    assert len(running.deployments()) == 2
    running.update_spec(engine=None)
    running.settle()
    assert running.deployments() == {old: 2}
    assert running.objects["ControllerRevision", old]["data"] == template
    assert len(running.engines(ready=True)) == 2


def test_an_old_revision_without_its_labels_is_still_deleted(running: Cluster) -> None:
    (old,) = running.deployments()
    running.update_spec(engine={"policy": "sarathi"})
    running.reconcile(ready=0)
    running.reconcile(ready=0)
    running.edit("Deployment", old, lambda d: d["metadata"].update(labels={"x": "y"}))
    running.settle()
    assert ("Deployment", old) not in running.objects
    assert list(running.deployments().values()) == [2]


def test_a_deployment_without_a_revision_is_deleted_once_the_new_one_serves(
    running: Cluster,
) -> None:
    (old,) = running.deployments()
    running.update_spec(engine={"policy": "sarathi"})
    running.reconcile(ready=0)
    running.reconcile(ready=0)
    running.remove("ControllerRevision", old)
    for _ in range(20):
        running.reconcile()
        assert len(running.engines(ready=True)) >= 2
    running.settle()
    assert old not in running.deployments()
    assert list(running.deployments().values()) == [2]


def test_a_first_revision_that_is_broken_is_replaced_at_once(cluster: Cluster) -> None:
    cluster.reconcile()
    cluster.broken = {cluster.status["updateRevision"]}
    for _ in range(4):
        cluster.reconcile()
    cluster.update_spec(engine={"policy": "sarathi"})
    cluster.settle()
    assert list(cluster.deployments().values()) == [2]
    assert cluster.condition("Ready") == ("True", "Serving")


def test_only_a_few_unused_revisions_are_kept(running: Cluster) -> None:
    for waiting in range(1, 10):
        running.update_spec(engine={"maxWaiting": waiting})
        running.settle()
    kept = [n for k, n in running.objects if k == "ControllerRevision" and "router" not in n]
    assert len(kept) == 6
    assert running.status["currentRevision"] in kept


def test_scale_to_zero_and_back(running: Cluster) -> None:
    running.update_spec(replicas=0)
    running.settle()
    assert running.condition("Ready") == ("True", "ScaledToZero")
    assert not running.engines()
    running.update_spec(replicas=3)
    running.settle()
    assert len(running.engines(ready=True)) == 3


def test_a_suspended_service_runs_nothing_and_keeps_the_rest(running: Cluster) -> None:
    objects = set(running.objects)
    running.update_spec(suspend=True)
    running.settle()
    assert not running.pods
    assert set(running.objects) == objects
    assert running.condition("Ready") == ("False", "Suspended")
    assert running.condition("Reconciling") == ("False", "Settled")
    running.update_spec(suspend=None)
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
def test_enough_serving_engines_are_kept_in_any_state(
    replicas: int,
    update: tuple[int, int, int],
    others: list[tuple[int, int, int]],
    has_stable: bool,
) -> None:
    def workload(name: str, counts: tuple[int, int, int]) -> Workload:
        desired, pods, available = counts
        serving = min(available, pods)
        return Workload(
            name=name,
            uid=name,
            revision=name,
            desired=desired,
            pods=pods,
            ready=serving,
            available=serving,
            current=True,
            conditions={},
        )

    workloads = [workload("new", update), *(workload(f"old{i}", o) for i, o in enumerate(others))]
    stable = "old0" if has_stable and others else None
    counts = distribute(replicas, update="new", stable=stable, current=workloads)
    assert set(counts) == {p.revision for p in workloads}
    assert min(counts.values()) >= 0
    assert counts["new"] <= replicas
    serving = min(counts["new"], workloads[0].available) + sum(
        min(p.available, counts[p.revision]) for p in workloads[1:]
    )
    available = sum(min(p.available, p.desired) for p in workloads)
    assert serving >= min(replicas, available), "serving engines that are needed are kept"
    if stable:
        kept = sum(count for name, count in counts.items() if name != "new")
        serves = min(workloads[0].available, workloads[0].desired)
        assert kept >= replicas - serves, "the stable revision replaces missing engines"
