"""Conditions, Events and status: reasons, messages and times."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from goodput_core.control import Signal
from goodput_core.spec.codec import decode
from goodput_core.spec.status import LLMServiceStatus
from goodput_core.units import NS_PER_S
from goodput_operator.control.measures import UnmeasuredPod
from goodput_operator.reconcile.actions import Emit, WriteStatus

if TYPE_CHECKING:
    from tests.operator.reconcile.conftest import Cluster

    from goodput_operator.control.measures import Measures

GATE = {"gate": {"trace": "pvc://traces/prod.parquet", "baseline": "Recorded"}}
WIDE = {"model": {"source": "pvc://models/chat"}, "engine": {"tensorParallel": 2}}


@pytest.mark.parametrize(
    ("spec", "reason", "message"),
    [
        ({"minReplicas": 9, "maxReplicas": 2}, "InvalidSpec", "spec.minReplicas: 9 is above"),
        ({"engine": {"policy": "magic"}}, "InvalidSpec", "spec.engine.policy: must be one of"),
        ({"model": None}, "InvalidSpec", "spec.model: is required"),
        ({"rollout": GATE}, "InvalidSpec", "spec.rollout.gate.history: is required, because"),
        (WIDE, "NotBuilt", "spec.engine.tensorParallel: is 2, but real models"),
        (
            {"model": {"source": "hf://a/b"}},
            "InvalidSpec",
            "spec.model.revision: is required for hf://a/b in a cluster, because pods start",
        ),
        (
            {"model": {"source": "file:///models/chat"}},
            "InvalidSpec",
            "spec.model.source: file:///models/chat is a folder of one machine, which pods cannot",
        ),
        (
            {"model": {"source": "pvc://a/b"}, "engine": {"tensorParallel": 2}},
            "NotBuilt",
            "spec.engine.tensorParallel: is 2, but real models are computed on one device only",
        ),
        (
            {"model": {"source": "emulated://a100"}},
            "InvalidSpec",
            "spec.model.source: no device profile is called 'a100'; use one of llama-3-70b-4xh100,",
        ),
        (
            {"model": {"source": "emulated://typo.yaml"}},
            "InvalidSpec",
            "spec.model.source: no mount of spec.engine.pod.volumeMounts contains the device",
        ),
        (
            {"engine": {"tensorParallel": 4}},
            "InvalidSpec",
            "spec.engine.tensorParallel: is 4, but the device profile unit has 1",
        ),
    ],
    ids=[
        "between fields",
        "an unknown value",
        "a missing field",
        "a gate",
        "several devices",
        "weights",
        "a folder",
        "weights on several devices",
        "an unknown profile",
        "a profile that is not mounted",
        "a wrong tensor parallelism",
    ],
)
@pytest.mark.parametrize("before", [False, True], ids=["new", "running"])
def test_an_invalid_spec_stalls_and_changes_nothing(
    cluster: Cluster, before: bool, spec: dict[str, Any], reason: str, message: str
) -> None:
    if before:
        cluster.settle()
    cluster.update_spec(**spec)
    cluster.written.clear()
    cluster.settle()
    assert cluster.condition("Stalled") == ("True", reason)
    assert cluster.message("Stalled").startswith(message)
    assert cluster.condition("Ready")[0] == str(before)
    assert cluster.written == []
    assert cluster.status["observedGeneration"] == cluster.generation
    assert cluster.status["summary"]["phase"] == reason
    assert reason in [e.reason for e in cluster.events if e.warning]


def waiting(reason: str, message: str, /, **last: Any) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    one = {"name": "engine", "state": state, "lastState": last and {"terminated": last}}
    return {"containerStatuses": [one]}


def runs_again(
    state: str = "running",
    restarts: int = 7,
    last_began: str = "2026-01-01T08:59:00Z",
    ready_changed: str = "2026-01-01T08:59:30Z",
) -> dict[str, Any]:
    """Return the status of a pod whose container started again at nine o'clock."""
    last = {"exitCode": 1, "message": "out of memory", "startedAt": last_began}
    one = {
        "name": "engine",
        "restartCount": restarts,
        "state": {state: {"startedAt": "2026-01-01T09:00:00Z"}},
        "lastState": {"terminated": {**last, "finishedAt": "2026-01-01T08:59:30Z"}},
    }
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": ready_changed}
    return {"conditions": [ready], "containerStatuses": [one]}


