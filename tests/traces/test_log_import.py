"""Imports of access logs: maps, known and guessed columns, times, conditions, previews."""

from __future__ import annotations

import errno
import json
import re
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_traces.format import writer as writer_module
from goodput_traces.format.reader import open_trace
from goodput_traces.format.schema import Clock, TraceMetadata
from goodput_traces.importers.base import ImportOptions
from goodput_traces.importers.column_map import ColumnMap, parse_filter, parse_pairs
from goodput_traces.importers.record import Record
from goodput_traces.importers.run import import_trace
from goodput_traces.importers.times import UNITS_NS, ArrivalReader

if TYPE_CHECKING:
    from tests.traces.conftest import RunTrace

    from goodput_traces.format.schema import TraceRow

SECOND = 1_000_000_000
START_NS = 1_700_158_546 * SECOND


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def log(*times: object) -> str:
    return "time,input_tokens,output_tokens\n" + "".join(f"{time},5,6\n" for time in times)


def imported(
    source: Path, column_map: ColumnMap | None = None, **options: Any
) -> tuple[list[TraceRow], TraceMetadata]:
    out = source.with_name("out.parquet")
    import_trace(
        (source,),
        out,
        overwrite=True,
        options=ImportOptions(column_map=column_map or ColumnMap()),
        **options,
    )
    trace = open_trace(out)
    return list(trace.rows()), trace.metadata


def test_a_map_names_the_columns_and_known_names_need_none(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(
        "time,prompt_len,output_tokens,tier,request_id,priority,noise\n"
        "2023-11-16T18:15:46Z,374,44,gold,a,2,x\n"
        "2023-11-16T18:15:47Z,400,0,,b,,y\n"
    )
    columns = parse_pairs("arrival=time, input_tokens=prompt_len,slo_class=tier")
    rows, metadata = imported(path, columns)
    assert [row.request_id for row in rows] == ["a", "b"]
    assert [row.timestamp_start_unix_ns for row in rows] == [START_NS, START_NS + SECOND]
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(374, 44), (400, 1)]
    assert [row.slo_class for row in rows] == ["gold", None]
    assert [row.priority for row in rows] == [2, None]
    assert metadata.clock is Clock.ABSOLUTE
    assert metadata.floored_output_rows == 1


def test_nested_fields_are_named_with_dots_even_if_keys_have_dots(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        lines(
            {
                "ts": START_NS,
                "usage": {"prompt_tokens": 7, "completion_tokens": 8},
                "attributes": {"app.tier": "gold", "app": {"user": {"id": "u1"}}},
                "meta.model": "m",
            },
            {
                "ts": START_NS + 1,
                "usage": {"prompt_tokens": 9, "completion_tokens": 10},
                "attributes": None,
            },
        )
    )
    columns = parse_pairs(
        "arrival=ts,slo_class=attributes.app.tier,org_id=attributes.app.user.id,"
        "model_name=meta.model"
    )
    rows, _ = imported(path, columns)
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(7, 8), (9, 10)]
    assert (rows[0].slo_class, rows[0].org_id, rows[0].model_name) == ("gold", "u1", "m")
    assert (rows[1].slo_class, rows[1].org_id, rows[1].model_name) == (None, None, None)


