"""`replay capacity` on an emulated service, from the command line."""

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
        slo__classes=[one | {"objective": "90%"} for one in classes],
    )


def _run(*options: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "goodput_core", "replay", "capacity", *map(str, options)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_a_start_above_the_highest_rate_is_refused(tmp_path: Path) -> None:
    done = _run("--trace", "sample", "--start", "8", "--most", "2", cwd=tmp_path)
    assert done.returncode == 64
    assert "--start 8 is above --most 2" in done.stderr


def _search(folder: Path, *options: str | Path) -> tuple[int, dict[str, Any]]:
    done = _run("--trace", "sample", "--emulate", _manifest(folder), "--json", *options, cwd=folder)
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, result


def test_the_search_finds_the_highest_sustained_rate_and_the_next_one(tmp_path: Path) -> None:
    code, result = _search(tmp_path, "--precision", "50", "--start", "4", "--out", "probes")
    assert code == 0
    assert result["shown"] is True
    best, above = result["capacity"], result["does_not_hold"]
    assert best["verdict"] == "PASS"
    assert above["verdict"] in {"FAIL", "INCONCLUSIVE"}
    assert best["rate_scale"] < above["rate_scale"] <= 1.5 * best["rate_scale"]
    assert best["offered_per_s"] < above["offered_per_s"]
    for probe in result["probes"]:
        assert (tmp_path / probe["run"] / "summary.json").is_file()


def test_a_search_with_causal_sessions_is_labelled(tmp_path: Path) -> None:
    options = ["--window", "..20s", "--probes", "1", "--sessions", "causal"]
    _, result = _search(tmp_path, *options, "--out", "probes")
    assert result["sessions"] == "causal"
    assert result["probes"]
    for probe in result["probes"]:
        summary = json.loads((tmp_path / probe["run"] / "summary.json").read_text())
        assert summary["run"]["sessions"]["follow_ups"] > 0
    done = _run(
        "--trace", "sample", "--emulate", _manifest(tmp_path), *options, "--out", "p", cwd=tmp_path
    )
    assert done.stdout.startswith("probes with causal sessions")
    assert "causal sessions)" in done.stdout or "no tried rate" in done.stdout


def test_the_same_command_finds_the_same_rate(tmp_path: Path) -> None:
    results = []
    for name in ("one", "two"):
        _, result = _search(tmp_path, "--window", "..10s", "--probes", "2", "--out", name)
        for probe in (*result["probes"], result["capacity"]):
            del probe["run"]
        results.append(result)
    assert results[0] == results[1]


def test_a_rate_that_only_seems_sustained_is_reported_as_such(tmp_path: Path) -> None:
    code, result = _search(tmp_path, "--window", "..3s", "--probes", "2", "--out", "probes")
    assert code == 2
    assert result["shown"] is False
    assert "seems to be sustained, but is not shown" in result["sentence"]


def test_a_rate_that_cannot_be_sent_ends_the_search_with_a_result(tmp_path: Path) -> None:
    options: list[str | Path] = ["--trace", "sample", "--emulate", _manifest(tmp_path)]
    options += ["--window", "..2s", "--start", "8", "--max-rate", "30", "--json"]
    done = _run(*options, "--out", "probes", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "not tried: at 16 times the trace's rate: --max-rate 30: the busiest" in done.stderr
    result = json.loads(done.stdout)
    assert result["capacity"]["rate_scale"] == 8
    assert result["does_not_hold"] is None
    first = [*options[:-3], "--max-rate", "1", "--out", "none"]
    assert _run(*first, cwd=tmp_path).returncode == 64


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rate-scale", "2"], "--rate-scale is set by the search; remove it"),
        (
            ["--limit", "9"],
            "--limit would keep different requests at different rates; limit the trace by time",
        ),
        (["--gate"], "--gate cannot be combined with a search; remove it"),
        (["--window", "9m..1m"], "--window"),
        (["--precision", "soon"], "'soon' is not a percentage; write 2, for example"),
        (["--precision", "1000"], "'1000' is out of bounds; give 0.1 to 100"),
        (["--out", "chat.yaml"], "--out chat.yaml: exists already; name another folder"),
    ],
    ids=[
        "rate",
        "limit",
        "gate",
        "invalid for replay",
        "not a number",
        "precision out of bounds",
        "existing folder",
    ],
)
def test_an_invalid_option_is_rejected_in_one_sentence(
    tmp_path: Path, options: list[str], sentence: str
) -> None:
    done = _run("--trace", "sample", "--emulate", _manifest(tmp_path), *options, cwd=tmp_path)
    assert done.returncode == 64
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout


@pytest.mark.parametrize("objective", [None, "of a class without requests"])
def test_a_search_without_an_objective_is_rejected_before_the_first_probe(
    tmp_path: Path, objective: str | None
) -> None:
    classes = manifest("chat")["spec"]["slo"]["classes"]
    for one in classes:
        one.pop("objective", None)
    if objective is not None:
        classes = [*classes, {**classes[0], "name": "unused", "objective": "99%"}]
    service = write_manifest(
        tmp_path,
        "chat",
        replicas=1,
        model__source="emulated://llama-3-8b-h100",
        engine__tensorParallel=1,
        slo__classes=classes,
    )
    options = ["--window", "..3s", "--probes", "1", "--out", "probes"]
    done = _run("--trace", "sample", "--emulate", service, *options, cwd=tmp_path)
    assert done.returncode == 64, done.stderr
    assert done.stderr.startswith("error: replay capacity: no class with requests has an objective")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "probes").exists()


def test_an_illustrative_device_requires_an_option(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path, device="published-70b-table", devices=4)
    options: list[str | Path] = [
        "--trace",
        "sample",
        "--emulate",
        manifest,
        "--window",
        "..5s",
        "--probes",
        "1",
    ]
    rejected = _run(*options, "--out", "one", cwd=tmp_path)
    assert rejected.returncode == 64
    assert "add --illustrative" in rejected.stderr
    assert _run(*options, "--illustrative", "--out", "two", cwd=tmp_path).returncode in {1, 2}
