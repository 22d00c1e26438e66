"""A cell written as files is served by `replay --emulate` as in the comparison of policies."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from benchmarks.comparison.cells import Cell, Fleet, run_cell
from benchmarks.comparison.loads import Load
from benchmarks.export_cell import export, main

from goodput_replay.cli import main as replay_main

if TYPE_CHECKING:
    from pathlib import Path

CHAT = Cell(
    name="chat", load=Load(mix="chat", rate_per_s=45, horizon_s=3), fleet=Fleet(kv_blocks=2000)
)
WEIGHTED = replace(
    CHAT, name="weighted", load=replace(CHAT.load, mix="three-classes", rate_per_s=120)
)


@pytest.mark.parametrize("cell", [CHAT, WEIGHTED], ids=["chat", "weights"])
def test_replay_keeps_the_same_requests_as_the_comparison(
    cell: Cell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(cell, "slo", 3, tmp_path)
    files = [f"{tmp_path}/{name}" for name in ("trace.parquet", "service.yaml", "device.yaml")]
    options = ["--out", f"{tmp_path}/run", "--json", "--no-report"]
    replay_main(
        ["--trace", files[0], "--emulate", files[1], "--device", files[2], "--seed", "3", *options]
    )
    summary = json.loads(capsys.readouterr().out)
    run = run_cell(cell, "slo", 3)
    kept = {one["name"]: one["good"] for one in summary["classes"]}
    assert kept == {name: good for name, (_, good) in run.classes.items()}
    assert 0 < run.kept < run.offered


def test_an_unknown_cell_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["textbook", "--out", str(tmp_path)])
    assert "'textbook' is no cell" in capsys.readouterr().err
