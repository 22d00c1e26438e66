"""TraceReplays and gates with traces, records and baselines in a real store with S3's API.

Shards write to it and the second Job reads from it, with credentials of a Secret. Storage that
cannot be used ends a replay, or an attempt of a gate, before its first request. `make test-s3` runs
this file.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest
from tools.cluster.handle import wait_for
from tools.cluster.layout import API_ADDRESS
from tools.e2e.installation import conditions_of
from tools.e2e.recordings import judge, recordings
from tools.s3.server import BUILD, StorageServer, program

from goodput_traces.sample import sample_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.cluster.handle import OwnCluster
    from tools.e2e.installation import ChartRelease

SECRET = "object-storage"
WINDOW_S = 22
"""A PASS needs requests in twenty seconds."""
SLO = {
    "classes": [
        {"name": "interactive", "ttftMs": 10000, "tpotMs": 1000, "objective": "80%"},
        {"name": "batch", "ttftMs": 60000, "tpotMs": 5000},
    ]
}


@pytest.fixture(scope="module")
def store(
    installation: ChartRelease, own_cluster: OwnCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StorageServer]:
    """A running server with the buckets `traces` and `runs`, and a Secret with its account."""
    if "GOODPUT_S3" not in os.environ or not program().exists():
        pytest.skip(f"NOT RUN: needs the S3 server that `{BUILD}` builds, and two minutes")
    server = StorageServer(
        address=f"{API_ADDRESS}:7070",
        folder=tmp_path_factory.mktemp("store"),
        access_key=secrets.token_hex(10),
        secret_key=secrets.token_hex(20),
    )
    shutil.copy(sample_path(), server.bucket("traces") / "sample.parquet")
    server.bucket("runs")
    account = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET, "namespace": installation.namespace},
        "stringData": {
            "access-key-id": server.access_key,
            "secret-access-key": server.secret_key,
            "former-key": "0" * 40,
        },
    }
    own_cluster.apply(account)
    with (tmp_path_factory.mktemp("log") / "versitygw").open("wb") as log:
        process = subprocess.Popen(own_cluster.inside(*server.command()), stdout=log, stderr=log)
        try:
            installation.run_inside(
                *("curl", "--silent", "--fail", "--retry", "20", "--retry-delay", "1"),
                *("--retry-all-errors", f"http://{server.address}/health"),
            )
            yield server
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def replay(
    installation: ChartRelease, serve: Callable[..., None], store: StorageServer
) -> Callable[..., None]:
    """Create a TraceReplay of two shards in object storage."""
    serve("stored", replicas=1)

    def create(name: str, key: str = "secret-access-key", **spec: Any) -> None:
        manifest = {
            "apiVersion": "goodput.dev/v1alpha1",
            "kind": "TraceReplay",
            "metadata": {"name": name, "namespace": installation.namespace},
            "spec": {
                "trace": store.uri("traces/sample.parquet"),
                "window": {"startSeconds": 0, "endSeconds": WINDOW_S},
                "target": {"service": "stored"},
                "allowProduction": True,
                "slo": SLO,
                "gate": {},
                "shards": 2,
                "records": store.uri("runs/nights"),
                "resources": {"requests": {"cpu": "10m"}},
                "pod": {"env": credentials(key)},
                **spec,
            },
        }
        installation.kubectl("create", "-f", "-", stdin=json.dumps(manifest))

    return create


def credentials(key: str = "secret-access-key") -> list[dict[str, Any]]:
    """Return the variables of a pod with the account of the store, whose Secret has it at `key`."""
    references = {"AWS_ACCESS_KEY_ID": "access-key-id", "AWS_SECRET_ACCESS_KEY": key}
    return [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": one}}}
        for variable, one in references.items()
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_records_are_written_to_a_store_merged_from_it_and_judged(
    installation: ChartRelease,
    replay: Callable[..., None],
    store: StorageServer,
    tell: Callable[[str], None],
) -> None:
    replay("kept")
    nights = store.bucket("runs") / "history"
    with recordings(
        installation, "stored", nights, slo=SLO, trace=sample_path(), window_s=WINDOW_S
    ) as running:
        wait_for(
            lambda: status_of(installation, "kept").get("phase") == "Running", "kept runs", 180
        )
        began = time.monotonic()
        nowhere = StorageServer(
            address=f"{API_ADDRESS}:7099", folder=store.folder, access_key="", secret_key=""
        )
        refused = {
            "bucket": ({"records": store.uri("absent/runs")}, "s3://absent/runs/"),
            "trace": ({"trace": store.uri("absent/x.parquet")}, "s3://absent/x.parquet: no such"),
            "key": ({"key": "former-key"}, "s3://traces/sample.parquet: cannot be read: "),
            "endpoint": ({"records": nowhere.uri("runs/a")}, "s3://runs/a/"),
        }
        for name, (change, _) in refused.items():
            replay(name, shards=1, **change)
        for name, (_, words) in refused.items():
            status = finished(installation, name)
            tell(f"{name} after {time.monotonic() - began:.0f} s: {status['message']}")
            assert (status["verdict"], status["reason"]) == ("INVALID", "ShardFailed"), status
            assert f"failed before the start: {words}" in status["message"]
            assert conditions_of(installation.get("tracereplay", name))["Passed"] == "Unknown"

        kept = finished(installation, "kept")
        tell(f"kept: {kept['message']}")
        assert (kept["verdict"], kept["reason"]) == ("PASS", "Attained"), kept
        assert kept["report"] == store.uri(
            f"runs/nights/kept-{uid_of(installation, 'kept')[:8]}/merged"
        )
        merged = store.bucket("runs") / kept["report"].partition("?")[0].removeprefix("s3://runs/")
        summary = json.loads((merged / "summary.json").read_text(encoding="utf-8"))
        assert summary["overall"]["requests"] == kept["requests"] > 50
        assert {path.name for path in merged.parent.iterdir()} == {"shard-0", "shard-1", "merged"}
        assert not list(merged.parent.rglob(".writable"))

        gate = {"baseline": kept["report"], "margin": "5%"}
        replay("beside-kept", shards=1, gate=gate)
        compared = finished(installation, "beside-kept")
        tell(f"compared: {compared['message']} {compared['interval']}")
        assert "against the baseline in one pair of runs" in compared["message"]
        assert compared["interval"].startswith("interactive: ")

        for recording in running:
            output, _ = recording.communicate(timeout=240)
            tell(output)
    replay("beside-nights", shards=1, gate={"history": store.uri("runs/history"), "margin": "20%"})
    compared = finished(installation, "beside-nights")
    tell(f"beside nights: {compared['message']} {compared['interval']}")
    run = store.bucket("runs") / compared["report"].partition("?")[0].removeprefix("s3://runs/")
    judged = judge(run, "--recorded", str(nights), "--margin", "20%")
    assert (compared["verdict"], compared["reason"]) == ("PASS", judged["reason"]), compared
    assert compared["message"] == judged["sentence"]

    names = ",".join((*refused, "kept", "beside-kept", "beside-nights"))
    pods = ("-l", f"goodput.dev/tracereplay in ({names})")
    logs = installation.kubectl("logs", *pods, "--tail=-1", "--prefix", "--all-containers")
    assert "kept-merge" in logs
    kinds = ("tracereplays", "jobs", "pods", "events", "configmaps")
    objects = [installation.kubectl("get", kind, "-o", "yaml") for kind in kinds]
    for text in (logs, json.dumps(installation.operator_log()), *objects):
        assert store.secret_key not in text
        assert store.access_key not in text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_gate_reads_its_trace_from_a_store_and_keeps_its_runs_there(
    installation: ChartRelease,
    serve: Callable[..., None],
    store: StorageServer,
    tell: Callable[[str], None],
) -> None:
    gate = {
        "trace": store.uri("traces/sample.parquet"),
        "window": {"startSeconds": 0, "endSeconds": WINDOW_S},
        "records": store.uri("runs/gates"),
        "pairs": 2,
        "margin": "20%",
        "resources": {"requests": {"cpu": "10m"}},
    }
    for name, key in (("keyed", "secret-access-key"), ("locked", "former-key")):
        env = {"pod": {"env": credentials(key)}}
        serve(name, replicas=1, slo=SLO, rollout={"gate": {**gate, **env}})
        installation.patch(name, engine={"policy": "orca"})
    keyed, locked = (gate_ended(installation, name) for name in ("keyed", "locked"))
    tell(f"keyed: {keyed['message']}\n{keyed['report']}")
    tell(f"locked: {locked['message']}")
    assert (keyed["phase"], keyed["verdict"]) == ("Passed", "PASS"), keyed
    installation.wait_settled("keyed")
    folder, _, options = keyed["report"].partition("?")
    assert folder.startswith(f"s3://runs/gates/{keyed['revision']}-")
    assert options == store.uri("").partition("?")[2]
    runs = store.bucket("runs") / folder.removeprefix("s3://runs/")
    for pair in ("pair-1", "pair-2"):
        for side in ("baseline", "candidate"):
            assert (runs / pair / side / "report.html").is_file()
    judged = judge(runs, "--margin", "20%")
    assert (judged["verdict"], judged["sentence"]) == ("PASS", keyed["message"])

    assert (locked["phase"], locked["verdict"]) == ("Paused", "INVALID"), locked
    assert "s3://traces/sample.parquet: cannot be read: " in locked["message"]
    assert installation.condition("locked", "RolloutPaused")[0] == "GateInvalid"
    assert "failedRevision" not in installation.status("locked")
    kinds = ("llmservices", "controllerrevisions", "jobs", "pods", "events", "configmaps")
    objects = [installation.kubectl("get", kind, "-o", "yaml") for kind in kinds]
    for text in (json.dumps(installation.operator_log()), *objects):
        assert store.secret_key not in text
        assert store.access_key not in text


def gate_ended(installation: ChartRelease, name: str) -> dict[str, Any]:
    """Return the gate of a service once it has ended."""

    def gate() -> dict[str, Any]:
        found: dict[str, Any] = installation.status(name).get("gate", {})
        return found

    wait_for(lambda: gate().get("phase") in {"Passed", "Failed", "Paused"}, f"gate of {name}", 400)
    return gate()


def status_of(installation: ChartRelease, name: str) -> dict[str, Any]:
    status: dict[str, Any] = installation.get("tracereplay", name).get("status", {})
    return status


def uid_of(installation: ChartRelease, name: str) -> str:
    uid: str = installation.get("tracereplay", name)["metadata"]["uid"]
    return uid


def finished(installation: ChartRelease, name: str) -> dict[str, Any]:
    """Return the status of a replay once it has ended."""
    installation.wait("condition=Finished", f"tracereplay/{name}", timeout_s=240)
    return status_of(installation, name)