POD_PROBLEMS = [
    (
        waiting("ImagePullBackOff", 'Back-off pulling image "x:1": not found'),
        ("True", "ImagePullFailed"),
        'Back-off pulling image "x:1": not found',
    ),
    (
        waiting("CreateContainerConfigError", 'secret "hub" not found'),
        ("True", "ContainerConfig"),
        'secret "hub" not found',
    ),
    (
        waiting("CrashLoopBackOff", "back-off 10s", exitCode=64, message="a\nerror: no profile\n"),
        ("True", "CrashLooping"),
        "the engine exited with code 64: error: no profile",
    ),
    (
        waiting("CrashLoopBackOff", "back-off 10s", exitCode=137, reason="OOMKilled"),
        ("True", "CrashLooping"),
        "the engine was killed because it ran out of memory",
    ),
    (waiting("ContainerCreating", ""), ("False", "Unhindered"), ""),
    (runs_again(), ("True", "CrashLooping"), "the engine exited with code 1: out of memory"),
    (
        runs_again(state="terminated"),
        ("True", "CrashLooping"),
        "the engine exited with code 1: out of memory",
    ),
    (runs_again(restarts=1), ("False", "Unhindered"), ""),
    (runs_again(last_began="2026-01-01T08:00:00Z"), ("False", "Unhindered"), ""),
    (runs_again(ready_changed="2026-01-01T09:10:00Z"), ("False", "Unhindered"), ""),
]


@pytest.mark.parametrize(
    ("status", "stalled", "message"),
    POD_PROBLEMS,
    ids=[
        "image",
        "secret",
        "crash",
        "memory",
        "starting",
        "runs between two crashes",
        "ended, not yet waiting",
        "one crash",
        "a crash after a long run",
        "ready since the last crash",
    ],
)
def test_a_pod_that_cannot_start_is_reported_with_the_clusters_message(
    running: Cluster, status: dict[str, Any], stalled: tuple[str, str], message: str
) -> None:
    pod = running.engines()[0]
    pod["status"] = status
    running.broken = set(running.deployments())
    running.reconcile()
    assert running.condition("Stalled") == stalled
    assert message in running.message("Stalled")
    running.broken = set()
    running.settle()
    pod["status"].pop("containerStatuses")
    running.settle()
    assert running.condition("Stalled") == ("False", "Unhindered")


def test_a_prometheus_server_that_is_not_allowed_stalls_and_changes_nothing_else(
    running: Cluster,
) -> None:
    running.update_spec(control={"prometheus": {"url": "http://prometheus:9090"}})
    running.settle()
    assert running.condition("Stalled") == ("True", "PrometheusNotAllowed")
    assert running.condition("Ready") == ("True", "Serving")
    allowed = frozenset({"http://prometheus:9090"})
    running.installation = replace(running.installation, prometheus_urls=allowed)
    running.written.clear()
    running.settle()
    assert running.condition("Stalled") == ("False", "Unhindered")
    assert running.written == [], "allowed URLs replace no pod"


def test_tenants_that_are_not_replaced_stall_until_the_secret_is_corrected(
    running: Cluster,
) -> None:
    problem = "router r: /t: line 2: a tenant has 1 to 4 hashes of keys; write NAME"
    invalid = replace(running.measured(), tenants_problem=problem)
    running.update_spec(router={"tenantsSecret": {"name": "keys"}})
    running.settle()
    decision = running.reconcile(invalid)
    assert running.condition("Stalled") == ("True", "TenantsNotReplaced")
    message = running.message("Stalled")
    assert message.startswith("Secret keys, key tenants: the last valid tenants stay in use")
    assert message.endswith(problem)
    assert running.condition("Ready") == ("True", "Serving")
    assert "TenantsNotReplaced" in {e.reason for e in decision.actions if isinstance(e, Emit)}
    running.reconcile(replace(invalid, tenants_problem=None))
    running.reconcile()
    assert running.condition("Stalled") == ("True", "TenantsNotReplaced"), "not measured since"
    running.reconcile(replace(invalid, tenants_problem=""))
    assert running.condition("Stalled") == ("False", "Unhindered")
    running.reconcile(invalid)
    running.update_spec(router={})
    running.settle()
    assert running.condition("Stalled") == ("False", "Unhindered"), "the spec names no Secret"