def test_a_log_with_usual_names_needs_no_map(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    record = {
        "startTime": "2023-11-16T18:15:46+00:00",
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "model": "m",
    }
    path.write_text(lines(record))
    rows, _ = imported(path)
    assert rows[0].timestamp_start_unix_ns == START_NS
    assert (rows[0].input_tokens, rows[0].output_tokens, rows[0].model_name) == (3, 4, "m")


@pytest.mark.parametrize(
    ("text", "expected_ns", "resolution_ns"),
    [
        ("1700158546", START_NS, SECOND),
        ("1700158546.680", START_NS + 680_000_000, 1_000_000),
        ("1700158546680", START_NS + 680_000_000, 1_000_000),
        ("1700158546680590", START_NS + 680_590_000, 1_000),
        ("1700158546680590123", START_NS + 680_590_123, 1),
        ("1.700158546E9", START_NS, SECOND),
        ("2023-11-16T18:15:46.680590123Z", START_NS + 680_590_123, 1),
        ("2023-11-16 20:15:46+02:00", START_NS, SECOND),
        ("2023-11-16T13:15:46.5-0500", START_NS + 500_000_000, 100_000_000),
        ("2023-11-16 18:15:46 UTC", START_NS, SECOND),
        ('"2023-11-16 18:15:46,25"', START_NS + 250_000_000, 10_000_000),
        ("16/Nov/2023:18:15:46 +0000", START_NS, SECOND),
        ("16/Nov/2023:20:15:46 +0200", START_NS, SECOND),
    ],
)
def test_times_are_exact_in_every_form(
    text: str, expected_ns: int, resolution_ns: int, tmp_path: Path
) -> None:
    path = tmp_path / "log.csv"
    path.write_text(log(text))
    rows, metadata = imported(path, parse_pairs("arrival=time"))
    assert rows[0].timestamp_start_unix_ns == expected_ns
    assert metadata.timestamp_resolution_ns == resolution_ns
    assert metadata.clock is Clock.ABSOLUTE


@given(
    ns=st.integers(10**17, 4 * 10**18),
    digits=st.sampled_from([0, 3, 6, 9]),
)
def test_the_unit_of_a_time_follows_from_its_size(ns: int, digits: int) -> None:
    number = ns // 10 ** (9 - digits)
    record = Record(path=Path("log"), number=1, unit="line", values={"time": str(number)})
    assert ArrivalReader().read_ns(record, "time") == number * 10 ** (9 - digits)


@given(number=st.integers(0, 10**15), unit=st.sampled_from(["s", "ms", "us", "ns"]))
@settings(deadline=None)
def test_fractions_of_a_unit_lose_no_digit(number: int, unit: str) -> None:
    text = f"{number // 1000}.{number % 1000:03d}"
    record = Record(path=Path("log"), number=1, unit="line", values={"time": text})
    expected = int(Fraction(number, 1000) * UNITS_NS[unit])
    if expected < 2**63:
        assert ArrivalReader(unit).read_ns(record, "time") == expected


def test_a_named_unit_allows_times_since_the_start(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(log("0", "0.25", "12.5"))
    rows, metadata = imported(path, parse_pairs("arrival=time:s"))
    assert [row.timestamp_start_unix_ns for row in rows] == [0, SECOND // 4, 25 * SECOND // 2]
    assert metadata.clock is Clock.TRACE_RELATIVE
    assert metadata.timestamp_resolution_ns == 10_000_000


def test_parquet_times_keep_their_nanoseconds(tmp_path: Path) -> None:
    stamps = pa.array([START_NS, START_NS + 1], pa.timestamp("ns"))
    moments = pa.array([datetime(2023, 11, 16, 18, 15, 46, tzinfo=UTC)] * 2)
    usage = pa.array([{"prompt_tokens": 3, "completion_tokens": 4}] * 2)
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"at": stamps, "zoned": moments, "usage": usage}), path)
    rows, metadata = imported(path, parse_pairs("arrival=at"))
    assert [row.timestamp_start_unix_ns for row in rows] == [START_NS, START_NS + 1]
    assert metadata.timestamp_resolution_ns == 1
    assert {row.input_tokens for row in rows} == {3}
    rows, _ = imported(path, parse_pairs("arrival=zoned"))
    assert {row.timestamp_start_unix_ns for row in rows} == {START_NS}


