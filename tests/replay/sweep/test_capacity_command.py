"""`replay capacity` on an emulated service, as a person types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.builders.manifests import manifest, write_manifest

ROOT = Path(__file__).parents[3]


def _manifest(folder: Path, *, device: str = "llama-3-8b-h100", devices: int = 1) -> Path:
    classes = manifest("chat")["spec"]["slo"]["classes"]
    return write_manifest(
        folder,
        "chat",
        replicas=1,
        model__source=f"emulated://{device}",
        engine__tensorParallel=devices,
        slo__classes=[promised | {"objective": "90%"} for promised in classes],
    )


def _run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "goodput_core", "replay", "capacity", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def _search(folder: Path, *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    done = _run(
        "--trace", "sample", "--emulate", _manifest(folder), "--json", *arguments, cwd=folder
    )
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, answer


def test_the_highest_rate_that_holds_is_found_and_the_next_one_named(tmp_path: Path) -> None:
    code, answer = _search(tmp_path, "--precision", "50", "--start", "4", "--out", "probes")
    assert code == 0
    assert answer["shown"] is True
    best, above = answer["capacity"], answer["does_not_hold"]
    assert best["verdict"] == "PASS"
    assert above["verdict"] in {"FAIL", "INCONCLUSIVE"}
    assert best["rate_scale"] < above["rate_scale"] <= 1.5 * best["rate_scale"]
    assert best["offered_per_s"] < above["offered_per_s"]
    for probe in answer["probes"]:
        assert (tmp_path / probe["run"] / "summary.json").is_file()


def test_the_same_command_finds_the_same_rate(tmp_path: Path) -> None:
    answers = []
    for name in ("one", "two"):
        _, answer = _search(tmp_path, "--window", "..10s", "--probes", "2", "--out", name)
        for probe in (*answer["probes"], answer["capacity"]):
            del probe["run"]
        answers.append(answer)
    assert answers[0] == answers[1]


def test_a_rate_that_only_seems_to_hold_is_said_to(tmp_path: Path) -> None:
    code, answer = _search(tmp_path, "--window", "..3s", "--probes", "2", "--out", "probes")
    assert code == 2
    assert answer["shown"] is False
    assert "seems to hold, but is not shown" in answer["sentence"]


def test_a_rate_that_cannot_be_sent_ends_the_search_and_not_its_answer(tmp_path: Path) -> None:
    asked: list[str | Path] = ["--trace", "sample", "--emulate", _manifest(tmp_path)]
    asked += ["--window", "..2s", "--start", "8", "--max-rate", "30", "--json"]
    done = _run(*asked, "--out", "probes", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "not tried: at 16 times the trace's rate: --max-rate 30: the busiest" in done.stderr
    answer = json.loads(done.stdout)
    assert answer["capacity"]["rate_scale"] == 8
    assert answer["does_not_hold"] is None
    first = [*asked[:-3], "--max-rate", "1", "--out", "none"]
    assert _run(*first, cwd=tmp_path).returncode == 64


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rate-scale", "2"], "--rate-scale is the search's own; leave it out"),
        (["--limit", "9"], "--limit: cut the trace by time with --window"),
        (["--gate"], "--gate is the search's own; leave it out"),
        (["--window", "9m..1m"], "--window"),
        (["--precision", "soon"], "'soon' is not a percentage; write for example 2"),
        (["--precision", "1000"], "'1000' is out of bounds; give 0.1 to 100"),
        (["--out", "chat.yaml"], "--out chat.yaml: exists already; name another folder"),
    ],
    ids=[
        "a rate",
        "a limit",
        "a gate",
        "replay's own check",
        "no number",
        "no precision",
        "a folder there",
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    done = _run("--trace", "sample", "--emulate", _manifest(tmp_path), *arguments, cwd=tmp_path)
    assert done.returncode == 64
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout


def test_the_capacity_of_an_illustrative_device_has_to_be_asked_for(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path, device="published-70b-table", devices=4)
    asked: list[str | Path] = [
        "--trace",
        "sample",
        "--emulate",
        manifest,
        "--window",
        "..5s",
        "--probes",
        "1",
    ]
    refused = _run(*asked, "--out", "one", cwd=tmp_path)
    assert refused.returncode == 64
    assert "add --illustrative" in refused.stderr
    assert _run(*asked, "--illustrative", "--out", "two", cwd=tmp_path).returncode in {1, 2}
