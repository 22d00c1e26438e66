"""An operator that is killed during its work costs no request.

The test sends SIGKILL to the process, and the kubelet restarts the container in its pod. The log of
the dead process shows the phase in which it was killed.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING

import psutil
import pytest
from tools.cluster.handle import wait_for
from tools.e2e.clients import replay_load
from tools.e2e.installation import OPERATOR_PODS, conditions_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tools.e2e.installation import ChartRelease

pytestmark = pytest.mark.usefixtures("own_cluster")

KILLS = 20
TAIL_BYTES = 8192
PHASES = ("observe", "decide", "apply", "done")
BUDGETS = (1024, 1088, 1152, 1216, 1280)
REPLICAS = (2, 1, 2, 1, 2)
POLICIES = ("slo", "sarathi", "slo", "sarathi", "slo")
REVISION_ROLES = ["engine", "engine", "router"]
"""Roles of the revisions: one for each policy of the engines, and one of the routers."""
PDB = "poddisruptionbudget/chat-engines"
CHILDREN = (
    "deployments,controllerrevisions,services,configmaps,serviceaccounts,"
    "poddisruptionbudgets,roles,rolebindings"
)


class Victim:
    """The operator's pod on its node: its process and the log of its containers."""

    def __init__(self, installation: ChartRelease) -> None:
        self._installed, self._cluster = installation, installation.own
        [pod] = installation.get(*OPERATOR_PODS)["items"]
        self.name: str = pod["metadata"]["name"]
        node, uid = pod["spec"]["nodeName"], pod["metadata"]["uid"]
        logs = self._cluster.layout.state / node / "logs"
        self._logs = logs / f"{installation.namespace}_{self.name}_{uid}" / "operator"

    def restarts(self) -> int:
        pod = self._installed.get("pod", self.name)
        count: int = pod["status"]["containerStatuses"][0]["restartCount"]
        return count

    def kill_in(self, wanted: str) -> str:
        """Kill the process in a phase; return the phase in which it was killed."""
        [process] = wait_for(lambda: self._cluster.processes_of(self.name), "the operator runs")
        # The name of each log is the number of the restart.
        log = max(self._logs.glob("*.log"), key=lambda path: int(path.stem))
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline, f"no reconciliation was seen in the phase {wanted}"
            if phase_in(log) != wanted:
                time.sleep(0.0005)  # a decision takes a few milliseconds
                continue
            # While the process is suspended, its phase cannot change.
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.02)  # the kubelet writes the last lines to the log
            if phase_in(log) == wanted:
                break
            process.send_signal(signal.SIGCONT)
        process.kill()
        psutil.wait_procs([process], timeout=10)
        return str(phase_in(log))


def phase_in(log: Path) -> str | None:
    """Return the last phase in an operator's log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        if '"phase"' in line and line.endswith("}"):
            phase: str = json.loads(line[line.index("{") :])["phase"]
            return phase
    return None


def change(installation: ChartRelease, number: int) -> str:
    """Change the service so that each phase occurs with each kind of change; return the kind."""
    times = number // len(PHASES)
    kind = (number + times) % 4
    if kind == 0:
        installation.patch("chat", engine={"tokenBudget": {"initial": BUDGETS[times]}})
        return "token budget"
    if kind == 1:
        installation.patch("chat", replicas=REPLICAS[times])
        return "replicas"
    if kind == 2:
        installation.patch("chat", engine={"policy": POLICIES[times]})
        return "revision"
    installation.kubectl("delete", PDB, "--ignore-not-found")
    return "PodDisruptionBudget"


def has_desired_state(installation: ChartRelease) -> bool:
    """True if the service has the objects of the last changes, each once, and no others."""
    service = installation.get("llmservice", "chat")
    status, uid = service["status"], service["metadata"]["uid"]
    wanted = [
        *((kind, "chat-router") for kind in ("ServiceAccount", "Role", "RoleBinding")),
        *(("PodDisruptionBudget", name) for name in ("chat-router", "chat-engines")),
        *(("Service", name) for name in ("chat", "chat-engines")),
        *(("Deployment", name) for name in ("chat-router", status["currentRevision"])),
        ("ConfigMap", "chat-config"),
    ]
    found = installation.get(CHILDREN, "-l", "goodput.dev/llmservice=chat")["items"]
    assert all(one["metadata"]["ownerReferences"][0]["uid"] == uid for one in found)
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    revisions = [one["metadata"] for one in found if one["kind"] == "ControllerRevision"]
    [limits] = [one["data"]["limits.json"] for one in found if one["kind"] == "ConfigMap"]
    engines, routers = installation.pods("chat", "engine"), installation.pods("chat", "router")
    conditions = conditions_of(service)
    return (
        status["observedGeneration"] == service["metadata"]["generation"]
        and (conditions["Ready"], conditions["Reconciling"]) == ("True", "False")
        and sorted(name for name in names if name[0] != "ControllerRevision") == sorted(wanted)
        and sorted(one["labels"]["goodput.dev/role"] for one in revisions) == REVISION_ROLES
        and json.loads(limits)["token_budget"] == status["tokenBudget"] == BUDGETS[-1]
        and (len(engines), len(routers), status["readyReplicas"]) == (REPLICAS[-1], 1, REPLICAS[-1])
    )


@pytest.mark.slow
@pytest.mark.timeout(720)
def test_an_operator_killed_twenty_times_costs_no_request_and_reaches_the_desired_state(
    installation: ChartRelease,
    serve: Callable[..., None],
    tell: Callable[[str], None],
    tmp_path: Path,
) -> None:
    serve("chat", replicas=1, control={"mode": "Manual", "intervalSeconds": 1})
    victim = Victim(installation)
    before = victim.restarts()
    transitions = installation.get("lease", "goodput")["spec"]["leaseTransitions"]
    hits = Counter[str]()
    with replay_load(installation, "chat", tmp_path):
        for number in range(KILLS):
            kind = change(installation, number)
            hit = victim.kill_in(PHASES[number % 4])
            tell(f"kill {number + 1} in {hit}, after a change of the {kind}")
            hits[hit] += 1
        wait_for(lambda: victim.restarts() >= before + KILLS, "the operator has restarted")
        wait_for(lambda: has_desired_state(installation), "the desired state", timeout_s=180)
    assert set(hits) == set(PHASES), "kills in every phase"
    assert victim.restarts() == before + KILLS, "no other restart"
    lease = installation.get("lease", "goodput")["spec"]
    assert lease["leaseTransitions"] == transitions, "the same holder of the Lease"
    for pod in (*installation.pods("chat", "engine"), *installation.pods("chat", "router")):
        assert [one["restartCount"] for one in pod["status"]["containerStatuses"]] == [0]
