"""`goodput policies` from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
CHAT = ROOT / "examples/chat.yaml"
COMMAND = [sys.executable, "-m", "goodput_core", "policies"]


def _run(
    *options: str | Path, cwd: Path, manifest: Path = CHAT
) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--trace", "sample", "-f", str(manifest), *map(str, options)]
    env = os.environ | {"COLUMNS": "250"}  # xdist sets the width of a terminal
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=env)


def _result(*options: str | Path, cwd: Path, manifest: Path = CHAT) -> dict[str, Any]:
    done = _run("--json", *options, cwd=cwd, manifest=manifest)
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_cheapest_candidate_with_a_pass_is_recommended(tmp_path: Path) -> None:
    options = [
        "--policies",
        "slo,sarathi",
        "--replicas",
        "1,2",
        "--rate-scale",
        "4",
        "--jobs",
        "1",
    ]
    done = _run(*options, "--plot", "it.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "is the best of" in done.stdout
    assert "replicas: 1" in done.stdout
    assert (tmp_path / "it.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_any_number_of_processes_gives_the_same_result(tmp_path: Path) -> None:
    options = ["--policies", "slo,vllm,sjf", "--limit", "60"]
    one, two, again = (_result(*options, "--jobs", jobs, cwd=tmp_path) for jobs in ("1", "2", "2"))
    assert one == two == again
    assert len(one["candidates"]) == 3


@pytest.mark.parametrize("sessions", ["independent", "causal"])
def test_figures_equal_those_of_a_replay_of_the_same_manifest(
    tmp_path: Path, sessions: str
) -> None:
    options = ["--limit", "80", "--sessions", sessions]
    found = _result("--policies", "sarathi", "--jobs", "1", *options, cwd=tmp_path)
    assert found["sessions"] == sessions
    replay = [sys.executable, "-m", "goodput_core", "replay", "--trace", "sample", *options]
    replay += ["--emulate", str(CHAT), "--out", "run", "--json", "--no-report"]
    done = subprocess.run(replay, cwd=tmp_path, capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout)
    (candidate,) = found["candidates"]
    expected = {c["name"]: (c["good"], c["total"]) for c in summary["classes"]}
    assert {c["name"]: (c["good"], c["total"]) for c in candidate["classes"]} == expected
    assert candidate["verdict"] == summary["verdict"]["kind"]
    assert candidate["goodput_per_s"] == pytest.approx(
        summary["overall"]["goodput_per_s"], abs=1e-6
    )
    assert candidate["device_hours"] == pytest.approx(summary["emulation"]["device_s"] / 3600)
    for one in candidate["classes"]:
        (same,) = (c for c in summary["classes"] if c["name"] == one["name"])
        assert one["ttft_p99_ms"] == pytest.approx(same["ttft_ms"]["p99"], abs=0.001)
        assert one["tpot_p99_ms"] == pytest.approx(same["tpot_ms"]["p99"], abs=0.001)


def test_the_table_has_a_column_for_each_figure(tmp_path: Path) -> None:
    done = _run("--policies", "slo", "--limit", "40", "--jobs", "1", cwd=tmp_path)
    head = " ".join(done.stdout.split("slo")[0].split())
    names = ("interactive met", "batch met", "(bounds), %", "goodput", "TTFT", "TPOT", "TBT")
    for name in (*names, "GPU-h", "preemp-", "recomputed", "swapped", "shed", "verdict"):
        assert name in head, head


def test_a_table_of_causal_sessions_is_labelled(tmp_path: Path) -> None:
    options = ["--policies", "slo", "--limit", "60", "--jobs", "1", "--sessions", "causal"]
    done = _run(*options, "--plot", "it.svg", cwd=tmp_path)
    assert done.stdout.startswith("causal sessions\n"), done.stderr
    assert "causal sessions" in (tmp_path / "it.svg").read_text(encoding="utf-8")


def test_placement_policies_are_compared(tmp_path: Path) -> None:
    options = ["--policies", "slo", "--rate-scale", "8", "--replicas", "1,3", "--jobs", "1"]
    found = _result(*options, "--placements", "round-robin,power-of-two", cwd=tmp_path)
    figures = {
        (c["candidate"]["replicas"], c["candidate"]["placement"]): c["classes"][0]["ttft_p99_ms"]
        for c in found["candidates"]
    }
    assert set(figures) == {(1, "round-robin"), (3, "round-robin"), (3, "power-of-two")}
    assert figures[3, "round-robin"] != figures[3, "power-of-two"]


def test_migration_uses_the_given_replicas_and_pools_their_own(tmp_path: Path) -> None:
    (tmp_path / "move.yaml").write_text("migration: {}\n", encoding="utf-8")
    (tmp_path / "pools.yaml").write_text("prefill: {replicas: 1}\ndecode: {replicas: 2}\n")
    options = ["--policies", "slo", "--limit", "20", "--replicas", "2,3", "--jobs", "1"]
    found = _result(*options, "--topology", "move.yaml", "--topology", "pools.yaml", cwd=tmp_path)
    candidates = [one["candidate"] for one in found["candidates"]]
    assert sorted((c["topology"], c["replicas"]) for c in candidates) == [
        ("", 2),
        ("", 3),
        ("move.yaml", 2),
        ("move.yaml", 3),
        ("pools.yaml", 0),
    ]
    hours = {
        (c["topology"], c["replicas"]): one["device_hours"]
        for c, one in zip(candidates, found["candidates"], strict=True)
    }
    assert hours["pools.yaml", 0] == pytest.approx(hours["move.yaml", 3], rel=0.05)


def test_a_manifest_in_mode_auto_is_compared_as_fixed_fleets(tmp_path: Path) -> None:
    auto = tmp_path / "auto.yaml"
    auto.write_text(
        CHAT.read_text(encoding="utf-8").replace("mode: Manual", "mode: Auto"), encoding="utf-8"
    )
    options = ["--policies", "sarathi", "--limit", "40", "--jobs", "1"]
    fixed = _result(*options, cwd=tmp_path, manifest=auto)
    assert fixed["candidates"] == _result(*options, cwd=tmp_path)["candidates"]
    assert (
        "control.mode Manual in place of the manifest's Auto" in fixed["recommendation"]["sentence"]
    )
    assert "control: {mode: Manual}" in fixed["recommendation"]["manifest"]


def test_an_illustrative_device_requires_an_option(tmp_path: Path) -> None:
    table = tmp_path / "table.yaml"
    text = CHAT.read_text(encoding="utf-8").replace("llama-3-8b-h100", "published-70b-table")
    table.write_text(text.replace("  engine:\n", "  engine:\n    tensorParallel: 4\n"))
    options = ["--policies", "sarathi", "--limit", "5", "--jobs", "1"]
    rejected = _run(*options, cwd=tmp_path, manifest=table)
    assert rejected.returncode == 64
    assert "add --illustrative" in rejected.stderr
    assert _run(*options, "--illustrative", cwd=tmp_path, manifest=table).returncode in {0, 1, 2}


def test_a_plot_without_matplotlib_is_rejected_before_the_comparison(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['matplotlib'] = None\n"
        "from goodput_core.dispatch import run_command\n"
        f"sys.exit(run_command(['policies', '--trace', 'sample', '-f', {str(CHAT)!r}, "
        "'--plot', 'it.png']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 64
    assert done.stderr == (
        "error: --plot it.png: the package 'matplotlib' is not installed; "
        "run pip install '.[plot]' in a clone of Goodput\n"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--policies", "slow"], "'slow' is not one of dynamic, "),
        (["--placements", "random"], "'random' is not one of least-loaded, "),
        (["--budgets", "0"], "is not a token budget in 1 to "),
        (["--replicas", "two"], "is not a number of replicas in 1 to 1000"),
        (["--class-by", "nonsense"], "--class-by"),
        (["--plot", "it.bmp"], "--plot it.bmp: the name must end in .png or .svg or .pdf"),
        (["--plot", "nowhere/it.png"], "nowhere is not a folder; create it first"),
        (["--window", "20m..30m"], "window"),
        (["--topology", "nowhere.yaml"], "nowhere.yaml"),
        (["--device", "h1000"], "h1000"),
    ],
    ids=[
        "policy",
        "placement",
        "budget",
        "replicas",
        "rule",
        "format",
        "folder",
        "window",
        "topology",
        "device",
    ],
)
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_invalid_option_is_rejected_in_one_sentence(
    tmp_path: Path, options: list[str], sentence: str, jobs: str
) -> None:
    done = _run("--jobs", jobs, "--limit", "5", *options, cwd=tmp_path)
    assert done.returncode == 64, done.stderr
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@contextmanager
def _comparing(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Start a long comparison; yield it with its workers and other child processes."""
    command = [*COMMAND, "--trace", "sample", "-f", str(CHAT), "--rate-scale", "60", "--jobs", "2"]
    with subprocess.Popen(
        command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            children: list[psutil.Process] = []
            while sum("spawn_main" in " ".join(c.cmdline()) for c in children) < 2:
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.1)
                children = psutil.Process(process.pid).children(recursive=True)
            yield process, children
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("signum", "to_group"),
    [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, True)],
    ids=["ctrl-c", "sigterm", "hang-up"],
)
def test_a_signal_ends_all_workers_with_a_message(
    tmp_path: Path, signum: signal.Signals, to_group: bool
) -> None:
    with _comparing(tmp_path) as (process, children):
        if to_group:
            os.killpg(process.pid, signum)
        else:
            process.send_signal(signum)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == "error: interrupted; nothing was compared"
    _, left = psutil.wait_procs(children, timeout=30)
    assert left == []


def test_workers_end_after_the_comparison_was_killed(tmp_path: Path) -> None:
    with _comparing(tmp_path) as (process, children):
        process.kill()
        process.wait()
        _, left = psutil.wait_procs(children, timeout=30)
    assert left == []