def test_durations_have_units(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(
        "time,input_tokens,output_tokens,ttft,total,target\n1700158546,1,1,0.25,2000000,1.5\n"
    )
    columns = parse_pairs(
        "arrival=time,duration_ttft_ms=ttft:s,duration_e2e_ms=total:us,ttft_target_ms=target:s"
    )
    rows, _ = imported(path, columns)
    row = rows[0]
    assert (row.duration_ttft_ms, row.duration_e2e_ms, row.ttft_target_ms) == (250, 2000, 1500.0)


def test_the_arrival_of_a_log_of_ends_is_earlier_by_the_duration(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    path = tmp_path / "log.csv"
    path.write_text(
        "end,seconds,input_tokens,output_tokens\n"
        "1700158546.5,0.5,1,1\n1700158547.0,9.25,2,2\n1700158548.0,0,3,3\n"
    )
    out = tmp_path / "o.parquet"
    outcome = run_trace(
        "import", path, "--map", "finish=end,duration_e2e_ms=seconds:s", "--out", out
    )
    assert outcome.code == 0
    assert "its rows were sorted" in outcome.err
    rows = list(open_trace(out).rows())
    assert [row.input_tokens for row in rows] == [2, 1, 3]
    assert [row.timestamp_start_unix_ns - START_NS for row in rows] == [
        -8 * SECOND - SECOND // 4,
        0,
        2 * SECOND,
    ]


def test_conditions_select_rows(tmp_path: Path, run_trace: RunTrace) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        lines(
            {"time": START_NS, "path": "/v1/chat/completions", "status": 200, "stream": True,
             "input_tokens": 1, "output_tokens": 1},
            {"time": START_NS, "path": "/health", "status": 200, "stream": True},
            {"time": START_NS, "path": "/v1/completions", "status": 429, "stream": True},
            {"time": START_NS, "path": "/v1/completions", "status": 201, "stream": True,
             "input_tokens": 2, "output_tokens": 1},
            {"time": START_NS, "path": "/v1/completions", "status": 200, "stream": False,
             "input_tokens": 3, "output_tokens": 1},
            {"time": START_NS, "status": 200, "stream": True},
        )
    )  # fmt: skip
    out = tmp_path / "o.parquet"
    only = ("--only", "path=/v1/*", "--only", "status=20*", "--only", "stream=true")
    outcome = run_trace("import", path, "--map", "arrival=time", *only, "--out", out)
    assert outcome.code == 0
    assert [row.input_tokens for row in open_trace(out).rows()] == [1, 2]
    assert "note: 4 records that --only excludes were skipped\n" in outcome.err


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("200", ["200"], ["2000", "20"]),
        ("*", ["", "x"], []),
        ("/v1/*", ["/v1/", "/v1/x"], ["/v1", "x/v1/"]),
        ("*completions", ["/v1/completions"], ["/v1/completions/x"]),
        ("a*b*c", ["abc", "a--b--c", "abbc"], ["acb", "ab", "abcd"]),
        ("ab*ba", ["abba", "ab-ba"], ["aba"]),
    ],
)
def test_a_star_stands_for_any_characters(
    pattern: str, matching: list[str], other: list[str]
) -> None:
    condition = parse_filter(f"column={pattern}")
    assert all(condition.matches(text) for text in matching)
    assert not any(condition.matches(text) for text in other)
    assert not condition.matches(None)


@given(
    pattern=st.text("ab*", max_size=8).filter(lambda text: "**" not in text),
    text=st.text("ab", max_size=10),
)
def test_patterns_match_as_regular_expressions_would(pattern: str, text: str) -> None:
    expected = re.fullmatch(pattern.replace("*", ".*"), text) is not None
    assert parse_filter(f"c={pattern}").matches(text) is expected


