"""`goodput policies` as a person types it."""

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
    *arguments: str | Path, cwd: Path, manifest: Path = CHAT
) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--trace", "sample", "-f", str(manifest), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def _answer(*arguments: str | Path, cwd: Path, manifest: Path = CHAT) -> dict[str, Any]:
    done = _run("--json", *arguments, cwd=cwd, manifest=manifest)
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_candidates_are_compared_and_the_cheapest_that_holds_is_recommended(
    tmp_path: Path,
) -> None:
    asked = ["--policies", "slo,sarathi", "--replicas", "1,2", "--rate-scale", "4", "--jobs", "1"]
    done = _run(*asked, "--plot", "it.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "is the cheapest of" in done.stdout
    assert "replicas: 1" in done.stdout
    assert (tmp_path / "it.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_workers_find_what_one_process_finds_and_always_the_same(tmp_path: Path) -> None:
    asked = ["--policies", "slo,vllm,sjf", "--limit", "60"]
    one, two, again = (_answer(*asked, "--jobs", jobs, cwd=tmp_path) for jobs in ("1", "2", "2"))
    assert one == two == again
    assert len(one["candidates"]) == 3


def test_figures_are_those_of_the_replay_of_the_same_manifest(tmp_path: Path) -> None:
    found = _answer("--policies", "sarathi", "--limit", "80", "--jobs", "1", cwd=tmp_path)
    replay = [sys.executable, "-m", "goodput_core", "replay", "--trace", "sample", "--limit", "80"]
    replay += ["--emulate", str(CHAT), "--out", "run", "--json", "--no-report"]
    done = subprocess.run(replay, cwd=tmp_path, capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout)
    (candidate,) = found["candidates"]
    told = {c["name"]: (c["good"], c["total"]) for c in summary["classes"]}
    assert {c["name"]: (c["good"], c["total"]) for c in candidate["classes"]} == told
    assert candidate["verdict"] == summary["verdict"]["kind"]
    assert candidate["device_hours"] == pytest.approx(summary["emulation"]["device_s"] / 3600)
    for one in candidate["classes"]:
        (same,) = (c for c in summary["classes"] if c["name"] == one["name"])
        assert one["ttft_p99_ms"] == pytest.approx(same["ttft_ms"]["p99"], abs=0.001)
        assert one["tpot_p99_ms"] == pytest.approx(same["tpot_ms"]["p99"], abs=0.001)


def test_the_table_names_everything_that_a_choice_is_made_by(tmp_path: Path) -> None:
    done = _run("--policies", "slo", "--limit", "40", "--jobs", "1", cwd=tmp_path)
    head = " ".join(done.stdout.split("slo")[0].split())
    names = ("interactive kept", "batch kept", "(bounds), %", "goodput", "TTFT", "TPOT", "TBT")
    for name in (*names, "GPU-h", "preemp-", "recomputed", "swapped", "shed", "verdict"):
        assert name in head, head


def test_the_routers_policy_is_compared_too(tmp_path: Path) -> None:
    asked = ["--policies", "slo", "--rate-scale", "8", "--replicas", "1,3", "--jobs", "1"]
    found = _answer(*asked, "--placements", "round-robin,power-of-two", cwd=tmp_path)
    figures = {
        (c["candidate"]["replicas"], c["candidate"]["placement"]): c["classes"][0]["ttft_p99_ms"]
        for c in found["candidates"]
    }
    assert set(figures) == {(1, "round-robin"), (3, "round-robin"), (3, "power-of-two")}
    assert figures[3, "round-robin"] != figures[3, "power-of-two"]


def test_migration_goes_with_any_number_of_replicas_and_pools_with_their_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "move.yaml").write_text("migration: {}\n", encoding="utf-8")
    (tmp_path / "pools.yaml").write_text("prefill: {replicas: 1}\ndecode: {replicas: 2}\n")
    asked = ["--policies", "slo", "--limit", "20", "--replicas", "2,3", "--jobs", "1"]
    found = _answer(*asked, "--topology", "move.yaml", "--topology", "pools.yaml", cwd=tmp_path)
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


def test_a_manifest_under_a_control_law_is_compared_as_fixed_fleets(tmp_path: Path) -> None:
    auto = tmp_path / "auto.yaml"
    auto.write_text(
        CHAT.read_text(encoding="utf-8").replace("mode: Manual", "mode: Auto"), encoding="utf-8"
    )
    asked = ["--policies", "sarathi", "--limit", "40", "--jobs", "1"]
    held = _answer(*asked, cwd=tmp_path, manifest=auto)
    assert held["candidates"] == _answer(*asked, cwd=tmp_path)["candidates"]
    assert "was taken as Manual" in held["recommendation"]["sentence"]
    assert "control: {mode: Manual}" in held["recommendation"]["manifest"]


def test_a_choice_for_an_illustrative_device_has_to_be_asked_for(tmp_path: Path) -> None:
    table = tmp_path / "table.yaml"
    text = CHAT.read_text(encoding="utf-8").replace("llama-3-8b-h100", "published-70b-table")
    table.write_text(text.replace("  engine:\n", "  engine:\n    tensorParallel: 4\n"))
    asked = ["--policies", "sarathi", "--limit", "5", "--jobs", "1"]
    refused = _run(*asked, cwd=tmp_path, manifest=table)
    assert refused.returncode == 64
    assert "add --illustrative" in refused.stderr
    assert _run(*asked, "--illustrative", cwd=tmp_path, manifest=table).returncode in {0, 1, 2}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
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
def test_what_cannot_be_is_refused_in_one_sentence(
    tmp_path: Path, arguments: list[str], sentence: str, jobs: str
) -> None:
    done = _run("--jobs", jobs, "--limit", "5", *arguments, cwd=tmp_path)
    assert done.returncode == 64, done.stderr
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@contextmanager
def _comparing(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A comparison that takes long, and its two workers and whatever else it has started."""
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
    ("number", "to_group"),
    [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, True)],
    ids=["ctrl-c", "sigterm", "hang-up"],
)
def test_a_signal_ends_all_workers_and_is_said_to(
    tmp_path: Path, number: signal.Signals, to_group: bool
) -> None:
    with _comparing(tmp_path) as (process, children):
        if to_group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip() == "error: interrupted; nothing was compared"
    _, left = psutil.wait_procs(children, timeout=30)
    assert left == []


def test_workers_do_not_outlive_a_comparison_that_was_killed(tmp_path: Path) -> None:
    with _comparing(tmp_path) as (process, children):
        process.kill()
        process.wait()
        _, left = psutil.wait_procs(children, timeout=30)
    assert left == []
