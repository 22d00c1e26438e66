"""A gate whose trace and recorded runs are in object storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.operator.reconcile.gates import GATE, INVALID, PASS, change, gate_of, until_job

from goodput_replay.arguments import make_parser as make_replay_parser
from goodput_replay.compare.ab import make_parser

if TYPE_CHECKING:
    from argparse import Namespace

    from tests.operator.reconcile.conftest import Cluster

STORE = "?endpoint_override=minio:9000&scheme=http"
ENV: list[dict[str, Any]] = [
    {"name": name, "valueFrom": {"secretKeyRef": {"name": "object-storage", "key": key}}}
    for name, key in (("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "key"))
]
STORED: dict[str, Any] = {
    **GATE,
    "trace": f"s3://traces/prod.parquet{STORE}",
    "records": f"s3://runs/gates{STORE}",
    "pod": {"env": ENV},
}


def pod_of(job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod's spec of a Job and its only container."""
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    return pod, container


def parse(command: list[str]) -> tuple[Namespace, Namespace]:
    """Parse a command as the pod does: its own options, and those of every run."""
    assert command[:3] == ["goodput", "replay", "ab"]
    given, options = make_parser().parse_known_args(command[3:])
    return given, make_replay_parser().parse_args(options)


def test_the_pod_of_a_gate_reads_and_writes_object_storage_with_the_credentials(
    gated: Cluster,
) -> None:
    gated.update_spec(rollout={"gate": STORED})
    change(gated)
    pod, container = pod_of(until_job(gated))
    given, run = parse(container["command"])
    assert run.trace == STORED["trace"]
    update = gated.status["updateRevision"]
    assert given.upload.startswith(f"s3://runs/gates/{update}-")
    assert given.upload.endswith(f"-1{STORE}"), "the attempt, and the options of the store"
    assert str(given.out) == "/tmp/goodput"
    assert [one for one in container["env"] if one["name"].startswith("AWS_")] == ENV
    sources = {key for volume in pod["volumes"] for key in volume} - {"name"}
    assert "persistentVolumeClaim" not in sources
    assert {"name": "goodput-tmp", "mountPath": "/tmp"} in container["volumeMounts"]
    gated.end_job(PASS)
    gated.settle()
    assert gate_of(gated)["phase"] == "Passed"
    assert gate_of(gated)["report"] == given.upload


def test_a_dollar_in_a_place_is_no_variable(gated: Cluster) -> None:
    places = {"trace": "pvc://traces/$(HOME)/$a.parquet", "history": "pvc://aa/$$/$(B)"}
    records = f"s3://runs/$(POD_IP){STORE}"
    gated.update_spec(rollout={"gate": {**GATE, **places, "records": records}})
    change(gated)
    _, container = pod_of(until_job(gated))
    words = container["command"]
    given = {word: words[index + 1] for index, word in enumerate(words[:-1])}
    claims = "/var/lib/goodput/claims"
    assert given["--trace"] == f"{claims}/traces/$$(HOME)/$$a.parquet"
    assert given["--history"] == f"{claims}/aa/$$$$/$$(B)"
    assert given["--upload"].startswith("s3://runs/$$(POD_IP)/")
    assert given["--progress"] == "[$(POD_IP)]:9000"
    gated.end_job(PASS)
    gated.settle()
    assert gate_of(gated)["report"].startswith("s3://runs/$(POD_IP)/"), "as in the spec"


def test_each_attempt_gets_the_credentials_and_a_folder_of_its_own(gated: Cluster) -> None:
    gated.update_spec(rollout={"gate": STORED})
    change(gated)
    uploads = []
    for _ in range(2):
        _, container = pod_of(until_job(gated))
        assert [one for one in container["env"] if one["name"].startswith("AWS_")] == ENV
        uploads.append(parse(container["command"])[0].upload)
        gated.end_job(INVALID, code=3)
        gated.reconcile()
        gated.reconcile()
    assert uploads[0].partition("?")[0][:-2] == uploads[1].partition("?")[0][:-2]
    assert [upload.partition("?")[0][-2:] for upload in uploads] == ["-1", "-2"]


def test_the_engines_of_the_pair_do_not_get_the_credentials(gated: Cluster) -> None:
    gated.update_spec(rollout={"gate": STORED})
    change(gated)
    until_job(gated)
    deployments = [body for (kind, _), body in gated.objects.items() if kind == "Deployment"]
    assert len(deployments) >= 3
    assert "object-storage" not in str(deployments)
