"""The comparison of a synthetic trace with its source, and the command that prints it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.builders.imitations import imitate, make_rows, session_relative, write

from goodput_core.units import NS_PER_S
from goodput_traces.format.reader import open_trace
from goodput_traces.format.schema import TraceRow
from goodput_traces.synthesis.likeness import compare_traces

if TYPE_CHECKING:
    from pathlib import Path

    from tests.traces.conftest import RunTrace


def test_the_command_compares_the_result_with_its_source(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    out = tmp_path / "like.parquet"
    outcome = run_trace("synthesize", "--like", "sample", "--out", out, "--seed", "3")
    assert outcome.code == 0
    assert "synthetic rows over 59.8 s" in outcome.out
    lines = {line[:36].strip(): line.split() for line in outcome.out.splitlines()}
    assert lines["requests a second"][-3:-1][0] == "4.67"
    assert "class interactive, share" in lines
    again = run_trace(
        "synthesize", "--like", "sample", "--out", out, "--seed", "3", "--json", "--force"
    )
    values = json.loads(again.out)
    assert values["class.interactive.share"]["source"] == pytest.approx(0.799, abs=0.05)
    assert set(values["arrivals.rate_per_s"]) == {"source", "expected", "result"}
    trace = open_trace(out)
    assert trace.metadata.source.startswith(
        "synthetic, made by: goodput trace synthesize --like sample.parquet --out like.parquet"
    )
    scaled = run_trace("synthesize", "--like", "sample", "--out", out, "--rate", "20", "--force")
    assert "at this rate" in scaled.out
    itself = run_trace("synthesize", "--like", out, "--out", out, "--force")
    assert (itself.code, "this is also the file to read" in itself.err) == (64, True)


def test_differences_from_zero_and_of_missing_classes_are_named(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    # Two gaps by turns with a mean of 1 s, which no model of bursts has, and equal lengths.
    rows = [
        TraceRow(request_id=str(at), timestamp_start_unix_ns=at * NS_PER_S + at % 2 * 40_000_000,
                 input_tokens=9, output_tokens=9, slo_class="late" if at > 2000 else "chat")
        for at in range(2100)
    ]  # fmt: skip
    source, out = write(tmp_path / "source.parquet", rows), tmp_path / "like.parquet"
    outcome = run_trace("synthesize", "--like", source.path, "--out", out)
    name = "index of dispersion, 1 s"
    line = next(line for line in outcome.out.splitlines() if line.startswith(name))
    expected, _, difference = line.removeprefix(name).split()
    assert expected == "0"
    assert float(difference) == pytest.approx(0.4, abs=0.2)
    shown = " ".join(outcome.out.split())
    assert f"{name} ({difference})" in shown.partition("differences above 10% or 0.1: ")[2]
    assert "requests a second (" not in shown
    # The first minutes of the source have no request of the class `late`.
    features = {
        one.name: one
        for one in compare_traces(source, imitate(source, duration_ns=3600 * NS_PER_S),
                                  600 * NS_PER_S)
    }  # fmt: skip
    assert "class.late.share" not in features
    features = {
        one.name: one
        for one in compare_traces(source, imitate(source, duration_ns=600 * NS_PER_S),
                                  2100 * NS_PER_S)
    }  # fmt: skip
    late = features["class.late.share"]
    assert late.result == 0
    assert late.expected == pytest.approx(99 / 2100)


def test_a_short_result_has_the_rate_over_its_whole_duration(tmp_path: Path) -> None:
    source = write(tmp_path / "source.parquet", list(make_rows([0, 7, 14, 21, 28, 35])))
    duration_ns = 100 * NS_PER_S
    result = imitate(source, duration_ns=duration_ns)
    features = {one.name: one for one in compare_traces(source, result, duration_ns)}
    assert features["arrivals.rate_per_s"].result == result.num_rows / 100


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--like", "sample", "--burst-factor", "2"], "--burst-factor has no effect with --like"),
        (["--like", "sample", "--session-share", "0"], "--session-share has no effect"),
        (["--json"], "--json needs --like"),
        (["--like", "missing.parquet"], "no such file"),
        (["--like", "sample", "--rate", "0.001"], "no request was drawn; raise --rate"),
        (["--rate", "0.001", "--duration", "1s"], "no request was drawn; raise --rate"),
    ],
)
def test_wrong_options_are_rejected(
    argv: list[str], sentence: str, tmp_path: Path, run_trace: RunTrace
) -> None:
    outcome = run_trace("synthesize", *argv, "--out", tmp_path / "out.parquet")
    assert outcome.code == 64
    assert sentence in outcome.err
    assert outcome.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_sessions_without_a_common_clock_need_a_rate(tmp_path: Path, run_trace: RunTrace) -> None:
    source = session_relative(tmp_path)
    out = tmp_path / "out.parquet"
    outcome = run_trace("synthesize", "--like", source.path, "--out", out)
    assert outcome.code == 64
    assert "share no clock, so they have no rate; name --rate and --duration" in outcome.err
    named = ("--rate", "2", "--duration", "10m")
    assert run_trace("synthesize", "--like", source.path, "--out", out, *named).code == 0
