"""Gated rollouts in the cluster: changes that pass and fail, setups that cannot give a verdict.

The engines run on emulated devices whose profiles come from a ConfigMap, and the pods of the gates
replay a trace from a claim.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.builders.traces import trace_row, write_rows
from tools.cluster.handle import wait_for
from tools.cluster.starting import ROOT
from tools.e2e.clients import replay_load
from tools.e2e.installation import OPERATOR_PODS, conditions_of
from tools.e2e.recordings import judge, recordings
from tools.e2e.watching import ServingEngines, watching

from goodput_replay.runs.record_rows import read_judged

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tools.cluster.handle import OwnCluster
    from tools.e2e.installation import ChartRelease

WINDOW_S = 22
"""A PASS needs requests in twenty seconds."""
PER_S = 10
DENSE_PER_S = 15
PROFILES: dict[str, dict[str, float]] = {
    "fast": {"c0_ms": 20},
    "slow": {"c0_ms": 250},
    "alike": {"c0_ms": 20.2},
    "narrow": {"max_model_tokens": 2048},
}
"""Device profiles: `slow` misses the TPOT target, `alike` is 1% slower than `fast`, and `narrow`
rejects the prompt of a request in fifty as too long."""
ENDS = {"RolledOut", "Failed", "Paused"}
KILLS = 20
STEPS = {"Starting", "Replaying", "Waiting", "Suspended", "RollingOut", "Failed", "Paused"}
"""Phases of the gates and of the rollout after a PASS; the operator is killed in each of them."""
VICTIMS = {"good": ["candidate"], "late": ["baseline"], "hit": ["replay", "replay", "replay"]}
"""Roles of the pods that are lost in the attempts of each gate."""
SLO = {
    "classes": [
        {"name": "interactive", "ttftMs": 8000, "tpotMs": 120, "objective": "80%"},
    ]
}
APART = {
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {
        "matchLabels": {"goodput.dev/llmservice": "apart"},
        "matchExpressions": [
            {"key": "goodput.dev/role", "operator": "In", "values": ["candidate", "baseline"]}
        ],
    },
}
"""Keeps the engines of a gate on different nodes."""
TYPE = "node.kubernetes.io/instance-type"
GATE: dict[str, Any] = {
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
    for trace, per_s in (("trace", PER_S), ("dense", DENSE_PER_S)):
        rows = (
            trace_row(
                number,
                at_s=number / per_s,
                input_tokens=3000 if number % 50 == 49 else 64,
                output_tokens=8,
            )
            for number in range(per_s * WINDOW_S)
        )
        write_rows(folder / f"{trace}.parquet", rows)
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

    def apply(*services: str, pods: Mapping[str, Any] = MappingProxyType({}), **gate: Any) -> None:
        names.extend(services)
        for name in services:
            installation.apply(
                name,
                model={"source": "emulated:///devices/fast.yaml"},
                engine=engine(pod=engine()["pod"] | pods.get(name, {})),
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
    installation: ChartRelease, name: str, *phases: str, timeout_s: int = 120
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


def has_pair(installation: ChartRelease, name: str) -> bool:
    """Return whether the pods of candidate and baseline exist."""
    return len(trial_pods(installation, name)) == 2


def step_of(service: dict[str, Any]) -> str:
    """Return the phase of a gate, and that of the rollout after it; empty without a gate."""
    status = service.get("status", {})
    phase: str = status.get("gate", {}).get("phase", "")
    if phase != "Passed":
        return phase
    return "RolledOut" if status["currentRevision"] == status["updateRevision"] else "RollingOut"


class Rollouts:
    """Gated rollouts of several services, during which the operator and pods of gates are killed.

    Args:
        installation: the installation of the operator.
        tell: logs each kill.

    Attributes:
        steps: step of each service.
        kills: steps of the services at each kill of the operator.
        lost: service and attempt of each gate that lost a pod.
    """

    PAUSE_S = 6.0
    START_S = 3.0
    """Time in which a new process of the operator starts and reconciles."""

    def __init__(self, installation: ChartRelease, tell: Callable[[str], None]) -> None:
        self._installation, self._tell = installation, tell
        [pod] = installation.get(*OPERATOR_PODS)["items"]
        self._operator: str = pod["metadata"]["name"]
        self._begun = self._killed = time.monotonic()
        self.services: dict[str, dict[str, Any]] = {}
        self.kills: list[dict[str, str]] = []
        self.lost: list[tuple[str, int]] = []

    def on_event(self, _: str, service: dict[str, Any]) -> None:
        """Keep the latest state of a service."""
        self.services[service["metadata"]["name"]] = service

    @property
    def steps(self) -> dict[str, str]:
        """Step of each service."""
        return {name: step_of(self.services[name]) for name in VICTIMS}

    def visited(self) -> set[str]:
        """Return the steps in which the operator was killed."""
        return {step for steps in self.kills for step in steps.values() if step}

    def are_new(self, steps: dict[str, str]) -> bool:
        """Return whether a service is in a step in which it saw no kill of the operator."""
        return not steps.items() <= {pair for kill in self.kills for pair in kill.items()}

    def kill_operator(self) -> None:
        """Kill the operator in a step of a service that is new, or some seconds after the last."""
        steps, now = self.steps, time.monotonic()
        waited_s = now - self._killed
        if waited_s < (self.START_S if self.are_new(steps) else self.PAUSE_S):
            return
        if self._installation.own.processes_of(self._operator):
            self._installation.kill_process(self._operator)
            self.kills.append(steps)
            self._killed = now
            where = ", ".join(f"{name} {step or 'stable'}" for name, step in steps.items())
            self._tell(f"kill {len(self.kills)} after {now - self._begun:.0f} s: {where}")

    def kill_pods(self) -> None:
        """Delete the next victim of each gate that replays."""
        for name, step in self.steps.items():
            attempt = self.services[name]["status"].get("gate", {}).get("attempt", 1)
            victims = VICTIMS[name][[one for one, _ in self.lost].count(name) :]
            if step != "Replaying" or (name, attempt) in self.lost or not victims:
                continue
            labels = f"goodput.dev/llmservice={name},goodput.dev/role={victims[0]}"
            for pod in self._installation.get("pods", "-l", labels)["items"]:
                self._installation.kill_pod(pod["metadata"]["name"])
                self._tell(f"{victims[0]} of attempt {attempt} of {name} deleted")
                self.lost.append((name, attempt))

    def suspend(self) -> None:
        """Suspend `hit` when its gate starts, and resume it after a kill of the operator."""
        step = self.steps["hit"]
        suspended = self.services["hit"]["spec"].get("suspend", False)
        seen = "Suspended" in self.visited()
        if (step == "Starting" and not seen and not suspended) or (seen and suspended):
            self._installation.patch("hit", suspend=not seen)

    def follow(self) -> bool:
        """Disturb the rollouts; return True when all ended and the operator was killed then."""
        self.kill_operator()
        self.kill_pods()
        self.suspend()
        steps = self.steps
        ended = all(step in ENDS for step in steps.values()) and not self.are_new(steps)
        return ended and len(self.kills) >= KILLS


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_gates_decide_and_services_serve_although_operator_and_pods_of_gates_are_killed(
    installation: ChartRelease,
    gated: Callable[..., None],
    storage: Path,
    tell: Callable[[str], None],
    tmp_path: Path,
) -> None:
    gated(*VICTIMS)
    stable = {name: installation.status(name)["currentRevision"] for name in VICTIMS}
    rollouts, engines = Rollouts(installation, tell), ServingEngines()
    with (
        watching(installation, "pods", "-l", "goodput.dev/role=engine", on_event=engines.on_event),
        watching(installation, "llmservices", on_event=rollouts.on_event),
        replay_load(installation, "good", tmp_path, lengths=(64, 8)),
    ):
        wait_for(lambda: rollouts.services.keys() >= VICTIMS.keys(), "the services are watched")
        installation.patch("good", engine={"policy": "orca"})
        installation.patch("late", model={"source": "emulated:///devices/slow.yaml"})
        installation.patch("hit", engine={"policy": "orca"})
        wait_for(rollouts.follow, "twenty kills and the end of the rollouts", timeout_s=660)
        installation.wait_settled("good")
    tell(f"serving engines, at least: {engines.least}")
    assert rollouts.visited() >= STEPS, "a kill in every step"
    assert len(rollouts.lost) == sum(map(len, VICTIMS.values())), "every gate lost its pods"
    assert engines.least["good"] == engines.least["late"] == 1, "the capacity never dropped"

    passed = gate_of(installation, "good")
    tell(f"good: {passed['phase']}: {passed['message']}")
    assert (passed["phase"], passed["verdict"], passed["attempt"]) == ("Passed", "PASS", 2), passed
    assert installation.status("good")["currentRevision"] == passed["revision"] != stable["good"]
    assert (storage / "runs").is_dir(), "the recorded runs are kept"

    failed = gate_of(installation, "late")
    tell(f"late: {failed['phase']}: {failed['message']} {failed['interval']}")
    assert (failed["phase"], failed["verdict"], failed["attempt"]) == ("Failed", "FAIL", 2), failed
    status = installation.status("late")
    assert status["currentRevision"] == stable["late"]
    assert status["failedRevision"] == failed["revision"]
    conditions = conditions_of(installation.get("llmservice", "late"))
    assert (conditions["Ready"], conditions["RolloutPaused"]) == ("True", "True")
    check_failure(installation, "late", failed, stable=stable["late"], tell=tell)
    # The slow device exceeds the TPOT target in every request.
    total = int(failed["message"].split(" of ")[1].split()[0])
    assert f"interactive: 0 of {total} requests met their targets, at most " in failed["message"]
    assert f"{total} of {total} misses exceed the TPOT target" in failed["message"]
    assert failed["interval"].startswith("interactive: −100.00 points (−100.00 … −")

    paused = gate_of(installation, "hit")
    tell(f"hit: {paused['phase']}: {paused['message']}")
    assert installation.condition("hit", "RolloutPaused")[0] == "GateInvalid"
    assert "the pod of Job" in paused["message"]
    status = installation.status("hit")
    assert (status["currentRevision"], "failedRevision" in status) == (stable["hit"], False)
    wait_for(
        lambda: not any(trial_pods(installation, name) for name in VICTIMS), "the pairs are gone"
    )
    tell(installation.kubectl("get", "llmsvc"))


@pytest.mark.slow
@pytest.mark.timeout(720)
def test_two_services_pass_their_gates_at_the_same_time(
    installation: ChartRelease,
    gated: Callable[..., None],
    storage: Path,
    tell: Callable[[str], None],
) -> None:
    pair = ("left", "right")
    gated(*pair)
    stable = {name: installation.status(name)["currentRevision"] for name in pair}
    steps: list[dict[str, str]] = [dict.fromkeys(pair, "")]
    engines = ServingEngines()

    def on_event(_: str, service: dict[str, Any]) -> None:
        if (name := service["metadata"]["name"]) in pair:
            steps.append({**steps[-1], name: step_of(service)})

    with (
        watching(installation, "pods", "-l", "goodput.dev/role=engine", on_event=engines.on_event),
        watching(installation, "llmservices", on_event=on_event),
    ):
        for name in pair:
            installation.patch(name, engine={"policy": "orca"})
        wait_for(
            lambda: all(step in ENDS for step in steps[-1].values()),
            "both gates end",
            timeout_s=540,
        )
        for name in pair:
            installation.wait_settled(name)
    tell(" ".join(f"{one['left']}/{one['right']}" for one in steps))
    assert dict.fromkeys(pair, "Replaying") in steps, "both gates replayed at the same time"
    assert [engines.least[name] for name in pair] == [1, 1], "the capacity never dropped"
    for name in pair:
        gate, status = gate_of(installation, name), installation.status(name)
        tell(f"{name}: {gate['phase']} in attempt {gate['attempt']}: {gate['message']}")
        assert (gate["phase"], gate["verdict"], gate["pairs"]) == ("Passed", "PASS", "2/2"), gate
        assert status["currentRevision"] == gate["revision"] != stable[name] == gate["baseline"]
        report = storage / gate["report"].removeprefix("pvc://gates/")
        for number in (1, 2):
            for role, revision in (("baseline", stable[name]), ("candidate", gate["revision"])):
                served = read_judged(report / f"pair-{number}" / role)
                # Each gate sent its requests to its own engines.
                assert {one.record.revision for one in served} == {revision}
    wait_for(lambda: not any(trial_pods(installation, name) for name in pair), "the pairs are gone")


def check_failure(
    installation: ChartRelease,
    name: str,
    failed: dict[str, Any],
    *,
    stable: str,
    tell: Callable[[str], None],
) -> None:
    """Check that status and Event name the missed promise, its bounds and the report."""
    message, interval, report = failed["message"], failed["interval"], failed["report"]
    assert message.startswith("interactive: "), "the class"
    assert "with 95% confidence" in message
    assert "(objective " in message
    assert re.fullmatch(r"interactive: \S+ points \(\S+ … \S+\)", interval), interval
    attempt = failed["attempt"]
    assert re.fullmatch(rf"pvc://gates/runs/{failed['revision']}-[0-9a-f]+-{attempt}", report)
    kept = f"{stable} keeps serving"
    assert installation.condition(name, "RolloutPaused") == ("GateFailed", f"{kept}: {message}")
    events = installation.get("events", "--field-selector", f"involvedObject.name={name}")["items"]
    gates = {event["reason"]: event for event in events}
    # A killed operator can lose an Event, such as GateRepeated; the number of attempts shows it.
    assert gates.keys() >= {"GateStarted", "GateFailed"}
    tell(gates["GateFailed"]["message"])
    assert gates["GateFailed"]["type"] == "Warning"
    assert gates["GateFailed"]["message"] == (
        f"{kept} instead of {failed['revision']}: {message.removesuffix('.')}; {interval}; "
        f"report: {report}"
    )


def plugin(installation: ChartRelease, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `kubectl goodput gate` on a service, with the exit code of its verdict."""
    return installation.run_command("kubectl", "goodput", "gate", name, "--exit-code", *words)


