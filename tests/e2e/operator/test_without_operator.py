"""Without an operator, killed pods return with their last limits, and deletion works."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tools.cluster.handle import ClusterError, wait_for
from tools.e2e.installation import ChartRelease, conditions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INITIAL = 2048
# No engine can meet this TPOT target, and any engine meets this TTFT target: the law lowers the
# token budget.
SLO = {"classes": [{"name": "only", "ttftMs": 60000, "tpotMs": 1, "objective": "99%"}]}
BUDGET = {"min": 256, "max": 8192, "initial": INITIAL, "law": "fixed"}


@pytest.fixture(scope="module")
def limits(installation: ChartRelease) -> Iterator[dict[str, int]]:
    """The last limits of a service, which differ from its first ones; then no operator runs."""
    installation.apply(
        "orphan",
        engine={"policy": "sarathi", "tokenBudget": BUDGET},
        replicas=1,
        slo=SLO,
        control={"mode": "Auto", "intervalSeconds": 1},
    )
    installation.wait_settled("orphan")

    def lowered() -> bool:
        installation.run_streams("orphan", 30, 20)
        return int(installation.status("orphan")["tokenBudget"]) < INITIAL

    wait_for(lowered, "the law has lowered the token budget")
    installation.scale_operator(0)
    try:
        limits: dict[str, int] = json.loads(
            installation.get("configmap", "orphan-config")["data"]["limits.json"]
        )
        assert limits["token_budget"] < INITIAL
        yield limits
    finally:
        installation.scale_operator(1)
        installation.kubectl("delete", "llmservice", "orphan", "--ignore-not-found")


def ready_state(installation: ChartRelease, component: str) -> dict[str, Any]:
    """Return `/control/state` of a component's ready pod; empty if no pod is ready."""
    pods = installation.pods("orphan", component)
    if len(pods) != 1 or conditions_of(pods[0]).get("Ready") != "True":
        return {}
    try:
        return installation.state(pods[0]["metadata"]["name"])
    except ClusterError:  # the pod has just ended
        return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kill", [ChartRelease.kill_process, ChartRelease.kill_pod], ids=["process", "pod"]
)
def test_killed_pods_return_with_the_last_limits_without_an_operator(
    installation: ChartRelease,
    limits: dict[str, int],
    kill: Callable[[ChartRelease, str], None],
    request: pytest.FixtureRequest,
) -> None:
    if kill is ChartRelease.kill_process:
        request.getfixturevalue("own_cluster")
    epochs = {part: ready_state(installation, part)["epoch"] for part in ("engine", "router")}
    for part in epochs:
        [pod] = installation.pods("orphan", part)
        kill(installation, pod["metadata"]["name"])

    def restarted() -> bool:
        now = {part: ready_state(installation, part).get("epoch") for part in epochs}
        return all(now[part] not in {None, epochs[part]} for part in epochs)

    wait_for(restarted, "another start of the engine and of the router")
    engine = ready_state(installation, "engine")
    assert engine["limits_revision"] == limits["revision"]
    assert engine["token_budget"] == limits["token_budget"]
    wait_for(
        lambda: installation.run_streams("orphan", 4, 10) == ["done"] * 4,
        "the router uses the engine",
    )


@pytest.mark.slow
def test_a_service_deleted_without_an_operator_leaves_no_object(
    installation: ChartRelease, limits: dict[str, int]
) -> None:
    streams = installation.start_streams("orphan", 2, 200)
    metadata = installation.get("llmservice", "orphan", "--show-managed-fields")["metadata"]
    assert not {"finalizers", "annotations", "labels"} & set(metadata), "no mark of the operator"
    managers = [(one["manager"], one.get("subresource")) for one in metadata["managedFields"]]
    assert sorted(managers) == [("a-user", None), ("goodput-operator", "status")]
    installation.kubectl("delete", "llmservice", "orphan", "--timeout=10s")
    kinds = (
        "deployments,replicasets,pods,services,endpointslices,configmaps,secrets,serviceaccounts,"
        "poddisruptionbudgets,roles,rolebindings,controllerrevisions"
    )
    of_service = ("-l", "goodput.dev/llmservice=orphan")
    wait_for(lambda: not installation.get(kinds, *of_service)["items"], "no object is left")
    assert streams.outcomes() == ["done", "done"], "running requests finish"
