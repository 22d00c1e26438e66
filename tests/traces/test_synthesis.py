"""The generator of synthetic traces, and the sample trace."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from goodput_core.units import NS_PER_S
from goodput_traces.describe import describe
from goodput_traces.format.reader import open_trace
from goodput_traces.sample import sample_path
from goodput_traces.synthesis.two_classes import SynthesisOptions, synthesize

if TYPE_CHECKING:
    from pathlib import Path

    from tests.traces.conftest import RunTrace


def test_the_command_in_the_metadata_of_the_sample_reproduces_it(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    sample = open_trace(sample_path())
    _, _, command = sample.metadata.source.partition("made by: ")
    argv = command.split()
    assert argv[:3] == ["goodput", "trace", "synthesize"]
    out = tmp_path / "sample.parquet"
    argv[argv.index("--out") + 1] = str(out)
    assert run_trace(*argv[2:]).code == 0
    made = open_trace(out)
    assert list(made.rows()) == list(sample.rows())
    assert made.metadata == sample.metadata


def test_the_sample_is_small_and_has_bursts_sessions_and_shared_prefixes() -> None:
    found = describe(open_trace(sample_path()))
    assert found.arrivals is not None
    assert found.metadata.source.startswith("synthetic")
    assert 55 * NS_PER_S <= found.arrivals.span_ns <= 60 * NS_PER_S
    assert 4 <= found.rows / 60 <= 6
    assert found.arrivals.gap_cv is not None
    assert found.arrivals.gap_cv > 1.2
    assert found.prompt.max <= 4000
    assert found.output.max <= 250
    assert set(dict(found.classes)) == {"interactive", "batch"}
    assert found.prefixes.reused is not None
    assert found.prefixes.reused > 0.3
    assert sample_path().stat().st_size < 100_000


def test_equal_seeds_give_equal_traces_and_other_seeds_others() -> None:
    options = SynthesisOptions(seed=9)
    assert list(synthesize(options)) == list(synthesize(options))
    assert list(synthesize(options)) != list(synthesize(replace(options, seed=10)))


@pytest.mark.parametrize("factor", [1.0, 4.0, 20.0])
def test_the_mean_rate_does_not_depend_on_bursts(factor: float) -> None:
    options = SynthesisOptions(
        seed=1, duration_ns=3600 * NS_PER_S, rate_per_s=10, burst_factor=factor
    )
    rows = sum(1 for _ in synthesize(options))
    assert rows == pytest.approx(36_000, rel=0.12)


def test_shares_are_met_and_hashes_cover_the_full_blocks() -> None:
    options = SynthesisOptions(seed=3, duration_ns=600 * NS_PER_S, rate_per_s=20)
    rows = list(synthesize(options))
    classes = Counter(row.slo_class for row in rows)
    assert classes["batch"] / len(rows) == pytest.approx(0.2, abs=0.02)
    assert [row.timestamp_start_unix_ns for row in rows] == sorted(
        {row.timestamp_start_unix_ns for row in rows}
    )
    for row in rows:
        assert row.block_size == 64
        assert len(row.total_hashes) == row.input_tokens // 64
        assert len(set(row.total_hashes)) == len(row.total_hashes)


def test_a_next_turn_repeats_the_prompt_before_it() -> None:
    rows = {row.request_id: row for row in synthesize(SynthesisOptions(seed=3))}
    turns = [row for row in rows.values() if row.turn]
    assert len(turns) > 20
    for row in turns:
        assert row.parent_request_id is not None
        before = rows[row.parent_request_id]
        assert row.session_id == before.session_id
        assert row.turn == (before.turn or 0) + 1
        assert row.total_hashes[: len(before.total_hashes)] == before.total_hashes
        assert row.input_tokens > before.input_tokens + before.output_tokens
        assert row.timestamp_start_unix_ns - before.timestamp_start_unix_ns >= 4 * NS_PER_S


def test_bursts_and_sessions_can_be_left_out() -> None:
    options = SynthesisOptions(
        seed=1, duration_ns=900 * NS_PER_S, burst_factor=1, session_share=0, batch_share=0
    )
    rows = list(synthesize(options))
    assert {row.slo_class for row in rows} == {"interactive"}
    assert {row.turn for row in rows} == {0}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--rate", "0"),
        ("--rate", "nan"),
        ("--rate", "fast"),
        ("--duration", "0s"),
        ("--duration", "60"),
        ("--duration", "40d"),
        ("--burst-factor", "0.5"),
        ("--batch-share", "1.5"),
        ("--session-share", "-1"),
        ("--seed", "x"),
    ],
)
def test_options_out_of_bounds_are_rejected(
    option: str, value: str, tmp_path: Path, run_trace: RunTrace
) -> None:
    outcome = run_trace("synthesize", "--out", tmp_path / "t.parquet", f"{option}={value}")
    assert outcome.code == 64
    assert option in outcome.err
    assert outcome.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
