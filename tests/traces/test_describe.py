"""Descriptions: every number equals a plain recomputation, and tables fit the terminal."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_core.units import NS_PER_S
from goodput_traces.describe import describe
from goodput_traces.describe.counters import DistinctCounter
from goodput_traces.format.reader import open_trace
from goodput_traces.format.schema import Clock, TraceMetadata, TraceRow
from goodput_traces.format.writer import write_trace

if TYPE_CHECKING:
    from pathlib import Path

    from tests.traces.conftest import MakeRows, RunTrace, WriteColumns


@st.composite
def described_rows(draw: st.DrawFn) -> list[TraceRow]:
    gaps = draw(
        st.lists(st.sampled_from([0, 0, 1, 10**8, 10**9, 7 * 10**9, 61 * 10**9]), max_size=25)
    )
    now = draw(st.integers(0, 2 * 10**18))
    rows = []
    for at, gap in enumerate([0, *gaps]):
        now += gap
        rows.append(
            TraceRow(
                request_id=f"r{at}",
                timestamp_start_unix_ns=now,
                input_tokens=draw(st.integers(1, 5000)),
                output_tokens=draw(st.integers(1, 300)),
                total_hashes=tuple(draw(st.lists(st.integers(0, 6), max_size=4))),
                block_size=16,
                provided_session_id=draw(st.none() | st.sampled_from("abc")),
                poor_man_session_id=draw(st.none() | st.integers(0, 2)),
                slo_class=draw(st.none() | st.sampled_from(["batch", "chat"])),
            )
        )
    return rows


def nearest_rank(values: list[int], percent: int) -> int:
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


@given(rows=described_rows())
@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_every_number_equals_a_plain_recomputation(rows: list[TraceRow], tmp_path: Path) -> None:
    write_trace(tmp_path / "t.parquet", rows, TraceMetadata(), overwrite=True)
    found = describe(open_trace(tmp_path / "t.parquet"))
    times = [row.timestamp_start_unix_ns for row in rows]
    since = [time - times[0] for time in times]
    arrivals = found.arrivals
    assert arrivals is not None
    assert found.rows == len(rows)
    assert arrivals.span_ns == since[-1]
    assert arrivals.peak_1s == max(Counter(s // NS_PER_S for s in since).values())
    assert arrivals.peak_60s == max(Counter(s // (60 * NS_PER_S) for s in since).values())
    for width_ns, peak, start_ns in (
        (NS_PER_S, arrivals.peak_1s, arrivals.peak_1s_start_ns),
        (60 * NS_PER_S, arrivals.peak_60s, arrivals.peak_60s_start_ns),
    ):
        assert sum(start_ns <= one < start_ns + width_ns for one in since) == peak
    assert sum(arrivals.histogram) == len(rows)
    instants = Counter(times)
    assert arrivals.distinct_instants == len(instants)
    assert arrivals.largest_tie == max(instants.values())
    assert arrivals.tied_rows == sum(n for n in instants.values() if n > 1)
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert arrivals.longest_gap_ns == max(gaps, default=0)
    if arrivals.longest_gap_ns:
        assert arrivals.longest_gap_start_ns == since[gaps.index(arrivals.longest_gap_ns)]
    if len(gaps) > 1 and any(gaps):
        expected = statistics.pstdev(gaps) / statistics.fmean(gaps)
        assert arrivals.gap_cv == pytest.approx(expected, rel=1e-6, abs=1e-6)
    else:
        assert arrivals.gap_cv is None
    for summary, values in (
        (found.prompt, [row.input_tokens for row in rows]),
        (found.output, [row.output_tokens for row in rows]),
    ):
        assert summary.total == sum(values)
        assert (summary.p50, summary.p90, summary.p99, summary.max) == (
            *(nearest_rank(values, percent) for percent in (50, 90, 99)),
            max(values),
        )
        assert sum(count for _, _, count in summary.histogram) == len(rows)
        for low, high, count in summary.histogram:
            assert count == sum(low <= value <= high for value in values)
    blocks = [block for row in rows for block in row.total_hashes]
    assert (found.prefixes.blocks, found.prefixes.distinct_blocks) == (
        len(blocks),
        len(set(blocks)),
    )
    sessions = [row.session_id for row in rows if row.session_id is not None]
    assert (found.sessions, found.session_rows) == (len(set(sessions)), len(sessions))
    assert dict(found.classes) == Counter(row.slo_class or "" for row in rows)


def test_ties_and_windows_reach_across_batches(tmp_path: Path, write_columns: WriteColumns) -> None:
    times = [5, 5, 5, 5, 6, 10**9 + 4, 10**9 + 5]
    path = write_columns(
        {
            "request_id": [f"r{at}" for at in range(7)],
            "timestamp_start_unix_ns": times,
            "input_tokens": [1] * 7,
            "output_tokens": [1] * 7,
        },
        row_group_size=2,
    )
    arrivals = describe(open_trace(path)).arrivals
    assert arrivals is not None
    assert (arrivals.largest_tie, arrivals.tied_rows, arrivals.distinct_instants) == (4, 4, 4)
    assert (arrivals.peak_1s, arrivals.peak_60s) == (6, 7)


def test_sums_of_tokens_do_not_overflow(write_columns: WriteColumns) -> None:
    path = write_columns(
        {
            "request_id": [f"r{at}" for at in range(500)],
            "timestamp_start_unix_ns": list(range(500)),
            "input_tokens": [10_000_000] * 500,
            "output_tokens": [10_000_000] * 500,
        }
    )
    assert describe(open_trace(path)).prompt.total == 5_000_000_000


def test_a_session_relative_trace_has_no_rates(
    tmp_path: Path, make_rows: MakeRows, run_trace: RunTrace
) -> None:
    rows = [replace(row, provided_session_id="s") for row in make_rows()]
    write_trace(tmp_path / "t.parquet", rows, TraceMetadata(clock=Clock.SESSION_RELATIVE))
    outcome = run_trace("describe", tmp_path / "t.parquet")
    assert outcome.code == 0
    assert "each session has its own clock" in outcome.out
    assert "req/s" not in outcome.out
    assert (
        json.loads(run_trace("describe", tmp_path / "t.parquet", "--json").out)["arrivals"] is None
    )


def test_the_table_shows_sources_rates_classes_and_charts(run_trace: RunTrace) -> None:
    outcome = run_trace("describe", "sample")
    assert (outcome.code, outcome.err) == (0, "")
    for words in (
        "synthetic",
        "4.67 req/s",
        "CV of gaps 1.27",
        "1.67 s without arrivals, 659 ms after the first arrival",
        "interactive 221, batch 58",
        "blocks of 64 tokens seen",
        "arrivals over time",
        "prompt tokens",
        "█",
    ):
        assert words in outcome.out
    assert "\x1b[" not in outcome.out  # no colours in a pipe


@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_fit_the_terminal_and_keep_every_name(
    width: int, run_trace: RunTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = run_trace("describe", "sample").out.splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    for name in ("longest gap", "prefix reuse", "peak minute", "│ prompt │", "│ output │", "p99"):
        assert name in text
    assert "…" not in text


def test_text_of_a_trace_cannot_control_the_terminal(
    tmp_path: Path, make_rows: MakeRows, run_trace: RunTrace
) -> None:
    path = tmp_path / "\x1b[2Jt.parquet"
    rows = [replace(row, slo_class="\x1b]0;title\x07[red]") for row in make_rows(3)]
    write_trace(path, rows, TraceMetadata(source="\u202eevil", licence="[bold]\x9b"))
    outcome = run_trace("describe", path)
    assert outcome.code == 0
    assert outcome.out.replace("\n", "").isprintable()
    for shown in ("\\x1b[2Jt.parquet", "\\x1b]0;title\\x07[red] 3", "\\u202eevil", "[bold]\\x9b"):
        assert shown in outcome.out.replace("\n", "")
    values = run_trace("describe", path, "--json").out
    assert values.replace("\n", "").isprintable()


def test_a_closed_stdout_exits_with_zero(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from goodput_core.dispatch import run_command\n"
        "sys.stdin.readline()\n"  # returns when stdout is closed
        "sys.exit(run_command(['trace', 'describe', 'sample', *sys.argv[1:]]))\n"
    )
    for options in ([], ["--json"]):
        process = subprocess.Popen(
            [sys.executable, "-c", script, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.stderr.close()
        process.stdin.close()


def test_json_holds_the_same_numbers(run_trace: RunTrace) -> None:
    values = json.loads(run_trace("describe", "sample", "--json").out)
    assert values["rows"] == 279
    assert values["classes"] == {"interactive": 221, "batch": 58}
    assert values["metadata"]["clock"] == "trace-relative"
    assert values["prefixes"]["reused"] == pytest.approx(0.49, abs=0.01)
    assert sum(values["arrivals"]["histogram"]) == 279


@pytest.mark.parametrize(("limit", "exact"), [(100_000, True), (2_000, False)])
def test_distinct_values_are_counted_or_estimated(limit: int, exact: bool) -> None:
    rng = np.random.default_rng(0)
    counter = DistinctCounter(limit)
    values = rng.integers(0, 2**62, 20_000)
    for _ in range(3):
        for part in np.array_split(rng.permutation(values), 7):
            counter.add(part)
    distinct = len(np.unique(values))
    assert counter.exact is exact
    assert counter.count == (distinct if exact else pytest.approx(distinct, rel=0.1))
