"""Engines of a gate on unlike nodes are not compared, unless the change asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.operator.reconcile.gates import (
    FAIL,
    PASS,
    RETRY,
    change,
    gate_of,
    judge,
    trials,
    until_job,
)

if TYPE_CHECKING:
    from tests.operator.reconcile.conftest import Cluster


def node(name: str, kind: str, *, cpu: str = "16") -> dict[str, Any]:
    labels = {"kubernetes.io/hostname": name, "node.kubernetes.io/instance-type": kind}
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "status": {"allocatable": {"cpu": cpu, "memory": "64Gi"}},
    }


SMALL, LARGE = node("node-1", "small"), node("node-2", "large")
SLOWER = "node.kubernetes.io/instance-type: large and small"


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (LARGE, SLOWER),
        (node("node-2", "small", cpu="8"), "allocatable cpu: 8 and 16"),
    ],
    ids=["another type", "fewer CPUs"],
)
def test_a_pair_on_unlike_nodes_is_not_compared(
    gated: Cluster, other: dict[str, Any], difference: str
) -> None:
    (stable,) = gated.deployments()
    gated.nodes, gated.node_of = [SMALL, other], {"candidate": "node-2"}
    change(gated)
    gated.settle()
    assert not [key for key in gated.written if key[0] == "Job"], "no request is sent"
    assert gated.condition("RolloutPaused") == ("True", "UnequalNodes")
    nodes = "the candidate ran on node node-2 and the baseline on node node-1, which differ"
    assert f"{nodes} ({difference})" in gated.message("RolloutPaused")
    assert gated.deployments() == {stable: 2}
    assert trials(gated) == {"baseline": {}, "candidate": {}}
    assert "verdict" not in gate_of(gated)
    assert "failedRevision" not in gated.status
    assert [emit.reason for emit in gated.rollout] == ["GateStarted", "GatePaused"]
    gated.node_of = {}
    gated.annotations = {RETRY: "1"}
    until_job(gated)
    gated.end_job(PASS)
    gated.settle()
    assert gate_of(gated)["message"] == "PASS of a."


def test_nodes_that_become_unlike_during_a_comparison_void_its_verdict(gated: Cluster) -> None:
    gated.nodes, gated.node_of = [SMALL, node("node-2", "small")], {"candidate": "node-2"}
    change(gated)
    until_job(gated)
    gated.nodes[1] = LARGE
    gated.end_job(FAIL)
    gated.settle()
    assert gated.condition("RolloutPaused") == ("True", "UnequalNodes")
    assert "failedRevision" not in gated.status


@pytest.mark.parametrize("cpu", ["16", "15500m"])
def test_a_pair_on_alike_nodes_is_compared_without_a_word(gated: Cluster, cpu: str) -> None:
    gated.nodes = [SMALL, node("node-2", "small", cpu=cpu)]
    gated.node_of = {"candidate": "node-2"}
    judge(gated, PASS)
    assert gate_of(gated)["message"] == "PASS of a."


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ({"pod": {"nodeSelector": {"pool": "large"}}}, "the revisions ask for different nodes"),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "the revisions ask for different nodes"),
    ],
    ids=["nodes", "resources"],
)
def test_nodes_that_differ_by_the_change_are_a_part_of_the_verdict(
    gated: Cluster, engine: dict[str, Any], sentence: str
) -> None:
    gated.nodes, gated.node_of = [SMALL, LARGE], {"candidate": "node-2"}
    gated.update_spec(engine={"policy": "sarathi", **engine})
    until_job(gated)
    gated.end_job(FAIL)
    gated.settle()
    assert gate_of(gated)["verdict"] == "FAIL"
    assert gate_of(gated)["message"].startswith("FAIL of a; the candidate ran on node node-2 and ")
    assert f"({SLOWER}); {sentence}" in gate_of(gated)["message"]


def test_nodes_that_the_operator_cannot_read_are_named_in_the_verdict(gated: Cluster) -> None:
    gated.nodes, gated.node_of = [SMALL], {"candidate": "node-2"}
    judge(gated, PASS)
    assert gate_of(gated)["verdict"] == "PASS"
    words = "the candidate ran on node node-2 and the baseline on node node-1, which the operator"
    assert f"PASS of a; {words} cannot read" in gate_of(gated)["message"]
