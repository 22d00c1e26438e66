"""The Parquet format: written rows are read back, and files of other tools are understood."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_core.slo.targets import Targets
from goodput_traces.errors import RowError, TraceError
from goodput_traces.format.columns import TRACE_SCHEMA
from goodput_traces.format.reader import open_trace
from goodput_traces.format.schema import Clock, HashSemantics, TraceMetadata, TraceRow
from goodput_traces.format.writer import write_trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.traces.conftest import MakeRows, WriteColumns

_WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=20)
_TARGET_MS = st.floats(min_value=0.001, max_value=1e9)
_T = TypeVar("_T")
_TOKENS = st.integers(1, 10_000_000)


def _optional(strategy: st.SearchStrategy[_T]) -> st.SearchStrategy[_T | None]:
    return st.none() | strategy


@st.composite
def trace_rows(draw: st.DrawFn) -> list[TraceRow]:
    times = sorted(draw(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=8)))
    rows = []
    for at, time in enumerate(times):
        hashes = tuple(draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)))
        rows.append(
            TraceRow(
                request_id=f"{at}-{draw(_WORDS)}",
                timestamp_start_unix_ns=time,
                input_tokens=draw(_TOKENS),
                output_tokens=draw(_TOKENS),
                max_output_tokens=draw(_optional(_TOKENS)),
                prompt=draw(_optional(_WORDS)),
                total_hashes=hashes,
                block_size=draw(st.integers(1, 4096)) if hashes else None,
                provided_session_id=draw(_optional(_WORDS)),
                poor_man_session_id=draw(_optional(st.integers(-(2**63), 2**63 - 1))),
                turn=draw(_optional(st.integers(0, 2**31 - 1))),
                parent_request_id=draw(_optional(_WORDS)),
                delay_ms=draw(_optional(st.floats(0, 1e9))),
                slo_class=draw(_optional(st.sampled_from(["interactive", "batch"]))),
                ttft_target_ms=draw(_optional(_TARGET_MS)),
                tpot_target_ms=draw(_optional(_TARGET_MS)),
                e2e_target_ms=draw(_optional(_TARGET_MS)),
                priority=draw(_optional(st.integers(-(2**31), 2**31 - 1))),
                request_canceled=draw(_optional(st.booleans())),
                cancel_after_ms=draw(_optional(st.floats(0, 1e9))),
                duration_ttft_ms=draw(_optional(st.integers(0, 10**9))),
                duration_e2e_ms=draw(_optional(st.integers(0, 10**9))),
                model_name=draw(_optional(_WORDS)),
                org_id=draw(_optional(_WORDS)),
                request_type=draw(_optional(_WORDS)),
                output_text=draw(_optional(_WORDS)),
            )
        )
    return rows


@given(rows=trace_rows())
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_every_field_of_a_row_survives_the_file(rows: list[TraceRow], tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_trace(path, rows, TraceMetadata(), overwrite=True)
    trace = open_trace(path)
    assert list(trace.rows()) == rows
    assert trace.num_rows == len(rows)
    assert trace.first_ns == rows[0].timestamp_start_unix_ns
    assert trace.last_ns == rows[-1].timestamp_start_unix_ns


def test_a_row_has_exactly_the_columns_of_the_format() -> None:
    names = {field.name for field in fields(TraceRow)}
    assert names == set(TRACE_SCHEMA.names) - {"timestamp_start_unix_ms"}


@pytest.mark.parametrize("clock", list(Clock))
@pytest.mark.parametrize("semantics", list(HashSemantics))
def test_metadata_survives_the_file(
    clock: Clock, semantics: HashSemantics, tmp_path: Path, make_rows: MakeRows
) -> None:
    metadata = TraceMetadata(
        source="a production service, “chat”",
        licence="CC-BY-4.0",
        clock=clock,
        timestamp_resolution_ns=100,
        hash_semantics=semantics,
        floored_output_rows=7,
    )
    rows = [replace(row, provided_session_id="s") for row in make_rows()]
    write_trace(tmp_path / "t.parquet", rows, metadata)
    trace = open_trace(tmp_path / "t.parquet")
    assert trace.metadata == metadata
    assert trace.floored_output_rows == 7


def test_targets_of_a_row_are_nanoseconds(make_rows: MakeRows) -> None:
    row = replace(make_rows(1)[0], ttft_target_ms=500.0, tpot_target_ms=0.25)
    assert row.targets == Targets(ttft_ns=500_000_000, tpot_ns=250_000)
    assert make_rows(1)[0].targets.empty


@pytest.mark.parametrize(
    ("provided", "derived", "expected"),
    [("a", 7, "a"), (None, 7, "7"), (None, None, None)],
    ids=["provided", "derived", "none"],
)
def test_the_provided_session_id_overrides_the_derived_one(
    provided: str | None, derived: int | None, expected: str | None, make_rows: MakeRows
) -> None:
    row = replace(make_rows(1)[0], provided_session_id=provided, poor_man_session_id=derived)
    assert row.session_id == expected


def test_nanoseconds_override_milliseconds(write_columns: WriteColumns) -> None:
    path = write_columns(
        {
            "request_id": ["a"],
            "timestamp_start_unix_ms": [5],
            "timestamp_start_unix_ns": [7_000_001],
            "input_tokens": [1],
            "output_tokens": [1],
        }
    )
    assert [row.timestamp_start_unix_ns for row in open_trace(path).rows()] == [7_000_001]


def test_a_file_with_milliseconds_only_is_read(write_columns: WriteColumns) -> None:
    path = write_columns(
        {
            "request_id": ["a", "b"],
            "timestamp_start_unix_ms": [5, 6],
            "input_tokens": [1, 1],
            "output_tokens": [1, 1],
        }
    )
    trace = open_trace(path)
    assert (trace.first_ns, trace.last_ns) == (5_000_000, 6_000_000)
    assert trace.metadata.timestamp_resolution_ns == 1_000_000
    assert [row.timestamp_start_unix_ns for row in trace.rows()] == [5_000_000, 6_000_000]


def test_other_widths_of_integers_and_texts_are_read(write_columns: WriteColumns) -> None:
    path = write_columns(
        {
            "request_id": ["a", "a2"],
            "timestamp_start_unix_ns": [1, 2],
            "input_tokens": [3, 4],
            "output_tokens": [5, 6],
            "slo_class": ["batch", None],
            "ttft_target_ms": [200, None],
            "total_hashes": [[1, 2], None],
            "block_size": [16, None],
            "priority": [None, None],
        },
        types={
            "request_id": pa.large_string(),
            "timestamp_start_unix_ns": pa.uint64(),
            "input_tokens": pa.int32(),
            "output_tokens": pa.uint16(),
            "slo_class": pa.dictionary(pa.int8(), pa.string()),
            "ttft_target_ms": pa.int32(),
            "total_hashes": pa.large_list(pa.uint32()),
            "block_size": pa.int64(),
            "priority": pa.null(),
        },
    )
    first, second = open_trace(path).rows()
    assert (first.input_tokens, first.output_tokens, first.slo_class) == (3, 5, "batch")
    assert (first.total_hashes, first.block_size, first.ttft_target_ms) == ((1, 2), 16, 200.0)
    assert (second.total_hashes, second.block_size, second.slo_class) == ((), None, None)


def test_zero_outputs_are_read_as_one_and_counted(write_columns: WriteColumns) -> None:
    path = write_columns(
        {
            "request_id": ["a", "b", "c"],
            "timestamp_start_unix_ns": [1, 2, 3],
            "input_tokens": [1, 1, 1],
            "output_tokens": [0, 4, 0],
        },
        metadata={"goodput.trace.floored_output_rows": "5"},
    )
    trace = open_trace(path)
    assert [row.output_tokens for row in trace.rows()] == [1, 4, 1]
    assert trace.floored_output_rows == 7


def test_a_span_skips_row_groups_and_keeps_the_same_rows(
    tmp_path: Path, write_columns: WriteColumns
) -> None:
    count = 1000
    path = write_columns(
        {
            "request_id": [f"r{at}" for at in range(count)],
            "timestamp_start_unix_ns": [at // 2 for at in range(count)],
            "input_tokens": [1] * count,
            "output_tokens": [1] * count,
        },
        row_group_size=10,
    )
    trace = open_trace(path)
    expected = [row for row in trace.rows() if 101 <= row.timestamp_start_unix_ns < 203]
    assert list(trace.rows(start_ns=101, end_ns=203)) == expected
    assert sum(len(times) for _, times in trace.batches(start_ns=101, end_ns=203)) < 250


def test_reading_takes_no_more_memory_for_a_longer_trace(
    tmp_path: Path, make_rows: MakeRows
) -> None:
    hashes = tuple(range(1000, 1030))

    def peak_bytes(count: int) -> int:
        path = tmp_path / f"{count}.parquet"
        rows = (
            TraceRow(
                request_id=f"r{at}",
                timestamp_start_unix_ns=at,
                input_tokens=480,
                output_tokens=1,
                total_hashes=hashes,
                block_size=16,
            )
            for at in range(count)
        )
        write_trace(path, rows, TraceMetadata())
        trace = open_trace(path)
        gc.collect()
        arrow_before, most = pa.total_allocated_bytes(), 0
        tracemalloc.start()
        try:
            for at, _ in enumerate(trace.rows()):
                if at % 500 == 0:
                    most = max(most, pa.total_allocated_bytes() - arrow_before)
            return most + tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    short, long = peak_bytes(10_000), peak_bytes(30_000)
    assert long < 1.3 * short


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, make_rows: MakeRows) -> None:
    def rows() -> Iterator[TraceRow]:
        yield from make_rows()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(tmp_path / "t.parquet", rows(), TraceMetadata())
    assert list(tmp_path.iterdir()) == []


def test_an_existing_trace_is_replaced_only_with_overwrite(
    tmp_path: Path, make_rows: MakeRows
) -> None:
    path = tmp_path / "t.parquet"
    write_trace(path, make_rows(3), TraceMetadata())
    with pytest.raises(TraceError, match="exists"):
        write_trace(path, make_rows(5), TraceMetadata())
    assert open_trace(path).num_rows == 3
    write_trace(path, make_rows(5), TraceMetadata(), overwrite=True)
    assert open_trace(path).num_rows == 5


def test_a_failed_overwrite_keeps_the_old_trace(tmp_path: Path, make_rows: MakeRows) -> None:
    path = tmp_path / "t.parquet"
    write_trace(path, make_rows(3), TraceMetadata())
    with pytest.raises(RowError):
        write_trace(path, reversed(make_rows(3)), TraceMetadata(), overwrite=True)
    assert open_trace(path).num_rows == 3
    assert [file.name for file in tmp_path.iterdir()] == ["t.parquet"]


def test_batches_reject_an_invalid_row(write_columns: WriteColumns) -> None:
    path = write_columns(
        {
            "request_id": ["a", "b"],
            "timestamp_start_unix_ns": [1, 2],
            "input_tokens": [1, 0],
            "output_tokens": [1, 1],
        }
    )
    trace = open_trace(path)
    with pytest.raises(RowError, match="row 2, column input_tokens"):
        list(trace.batches())


def test_wide_rows_make_small_row_groups(tmp_path: Path, make_rows: MakeRows) -> None:
    rows = [replace(row, prompt="x" * (1 << 20)) for row in make_rows(20)]
    write_trace(tmp_path / "t.parquet", rows, TraceMetadata())
    with pq.ParquetFile(tmp_path / "t.parquet") as file:
        assert file.metadata.num_row_groups >= 2
