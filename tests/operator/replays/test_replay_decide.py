"""The decision of a TraceReplay, on values: every wait ends, and nothing is sent twice."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from goodput_core.replay_job import ABResult, ReplayResult, ShardState, encode_message
from goodput_core.slo.verdict import VerdictKind
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_operator.kube.objects import format_time
from goodput_operator.reconcile.actions import Create, Delete, Emit, WriteStatus
from goodput_operator.render.pods import Installation
from goodput_operator.replays.actions import (
    CreateReplayToken,
    PostStart,
    ReplayDecision,
)
from goodput_operator.replays.decide import decide
from goodput_operator.replays.snapshot import ReplaySnapshot, ShardReading
from goodput_operator.replays.status import is_finished

if TYPE_CHECKING:
    from collections.abc import Mapping

INSTALLATION = Installation(engine_image="e:1", router_image="r:1", replay_image="replay:1")
CREATED_S = 1_800_000_000
UID = "0c0ffee0-0000-0000-0000-000000000000"
SLO = {"classes": [{"name": "chat", "ttftMs": 500, "tpotMs": 50, "objective": "99%"}]}
PASSING = ReplayResult(
    verdict=VerdictKind.PASS, reason="Attained", message="all met", valid=True, requests=9
)


def replay(status: Mapping[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "goodput.dev/v1alpha1",
        "kind": "TraceReplay",
        "metadata": {
            "name": "night",
            "namespace": "team",
            "uid": UID,
            "generation": 1,
            "creationTimestamp": format_time(CREATED_S),
        },
        "spec": {
            "trace": "pvc://traces/prod.parquet",
            "target": {"service": "chat"},
            "records": "pvc://records/runs",
            "allowProduction": True,
            "gate": {},
            "shards": 3,
            **spec,
        },
        "status": dict(status or {}),
    }


def job(name: str, **conditions: str) -> dict[str, Any]:
    """Return a Job of the replay; conditions by type with their reason."""
    return {
        "kind": "Job",
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "ownerReferences": [{"uid": UID, "controller": True}],
        },
        "status": {
            "conditions": [
                {"type": kind, "status": "True", "reason": reason}
                for kind, reason in conditions.items()
            ]
        },
    }


def pod(
    owner: str, index: int, *, ended: ReplayResult | ABResult | str | None = None, code: int = 0
) -> Any:
    """Return a pod of a Job: armed, or ended with a termination message."""
    ready = {"type": "Ready", "status": "True" if ended is None else "False"}
    status: dict[str, Any] = {"podIP": f"10.0.0.{index}", "conditions": [ready]}
    if ended is not None:
        message = ended if isinstance(ended, str) else encode_message(ended)
        terminated = {"exitCode": code, "message": message, "finishedAt": format_time(CREATED_S)}
        status["containerStatuses"] = [{"state": {"terminated": terminated}}]
        status["phase"] = "Succeeded" if code == 0 else "Failed"
    return {
        "kind": "Pod",
        "metadata": {
            "name": f"{owner}-{index}-x",
            "ownerReferences": [{"kind": "Job", "name": owner}],
        },
        "status": status,
    }


def service(**labels: str) -> dict[str, Any]:
    return {"metadata": {"name": "chat", "labels": labels}, "spec": {"slo": SLO}}


def reading(*, ahead_ms: int = 0, rtt_ms: int = 2, start_at_ns: int | None = None) -> ShardReading:
    asked_ns = CREATED_S * NS_PER_S
    answered_ns = asked_ns + rtt_ms * NS_PER_MS
    wall_ns = (asked_ns + answered_ns) // 2 + ahead_ms * NS_PER_MS
    state = ShardState(shard=1, shards=3, requests=5, wall_ns=wall_ns, start_at_ns=start_at_ns)
    return ShardReading(state=state, asked_ns=asked_ns, answered_ns=answered_ns)


def snapshot(*, after_s: float = 0, **fields: Any) -> ReplaySnapshot:
    values: dict[str, Any] = {
        "replay": replay(),
        "service": service(),
        "claims": {"traces": ("ReadOnlyMany",), "records": ("ReadWriteMany",)},
        **fields,
    }
    return ReplaySnapshot(unix_ns=round((CREATED_S + after_s) * NS_PER_S), **values)


def armed(**fields: Any) -> ReplaySnapshot:
    """Return a snapshot with three armed shards."""
    pods = tuple(pod("night-shards", index) for index in range(3))
    readings = {one["metadata"]["name"]: reading() for one in pods}
    return snapshot(
        **{"jobs": (job("night-shards"),), "pods": pods, "readings": readings, **fields}
    )


def run(given: ReplaySnapshot) -> ReplayDecision:
    return decide(given, INSTALLATION)


def written(decision: ReplayDecision) -> dict[str, Any]:
    [status] = [dict(a.status) for a in decision.actions if isinstance(a, WriteStatus)]
    return status


def outcome(decision: ReplayDecision) -> tuple[str, str, str, str]:
    """Return verdict, reason, message and the condition `Passed` of a decision that ends."""
    status = written(decision)
    conditions = {one["type"]: one["status"] for one in status["conditions"]}
    assert conditions["Finished"] == "True"
    return status["verdict"], status["reason"], status["message"], conditions["Passed"]


def stored(given: ReplaySnapshot, decision: ReplayDecision, **fields: Any) -> ReplaySnapshot:
    """Return the snapshot after a decision's status was stored."""
    return replace(given, replay={**given.replay, "status": written(decision)}, **fields)


