"""`replay --emulate` of a manifest with control laws."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.builders.manifests import write_manifest

ROOT = Path(__file__).parents[3]
POOLS = "prefill: {replicas: 1}\ndecode: {replicas: 1}\n"


def _manifest(folder: Path, mode: str) -> Path:
    return write_manifest(
        folder, "chat", replicas=None, minReplicas=1, maxReplicas=4, control={"mode": mode}
    )


def _replay(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "goodput_core", "replay", "--trace", "sample"]
    command += ["--no-report", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("mode", ["Auto", "Recommend"])
def test_decisions_are_recorded_and_a_rerun_gives_identical_ones(tmp_path: Path, mode: str) -> None:
    manifest = _manifest(tmp_path, mode)
    runs = []
    for name in ("one", "two"):
        options: list[str | Path] = ["--rate-scale", "16", "--emulate", manifest, "--out", name]
        assert _replay(*options, cwd=tmp_path).returncode == 0
        runs.append((tmp_path / name / "decisions.jsonl").read_bytes())
        summary = json.loads((tmp_path / name / "summary.json").read_bytes())
        assert not list((tmp_path / name).glob("*.partial"))
    assert runs[0] == runs[1]
    decisions = [json.loads(line) for line in runs[0].splitlines()]
    assert len(decisions) >= 5
    for decision in decisions:
        assert decision["replicas"]["reason"]
        assert decision["observation"]["replicas"]
    wanted = {decision["replicas"]["replicas"] for decision in decisions}
    applied = {decision["apply_replicas"] for decision in decisions}
    assert max(wanted) > 1
    assert applied == (wanted if mode == "Auto" else {1})
    emulation = summary["emulation"]
    assert emulation["replicas"] == 1
    assert emulation["peak_replicas"] == max(applied)
    assert emulation["final_replicas"] == decisions[-1]["apply_replicas"]


def test_mode_manual_records_no_decisions(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path, "Manual")
    assert (
        _replay("--limit", "20", "--emulate", manifest, "--out", "run", cwd=tmp_path).returncode
        == 0
    )
    assert not (tmp_path / "run" / "decisions.jsonl").exists()


def test_control_laws_and_two_pools_are_mutually_exclusive(tmp_path: Path) -> None:
    (tmp_path / "pools.yaml").write_text(POOLS, encoding="utf-8")
    manifest = _manifest(tmp_path, "Auto")
    done = _replay("--emulate", manifest, "--topology", "pools.yaml", cwd=tmp_path)
    assert done.returncode == 64
    assert "set spec.control.mode to Manual for two pools" in done.stderr


@pytest.mark.parametrize(
    ("mode", "count", "field"),
    [
        ("Auto", {"minReplicas": 0}, ""),
        ("Auto", {"replicas": 0}, "spec.replicas"),
        ("Recommend", {"minReplicas": 0}, "spec.minReplicas"),
        ("Manual", {"replicas": 0}, "spec.replicas"),
    ],
    ids=["law may scale up", "law with fixed replicas", "law only recommends", "no law"],
)
def test_zero_replicas_without_a_law_that_scales_up_are_rejected(
    tmp_path: Path, mode: str, count: dict[str, int], field: str
) -> None:
    manifest = _manifest(tmp_path, mode)
    service = yaml.safe_load(manifest.read_text(encoding="utf-8"))
    service["spec"] |= count
    manifest.write_text(yaml.safe_dump(service), encoding="utf-8")
    done = _replay("--limit", "20", "--emulate", manifest, "--out", "run", cwd=tmp_path)
    assert done.returncode == (64 if field else 0)
    assert (f"{field}: with 0 replicas every request is shed" in done.stderr) == bool(field)
    (tmp_path / "pools.yaml").write_text(POOLS, encoding="utf-8")
    if mode == "Manual":  # pools have their own replicas
        options: list[str | Path] = ["--emulate", manifest, "--topology", "pools.yaml"]
        assert _replay(*options, "--limit", "20", "--out", "pools", cwd=tmp_path).returncode == 0
