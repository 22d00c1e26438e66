"""Runs that are read in parts have the comparison and the verdict of runs that are read whole."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.replay.conftest import make_run, write_run

from goodput_replay.compare import pairing
from goodput_replay.compare.comparison import ComparisonResult, compare_runs
from goodput_replay.compare.gate import GateResult, RunPair, judge_runs
from goodput_replay.compare.runs import load_run
from goodput_replay.runs.columns import ColumnParts
from goodput_replay.runs.files import RECORDS_FILE
from goodput_replay.runs.summary import write_summary
from goodput_replay.statistics.rank_search import RankSearch

if TYPE_CHECKING:
    from pathlib import Path

    from tests.replay.conftest import SyntheticRun


@pytest.fixture(scope="module")
def run() -> SyntheticRun:
    """Some hundred requests with every outcome."""
    return make_run(window_s=20, rate_per_s=12, failures=0.1, stall=(8, 2))


def _results(old: Path, new: Path) -> tuple[ComparisonResult, GateResult]:
    compared = compare_runs([load_run(old), load_run(new)], confidence=0.95)
    return compared, judge_runs([RunPair(candidate=new, baseline=old)])


@pytest.mark.slow
# An example takes seconds, so a failing one is not made smaller.
@settings(max_examples=4, phases=(Phase.reuse, Phase.generate))
@given(
    seed=st.integers(0, 2**32),
    part_rows=st.integers(8, 60),
    max_kept=st.integers(30, 90),
    max_waiting=st.integers(20, 60),
)
def test_parts_of_any_size_have_the_result_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    run: SyntheticRun,
    seed: int,
    part_rows: int,
    max_kept: int,
    max_waiting: int,
) -> None:
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("pair")
    later = [
        replace(record, first_token_ns=record.first_token_ns + rng.choice((0, 20, 900)) * 1_000_000)
        if record.first_token_ns is not None
        else record
        for record in run.records
    ]
    rng.shuffle(later)
    for name, records in (("old", run.records), ("new", later)):
        summary = write_run(folder / name, run.info, records)
        path = folder / name / RECORDS_FILE
        pq.write_table(pq.read_table(path), path, row_group_size=part_rows)
        write_summary(folder / name, replace(summary, records_digest=""))
    whole = _results(folder / "old", folder / "new")
    with pytest.MonkeyPatch.context() as patch:
        for function, limits in (
            (ColumnParts.__init__, {"part_rows": part_rows}),
            (RankSearch.__init__, {"max_kept": max_kept, "max_bins": 16}),
            (pairing.match, {"max_waiting": max_waiting}),
        ):
            defaults = function.__kwdefaults__
            assert defaults is not None
            patch.setattr(function, "__kwdefaults__", {**defaults, **limits})
        assert _results(folder / "old", folder / "new") == whole