@pytest.mark.parametrize("delimiter", ["\t", ";", "|"])
def test_cells_can_have_other_delimiters_than_commas(delimiter: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(log("1700158546.5").replace(",", delimiter))
    rows, _ = imported(path)
    assert rows[0].timestamp_start_unix_ns == START_NS + SECOND // 2


def test_a_comma_in_the_header_is_the_delimiter(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("time,input_tokens,output_tokens,a;b|c\n1700158546,1,2,x\n")
    rows, _ = imported(path)
    assert rows[0].output_tokens == 2


MAP_FILE = """
line: '{time} {status} {ms} {in} {out} "{tier}"'
unmatched: skip
columns:
  arrival: {column: time, unit: ms}
  duration_e2e_ms: ms
  input_tokens: in
  output_tokens: out
  slo_class: tier
only:
  status: [200, "201"]
"""
TEXT_LOG = (
    'starting workers\n'
    '1700158546680 200 12 100 10 "gold"\n'
    '1700158546690 429 0 - - "-"\n'
    '\n'
    '1700158546700 201 12 300 30 "-"\n'
)  # fmt: skip


def test_a_map_file_describes_the_lines_of_a_text_log(tmp_path: Path, run_trace: RunTrace) -> None:
    path, columns = tmp_path / "server.log", tmp_path / "map.yaml"
    path.write_text(TEXT_LOG)
    columns.write_text(MAP_FILE)
    out = tmp_path / "o.parquet"
    outcome = run_trace("import", path, "--map", columns, "-o", out)
    assert outcome.code == 0, outcome.err
    rows = list(open_trace(out).rows())
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(100, 10), (300, 30)]
    assert [row.slo_class for row in rows] == ["gold", None]
    assert rows[0].timestamp_start_unix_ns == START_NS + 680_000_000
    skipped = "note: 1 lines that do not match the line format were skipped, first line 1\n"
    assert skipped in outcome.err
    assert "2 rows from lines in the format log" in outcome.out


def test_pairs_on_the_command_line_replace_those_of_a_file(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    path, columns = tmp_path / "log.csv", tmp_path / "map.json"
    path.write_text("a,b,input_tokens,output_tokens\n1700158546,1700158000,1,2\n")
    columns.write_text(json.dumps({"columns": {"arrival": "a"}}))
    out = tmp_path / "o.parquet"
    assert run_trace("import", path, "--map", columns, "--map", "arrival=b", "-o", out).code == 0
    assert open_trace(out).first_ns == 1_700_158_000 * SECOND


def test_a_preview_states_every_guess_and_writes_nothing(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    path = tmp_path / "log.csv"
    path.write_text("time,prompt_tokens,completion_tokens,tier\n1700158546680,374,44,gold\n")
    outcome = run_trace("import", path, "--map", "slo_class=tier", "--preview")
    assert outcome.code == 0
    words = " ".join(outcome.out.split())
    assert "milliseconds since 1970, guessed from their size" in words
    assert "input_tokens prompt_tokens guessed from its name" in words
    assert "slo_class tier" in words
    assert "slo_class tier guessed" not in words
    assert "arrival 2023-11-16 18:15:46.68Z" in words
    assert [file.name for file in tmp_path.iterdir()] == ["log.csv"]
    # The same appears on stderr if the trace is written.
    written = run_trace("import", path, "--map", "slo_class=tier", "-o", tmp_path / "o.parquet")
    assert outcome.out in written.err
    assert written.out.startswith(str(tmp_path / "o.parquet"))


def test_a_preview_reads_the_first_rows_only(tmp_path: Path, run_trace: RunTrace) -> None:
    path = tmp_path / "log.csv"
    path.write_text(log(*range(1_700_158_546, 1_700_158_550), "broken"))
    assert run_trace("import", path, "--preview").code == 0
    assert "line 6" in run_trace("import", path, "-o", tmp_path / "o.parquet").err


def test_other_formats_can_be_previewed(tmp_path: Path, run_trace: RunTrace) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(lines({"timestamp": 5, "input_length": 600, "output_length": 1,
                           "hash_ids": [1, 2]}))  # fmt: skip
    outcome = run_trace("import", path, "--preview")
    assert "in the format mooncake" in outcome.out
    assert "2 hashes" in outcome.out
    assert "0.005 s" in outcome.out


@given(data=st.data())
@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_sorting_in_parts_gives_the_order_of_a_stable_sort(
    data: st.DataObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_BATCH_ROWS", data.draw(st.integers(1, 5)))
    monkeypatch.setattr(writer_module, "_PART_BATCHES", data.draw(st.integers(1, 4)))
    times = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=40))
    path = tmp_path / "log.csv"
    path.write_text(log(*(1_700_158_546 + time for time in times)))
    rows, _ = imported(path, sort=True)
    order = sorted(range(len(times)), key=lambda at: times[at])
    assert [row.request_id for row in rows] == [f"log-{at + 1:07d}" for at in order]


def test_a_full_disk_while_sorting_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with closing(sqlite3.connect("")) as database:
        database.execute("PRAGMA max_page_count = 3")
        database.execute("CREATE TABLE stored (request BLOB)")
        with pytest.raises(OSError) as error, writer_module._reported(tmp_path):
            database.execute("INSERT INTO stored VALUES (zeroblob(100000))")
    assert error.value.errno == errno.ENOSPC


def test_columns_that_were_not_chosen_are_named(tmp_path: Path, run_trace: RunTrace) -> None:
    path = tmp_path / "log.csv"
    path.write_text(
        "time,timestamp,prompt_tokens,completion_tokens,slo_class,tier,\n5,1700158546,5,6,a,b,1\n"
    )
    outcome = run_trace("import", path, "--map", "slo_class=tier", "-o", tmp_path / "o")
    assert outcome.code == 0
    assert "note: unused columns were dropped: time, slo_class, (unnamed)\n" in outcome.err


def test_a_preview_names_no_source_of_ids_that_the_log_lacks(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(lines({"time": 1_700_158_546, "prompt_tokens": 5, "completion_tokens": 6}))
    shown = run_trace("import", path, "--preview").out
    assert [line.split() for line in shown.splitlines() if line.startswith(" request_id")] == [
        ["request_id", "log-0000001"]
    ]


@pytest.mark.parametrize("zone", ["+01", "+0100", "+01:00"])
def test_a_zone_can_be_hours_alone_as_postgresql_writes_it(zone: str, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(log(f"2023-11-16 19:15:46.25{zone}"))
    rows, _ = imported(path)
    assert rows[0].timestamp_start_unix_ns == START_NS + SECOND // 4


def test_a_cancellation_can_be_written_as_a_number_or_a_word(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(
        "time,input_tokens,output_tokens,request_canceled\n"
        + "".join(
            f"{1_700_158_546 + at},5,6,{word}\n"
            for at, word in enumerate(["True", "false", "1", "0", ""])
        )
    )
    rows, _ = imported(path)
    assert [row.request_canceled for row in rows] == [True, False, True, False, None]


def test_a_condition_on_a_column_that_no_record_has_is_named(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"ts": 1700000000, "resp": {"code": 200}, "in": 3, "out": 4}\n' * 3)
    maps = ("--map", "arrival=ts,input_tokens=in,output_tokens=out")
    result = run_trace("import", log, *maps, "--only", "code=200", "--out", tmp_path / "t.parquet")
    assert result.code == 64
    assert "no record has a value in the column code of --only" in result.err
    other = run_trace(
        "import", log, *maps, "--only", "resp.code=500", "--out", tmp_path / "t.parquet"
    )
    assert "of --only" not in other.err


REQUEST = '{"ts": 1700000000, "path": "/v1/x", "llm": {"in": 3, "out": 4}}\n'
HEALTH = '{"ts": 1700000000, "path": "/health"}\n'
NESTED = ("--map", "arrival=ts,input_tokens=llm.in,output_tokens=llm.out")


@pytest.mark.parametrize("excluded", [1, 2, 999])
def test_excluded_records_before_the_first_request_need_none_of_its_columns(
    tmp_path: Path, run_trace: RunTrace, excluded: int
) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "t.parquet"
    log.write_text(HEALTH * excluded + REQUEST + HEALTH + REQUEST)
    result = run_trace("import", log, *NESTED, "--only", "path=/v1/*", "--out", out)
    assert result.code == 0, result.err
    assert f"note: {excluded + 1:,} records that --only excludes were skipped" in result.err
    assert pq.read_table(out)["input_tokens"].to_pylist() == [3, 3]


def test_the_line_without_a_mapped_column_is_named(tmp_path: Path, run_trace: RunTrace) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(HEALTH + REQUEST)
    result = run_trace("import", log, *NESTED, "--out", tmp_path / "t.parquet")
    assert result.code == 64
    assert "llm.in for input_tokens, but line 1 only has the columns" in result.err
    assert "such as health checks, are skipped with --only COLUMN=VALUE" in result.err


def test_the_preview_shows_a_mapped_column_without_values(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"ts": 1700000000, "input_tokens": 3, "output_tokens": 4}\n' * 9)
    result = run_trace("import", log, "--map", "arrival=ts,slo_class=tier", "--preview")
    assert result.code == 0
    assert re.search(r"slo_class +tier +no value in the first rows", result.out)


def test_an_error_about_unknown_columns_lists_nested_ones(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"ts": 1700000000, "llm": {"use": {"in": 3, "out": 4}}, "x": {}}\n')
    result = run_trace("import", log, "--map", "arrival=ts", "--preview")
    assert "(columns: ts, llm.use.in, llm.use.out, x)" in result.err


def test_a_preview_in_a_pipe_cuts_no_value(tmp_path: Path, run_trace: RunTrace) -> None:
    log = tmp_path / "log.jsonl"
    name = "a-model-with-a-long-name-of-36-chars"
    log.write_text(
        f'{{"ts": 1700000000.5, "input_tokens": 3, "output_tokens": 4, "model": "{name}"}}\n' * 4
    )
    result = run_trace("import", log, "--preview")
    assert result.out.count(name) == 4
