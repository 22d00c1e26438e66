"""`replay --emulate` from the command line to the run folder."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import pytest
from tests.builders.manifests import manifest_path

from goodput_core.dispatch import run_command
from goodput_core.slo.record import Outcome
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.emulation.virtual_time import Stopped, stoppable
from goodput_replay.report.run_report import render
from goodput_replay.runs.folder import RunWriter
from goodput_replay.runs.record_rows import read_judged
from goodput_replay.runs.slo import SLOClasses
from goodput_traces.format.schema import Clock, TraceMetadata, TraceRow
from goodput_traces.format.writer import write_trace

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_core.slo.judging import Judgement
    from goodput_core.slo.record import RequestRecord

MANIFEST = manifest_path("emulated").read_text(encoding="utf-8").replace("emulated://unit", "MODEL")


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "chat.yaml"
    path.write_text(MANIFEST.replace("MODEL", "emulated://unit"))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace of 10 requests/s; every fifth is slow, one is cancelled, one has a target."""
    path = tmp_path / "t.parquet"
    rows = [
        TraceRow(
            request_id=f"r{number}",
            timestamp_start_unix_ns=1_700_000_000 * NS_PER_S + number * 100 * NS_PER_MS,
            input_tokens=20 + number % 300,
            output_tokens=1 + number % 40,
            slo_class="slow" if number % 5 == 0 else None,
            cancel_after_ms=3.5 if number == 77 else None,
            request_canceled=number == 77,
            ttft_target_ms=0.5 if number == 8 else None,
        )
        for number in range(600)
    ]
    write_trace(path, rows, TraceMetadata(source="a test", clock=Clock.ABSOLUTE))
    return path


def run(*arguments: object) -> int:
    return run_command(["replay", *map(str, arguments)])


