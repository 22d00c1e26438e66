"""Gated rollouts in the cluster: changes that pass and fail, setups that cannot give a verdict.

The engines run on emulated devices whose profiles come from a ConfigMap, and the pods of the gates
replay a trace from a claim.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.builders.traces import trace_row, write_rows
from tools.cluster.handle import wait_for
from tools.cluster.starting import ROOT
from tools.e2e.clients import replay_load
from tools.e2e.installation import OPERATOR_PODS, conditions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tools.cluster.handle import OwnCluster
    from tools.e2e.installation import ChartRelease

WINDOW_S = 22
"""A PASS needs requests in twenty seconds."""
PER_S = 10
PROFILES = {"fast": {"c0_ms": 20}, "slow": {"c0_ms": 250}, "narrow": {"max_model_tokens": 2048}}
"""Device profiles: the slow one misses the TPOT target, and the narrow one rejects a request in
fifty, whose prompt is too long for it."""
ENDS = {"RolledOut", "Failed", "Paused"}
SLO = {
    "classes": [
        {"name": "interactive", "ttftMs": 8000, "tpotMs": 120, "objective": "80%"},
    ]
}
GATE = {
    "trace": "pvc://gates/trace.parquet",
    "window": {"startSeconds": 0, "endSeconds": WINDOW_S},
    "records": "pvc://gates/runs",
    "pairs": 2,
    "margin": "5%",
    "resources": {"requests": {"cpu": "10m"}},
}


@pytest.fixture(scope="module")
def storage(
    installation: ChartRelease, own_cluster: OwnCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A folder with the trace, which the claim `gates` keeps; and the profiles of the devices."""
    folder = tmp_path_factory.mktemp("gates")
    folder.chmod(0o777)
    rows = (
        trace_row(
            number,
            at_s=number / PER_S,
            input_tokens=3000 if number % 50 == 49 else 64,
            output_tokens=8,
        )
        for number in range(PER_S * WINDOW_S)
    )
    write_rows(folder / "trace.parquet", rows)
    name = f"{installation.namespace}-gates"
    shape = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    size = {"storage": "1Gi"}
    slow = yaml.safe_load((ROOT / "examples" / "slow-device.yaml").read_text(encoding="utf-8"))
    slow["numbers"]["c1_us_per_token"]["value"] = 1
    profiles = {}
    for profile, numbers in PROFILES.items():
        changed = {"c0_ms": 20, **numbers}
        values = {**slow["numbers"]}
        for number, value in changed.items():
            values[number] = {"value": value, "from": "chosen"}
        profiles[f"{profile}.yaml"] = yaml.safe_dump({**slow, "name": profile, "numbers": values})
    for kind, metadata, body in (
        (
            "PersistentVolume",
            {"name": name},
            {"spec": {"capacity": size, "hostPath": {"path": str(folder)}, **shape}},
        ),
        (
            "PersistentVolumeClaim",
            {"name": "gates", "namespace": installation.namespace},
            {"spec": {"resources": {"requests": size}, "volumeName": name, **shape}},
        ),
        (
            "ConfigMap",
            {"name": "devices", "namespace": installation.namespace},
            {"data": profiles},
        ),
    ):
        own_cluster.apply({"apiVersion": "v1", "kind": kind, "metadata": metadata, **body})
    yield folder
    own_cluster.kubectl("delete", "persistentvolume", name, "--wait=false")


@pytest.fixture
def gated(installation: ChartRelease, storage: Path) -> Iterator[Callable[..., None]]:
    """Apply services with a gate, wait until they have settled, and delete them afterwards."""
    names: list[str] = []

    def apply(*services: str, **gate: Any) -> None:
        names.extend(services)
        for name in services:
            installation.apply(
                name,
                model={"source": "emulated:///devices/fast.yaml"},
                engine=engine(),
                replicas=1,
                slo=SLO,
                rollout={"gate": {**GATE, **gate}},
            )
        for name in services:
            installation.wait_settled(name)

    yield apply
    for name in names:
        installation.kubectl("delete", "llmservice", name, "--ignore-not-found")
    installation.wait_deleted(*names)


def engine(**fields: Any) -> dict[str, Any]:
    """Return the engine of a service, with the profiles of the ConfigMap."""
    return {
        "policy": "sarathi",
        "pod": {
            "volumes": [{"name": "devices", "configMap": {"name": "devices"}}],
            "volumeMounts": [{"name": "devices", "mountPath": "/devices"}],
        },
        **fields,
    }


def gate_of(installation: ChartRelease, name: str) -> dict[str, Any]:
    gate: dict[str, Any] = installation.status(name).get("gate", {})
    return gate


def wait_phase(
    installation: ChartRelease, name: str, *phases: str, timeout_s: int = 60
) -> dict[str, Any]:
    """Wait until the gate has one of these phases, and return it."""
    wait_for(
        lambda: gate_of(installation, name).get("phase") in phases,
        f"the gate of {name} is {' or '.join(phases)}",
        timeout_s,
    )
    return gate_of(installation, name)


def trial_pods(installation: ChartRelease, name: str) -> list[str]:
    """Return the pods of candidate and baseline."""
    labels = f"goodput.dev/llmservice={name},goodput.dev/role in (baseline,candidate)"
    return [pod["metadata"]["name"] for pod in installation.get("pods", "-l", labels)["items"]]


