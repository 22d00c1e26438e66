"""Other load generators are measured as this replayer is, and results survive interruptions."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
from benchmarks.peers.environments import BuildError, Environment, build
from benchmarks.peers.measuring import (
    Arrivals,
    Cell,
    Measurement,
    ProcessTree,
    Timing,
    compare,
    make_rows,
    measure,
    read_arrivals,
)
from benchmarks.peers.summary import highest_sustained, ratio_of, sections
from benchmarks.peers.tools import TOOLS, Invocation, Tool
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import loadgen
from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from pathlib import Path

ROWS = make_rows(100, 2, seed=1)
MS = st.integers(min_value=0, max_value=1000)


def on_time(offset_ns: int = 0) -> dict[int, int]:
    return {row.output_tokens: row.timestamp_start_unix_ns + offset_ns for row in ROWS}


def arrivals_of(at_ns: dict[int, int]) -> Arrivals:
    return Arrivals(at_ns=at_ns, complete=set(at_ns), repeated=0)


def measured(
    tool: str = "replay",
    rate: int = 1000,
    repeat: int = 0,
    *,
    complete: int = 100,
    achieved: float | None = None,
    error: float = 1.0,
    cpu: float = 0.5,
) -> Measurement:
    """A run of 100 requests, all of which arrived."""
    timing = Timing(
        first_ns=0,
        last_ns=NS_PER_S,
        achieved_per_s=rate if achieved is None else achieved,
        error_p50_ms=error / 2,
        error_p99_ms=error,
        error_max_ms=error * 2,
    )
    return Measurement(
        cell=Cell(tool=tool, rate_per_s=rate, repeat=repeat, seconds=10),
        requests=100,
        arrived=100,
        complete=complete,
        repeated=0,
        timing=timing,
        cpu_s_per_1000=cpu,
        cpu_s=1.0,
        peak_mib=50.0,
        wall_s=11.0,
        lag_p99_ms=error if tool.startswith("replay") else None,
        failure=None,
        load=0.1,
    )


def test_a_trace_has_the_exact_rate_and_a_number_per_row() -> None:
    rows = make_rows(200, 5, seed=3)
    assert len({row.output_tokens for row in rows}) == len(rows) == 1000
    assert rows[0].timestamp_start_unix_ns == 0
    assert rows == sorted(rows, key=lambda row: row.timestamp_start_unix_ns)
    assert all(row.timestamp_start_unix_ns % NS_PER_MS == 0 for row in rows)
    assert rows != make_rows(200, 5, seed=4)


@given(offset_ms=st.integers(min_value=-(10**6), max_value=10**6))
def test_a_constant_delay_is_no_error(offset_ms: int) -> None:
    timing = compare(100, ROWS, arrivals_of(on_time(offset_ms * NS_PER_MS)))
    assert timing is not None
    assert timing.error_max_ms == 0
    assert timing.achieved_per_s == 100


@given(delays=st.lists(MS, min_size=len(ROWS), max_size=len(ROWS)))
def test_the_error_of_each_row_is_its_delay_beyond_the_smallest(delays: list[int]) -> None:
    late = {
        row.output_tokens: row.timestamp_start_unix_ns + delay * NS_PER_MS
        for row, delay in zip(ROWS, delays, strict=True)
    }
    timing = compare(100, ROWS, arrivals_of(late))
    assert timing is not None
    assert timing.error_max_ms == max(delays) - min(delays)


def test_requests_that_overtake_each_other_are_errors() -> None:
    at_ns = on_time()
    first, last = ROWS[0].output_tokens, ROWS[-1].output_tokens
    at_ns[first], at_ns[last] = at_ns[last], at_ns[first]
    timing = compare(100, ROWS, arrivals_of(at_ns))
    assert timing is not None
    span_ms = (ROWS[-1].timestamp_start_unix_ns - ROWS[0].timestamp_start_unix_ns) / NS_PER_MS
    assert timing.error_max_ms == 2 * span_ms


def test_a_tool_at_half_the_rate_reaches_half_of_it() -> None:
    slow = {row.output_tokens: 2 * row.timestamp_start_unix_ns for row in ROWS}
    timing = compare(100, ROWS, arrivals_of(slow))
    assert timing is not None
    assert timing.achieved_per_s == 50


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_arrivals_have_no_timing(count: int) -> None:
    assert compare(100, ROWS, arrivals_of(dict(list(on_time().items())[:count]))) is None


def test_probes_are_left_out_and_repeated_rows_are_counted_once(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    row = ROWS[3].output_tokens
    log.write_text(f"a,100,{row},0\nb,200,{row},1\nprobe,50,1,1\n,60,,1\n")
    assert read_arrivals(log, ROWS) == Arrivals(at_ns={row: 100}, complete={row}, repeated=1)


def test_cpu_time_is_that_of_the_process_and_its_children() -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    script = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {busy!r}])"
    began_ns = time.time_ns()
    with subprocess.Popen([sys.executable, "-c", f"{script}; time.sleep(0.5)"]) as child:
        tree = ProcessTree(child.pid)
        tree.start()
        child.wait()
        tree.stop()
    assert 0.3 < tree.cpu_s < 2
    assert tree.cpu_s_between(began_ns, time.time_ns()) == tree.cpu_s
    assert tree.cpu_s_between(0, began_ns) == 0
    assert tree.peak_bytes > 2**20


@pytest.mark.parametrize("name", ["bare", "replay", "replay-ui"])
def test_a_run_against_the_server_loses_nothing(name: str, tmp_path: Path) -> None:
    cell = Cell(tool=name, rate_per_s=50, repeat=0, seconds=1)
    result = measure(TOOLS[name], cell, tmp_path, None)
    assert (result.requests, result.arrived, result.lost, result.repeated) == (50, 50, 0, 0)
    assert result.failure is None
    assert result.cpu_s_per_1000 is not None
    assert (result.lag_p99_ms is not None) is (name != "bare")


def test_a_tool_that_fails_is_a_result_with_its_last_line(tmp_path: Path) -> None:
    script = "import sys; print('loading', flush=True); sys.exit('no such model')"
    tool = Tool(
        name="broken",
        title="broken",
        invoke=lambda _tool, _run: Invocation(command=[sys.executable, "-c", script]),
    )
    cell = Cell(tool="broken", rate_per_s=10, repeat=0, seconds=1)
    result = measure(tool, cell, tmp_path, None)
    assert result.failure == "exit code 1: no such model"
    assert (result.lost, result.timing, result.sustained) == (10, None, False)


def test_a_ratio_has_the_interval_of_t_on_logarithms() -> None:
    ratio = ratio_of([(2.0, 1.0), (4.0, 2.0), (2.0, 1.0)])
    assert ratio is not None
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((2, 2, 2))
    ratio = ratio_of([(math.e, 1.0), (1.0, math.e)])
    assert ratio is not None
    # The mean of the logarithms is 0, their standard error is 1.
    assert ratio.mean == pytest.approx(1)
    assert ratio.high == pytest.approx(math.exp(12.7062), rel=1e-4)


def test_a_single_pair_has_no_interval_and_zeros_have_no_ratio() -> None:
    assert str(ratio_of([(3.0, 2.0), (0.0, 1.0)])) == "1.50"
    assert ratio_of([(0.0, 1.0)]) is None


def test_a_rate_above_one_that_was_not_sustained_does_not_count() -> None:
    runs = [
        measured(rate=500),
        measured(rate=1000, achieved=900),
        measured(rate=1500),
    ]
    assert highest_sustained(runs) == (500, 1000)
    assert highest_sustained([measured(rate=500, complete=99)]) == (None, 500)
    assert highest_sustained([measured(rate=500)]) == (500, None)


def test_pairs_are_runs_of_the_same_trace() -> None:
    runs = [
        measured("replay", repeat=0, cpu=1.0),
        measured("replay", repeat=1, cpu=10.0),
        measured("bare", repeat=0, cpu=2.0),
        measured("bare", repeat=1, cpu=20.0),
        measured("bare", repeat=2, cpu=5.0),
    ]
    _, ratios, _, aims = sections(runs)
    assert ratios.rows[0][3] == "2.00 (2.00–2.00)"
    row = next(row for row in aims.rows if row[0].startswith("CPU of sending"))
    assert row[1:] == ("0.50 (0.50–0.50)", "≤ 1", "yes")


def run_with(path: Path, results: list[Measurement], monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """Run `loadgen` with given results in place of measurements; return the cells in order."""
    by_rate = {(one.cell.tool, one.cell.rate_per_s): one for one in results}
    cells = []

    def fake(_tool: Tool, cell: Cell, _folder: Path, _model: object) -> Measurement:
        cells.append(cell)
        one = by_rate.get((cell.tool, cell.rate_per_s), measured(cell.tool, cell.rate_per_s))
        return replace(one, cell=cell)

    monkeypatch.setattr(loadgen, "measure", fake)
    arguments = ["--tools", "bare,replay", "--rates", "200,1000", "--climb", "1500,2000,2500"]
    assert loadgen.main([*arguments, "--repeats", "2", "--results", str(path), "--json"]) == 0
    return cells


def test_only_cells_without_a_result_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    first = run_with(path, [measured("bare", 2000, achieved=1700)], monkeypatch)
    # Two tools at two rates twice; one climbs to its third rate, the other fails at its second.
    assert len(first) == len(set(first)) == 8 + 3 + 2
    assert Cell(tool="bare", rate_per_s=2500, repeat=0, seconds=10) not in first
    # The last line was cut off. A result of a longer trace is not one of these cells.
    longer = replace(measured(), cell=replace(first[0], seconds=60))
    path.write_bytes(msgspec.json.encode(longer) + b"\n" + path.read_bytes())
    path.write_bytes(path.read_bytes()[:-5])
    capsys.readouterr()
    assert run_with(path, [], monkeypatch) == first[-1:]
    assert len(json.loads(capsys.readouterr().out)["runs"]) == len(first)


def test_a_tool_far_below_a_rate_is_not_run_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [measured("bare", 1000, achieved=400)]
    cells = run_with(tmp_path / "results.jsonl", slow, monkeypatch)
    assert [(one.rate_per_s, one.repeat) for one in cells if one.tool == "bare"].count((1000, 0))
    assert (1000, 1) not in [(one.rate_per_s, one.repeat) for one in cells if one.tool == "bare"]
    assert max(one.rate_per_s for one in cells if one.tool == "bare") == 1000


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0}\n')
    with pytest.raises(SystemExit, match="name another file, or add --fresh"):
        loadgen.main(["--tools", "bare", "--results", str(path)])
    assert path.read_text() == '{"timestamp": 0}\n'


@pytest.fixture
def broken_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder whose uv fails."""
    uv = tmp_path / "loadgen" / "uv" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text("#!/bin/sh\necho 'no such package' >&2\nexit 1\n")
    uv.chmod(0o755)
    monkeypatch.setenv("GOODPUT_CACHE", str(tmp_path))
    return tmp_path / "loadgen"


def test_an_environment_that_cannot_be_built_names_the_reason(broken_uv: Path) -> None:
    environment = Environment(name="tool-1", packages=("tool==1",))
    with pytest.raises(BuildError, match="no such package"):
        build(environment)
    # A build that failed is not taken for a complete one.
    assert environment.folder == broken_uv / "tool-1"
    environment.folder.mkdir()
    with pytest.raises(BuildError):
        build(environment)


@pytest.mark.usefixtures("broken_uv")
def test_a_missing_python_is_named_and_the_other_tools_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = Environment(name="tool-1", packages=("tool==1",), python="3.99")
    monkeypatch.setitem(TOOLS, "aiperf", replace(TOOLS["aiperf"], environment=environment))
    monkeypatch.setattr(loadgen, "measure", lambda _tool, cell, *_: measured(cell.tool))
    arguments = ["--tools", "bare,aiperf", "--results", str(tmp_path / "results.jsonl")]
    assert loadgen.main([*arguments, "--repeats", "1"]) == 0
    printed = capsys.readouterr()
    assert "bare aiohttp loop" in printed.out
    assert "AIPerf 0.13.0 is not available: python3.99 is not installed" in printed.out
    assert "install python3.99" in printed.out
