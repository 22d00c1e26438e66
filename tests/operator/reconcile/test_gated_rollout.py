"""A gated revision serves only after its gate has passed, and the stable one serves until then."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.operator.reconcile.gates import (
    ERROR,
    FAIL,
    GATE,
    INCONCLUSIVE,
    INVALID,
    PASS,
    RETRY,
    TRIAL_ROLES,
    change,
    delete_pod,
    gate_of,
    judge,
    trials,
    until_job,
)

from goodput_core.replay_job import ABResult, ABState, encode_message
from goodput_core.slo.verdict import VerdictKind
from goodput_operator.reconcile.decide import decide

if TYPE_CHECKING:
    from tests.operator.reconcile.conftest import Cluster


def test_the_first_revision_needs_no_gate(gated: Cluster) -> None:
    assert gated.condition("Ready") == ("True", "Serving")
    assert gated.condition("RolloutPaused") == ("False", "NotPaused")
    assert not gate_of(gated)
    assert trials(gated) == {"baseline": {}, "candidate": {}}


def test_a_changed_service_starts_a_pair_that_serves_no_clients(gated: Cluster) -> None:
    (stable,) = gated.deployments()
    change(gated)
    job = until_job(gated)
    update = gated.status["updateRevision"]
    assert gated.deployments() == {stable: 2}, "the service is unchanged"
    assert [list(d.values()) for d in trials(gated).values()] == [[1], [1]]
    engines = gated.objects["Service", "chat-engines"]["spec"]["selector"]
    budget = gated.objects["PodDisruptionBudget", "chat-engines"]["spec"]["selector"]["matchLabels"]
    for role, revision in zip(TRIAL_ROLES, (stable, update), strict=True):
        (name,) = gated.deployments(role)
        body = gated.objects["Deployment", name]
        template = body["spec"]["template"]
        (preferred,) = template["spec"]["affinity"]["podAffinity"].values()
        topologies = [one["podAffinityTerm"]["topologyKey"] for one in preferred]
        assert topologies == ["kubernetes.io/hostname", "node.kubernetes.io/instance-type"]
        labels = template["metadata"]["labels"]
        assert not engines.items() <= labels.items()
        assert not budget.items() <= labels.items()
        assert body["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert labels["goodput.dev/revision"] == revision
        stored = gated.objects["ControllerRevision", revision]["data"]["template"]["spec"]
        container = template["spec"]["containers"][0]
        assert container["command"] == stored["containers"][0]["command"]
        (config,) = [v["configMap"] for v in template["spec"]["volumes"] if "configMap" in v]
        keys = {item["path"]: item["key"] for item in config["items"]}
        data = gated.objects["ConfigMap", "chat-config"]["data"]
        manifest = json.loads(data[keys[f"{revision}.json"]])
        assert manifest["spec"]["control"] == {"mode": "Manual"}
        assert json.loads(data[keys["limits.json"]])["token_budget"] == 2048
        assert len(name) <= 63
    assert gated.status["replicas"] == 2
    assert gated.status["currentRevision"] == stable
    assert gated.condition("Reconciling") == ("True", "Gating")
    assert gated.condition("Stalled") == ("False", "Unhindered")
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    text = " ".join(command)
    assert text.startswith("goodput replay ab --trace /var/lib/goodput/claims/traces/prod.parquet")
    assert "--window 600s..900s --rate-scale 1/2" in text
    assert "--pairs 4 --margin 2% " in text
    targets = [command[i + 1] for i, word in enumerate(command) if word == "--target"]
    pods = {p["metadata"]["labels"]["goodput.dev/role"]: p for p in gated.pods.values()}
    assert targets == [f"http://{pods[role]['status']['podIP']}:8000" for role in TRIAL_ROLES]
    assert f"--out /var/lib/goodput/claims/runs/gates/{update}-" in text
    assert [event.reason for event in gated.events][-1] == "GateStarted"


def test_a_passed_revision_is_rolled_out_and_capacity_never_falls(gated: Cluster) -> None:
    (stable,) = gated.deployments()
    change(gated)
    until_job(gated)
    gated.end_job(PASS)
    for _ in range(30):
        gated.reconcile(ready=1)
        assert len(gated.engines(ready=True)) >= 2
    update = gated.status["updateRevision"]
    assert gated.deployments() == {update: 2}
    assert gated.status["currentRevision"] == update != stable
    assert trials(gated) == {"baseline": {}, "candidate": {}}
    assert not gated.jobs()
    assert "gate" not in gated.objects["ConfigMap", "chat-config"]["data"]
    assert gate_of(gated)["phase"] == "Passed"
    assert gate_of(gated)["interval"] == "a: −0.10 points (−0.40 … +0.20)"
    assert gated.status["summary"]["gate"] == "Passed 4/4 PASS"
    reasons = [event.reason for event in gated.events]
    assert reasons == ["Ready", "GateStarted", "GatePassed", "RollingOut", "RolledOut"]
    assert [emit.reason for emit in gated.rollout] == reasons[1:]
    assert gated.condition("Reconciling") == ("False", "Settled")


def test_a_failed_revision_is_remembered_and_not_retried(gated: Cluster) -> None:
    (stable,) = gated.deployments()
    judge(gated, FAIL)
    update = gated.status["updateRevision"]
    assert gated.deployments() == {stable: 2}
    assert trials(gated) == {"baseline": {}, "candidate": {}}
    assert gated.status["failedRevision"] == update
    assert gated.status["currentRevision"] == stable
    assert gated.condition("RolloutPaused") == ("True", "GateFailed")
    assert gated.condition("Stalled") == ("True", "RolloutPaused")
    assert gated.condition("Reconciling") == ("False", "RolloutPaused")
    assert gated.condition("Ready") == ("True", "Serving")
    assert "FAIL of a." in gated.message("RolloutPaused")
    (event,) = [event for event in gated.events if event.reason == "GateFailed"]
    assert event.warning
    assert event.message.startswith(f"{stable} keeps serving instead of {update}: FAIL of a; a: ")
    assert "−0.10 points" in event.message
    assert "report: pvc://runs/gates/" in event.message
    gated.restart_operator()
    gated.status = {}
    gated.settle()
    assert trials(gated) == {"baseline": {}, "candidate": {}}, "also without memory and status"
    assert gated.status["failedRevision"] == update
    gated.update_spec(replicas=3)
    gated.settle()
    assert gated.deployments() == {stable: 3}, "the service still scales"


def test_a_long_sentence_leaves_room_for_interval_and_report_in_the_event(gated: Cluster) -> None:
    interval = "c7: −9.00 points (−11.00 … −7.00)"
    sentence = "; ".join(f"c{number}: 1 of 900 requests met their targets" for number in range(30))
    failed = ABResult(
        verdict=VerdictKind.FAIL,
        reason="BelowObjective",
        message=f"{sentence}.",
        pairs=4,
        interval=interval,
    )
    judge(gated, encode_message(failed))
    [event] = [event for event in gated.events if event.reason == "GateFailed"]
    report = gate_of(gated)["report"]
    assert 1000 < len(event.message) <= 1024
    assert event.message.endswith(f" …; {interval}; report: {report}")
    assert "instead of" in event.message
    assert "c0: 1 of 900" in event.message
    assert gate_of(gated)["message"] == f"{sentence}.", "the status has the whole sentence"


def test_a_changed_spec_or_the_annotation_begins_another_gate(gated: Cluster) -> None:
    judge(gated, FAIL)
    first = gate_of(gated)
    gated.annotations = {"goodput.dev/retry": "1"}
    until_job(gated)
    assert gate_of(gated)["revision"] == first["revision"]
    gated.end_job(FAIL)
    gated.settle()
    assert gate_of(gated)["phase"] == "Failed"
    gated.update_spec(rollout={"gate": {**GATE, "margin": "5%"}})
    until_job(gated)
    gated.end_job(PASS)
    gated.settle()
    assert gated.status["currentRevision"] == first["revision"]


@pytest.mark.parametrize("ends", [FAIL, INCONCLUSIVE], ids=["failed", "paused"])
def test_only_a_new_value_of_the_annotation_repeats_an_ended_gate(
    gated: Cluster, ends: str
) -> None:
    gated.annotations = {RETRY: "1"}
    judge(gated, ends)
    ended = gate_of(gated)
    for new in ("2", "x" * 5000):
        gated.annotations = {RETRY: new}
        until_job(gated)
        gated.end_job(ends)
        gated.settle()
        assert gate_of(gated)["startedAt"] > ended["startedAt"]
        ended = gate_of(gated)
    jobs = gated.jobs()
    for value in (None, "1", "2", "", "x" * 5000):
        gated.annotations = {} if value is None else {RETRY: value}
        gated.restart_operator()
        gated.status = {}
        gated.settle()
        assert (gate_of(gated), gated.jobs()) == (ended, jobs), value
    gated.annotations = {RETRY: "3"}
    until_job(gated)


def test_a_removed_annotation_does_not_begin_a_running_gate_again(gated: Cluster) -> None:
    gated.annotations = {RETRY: "1"}
    change(gated)
    job = until_job(gated)["metadata"]["name"]
    gated.annotations = {}
    assert until_job(gated)["metadata"]["name"] == job


def test_a_value_that_another_revision_used_does_not_repeat_a_failed_gate(gated: Cluster) -> None:
    judge(gated, FAIL)
    judge(gated, FAIL, "orca")
    gated.annotations = {RETRY: "1"}
    until_job(gated)
    gated.end_job(FAIL)
    gated.settle()
    change(gated)
    gated.settle()
    assert (gate_of(gated)["phase"], gated.jobs()) == ("Failed", [])


def test_a_record_of_an_earlier_version_learns_the_value_it_was_begun_with(
    gated: Cluster,
) -> None:
    gated.annotations = {RETRY: "1"}
    judge(gated, FAIL)
    ended, update = gate_of(gated), gated.status["updateRevision"]

    def forget(body: dict[str, Any]) -> None:
        record = json.loads(body["metadata"]["annotations"]["goodput.dev/gate"])
        assert record.pop("retries") == ["1"]
        body["metadata"]["annotations"]["goodput.dev/gate"] = json.dumps(record)

    gated.edit("ControllerRevision", update, forget)
    gated.settle()
    gated.annotations = {}
    gated.settle()
    assert gate_of(gated) == ended


@pytest.mark.parametrize(
    ("action", "phase", "condition", "serves"),
    [
        (None, "Paused", ("True", "GateInconclusive"), False),
        ("Pause", "Paused", ("True", "GateInconclusive"), False),
        ("Rollback", "Failed", ("True", "GateInconclusive"), False),
        ("Promote", "Passed", ("False", "NotPaused"), True),
    ],
)
def test_an_inconclusive_gate_follows_the_spec(
    gated: Cluster, action: str | None, phase: str, condition: tuple[str, str], serves: bool
) -> None:
    gate = GATE if action is None else {**GATE, "onInconclusive": action}
    gated.update_spec(rollout={"gate": gate})
    judge(gated, INCONCLUSIVE)
    assert gate_of(gated)["phase"] == phase
    assert gated.condition("RolloutPaused") == condition
    update = gated.status["updateRevision"]
    assert (gated.status["currentRevision"] == update) == serves
    assert (gated.status.get("failedRevision") == update) == (phase == "Failed")


def test_a_paused_gate_is_decided_by_the_spec_without_another_replay(gated: Cluster) -> None:
    judge(gated, INCONCLUSIVE)
    jobs = Counter(gated.written)
    gated.update_spec(rollout={"gate": {**GATE, "onInconclusive": "Promote"}})
    gated.settle()
    assert gated.status["currentRevision"] == gated.status["updateRevision"]
    created = Counter(gated.written) - jobs
    assert not [key for key in created if key[0] == "Job" and key in gated.objects]


def test_a_failed_gate_is_left_by_removing_the_gate(gated: Cluster) -> None:
    judge(gated, FAIL)
    assert "failedRevision" in gated.status
    gated.update_spec(rollout=None)
    gated.settle()
    assert gated.status["currentRevision"] == gated.status["updateRevision"]
    assert gated.condition("RolloutPaused") == ("False", "NotPaused")
    assert "failedRevision" not in gated.status


def test_a_revision_that_passes_after_a_fail_no_longer_counts_as_failed(gated: Cluster) -> None:
    judge(gated, FAIL)
    failed = gated.status["failedRevision"]
    gated.annotations = {"goodput.dev/retry": "1"}
    until_job(gated)
    assert gated.status["failedRevision"] == failed, "it is still the last one"
    gated.end_job(PASS)
    gated.settle()
    assert gated.status["currentRevision"] == failed
    assert "failedRevision" not in gated.status


@pytest.mark.parametrize(
    ("message", "code", "sentence"),
    [
        (INVALID, 3, "INVALID of a."),
        (ERROR, 64, "pvc://traces/x.parquet: no such file"),
        ("Killed", 137, "ended without a verdict: Killed"),
        (None, 1, "the pod of Job"),
        ("", 0, "left no result"),
    ],
    ids=["invalid", "a missing trace", "killed", "a deleted pod", "no result"],
)
def test_an_attempt_without_a_verdict_is_repeated_three_times_and_never_fails_the_candidate(
    gated: Cluster, message: str | None, code: int, sentence: str
) -> None:
    (stable,) = gated.deployments()
    change(gated)
    names = set()
    for attempt in (1, 2, 3):
        names.add(until_job(gated)["metadata"]["name"])
        assert gate_of(gated).get("attempt", 1) == attempt
        gated.end_job(message, code=code)
        gated.reconcile()
        gated.reconcile()
        assert gated.deployments() == {stable: 2}
    gated.settle()
    assert len(names) == 3
    assert gate_of(gated)["phase"] == "Paused"
    assert sentence in gate_of(gated)["message"]
    assert ("report" in gate_of(gated)) == (message is INVALID), "only with recorded pairs"
    assert gated.condition("RolloutPaused") == ("True", "GateInvalid")
    assert "failedRevision" not in gated.status
    assert trials(gated) == {"baseline": {}, "candidate": {}}
    reasons = ["GateStarted", "GateRepeated", "GateRepeated", "GatePaused"]
    assert [emit.reason for emit in gated.rollout] == reasons


INTERRUPTED = encode_message(ABResult(reason="Error", message="candidate: interrupted"))
DELETED = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
PREEMPTED = {"type": "DisruptionTarget", "status": "True", "message": "Preempted by pod big"}


@pytest.mark.parametrize(
    ("message", "code", "pod", "sentence"),
    [
        (None, 1, {}, "the pod of Job {job} was deleted"),
        (INTERRUPTED, 130, DELETED, "the pod of Job {job} was deleted"),
        ("", 137, DELETED, "the pod of Job {job} was deleted"),
        ("", 143, DELETED, "the pod of Job {job} was deleted"),
        (
            INTERRUPTED,
            130,
            {**DELETED, "status": {"conditions": [PREEMPTED]}},
            "the pod of Job {job} was deleted: Preempted by pod big",
        ),
        (
            INTERRUPTED,
            130,
            {"status": {"reason": "Evicted", "message": "The node was low on memory."}},
            "the pod of Job {job} was stopped: The node was low on memory.",
        ),
        (INTERRUPTED, 130, {}, "the pod of Job {job} was stopped by SIGTERM"),
        (ERROR, 64, DELETED, "pvc://traces/x.parquet: no such file"),
        ("", 1, DELETED, "pod {job}-x of the comparison ended without a verdict: it was lost"),
    ],
    ids=[
        "gone",
        "interrupted",
        "killed",
        "ended by SIGTERM",
        "preempted",
        "evicted",
        "a signal alone",
        "an error before the deletion",
        "a crash before the deletion",
    ],
)
def test_a_stopped_comparison_reads_alike_before_and_after_its_pod_is_gone(
    gated: Cluster, message: str | None, code: int, pod: dict[str, Any], sentence: str
) -> None:
    change(gated)
    job = until_job(gated)["metadata"]["name"]
    gated.end_job(message, code=code)
    for part, fields in pod.items():
        gated.pods[f"{job}-x"][part] |= fields
    gated.reconcile()
    assert gate_of(gated)["message"] == sentence.format(job=job)
    assert gate_of(gated)["attempt"] == 2, "the attempt is repeated"


@pytest.mark.parametrize("order", ["gone", "interrupted"])
def test_a_comparison_beyond_its_deadline_reads_alike_before_and_after_its_pod_is_gone(
    gated: Cluster, order: str
) -> None:
    change(gated)
    job = until_job(gated)
    name = job["metadata"]["name"]
    gated.end_job(INTERRUPTED if order == "interrupted" else None, code=130)
    if order == "interrupted":
        gated.pods[f"{name}-x"]["metadata"] |= DELETED["metadata"]
    job["status"]["conditions"][0]["reason"] = "DeadlineExceeded"
    gated.reconcile()
    assert gate_of(gated)["message"] == f"Job {name} did not end within its deadline"


def test_an_attempt_is_repeated_after_a_pause(gated: Cluster) -> None:
    change(gated)
    until_job(gated)
    gated.end_job(INVALID, code=3)
    gated.reconcile()
    ended_ns = gated.now_ns
    gated.reconcile()
    assert gate_of(gated)["phase"] == "Waiting"
    until_job(gated)
    assert gated.now_ns - ended_ns >= 10 * 10**9
    gated.end_job(PASS)
    gated.settle()
    assert gate_of(gated)["phase"] == "Passed"


def test_a_job_without_a_pod_ends_the_gate_after_the_deadline(gated: Cluster) -> None:
    gated.update_spec(rollout={"gate": GATE, "progressDeadlineSeconds": 60})
    change(gated)
    job = until_job(gated)
    name = job["metadata"]["name"]
    job["status"] = {"active": 0}
    del gated.pods[f"{name}-x"]
    for _ in range(20):
        gated.reconcile()
    gate = gate_of(gated)
    assert (gate["phase"], gate["reason"]) == ("Paused", "ReplayNotStarted")
    assert gate["message"] == (
        f"Job {name} has not started within spec.rollout.progressDeadlineSeconds; "
        f"0 of 1 pods exist; `kubectl describe job {name}` shows why"
    )
    assert trials(gated) == {"baseline": {}, "candidate": {}}


@pytest.mark.parametrize("role", TRIAL_ROLES)
def test_a_replaced_engine_voids_the_attempt_even_if_it_gave_a_verdict(
    gated: Cluster, role: str
) -> None:
    change(gated)
    until_job(gated)
    (victim,) = [
        name
        for name, pod in gated.pods.items()
        if pod["metadata"]["labels"]["goodput.dev/role"] == role
    ]
    del gated.pods[victim]
    gated.end_job(FAIL)
    gated.reconcile()
    assert f"of the {role} was replaced" in gate_of(gated)["message"]
    until_job(gated)
    gated.end_job(PASS)
    gated.settle()
    assert gate_of(gated)["phase"] == "Passed"


def restart_container(cluster: Cluster, role: str) -> None:
    for pod in cluster.pods.values():
        if pod["metadata"]["labels"]["goodput.dev/role"] == role:
            pod["status"]["containerStatuses"] = [
                {"name": "engine", "restartCount": 1, "state": {}}
            ]


@pytest.mark.parametrize(
    ("role", "message", "voids"),
    [
        ("baseline", PASS, True),
        ("baseline", FAIL, True),
        ("candidate", PASS, True),
        ("candidate", INCONCLUSIVE, True),
        ("candidate", ERROR, True),
        ("candidate", FAIL, False),
    ],
    ids=[
        "baseline, PASS",
        "baseline, FAIL",
        "candidate, PASS",
        "candidate, INCONCLUSIVE",
        "candidate, error",
        "candidate, FAIL",
    ],
)
def test_a_crash_of_the_pair_voids_the_attempt_unless_the_lost_requests_fail_the_candidate(
    gated: Cluster, role: str, message: str, voids: bool
) -> None:
    change(gated)
    until_job(gated)
    restart_container(gated, role)
    gated.reconcile()
    assert role == "baseline" or gate_of(gated)["phase"] == "Replaying"
    if gate_of(gated)["phase"] == "Replaying":
        gated.end_job(message)
    if not voids:
        gated.settle()
        assert gate_of(gated)["phase"] == "Failed"
        assert gate_of(gated).get("attempt", 1) == 1
        return
    gated.reconcile()
    assert f"the container of the {role} was restarted" in gate_of(gated)["message"]
    assert gate_of(gated)["reason"] == "GateInvalid"
    until_job(gated)
    gated.end_job(PASS)
    gated.settle()
    assert (gate_of(gated)["phase"], gate_of(gated)["attempt"]) == ("Passed", 2)


def test_a_candidate_that_crashes_in_every_attempt_is_paused_and_not_failed(
    gated: Cluster,
) -> None:
    change(gated)
    for _ in range(3):
        until_job(gated)
        for pod in gated.pods.values():
            if pod["metadata"]["labels"]["goodput.dev/role"] == "candidate":
                [status] = pod["status"].get("containerStatuses") or [{"restartCount": 0}]
                killed = {"exitCode": 137, "reason": "OOMKilled"}
                pod["status"]["containerStatuses"] = [
                    {
                        "name": "engine",
                        "restartCount": status["restartCount"] + 1,
                        "state": {"running": {}},
                        "lastState": {"terminated": killed},
                    }
                ]
        gated.end_job(PASS)
        gated.reconcile()
    gated.settle()
    assert gate_of(gated)["phase"] == "Paused"
    assert "the engine was killed because it ran out of memory" in gate_of(gated)["message"]
    assert gated.condition("RolloutPaused") == ("True", "GateInvalid")
    assert "failedRevision" not in gated.status


def test_a_spec_changed_in_the_middle_begins_the_gate_of_the_new_revision(gated: Cluster) -> None:
    (stable,) = gated.deployments()
    change(gated)
    first = until_job(gated)["metadata"]["name"]
    old = trials(gated)
    change(gated, "orca")
    gated.reconcile()
    gated.reconcile()
    assert first not in {job["metadata"]["name"] for job in gated.jobs()}
    second = until_job(gated)["metadata"]["name"]
    assert second != first
    assert trials(gated)["baseline"].keys().isdisjoint(old["baseline"]), "a fresh baseline"
    gated.end_job(PASS)
    gated.settle()
    assert gated.status["currentRevision"] == gated.status["updateRevision"] != stable


def test_a_spec_changed_back_removes_the_gate(gated: Cluster) -> None:
    (stable,) = gated.deployments()
    change(gated)
    until_job(gated)
    gated.update_spec(engine=None)
    gated.settle()
    assert gated.deployments() == {stable: 2}
    assert trials(gated) == {"baseline": {}, "candidate": {}}
    assert not gated.jobs()
    assert not gate_of(gated)
    assert "RolledOut" not in {event.reason for event in gated.events}


def test_a_quota_without_room_is_reported_and_paused_after_the_deadline(gated: Cluster) -> None:
    gated.update_spec(rollout={"gate": GATE, "progressDeadlineSeconds": 60})
    gated.settle()
    gated.full = {"candidate"}
    change(gated)
    for _ in range(5):
        gated.reconcile()
    assert gated.condition("RolloutPaused") == ("True", "InsufficientCapacity")
    assert gated.condition("Reconciling") == ("True", "Gating")
    assert "exceeded quota: pods" in gated.message("RolloutPaused")
    for _ in range(15):
        gated.reconcile()
    gated.settle()
    assert gate_of(gated)["phase"] == "Paused"
    assert gated.condition("RolloutPaused") == ("True", "InsufficientCapacity")
    assert trials(gated) == {"baseline": {}, "candidate": {}}, "nothing waits for the room"
    assert "failedRevision" not in gated.status
    gated.full = set()
    gated.annotations = {"goodput.dev/retry": "now"}
    until_job(gated)


def until_candidate_hangs(cluster: Cluster) -> None:
    """Start a gate whose candidate never becomes ready, with a deadline of a minute."""
    cluster.update_spec(rollout={"gate": GATE, "progressDeadlineSeconds": 60})
    cluster.settle()
    change(cluster)
    cluster.decide()
    cluster.broken = {cluster.status["updateRevision"]}
    cluster.reconcile()
    cluster.reconcile()


def test_a_pod_that_fits_on_no_node_is_a_lack_of_capacity_in_the_schedulers_words(
    gated: Cluster,
) -> None:
    until_candidate_hangs(gated)
    words = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    for pod in gated.pods.values():
        if pod["metadata"]["labels"]["goodput.dev/role"] == "candidate":
            pod["status"] = {"conditions": [{**unscheduled, "message": words}]}
    gated.reconcile()
    assert gate_of(gated)["phase"] == "Starting", "a node may be added"
    assert gated.condition("RolloutPaused") == ("True", "InsufficientCapacity")
    assert words in gated.message("RolloutPaused")
    for _ in range(20):
        gated.reconcile()
    gated.settle()
    assert gate_of(gated)["phase"] == "Paused"
    assert gated.condition("RolloutPaused") == ("True", "InsufficientCapacity")
    assert words in gated.message("RolloutPaused")
    assert "failedRevision" not in gated.status


@pytest.mark.parametrize("role", ["candidate", "baseline"])
def test_a_pod_that_an_admission_webhook_refuses_is_no_lack_of_capacity(
    gated: Cluster, role: str
) -> None:
    gated.update_spec(rollout={"gate": GATE, "progressDeadlineSeconds": 60})
    gated.settle()
    gated.refusal = 'admission webhook "policy.example.test" denied the request: no team label'
    gated.full = {role}
    change(gated)
    for _ in range(20):
        gated.reconcile()
    gated.settle()
    assert gate_of(gated)["phase"] == "Paused"
    reason = "CandidateNotStarted" if role == "candidate" else "BaselineNotReady"
    assert gated.condition("RolloutPaused") == ("True", reason)
    assert gated.refusal in gated.message("RolloutPaused")
    assert "failedRevision" not in gated.status


def test_room_that_appears_in_time_lets_the_gate_continue(gated: Cluster) -> None:
    gated.full = {"candidate", "baseline"}
    change(gated)
    for _ in range(5):
        gated.reconcile()
    gated.full = set()
    until_job(gated)
    assert gated.condition("RolloutPaused") == ("False", "NotPaused")
    assert [e.reason for e in gated.events].count("InsufficientCapacity") == 1


RUNNING: dict[str, Any] = {"name": "engine", "restartCount": 0, "state": {"running": {}}}
CRASHED: dict[str, Any] = {
    "name": "engine",
    "restartCount": 4,
    "state": {"running": {}},
    "lastState": {
        "terminated": {"exitCode": 64, "message": "error: /devices/x.yaml: no such file"}
    },
}
UNPULLED: dict[str, Any] = {
    "name": "engine",
    "restartCount": 0,
    "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image: x:2"}},
}
UNKNOWN: dict[str, Any] = {
    "name": "engine",
    "restartCount": 0,
    "state": {"waiting": {"reason": "PodInitializing"}},
}


def test_a_rejected_job_is_reported_and_ends_the_gate_after_the_deadline(gated: Cluster) -> None:
    gated.update_spec(rollout={"gate": GATE, "progressDeadlineSeconds": 60})
    gated.settle()
    gated.rejections["Job"] = "exceeded quota: no-jobs"
    change(gated)
    for _ in range(8):
        gated.reconcile()
    assert gate_of(gated)["phase"] == "Starting"
    assert "cannot be created: exceeded quota: no-jobs" in gate_of(gated)["message"]
    assert trials(gated) != {"baseline": {}, "candidate": {}}
    gated.rejections.clear()
    until_job(gated)
    (job,) = gated.jobs()
    gated.remove("Job", job["metadata"]["name"])
    gated.rejections["Job"] = "exceeded quota: no-jobs"
    for _ in range(20):
        gated.reconcile()
    gate = gate_of(gated)
    assert (gate["phase"], gate["reason"]) == ("Paused", "ReplayNotStarted")
    assert "cannot be created: exceeded quota: no-jobs" in gate["message"]
    assert trials(gated) == {"baseline": {}, "candidate": {}}, "the pair no longer takes room"
    assert gated.condition("Ready")[0] == "True"


def conflicting_object(kind: str, name: str) -> dict[str, Any]:
    metadata = {"name": name, "labels": {}, "ownerReferences": []}
    spec = {"replicas": 0, "selector": {"matchLabels": {"goodput.dev/role": "other"}}}
    status = {"conditions": [{"type": "Suspended", "status": "True"}]}
    return {"kind": kind, "metadata": metadata, "spec": spec, "status": status}


@pytest.mark.parametrize("place", ["Job", "baseline", "candidate", "ControllerRevision"])
def test_an_object_of_another_owner_under_a_name_of_the_gate_ends_it_without_a_verdict(
    gated: Cluster, place: str
) -> None:
    gated.update_spec(rollout={"gate": GATE, "progressDeadlineSeconds": 60})
    gated.settle()
    before = {name for _, name in gated.objects}
    change(gated)
    probe = copy.deepcopy(gated)
    until_job(probe)
    kind = place if place in {"Job", "ControllerRevision"} else "Deployment"
    (name,) = [
        found
        for found_kind, found in probe.objects
        if found_kind == kind and found not in before and place in {kind, found.split("-")[-1]}
    ]
    gated.put(conflicting_object(kind, name))
    theirs = copy.deepcopy(gated.objects[kind, name])
    for _ in range(8):
        gated.reconcile()
    sentence = f"{kind} {name} is not controlled by this LLMService"
    assert gate_of(gated)["phase"] == "Starting"
    assert sentence in gate_of(gated)["message"]
    assert gated.condition("Stalled") == ("True", "NameConflict")
    assert sentence in gated.message("Stalled")
    for _ in range(20):
        gated.reconcile()
    gate = gate_of(gated)
    assert (gate["phase"], gate["reason"], gate.get("verdict")) == ("Paused", "NameConflict", None)
    assert "report" not in gate, "nothing was recorded"
    assert sentence in gate["message"]
    assert "failedRevision" not in gated.status
    assert gated.condition("Ready") == ("True", "Serving")
    assert trials(gated) in ({"baseline": {}, "candidate": {}}, {"other": {}})
    assert gated.objects[kind, name] == theirs, "unchanged"
    reasons = Counter(event.reason for event in gated.events)
    assert (reasons["GateStarted"], reasons["NameConflict"], reasons["GatePaused"]) == (1, 1, 1)
    gated.remove(kind, name)
    gated.annotations = {"goodput.dev/retry": "now"}
    until_job(gated)
    assert gated.condition("Stalled") == ("False", "Unhindered")


def test_a_conflicting_job_that_is_deleted_in_time_lets_the_gate_continue(gated: Cluster) -> None:
    change(gated)
    probe = copy.deepcopy(gated)
    name = until_job(probe)["metadata"]["name"]
    gated.put(conflicting_object("Job", name))
    for _ in range(8):
        gated.reconcile()
    assert "is not controlled" in gate_of(gated)["message"]
    gated.remove("Job", name)
    until_job(gated)
    gated.end_job(PASS)
    gated.settle()
    assert gate_of(gated)["phase"] == "Passed"


def test_a_gate_whose_record_is_rejected_begins_once_and_is_paused(gated: Cluster) -> None:
    gated.update_spec(rollout={"gate": GATE, "progressDeadlineSeconds": 60})
    gated.settle()
    gated.rejections["ControllerRevision"] = "exceeded quota: no-revisions"
    change(gated)
    for _ in range(20):
        gated.reconcile()
    gate = gate_of(gated)
    assert (gate["phase"], gate["reason"]) == ("Paused", "RecordRejected")
    assert "cannot be stored: exceeded quota: no-revisions" in gate["message"]
    reasons = Counter(event.reason for event in gated.events)
    assert (reasons["GateStarted"], reasons["GatePaused"]) == (1, 1)
    gated.rejections.clear()
    until_job(gated)


def test_a_pod_of_another_owner_with_the_labels_of_the_pair_is_not_taken_for_an_engine(
    gated: Cluster,
) -> None:
    change(gated)
    for _ in range(2):
        gated.reconcile(ready=0)
    (name,) = gated.deployments("candidate")
    labels = gated.objects["Deployment", name]["spec"]["template"]["metadata"]["labels"]
    gated.pods["copy"] = {
        "kind": "Pod",
        "metadata": {"name": "copy", "uid": "copy", "labels": dict(labels)},
        "status": {"podIP": "10.1.1.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    command = until_job(gated)["spec"]["template"]["spec"]["containers"][0]["command"]
    assert "http://10.1.1.1:8000" not in command
    gated.end_job(PASS)
    gated.settle()
    assert gate_of(gated)["phase"] == "Passed"


@pytest.mark.parametrize(
    ("container", "phase", "reason", "cause"),
    [
        (RUNNING, "Failed", "ProgressDeadlineExceeded", "timed out progressing"),
        (
            CRASHED,
            "Failed",
            "ProgressDeadlineExceeded",
            "the engine exited with code 64: error: /devices/x.yaml: no such file",
        ),
        (UNPULLED, "Paused", "CandidateNotStarted", "no such image: x:2"),
        (UNKNOWN, "Paused", "CandidateNotStarted", "timed out progressing"),
        (None, "Paused", "CandidateNotStarted", "timed out progressing"),
    ],
    ids=["running", "crashed", "image not pulled", "initializing", "node lost"],
)
def test_only_a_candidate_that_ran_fails_after_the_deadline(
    gated: Cluster, container: dict[str, Any] | None, phase: str, reason: str, cause: str
) -> None:
    until_candidate_hangs(gated)
    (name,) = gated.deployments("candidate")
    late = {
        "type": "Progressing",
        "status": "False",
        "reason": "ProgressDeadlineExceeded",
        "message": f'ReplicaSet "{name}-1" has timed out progressing.',
    }
    gated.objects["Deployment", name]["status"]["conditions"] = [late]
    for pod in gated.pods.values():
        if container is not None and pod["metadata"]["labels"]["goodput.dev/role"] == "candidate":
            pod["status"]["containerStatuses"] = [container]
    for _ in range(20):
        gated.reconcile()
    gated.settle()
    assert gate_of(gated)["phase"] == phase
    missed = "1 of 2 engines of the gate are ready within spec.rollout.progressDeadlineSeconds; "
    assert gate_of(gated)["message"].startswith(missed)
    assert cause in gate_of(gated)["message"]
    assert gated.condition("RolloutPaused") == ("True", reason)
    assert ("failedRevision" in gated.status) == (phase == "Failed")
    assert trials(gated) == {"baseline": {}, "candidate": {}}


def test_a_baseline_that_never_starts_does_not_fail_the_candidate(gated: Cluster) -> None:
    (stable,) = gated.deployments()
    gated.update_spec(rollout={"gate": GATE, "progressDeadlineSeconds": 60})
    gated.settle()
    gated.broken = {stable}
    change(gated)
    for _ in range(20):
        gated.reconcile()
    gated.settle()
    assert gated.condition("RolloutPaused") == ("True", "BaselineNotReady")
    assert "failedRevision" not in gated.status


def test_a_suspended_service_stops_its_gate_and_begins_another_attempt(gated: Cluster) -> None:
    change(gated)
    until_job(gated)
    gated.update_spec(suspend=True)
    gated.settle()
    assert not gated.pods
    assert not gated.jobs()
    assert gate_of(gated)["phase"] == "Suspended"
    gated.update_spec(suspend=None)
    until_job(gated)
    assert gate_of(gated)["attempt"] == 2
    assert gated.status["currentRevision"] != gated.status["updateRevision"]


def test_a_rollout_that_has_begun_is_not_judged_again(gated: Cluster) -> None:
    change(gated)
    until_job(gated)
    gated.end_job(PASS)
    while len(gated.deployments()) < 2:
        gated.reconcile(ready=0)
    gated.update_spec(rollout={"gate": {**GATE, "margin": "9%"}})
    gated.settle()
    assert gated.status["currentRevision"] == gated.status["updateRevision"]
    assert [event.reason for event in gated.events].count("GateStarted") == 1


def test_the_comparison_waits_until_an_earlier_pod_of_the_pair_is_gone(gated: Cluster) -> None:
    change(gated)
    for _ in range(2):
        gated.reconcile(ready=0)
    (name,) = gated.deployments("candidate")
    labels = gated.objects["Deployment", name]["spec"]["template"]["metadata"]["labels"]
    owner = {"kind": "ReplicaSet", "name": f"{name}-1", "uid": "rs", "controller": True}
    ending = {"name": "ending", "uid": "ending", "labels": labels, "deletionTimestamp": "now"}
    ending["ownerReferences"] = [owner]
    gated.pods["ending"] = {"kind": "Pod", "metadata": ending, "status": {"podIP": "10.1.1.1"}}
    for _ in range(4):
        gated.reconcile()
        assert not gated.jobs()
    del gated.pods["ending"]
    until_job(gated)


def test_the_progress_is_shown_and_kept_while_the_pod_does_not_answer(gated: Cluster) -> None:
    change(gated)
    until_job(gated)
    assert gated.status["summary"]["gate"] == "Replaying 0/4"
    gated.gate_state = ABState(
        pairs=2,
        planned=4,
        verdict=VerdictKind.INCONCLUSIVE,
        reason="SinglePair",
        interval="a: 0.00",
    )
    gated.reconcile()
    assert gated.status["summary"]["gate"] == "Replaying 2/4 INCONCLUSIVE"
    gated.gate_state = None
    gated.reconcile()
    assert gated.status["summary"]["gate"] == "Replaying 2/4 INCONCLUSIVE"


def test_a_gate_without_an_image_waits_for_one(gated: Cluster) -> None:
    complete = gated.installation
    gated.installation = replace(complete, replay_image=None)
    change(gated)
    gated.settle()
    assert gated.condition("RolloutPaused") == ("True", "NoReplayImage")
    gated.installation = complete
    until_job(gated)


def test_the_limits_of_the_pair_stay_equal_while_those_of_the_service_change(
    gated: Cluster,
) -> None:
    change(gated)
    until_job(gated)
    budget = {"policy": "sarathi", "tokenBudget": {"initial": 512}}
    gated.update_spec(engine=budget, control={"mode": "Manual"})
    gated.reconcile()
    gated.reconcile()
    data = gated.objects["ConfigMap", "chat-config"]["data"]
    assert json.loads(data["limits.json"])["token_budget"] == 512
    assert json.loads(data["gate-limits.json"])["token_budget"] == 2048


@pytest.mark.parametrize("text", ["{", '{"key": 3}', "[]"])
def test_a_damaged_record_begins_the_gate_again(gated: Cluster, text: str) -> None:
    judge(gated, FAIL)
    update = gated.status["updateRevision"]
    gate = {"goodput.dev/gate": text}
    gated.edit(
        "ControllerRevision", update, lambda body: body["metadata"]["annotations"].update(gate)
    )
    until_job(gated)
    gated.end_job(FAIL)
    gated.settle()
    assert gate_of(gated)["phase"] == "Failed"


def test_a_history_is_mounted_and_passed_to_the_comparison(gated: Cluster) -> None:
    gated.update_spec(rollout={"gate": {**GATE, "history": "pvc://history/aa"}})
    change(gated)
    pod = until_job(gated)["spec"]["template"]["spec"]
    command = " ".join(pod["containers"][0]["command"])
    assert "--history /var/lib/goodput/claims/history/aa --pairs 4" in command
    mounts = {one["mountPath"]: one for one in pod["containers"][0]["volumeMounts"]}
    assert mounts["/var/lib/goodput/claims/history"]["readOnly"]


def recorded_gate(cluster: Cluster) -> dict[str, Any]:
    """Change the service under a gate with a recorded baseline, and return its Job."""
    gate = {**GATE, "baseline": "Recorded", "pairs": 1, "history": "pvc://history/aa"}
    cluster.update_spec(rollout={"gate": gate})
    change(cluster)
    return until_job(cluster)


def test_a_recorded_baseline_needs_only_one_engine(gated: Cluster) -> None:
    (stable,) = gated.deployments()
    command = recorded_gate(gated)["spec"]["template"]["spec"]["containers"][0]["command"]
    assert [list(d.values()) for d in trials(gated).values()] == [[], [1]]
    assert command.count("--target") == 1
    text = " ".join(command)
    recorded = f"--recorded /var/lib/goodput/claims/history/aa --recorded-revision {stable}"
    assert f"{recorded} --pairs 1" in text
    assert "gate-limits.json" in gated.objects["ConfigMap", "chat-config"]["data"]
    gated.end_job(PASS)
    gated.settle()
    assert gated.status["currentRevision"] == gated.status["updateRevision"] != stable
    assert trials(gated) == {"baseline": {}, "candidate": {}}


def test_a_recorded_baseline_without_room_for_the_candidate_waits(gated: Cluster) -> None:
    gated.full = {"candidate"}
    gate = {**GATE, "baseline": "Recorded", "pairs": 1, "history": "pvc://history/aa"}
    gated.update_spec(rollout={"gate": gate})
    change(gated)
    for _ in range(5):
        gated.reconcile()
    assert gated.condition("RolloutPaused") == ("True", "InsufficientCapacity")
    assert "0 of 1 engines of the gate are ready" in gated.message("RolloutPaused")


def test_a_lost_candidate_beside_a_recorded_baseline_voids_the_attempt(gated: Cluster) -> None:
    recorded_gate(gated)
    delete_pod(gated, "candidate")
    gated.end_job(FAIL)
    gated.reconcile()
    assert "of the candidate was replaced" in gate_of(gated)["message"]
    until_job(gated)


def test_another_baseline_begins_another_gate_and_removes_the_engine_of_the_first(
    gated: Cluster,
) -> None:
    change(gated)
    until_job(gated)
    fresh = trials(gated)
    assert len(fresh["baseline"]) == 1
    recorded_gate(gated)
    assert not trials(gated)["baseline"]
    assert trials(gated)["candidate"].keys().isdisjoint(fresh["candidate"])


@pytest.mark.parametrize("ends", [None, FAIL, INCONCLUSIVE])
def test_a_gate_that_the_api_server_drops_holds_the_revision(
    gated: Cluster, ends: str | None
) -> None:
    (stable,) = gated.deployments()
    change(gated)
    until_job(gated)
    if ends is not None:
        gated.end_job(ends)
        gated.settle()
    gated.update_spec(replicas=3)
    gated.reconcile()
    gated.spec = {**gated.spec, "rollout": {}}  # without another generation
    gated.undeclared = frozenset({"gate", "summary.gate"})
    gated.restart_operator()
    gated.settle()
    assert gated.deployments() == {stable: 3}
    assert trials(gated) == {"baseline": {}, "candidate": {}}
    assert gated.condition("RolloutPaused") == ("True", "GateNotStored")
    assert "gate" not in gated.status
    written = len(gated.written)
    for _ in range(5):
        assert not gated.reconcile().actions, "nothing is written again"
    assert len(gated.written) == written
    gated.update_spec(replicas=2)
    gated.settle()
    assert gated.deployments() == {stable: 2}, "a later change of the spec keeps it held"
    gated.annotations = {"goodput.dev/retry": "1"}
    gated.reconcile(ready=0)
    gated.annotations = {}
    gated.settle()
    assert list(gated.deployments()) == [gated.status["updateRevision"]] != [stable]


def test_a_gate_that_is_stored_again_begins_again(gated: Cluster) -> None:
    change(gated)
    until_job(gated)
    kept, gated.spec = gated.spec, {**gated.spec, "rollout": {}}
    gated.settle()
    assert gated.condition("RolloutPaused") == ("True", "GateNotStored")
    gated.update_spec(**kept)
    until_job(gated)
    gated.end_job(PASS)
    gated.settle()
    assert gated.status["currentRevision"] == gated.status["updateRevision"]


def test_a_status_without_room_for_the_gate_is_written_once(gated: Cluster) -> None:
    gated.undeclared = frozenset({"gate"})
    change(gated)
    for _ in range(12):
        gated.reconcile()
    assert "gate" not in gated.status
    for _ in range(5):
        assert not gated.reconcile().actions
    gated.end_job(PASS)
    gated.settle()
    assert gated.status["currentRevision"] == gated.status["updateRevision"]


def test_the_objects_of_a_gate_are_deleted_with_the_service(gated: Cluster) -> None:
    change(gated)
    until_job(gated)
    snapshot = gated.snapshot()
    snapshot.service["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert decide(snapshot, gated.installation).actions == ()
    kinds = Counter(kind for kind, _ in gated.objects)
    assert (kinds["Job"], kinds["Deployment"]) == (1, 4), "router, engines, candidate, baseline"
    for body in gated.objects.values():
        [owner] = body["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["controller"]) == ("LLMService", True)
