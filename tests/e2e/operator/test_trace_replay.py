"""A TraceReplay in the cluster: its verdict, its baseline, a lost shard, and a missing trace.

The CronJobs of the examples are applied, and their Jobs are started by hand.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tools.cluster.handle import wait_for
from tools.cluster.images import checkout_image, kubectl_image
from tools.cluster.starting import ROOT
from tools.e2e.installation import conditions_of
from tools.e2e.recordings import judge

from goodput_traces.sample import sample_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tools.cluster.handle import OwnCluster
    from tools.e2e.installation import ChartRelease

SLO = {
    "classes": [
        {"name": "interactive", "ttftMs": 10000, "tpotMs": 1000, "objective": "80%"},
        {"name": "batch", "ttftMs": 60000, "tpotMs": 5000},
    ]
}


EXAMPLES = ROOT / "examples" / "trace-replay"
NIGHTS = 4
"""One recording more than needed, because a busy machine may make one of them invalid."""
NIGHT_S = 5
SKEWED = "goodput.test/skewed-replay:1"


@pytest.fixture(scope="module")
def records(
    installation: ChartRelease, own_cluster: OwnCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The folder of all claims: `records` is ReadWriteMany, and `single` is ReadWriteOnce."""
    folder = tmp_path_factory.mktemp("records")
    folder.chmod(0o777)
    shutil.copy(sample_path(), folder / "prod.parquet")
    volumes = []
    for claim, mode in (
        ("records", "ReadWriteMany"),
        ("single", "ReadWriteOnce"),
        ("traces", "ReadOnlyMany"),
        ("history", "ReadWriteMany"),
    ):
        name = f"{installation.namespace}-{claim}"
        shape = {"accessModes": [mode], "storageClassName": ""}
        size = {"storage": "1Gi"}
        volume = {"capacity": size, "hostPath": {"path": str(folder)}, **shape}
        wanted = {"resources": {"requests": size}, "volumeName": name, **shape}
        for kind, metadata, spec in (
            ("PersistentVolume", {"name": name}, volume),
            (
                "PersistentVolumeClaim",
                {"name": claim, "namespace": installation.namespace},
                wanted,
            ),
        ):
            own_cluster.apply(
                {"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": spec}
            )
        volumes.append(name)
    yield folder
    for name in volumes:
        own_cluster.kubectl("delete", "persistentvolume", name, "--wait=false")


@pytest.fixture(scope="module")
def target(installation: ChartRelease, records: Path) -> Iterator[str]:
    """A service without clients."""
    installation.apply("replayed", replicas=1)
    installation.kubectl("label", "llmservice/replayed", "goodput.dev/production=false")
    installation.wait_settled("replayed")
    yield "replayed"
    installation.kubectl("delete", "llmservice", "replayed")


@pytest.fixture(scope="module")
def replay(installation: ChartRelease, target: str) -> Callable[..., None]:
    """Create a TraceReplay with three shards."""

    def create(name: str, **spec: Any) -> None:
        manifest = {
            "apiVersion": "goodput.dev/v1alpha1",
            "kind": "TraceReplay",
            "metadata": {"name": name, "namespace": installation.namespace},
            "spec": {
                "trace": "sample",
                "window": {"startSeconds": 0, "endSeconds": 22},
                "target": {"service": target},
                "slo": SLO,
                "gate": {},
                "shards": 3,
                "records": "pvc://records/runs",
                "resources": {"requests": {"cpu": "10m"}},
                **spec,
            },
        }
        installation.kubectl("create", "-f", "-", stdin=json.dumps(manifest))

    return create


def finished(installation: ChartRelease, name: str, timeout_s: int = 240) -> dict[str, Any]:
    """Return the status of a replay once it has ended."""
    installation.wait("condition=Finished", f"tracereplay/{name}", timeout_s=timeout_s)
    status: dict[str, Any] = installation.get("tracereplay", name)["status"]
    return status