# --- Pending --------------------------------------------------------------------------------


def test_a_replay_starts_with_the_token_and_then_the_job() -> None:
    status, token, created = run(snapshot()).actions
    assert isinstance(token, CreateReplayToken)
    assert isinstance(created, Create)
    assert isinstance(status, WriteStatus)
    spec = created.body["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (3, 3, 0)
    assert (spec["completionMode"], spec["podReplacementPolicy"]) == ("Indexed", "Failed")
    command = created.body["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:4] == [
        "goodput",
        "replay",
        "--trace",
        "/var/lib/goodput/claims/traces/prod.parquet",
    ]
    assert command[command.index("--target") + 1] == "http://chat.team.svc"
    assert command[command.index("--shard") + 1] == "job/3"
    assert status.status["phase"] == "Arming"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"service": None}, "TargetNotFound"),
        ({"claims": {"traces": None, "records": ("ReadWriteMany",)}}, "ClaimNotFound"),
        ({"unread": "PersistentVolumeClaim traces: forbidden"}, "ClaimNotRead"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_object_is_awaited_until_the_deadline(
    change: dict[str, Any], reason: str
) -> None:
    waiting = run(snapshot(**change))
    status = written(waiting)
    assert (status["phase"], status["conditions"][0]["reason"]) == ("Pending", reason)
    assert waiting.wake_after_s == 5
    assert outcome(run(snapshot(after_s=600, **change)))[:2] == ("INVALID", reason)


def test_production_is_replayed_only_if_the_spec_allows_it() -> None:
    forbidden = replay(allowProduction=False)
    verdict, reason, message, passed = outcome(run(snapshot(replay=forbidden)))
    assert (verdict, reason, passed) == ("INVALID", "ProductionNotAllowed", "Unknown")
    assert message.startswith("chat may serve clients; set spec.allowProduction to true")
    test_service = service(**{"goodput.dev/production": "false"})
    allowed = run(snapshot(replay=forbidden, service=test_service))
    assert any(isinstance(action, Create) for action in allowed.actions)
    url = replay(allowProduction=False, target={"url": "http://llm"}, slo=SLO)
    assert outcome(run(snapshot(replay=url, service=None)))[1] == "ProductionNotAllowed"


@pytest.mark.parametrize(
    ("claims", "shards", "refused"),
    [
        ({"traces": ("ReadOnlyMany",), "records": ("ReadWriteOnce",)}, 3, True),
        ({"traces": ("ReadOnlyMany",), "records": ("ReadOnlyMany",)}, 3, True),
        ({"traces": ("ReadWriteOnce",), "records": ("ReadWriteMany",)}, 3, True),
        ({"traces": ("ReadWriteOnce",), "records": ("ReadWriteOnce",)}, 1, False),
        ({"traces": ("ReadWriteMany",), "records": ("ReadWriteOnce", "ReadWriteMany")}, 3, False),
    ],
)
def test_a_claim_of_one_node_is_refused_for_several_shards(
    claims: dict[str, tuple[str, ...]],
    shards: int,
    refused: bool,
) -> None:
    decision = run(snapshot(replay=replay(shards=shards), claims=claims))
    if refused:
        assert outcome(decision)[:2] == ("INVALID", "StorageRefused")
    else:
        assert any(isinstance(action, Create) for action in decision.actions)


def test_several_shards_need_a_tokenizer_that_all_can_read() -> None:
    exact = replay(shards=3, target={"service": "chat", "tokenizer": "pvc://weights"})
    claims = {"traces": ("ReadOnlyMany",), "records": ("ReadWriteMany",)}
    refused = run(snapshot(replay=exact, claims={**claims, "weights": ("ReadWriteOnce",)}))
    assert outcome(refused)[:2] == ("INVALID", "StorageRefused")
    shared = run(snapshot(replay=exact, claims={**claims, "weights": ("ReadOnlyMany",)}))
    assert any(isinstance(action, Create) for action in shared.actions)


def test_an_invalid_spec_ends_the_replay() -> None:
    verdict, reason, message, _ = outcome(run(snapshot(replay=replay(shards=0))))
    assert (verdict, reason) == ("INVALID", "InvalidSpec")
    assert message.startswith("spec.shards: must lie in 1 to 100")


def test_without_an_image_the_replay_names_the_field() -> None:
    decision = decide(snapshot(), replace(INSTALLATION, replay_image=None))
    assert outcome(decision)[2].startswith("spec.image: is required")


# --- Arming and Running ---------------------------------------------------------------------


def test_all_armed_shards_are_sent_one_start_that_is_stored_first() -> None:
    decision = run(armed())
    status, *posts = decision.actions
    assert isinstance(status, WriteStatus)
    start = status.status["startTime"]
    assert status.status["armed"] == "3/3"
    assert posts == [
        PostStart(pod=f"night-shards-{index}-x", url=f"http://10.0.0.{index}:9000", start_at=start)
        for index in range(3)
    ]
    assert format_time(CREATED_S + 5) <= start <= format_time(CREATED_S + 7)


def test_the_start_is_ahead_on_the_clock_of_the_shards_not_of_the_operator() -> None:
    given = armed()
    given = replace(given, readings={name: reading(ahead_ms=60_000) for name in given.readings})
    assert written(run(given))["startTime"] >= format_time(CREATED_S + 65)


def test_a_start_that_a_shard_lacks_is_sent_again_to_that_shard_only() -> None:
    given = armed()
    after = stored(given, run(given))
    names = sorted(given.readings)
    readings = {name: reading(start_at_ns=1) for name in names} | {names[1]: reading()}
    decision = run(replace(after, readings=readings))
    assert [a.pod for a in decision.actions if isinstance(a, PostStart)] == [names[1]]
    assert decision.wake_after_s == 1


def test_a_shard_that_missed_the_start_makes_the_replay_invalid() -> None:
    given = armed()
    after = stored(given, run(given))
    late = replace(after, unix_ns=after.unix_ns + 30 * NS_PER_S)
    verdict, reason, message, _ = outcome(run(late))
    assert (verdict, reason) == ("INVALID", "StartMissed")
    assert "night-shards-0-x" in message
    assert run(replace(late, readings={})) == ReplayDecision()


@pytest.mark.parametrize(
    ("readings", "skewed"),
    [
        ([0, 900, -50], False),
        ([0, 1100, 0], True),
        ([5000, 5000, 5000], False),
        ([-700, 0, 700], True),
    ],
)
def test_clocks_that_differ_by_more_than_a_second_are_invalid(
    readings: list[int], skewed: bool
) -> None:
    given = armed()
    found = dict(zip(sorted(given.readings), map(_ahead, readings), strict=True))
    decision = run(replace(given, readings=found))
    if skewed:
        verdict, reason, message, _ = outcome(decision)
        assert (verdict, reason) == ("INVALID", "ClockSkew")
        assert "the clocks of the shards' nodes differ by at least 1." in message
    else:
        assert "startTime" in written(decision)


def _ahead(ahead_ms: int) -> ShardReading:
    return reading(ahead_ms=ahead_ms)


def test_a_slow_response_is_not_taken_for_skew() -> None:
    given = armed()
    names = sorted(given.readings)
    slow = {**given.readings, names[0]: reading(ahead_ms=1400, rtt_ms=2900)}
    assert "startTime" in written(run(replace(given, readings=slow)))


def test_shards_that_are_not_armed_are_awaited_until_the_deadline() -> None:
    given = armed(readings={})
    status = written(run(given))
    assert (status["phase"], status["armed"]) == ("Arming", "0/3")
    unscheduled = pod("night-shards", 2)
    unscheduled["status"] = {
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes"}]
    }
    late = armed(after_s=601, pods=(*given.pods[:2], unscheduled), readings={})
    verdict, reason, message, _ = outcome(run(late))
    assert (verdict, reason) == ("INVALID", "NotArmed")
    assert message.endswith("pod night-shards-2-x is not scheduled: 0/2 nodes")
    rejected = armed(after_s=601, pods=given.pods[:2], readings={})
    assert outcome(run(rejected))[2].endswith(
        "; 2 of 3 pods exist; `kubectl describe job night-shards` shows why"
    )


def test_a_job_that_cannot_be_created_ends_the_replay_at_the_deadline() -> None:
    assert outcome(run(snapshot(after_s=600)))[:2] == ("INVALID", "NotArmed")


def test_an_error_before_the_start_is_quoted() -> None:
    failed = pod(
        "night-shards", 0, ended=ReplayResult(reason="Error", message="x: no such file"), code=64
    )
    decision = run(snapshot(jobs=(job("night-shards"),), pods=(failed,)))
    assert outcome(decision)[1:3] == (
        "ShardFailed",
        "pod night-shards-0-x failed before the start: x: no such file",
    )


@pytest.mark.parametrize(
    ("conditions", "ended", "reason", "text"),
    [
        ({}, "Killed", "ShardLost", "ended during the run (exit code 137): Killed"),
        ({"Failed": "BackoffLimitExceeded"}, None, "ShardLost", "a pod of a shard was deleted"),
        ({"Failed": "DeadlineExceeded"}, "", "DeadlineExceeded", "spec.deadlineSeconds, 21600 s"),
    ],
)
def test_a_lost_shard_ends_the_run(
    conditions: dict[str, str], ended: str | None, reason: str, text: str
) -> None:
    given = armed()
    lost = () if ended is None else (pod("night-shards", 1, ended=ended, code=137),)
    after = stored(given, run(given), jobs=(job("night-shards", **conditions),), readings={})
    decision = run(replace(after, pods=(given.pods[0], *lost)))
    assert outcome(decision)[:2] == ("INVALID", reason)
    assert text in outcome(decision)[2]
    assert not any(isinstance(action, Create) for action in decision.actions)


@pytest.mark.parametrize("order", ["gone", "interrupted"])
@pytest.mark.parametrize("started", [True, False])
def test_a_deleted_shard_reads_alike_before_and_after_it_is_gone(
    order: str, *, started: bool
) -> None:
    stopped = pod(
        "night-shards", 1, ended=ReplayResult(reason="Error", message="interrupted"), code=130
    )
    stopped["metadata"]["deletionTimestamp"] = format_time(CREATED_S)
    conditions = {"Failed": "BackoffLimitExceeded"} if order == "gone" else {}
    given = armed()
    after = stored(given, run(given)) if started else given
    after = replace(
        after,
        jobs=(job("night-shards", **conditions),),
        pods=(given.pods[0],) if order == "gone" else (given.pods[0], stopped),
        readings={},
    )
    verdict, reason, message, _ = outcome(run(after))
    assert (verdict, reason) == ("INVALID", "ShardLost")
    assert message == "a pod of a shard was deleted; its requests are not repeated"


def test_the_lost_shard_is_named_and_not_one_that_was_stopped_because_of_it() -> None:
    given = armed()
    stopped = pod("night-shards", 0, ended="interrupted", code=130)
    stopped["metadata"]["deletionTimestamp"] = format_time(CREATED_S)
    lost = pod("night-shards", 1, ended="Killed", code=137)
    after = stored(given, run(given), jobs=(job("night-shards"),), readings={})
    _, _, message, _ = outcome(run(replace(after, pods=(stopped, lost))))
    assert message.startswith("pod night-shards-1-x ended during the run (exit code 137)")


def test_a_deleted_job_is_not_started_again() -> None:
    given = armed()
    after = stored(given, run(given), jobs=(), pods=(), readings={})
    assert outcome(run(after))[:2] == ("INVALID", "ShardLost")


# --- Merging and the outcome ----------------------------------------------------------------


def merging(*pods: Any, **conditions: str) -> ReplaySnapshot:
    jobs = (job("night-shards", Complete="x"), job("night-merge", **conditions))
    return snapshot(jobs=jobs, pods=pods)


def test_completed_shards_are_merged() -> None:
    decision = run(snapshot(jobs=(job("night-shards", Complete="CompletionsReached"),)))
    status, create = decision.actions
    assert isinstance(create, Create)
    assert isinstance(status, WriteStatus)
    command = create.body["spec"]["template"]["spec"]["containers"][0]["command"]
    folder = "/var/lib/goodput/claims/records/runs/night-0c0ffee0"
    assert command[:3] == ["goodput", "replay", "merge"]
    assert command[3:6] == [f"{folder}/shard-{index}" for index in range(3)]
    assert command[command.index("--out") + 1] == f"{folder}/merged"
    assert status.status["phase"] == "Merging"


@pytest.mark.parametrize(
    ("verdict", "passed"),
    [("PASS", "True"), ("FAIL", "False"), ("INCONCLUSIVE", "Unknown"), ("INVALID", "Unknown")],
)
def test_the_verdict_of_the_merge_is_that_of_the_replay(verdict: str, passed: str) -> None:
    result = replace(PASSING, verdict=VerdictKind(verdict))
    code = 3 if verdict == "INVALID" else 0
    decision = run(merging(pod("night-merge", 0, ended=result, code=code)))
    assert outcome(decision) == (verdict, "Attained", "all met", passed)
    status = written(decision)
    assert status["report"] == "pvc://records/runs/night-0c0ffee0/merged"
    assert status["requests"] == 9
    [event] = [action for action in decision.actions if isinstance(action, Emit)]
    assert (event.reason, event.warning) == (verdict.capitalize(), verdict in {"FAIL", "INVALID"})


def test_a_replay_without_a_gate_is_not_passed() -> None:
    given = replace(merging(pod("night-merge", 0, ended=PASSING)), replay=replay(gate=None))
    status = written(run(given))
    assert status["verdict"] == "PASS"
    passed = status["conditions"][1]
    assert (passed["status"], passed["reason"]) == ("Unknown", "NotGated")


def test_the_verdict_of_a_single_shard_needs_no_merge() -> None:
    ended = pod("night-shards", 0, ended=PASSING)
    decision = run(snapshot(replay=replay(shards=1), jobs=(job("night-shards"),), pods=(ended,)))
    assert outcome(decision)[0] == "PASS"
    assert written(decision)["report"] == "pvc://records/runs/night-0c0ffee0/shard-0"


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        (ReplayResult(reason="Error", message="disk full"), "Job night-merge: disk full"),
        ("Killed", "Job night-merge: Killed"),
        (None, "Job night-merge: its pods left no message"),
    ],
)
def test_a_failed_merge_is_no_verdict_on_the_service(
    ended: ReplayResult | str | None, text: str
) -> None:
    pods = () if ended is None else (pod("night-merge", 0, ended=ended, code=70),)
    decision = run(merging(*pods, Failed="BackoffLimitExceeded"))
    assert outcome(decision)[:3] == ("INVALID", "MergeFailed", text)


