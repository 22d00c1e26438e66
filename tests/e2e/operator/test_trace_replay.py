"""A TraceReplay in the cluster: its verdict, a lost shard, and a trace that does not exist."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tools.e2e.installation import conditions_of

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


@pytest.fixture(scope="module")
def records(
    installation: ChartRelease, own_cluster: OwnCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A folder that the claims `records` (ReadWriteMany) and `single` (ReadWriteOnce) keep."""
    folder = tmp_path_factory.mktemp("records")
    folder.chmod(0o777)
    volumes = []
    for claim, mode in (("records", "ReadWriteMany"), ("single", "ReadWriteOnce")):
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


@pytest.fixture
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


def finished(installation: ChartRelease, name: str, timeout_s: int = 120) -> dict[str, Any]:
    """Return the status of a replay once it has ended."""
    installation.wait("condition=Finished", f"tracereplay/{name}", timeout_s=timeout_s)
    status: dict[str, Any] = installation.get("tracereplay", name)["status"]
    return status


def test_three_shards_against_a_service_are_judged_as_one_run(
    installation: ChartRelease, replay: Callable[..., None], records: Path
) -> None:
    replay("passing")
    status = finished(installation, "passing")
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


def test_a_lost_shard_makes_the_replay_invalid_and_is_not_sent_again(
    installation: ChartRelease, replay: Callable[..., None]
) -> None:
    replay("lost")
    installation.wait("jsonpath={.status.phase}=Running", "tracereplay/lost", timeout_s=120)
    labels = ("pods", "-l", "goodput.dev/tracereplay=lost")
    pods = {pod["metadata"]["name"] for pod in installation.get(*labels)["items"]}
    victim = next(name for name in pods if name.startswith("lost-shards-1-"))
    installation.kill_process("lost-shards-1")  # the host name of a pod of an Indexed Job
    status = finished(installation, "lost")
    assert (status["verdict"], status["reason"]) == ("INVALID", "ShardLost"), status
    assert status["message"].startswith(f"pod {victim} ended during the run")
    assert conditions_of(installation.get("tracereplay", "lost"))["Passed"] == "Unknown"
    assert {pod["metadata"]["name"] for pod in installation.get(*labels)["items"]} <= pods
    installation.wait("delete", "job/lost-shards", timeout_s=60)


def test_a_replay_that_cannot_start_ends_with_the_reason(
    installation: ChartRelease, replay: Callable[..., None]
) -> None:
    replay("no-trace", trace="pvc://records/absent.parquet", shards=1)
    replay("single", records="pvc://single/runs")
    replay("elsewhere", target={"url": "http://10.0.0.1"})
    for name, reason, text in (
        ("no-trace", "ShardFailed", "/var/lib/goodput/claims/records/absent.parquet: no such file"),
        ("single", "StorageRefused", "PersistentVolumeClaim single is ReadWriteOnce"),
        ("elsewhere", "ProductionNotAllowed", "http://10.0.0.1 may serve clients"),
    ):
        status = finished(installation, name)
        assert (status["verdict"], status["reason"]) == ("INVALID", reason), status
        assert text in status["message"]
    events = installation.get("events", "--field-selector", "involvedObject.name=no-trace")
    assert [event["reason"] for event in events["items"]] == ["Invalid"]