def check_plugin(installation: ChartRelease, storage: Path, failed: dict[str, Any]) -> None:
    """Check what `kubectl goodput gate` shows of a failed gate, and the report that it names."""
    shown = plugin(installation, "faulty")
    assert shown.returncode == 1, shown.stderr
    fields = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines()[1:])
    for field in ("phase", "verdict", "reason", "pairs", "revision", "message", "report"):
        assert fields[field] == failed[field], field
    assert fields["failedRevision"] == failed["revision"]
    report = storage / failed["report"].removeprefix("pvc://gates/")
    assert (report / "pair-1" / "candidate" / "report.html").is_file()
    judged = judge(report, "--margin", GATE["margin"])
    assert (judged["verdict"], judged["sentence"]) == ("FAIL", failed["message"])
    assert installation.condition("faulty", "RevisionPinned")[0] == "ImageTag"


@contextmanager
def unlike_nodes(installation: ChartRelease) -> Iterator[None]:
    """Give the nodes different types for the length of the block."""
    types = {"node-1": "small", "node-2": "large"}
    for node, kind in types.items():
        installation.cluster.kubectl("label", "node", node, f"{TYPE}={kind}")
    try:
        yield
    finally:
        installation.cluster.kubectl("label", "node", *types, f"{TYPE}-")


