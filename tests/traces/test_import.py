"""Imports: the meaning of each format, containers and compressions, detection and order."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_core.units import NS_PER_S
from goodput_traces.format.reader import open_trace
from goodput_traces.format.schema import Clock, HashSemantics, TraceMetadata
from goodput_traces.format.writer import write_trace
from goodput_traces.importers import FORMATS
from goodput_traces.importers.base import ImportOptions
from goodput_traces.importers.run import import_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.traces.conftest import MakeRows, RunTrace, WriteColumns

    from goodput_traces.format.schema import TraceRow

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
)
AZURE_FIRST_NS = 1_700_158_546_680_590_000
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 27, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]},
]
WEKA = {
    "id": "trace_1",
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "type": "n", "model": "m", "in": 130, "out": 9, "hash_ids": [1, 2],
         "api_time": 7.34, "think_time": 0.0},
        {"t": 5.5, "type": "subagent", "agent_id": "agent_001", "requests": [
            {"t": 0.0, "type": "n", "in": 64, "out": 1, "hash_ids": [7]},
            {"t": 20.0, "type": "n", "in": 64, "out": 2, "hash_ids": [7]},
        ]},
        {"t": 12.0, "type": "s", "in": 200, "out": 0, "hash_ids": [1, 2, 3],
         "api_time": 2.5, "ttft": 1.25, "think_time": 4.66},
    ],
}  # fmt: skip
BASETEN: dict[str, list[Any]] = {
    "timestamp_start_unix_ms": [1_700_000_000_000, 1_700_000_000_500],
    "prompt": ["first prompt", "second prompt"],
    "input_tokens": [3, 4],
    "output_tokens": [6, 0],
    "total_hashes": [[1, 2], None],
    "block_size": [2, None],
    "provided_session_id": ["s-1", None],
    "poor_man_session_id": [None, 11],
    "request_canceled": [0, 1],
    "duration_ttft_ms": [120, None],
    "duration_e2e_ms": [900, None],
    "model_name": ["m", None],
    "features": ["x", "y"],
}

OTEL = {
    "resourceSpans": [{"scopeSpans": [{"spans": [{
        "startTimeUnixNano": "1700000000000000000",
        "attributes": [
            {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "1"}},
            {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "1"}},
        ],
    }]}]}]
}  # fmt: skip


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def imported(source: Path, **options: Any) -> tuple[list[TraceRow], TraceMetadata]:
    out = source.with_name("out.parquet")
    import_trace((source,), out, overwrite=True, **options)
    trace = open_trace(out)
    return list(trace.rows()), trace.metadata


def test_azure_keeps_ticks_of_100_nanoseconds(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(AZURE)
    rows, metadata = imported(tmp_path / "a.csv")
    assert [row.timestamp_start_unix_ns for row in rows] == [
        AZURE_FIRST_NS,
        AZURE_FIRST_NS + 4_314_579_000,
    ]
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(374, 44), (396, 109)]
    assert metadata.clock is Clock.ABSOLUTE
    assert metadata.timestamp_resolution_ns == 100
    assert metadata.hash_semantics is HashSemantics.NONE


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("2023-11-16 18:15:46.6805900", AZURE_FIRST_NS),
        ("2023-11-16 18:15:46.6805907", AZURE_FIRST_NS + 700),
        ("2023-11-16T18:15:46.6805900Z", AZURE_FIRST_NS),
        ("2023-11-16 18:15:46.68059+00:00", AZURE_FIRST_NS),
        ("2023-11-16 20:15:46.680590+02:00", AZURE_FIRST_NS),
        ("1700158546680590000", AZURE_FIRST_NS),
        ("1700158546680590001", AZURE_FIRST_NS + 1),
        ("2023-11-16 18:15:46", 1_700_158_546_000_000_000),
    ],
    ids=[
        "as published",
        "odd tick",
        "ISO",
        "UTC offset",
        "zone",
        "nanoseconds",
        "odd nanosecond",
        "seconds",
    ],
)
def test_azure_times_are_exact(text: str, expected_ns: int, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{text},1,1\n")
    rows, _ = imported(tmp_path / "a.csv")
    assert rows[0].timestamp_start_unix_ns == expected_ns


def test_mooncake_blocks_cover_512_tokens_and_the_last_is_partial(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(lines(*MOONCAKE))
    rows, metadata = imported(tmp_path / "m.jsonl")
    assert [row.total_hashes for row in rows] == [(0, 1, 2), (0, 3)]
    assert {row.block_size for row in rows} == {512}
    assert [row.timestamp_start_unix_ns for row in rows] == [0, 27_000_000]
    assert metadata.clock is Clock.TRACE_RELATIVE
    assert metadata.timestamp_resolution_ns == 1_000_000
    assert metadata.hash_semantics is HashSemantics.LAST_PARTIAL


def test_mooncake_reads_what_aiperf_adds(tmp_path: Path) -> None:
    record = {
        "timestamp": 1.5, "input_length": 3, "output_length": 4, "session_id": "s",
        "delay": 250, "priority": 2, "text_input": "three small words",
    }  # fmt: skip
    (tmp_path / "m.jsonl").write_text(lines(record))
    rows, metadata = imported(tmp_path / "m.jsonl")
    row = rows[0]
    assert row.timestamp_start_unix_ns == 1_500_000
    assert (row.session_id, row.delay_ms, row.priority) == ("s", 250.0, 2)
    assert row.prompt == "three small words"
    assert metadata.timestamp_resolution_ns == 1


def test_weka_sessions_are_flattened_by_time_and_namespaced(tmp_path: Path) -> None:
    second = WEKA | {"id": "trace_2"}
    (tmp_path / "w.jsonl").write_text(lines(WEKA, second))
    rows, metadata = imported(tmp_path / "w.jsonl")
    first_session = [row for row in rows if row.session_id == "trace_1"]
    other = [row for row in rows if row.session_id == "trace_2"]
    assert [row.timestamp_start_unix_ns for row in first_session] == [
        0,
        5_500_000_000,
        12_000_000_000,
        25_500_000_000,
    ]
    assert [row.turn for row in first_session] == [0, 1, 2, 3]
    assert [row.request_type for row in first_session] == ["n", "agent_001", "s", "agent_001"]
    assert [row.output_tokens for row in first_session] == [9, 1, 1, 2]
    assert metadata.clock is Clock.SESSION_RELATIVE
    assert metadata.floored_output_rows == 2
    assert metadata.hash_semantics is HashSemantics.FULL_BLOCKS
    # Sessions share no hashes, and no hash is negative, because AIPerf rejects negative ones.
    assert first_session[0].total_hashes == first_session[2].total_hashes[:2]
    ours = {block for row in first_session for block in row.total_hashes}
    theirs = {block for row in other for block in row.total_hashes}
    assert len(ours) == len(theirs) == 4
    assert not ours & theirs
    assert min(ours | theirs) >= 0


def test_sessions_of_several_files_stay_apart(tmp_path: Path, run_trace: RunTrace) -> None:
    later, sooner = tmp_path / "b.x.jsonl", tmp_path / "a-1.jsonl.gz"
    later.write_text(lines(WEKA, WEKA | {"id": "z"}))
    sooner.write_bytes(gzip.compress(lines(WEKA | {"id": "t"}, WEKA | {"id": "u"}).encode()))
    again = tmp_path / "again" / "b.jsonl"
    again.parent.mkdir()
    again.write_text(lines(WEKA))
    out = tmp_path / "o.parquet"
    outcome = run_trace("import", later, sooner, again, "-o", out)
    assert outcome.code == 0
    assert "note: session ids begin with the name of their file\n" in outcome.err
    trace = open_trace(out)
    rows = list(trace.rows())
    sessions = list(dict.fromkeys(row.provided_session_id for row in rows))
    names = [f"b-2/{WEKA['id']}", f"b/{WEKA['id']}", "b/z"]
    assert sessions == ["a-1/t", "a-1/u", *names]
    assert len({row.request_id for row in rows}) == len(rows)
    hashes = [set(row.total_hashes) for row in rows if row.turn == 0]
    assert all(not one & other for one, other in itertools.combinations(hashes, 2))
    assert trace.metadata.source == "imported from b.x.jsonl, a-1.jsonl.gz, b.jsonl"


def test_weka_outcomes_are_recorded_and_think_time_becomes_a_delay(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text(lines(WEKA))
    rows, _ = imported(tmp_path / "w.jsonl")
    last = rows[2]
    assert (last.duration_ttft_ms, last.duration_e2e_ms, last.delay_ms) == (1250, 2500, 4660.0)
    assert rows[0].model_name == "m"


def test_weka_requests_follow_the_previous_one_of_their_agent(tmp_path: Path) -> None:
    def request(at_s: float, **fields: object) -> dict[str, object]:
        return {"t": at_s, "in": 64, "out": 1, "hash_ids": [1], **fields}

    ended = {"api_time": 2.0}
    source = {
        "id": "t",
        "block_size": 64,
        "requests": [
            request(0.0, think_time=0.0, **ended),
            request(5.0, think_time=3.0),  # never ended
            {"t": 10.0, "type": "subagent", "agent_id": "helper", "requests": [
                request(0.0, think_time=0.0, **ended),
                request(4.0, think_time=2.0, **ended),
            ]},
            request(12.0, think_time=10.0, **ended),  # counts from the end at 2 s
            request(15.0, think_time=1.0, **ended),
        ],
    }  # fmt: skip
    (tmp_path / "w.jsonl").write_text(lines(source))
    rows, _ = imported(tmp_path / "w.jsonl")
    assert [
        (row.timestamp_start_unix_ns / NS_PER_S, row.parent_request_id, row.delay_ms)
        for row in rows
    ] == [
        (0, None, 0),
        (5, "t/00000", 3000),
        (10, "t/00001", None),
        (12, "t/00001", None),
        (14, "t/00002", 2000),
        (15, "t/00003", 1000),
    ]


def test_baseten_columns_keep_their_meaning(write_columns: WriteColumns) -> None:
    rows, metadata = imported(write_columns(BASETEN))
    first, second = rows
    assert first.timestamp_start_unix_ns == 1_700_000_000_000_000_000
    assert (first.prompt, first.input_tokens, first.output_tokens) == ("first prompt", 3, 6)
    assert (first.total_hashes, first.block_size) == ((1, 2), 2)
    assert (first.session_id, second.session_id) == ("s-1", "11")
    assert (first.request_canceled, second.request_canceled) == (False, True)
    assert (first.duration_ttft_ms, first.duration_e2e_ms) == (120, 900)
    assert second.output_tokens == 1
    assert metadata.floored_output_rows == 1
    assert metadata.clock is Clock.ABSOLUTE
    assert len({row.request_id for row in rows}) == 2


def test_baseten_hashes_without_a_size_need_one(write_columns: WriteColumns) -> None:
    columns = {name: values for name, values in BASETEN.items() if name != "block_size"}
    path = write_columns(columns)
    with pytest.raises(Exception, match=r"row 1, column block_size: .* --block-size"):
        imported(path)
    rows, _ = imported(path, options=ImportOptions(block_size=2))
    assert rows[0].block_size == 2


def test_an_imported_trace_keeps_every_column(tmp_path: Path, make_rows: MakeRows) -> None:
    metadata = TraceMetadata(
        source="ours",
        licence="CC0",
        clock=Clock.TRACE_RELATIVE,
        timestamp_resolution_ns=100,
        hash_semantics=HashSemantics.NONE,
        floored_output_rows=3,
    )
    write_trace(tmp_path / "ours.parquet", make_rows(), metadata)
    assert imported(tmp_path / "ours.parquet") == (make_rows(), metadata)


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "bzip2": bz2.compress,
    "zstd": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("container", ["CSV", "JSON lines", "Parquet"])
def test_every_container_and_compression_gives_the_same_rows(
    compression: str, container: str, tmp_path: Path
) -> None:
    records: list[dict[str, Any]] = [
        {"TIMESTAMP": "2023-11-16 18:15:46.6805900", "ContextTokens": 374, "GeneratedTokens": 44},
        {"TIMESTAMP": "2023-11-16 18:15:50.9951690", "ContextTokens": 396, "GeneratedTokens": 109},
    ]
    if container == "CSV":
        content = AZURE.replace("\n", "\r\n").encode("utf-8-sig")
    elif container == "JSON lines":
        content = lines(*records).encode()
    else:
        pq.write_table(pa.Table.from_pylist(records), tmp_path / "p")
        content = (tmp_path / "p").read_bytes()
    path = tmp_path / "a file without a suffix"
    path.write_bytes(COMPRESSIONS[compression](content))
    seen: list[int] = []
    result = import_trace((path,), tmp_path / "o.parquet", on_bytes=seen.append)
    assert (result.format, str(result.container), result.num_rows) == ("azure", container, 2)
    if container != "Parquet":  # the footer is read first, so no progress is reported
        assert seen == sorted(seen)
        assert seen[-1] == path.stat().st_size
    rows = list(open_trace(tmp_path / "o.parquet").rows())
    assert [row.timestamp_start_unix_ns for row in rows] == [
        AZURE_FIRST_NS,
        AZURE_FIRST_NS + 4_314_579_000,
    ]


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"timed_trace"}))
def test_the_format_is_recognised_from_its_columns(name: str, tmp_path: Path) -> None:
    examples: dict[str, Any] = {
        "azure": {"TIMESTAMP": "2023-11-16 18:15:46", "ContextTokens": 1, "GeneratedTokens": 1},
        "mooncake": MOONCAKE[0],
        "weka": WEKA,
        "baseten": {"timestamp_start_unix_ms": 1, "input_tokens": 1, "output_tokens": 1},
        "bailian": MOONCAKE[0] | {"chat_id": 1, "parent_chat_id": -1, "hash_ids": []},
        "burstgpt": {"Timestamp": 1, "Request tokens": 1, "Response tokens": 1},
        "otel": OTEL,
        "log": {"time": 1_700_000_000, "prompt_tokens": 1, "completion_tokens": 1},
    }
    (tmp_path / "x").write_text(lines(examples[name]))
    result = import_trace((tmp_path / "x",), tmp_path / "o.parquet")
    assert result.format == name


@given(times=st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
@settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_sorting_orders_by_arrival_and_keeps_ties_in_place(
    times: list[int], tmp_path: Path
) -> None:
    records = [
        {"timestamp": time, "input_length": at + 1, "output_length": 1}
        for at, time in enumerate(times)
    ]
    (tmp_path / "m.jsonl").write_text(lines(*records))
    rows, metadata = imported(tmp_path / "m.jsonl", sort=True)
    expected = sorted(enumerate(times), key=lambda item: item[1])
    assert [row.input_tokens for row in rows] == [at + 1 for at, _ in expected]
    assert metadata.clock is Clock.TRACE_RELATIVE
    assert {file.name for file in tmp_path.iterdir()} == {"m.jsonl", "out.parquet"}


def test_sort_orders_sessions_by_id(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text(lines(WEKA | {"id": "b"}, WEKA | {"id": "a"}))
    with pytest.raises(Exception, match="--sort"):
        imported(tmp_path / "w.jsonl")
    rows, _ = imported(tmp_path / "w.jsonl", sort=True)
    assert [row.session_id for row in rows] == ["a"] * 4 + ["b"] * 4


def test_notes_list_changed_and_dropped_values(
    write_columns: WriteColumns, run_trace: RunTrace, tmp_path: Path
) -> None:
    outcome = run_trace("import", write_columns(BASETEN), "--out", tmp_path / "o.parquet")
    assert outcome.code == 0
    assert "note: zero output tokens were replaced with 1 in 1 rows\n" in outcome.err
    assert "note: unused columns were dropped: features\n" in outcome.err
    assert "2 rows from Parquet in the format baseten" in outcome.out