def step_of(installation: ChartRelease, name: str) -> str:
    """Return the phase of the gate, and that of the rollout after it."""
    status = installation.status(name)
    phase: str = status.get("gate", {}).get("phase", "")
    if phase != "Passed":
        return phase
    return "RolledOut" if status["currentRevision"] == status["updateRevision"] else "RollingOut"


def kill_operator_in_each_step(
    installation: ChartRelease, name: str, tell: Callable[[str], None]
) -> set[str]:
    """Kill the operator once in each step of a rollout, and return the steps."""
    [pod] = installation.get(*OPERATOR_PODS)["items"]
    killed: set[str] = set()

    def follow() -> bool:
        step = step_of(installation, name)
        if step and step not in {*killed, *ENDS}:
            installation.kill_process(pod["metadata"]["name"])
            killed.add(step)
            tell(f"killed the operator in {step}\n{installation.kubectl('get', 'llmsvc')}")
        return step in ENDS

    wait_for(follow, f"the rollout of {name} ends", timeout_s=360)
    return killed


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_good_change_serves_and_a_slow_one_does_not_although_the_operator_is_killed(
    installation: ChartRelease,
    gated: Callable[..., None],
    storage: Path,
    tell: Callable[[str], None],
    tmp_path: Path,
) -> None:
    gated("good", "late")
    stable = installation.status("late")["currentRevision"]
    with replay_load(installation, "good", tmp_path, lengths=(64, 8)):
        installation.patch("good", engine={"policy": "orca"})
        installation.patch("late", model={"source": "emulated:///devices/slow.yaml"})
        killed = kill_operator_in_each_step(installation, "good", tell)
        passed = gate_of(installation, "good")
        tell(f"{passed['phase']}: {passed['message']}")
        assert (passed["phase"], passed["verdict"]) == ("Passed", "PASS"), passed
        installation.wait_settled("good")
    assert killed >= {"Starting", "Replaying", "RollingOut"}, "kills in every step"
    assert killed <= {"Starting", "Replaying", "Waiting", "RollingOut"}
    assert installation.status("good")["currentRevision"] == passed["revision"]
    wait_for(lambda: not trial_pods(installation, "good"), "the pair is gone")
    assert (storage / "runs").is_dir(), "the recorded runs are kept"
    failed = wait_phase(installation, "late", "Passed", "Failed", "Paused", timeout_s=200)
    tell(f"{failed['phase']}: {failed['message']} {failed['interval']}")
    assert (failed["phase"], failed["verdict"]) == ("Failed", "FAIL"), failed
    status = installation.status("late")
    assert (status["currentRevision"], status["failedRevision"]) == (stable, failed["revision"])
    conditions = conditions_of(installation.get("llmservice", "late"))
    assert (conditions["Ready"], conditions["RolloutPaused"]) == ("True", "True")
    table = installation.kubectl("get", "llmsvc", "late")
    assert "Failed 2/2 FAIL" in table
    tell(table)
    events = installation.get("events", "--field-selector", "involvedObject.name=late")["items"]
    gates = {event["reason"]: event["message"] for event in events}
    assert gates.keys() >= {"GateStarted", "GateFailed"}
    tell(gates["GateFailed"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_setups_without_a_verdict_never_fail_a_change(
    installation: ChartRelease,
    gated: Callable[..., None],
    tell: Callable[[str], None],
) -> None:
    gated("traceless", "returned", trace="pvc://gates/absent.parquet")
    stable = installation.status("returned")["currentRevision"]
    for name in ("traceless", "returned"):
        installation.patch(name, engine={"policy": "orca"})
    wait_phase(installation, "returned", "Starting", "Replaying", "Waiting")
    wait_for(lambda: trial_pods(installation, "returned"), "the pair of the gate exists")
    installation.patch("returned", engine={"policy": "sarathi"})
    wait_for(lambda: not trial_pods(installation, "returned"), "the gate is removed")
    installation.wait_settled("returned")
    assert installation.status("returned")["currentRevision"] == stable
    assert not gate_of(installation, "returned")

    paused = wait_phase(installation, "traceless", "Paused", timeout_s=150)
    tell(paused["message"])
    assert "/var/lib/goodput/claims/gates/absent.parquet: no such file" in paused["message"]
    assert installation.condition("traceless", "RolloutPaused")[0] == "GateInvalid"
    assert "failedRevision" not in installation.status("traceless")
    wait_for(lambda: not trial_pods(installation, "traceless"), "the pair is gone")

    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "no-pair"},
        "spec": {"hard": {"pods": str(len(installation.get("pods")["items"]))}},
    }
    installation.kubectl("create", "-f", "-", stdin=json.dumps(quota))
    try:
        installation.patch("returned", engine={"policy": "vllm"})
        wait_for(
            lambda: (
                installation.condition("returned", "RolloutPaused")[0] == "InsufficientCapacity"
            ),
            "a rollout without room",
        )
        message = installation.condition("returned", "RolloutPaused")[1]
        tell(message)
        assert "exceeded quota: no-pair" in message
    finally:
        installation.kubectl("delete", "resourcequota", "no-pair")