def test_the_run_folder_states_that_the_run_was_emulated(
    trace: Path, manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--trace", trace, "--emulate", manifest, "--out", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert "Emulated in virtual time, not measured: 2 replicas on device profile unit" in printed
    assert "in virtual time every request is on schedule" in printed
    assert "send lag" not in printed
    assert "kept up" not in printed
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["overall"]["outcomes"] == {"cancelled": 1, "ok": 599}
    assert summary["overall"]["misses"] == {"ttft": 1}, "the row's own target is half a step"
    assert summary["run"]["started_at"] == "2023-11-14T22:13:20.000000+00:00"
    assert summary["target"]["pinning"] == "header"
    emulation = summary["emulation"]
    assert emulation["device"] == "unit"
    assert (emulation["replicas"], emulation["token_budget"]) == (2, 256)
    assert (emulation["policy"], emulation["placement"]) == ("sarathi", "least-loaded")
    assert emulation["device_s"] == pytest.approx(2 * emulation["virtual_s"])
    assert (emulation["peak_replicas"], emulation["final_replicas"]) == (2, 2)
    page = render(tmp_path / "run")
    assert "Emulated in virtual time, not measured: 2 replicas on device profile unit" in page
    assert "token budget 256, least-loaded placement" in page
    assert "Client processor time" not in page
    assert "send lag" not in page.lower()
    assert "kept up" not in page
    assert summary["validity"]["lag_ms"] is None
    rows = list(read_judged(tmp_path / "run"))
    assert {row.record.replica for row in rows} == {"chat-0", "chat-1"}
    ends = [row.record.end_ns or 0 for row in rows]
    assert ends == sorted(ends)


def test_the_same_command_gives_identical_files(
    trace: Path, manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = ("--trace", trace, "--emulate", manifest, "--rate-scale", "0.7", "--seed", 3)
    found = []
    for _ in range(2):
        assert run(*arguments, "--out", out, "--force", "--json") == 0
        found.append(
            (
                (out / "records.parquet").read_bytes(),
                (out / "summary.json").read_bytes(),
                (out / "report.html").read_bytes(),
                capsys.readouterr().out,
            )
        )
    assert found[0] == found[1]


def test_an_oracle_is_reported_as_a_bound(
    trace: Path, manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--trace", trace, "--emulate", manifest, "--no-report", "--oracle")
    assert run(*common, "--out", tmp_path / "run") == 0
    assert "shortest first by an oracle (an upper bound), recompute" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["emulation"]["oracle"]


def test_a_topology_replaces_the_replicas_and_is_reported(
    trace: Path, manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topology = tmp_path / "two.yaml"
    topology.write_text("prefill: {replicas: 1}\ndecode: {replicas: 3}\n")
    common = ("--trace", trace, "--emulate", manifest, "--no-report", "--topology", topology)
    assert run(*common, "--out", tmp_path / "run") == 0
    words = "4 replicas (1 prefill, 3 decode, 50 GB/s between them) on device profile unit"
    assert words in " ".join(capsys.readouterr().out.split())
    served = {row.record.replica for row in read_judged(tmp_path / "run")}
    assert served == {"chat-prefill-0", *(f"chat-decode-{i}" for i in range(3))}
    topology.write_text("prefill: {replicas: 1}\n")
    assert run(*common, "--out", tmp_path / "other") == 64
    assert f"error: {topology}: decode: is required" in capsys.readouterr().err


def test_migrations_are_reported_and_counted(
    trace: Path, manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topology = tmp_path / "move.yaml"
    # Every replica is below this threshold, so every move that shrinks a gap is made.
    topology.write_text("migration: {belowBlocks: 1000000, pollMs: 1}\nlink: {gbPerSecond: 25}\n")
    common = ("--trace", trace, "--emulate", manifest, "--no-report", "--topology", topology)
    assert run(*common, "--speed", 20, "--out", tmp_path / "run") == 0
    words = "(live migration below 1000000 free blocks per request, 25 GB/s per replica)"
    assert words in " ".join(capsys.readouterr().out.split())
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["emulation"]
    assert found["migrations"] > 0
    assert found["migrated_blocks"] >= found["migrations"]


def test_the_exit_code_of_a_gate_is_the_verdict(
    trace: Path, manifest: Path, tmp_path: Path
) -> None:
    common = ("--trace", trace, "--emulate", manifest, "--gate", "--no-report", "--no-gaps")
    assert run(*common, "--out", tmp_path / "pass") == 0
    # The misses are in two bursts, so the upper bound is far above the attainment.
    tight = manifest.read_text().replace("ttftMs: 50,", "ttftMs: 1,").replace("90%", "99%")
    manifest.write_text(tight)
    assert run(*common, "--out", tmp_path / "fail") == 1


def test_warm_up_and_window_apply_as_in_any_replay(
    trace: Path, manifest: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert run(
        "--trace", trace, "--emulate", manifest, "--window", "10s..20s", "--warmup", 10,
        "--speed", 2, "--out", out, "--no-report",
    ) == 0  # fmt: skip
    window = json.loads((out / "summary.json").read_text())["window"]
    assert (window["rows_planned"], window["warmup_rows"]) == (90, 10)
    assert window["length_s"] == 4.5


def test_a_dry_run_writes_no_folder(
    trace: Path, manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run("--trace", trace, "--emulate", manifest, "--dry-run", "--json", "--out", out) == 0
    assert json.loads(capsys.readouterr().out)["classes"] == {"slow": 120, "fast": 480}
    assert not out.exists()


@pytest.mark.parametrize("source", ["hf://Qwen/Qwen3-8B", "pvc://weights/chat"])
def test_real_weights_require_a_device_and_the_error_lists_the_profiles(
    trace: Path, manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    manifest.write_text(MANIFEST.replace("MODEL", source))
    out = tmp_path / "run"
    assert run("--trace", trace, "--emulate", manifest, "--out", out) == 64
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert source in printed
    assert "--device" in printed
    assert "llama-3-8b-h100" in printed
    assert not out.exists()
    arguments = ("--trace", trace, "--emulate", manifest, "--device", "unit")
    assert run(*arguments, "--out", out, "--no-report") == 0


def test_an_unknown_class_is_rejected_before_the_run(
    trace: Path, manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = ("--trace", trace, "--emulate", manifest, "--class-by", "gold: *")
    assert run(*arguments, "--out", out) == 64
    assert "has the class 'gold', which is not among the SLO classes" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("signum", "name"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "the closed terminal")],
    ids=["sigterm", "hang-up"],
)
def test_a_signal_ends_a_run_between_two_records_and_keeps_the_records(
    trace: Path,
    manifest: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    signum: signal.Signals,
    name: str,
) -> None:
    real = RunWriter.append
    inherited = signal.signal(signum, lambda *_: None)  # ignored under `nohup`

    def append(self: RunWriter, record: RequestRecord, *, warmup: bool = False) -> Judgement | None:
        if self.rows == 99:
            os.kill(os.getpid(), signum)
        return real(self, record, warmup=warmup)

    monkeypatch.setattr(RunWriter, "append", append)
    out = tmp_path / "run"
    try:
        assert run("--trace", trace, "--emulate", manifest, "--out", out, "--no-report") == 130
    finally:
        signal.signal(signum, inherited)
    assert f"interrupted by {name} after 100 of 600" in capsys.readouterr().err
    summary = json.loads((out / "summary.json").read_text())
    assert not summary["run"]["complete"]
    assert summary["verdict"]["kind"] == "INVALID"
    assert summary["overall"]["requests"] == 100
    assert 9 < summary["window"]["length_s"] < 11, "the part of 60 s that was run"
    assert all(row.record.outcome is not Outcome.UNSENT for row in read_judged(out))


def test_signal_handlers_are_restored_after_a_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    writer = RunWriter(tmp_path / "run", slo=SLOClasses())
    with writer, stoppable(writer) as check:
        check()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped, match="interrupted by SIGTERM"):
            check()
    assert signal.getsignal(signal.SIGTERM) is before
