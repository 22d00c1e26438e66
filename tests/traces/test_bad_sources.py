"""An invalid source of an import gives exit code 64 and one sentence; no trace is written."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tracemalloc
from contextlib import closing
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_traces.duplicates import DuplicateIds
from goodput_traces.format.writer import MAX_BATCH_ROWS
from goodput_traces.importers import source as source_module

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.traces.conftest import RunTrace, WriteColumns


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.6805900,374,44\n"
MOON = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n'


def moon(**changes: object) -> str:
    record = {"timestamp": 0, "input_length": 600, "output_length": 1} | changes
    return json.dumps(record) + "\n"


def weka(request: object, **changes: object) -> str:
    return json.dumps({"id": "s", "block_size": 64, "requests": [request]} | changes) + "\n"


def expect_rejection(path: Path, sentence: str, run_trace: RunTrace, *options: str) -> None:
    out = path.with_name("out.parquet")
    outcome = run_trace("import", path, "--out", out, *options)
    assert outcome.code == 64
    assert outcome.err.startswith(f"error: {path}: ")
    assert outcome.err.count("\n") == 1
    assert sentence in outcome.err
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param("", "the file is empty", id="empty"),
        pytest.param("\n  \n", "the file is empty", id="blank lines"),
        pytest.param(AZURE, "the file has no records", id="header only"),
        pytest.param(
            AZURE + ROW + "2023-11-16 18:15:47,0,44\n",
            "line 3, column ContextTokens: 0 is out of bounds, it must be at least 1",
            id="zero input",
        ),
        pytest.param(
            AZURE + "2023-11-16 18:15:47,-3,44\n", "line 2, column ContextTokens: -3", id="negative"
        ),
        pytest.param(
            AZURE + "2023-11-16 18:15:47,1,\n",
            "line 2, column GeneratedTokens: the value is missing",
            id="missing value",
        ),
        pytest.param(
            AZURE + "2023-11-16 18:15:47,nan,4\n",
            "line 2, column ContextTokens: 'nan' is not a whole number",
            id="NaN",
        ),
        pytest.param(
            AZURE + "2023-11-16 18:15:47,1.5,4\n", "'1.5' is not a whole number", id="fraction"
        ),
        pytest.param(
            AZURE + "yesterday,1,4\n", "column TIMESTAMP: 'yesterday' is not a time", id="no time"
        ),
        pytest.param(
            AZURE + "2023-13-16 18:15:47,1,4\n", "column TIMESTAMP: '2023-13-16", id="month 13"
        ),
        pytest.param(AZURE + "1969-01-01 00:00:00,1,4\n", "is before 1970", id="before the epoch"),
        pytest.param(
            AZURE + "3000-01-01 00:00:00,1,4\n",
            "line 2, column TIMESTAMP: '3000-01-01 00:00:00' is after 2262",
            id="beyond 64 bits",
        ),
        pytest.param(
            moon(priority=2**40),
            "line 1, column priority: 1099511627776 is out of bounds, it must be at least -2,147",
            id="priority beyond 32 bits",
        ),
        pytest.param(
            weka({"t": 0.0, "in": 64, "out": 1, "think_time": 1e8}),
            "line 1, column requests[0].think_time: 1e+08 is out of bounds",
            id="think time of years",
        ),
        pytest.param(
            moon() + weka({"t": 0.0, "in": 64, "out": 1}),
            "line 2, column input_length: the value is missing",
            id="another format below",
        ),
        pytest.param(
            weka({"t": 0.0, "in": 64, "out": 1}, id="r")
            + weka({"t": 0.0, "in": 64, "out": 1}, id="s" * 510),
            "line 2, column request_id: the text is longer than 512 bytes",
            id="long session and turn",
        ),
        pytest.param(
            moon(request_id="a") + moon() + "\n" + moon(request_id="a"),
            "line 4, column request_id: line 1 has the same request id; give every",
            id="duplicate id",
        ),
        pytest.param(
            weka({"t": 0.0, "in": 64, "out": 1}) * 2,
            "line 2, column id: line 1 has the same request id",
            id="duplicate session",
        ),
        pytest.param(
            "timestamp_start_unix_ms,input_tokens,output_tokens,request_id\n"
            "1,1,1,a\n2,1,1,b\n3,1,1,b\n4,1,1,a\n",
            "line 4, column request_id: line 3 has the same request id",
            id="two duplicate ids",
        ),
        pytest.param(
            AZURE + ROW + "2023-11-16 18:15:40,1,4\n",
            "line 3, column TIMESTAMP: this row arrives 6",
            id="unsorted",
        ),
        pytest.param(
            AZURE + ROW + "2023-11-16 18:15:47,1\n",
            "line 3 has 2 cells, but the header has 3 (the first missing one is of column "
            "GeneratedTokens)",
            id="short line",
        ),
        pytest.param(
            AZURE + "2023-11-16 18:15:47,1,2,3\n",
            "line 2 has 4 cells, but the header has 3 (cell 4 has no column)",
            id="long line",
        ),
        pytest.param(AZURE + 'x,"1,4\n', "is not valid CSV", id="open quote"),
        pytest.param("a,b\r1,2\r", "its lines end with CR; convert", id="CR"),
        pytest.param("a,a\n1,2\n", "the CSV header names a column twice", id="twice"),
        pytest.param(
            "\nb, a,c,a\n1,2,3,4\n",
            "line 2: the CSV header names a column twice (a, in the cells 2 and 4)",
            id="twice in the second line",
        ),
        pytest.param(
            "when,prompt\n1,2\n",
            "line 1: the format is not recognised from its columns (prompt, when)",
            id="unknown columns",
        ),
        pytest.param(
            '\n\n{"when": 1, "prompt": 2}\n',
            "line 3: the format is not recognised from its columns (prompt, when)",
            id="unknown keys after blank lines",
        ),
        pytest.param(
            moon(timestamp=5) + moon(),
            "line 2, column timestamp: this row arrives 0.005 s before the "
            "row above it; sort the file, or add --sort",
            id="moon unsorted",
        ),
        pytest.param(
            "timestamp_start_unix_ms,input_tokens,output_tokens\n2000,1,1\n\n1000,1,1\n",
            "line 4, column timestamp_start_unix_ms: this row arrives 1 s before",
            id="baseten unsorted",
        ),
        pytest.param(
            "timestamp_start_unix_ns,input_tokens,output_tokens\n2000,1,1\n1000,1,1\n",
            "line 3, column timestamp_start_unix_ns: this row arrives 1e-06 s before",
            id="baseten unsorted in nanoseconds",
        ),
        pytest.param(
            weka({"t": 0.0, "in": 64, "out": 1}) + weka({"t": 0.0, "in": 64, "out": 1}, id="r"),
            "line 2, column id: this row belongs before the row above it (rows are sorted by",
            id="weka unsorted",
        ),
        pytest.param(MOON + "{\n", "line 2 is not valid JSON", id="half an object"),
        pytest.param(
            MOON + '{"é": 1\n',
            "line 2 is not valid JSON: Input data was truncated (byte 8)",
            id="position of the end of a line",
        ),
        pytest.param(
            MOON + '{"a" 1}\n',
            "line 2 is not valid JSON: JSON is malformed: expected ':' (byte 5)",
            id="position in a line",
        ),
        pytest.param(MOON + "[1]\n", "line 2 is not a JSON object", id="a list"),
        pytest.param("[" * 100_000 + "\n", "line 1 is not valid JSON", id="deep nesting"),
        pytest.param('{"timestamp": NaN}\n', "line 1 is not valid JSON", id="NaN literal"),
        pytest.param(
            moon(input_length=0), "line 1, column input_length: 0 is out of bounds", id="moon zero"
        ),
        pytest.param(
            moon(input_length=10**30), "column input_length: 1000000000000", id="moon huge"
        ),
        pytest.param(
            moon(timestamp=-1), "line 1, column timestamp: -1 is out of bounds", id="before start"
        ),
        pytest.param(
            moon(timestamp=None),
            "a row with only a delay depends on an earlier response",
            id="delay without arrival",
        ),
        pytest.param(
            moon(hash_ids=[1, 2, 3]), "3 hashes, but 600 tokens in blocks of 512", id="block size"
        ),
        pytest.param(
            moon(hash_ids=[1, "x"]), "column hash_ids: 'x' is not a whole number", id="text hash"
        ),
        pytest.param(
            moon(hash_ids={"a": 1}), "column hash_ids: expected a list", id="no list of hashes"
        ),
        pytest.param(
            moon(delay=-5),
            "line 1, column delay: -5 is out of bounds, it must be at least 0",
            id="negative delay",
        ),
        pytest.param(
            moon(session_id=[1]), "line 1, column session_id: expected text", id="odd session"
        ),
        pytest.param(
            moon(session_id="s" * 600), "the text is longer than 512 bytes", id="long session"
        ),
        pytest.param(
            moon(text_input="\ud800"),
            "line 1",
            id="half a surrogate",
        ),
        pytest.param(
            weka({"t": 0.0, "in": 0, "out": 1, "hash_ids": []}),
            "line 1, column requests[0].in: 0 is out of bounds",
            id="weka zero",
        ),
        pytest.param(
            weka({"in": 1, "out": 1}), "column requests[0].t: the value is missing", id="weka time"
        ),
        pytest.param(
            weka({"t": -1.0, "in": 1, "out": 1}), "column requests[0].t: -1 is out", id="weka early"
        ),
        pytest.param(
            weka({"t": 0.0, "in": 64, "out": 1, "hash_ids": [1, 2]}),
            "column requests[0].hash_ids: 2 hashes are too many for 64 tokens",
            id="weka hashes",
        ),
        pytest.param(weka(7), "column requests[0]: the value is not an object", id="weka number"),
        pytest.param(
            weka({}, requests={}), "column requests: the value is not a list", id="weka no list"
        ),
        pytest.param(weka({}, block_size=0), "column block_size: 0 is out", id="weka block size"),
        pytest.param(weka({}, id=None), "column id: the session has no id", id="weka no id"),
        pytest.param(
            weka({"t": 0.0, "type": "subagent", "requests": [{"t": 0.0, "in": "x", "out": 1}]}),
            "column requests[0].requests[0].in: 'x' is not a whole number",
            id="weka nested",
        ),
    ],
)
def test_a_bad_source_is_rejected_with_its_place(
    content: str, sentence: str, tmp_path: Path, run_trace: RunTrace
) -> None:
    path = tmp_path / "source"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    expect_rejection(path, sentence, run_trace)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ("--format", "weka"),
            "not a file of the format weka, because columns are missing: block_size, id, requests",
        ),
        (("--format", "mooncake"), "columns are missing: input_length, output_length, timestamp;"),
        (("--format", "baseten"), "columns are missing: input_tokens, output_tokens;"),
    ],
    ids=["weka", "mooncake", "baseten"],
)
def test_a_source_that_lacks_the_columns_of_its_format_is_rejected(
    options: tuple[str, ...], sentence: str, tmp_path: Path, run_trace: RunTrace
) -> None:
    path = tmp_path / "source"
    path.write_text(AZURE + ROW)
    expect_rejection(path, sentence, run_trace, *options)


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("gzip", gzip.compress),
        ("xz", lzma.compress),
        ("bzip2", bz2.compress),
        ("zstd", lambda data: pa.compress(data, codec="zstd", asbytes=True)),
    ],
    ids=["gzip", "xz", "bzip2", "zstd"],
)
@pytest.mark.parametrize("damage", ["truncated", "garbled"])
def test_broken_compression_is_rejected(
    name: str, compress: Callable[[bytes], bytes], damage: str, tmp_path: Path, run_trace: RunTrace
) -> None:
    rows = "".join(
        f"2023-11-16 18:{at // 60:02}:{at % 60:02}.{at * 7919 % 1000:03},{at % 977 + 1},{at + 1}\n"
        for at in range(3000)
    )
    content = bytearray(compress((AZURE + rows).encode()))
    if damage == "truncated":
        del content[len(content) // 2 :]
    else:
        middle = len(content) // 2
        content[middle : middle + 64] = bytes(64)
    path = tmp_path / "source"
    path.write_bytes(content)
    expect_rejection(path, f"the {name} data is truncated or damaged", run_trace)


def test_a_truncated_parquet_source_is_rejected(
    write_columns: WriteColumns, run_trace: RunTrace
) -> None:
    path = write_columns({"input_tokens": [1], "output_tokens": [1], "timestamp": [1]})
    path.write_bytes(path.read_bytes()[:-20])
    expect_rejection(path, "the Parquet file is truncated or damaged", run_trace)


def test_an_error_after_several_row_groups_names_its_line(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    good = 2 * MAX_BATCH_ROWS + 10
    path = tmp_path / "late.csv"
    path.write_text(AZURE + ROW * good + ROW.replace("374", "0") + ROW * 5)
    expect_rejection(path, f"line {good + 2}, column ContextTokens", run_trace)


def test_a_line_that_never_ends_is_rejected(
    tmp_path: Path, run_trace: RunTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "MAX_LINE_BYTES", 2 << 20)
    path = tmp_path / "source"
    path.write_bytes(gzip.compress(b'{"timestamp": "' + b"x" * (16 << 20)))
    expect_rejection(path, "line 1 is longer than 2 MiB", run_trace)


def test_text_that_is_not_utf_8_is_rejected(tmp_path: Path, run_trace: RunTrace) -> None:
    path = tmp_path / "source"
    path.write_bytes(AZURE.encode() + b"\xff\xfe\n")
    expect_rejection(path, "line 2 is not UTF-8 text (byte 0)", run_trace)


def test_a_missing_source_is_rejected(tmp_path: Path, run_trace: RunTrace) -> None:
    outcome = run_trace("import", tmp_path / "none", "--out", tmp_path / "o")
    assert (outcome.code, "no such file" in outcome.err) == (64, True)


def test_an_existing_output_is_rejected_before_anything_is_read(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    (tmp_path / "a.csv").write_text(AZURE + ROW)
    (tmp_path / "o.parquet").write_text("mine")
    argv = ("import", tmp_path / "a.csv", "--out", tmp_path / "o.parquet")
    outcome = run_trace(*argv)
    assert (outcome.code, "the file exists" in outcome.err) == (64, True)
    assert (tmp_path / "o.parquet").read_text() == "mine"
    assert run_trace(*argv, "--force").code == 0


def test_an_unwritable_folder_is_named(tmp_path: Path, run_trace: RunTrace) -> None:
    (tmp_path / "a.csv").write_text(AZURE + ROW)
    outcome = run_trace("import", tmp_path / "a.csv", "--out", tmp_path / "no" / "o.parquet")
    assert (outcome.code, "cannot be written" in outcome.err) == (64, True)


def test_duplicate_ids_are_found_when_rows_are_sorted(tmp_path: Path, run_trace: RunTrace) -> None:
    path = tmp_path / "source"
    path.write_text(moon(request_id="a", timestamp=9) + moon(request_id="b") + moon(request_id="a"))
    sentence = "line 3, column request_id: line 1 has the same request id"
    expect_rejection(path, sentence, run_trace, "--sort")


@given(
    ids=st.lists(st.sampled_from(["a", "b", "c", "d", "é", ""]) | st.text(max_size=2), max_size=30),
    in_memory=st.sampled_from([1, 2, 7, 1_000]),
)
def test_the_first_duplicate_is_found_in_memory_and_on_disk(ids: list[str], in_memory: int) -> None:
    seen: dict[str, int] = {}
    expected = None
    with closing(DuplicateIds(in_memory=in_memory)) as duplicates:
        for place, request_id in enumerate(ids):
            duplicates.add(request_id, place)
            if request_id in seen and expected is None:
                expected = (seen[request_id], place)
            seen[request_id] = place
        assert duplicates.find_first() == expected


def test_ten_times_as_many_ids_are_checked_in_the_same_memory() -> None:
    def peak_bytes(count: int) -> int:
        tracemalloc.start()
        try:
            with closing(DuplicateIds(in_memory=500, num_parts=1)) as duplicates:
                for place in range(count):
                    duplicates.add(f"id-{place}", place)
                assert duplicates.find_first() is None
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_bytes(20_000) < 1.5 * peak_bytes(2_000)


def test_text_of_a_parquet_source_that_is_not_utf_8_is_named_by_its_row(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    path = tmp_path / "source"
    numbers = pa.array([1, 2], pa.int64())
    broken = pa.array([b"a", b"\xff"], pa.binary())
    table = pa.table(
        {
            "timestamp_start_unix_ms": numbers,
            "input_tokens": numbers,
            "output_tokens": numbers,
            "slo_class": pa.Array.from_buffers(pa.string(), 2, broken.buffers()),
        }
    )
    pq.write_table(table, path)
    expect_rejection(path, "row 2, column slo_class: the value cannot be read", run_trace)


def test_a_number_of_a_parquet_source_beyond_64_bits_is_named_by_its_row(
    write_columns: WriteColumns, run_trace: RunTrace
) -> None:
    path = write_columns(
        {"timestamp_start_unix_ms": [1, 2], "input_tokens": [1, 2**63], "output_tokens": [1, 1]},
        types={"input_tokens": pa.uint64()},
    )
    sentence = "row 2, column input_tokens: 9223372036854775808 is out of bounds"
    expect_rejection(path, sentence, run_trace)


def test_control_characters_of_a_source_do_not_reach_the_terminal(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    path = tmp_path / "source"
    path.write_text("\x1b[31mred\u202e,b\n1,2\n")
    outcome = run_trace("import", path, "-o", tmp_path / "o")
    assert "\\x1b[31mred\\u202e" in outcome.err
    assert outcome.err.rstrip("\n").isprintable()
    path.write_text(json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1, "\x07": 1}))
    outcome = run_trace("import", path, "-o", tmp_path / "o")
    assert outcome.code == 0
    assert "unused columns were dropped: \\x07" in outcome.err
    assert outcome.err.rstrip("\n").isprintable()


def test_several_files_need_a_clock_per_session(tmp_path: Path, run_trace: RunTrace) -> None:
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for path in paths:
        path.write_text(AZURE + ROW)
    outcome = run_trace("import", *paths, "-o", tmp_path / "o")
    assert outcome.code == 64
    assert f"{paths[1]}: files of the format azure are imported one at a time" in outcome.err
    paths[0].write_text(weka({"t": 0.0, "in": 64, "out": 1}))
    outcome = run_trace("import", *paths, "-o", tmp_path / "o")
    assert outcome.code == 64
    assert f"{paths[1]}: the first file has the format weka, but this file does not" in outcome.err