# --- Comparing ------------------------------------------------------------------------------

COMPARED = ABResult(
    verdict=VerdictKind.FAIL,
    reason="WorseThanBaseline",
    message="chat: −5.00 points",
    pairs=1,
    interval="chat: −5.00 points (−6.00 … −4.00)",
)
GATE = {"baseline": "pvc://old/july", "margin": "1%"}


def comparing(*, shards: int, ended: Any, code: int, init: Any = None, **conditions: str) -> Any:
    """Return a snapshot in which the second Job of a compared replay has this pod."""
    last = pod("night-merge", 0, ended=ended, code=code)
    if init is not None:
        [merged] = pod("night-merge", 0, ended=init)["status"]["containerStatuses"]
        last["status"]["initContainerStatuses"] = [merged]
        if code and ended is None:
            merged["state"]["terminated"]["exitCode"] = code
            last["status"]["containerStatuses"] = [{"state": {"waiting": {}}}]
    first = pod("night-shards", 0, ended=PASSING)
    return snapshot(
        replay=replay(shards=shards, gate=GATE),
        jobs=(job("night-shards", Complete="x"), job("night-merge", **conditions)),
        pods=(first, last) if shards == 1 else (last,),
    )


def test_a_valid_run_of_one_shard_is_compared_and_an_invalid_one_is_not() -> None:
    given = snapshot(
        replay=replay(shards=1, gate=GATE),
        jobs=(job("night-shards"),),
        pods=(pod("night-shards", 0, ended=PASSING),),
    )
    status, create = run(given).actions
    assert isinstance(create, Create)
    assert isinstance(status, WriteStatus)
    command = create.body["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:3] == ["goodput", "replay", "gate"]
    assert status.status["phase"] == "Comparing"
    late = replace(PASSING, verdict=VerdictKind.INVALID, reason="ClientLag", valid=False)
    ended = pod("night-shards", 0, ended=late, code=3)
    assert outcome(run(replace(given, pods=(ended,))))[:2] == ("INVALID", "ClientLag")


@pytest.mark.parametrize(
    ("shards", "init"), [(1, None), (3, PASSING)], ids=["one shard", "merged shards"]
)
def test_the_verdict_of_the_comparison_is_that_of_the_replay(
    shards: int, init: ReplayResult | None
) -> None:
    decision = run(comparing(shards=shards, ended=COMPARED, code=1, init=init))
    expected = ("FAIL", "WorseThanBaseline", "chat: −5.00 points", "False")
    assert outcome(decision) == expected
    status = written(decision)
    assert (status["interval"], status["requests"]) == (COMPARED.interval, 9)
    assert status["report"].endswith("merged" if shards > 1 else "shard-0")


def test_a_merge_before_the_comparison_is_no_verdict_unless_it_is_invalid() -> None:
    running = comparing(shards=3, ended=None, code=0, init=PASSING)
    assert run(running) == ReplayDecision()
    invalid = replace(PASSING, verdict=VerdictKind.INVALID, reason="Incomplete", valid=False)
    decision = run(comparing(shards=3, ended=None, code=3, init=invalid))
    assert outcome(decision)[:2] == ("INVALID", "Incomplete")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"shards": 1, "code": 64, "ended": "Error"}, "ComparisonFailed"),
        ({"shards": 3, "code": 64, "ended": "Error", "init": PASSING}, "ComparisonFailed"),
        ({"shards": 3, "code": 64, "ended": None, "init": "Error"}, "MergeFailed"),
        # Object storage may respond again.
        ({"shards": 1, "code": 64, "ended": "Unreachable"}, None),
        ({"shards": 1, "code": 64, "ended": "Unreachable", "Failed": "x"}, "ComparisonFailed"),
        ({"shards": 1, "code": 70, "ended": "Error"}, None),
        ({"shards": 1, "code": 137, "ended": "Killed", "Failed": "x"}, "ComparisonFailed"),
    ],
)
def test_an_unusable_baseline_is_invalid_and_never_a_fail(
    fields: dict[str, Any], reason: str | None
) -> None:
    def message(text: str | None) -> ABResult | ReplayResult | str | None:
        return ABResult(reason=text, message="no run") if text in {"Error", "Unreachable"} else text

    given = {**fields, "ended": message(fields["ended"])}
    if fields.get("init") == "Error":
        given["init"] = ReplayResult(reason="Error", message="no run")
    decision = run(comparing(**given))
    if reason is None:
        assert decision == ReplayDecision()
        return
    verdict, found, text, passed = outcome(decision)
    assert (verdict, found, passed) == ("INVALID", reason, "Unknown")
    assert text in {"Job night-merge: no run", "Job night-merge: Killed"}


