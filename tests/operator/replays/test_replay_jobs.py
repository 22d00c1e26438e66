"""The Jobs of a TraceReplay: places, credentials and hardening."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from tests.operator.crd.test_replay_crd import SLO, VALID

from goodput_core.spec.codec import decode
from goodput_core.spec.llmservice import SLOSpec
from goodput_core.spec.tracereplay import TraceReplaySpec
from goodput_operator.kube.jobs import pods_ended
from goodput_operator.render.pods import Installation
from goodput_operator.render.replay_pod import claims_of
from goodput_operator.replays.jobs import ReplayRun, merge_job, shards_job
from goodput_replay.compare.gate_command import make_parser
from goodput_replay.options import ReplayOptions, parse_options

if TYPE_CHECKING:
    from argparse import Namespace

INSTALLATION = Installation(
    engine_image="e:1", router_image="r:1", replay_image="replay:1", fs_group=1000
)
KEY = {"name": "AWS_ACCESS_KEY_ID", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
REPLAY = {
    "metadata": {"name": "night", "namespace": "team", "uid": "0123456789abcdef"},
}
SLO_SPEC = decode(SLOSpec, SLO, "spec.slo")


def spec_of(**fields: Any) -> TraceReplaySpec:
    return decode(TraceReplaySpec, {**VALID, **fields}, "spec")


def shards(claims: dict[str, tuple[str, ...]] | None = None, **fields: Any) -> dict[str, Any]:
    spec = spec_of(**fields)
    return shards_job(ReplayRun.of(REPLAY, spec), spec, SLO_SPEC, INSTALLATION, claims or {})


def merge(**fields: Any) -> dict[str, Any]:
    spec = spec_of(**fields)
    return merge_job(ReplayRun.of(REPLAY, spec), spec, INSTALLATION)


def container(job: dict[str, Any]) -> dict[str, Any]:
    [only] = job["spec"]["template"]["spec"]["containers"]
    return dict(only)


def options(job: dict[str, Any]) -> ReplayOptions:
    """Parse the command of a shard as the pod does, with the variables that Kubernetes expands."""
    words = container(job)["command"]
    assert words[:2] == ["goodput", "replay"]
    expanded = [
        word.replace("$(JOB_COMPLETION_INDEX)", "1").replace("$(POD_IP)", "10.0.0.7")
        for word in words[2:]
    ]
    return parse_options(expanded)


def test_the_command_of_a_shard_is_accepted_by_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    parsed = options(
        shards(
            shards=3,
            window={"startSeconds": 5, "endSeconds": 9},
            speedPercent=150,
            ratePercent=50,
            gate={"confidence": "99%"},
            target={"service": "chat", "model": "m", "apiKeySecret": {"name": "key"}},
        )
    )
    assert (parsed.shard.index, parsed.shard.count, parsed.arm) == (1, 3, ("10.0.0.7", 9000))
    assert [target.url for target in parsed.targets] == ["http://chat.team.svc"]
    assert (float(parsed.speed), float(parsed.rate_scale)) == (1.5, 0.5)
    assert float(parsed.confidence) == 0.99
    assert str(parsed.slo) == "/etc/goodput/slo.json"
    assert str(parsed.result_file) == "/dev/termination-log"
    assert parsed.upload == "s3://runs/nightly/night-01234567/shard-1"
    assert (parsed.model, parsed.api_key_env) == ("m", "GOODPUT_TARGET_KEY")


def test_one_shard_is_not_merged_and_gets_a_verdict() -> None:
    assert options(shards()).shard.count == 1


def test_the_token_and_the_key_of_the_target_are_references_to_secrets() -> None:
    job = shards(target={"service": "chat", "apiKeySecret": {"name": "key", "key": "k"}})
    env = {one["name"]: one for one in container(job)["env"]}
    for name, key in (("GOODPUT_CONTROL_TOKEN", "token"), ("GOODPUT_TARGET_KEY", "k")):
        assert "value" not in env[name]
        assert env[name]["valueFrom"]["secretKeyRef"]["key"] == key


def test_a_claim_is_mounted_once_and_read_only_unless_it_gets_the_records() -> None:
    fields: dict[str, Any] = {"trace": "pvc://data/a.parquet", "records": "pvc://data/runs"}
    spec = spec_of(**fields)
    assert claims_of(spec.trace, spec.records, None) == ("data",)
    [mount] = [m for m in container(shards(**fields))["volumeMounts"] if "claim" in m["name"]]
    assert mount == {"name": "goodput-claim-0", "mountPath": "/var/lib/goodput/claims/data"}
    separate = shards(trace="pvc://traces/a.parquet", records="pvc://runs")
    read_only = {
        mount["mountPath"]: mount.get("readOnly", False)
        for mount in container(separate)["volumeMounts"]
        if "claim" in mount["name"]
    }
    assert read_only == {
        "/var/lib/goodput/claims/traces": True,
        "/var/lib/goodput/claims/runs": False,
    }
    # The shards write to object storage, and the merge reads from it.
    command = container(merge(shards=2))["command"]
    assert command[3:5] == [f"s3://runs/nightly/night-01234567/shard-{index}" for index in (0, 1)]
    assert command[command.index("--upload") + 1] == "s3://runs/nightly/night-01234567/merged"


GATE = {"baseline": "pvc://old/july", "margin": "0.5%", "confidence": "99%"}


def gate_options(one: dict[str, Any]) -> Namespace:
    """Parse the command of the container that compares, as the pod does."""
    words = one["command"]
    assert words[:3] == ["goodput", "replay", "gate"]
    return make_parser().parse_args(words[3:])


def test_a_run_of_one_shard_is_compared_by_the_command_of_the_gate() -> None:
    job = merge(gate={**GATE, "history": "pvc://nights/aa"}, records="pvc://runs/x")
    assert "initContainers" not in job["spec"]["template"]["spec"]
    given = gate_options(container(job))
    claims = "/var/lib/goodput/claims"
    assert given.runs == [f"{claims}/runs/x/night-01234567/shard-0"]
    assert given.baseline == [f"{claims}/old/july"]
    assert str(given.recorded) == f"{claims}/nights/aa"
    assert (given.margin, given.confidence) == (Fraction(1, 200), Fraction(99, 100))
    assert str(given.result_file) == "/dev/termination-log"
    mounts = {
        mount["mountPath"]: mount.get("readOnly", False)
        for mount in container(job)["volumeMounts"]
        if "claim" in mount["name"]
    }
    # The comparison does not need the trace.
    assert mounts == {f"{claims}/old": True, f"{claims}/nights": True, f"{claims}/runs": False}


def test_a_shard_checks_the_comparison_before_the_run_if_it_can_read_the_earlier_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    gate = {**GATE, "history": "s3://nights/aa"}
    one = shards(shards=1, gate=gate)
    assert options(one).check_baseline == "/var/lib/goodput/claims/old/july"
    assert options(one).check_recorded == "s3://nights/aa"
    mounts = {m["mountPath"]: m.get("readOnly", False) for m in container(one)["volumeMounts"]}
    assert mounts["/var/lib/goodput/claims/old"] is True
    # Several shards may be on several nodes.
    assert options(shards({"old": ("ReadOnlyMany",)}, shards=2, gate=gate)) == replace(
        options(shards(shards=2)),
        check_baseline="/var/lib/goodput/claims/old/july",
        check_recorded="s3://nights/aa",
        confidence=Fraction(99, 100),
    )
    alone = shards({"old": ("ReadWriteOnce",)}, shards=2, gate=gate)
    assert (options(alone).check_baseline, options(alone).check_recorded) == (None, None)
    assert not any("old" in mount["mountPath"] for mount in container(alone)["volumeMounts"])


@pytest.mark.parametrize("part", ["containerStatuses", "initContainerStatuses"])
@pytest.mark.parametrize(
    ("code", "ends"), [(0, True), (1, True), (2, True), (3, True), (64, False), (137, False)]
)
def test_any_verdict_ends_the_second_job_which_then_keeps_its_pod(
    code: int, ends: bool, part: str
) -> None:
    terminated = {"terminated": {"exitCode": code}}
    pod = {"metadata": {"name": "night-merge-0"}, "status": {part: [{"state": terminated}]}}
    # An init container that succeeded is not the end of the pod.
    follows = code == 0 and part == "initContainerStatuses"
    assert pods_ended(merge(shards=2), [pod]) is (ends and not follows)


def test_several_shards_are_merged_before_the_run_is_compared() -> None:
    job = merge(shards=2, gate={"history": "pvc://nights"}, pod={"env": [KEY]})
    pod = job["spec"]["template"]["spec"]
    [first] = pod["initContainers"]
    assert first["command"] == container(merge(shards=2))["command"]
    given = gate_options(container(job))
    assert given.runs == ["s3://runs/nightly/night-01234567/merged"]
    assert given.baseline is None
    # Both read object storage, and leave a result of their own.
    for one in (first, container(job)):
        assert KEY in one["env"]
        assert one["terminationMessagePath"] == "/dev/termination-log"
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
    assert first["name"] != container(job)["name"]


def test_options_of_a_store_stay_behind_the_folder_of_the_shard() -> None:
    job = shards(records="s3://runs/nightly/?endpoint_override=minio:9000&scheme=http")
    command = container(job)["command"]
    assert command[command.index("--upload") + 1] == (
        "s3://runs/nightly/night-01234567/shard-$(JOB_COMPLETION_INDEX)"
        "?endpoint_override=minio:9000&scheme=http"
    )


@pytest.mark.parametrize("job", [shards(shards=2), merge(shards=2)], ids=["shards", "merge"])
def test_the_pods_are_hardened_and_have_no_token_for_the_api_server(job: dict[str, Any]) -> None:
    pod = job["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["restartPolicy"] == "Never"
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": 1000,
    }
    assert container(job)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert labels["goodput.dev/tracereplay"] == "night"
    assert labels["app.kubernetes.io/managed-by"] == "goodput-operator"
    assert "goodput.dev/llmservice" not in labels
    assert job["spec"]["activeDeadlineSeconds"] > 0


def expanded(words: list[str], **variables: str) -> list[str]:
    """Return the words of a command as Kubernetes passes them to the process."""

    def replaced(found: re.Match[str]) -> str:
        return "$" if found[1] is None else variables.get(found[1], found[0])

    return [re.sub(r"\$\$|\$\(([A-Z_]+)\)", replaced, word) for word in words]


@pytest.mark.parametrize("store", ["pvc://runs", "s3://runs"])
def test_a_dollar_in_a_place_reaches_the_process(store: str) -> None:
    path = "$(POD_IP)/$$/a$b"
    fields: dict[str, Any] = {
        "trace": f"pvc://data/{path}",
        "records": f"{store}/{path}",
        "gate": {"baseline": f"pvc://old/{path}", "history": f"pvc://nights/{path}"},
        "target": {"url": "http://host/$(POD_IP)", "model": "$(POD_IP)"},
        "slo": SLO,
        "shards": 2,
    }
    claims: dict[str, tuple[str, ...]] = {"old": ("ReadOnlyMany",), "nights": ("ReadOnlyMany",)}
    words = expanded(
        container(shards(claims, **fields))["command"], POD_IP="::1", JOB_COMPLETION_INDEX="1"
    )
    folder = "/var/lib/goodput/claims"
    out = f"{folder}/runs/{path}" if store == "pvc://runs" else f"{store}/{path}"
    option = "--out" if store == "pvc://runs" else "--upload"
    given = {word: words[index + 1] for index, word in enumerate(words[:-1])}
    assert given["--trace"] == f"{folder}/data/{path}"
    assert given["--check-baseline"] == f"{folder}/old/{path}"
    assert given["--check-recorded"] == f"{folder}/nights/{path}"
    assert (given["--target"], given["--model"]) == ("http://host/$(POD_IP)", "$(POD_IP)")
    assert given[option] == f"{out}/night-01234567/shard-1"
    assert given["--arm"] == "[::1]:9000"
    job = merge(**fields)
    [first] = job["spec"]["template"]["spec"]["initContainers"]
    merged = expanded(first["command"], POD_IP="::1")
    assert merged[3:5] == [f"{out}/night-01234567/shard-{index}" for index in (0, 1)]
    assert merged[merged.index(option) + 1] == f"{out}/night-01234567/merged"
    compared = expanded(container(job)["command"], POD_IP="::1")
    assert compared[3] == f"{out}/night-01234567/merged"
    assert compared[compared.index("--recorded") + 1] == f"{folder}/nights/{path}"


def test_a_volume_of_the_spec_can_take_the_place_of_tmp() -> None:
    volumes = [{"name": "big", "emptyDir": {}}]
    pod = {"volumes": volumes, "volumeMounts": [{"name": "big", "mountPath": "/tmp/"}]}
    job = shards(pod=pod)
    assert [m["name"] for m in container(job)["volumeMounts"] if "/tmp" in m["mountPath"]] == [
        "big"
    ]
    names = {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]}
    assert "goodput-tmp" not in names


def test_fields_of_the_spec_reach_the_pods() -> None:
    job = shards(
        image="mine:2",
        resources={"limits": {"cpu": "2"}},
        pod={
            "nodeSelector": {"pool": "load"},
            "env": [{"name": "HOME", "value": "/x"}],
            "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
            "volumeMounts": [{"name": "ca", "mountPath": "/ca"}],
        },
    )
    one = container(job)
    assert (one["image"], one["resources"]) == ("mine:2", {"limits": {"cpu": "2"}})
    assert [variable["value"] for variable in one["env"] if variable["name"] == "HOME"] == ["/x"]
    assert {"name": "ca", "mountPath": "/ca"} in one["volumeMounts"]
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "load"}