def test_a_pod_without_a_node_reconciles_and_limits_scaling(running: Cluster) -> None:
    message = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    running.broken = set(running.deployments())
    running.update_spec(replicas=3)
    running.reconcile()
    (pod,) = running.engines(ready=False)
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    pod["status"] = {"conditions": [{**unscheduled, "message": message}]}
    running.reconcile()
    assert running.condition("Stalled") == ("False", "Unhindered")
    assert running.condition("Reconciling") == ("True", "Unschedulable")
    assert running.condition("ScalingLimited") == ("True", "Unschedulable")
    assert message in running.message("ScalingLimited")
    assert running.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        (
            {"type": "ReplicaFailure", "status": "True", "message": 'exceeded quota: "gpu"'},
            "QuotaExceeded",
        ),
        (
            {"type": "ReplicaFailure", "status": "True", "message": "violates PodSecurity"},
            "Refused",
        ),
        (
            {
                "type": "Progressing",
                "status": "False",
                "reason": "ProgressDeadlineExceeded",
                "message": "has timed out progressing",
            },
            "ProgressDeadlineExceeded",
        ),
    ],
    ids=["quota", "admission", "deadline"],
)
def test_a_failure_reported_by_a_deployment_stalls(
    running: Cluster, condition: dict[str, Any], reason: str
) -> None:
    (name,) = running.deployments()
    running.objects["Deployment", name]["status"]["conditions"] = [condition]
    running.reconcile()
    assert running.condition("Stalled") == ("True", reason)
    assert condition["message"] in running.message("Stalled")
    limited = "False" if reason == "ProgressDeadlineExceeded" else "True"
    assert running.condition("ScalingLimited")[0] == limited


def test_a_rejected_object_stalls_with_the_servers_message(running: Cluster) -> None:
    running.remove("Service", "chat")
    running.reconcile()
    running.remove("Service", "chat")
    running.failures = {("Service", "chat"): 'exceeded quota: "few", requested: services=1'}
    running.reconcile()
    assert running.condition("Stalled") == ("True", "QuotaExceeded")
    assert running.message("Stalled").startswith("Service chat: exceeded quota")
    assert running.condition("Reconciling") == ("True", "Creating")
    running.settle()
    assert [e.reason for e in running.events][-1] == "Recovered"


@pytest.mark.parametrize("missing", [True, False], ids=["missing", "edited"])
def test_a_temporary_failure_does_not_stall(running: Cluster, missing: bool) -> None:
    message = "the API server did not respond within 10 s"
    key = ("Service", "chat")
    before = len(running.events)
    if missing:
        running.remove(*key)
    running.delayed = {key: message, ("Event", "Scaled"): "busy", ("LLMService", "chat"): "busy"}
    running.reconcile()
    assert running.condition("Stalled") == ("False", "Unhindered")
    assert running.condition("Reconciling") == ("True", "Creating" if missing else "Retrying")
    assert running.message("Reconciling").endswith(f"Service chat: {message}")
    running.settle()
    assert running.condition("Reconciling") == ("False", "Settled")
    assert running.events[before:] == [], "no state changed"


WINDOWS = [
    ([(0, 0)], ("Unknown", "NoTraffic"), "5 minutes"),
    ([(3, 3)], ("Unknown", "TooFewRequests"), "at least 410 requests"),
    ([(20, 20)], ("Unknown", "TooFewRequests"), "20 of 20"),
    ([(500, 500)], ("True", "Attained"), "over the last 5 minutes: a: 500 of 500"),
    ([(5, 5)] * 100, ("True", "Attained"), "over the last "),
    ([(50, 100)], ("False", "Missed"), "5 minutes"),
    ([(97, 99)], ("Unknown", "TooFewRequests"), "5 minutes"),
    ([(495, 500)], ("Unknown", "IntervalSpansObjective"), "between"),
    ([(0, 5)], ("False", "Missed"), "0 of 5"),
]


@pytest.mark.parametrize(
    ("counts", "condition", "message"), WINDOWS, ids=[str(c[0]) for c in WINDOWS]
)
def test_slo_attained_follows_the_rule_of_a_run(
    running: Cluster, counts: list[tuple[int, int]], condition: tuple[str, str], message: str
) -> None:
    for good, total in counts:
        over_s = 300 if len(counts) == 1 else 10
        running.reconcile(running.measured(good, total, over_s=over_s))
    assert running.condition("SLOAttained") == condition
    assert message in running.message("SLOAttained")


