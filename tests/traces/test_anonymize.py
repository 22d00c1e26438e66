"""`goodput trace anonymize`: what is hidden, what stays, and what of it can be linked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_traces.anonymize import anonymize_trace
from goodput_traces.describe import describe
from goodput_traces.format.reader import open_trace
from goodput_traces.format.schema import Clock, TraceMetadata, TraceRow
from goodput_traces.format.writer import write_trace
from goodput_traces.sample import sample_path

if TYPE_CHECKING:
    from pathlib import Path

    from tests.traces.conftest import RunTrace

KEY = b"k" * 32
SECRETS = ("alice", "acme", "swordfish")

NAMES = st.sampled_from(
    ["acme-1", "acme-2", "alice", "ä\ud800".encode("utf-8", "replace").decode()]
)


def secret_row(at: int, **values: Any) -> TraceRow:
    """Make a row all of whose texts have a secret."""
    row = TraceRow(
        request_id=f"alice-{at}",
        timestamp_start_unix_ns=1_700_000_000_000_000_000 + at,
        input_tokens=40,
        output_tokens=5,
        prompt="the password is swordfish",
        output_text="swordfish it is",
        total_hashes=(11, 12 + at),
        block_size=16,
        provided_session_id="alice@acme",
        parent_request_id=f"alice-{at - 1}" if at else None,
        org_id="acme",
        slo_class="chat",
        model_name="llama",
    )
    return replace(row, **values)


def write(path: Path, rows: list[TraceRow], clock: Clock = Clock.ABSOLUTE) -> Path:
    write_trace(path, rows, TraceMetadata(source="log of acme", clock=clock), overwrite=True)
    return path


def read(path: Path) -> list[TraceRow]:
    return list(open_trace(path).rows())


def test_no_text_and_no_id_of_the_source_is_in_the_file(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    source = write(tmp_path / "acme.parquet", [secret_row(at) for at in range(3)])
    result = run_trace("anonymize", source, "--out", tmp_path / "shared.parquet")
    assert result.code == 0
    table = pq.read_table(tmp_path / "shared.parquet")
    content = f"{table.to_pylist()} {table.schema.metadata}"
    assert not [secret for secret in SECRETS if secret in content]
    assert not [secret for secret in SECRETS if secret in result.out + result.err]
    assert "11" not in [
        str(one) for row in read(tmp_path / "shared.parquet") for one in row.total_hashes
    ]


def test_a_trace_is_not_replaced_with_its_anonymous_copy(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    source = write(tmp_path / "acme.parquet", [secret_row(0)])
    result = run_trace("anonymize", source, "--out", source, "--force")
    assert result.code == 64
    assert "this is also the file to read" in result.err
    assert read(source)[0].org_id == "acme"


@given(
    data=st.lists(
        st.tuples(NAMES, st.none() | NAMES, st.lists(st.integers(-5, 5), max_size=4)),
        min_size=1,
        max_size=8,
    )
)
@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_equal_ids_stay_equal_and_different_ids_stay_different(
    data: list[tuple[str, str | None, list[int]]], tmp_path: Path
) -> None:
    rows = [
        secret_row(
            at,
            org_id=org,
            provided_session_id=session,
            total_hashes=tuple(hashes),
            poor_man_session_id=len(hashes),
            block_size=16 if hashes else None,
        )
        for at, (org, session, hashes) in enumerate(data)
    ]
    out = tmp_path / "out.parquet"
    anonymize_trace(write(tmp_path / "in.parquet", rows), out, key=KEY, overwrite=True)
    shared = read(out)

    def pairs(name: str) -> set[tuple[object, object]]:
        return {(getattr(a, name), getattr(b, name)) for a, b in zip(rows, shared, strict=True)}

    for name in ("org_id", "provided_session_id", "request_id", "poor_man_session_id"):
        seen = pairs(name)
        assert len({a for a, _ in seen}) == len({b for _, b in seen}) == len(seen)
    blocks = {
        pair
        for a, b in zip(rows, shared, strict=True)
        for pair in zip(a.total_hashes, b.total_hashes, strict=True)
    }
    assert len({a for a, _ in blocks}) == len({b for _, b in blocks}) == len(blocks)
    parents = {row.request_id: row.parent_request_id for row in shared}
    assert [parents[row.request_id] for row in shared[1:]] == [
        row.request_id for row in shared[:-1]
    ]


def test_a_replay_sees_the_same_load(tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    anonymize_trace(sample_path(), out, key=None)
    before, after = describe(open_trace(sample_path())), describe(open_trace(out))
    assert replace(after, metadata=before.metadata) == before


def test_ids_agree_between_two_traces_with_one_key_and_not_with_another(tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", [secret_row(0)])
    ids = []
    for at, key in enumerate((KEY, KEY, b"another key of 32 bytes for test", None, None)):
        anonymize_trace(source, tmp_path / f"{at}.parquet", key=key)
        row = read(tmp_path / f"{at}.parquet")[0]
        ids.append((row.request_id, row.provided_session_id, row.org_id, row.total_hashes))
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4


def test_the_id_of_a_session_does_not_show_that_it_is_also_an_organisation(tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", [secret_row(0, org_id="x", provided_session_id="x")])
    anonymize_trace(source, tmp_path / "out.parquet", key=KEY)
    row = read(tmp_path / "out.parquet")[0]
    assert row.org_id != row.provided_session_id


def test_relative_times_hide_the_date_and_keep_the_gaps(tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", [secret_row(at * at) for at in range(4)])
    anonymize_trace(source, tmp_path / "out.parquet", key=KEY, relative_times=True)
    assert [row.timestamp_start_unix_ns for row in read(tmp_path / "out.parquet")] == [0, 1, 4, 9]
    assert open_trace(tmp_path / "out.parquet").metadata.clock is Clock.TRACE_RELATIVE


def test_sessions_without_a_common_clock_are_sorted_by_their_new_ids(tmp_path: Path) -> None:
    rows = [
        secret_row(at, request_id=f"{name}{at}", provided_session_id=name)
        for name in "abcdefgh"
        for at in range(3)
    ]
    source = write(tmp_path / "in.parquet", rows, Clock.SESSION_RELATIVE)
    anonymize_trace(source, tmp_path / "out.parquet", key=KEY, relative_times=True)
    shared = read(tmp_path / "out.parquet")  # the reader rejects a wrong order
    assert len(shared) == len(rows)
    assert sorted(row.timestamp_start_unix_ns for row in shared) == sorted(
        row.timestamp_start_unix_ns for row in rows
    )
    assert [path.name for path in tmp_path.iterdir() if "unsorted" in path.name] == []


def test_columns_can_be_dropped_and_names_that_stay_are_shown(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    source = write(tmp_path / "in.parquet", [secret_row(0)])
    out = tmp_path / "out.parquet"
    result = run_trace(
        "anonymize", source, "-o", out, "--drop", "slo_class", "--drop", "total_hashes"
    )
    row = read(out)[0]
    assert (row.slo_class, row.total_hashes, row.block_size, row.model_name) == (
        None,
        (),
        None,
        "llama",
    )
    assert "model_name was kept: llama; leave the column out with --drop model_name" in result.err
    assert "slo_class" not in result.err


def test_a_lost_prefix_structure_is_counted(tmp_path: Path, run_trace: RunTrace) -> None:
    rows = [secret_row(0), secret_row(1, total_hashes=(), block_size=None)]
    source = write(tmp_path / "in.parquet", rows)
    result = run_trace("anonymize", source, "-o", tmp_path / "out.parquet")
    assert "the texts of 2 rows were removed" in result.err
    assert "1 of these rows have no hashes" in result.err


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read (No such file or directory); check --key-file"),
        (b"short\n", "a key has 16 to 4096 bytes"),
        (b"0123456789abcde \n", "a key has 16 to 4096 bytes"),
        (b"x" * 5000, "a key has 16 to 4096 bytes"),
        (b"0" * 16, "the key repeats so few characters"),
        (b"abcab" * 12, "the key repeats so few characters"),
    ],
)
def test_a_bad_key_file_is_named_and_nothing_is_written(
    content: bytes | None, problem: str, tmp_path: Path, run_trace: RunTrace
) -> None:
    key = tmp_path / "trace.key"
    if content is not None:
        key.write_bytes(content)
    out = tmp_path / "out.parquet"
    result = run_trace("anonymize", "sample", "-o", out, "--key-file", key)
    assert result.code == 64
    assert f"trace.key: {problem}" in result.err
    assert not out.exists()


def test_the_licence_is_kept_and_named(tmp_path: Path, run_trace: RunTrace) -> None:
    result = run_trace("anonymize", "sample", "-o", tmp_path / "out.parquet")
    licence = open_trace(tmp_path / "out.parquet").metadata.licence
    assert licence == open_trace(sample_path()).metadata.licence
    assert f"the licence was kept: {licence}\n" in result.err


def test_a_key_file_with_and_without_a_final_newline_is_the_same_key(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    for name, end in (("a", ""), ("b", "\n")):
        (tmp_path / f"{name}.key").write_text("0123456789abcdef" + end)
        run_trace(
            "anonymize",
            "sample",
            "-o",
            tmp_path / f"{name}.parquet",
            "--key-file",
            tmp_path / f"{name}.key",
        )
    assert read(tmp_path / "a.parquet") == read(tmp_path / "b.parquet")


def test_sessions_that_share_no_clock_keep_their_ids(tmp_path: Path, run_trace: RunTrace) -> None:
    source = write(tmp_path / "in.parquet", [secret_row(0)], Clock.SESSION_RELATIVE)
    out = tmp_path / "out.parquet"
    result = run_trace("anonymize", source, "-o", out, "--drop", "provided_session_id")
    assert result.code == 64
    assert "every row needs its session" in result.err
    assert not out.exists()


def test_an_existing_file_stays_without_force(tmp_path: Path, run_trace: RunTrace) -> None:
    out = tmp_path / "out.parquet"
    out.write_text("mine")
    assert run_trace("anonymize", "sample", "-o", out).code == 64
    assert out.read_text() == "mine"
    assert run_trace("anonymize", "sample", "-o", out, "--force").code == 0
