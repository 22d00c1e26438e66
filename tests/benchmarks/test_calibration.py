"""The benchmark of the chances that `slo` predicts for admitted requests."""

from __future__ import annotations

import json

import pytest
from benchmarks.calibration import main, serve_predicted
from benchmarks.comparison.cells import run_cell
from benchmarks.comparison.design import poisson_cell, read_knees

from benchmarks import calibration


def test_the_counts_are_those_of_slo() -> None:
    cell = poisson_cell("tight-deadlines", 2.0, read_knees(), known_lengths=False, small_kv=True)
    found = serve_predicted(cell, [101, 102])
    runs = [run_cell(cell, "slo", seed) for seed in (101, 102)]
    assert found.admitted == sum(run.admitted for run in runs)
    assert found.in_time == sum(run.kept for run in runs)
    assert 0 < found.predicted <= found.admitted


@pytest.mark.parametrize(("tolerance", "code"), [(-1, 1), (1, 0)], ids=["missed", "held"])
def test_the_command_fails_if_the_aim_is_missed(
    tolerance: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(calibration, "TOLERANCE", tolerance)
    options = ["--quick", "--mixes", "tight-deadlines", "--jobs", "1"]
    assert main(options) == code
    assert "tight-deadlines, all" in capsys.readouterr().out
    assert main([*options, "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["missed"] == ["tight-deadlines"] * code
    assert len(document["cells"]) == 2
