"""While no operator runs: what is killed returns with its last limits, and deleting never waits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.e2e.operator.killing import kill_pod, kill_process
from tools.cluster.handle import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.operator.installed import Installed

    Until = Callable[..., Any]

INITIAL = 2048
# Nobody could keep this TPOT, and anybody this TTFT: the law lowers the token budget.
SLO = {"classes": [{"name": "only", "ttftMs": 60000, "tpotMs": 1, "objective": "99%"}]}
BUDGET = {"min": 256, "max": 8192, "initial": INITIAL, "law": "fixed"}
OF_SERVICE = ("-l", "goodput.dev/llmservice=orphan")


@pytest.fixture(scope="module")
def limits(installed: Installed, until: Until) -> Iterator[dict[str, int]]:
    """The last limits of a service, which are not its first ones; and then no operator runs."""
    installed.apply(
        "orphan",
        engine={"policy": "sarathi", "tokenBudget": BUDGET},
        replicas=1,
        slo=SLO,
        control={"mode": "Auto", "intervalSeconds": 1},
    )
    installed.settled("orphan")

    def lowered() -> bool:
        installed.answering("orphan", 30, 20).ends()
        return int(installed.status("orphan")["tokenBudget"]) < INITIAL

    until(lowered, "the law has lowered the token budget")
    installed.scale_operator(0)
    try:
        kept: dict[str, int] = json.loads(
            installed.get("configmap", "orphan-config")["data"]["limits.json"]
        )
        assert kept["token_budget"] < INITIAL
        yield kept
    finally:
        installed.scale_operator(1)
        installed.kubectl("delete", "llmservice", "orphan", "--ignore-not-found")


def state_of(installed: Installed, part: str) -> dict[str, Any]:
    """What the one ready pod of a part says of itself; empty where there is none yet."""
    [pod] = installed.pods("orphan", part) or [{"status": {}}]
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", ())}
    if conditions.get("Ready") != "True":
        return {}
    try:
        return installed.state(pod["metadata"]["name"])
    except ClusterError:  # it has just ended
        return {}


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_process, kill_pod], ids=["process", "pod"])
def test_what_is_killed_while_no_operator_runs_returns_with_its_last_limits(
    installed: Installed,
    limits: dict[str, int],
    kill: Callable[[Installed, str], None],
    until: Until,
    request: pytest.FixtureRequest,
) -> None:
    if kill is kill_process:
        request.getfixturevalue("own_cluster")
    epochs = {part: state_of(installed, part)["epoch"] for part in ("engine", "router")}
    for part in epochs:
        [pod] = installed.pods("orphan", part)
        kill(installed, pod["metadata"]["name"])

    def returned() -> bool:
        now = {part: state_of(installed, part).get("epoch") for part in epochs}
        return all(now[part] not in {None, epochs[part]} for part in epochs)

    until(returned, "another engine and another router")
    engine = state_of(installed, "engine")
    assert engine["limits_revision"] == limits["revision"]
    assert engine["token_budget"] == limits["token_budget"]
    until(lambda: installed.answering("orphan", 4, 10).ends() == ["done"] * 4, "it is routed to")


@pytest.mark.slow
def test_a_service_that_is_deleted_while_no_operator_runs_takes_everything_along(
    installed: Installed, limits: dict[str, int], until: Until
) -> None:
    answers = installed.answering("orphan", 2, 200)
    metadata = installed.get("llmservice", "orphan", "--show-managed-fields")["metadata"]
    assert not {"finalizers", "annotations", "labels"} & set(metadata), "a user's object, unmarked"
    managers = [(one["manager"], one.get("subresource")) for one in metadata["managedFields"]]
    assert sorted(managers) == [("a-user", None), ("goodput-operator", "status")]
    installed.kubectl("delete", "llmservice", "orphan", "--timeout=10s")
    kinds = (
        "deployments,replicasets,pods,services,endpointslices,configmaps,secrets,serviceaccounts,"
        "poddisruptionbudgets,roles,rolebindings,controllerrevisions"
    )
    until(lambda: not installed.get(kinds, *OF_SERVICE)["items"], "nothing is left of it")
    assert answers.ends() == ["done", "done"], "what ran was let finish"