def test_the_claims_of_a_comparison_must_exist_and_need_not_be_shared() -> None:
    compared = replay(gate={**GATE, "history": "pvc://nights"})
    claims = {"traces": ("ReadOnlyMany",), "records": ("ReadWriteMany",), "old": ("ReadWriteOnce",)}
    missing = run(snapshot(replay=compared, claims={**claims, "nights": None}))
    assert written(missing)["conditions"][0]["reason"] == "ClaimNotFound"
    started = run(snapshot(replay=compared, claims={**claims, "nights": ("ReadWriteOnce",)}))
    assert any(isinstance(action, Create) for action in started.actions)


def test_a_job_of_another_object_is_left_alone() -> None:
    foreign = job("night-shards")
    foreign["metadata"]["ownerReferences"] = []
    assert outcome(run(snapshot(jobs=(foreign,))))[:2] == ("INVALID", "NameConflict")


@pytest.mark.parametrize(
    ("after_s", "ended"), [(100, False), (601, True)], ids=["in time", "after the deadline"]
)
@pytest.mark.parametrize(
    ("done", "shards", "gate", "name", "reason"),
    [
        (False, 3, {}, "night-shards", "NotArmed"),
        (True, 3, {}, "night-merge", "MergeFailed"),
        (True, 1, GATE, "night-merge", "ComparisonFailed"),
    ],
    ids=["shards", "merge", "comparison"],
)
def test_a_rejected_job_is_reported_and_ends_the_replay_after_the_deadline(
    after_s: float, ended: bool, done: bool, shards: int, gate: Any, name: str, reason: str
) -> None:
    complete = job("night-shards", Complete="CompletionsReached")
    complete["status"]["completionTime"] = format_time(CREATED_S)
    given = snapshot(
        after_s=after_s,
        replay=replay(shards=shards, gate=gate),
        jobs=(complete,) if done else (),
        pods=(pod("night-shards", 0, ended=PASSING),) if done and shards == 1 else (),
        rejected="exceeded quota: no-jobs",
    )
    text = f"Job {name} cannot be created: exceeded quota: no-jobs"
    decision = run(given)
    assert written(decision)["conditions"][0]["message"] == text
    creates = [action for action in decision.actions if isinstance(action, Create)]
    if ended:
        assert outcome(decision)[:3] == ("INVALID", reason, text)
        assert not creates
    else:
        assert [create.body["metadata"]["name"] for create in creates] == [name]