@pytest.fixture(scope="module")
def nights(installation: ChartRelease, own_cluster: OwnCluster, target: str) -> None:
    """Apply the nightly examples with short windows, and start a Job of each per night."""
    kubectl = kubectl_image(own_cluster.binaries)
    classes = yaml.safe_dump(SLO)
    documents: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "slo"},
            "data": {"slo.yaml": classes},
        }
    ]
    for name in ("nightly-aa-pair", "nightly-replay"):
        text = (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")
        for old, new in (
            ("0s..1800s", f"0s..{NIGHT_S}s"),
            ("http://chat-test", f"http://{target}"),
            ("service: chat", f"service: {target}"),
            ("endSeconds: 1800", "endSeconds: 2"),
            ("s3://traces/", "pvc://traces/"),
            ("s3://runs/nightly", "pvc://records/nightly"),
            ("historyLimit: 14", "historyLimit: 2"),
        ):
            text = text.replace(old, new)
        documents += yaml.safe_load_all(text)
    for document in documents:
        document["metadata"]["namespace"] = installation.namespace
        if document["metadata"]["name"] == "nightly-replay" and document["kind"] == "ConfigMap":
            replay = yaml.safe_load(document["data"]["replay.yaml"])
            # The Secret of the object storage does not exist here.
            document["data"]["replay.yaml"] = yaml.safe_dump(
                {**replay, "spec": {**replay["spec"], "pod": {}}}
            )
        if document["kind"] == "CronJob" and document["metadata"]["name"] == "nightly-replay":
            pod = document["spec"]["jobTemplate"]["spec"]["template"]["spec"]
            own_cluster.publish({pod["containers"][0]["image"]: kubectl})
        own_cluster.apply(document)
    for name in ("nightly-aa-pair", "nightly-replay"):
        for night in range(NIGHTS):
            installation.kubectl("create", "job", f"{name}-{night}", f"--from=cronjob/{name}")


@pytest.fixture(scope="module")
def passing(
    installation: ChartRelease, replay: Callable[..., None], nights: None
) -> dict[str, Any]:
    """Return the status of a finished replay; two others that are compared with it have started.

    One of them has two shards and the baseline, the other names a folder that does not exist.
    """
    replay("passing")
    status = finished(installation, "passing")
    gate = {"baseline": status["report"], "margin": "5%"}
    replay("compared", shards=2, gate=gate)
    replay("alone", shards=1, gate={**gate, "baseline": "pvc://records/runs/absent"})
    return status


@pytest.fixture(scope="module")
def beside_nights(
    installation: ChartRelease, passing: dict[str, Any], replay: Callable[..., None]
) -> None:
    """Start a replay that is compared with the nightly recordings."""
    await_jobs(installation, "nightly-aa-pair")
    replay(
        "beside-nights",
        trace="pvc://traces/prod.parquet",
        window={"startSeconds": 0, "endSeconds": NIGHT_S},
        shards=1,
        gate={"history": "pvc://history/history", "margin": "20%"},
    )


def test_three_shards_against_a_service_are_judged_as_one_run(
    installation: ChartRelease, passing: dict[str, Any], records: Path
) -> None:
    status = passing
    assert (status["verdict"], status["reason"]) == ("PASS", "Attained"), status
    assert (status["phase"], status["armed"]) == ("Finished", "3/3")
    assert conditions_of(installation.get("tracereplay", "passing"))["Passed"] == "True"
    run = records / status["report"].removeprefix("pvc://records/")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["verdict"]["kind"] == "PASS"
    assert summary["overall"]["requests"] == status["requests"] > 50
    assert [sender["shard"] for sender in summary["client"]["senders"]] == [1, 2, 3]
    assert summary["run"]["started_at"].startswith(status["startTime"].removesuffix("Z"))
    assert (run / "report.html").exists()
    waited = installation.run_command("goodput", "wait", "trp/passing")
    assert waited.stdout.splitlines() == [
        f"PASS (Attained) {status['message']}",
        f"report: {status['report']}",
    ]
    assert waited.returncode == 0, waited.stderr
    absent = installation.run_command("goodput", "wait", "trp/absent")
    assert (absent.returncode, absent.stdout) == (64, "")
    assert "TraceReplay absent in namespace" in absent.stderr


@pytest.mark.usefixtures("beside_nights")  # which runs meanwhile
def test_a_lost_shard_makes_the_replay_invalid_and_is_not_sent_again(
    installation: ChartRelease, replay: Callable[..., None]
) -> None:
    replay("lost")
    installation.wait("jsonpath={.status.phase}=Running", "tracereplay/lost", timeout_s=240)
    labels = ("pods", "-l", "goodput.dev/tracereplay=lost")
    pods = {pod["metadata"]["name"] for pod in installation.get(*labels)["items"]}
    victim = next(name for name in pods if name.startswith("lost-shards-1-"))
    installation.kill_process("lost-shards-1")  # the host name of a pod of an Indexed Job
    waited = installation.run_command(
        "goodput", "wait", "trp/lost", "--timeout", "4m", timeout_s=300
    )
    status = finished(installation, "lost", 10)
    assert (status["verdict"], status["reason"]) == ("INVALID", "ShardLost"), status
    assert status["message"].startswith(f"pod {victim} ended during the run")
    assert waited.stdout.startswith(f"INVALID (ShardLost) {status['message']}\n")
    assert waited.returncode == 3, waited.stderr
    assert conditions_of(installation.get("tracereplay", "lost"))["Passed"] == "Unknown"
    assert {pod["metadata"]["name"] for pod in installation.get(*labels)["items"]} <= pods
    installation.wait("delete", "job/lost-shards", timeout_s=120)


def test_a_run_is_compared_with_an_earlier_one_by_the_rule_of_the_gate(
    installation: ChartRelease, passing: dict[str, Any], records: Path, tell: Callable[[str], None]
) -> None:
    status = finished(installation, "compared")
    tell(f"compared: {status['reason']}: {status['message']} {status['interval']}")
    run, earlier = (
        records / one["report"].removeprefix("pvc://records/") for one in (status, passing)
    )
    judged = judge(run, "--baseline", str(earlier), "--margin", "5%")
    assert (status["verdict"], status["reason"]) == (judged["verdict"], judged["reason"])
    assert status["message"] == judged["sentence"]
    assert "against the baseline in one pair of runs" in status["message"]
    assert status["interval"].startswith("interactive: ")
    assert status["requests"] == passing["requests"]
    waited = installation.run_command("goodput", "wait", "trp/compared")
    assert f"\nagainst the baseline: {status['interval']}\n" in waited.stdout
    assert waited.returncode == judged["exit_code"], waited.stderr
    # Whatever the verdict, the Job of the comparison stays with its log.
    assert status["reason"] in installation.kubectl("logs", "job/compared-merge")
    status = finished(installation, "alone")
    tell(f"alone: {status['reason']}: {status['message']}")
    assert (status["verdict"], status["reason"]) == ("INVALID", "ShardFailed"), status
    assert "pvc://records/runs/absent/summary.json: " in status["message"]
    assert conditions_of(installation.get("tracereplay", "alone"))["Passed"] == "Unknown"


def test_the_nightly_pair_feeds_the_history_of_a_gate(
    installation: ChartRelease, beside_nights: None, records: Path, tell: Callable[[str], None]
) -> None:
    status = finished(installation, "beside-nights")
    tell(f"beside the nights: {status['verdict']}: {status['message']} {status['interval']}")
    recorded = [path.parent for path in (records / "history").glob("*/ab.json")]
    assert len(recorded) >= NIGHTS - 1
    run = records / status["report"].removeprefix("pvc://records/")
    judged = judge(run, "--recorded", str(records / "history"), "--margin", "20%")
    assert (status["verdict"], status["reason"]) == (judged["verdict"], judged["reason"]), status
    assert status["message"] == judged["sentence"]
    # The recordings show the spread, without which one pair decides nothing.
    [difference] = [
        check
        for one in judged["classes"]
        for check in one["checks"]
        if (one["name"], check["rule"]) == ("interactive", "difference")
    ]
    assert difference["reason"] != "SinglePair", difference


def test_the_nightly_replays_beyond_the_limit_are_deleted(
    installation: ChartRelease, passing: dict[str, Any]
) -> None:
    def nightly() -> list[dict[str, Any]]:
        items = installation.get("tracereplays")["items"]
        return [one for one in items if one["metadata"].get("generateName") == "nightly-"]

    await_jobs(installation, "nightly-replay")
    wait_for(
        lambda: (
            len(kept := nightly()) == 2
            and all(conditions_of(one).get("Finished") == "True" for one in kept)
        ),
        "two finished replays are left",
    )
    assert {one["spec"]["historyLimit"] for one in nightly()} == {2}


def await_jobs(installation: ChartRelease, prefix: str) -> None:
    """Wait for the end of Jobs; Kubernetes deletes old ones of a CronJob."""

    def active() -> list[str]:
        jobs = installation.get("jobs")["items"]
        mine = [one for one in jobs if one["metadata"]["name"].startswith(f"{prefix}-")]
        ends = {"Complete", "Failed"}
        return [one["metadata"]["name"] for one in mine if not ends & conditions_of(one).keys()]

    wait_for(lambda: not active(), f"the Jobs {prefix} end")


@pytest.fixture(scope="module")
def skewed(own_cluster: OwnCluster) -> str:
    """The image for replays, with a clock that differs between the shards."""
    image, folder = checkout_image(ROOT), str(ROOT / "tools" / "e2e" / "skewed")
    env = {**image.env, "PYTHONPATH": f"{folder}:{image.env['PYTHONPATH']}"}
    own_cluster.publish({SKEWED: replace(image, folders=[*image.folders, folder], env=env)})
    return SKEWED


def test_a_replay_that_cannot_start_ends_with_the_reason(
    installation: ChartRelease, replay: Callable[..., None], skewed: str
) -> None:
    replay("no-trace", trace="pvc://records/absent.parquet", shards=1)
    replay("single", records="pvc://single/runs")
    installation.kubectl("create", "job", "taken-shards", "--image=example.test/none")
    replay("taken", shards=1)
    replay("elsewhere", target={"url": "http://10.0.0.1"})
    replay("skewed", shards=2, image=skewed)
    for name, reason, text in (
        ("no-trace", "ShardFailed", "pvc://records/absent.parquet: no such file"),
        ("single", "StorageRefused", "PersistentVolumeClaim single is ReadWriteOnce"),
        ("taken", "NameConflict", "Job taken-shards belongs to another object"),
        ("elsewhere", "ProductionNotAllowed", "http://10.0.0.1 may serve clients"),
        ("skewed", "ClockSkew", "the clocks of the shards' nodes differ by at least "),
    ):
        status = finished(installation, name)
        assert (status["verdict"], status["reason"]) == ("INVALID", reason), status
        assert text in status["message"]
    events = installation.get("events", "--field-selector", "involvedObject.name=no-trace")
    assert [event["reason"] for event in events["items"]] == ["Invalid"]
    installation.kubectl("delete", "job", "taken-shards")
