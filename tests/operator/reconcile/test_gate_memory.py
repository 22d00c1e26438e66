"""A gate survives lost objects, and its verdict counts for one rollout."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
from tests.operator.reconcile.gates import (
    FAIL,
    GATE,
    INCONCLUSIVE,
    PASS,
    change,
    gate_of,
    judge,
    trials,
    until_job,
)

if TYPE_CHECKING:
    from tests.operator.reconcile.conftest import Cluster


def lose_engines(cluster: Cluster, stable: str) -> None:
    """Make the engines of the stable revision unavailable."""
    for engine in cluster.engines():
        engine["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    if body := cluster.objects.get(("Deployment", stable)):
        body["status"] |= {"availableReplicas": 0, "readyReplicas": 0}


def lose(cluster: Cluster, lost: str) -> None:
    """Remove what names the stable revision, and make its engines unavailable."""
    stable = cluster.status["currentRevision"]
    lose_engines(cluster, stable)
    if "status" in lost:
        cluster.status = {}
    for kind in ("Deployment", "ControllerRevision"):
        if kind in lost:
            cluster.remove(kind, stable)
    cluster.restart_operator()


@pytest.mark.parametrize(
    "lost",
    [
        "Deployment",
        "ControllerRevision",
        "status",
        "Deployment, status",
        "ControllerRevision, status",
        "Deployment, ControllerRevision",
        "Deployment, ControllerRevision, status",
    ],
)
def test_a_failed_revision_does_not_serve_when_objects_of_the_stable_one_are_lost(
    gated: Cluster, lost: str
) -> None:
    judge(gated, FAIL)
    stable, failed = gated.status["currentRevision"], gated.status["failedRevision"]
    lose(gated, lost)
    for _ in range(12):
        gated.reconcile()
        assert failed not in gated.deployments()
    gated.settle()
    restored = "ControllerRevision" not in lost
    assert gated.status["currentRevision"] == stable
    assert gated.deployments() == ({} if "Deployment" in lost and not restored else {stable: 2})
    assert gate_of(gated)["phase"] == ("Failed" if restored else "Paused")
    reason = "GateFailed" if restored else "BaselineLost"
    assert gated.condition("RolloutPaused") == ("True", reason)


@pytest.mark.parametrize("message", [PASS, FAIL])
def test_a_deployment_deleted_during_a_gate_is_created_again(gated: Cluster, message: str) -> None:
    change(gated)
    job = until_job(gated)["metadata"]["name"]
    stable = gated.status["currentRevision"]
    lose(gated, "Deployment")
    for _ in range(8):
        gated.reconcile()
    assert gated.deployments() == {stable: 2}
    assert [one["metadata"]["name"] for one in gated.jobs()] == [job]
    gated.end_job(message)
    gated.settle()
    assert (gated.status["currentRevision"] == stable) == (message == FAIL)


def test_a_gate_without_its_baseline_is_left_by_the_old_spec(gated: Cluster) -> None:
    change(gated)
    until_job(gated)
    stable = gated.status["currentRevision"]
    gated.remove("ControllerRevision", stable)
    gated.settle()
    assert trials(gated) == {"baseline": {}, "candidate": {}}
    assert not gated.jobs()
    assert gated.deployments() == {stable: 2}, "the stable engines stay"
    assert "set the spec back to that of the stable revision" in gated.message("RolloutPaused")
    assert [event.reason for event in gated.events].count("GatePaused") == 1
    assert not gated.reconcile().actions, "nothing is written again"
    gated.update_spec(engine=None)
    gated.settle()
    assert ("ControllerRevision", stable) in gated.objects
    assert gated.condition("RolloutPaused") == ("False", "NotPaused")
    change(gated)
    until_job(gated)
    assert gate_of(gated)["attempt"] == 2, "another folder than that of the interrupted attempt"


def test_a_gate_without_its_baseline_is_left_by_removing_the_gate(gated: Cluster) -> None:
    judge(gated, FAIL)
    gated.remove("ControllerRevision", gated.status["currentRevision"])
    gated.settle()
    gated.update_spec(rollout=None)
    gated.settle()
    assert gated.deployments() == {gated.status["updateRevision"]: 2}


def test_a_verdict_is_found_again_when_the_baseline_is_restored(gated: Cluster) -> None:
    judge(gated, FAIL)
    place = ("ControllerRevision", gated.status["currentRevision"])
    kept = copy.deepcopy(gated.objects[place])
    gated.remove(*place)
    gated.settle()
    assert gated.condition("RolloutPaused") == ("True", "BaselineLost")
    gated.objects[place] = kept
    gated.settle()
    assert gated.condition("RolloutPaused") == ("True", "GateFailed")


def test_a_rollout_that_has_begun_is_finished_without_its_baseline(gated: Cluster) -> None:
    change(gated)
    until_job(gated)
    stable = gated.status["currentRevision"]
    gated.end_job(PASS)
    while len(gated.deployments()) < 2:
        gated.reconcile(ready=0)
    gated.remove("ControllerRevision", stable)
    gated.settle()
    assert gated.deployments() == {gated.status["updateRevision"]: 2}


@pytest.mark.parametrize("gate", [True, False], ids=["judged", "without a gate"])
def test_a_revision_that_returns_is_judged_again(gated: Cluster, gate: bool) -> None:
    (stable,) = gated.deployments()
    judge(gated, PASS)
    first = gate_of(gated)
    assert gated.deployments() == {first["revision"]: 2}
    if not gate:
        gated.update_spec(rollout=None)
    change(gated, "slo")
    if gate:
        until_job(gated)
        gated.end_job(PASS)
    gated.settle()
    assert gated.deployments() == {stable: 2}
    gated.update_spec(rollout={"gate": GATE})
    change(gated)
    until_job(gated)
    assert gate_of(gated)["revision"] == first["revision"]
    gated.restart_operator()
    gated.end_job(FAIL)
    gated.settle()
    assert gated.deployments() == {stable: 2}
    assert gate_of(gated)["report"] != first["report"], "another folder"


def test_an_undecided_revision_that_served_without_its_gate_is_judged_again(
    gated: Cluster,
) -> None:
    (stable,) = gated.deployments()
    judge(gated, INCONCLUSIVE)
    gated.update_spec(rollout=None)
    gated.settle()
    assert stable not in gated.deployments()
    gated.update_spec(engine=None)
    gated.settle()
    assert gated.deployments() == {stable: 2}
    gated.update_spec(rollout={"gate": {**GATE, "onInconclusive": "Promote"}})
    change(gated)
    until_job(gated)
    assert gated.deployments() == {stable: 2}


def test_a_rollout_that_was_given_up_does_not_keep_its_verdict(gated: Cluster) -> None:
    (stable,) = gated.deployments()
    change(gated)
    until_job(gated)
    gated.end_job(PASS)
    while len(gated.deployments()) < 2:
        gated.reconcile(ready=0)
    gated.reconcile(ready=0)
    gated.update_spec(engine=None)
    gated.settle()
    assert gated.deployments() == {stable: 2}
    change(gated)
    until_job(gated)
    assert gated.deployments() == {stable: 2}


def test_a_failed_revision_is_remembered_after_the_spec_was_set_back(gated: Cluster) -> None:
    (stable,) = gated.deployments()
    judge(gated, FAIL)
    gated.update_spec(engine=None)
    gated.settle()
    change(gated)
    gated.settle()
    assert gated.deployments() == {stable: 2}
    assert gate_of(gated)["phase"] == "Failed"
    assert [event.reason for event in gated.events].count("GateStarted") == 1


@pytest.mark.parametrize("by", ["another change", "the old spec", "a deleted Job"])
def test_an_interrupted_attempt_is_not_repeated_in_its_folder(gated: Cluster, by: str) -> None:
    change(gated)
    first = until_job(gated)
    if by == "another change":
        change(gated, "vllm")
        until_job(gated)
    elif by == "the old spec":
        gated.update_spec(engine=None)
        gated.settle()
    else:
        gated.reconcile()
        gated.remove("Job", first["metadata"]["name"])
    change(gated)
    second = until_job(gated)
    assert second["metadata"]["name"] == f"{first['metadata']['name'].removesuffix('1')}2"
    commands = [
        job["spec"]["template"]["spec"]["containers"][0]["command"] for job in (first, second)
    ]
    folders = [command[command.index("--out") + 1] for command in commands]
    assert folders[1] == f"{folders[0].removesuffix('-1')}-2"
    for _ in range(3):
        gated.reconcile()
    assert gate_of(gated)["attempt"] == 2
    gated.end_job(PASS)
    gated.settle()
    assert gated.status["currentRevision"] == gated.status["updateRevision"]


def test_the_stable_revision_is_kept_while_it_has_no_deployment(gated: Cluster) -> None:
    (stable,) = gated.deployments()
    gated.update_spec(rollout=None)
    for waiting in (*range(1, 6), None):
        gated.update_spec(engine=waiting and {"maxWaiting": waiting})
        gated.settle()
    assert gated.status["currentRevision"] == stable, "the oldest revision, which has returned"
    gated.update_spec(rollout={"gate": GATE})
    change(gated)
    until_job(gated)
    gated.end_job(PASS)
    while len(gated.deployments()) < 2:
        gated.reconcile(ready=0)
    gated.remove("Deployment", stable)
    for _ in range(5):
        gated.reconcile(ready=0)
    assert ("ControllerRevision", stable) in gated.objects