def test_1066_requests_just_below_95_percent_are_not_too_few(running: Cluster) -> None:
    (slo_class,) = running.spec["slo"]["classes"]
    running.update_spec(slo={"classes": [slo_class | {"objective": "95%"}]})
    running.reconcile(running.measured(1005, 1066, over_s=300))
    assert running.condition("SLOAttained") == ("Unknown", "IntervalSpansObjective")


def test_a_long_window_is_judged_again_after_a_sixtieth_of_its_length(running: Cluster) -> None:
    running.reconcile(running.measured(500, 500, over_s=3600))
    assert running.condition("SLOAttained") == ("True", "Attained")
    assert "60 minutes" in running.message("SLOAttained")
    for _ in range(5):
        running.reconcile(running.measured(1, 2, over_s=1))
        assert "500 of 500" in running.message("SLOAttained")
    running.now_ns += 60 * NS_PER_S
    running.reconcile(running.measured(1, 2, over_s=1))
    assert "of 500" not in running.message("SLOAttained")


def test_a_failing_five_minute_window_is_reported_at_once(running: Cluster) -> None:
    running.reconcile(running.measured(500, 500, over_s=3600))
    assert "60 minutes" in running.message("SLOAttained")
    running.reconcile(running.measured(0, 50, over_s=10))
    assert running.condition("SLOAttained") == ("False", "Missed")


def test_a_declared_outage_needs_a_longer_window(running: Cluster) -> None:
    running.reconcile(running.measured(5000, 5000, over_s=300))
    assert running.condition("SLOAttained") == ("True", "Attained")
    running.update_spec(slo=running.spec["slo"] | {"outageSeconds": 10})
    running.reconcile(running.measured(5, 5))
    assert running.condition("SLOAttained") == ("Unknown", "IntervalSpansObjective")
    assert "an unobserved outage" in running.message("SLOAttained")


def test_counts_follow_the_requests_while_other_things_are_written(running: Cluster) -> None:
    """A reconciliation without measurements writes the latest counts, not the stored ones."""
    running.reconcile(running.measured(5, 5))
    written = running.status["classes"]
    for count in range(1, 15):
        running.reconcile(running.measured(5, 5))
        # Another part of the status changes, and is written at once.
        pod = running.engines()[0]
        pod["status"]["conditions"] = [{"type": "Ready", "status": str(count % 2 == 0)}]
        running.run_deployments(ready=0)
        running.decide()
    (then,), (now,) = written, running.status["classes"]
    assert now["total"] == 75 > then["total"]


def test_counts_are_written_once_a_minute_without_a_measurement_at_that_time(
    running: Cluster,
) -> None:
    running.reconcile(running.measured(5, 5))
    running.now_ns += NS_PER_S
    decision = running.decide(running.measured(5, 5))
    due_ns = decision.wake_at_ns
    assert not any(isinstance(action, WriteStatus) for action in decision.actions)
    while running.status["classes"][0]["total"] == 5:
        assert due_ns is not None
        running.now_ns = due_ns
        due_ns = running.decide().wake_at_ns
        assert running.now_ns < 10_200 * NS_PER_S, "counts were not written for minutes"
    assert running.status["classes"][0]["total"] == 10


@pytest.mark.parametrize(
    ("signal", "reason"),
    [(Signal.FAILED, "ScrapeFailed"), (Signal.MISSING, "MetricsMissing")],
    ids=["no answer", "no numbers"],
)
def test_missing_measurements_are_not_reported_as_no_traffic(
    running: Cluster, signal: Signal, reason: str
) -> None:
    running.reconcile(running.measured(500, 500, over_s=300))
    running.reconcile(running.measured(0, 0, signal=signal))
    assert running.condition("SLOAttained") == ("Unknown", reason)