def check_quota(installation: ChartRelease, tell: Callable[[str], None]) -> None:
    """Check a gate whose pair exceeds a quota."""
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "no-pair"},
        "spec": {"hard": {"pods": "0"}},
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


def start_gates_without_a_place(installation: ChartRelease) -> None:
    """Start a gate on unlike nodes, and one whose candidate fits on no node."""
    installation.patch("apart", engine={"policy": "orca"})
    installation.patch(
        "traceless",
        engine={"pod": {"nodeSelector": {"goodput.dev/absent": "true"}}},
        rollout={"progressDeadlineSeconds": 20},
    )
    for name in ("apart", "traceless"):
        wait_for(partial(has_pair, installation, name), f"the pair of {name} exists")


def check_gates_without_a_place(installation: ChartRelease, tell: Callable[[str], None]) -> None:
    """Check that both gates end without a verdict, and with the cause."""
    for name, reason, words in (
        ("apart", "UnequalNodes", f"{TYPE}: "),
        ("traceless", "InsufficientCapacity", "didn't match Pod's node affinity/selector"),
    ):
        # A comparison that begins nevertheless is a fault, too.
        paused = wait_phase(installation, name, "Paused", "Replaying", timeout_s=240)
        tell(f"{name}: {paused['message']}")
        assert (paused["phase"], paused["reason"]) == ("Paused", reason), paused
        assert words in paused["message"]
        assert "verdict" not in paused, "nothing is known about the candidate"
        assert installation.condition(name, "RolloutPaused")[0] == reason
        assert installation.condition(name, "Ready")[0] == "Serving"
        assert "failedRevision" not in installation.status(name)