def test_a_finished_replay_stops_its_shards_and_is_not_changed_again() -> None:
    given = armed()
    ended = stored(given, run(armed(after_s=601, readings={})))
    assert is_finished(ended.replay)
    [delete] = run(ended).actions
    assert delete == Delete(kind="Job", name="night-shards", uid="uid-night-shards")
    done = replace(ended, jobs=(job("night-shards", Failed="BackoffLimitExceeded"),))
    assert run(done) == ReplayDecision()


@pytest.mark.parametrize(
    ("codes", "retries", "kept"),
    [((0,), 3, True), ((64,), 0, True), ((0, 64, 0), 0, True), ((64,), 3, False), ((), 0, False)],
    ids=["succeeded", "failed", "a shard failed", "another pod follows", "no pod"],
)
def test_a_job_whose_pods_ended_keeps_them_with_their_logs(
    codes: tuple[int, ...], retries: int, kept: bool
) -> None:
    ending = job("night-shards")
    ending["spec"] = {"backoffLimit": retries}
    pods = tuple(
        pod("night-shards", index, ended=PASSING, code=code) for index, code in enumerate(codes)
    )
    for one in pods:
        one["status"]["phase"] = "Running"
    given = armed(after_s=601, readings={})
    ended = replace(stored(given, run(given)), jobs=(ending,), pods=pods)
    assert (run(ended) == ReplayDecision()) == kept


def test_a_state_that_is_stored_is_not_written_again() -> None:
    given = armed(readings={})
    assert run(stored(given, run(given))).actions == ()


def test_finished_replays_of_a_series_beyond_the_limit_of_the_newest_are_deleted() -> None:
    ended = {"conditions": [{"type": "Finished", "status": "True"}]}
    series = []
    for number in range(5):
        one = replay(ended if number != 1 else {}, historyLimit=2)
        one["metadata"] |= {
            "name": f"night-{number}",
            "uid": f"u{number}",
            "generateName": "night-",
            "creationTimestamp": format_time(CREATED_S + number),
        }
        series.append(one)
    other = replay(ended)
    for one in (series[4], series[0]):
        decision = run(snapshot(replay=one, siblings=(*series, other)))
        deleted = [action.name for action in decision.actions if isinstance(action, Delete)]
        assert deleted == ["night-2", "night-0"]
    assert run(snapshot(replay=other, siblings=(*series, other))).actions == ()
