"""An operator that is killed in the middle of its work: whoever asks the service notices nothing.

A kill is SIGKILL to the process; the kubelet starts the container again in its pod. Where a kill
hit is read from the log that the dead process left.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.e2e.operator.loading import under_load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.operator.installed import Installed

pytestmark = pytest.mark.usefixtures("own_cluster")

KILLS = 20
TAIL = 8192
PHASES = ("observe", "decide", "apply", "done")
BUDGETS = (1024, 1088, 1152, 1216, 1280)
REPLICAS = (2, 1, 2, 1, 2)
POLICIES = ("slo", "sarathi", "slo", "sarathi", "slo")
KEPT = ["engine", "engine", "router"]
"""Roles of the revisions that are kept: the policies that engines had, and one of the routers."""
PDB = "poddisruptionbudget/chat-engines"
CHILDREN = (
    "deployments,controllerrevisions,services,configmaps,serviceaccounts,"
    "poddisruptionbudgets,roles,rolebindings"
)


class Victim:
    """The one pod of the operator, as its node has it: its process, and what that has logged."""

    def __init__(self, installed: Installed) -> None:
        self._installed, self._cluster = installed, installed.own
        [pod] = installed.get("pods", "-l", "app.kubernetes.io/name=goodput-operator")["items"]
        self.name: str = pod["metadata"]["name"]
        node, uid = pod["spec"]["nodeName"], pod["metadata"]["uid"]
        logs = self._cluster.layout.state / node / "logs"
        self._logs = logs / f"{installed.namespace}_{self.name}_{uid}" / "operator"

    def restarts(self) -> int:
        pod = self._installed.get("pod", self.name)
        count: int = pod["status"]["containerStatuses"][0]["restartCount"]
        return count

    def kill_in(self, wanted: str, until: Callable[..., Any]) -> str:
        """Kill it when it is in a phase; the phase that the kill hit."""
        [process] = until(lambda: self._cluster.processes_of(self.name), "the operator runs")
        # The log of each container of the pod has the number of its restart.
        log = max(self._logs.glob("*.log"), key=lambda path: int(path.stem))
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline, f"no turn was seen in {wanted}"
            if phase_in(log) != wanted:
                time.sleep(0.0005)  # a decision takes a few milliseconds
                continue
            # Held still, it can be asked whether it is there yet.
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.02)  # what it wrote before is on its way through the kubelet
            if phase_in(log) == wanted:
                break
            process.send_signal(signal.SIGCONT)
        process.kill()
        psutil.wait_procs([process], timeout=10)
        return str(phase_in(log))


def phase_in(log: Path) -> str | None:
    """The last phase that an operator has logged."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        if '"phase"' in line and line.endswith("}"):
            phase: str = json.loads(line[line.index("{") :])["phase"]
            return phase
    return None


def change(installed: Installed, number: int) -> str:
    """Give the operator something to do, so that each phase meets each kind; what it was."""
    times = number // len(PHASES)
    kind = (number + times) % 4

    def patch(spec: dict[str, Any]) -> None:
        words = ("patch", "llmservice/chat", "--type=merge", "-p", json.dumps({"spec": spec}))
        installed.kubectl(*words)

    if kind == 0:
        patch({"engine": {"tokenBudget": {"initial": BUDGETS[times]}}})
        return "token budget"
    if kind == 1:
        patch({"replicas": REPLICAS[times]})
        return "replicas"
    if kind == 2:
        patch({"engine": {"policy": POLICIES[times]}})
        return "revision"
    installed.kubectl("delete", PDB, "--ignore-not-found")
    return "PodDisruptionBudget deleted"


def as_it_should_be(installed: Installed) -> bool:
    """Whether the service has what the last changes ask for, each object once, and no other."""
    service = installed.get("llmservice", "chat")
    status, uid = service["status"], service["metadata"]["uid"]
    wanted = [
        *((kind, "chat-router") for kind in ("ServiceAccount", "Role", "RoleBinding")),
        *(("PodDisruptionBudget", name) for name in ("chat-router", "chat-engines")),
        *(("Service", name) for name in ("chat", "chat-engines")),
        *(("Deployment", name) for name in ("chat-router", status["currentRevision"])),
        ("ConfigMap", "chat-config"),
    ]
    found = installed.get(CHILDREN, "-l", "goodput.dev/llmservice=chat")["items"]
    assert all(one["metadata"]["ownerReferences"][0]["uid"] == uid for one in found)
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    revisions = [one["metadata"] for one in found if one["kind"] == "ControllerRevision"]
    [limits] = [one["data"]["limits.json"] for one in found if one["kind"] == "ConfigMap"]
    engines, routers = installed.pods("chat", "engine"), installed.pods("chat", "router")
    ready = {c["type"]: c["status"] for c in status["conditions"]}
    return (
        status["observedGeneration"] == service["metadata"]["generation"]
        and (ready["Ready"], ready["Reconciling"]) == ("True", "False")
        and sorted(name for name in names if name[0] != "ControllerRevision") == sorted(wanted)
        and sorted(one["labels"]["goodput.dev/role"] for one in revisions) == KEPT
        and json.loads(limits)["token_budget"] == status["tokenBudget"] == BUDGETS[-1]
        and (len(engines), len(routers), status["readyReplicas"]) == (REPLICAS[-1], 1, REPLICAS[-1])
    )


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_an_operator_killed_twenty_times_costs_no_request_and_leaves_all_as_it_should_be(
    installed: Installed,
    serve: Callable[..., None],
    until: Callable[..., Any],
    tell: Callable[[str], None],
    tmp_path: Path,
) -> None:
    serve("chat", replicas=1, control={"mode": "Manual", "intervalSeconds": 1})
    victim = Victim(installed)
    before = victim.restarts()
    transitions = installed.get("lease", "goodput")["spec"]["leaseTransitions"]
    hits = Counter[str]()
    with under_load(installed, "chat", tmp_path, until):
        for number in range(KILLS):
            what = change(installed, number)
            hit = victim.kill_in(PHASES[number % 4], until)
            tell(f"kill {number + 1} hit {hit}, after a change: {what}")
            hits[hit] += 1
        until(lambda: victim.restarts() >= before + KILLS, "it is back")
        until(lambda: as_it_should_be(installed), "everything is as it should be", timeout_s=90)
    assert set(hits) == set(PHASES), "every phase was hit"
    assert victim.restarts() == before + KILLS, "nothing else ended it"
    lease = installed.get("lease", "goodput")["spec"]
    assert lease["leaseTransitions"] == transitions, "it went on under its own Lease"
    for pod in (*installed.pods("chat", "engine"), *installed.pods("chat", "router")):
        assert [one["restartCount"] for one in pod["status"]["containerStatuses"]] == [0]