def check_retry(installation: ChartRelease, failed: dict[str, Any]) -> None:
    """Check that a failed gate is repeated by the annotation, and was not before."""
    assert gate_of(installation, "faulty") == failed, "not repeated by itself"
    assert not trial_pods(installation, "faulty")
    installation.kubectl("annotate", "llmservice/faulty", "goodput.dev/retry=again")
    begun = wait_phase(installation, "faulty", "Starting", "Replaying")
    assert begun["revision"] == failed["revision"]
    assert begun["startedAt"] > failed["startedAt"]
    assert "verdict" not in begun
    wait_for(partial(has_pair, installation, "faulty"), "the pair starts again")
    assert installation.status("faulty")["failedRevision"] == failed["revision"]
    # Its replay would load the machine during the next gate.
    installation.kubectl("delete", "llmservice/faulty", "--wait=false")


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_only_lost_requests_fail_a_change_and_a_recorded_baseline_needs_one_engine(
    installation: ChartRelease,
    gated: Callable[..., None],
    storage: Path,
    tell: Callable[[str], None],
) -> None:
    gated("traceless", "returned", trace="pvc://gates/absent.parquet")
    gated("faulty", "alike", "apart", pods={"apart": {"topologySpreadConstraints": [APART]}})
    stable = installation.status("returned")["currentRevision"]
    # Two misses in a hundred are within the objective of the other services, and prove the FAIL of
    # a stricter one with 600 requests.
    [interactive] = SLO["classes"]
    installation.patch(
        "faulty",
        model={"source": "emulated:///devices/narrow.yaml"},
        slo={"classes": [{**interactive, "objective": "99.5%"}]},
        rollout={
            "gate": {"trace": "pvc://gates/dense.parquet", "window": {"endSeconds": WINDOW_S}}
        },
    )
    installation.patch("alike", model={"source": "emulated:///devices/alike.yaml"})
    for name in ("traceless", "returned"):
        installation.patch(name, engine={"policy": "orca"})
    wait_for(lambda: trial_pods(installation, "traceless"), "the pair without a trace exists")
    # Its third attempt, the last one, finds a Job of another owner.
    key = trial_pods(installation, "traceless")[0].split("-")[1]
    theirs = ("job", f"traceless-{key}-gate-3")
    installation.kubectl("create", *theirs, "--image=example.test/none")
    wait_phase(installation, "returned", "Starting", "Replaying", "Waiting")
    wait_for(lambda: trial_pods(installation, "returned"), "the pair of the gate exists")
    installation.patch("returned", engine={"policy": "sarathi"})
    wait_for(lambda: not trial_pods(installation, "returned"), "the gate is removed")
    installation.wait_settled("returned")
    assert installation.status("returned")["currentRevision"] == stable
    assert not gate_of(installation, "returned")
    with recordings(
        installation,
        "returned",
        storage / "history",
        slo=SLO,
        trace=storage / "trace.parquet",
        window_s=WINDOW_S,
    ) as running:
        sentence = f"Job {theirs[1]} is not controlled by this LLMService"
        wait_for(
            lambda: sentence in gate_of(installation, "traceless").get("message", ""),
            "the Job of another owner is reported",
            timeout_s=300,
        )
        assert installation.condition("traceless", "Stalled")[0] == "NameConflict"
        installation.kubectl("delete", *theirs)
        paused = wait_phase(installation, "traceless", "Paused", timeout_s=300)
        tell(paused["message"])
        assert "pvc://gates/absent.parquet: no such file" in paused["message"]
        assert installation.condition("traceless", "RolloutPaused")[0] == "GateInvalid"
        assert "failedRevision" not in installation.status("traceless")
        wait_for(lambda: not trial_pods(installation, "traceless"), "the pair is gone")

        failed, alike = (
            wait_phase(installation, name, "Passed", "Failed", "Paused", timeout_s=400)
            for name in ("faulty", "alike")
        )
        tell(f"faulty: {failed['message']}")
        tell(f"alike: {alike['message']}")
        assert (failed["phase"], failed["verdict"]) == ("Failed", "FAIL"), failed
        assert "12 of 12 misses are error responses" in failed["message"]
        assert installation.status("faulty")["currentRevision"] == failed["baseline"]
        check_failure(installation, "faulty", failed, stable=failed["baseline"], tell=tell)
        assert alike["verdict"] in {"PASS", "INCONCLUSIVE"}, alike
        check_plugin(installation, storage, failed)
        assert plugin(installation, "traceless").returncode == 3, "INVALID"
        with unlike_nodes(installation):
            start_gates_without_a_place(installation)
            check_quota(installation, tell)
            check_gates_without_a_place(installation, tell)
        check_retry(installation, failed)

        for recording in running:
            output, _ = recording.communicate(timeout=240)
            tell(output)
    recorded = {"baseline": "Recorded", "history": "pvc://gates/history", "pairs": 1}
    installation.patch("returned", rollout={"gate": {**recorded, "trace": GATE["trace"]}})
    wait_for(
        lambda: [pod for pod in trial_pods(installation, "returned") if "-candidate-" in pod],
        "the candidate starts",
    )
    passed = wait_phase(installation, "returned", "Passed", "Failed", "Paused", timeout_s=240)
    tell(f"returned: {passed['message']}")
    assert (passed["phase"], passed["pairs"]) == ("Passed", "1/1"), passed
    installation.wait_settled("returned")
    assert installation.status("returned")["currentRevision"] == passed["revision"] != stable
