"""A trace replayed against `goodput up`: real commands, real processes, real sockets."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from goodput_core.errors import ExitCode
from goodput_core.slo.verdict import Reason
from goodput_core.steptime import StepShape
from goodput_engine.device.load import load_profile
from goodput_replay.runs.record_rows import read_judged

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
CHAT = ROOT / "examples" / "chat.yaml"

pytestmark = pytest.mark.timeout(700)


def run(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / str(words[0]), *map(str, words[1:])],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )


def replayed(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Replay into the folder `run`, again if the run is INVALID because of late requests.

    The client may send late while other tests use all cores.
    """
    for _ in range(4):
        ended = run("replay", *words, "--out", "run", "--force", cwd=cwd)
        if ended.returncode != ExitCode.INVALID:
            break
        summary = json.loads((cwd / "run" / "summary.json").read_text(encoding="utf-8"))
        assert summary["validity"]["reason"] == Reason.CLIENT_LAG, summary["validity"]
    assert ended.returncode == 0, ended.stderr
    return ended


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes started in this folder or below it."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.cwd().startswith(str(folder)):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def summary(tmp_path: Path) -> dict[str, Any]:
    """Summary of eight seconds of the sample trace against the manifest's two replicas."""
    words = ("--trace", "sample", "--window", "0s..8s", "-f", CHAT, "--json")
    ended = replayed(*words, cwd=tmp_path)
    assert processes_of(tmp_path) == [], "the service ends with the replay"
    decoded: dict[str, Any] = json.loads(ended.stdout)
    return decoded


@pytest.mark.slow
def test_a_trace_is_replayed_judged_and_reported(summary: dict[str, Any], tmp_path: Path) -> None:
    rows = [judged.record for judged in read_judged(tmp_path / "run")]
    assert summary["validity"]["valid"], summary["validity"]
    assert summary["window"]["rows_sent"] == summary["window"]["rows_planned"] == len(rows)
    assert summary["overall"]["outcomes"] == {"ok": len(rows)}
    assert {row.replica for row in rows} == {"chat-0", "chat-1"}, "both replicas served"
    assert all(row.output_tokens == row.pinned_output_tokens for row in rows)
    assert any(row.cached_tokens for row in rows), "the trace's shared prefixes were found"

    # No request is faster than the device: one step for its prompt, and one step per token.
    device = load_profile("llama-3-8b-h100").form
    for row in rows:
        new = row.input_tokens - (row.cached_tokens or 0)
        prompt_ns = device.step_ns(StepShape.of(chunks=[(0, new)]))
        one_ns = device.step_ns(StepShape.of(decodes=1, decode_context_tokens=1))
        assert row.ttft_ns is not None
        assert row.ttft_ns >= prompt_ns
        # A busy client may see the first token late, which shortens the TPOT, but not the whole.
        assert row.sent_ns is not None
        assert row.end_ns is not None
        assert row.output_tokens is not None
        decodes = row.output_tokens - 1
        assert row.end_ns - row.sent_ns >= prompt_ns + 0.9 * decodes * one_ns

    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "interactive" in page
    (tmp_path / "run" / "report.html").unlink()
    assert run("replay", "report", "run", cwd=tmp_path).returncode == 0
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
def test_an_imported_trace_is_described_and_replayed(tmp_path: Path) -> None:
    with (tmp_path / "azure.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for i in range(30):
            table.writerow([f"2023-11-16 18:15:{40 + i // 10}.{i % 10}000001", 100 + i, 5])
    imported = run("goodput", "trace", "import", "azure.csv", "--out", "t.parquet", cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr
    described = run("goodput", "trace", "describe", "t.parquet", "--json", cwd=tmp_path)
    assert json.loads(described.stdout)["rows"] == 30
    ended = replayed("--trace", "t.parquet", "-f", CHAT, cwd=tmp_path)
    assert "30/30" in ended.stdout
    table_of_records = pq.read_table(tmp_path / "run" / "records.parquet").to_pydict()
    scheduled = table_of_records["scheduled_ns"]
    assert scheduled == [i * 100_000_000 for i in range(30)], "the real timestamps"
    assert processes_of(tmp_path) == []


@pytest.mark.slow
def test_an_interrupted_replay_writes_its_run_and_leaves_no_process(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [BIN / "replay", "--trace", "sample", "-f", CHAT, "--out", "run"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    for line in child.stderr:  # the first progress line comes ten seconds into the run
        if " sent " in line:
            break
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130, err
    assert "Traceback" not in err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert not summary["run"]["complete"]
    assert summary["verdict"]["kind"] == "INVALID"
    assert len(list(read_judged(tmp_path / "run"))) > 0
    assert processes_of(tmp_path) == []
