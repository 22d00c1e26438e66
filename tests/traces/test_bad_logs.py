"""An invalid log, map or condition gives exit code 64 and one sentence; no trace is written."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from goodput_core.errors import InputError
from goodput_traces.errors import TraceError
from goodput_traces.importers import source as source_module
from goodput_traces.importers.column_map import read_map_file

if TYPE_CHECKING:
    from pathlib import Path

    from tests.traces.conftest import RunTrace

HEADER = "time,prompt_tokens,completion_tokens,tier\n"
T = 1_700_158_546
MAP = "arrival=time,slo_class=tier"


def rows(*times: object) -> str:
    return HEADER + "".join(f"{time},5,6,gold\n" for time in times)


def jsonl(*records: dict[str, object]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def record(**changes: object) -> dict[str, object]:
    return {"time": T, "prompt_tokens": 5, "completion_tokens": 6, "tier": "gold"} | changes


@pytest.mark.parametrize(
    ("content", "columns", "sentence"),
    [
        pytest.param(
            rows(T), "arrival=tme",
            "the map names the column tme for arrival, but the file only has the columns time, "
            "prompt_tokens, completion_tokens, tier; did you mean time?",
            id="missing column",
        ),
        pytest.param(
            jsonl(record()), "arrival=time,input_tokens=usage.prompt",
            "the map names the column usage.prompt for input_tokens",
            id="missing nested column",
        ),
        pytest.param(
            jsonl(record(), record()), f"{MAP},model_name=modle",
            "no record has a value in the column modle; correct or remove it in the map",
            id="a column that no record has",
        ),
        pytest.param(
            rows(T).replace("tier", "class"), "arrival=time,slo_class=tier",
            "the map names the column tier for slo_class",
            id="missing optional column of a header",
        ),
        pytest.param(
            "t,input_tokens,output_tokens\n0,5,6\n-5,5,6\n", "arrival=t:s",
            "line 3, column t: '-5' is before the start of the trace; correct it",
            id="a negative time since the start",
        ),
        pytest.param(
            rows(T).replace("prompt_tokens", "p"), MAP,
            "no column is known to give input_tokens; name it with --map input_tokens=COLUMN "
            "(columns: time, p, completion_tokens, tier)",
            id="no input tokens",
        ),
        pytest.param(
            rows(T, T + 9, T + 2), MAP,
            "line 4, column time: this row arrives 7 s before the row above it; sort the file, or "
            "add --sort",
            id="times go backwards",
        ),
        pytest.param(
            rows("2023-11-16T18:15:46Z", "2023-11-16T18:15:47"), MAP,
            "line 3, column time: '2023-11-16T18:15:47' belongs to times without a zone, but the "
            "rows before it have times with a zone; write all times in one form",
            id="mixed zones",
        ),
        pytest.param(
            rows("2023-11-16T18:15:46", "2023-11-16T18:15:47+01:00"), MAP,
            "line 3, column time: '2023-11-16T18:15:47+01:00' belongs to times with a zone",
            id="mixed zones the other way",
        ),
        pytest.param(
            rows(T, T + 1, (T + 2) * 1000), MAP,
            "line 4, column time: '1700158548000' belongs to milliseconds since 1970, but the rows "
            "before it have seconds since 1970",
            id="the unit changes",
        ),
        pytest.param(
            rows((T + 2) * 1000, T + 3), MAP,
            "line 3, column time: '1700158549' belongs to seconds since 1970",
            id="the unit changes back",
        ),
        pytest.param(
            rows(T * 1000), "arrival=time:s", "line 2, column time: '1700158546000' is after 2262",
            id="wrong unit",
        ),
        pytest.param(
            rows(T, "2023-11-16T18:15:47Z"), MAP, "belongs to times with a zone, but the rows",
            id="number and text",
        ),
        pytest.param(
            rows("0.5", T), "arrival=time:s",
            "line 3, column time: '1700158546' belongs to seconds since 1970, but the rows before "
            "it have seconds since the start of the trace",
            id="start of the trace, then 1970",
        ),
        pytest.param(
            rows("12.5"), MAP,
            "line 2, column time: 12.5 is too small for a time since 1970; if times count from "
            "the start of the trace, name their unit, for example --map arrival=time:s",
            id="no unit",
        ),
        pytest.param(rows(""), MAP, "line 2, column time: the value is missing", id="no time"),
        pytest.param(rows("yesterday"), MAP, "'yesterday' is not a time; write", id="no such time"),
        pytest.param(rows("2023-02-30T00:00:00Z"), MAP, "is not a time (day is", id="no such day"),
        pytest.param(rows("16/Abc/2023:18:15:46 +0000"), MAP, "is not a time", id="no such month"),
        pytest.param(rows("nan"), MAP, "'nan' is not a time", id="NaN"),
        pytest.param(rows("1e400"), MAP, "'1e400' is not a time", id="huge exponent"),
        pytest.param(rows("1e99"), MAP, "'1e99' is after 2262", id="far future"),
        pytest.param(rows("-1700158546"), MAP, "'-1700158546' is before 1970", id="negative time"),
        pytest.param(jsonl(record(time=True)), MAP, "'True' is not a time", id="boolean time"),
        pytest.param(jsonl(record(time=[1])), MAP, "'[1]' is not a time", id="list as time"),
        pytest.param(
            HEADER + f"{T},-5,6,gold\n", MAP,
            "line 2, column prompt_tokens: -5 is out of bounds, it must be at least 1",
            id="negative tokens",
        ),
        pytest.param(
            HEADER + f"{T},5,,gold\n", MAP,
            "line 2, column completion_tokens: the value is missing; every request needs one, and "
            "records that are not requests to the model, such as health checks, are skipped with "
            "--only COLUMN=VALUE",
            id="no output tokens",
        ),
        pytest.param(
            jsonl(record(), record(prompt_tokens="")), MAP,
            "line 2, column prompt_tokens: the value is missing", id="empty text",
        ),
        pytest.param(
            jsonl(record(), record(completion_tokens=1.5)), MAP,
            "line 2, column completion_tokens: 1.5 is not a whole number", id="half a token",
        ),
        pytest.param(
            jsonl(record(tier={"a": 1})), MAP, "line 1, column tier: expected text",
            id="object as class",
        ),
        pytest.param(
            rows(T), "finish=time", "add --map duration_e2e_ms=COLUMN", id="no duration",
        ),
        pytest.param(
            rows(T), "finish=time,arrival=time,duration_e2e_ms=tier",
            "names both arrival and finish", id="arrival and finish",
        ),
        pytest.param(
            HEADER + f"{T},5,6,\n", "finish=time,duration_e2e_ms=tier",
            "line 2, column tier: the value is missing; without its duration, the arrival is",
            id="empty duration",
        ),
        pytest.param(
            HEADER + "5,5,6,10\n", "finish=time:s,duration_e2e_ms=tier:s",
            "line 2, column tier: the duration is longer than the time of the end",
            id="duration before the start",
        ),
        pytest.param(
            HEADER + f"{T},5,6,-1\n", f"{MAP},duration_e2e_ms=tier:s",
            "line 2, column tier: -1000 is out of bounds", id="negative duration",
        ),
        pytest.param(
            HEADER + f"{T},5,6,[1 2]\n", f"{MAP},total_hashes=tier",
            "line 2, column tier: the row has hashes without their size", id="hashes without size",
        ),
    ],
)  # fmt: skip
def test_an_invalid_log_is_rejected(
    content: str, columns: str, sentence: str, tmp_path: Path, run_trace: RunTrace
) -> None:
    path = tmp_path / "log"
    path.write_text(content)
    outcome = run_trace("import", path, "--map", columns, "--out", tmp_path / "out.parquet")
    assert outcome.code == 64
    assert sentence in outcome.err
    last = outcome.err.splitlines()[-1]  # a preview can precede the error
    assert last.startswith(f"error: {path}: ")
    assert outcome.err.count("error: ") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--map", "arrival"], "cannot be read (No such file or directory)"),
        (["--map", "arrival="], "is not a pair of columns"),
        (["--map", "arrival=a,arrival=b"], "maps arrival twice"),
        (["--map", "arival=a"], "'arival' is not a column of a trace"),
        (["--map", "arival=a"], "did you mean arrival?"),
        (["--map", "timestamp_start_unix_ns=a"], "is not a column of a trace"),
        (["--map", "input_tokens=a:s"], "input_tokens has no unit"),
        (["--map", "arrival=" + "x" * 600], "is longer than 512 characters"),
        (["--only", "status"], "'status' is not a condition"),
        (["--only", "tier=silver"], "nothing was imported (2 records that --only excludes"),
        (["--format", "azure", "--map", MAP], "the columns of the format azure are fixed"),
        (["--format", "azure", "--only", "tier=x"], "remove --map and --only"),
    ],
)
def test_invalid_options_are_rejected(
    argv: list[str], sentence: str, tmp_path: Path, run_trace: RunTrace
) -> None:
    path = tmp_path / "log"
    path.write_text(rows(T, T))
    outcome = run_trace("import", path, "--out", tmp_path / "out.parquet", *argv)
    assert outcome.code == 64
    assert outcome.err.count("\n") == 1
    assert sentence in outcome.err
    assert [file.name for file in tmp_path.iterdir()] == ["log"]


def test_a_trace_needs_a_name_unless_it_is_previewed(tmp_path: Path, run_trace: RunTrace) -> None:
    path = tmp_path / "log"
    path.write_text(rows(T))
    outcome = run_trace("import", path)
    assert (outcome.code, "with --out, or add --preview" in outcome.err) == (64, True)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty; it needs a map of columns"),
        ("- a\n", "the map: expected names with values"),
        ("colums: {}\n", "colums: is not one of the keys line, unmatched, columns, only"),
        ("colums: {}\n", "did you mean columns?"),
        ("columns: [a]\n", "columns: expected names with values"),
        ("columns: {arrival: 1.5}\n", "columns.arrival: expected text"),
        ("columns: {arrival: null}\n", "columns.arrival: expected text"),
        ("columns: {arrival: {colum: a}}\n", "columns.arrival.colum: is not one of the keys"),
        ("columns: {arrival: {unit: s}}\n", "columns.arrival.column: expected text"),
        ("columns: {arrival: {column: a, unit: min}}\n", "'min' is not a unit; use one of s, ms"),
        ("columns: {arrival: {column: a, unit: [s]}}\n", "is not a unit"),
        ("columns: {slo_clas: a}\n", "columns.slo_clas: 'slo_clas' is not a column of a trace"),
        ("line: 'no fields'\n", "line: the format has 0 fields"),
        ("line: '{a}'\nunmatched: ignore\n", "unmatched: 'ignore' is neither reject nor skip"),
        ("line: '{a}'\nunmatched: [skip]\n", "is neither reject nor skip"),
        ("only: {status: [1.5]}\n", "only.status: expected text"),
        ("a: 1\na: 2\n", "the key 'a' is already used above"),
        ("a: &a [*a]\n", "a: is not one of the keys"),
        ("{a: 1", "cannot be read as YAML"),
        ("columns: {}\n---\ncolumns: {}\n", "holds 2 documents; keep a map of columns in a file"),
        ("x" * 70_000, "is larger than 64 KiB"),
    ],
)
def test_an_invalid_map_file_is_rejected(
    text: str, sentence: str, tmp_path: Path, run_trace: RunTrace
) -> None:
    path, columns = tmp_path / "log", tmp_path / "map.yaml"
    path.write_text(rows(T))
    columns.write_text(text)
    outcome = run_trace("import", path, "--map", columns, "--preview")
    assert outcome.code == 64
    assert outcome.err.startswith(f"error: {columns}: ")
    assert outcome.err.count("\n") == 1
    assert sentence in outcome.err


@given(data=st.binary(max_size=200))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_map_file_causes_a_traceback(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_bytes(data)
    with suppress(InputError):
        read_map_file(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[1700158546] 5 6\nhello\n", "line 2 does not match the line format: it does not start"),
        ("[1700158546] 5\n", "line 1 does not match the line format: there is no ' ' after the"),
        ("[1700158546] 5 x\n", "line 1, column out: 'x' is not a whole number"),
        ("[1700158546] 5 -\n", "line 1, column out: the value is missing"),
        ("[1700158546] 5 " + "6" * 3_000_000, "line 1 is longer than 2 MiB"),
        ("[1700158546] 5 \xff\n", "line 1 is not UTF-8 text"),
    ],
    ids=["start", "field", "text", "empty", "huge", "latin-1"],
)
def test_an_invalid_line_of_a_text_log_is_rejected(
    content: str,
    sentence: str,
    tmp_path: Path,
    run_trace: RunTrace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_module, "MAX_LINE_BYTES", 2 << 20)
    path, columns = tmp_path / "log", tmp_path / "map.yaml"
    path.write_text(content, encoding="latin-1")
    columns.write_text(
        "line: '[{time}] {in} {out}'\n"
        "columns: {arrival: time, input_tokens: in, output_tokens: out}\n"
    )
    outcome = run_trace("import", path, "--map", columns, "-o", tmp_path / "o")
    assert outcome.code == 64
    assert outcome.err.count("\n") == 1
    assert sentence in outcome.err


def test_a_text_log_in_which_no_line_matches_is_rejected(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    path, columns = tmp_path / "log", tmp_path / "map.yaml"
    path.write_text("hello\nworld\n")
    columns.write_text(
        "line: '[{time}] {in} {out}'\nunmatched: skip\n"
        "columns: {arrival: time, input_tokens: in, output_tokens: out}\n"
    )
    outcome = run_trace("import", path, "--map", columns, "-o", tmp_path / "o")
    assert outcome.code == 64
    assert "nothing was imported (2 lines that do not match the line format" in outcome.err


def test_a_map_error_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_map_file(tmp_path / "missing.yaml")


def test_a_condition_on_a_missing_column_of_a_header_is_rejected(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    path = tmp_path / "log.csv"
    path.write_text(rows(T))
    outcome = run_trace("import", path, "--only", "teir=gold", "-o", tmp_path / "o")
    assert outcome.code == 64
    assert outcome.err.count("\n") == 1
    assert "names the column teir in a condition, but the file only has" in outcome.err
    assert "did you mean tier?" in outcome.err


def test_a_wide_header_is_checked_in_linear_time(tmp_path: Path, run_trace: RunTrace) -> None:
    path = tmp_path / "log.csv"
    others = ",".join(f"c{at}" for at in range(200_000))
    path.write_text(f"time,prompt_tokens,completion_tokens,{others}\n{T},5,6{',' * 200_000}\n")
    start = time.process_time()
    outcome = run_trace("import", path, "-o", tmp_path / "o")
    assert outcome.code == 0
    assert outcome.err.count("c31, …\n") == 1
    assert time.process_time() - start < 10  # comparing every pair of names takes minutes


def test_a_pipe_is_rejected_because_it_can_be_read_only_once(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    outcome = run_trace("import", pipe, "-o", tmp_path / "o")
    assert outcome.code == 64
    assert "this is a pipe or a device" in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_pipe_is_not_replaced_by_a_trace(tmp_path: Path, run_trace: RunTrace) -> None:
    log, pipe = tmp_path / "log.csv", tmp_path / "pipe"
    log.write_text(rows(T))
    os.mkfifo(pipe)
    outcome = run_trace("import", log, "-o", pipe, "--force")
    assert outcome.code == 64
    assert "pipe: this is a pipe or a device; name a file to write" in outcome.err
    assert pipe.is_fifo()


@pytest.mark.parametrize("command", [["import"], ["export", "--format", "baseten"]])
def test_the_source_is_not_replaced_by_the_output(
    command: list[str], tmp_path: Path, run_trace: RunTrace
) -> None:
    path, trace = tmp_path / "log.csv", tmp_path / "trace.parquet"
    path.write_text(rows(T))
    assert run_trace("import", path, "-o", trace).code == 0
    for source in (path, trace) if command == ["import"] else (trace,):
        before = source.read_bytes()
        outcome = run_trace(*command, source, "-o", source, "--force")
        assert outcome.code == 64
        assert "this is also the file to read; name another file" in outcome.err
        assert source.read_bytes() == before