@pytest.mark.parametrize(
    ("signal", "reason"),
    [(Signal.FAILED, "ScrapeFailed"), (Signal.MISSING, "MetricsMissing")],
    ids=["no answer", "no numbers"],
)
def test_an_engine_without_measurements_is_reported_and_does_not_affect_slo_attained(
    running: Cluster, signal: Signal, reason: str
) -> None:
    engine = UnmeasuredPod(role="engine", name="chat-1", signal=signal, detail="a timeout")
    running.reconcile(replace(running.measured(500, 500, over_s=300), unmeasured=(engine,)))
    assert running.condition("SLOAttained") == ("True", "Attained")
    assert running.events[-1] == Emit(
        warning=True, reason=reason, message="engine chat-1: a timeout"
    )
    router = UnmeasuredPod(role="router", name="chat-r", signal=signal, detail="a second timeout")
    running.reconcile(replace(running.measured(0, 0, signal=signal), unmeasured=(router, engine)))
    assert running.condition("SLOAttained") == ("Unknown", reason)
    assert running.message("SLOAttained") == "a second timeout"


def test_unmeasured_pods_are_reported_once_in_one_event(running: Cluster) -> None:
    def unmeasured(*pods: str) -> Measures:
        those = (
            UnmeasuredPod(role="engine", name=p, signal=Signal.FAILED, detail="hangs") for p in pods
        )
        return replace(running.measured(300, 300), unmeasured=tuple(those))

    def reported() -> list[str]:
        return [one.message for one in running.events if one.reason == "ScrapeFailed"]

    for _ in range(3):
        running.reconcile(unmeasured("chat-1", "chat-2", "chat-3"))
        running.reconcile()
    assert reported() == ["engine chat-1: hangs; and 2 more"]
    running.reconcile(unmeasured("chat-2", "chat-3", "chat-4"))
    assert reported()[1:] == ["engine chat-4: hangs"]
    running.reconcile(unmeasured())
    running.reconcile(unmeasured("chat-2"))
    assert reported()[2:] == ["engine chat-2: hangs"], "the engine had responded in between"


def test_no_traffic_is_reported_only_after_a_measurement(cluster: Cluster) -> None:
    cluster.settle()
    assert cluster.condition("SLOAttained") == ("Unknown", "MetricsMissing")
    cluster.reconcile(cluster.measured(0, 0))
    assert cluster.condition("SLOAttained") == ("Unknown", "NoTraffic")
    cluster.reconcile()
    assert cluster.condition("SLOAttained") == ("Unknown", "NoTraffic"), "the measured state stays"


def test_a_suspended_service_drops_its_measurements(running: Cluster) -> None:
    running.update_spec(replicas=None, minReplicas=2)
    running.reconcile(running.measured(300, 300))
    assert running.status["goodput"] == "30/s"
    assert running.status["summary"]["attainment"] == "100.00%/99%"
    running.reconcile()
    assert {"goodput", "classes", "recommendedReplicas"} <= running.status.keys()
    running.update_spec(suspend=True)
    running.reconcile()
    assert not {"goodput", "classes", "recommendedReplicas"} & running.status.keys()
    assert not {"goodput", "attainment"} & running.status["summary"].keys()
    assert running.condition("SLOAttained") == ("Unknown", "Suspended")
    running.update_spec(suspend=None)
    running.reconcile()
    assert running.condition("SLOAttained") == ("Unknown", "MetricsMissing")


def test_requests_before_the_window_are_not_counted(running: Cluster) -> None:
    running.reconcile(running.measured(0, 100, over_s=60))
    assert running.condition("SLOAttained") == ("False", "Missed")
    running.now_ns += 301 * NS_PER_S
    running.reconcile(running.measured(0, 0))
    assert running.condition("SLOAttained") == ("Unknown", "NoTraffic")


def test_classes_and_columns_show_attainment(running: Cluster) -> None:
    running.reconcile(running.measured(90, 100))
    (one,) = running.status["classes"]
    assert one == {
        "name": "a", "good": 90, "total": 100, "attainment": "90.00%", "lower": "81.24%",
        "upper": "95.42%", "objective": "99%",
    }  # fmt: skip
    assert running.status["goodput"] == "9/s"
    summary = running.status["summary"]
    assert summary["attainment"] == "90.00%/99%"
    assert summary["goodput"] == "9/s"
    running.reconcile()
    assert running.status["summary"] == summary, "there was no new measurement"


def test_a_requested_suspension_is_not_a_warning(running: Cluster) -> None:
    running.events.clear()
    running.update_spec(suspend=True)
    running.settle()
    assert running.condition("Ready") == ("False", "Suspended")
    assert [(e.reason, e.warning) for e in running.events if e.reason == "Suspended"] == [
        ("Suspended", False)
    ]


