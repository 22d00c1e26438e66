"""An invalid trace gives exit code 64 and one sentence that names the place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from goodput_traces.format.schema import TraceMetadata
from goodput_traces.format.writer import write_trace

if TYPE_CHECKING:
    from pathlib import Path

    from tests.traces.conftest import CommandResult, MakeRows, RunTrace, WriteColumns


NAN = float("nan")
GOOD: dict[str, list[Any]] = {
    "request_id": ["a", "b", "c"],
    "timestamp_start_unix_ns": [1_000_000_000, 2_000_000_000, 3_000_000_000],
    "input_tokens": [10, 20, 30],
    "output_tokens": [1, 2, 3],
}


def one_sentence(outcome: CommandResult, path: Path) -> str:
    assert outcome.code == 64
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith(f"error: {path}: ")
    assert "Traceback" not in outcome.err
    return outcome.err


CHANGED_COLUMNS = [
    pytest.param({"input_tokens": [10, 0, 30]}, "row 2, column input_tokens: 0", id="zero input"),
    pytest.param(
        {"input_tokens": [10, 20, -5]}, "row 3, column input_tokens: -5", id="negative input"
    ),
    pytest.param(
        {"input_tokens": [10, None, 30]}, "row 2, column input_tokens: the value", id="null input"
    ),
    pytest.param(
        {"input_tokens": [10, 10**12, 30]}, "row 2, column input_tokens: 1000000000000", id="huge"
    ),
    pytest.param(
        {"output_tokens": [1, -1, 3]}, "row 2, column output_tokens: -1", id="negative output"
    ),
    pytest.param(
        {"timestamp_start_unix_ns": [1, 3, 2]},
        "row 3, column timestamp_start_unix_ns: this row arrives 1e-09 s",
        id="unsorted",
    ),
    pytest.param(
        {"timestamp_start_unix_ns": [1, 5, 2]}, "`goodput trace import --sort`", id="how to sort"
    ),
    pytest.param(
        {"timestamp_start_unix_ns": [-1, 2, 3]},
        "row 1, column timestamp_start_unix_ns: -1",
        id="negative time",
    ),
    pytest.param(
        {"timestamp_start_unix_ns": [1, None, 3]},
        "row 2, column timestamp_start_unix_ns: the value is missing",
        id="null time",
    ),
    pytest.param({"request_id": ["a", "", "c"]}, "row 2, column request_id: the id", id="empty id"),
    pytest.param(
        {"request_id": ["a", "b" * 600, "c"]}, "row 2, column request_id: the text", id="long id"
    ),
    pytest.param(
        {"ttft_target_ms": [200.0, NAN, 3.0]}, "row 2, column ttft_target_ms: NaN", id="NaN target"
    ),
    pytest.param(
        {"tpot_target_ms": [None, None, -3.0]},
        "row 3, column tpot_target_ms: -3.0 is out of bounds, it must be above 0",
        id="negative target",
    ),
    pytest.param(
        {"e2e_target_ms": [0.0, None, None]},
        "row 1, column e2e_target_ms: 0.0 is out of bounds, it must be above 0",
        id="zero target",
    ),
    pytest.param(
        {"ttft_target_ms": [float("inf"), 1.0, 1.0]}, "inf is out of bounds", id="infinite target"
    ),
    pytest.param({"delay_ms": [NAN, 1.0, 1.0]}, "row 1, column delay_ms: NaN", id="NaN delay"),
    pytest.param(
        {"cancel_after_ms": [-1.0, None, None]},
        "row 1, column cancel_after_ms: -1.0 is out of bounds, it must be at least 0",
        id="negative patience",
    ),
    pytest.param(
        {"slo_class": ["x" * 64, None, None]}, "row 1, column slo_class: the text", id="long class"
    ),
    pytest.param(
        {"total_hashes": [[1], None, None]},
        "row 1, column block_size: the value is missing although",
        id="hashes without their size",
    ),
    pytest.param(
        {"total_hashes": [[1], [2, None], None], "block_size": [16, 16, 16]},
        "row 2, column total_hashes: a hash is null",
        id="null hash",
    ),
    pytest.param(
        {"block_size": [16, 0, 16]}, "row 2, column block_size: 0 is out of bounds", id="no block"
    ),
    pytest.param(
        {"request_canceled": [0, 2, 1]}, "row 2, column request_canceled: 2", id="third truth"
    ),
]


@pytest.mark.parametrize(("change", "sentence"), CHANGED_COLUMNS)
def test_a_row_that_breaks_a_rule_is_named(
    change: dict[str, list[Any]], sentence: str, write_columns: WriteColumns, run_trace: RunTrace
) -> None:
    path = write_columns(GOOD | change)
    out = path.with_name("out.jsonl")
    outcome = run_trace("export", path, "--format", "mooncake", "--out", out)
    assert sentence in one_sentence(outcome, path)
    assert not out.exists()


@pytest.mark.parametrize(
    ("removed", "sentence"),
    [
        (["input_tokens"], "columns are missing: input_tokens;"),
        (["request_id"], "column request_id is missing"),
        (["timestamp_start_unix_ns"], "columns are missing: timestamp_start_unix_ns;"),
        (["input_tokens", "output_tokens"], "columns are missing: input_tokens, output_tokens;"),
    ],
    ids=["input_tokens", "request_id", "arrival", "two"],
)
def test_missing_columns_are_named(
    removed: list[str], sentence: str, write_columns: WriteColumns, run_trace: RunTrace
) -> None:
    path = write_columns({name: v for name, v in GOOD.items() if name not in removed})
    assert sentence in one_sentence(run_trace("describe", path), path)


@pytest.mark.parametrize(
    ("name", "column", "sentence"),
    [
        ("input_tokens", pa.array(["1", "2", "3"]), "input_tokens has type string"),
        ("input_tokens", pa.array([1.5, 2.0, 3.0]), "input_tokens has type double"),
        ("slo_class", pa.array([1, 2, 3]), "slo_class has type int64"),
        ("total_hashes", pa.array([1, 2, 3]), "total_hashes has type int64"),
        (
            "input_tokens",
            pa.array([1, 2, 2**63], pa.uint64()),
            "input_tokens: the value does not fit int64",
        ),
    ],
    ids=["text for a number", "float for a number", "number for a text", "no list", "too wide"],
)
def test_columns_of_the_wrong_type_are_named(
    name: str, column: pa.Array, sentence: str, write_columns: WriteColumns, run_trace: RunTrace
) -> None:
    path = write_columns(GOOD | {name: column.to_pylist()}, types={name: column.type})
    assert f"column {sentence}" in one_sentence(run_trace("describe", path), path)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("clock", "sundial", "metadata goodput.trace.clock is 'sundial', not one of absolute"),
        ("version", "99", "goodput.trace.version is '99'"),
        ("hash_semantics", "x", "goodput.trace.hash_semantics is 'x'"),
        ("timestamp_resolution_ns", "-1", "goodput.trace.timestamp_resolution_ns is '-1'"),
    ],
)
def test_unknown_metadata_is_named(
    key: str, value: str, sentence: str, write_columns: WriteColumns, run_trace: RunTrace
) -> None:
    path = write_columns(GOOD, metadata={f"goodput.trace.{key}": value})
    assert sentence in one_sentence(run_trace("describe", path), path)


@pytest.mark.parametrize(
    ("sessions", "times", "sentence"),
    [
        (["s1", "s1", "s1"], [1, 3, 2], "row 3, column timestamp_start_unix_ns: this row belongs"),
        (["s1", "s2", "s1"], [1, 1, 2], "row 3, column timestamp_start_unix_ns: this row belongs"),
        (["s1", None, "s2"], [1, 1, 1], "row 2, column provided_session_id: the value is missing"),
    ],
    ids=["disorder within a session", "a session comes back", "no session"],
)
def test_a_session_relative_trace_needs_complete_sessions_in_order(
    sessions: list[str | None],
    times: list[int],
    sentence: str,
    write_columns: WriteColumns,
    run_trace: RunTrace,
) -> None:
    path = write_columns(
        GOOD | {"provided_session_id": sessions, "timestamp_start_unix_ns": times},
        metadata={"goodput.trace.clock": "session-relative"},
    )
    assert sentence in one_sentence(run_trace("describe", path), path)


def test_unsorted_row_groups_are_found(write_columns: WriteColumns, run_trace: RunTrace) -> None:
    path = write_columns(GOOD | {"timestamp_start_unix_ns": [1, 10**12, 10**9]}, row_group_size=1)
    sentence = one_sentence(run_trace("describe", path), path)
    assert "row 2, column timestamp_start_unix_ns: this row arrives" in sentence


def test_a_trace_without_rows_is_rejected(write_columns: WriteColumns, run_trace: RunTrace) -> None:
    path = write_columns({name: [] for name in GOOD})
    assert "the trace has no rows" in one_sentence(run_trace("describe", path), path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "the file is empty"),
        (b"TIMESTAMP,ContextTokens\n", "this is not a Parquet file"),
        (b"PAR1", "truncated or damaged"),
    ],
    ids=["empty", "CSV", "magic only"],
)
def test_a_file_of_another_format_is_rejected(
    content: bytes, sentence: str, tmp_path: Path, run_trace: RunTrace
) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(content)
    assert sentence in one_sentence(run_trace("describe", path), path)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
def test_a_truncated_trace_is_rejected(
    share: float, tmp_path: Path, make_rows: MakeRows, run_trace: RunTrace
) -> None:
    path = tmp_path / "t.parquet"
    write_trace(path, make_rows(500), TraceMetadata())
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert "truncated or damaged" in one_sentence(run_trace("describe", path), path)


def test_a_flipped_byte_in_the_data_is_found(
    tmp_path: Path, make_rows: MakeRows, run_trace: RunTrace
) -> None:
    path = tmp_path / "t.parquet"
    write_trace(path, make_rows(500), TraceMetadata())
    content = bytearray(path.read_bytes())
    content[60] ^= 0xFF  # within the first data page, whose checksum is written
    path.write_bytes(content)
    assert "truncated or damaged" in one_sentence(run_trace("describe", path), path)


def test_a_missing_file_and_a_folder_are_rejected(tmp_path: Path, run_trace: RunTrace) -> None:
    missing = tmp_path / "none.parquet"
    assert "no such file" in one_sentence(run_trace("describe", missing), missing)
    assert "cannot be read" in one_sentence(run_trace("describe", tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("times", "rows_per_group", "sentence"),
    [
        ([1, None, 3], 3, "row 2, column timestamp_start_unix_ms: the value is missing"),
        ([None, None, None], 3, "column timestamp_start_unix_ms is empty; every row needs"),
        ([1, 3, 2], 3, "row 3, column timestamp_start_unix_ms: this row arrives 0.001 s before"),
        ([1, 5, 2], 1, "row 2, column timestamp_start_unix_ms: this row arrives after the file's"),
    ],
    ids=["null", "all null", "unsorted", "later than the last"],
)
def test_arrivals_in_milliseconds_are_named_by_their_own_column(
    times: list[int | None],
    rows_per_group: int,
    sentence: str,
    write_columns: WriteColumns,
    run_trace: RunTrace,
) -> None:
    columns = {name: v for name, v in GOOD.items() if name != "timestamp_start_unix_ns"}
    path = write_columns(
        columns | {"timestamp_start_unix_ms": times},
        types={"timestamp_start_unix_ms": pa.int64()},
        row_group_size=rows_per_group,
    )
    assert sentence in one_sentence(run_trace("describe", path), path)
