"""The capacity of a server of another kind: replayed, calibrated, found, and used by the operator.

The commands are those of docs/runtimes.md, against an emulated vLLM in a process of its own.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.builders.documented import documented_command
from tests.builders.traces import trace_row, write_rows

from goodput_core.control import ClassWindow, TargetCounts
from goodput_operator.control.server_pages import decode_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.operator.reconcile.conftest import Cluster

    from goodput_traces.format.schema import TraceRow

ROOT = Path(__file__).parents[3]
PAGE = "runtimes.md"
SERVED = "http://127.0.0.1:8000"
"""Address of the server in the documented command."""
STEP_MS, STEP_PER_REQUEST_MS = 10, 15
"""Constants of the emulated server (tools/e2e/emulated_vllm.py)."""
MANIFEST = yaml.safe_load(
    (ROOT / "examples" / "runtimes" / "emulated-vllm.yaml").read_text(encoding="utf-8")
)
TPOT_MS = next(one["tpotMs"] for one in MANIFEST["spec"]["slo"]["classes"])
OUTPUTS = (8, 16, 24)


@pytest.fixture
def server() -> Iterator[str]:
    """The URL of an emulated vLLM."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    command = [sys.executable, str(ROOT / "tools" / "e2e" / "emulated_vllm.py"), "serve", "weights"]
    command += ["--served-model-name", "vllm", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except urllib.error.URLError:
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the documented commands name."""
    (tmp_path / "examples" / "runtimes").mkdir(parents=True)
    source = ROOT / "examples" / "runtimes" / "emulated-vllm.yaml"
    shutil.copy(source, tmp_path / "examples" / "runtimes" / "vllm.yaml")
    spec = {k: v for k, v in MANIFEST["spec"].items() if k not in {"minReplicas", "maxReplicas"}}
    new = {**MANIFEST, "spec": {**spec, "replicas": 1}}
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(new), encoding="utf-8")
    rng, at_s = random.Random(5), 0.0
    rows: list[TraceRow] = []
    while at_s < 35:
        lengths = {"input_tokens": rng.choice((32, 64, 128)), "output_tokens": rng.choice(OUTPUTS)}
        rows.append(trace_row(len(rows), at_s=at_s, **lengths))
        at_s += rng.expovariate(2)
    write_rows(tmp_path / "prod.parquet", rows)
    return tmp_path


def run(folder: Path, start: str, **replaced: str) -> str:
    """Run the documented command that begins with these words, and return what it printed."""
    program, *words = documented_command(PAGE, start)
    words = [replaced.get(word, word) for word in words]
    done = subprocess.run(
        [Path(sys.executable).parent / program, *words],
        cwd=folder,
        env={**os.environ, "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{program} {words}: {done.stdout}{done.stderr}"
    return done.stdout


def serve(cluster: Cluster, page: bytes, *, per_s: int, **control: Any) -> list[int]:
    """Return the replicas of a service after each interval of ten seconds, without a missed target.

    Args:
        cluster: the cluster, with another service.
        page: metrics page of each replica.
        per_s: requests per second.
        control: fields of `spec.control`.
    """
    cluster.update_spec(
        model={"source": "pvc://weights/chat"},
        engine={"runtime": {"kind": "vLLM", "image": "v"}},
        replicas=None,
        minReplicas=1,
        maxReplicas=8,
        control=control,
    )
    cluster.settle()
    kept, state = TargetCounts(judged=10 * per_s), decode_server(page).state
    replicas = []
    for _ in range(12):
        measures = cluster.measured(10 * per_s, 10 * per_s)
        engines = tuple(replace(one, foreign=True, state=state) for one in measures.engines)
        classes = (ClassWindow(name="a", ttft=kept, tpot=kept),)
        cluster.reconcile(replace(measures, engines=engines, classes=classes))
        cluster.now_ns += measures.interval_ns // 2
        replicas.append(cluster.status["replicas"])
    return replicas


def busy_page(server: str) -> bytes:
    """Return the metrics page of a server that runs three requests."""
    body = {"model": "vllm", "prompt": "word " * 20, "max_tokens": 100, "stream": True}
    with ExitStack() as stack:
        for _ in range(3):
            request = urllib.request.Request(
                f"{server}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            stack.enter_context(urllib.request.urlopen(request, timeout=30)).readline()
        with urllib.request.urlopen(f"{server}/metrics", timeout=10) as response:
            page: bytes = response.read()
    return page


@pytest.mark.slow(45)
@pytest.mark.timeout(400)
def test_the_capacity_of_a_calibrated_profile_adds_replicas_before_a_target_is_missed(
    cluster: Cluster, server: str, folder: Path
) -> None:
    for _ in range(3):
        printed = run(folder, "replay --trace prod.parquet --target", **{SERVED: server})
        if "INVALID" not in printed:
            break  # otherwise the machine was busy
        shutil.rmtree(folder / "runs" / "vllm")
    run(folder, "goodput device calibrate runs/vllm")
    profile = yaml.safe_load((folder / "mine.yaml").read_text(encoding="utf-8"))
    numbers = {name: one["value"] for name, one in profile["numbers"].items()}
    assert numbers["c4_us_per_request"] == pytest.approx(1000 * STEP_PER_REQUEST_MS, rel=0.4)
    # On a quiet machine, the steps of a few widths are alike, and the fit may have no constant.
    assert numbers.get("c0_ms", 0) < 3 * STEP_MS

    printed = run(folder, "replay capacity --trace prod.parquet --emulate new.yaml")
    [found] = re.findall(r"^([\d.]+) requests/s \(.*\) is sustained", printed, re.MULTILINE)
    capacity = float(found)
    # The batch of this width has the TPOT target, so hardly more requests complete in time.
    width = (TPOT_MS - STEP_MS) / STEP_PER_REQUEST_MS
    most = width / (mean(OUTPUTS) * TPOT_MS / 1000)
    assert most / 3 < capacity <= 1.5 * most

    page, per_s = busy_page(server), math.ceil(2.5 * capacity)
    assert decode_server(page).state.running == 3
    assert set(serve(cluster, page, per_s=per_s)) == {1}, "observations show nothing yet"
    expected = {"replicaRequestsPer1000Seconds": round(1000 * capacity)}
    replicas = serve(cluster, page, per_s=per_s, **expected)
    needed = math.ceil(per_s / capacity)
    assert replicas == sorted(replicas)
    assert needed <= replicas[-1] <= needed + 1
    assert cluster.condition("ScalingLimited")[0] == "False"
    [decision, *_] = [one for one in cluster.status["decisions"] if one["knob"] == "Replicas"]
    assert "missed" not in decision["message"]