def test_goodput_above_a_thousand_is_a_plain_number(running: Cluster) -> None:
    running.reconcile(running.measured(12_345, 12_345))
    assert running.status["summary"]["goodput"] == "1234/s"


def test_the_status_matches_the_schema(running: Cluster) -> None:
    running.update_spec(replicas=None, minReplicas=3)
    running.settle()
    running.reconcile(running.measured(90, 100))
    decode(LLMServiceStatus, running.status, "status")
    assert all(one["message"] for one in running.status["conditions"]), "no message is empty"


def test_conditions_keep_the_time_of_their_last_change(running: Cluster) -> None:
    earlier = {c["type"]: c["lastTransitionTime"] for c in running.status["conditions"]}
    running.now_ns += 100 * NS_PER_S
    running.update_spec(replicas=3)
    running.reconcile()
    now = {c["type"]: c["lastTransitionTime"] for c in running.status["conditions"]}
    assert now["Ready"] == earlier["Ready"]
    assert now["Reconciling"] > earlier["Reconciling"]
    assert {c["observedGeneration"] for c in running.status["conditions"]} == {2}


def test_a_service_that_stops_serving_warns_once(running: Cluster) -> None:
    running.events.clear()
    running.broken = set(running.deployments())
    for pod in running.engines():
        pod["status"]["conditions"] = []
    for _ in range(3):
        running.reconcile()
    assert running.condition("Ready") == ("False", "NoEngine")
    assert [(e.reason, e.warning) for e in running.events] == [("NoEngine", True)]


VLLM = {"runtime": {"kind": "vLLM", "image": "v"}}
WEIGHTS = {"source": "pvc://weights/chat"}


def test_the_status_names_what_another_server_lacks(cluster: Cluster) -> None:
    cluster.settle()
    assert "RuntimeLimited" not in {c["type"] for c in cluster.status["conditions"]}
    cluster.update_spec(model=WEIGHTS, engine=VLLM)
    cluster.settle()
    assert cluster.condition("RuntimeLimited") == ("True", "NoLimits")
    assert "X-SLO" in cluster.message("RuntimeLimited")
    assert cluster.status["tokenBudget"] == 2048, "an argument of the server"
    name = cluster.engines()[0]["metadata"]["name"]
    silent = UnmeasuredPod(role="engine", name=name, signal=Signal.FAILED, detail="404")
    cluster.reconcile(replace(cluster.measured(50, 50), unmeasured=(silent,)))
    assert cluster.condition("RuntimeLimited") == ("True", "NoReadings")
    assert cluster.condition("Ready") == ("True", "Serving")
    assert cluster.condition("Stalled")[0] == "False"
    cluster.reconcile(cluster.measured(50, 50))
    assert cluster.condition("RuntimeLimited") == ("True", "NoLimits")
    cluster.update_spec(engine={**VLLM, "tokenBudget": {"initial": 4096}})
    cluster.reconcile()
    assert cluster.status["tokenBudget"] == 2048, "the earlier revision still serves"
    cluster.settle()
    assert cluster.status["tokenBudget"] == 4096
    assert cluster.status["summary"]["budget"] == "4096"
    cluster.update_spec(model=None, engine={})
    cluster.spec["model"] = {"source": "emulated://unit"}
    cluster.settle()
    assert "RuntimeLimited" not in {c["type"] for c in cluster.status["conditions"]}


def test_a_server_without_a_metrics_path_has_no_readings_and_no_budget(cluster: Cluster) -> None:
    cluster.update_spec(model=WEIGHTS, engine={"runtime": {"kind": "OpenAI", "image": "o"}})
    cluster.settle()
    assert cluster.condition("RuntimeLimited") == ("True", "NoReadings")
    assert "metricsPath is not set" in cluster.message("RuntimeLimited")
    assert "tokenBudget" not in cluster.status
    assert "budget" not in cluster.status["summary"]


def test_another_server_gets_no_limits_and_no_token(cluster: Cluster) -> None:
    cluster.update_spec(model=WEIGHTS, engine=VLLM)
    cluster.settle()
    for _ in range(3):
        measured = cluster.measured(0, 50, limits=0)
        engines = tuple(replace(one, foreign=True) for one in measured.engines)
        cluster.reconcile(replace(measured, engines=engines))
    assert cluster.pushed == []
    assert cluster.secrets == set()
