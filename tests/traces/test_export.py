"""Exports to other tools: the written files, round trips, and notes on lost values."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_traces.exporters.run import export_trace
from goodput_traces.format.reader import open_trace
from goodput_traces.format.schema import Clock, HashSemantics, TraceMetadata, TraceRow
from goodput_traces.format.writer import write_trace
from goodput_traces.importers.base import ImportOptions
from goodput_traces.importers.run import import_trace
from goodput_traces.sample import sample_path

if TYPE_CHECKING:
    from pathlib import Path

    from tests.traces.conftest import MakeRows, RunTrace


BLOCK = 16


@st.composite
def mooncake_rows(draw: st.DrawFn) -> list[TraceRow]:
    """Draw rows that lose nothing in Mooncake's format."""
    times = sorted(draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=8)))
    rows = []
    for at, ms in enumerate(times):
        tokens = draw(st.integers(1, 100))
        hashed = draw(st.booleans())
        blocks = -(-tokens // BLOCK)
        hashes = draw(st.lists(st.integers(0, 2**63 - 1), min_size=blocks, max_size=blocks))
        rows.append(
            TraceRow(
                request_id=f"mooncake-{at + 1:07d}",
                timestamp_start_unix_ns=ms * 1_000_000,
                input_tokens=tokens,
                output_tokens=draw(st.integers(1, 1000)),
                total_hashes=tuple(hashes) if hashed else (),
                block_size=BLOCK if hashed else None,
                provided_session_id=draw(st.none() | st.sampled_from(["a", "b"])),
                delay_ms=draw(st.none() | st.integers(0, 10**6).map(float)),
                priority=draw(st.none() | st.integers(-5, 5)),
            )
        )
    return rows


def back(path: Path, out: Path, form: str, *, block_size: int | None = None) -> list[TraceRow]:
    """Export a trace, import the result, and return its rows."""
    exported = out.with_suffix(".exported")
    export_trace(path, exported, form, overwrite=True)
    options = ImportOptions(block_size=block_size)
    import_trace((exported,), out, form=form, options=options, overwrite=True)
    return list(open_trace(out).rows())


@given(rows=mooncake_rows())
@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_mooncake_export_and_import_is_the_identity(rows: list[TraceRow], tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    metadata = TraceMetadata(clock=Clock.TRACE_RELATIVE, hash_semantics=HashSemantics.LAST_PARTIAL)
    write_trace(path, rows, metadata, overwrite=True)
    assert back(path, tmp_path / "back.parquet", "mooncake", block_size=BLOCK) == rows


def test_baseten_export_and_import_is_the_identity_but_for_prompts(tmp_path: Path) -> None:
    original = open_trace(sample_path())
    rows = back(sample_path(), tmp_path / "back.parquet", "baseten")
    assert [replace(row, prompt=None) for row in rows] == list(original.rows())
    assert open_trace(tmp_path / "back.parquet").metadata == original.metadata


def test_baseten_export_has_what_aiperf_requires(tmp_path: Path) -> None:
    export_trace(sample_path(), tmp_path / "b.parquet", "baseten")
    table = pq.read_table(tmp_path / "b.parquet").to_pylist()
    for line in table:
        assert isinstance(line["timestamp_start_unix_ms"], int)
        assert isinstance(line["prompt"], str)
        assert min(line["total_hashes"] or [0]) >= 0
        assert (line["block_size"] or 1) > 0


def test_generated_prompts_have_one_word_per_token_and_share_prefixes(tmp_path: Path) -> None:
    export_trace(sample_path(), tmp_path / "b.parquet", "baseten")
    rows = list(open_trace(tmp_path / "b.parquet").rows())
    words = [(row.prompt or "").split(" ") for row in rows]
    assert [len(w) for w in words] == [row.input_tokens for row in rows]
    shared = 0
    for (one, ours), (other, theirs) in zip(
        zip(rows, words, strict=True), list(zip(rows, words, strict=True))[1:], strict=False
    ):
        blocks = 0
        for left, right in zip(one.total_hashes, other.total_hashes, strict=False):
            if left != right:
                break
            blocks += 1
        tokens = blocks * (one.block_size or 0)
        shared += blocks
        assert ours[:tokens] == theirs[:tokens]
        assert ours[tokens : tokens + 40] != theirs[tokens : tokens + 40]
    assert shared > 100


def test_a_prompt_of_the_trace_is_exported_as_it_is(tmp_path: Path, make_rows: MakeRows) -> None:
    rows = [replace(row, prompt="a real prompt") for row in make_rows()]
    write_trace(tmp_path / "t.parquet", rows, TraceMetadata())
    result = export_trace(tmp_path / "t.parquet", tmp_path / "b.parquet", "baseten")
    assert list(open_trace(tmp_path / "b.parquet").rows()) == rows
    assert result.notes == ()


def test_mooncake_hashes_cover_every_block_as_aiperf_requires(tmp_path: Path) -> None:
    export_trace(sample_path(), tmp_path / "m.jsonl", "mooncake")
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    for line in lines:
        last_block = line["input_length"] - (len(line["hash_ids"]) - 1) * 64
        assert 0 < last_block <= 64
    # Every row has a unique hash for its last block, so no prefix is shared in addition.
    tails = [line["hash_ids"][-1] for line in lines if line["input_length"] % 64]
    assert len(set(tails)) == len(tails)


def test_stderr_lists_the_values_lost_by_an_export(
    tmp_path: Path, make_rows: MakeRows, run_trace: RunTrace
) -> None:
    rows = [
        replace(row, timestamp_start_unix_ns=row.timestamp_start_unix_ns + 1, prompt="text")
        for row in make_rows()
    ]
    write_trace(tmp_path / "t.parquet", rows, TraceMetadata())
    out = tmp_path / "m.jsonl"
    outcome = run_trace("export", tmp_path / "t.parquet", "--format", "mooncake", "--out", out)
    assert outcome.code == 0
    assert "note: timestamps count from the first arrival; the wall clock is lost\n" in outcome.err
    assert "note: 3 prompts were reduced to their length and hashes\n" in outcome.err
    assert json.loads(out.read_text().splitlines()[1])["timestamp"] == 100
    outcome = run_trace("export", sample_path(), "--format", "mooncake", "--out", out, "--force")
    assert "279 timestamps were rounded down to milliseconds" in outcome.err
    assert "--isl-block-size 64" in outcome.err


def test_only_columns_with_values_are_named_as_lost(
    tmp_path: Path, make_rows: MakeRows, run_trace: RunTrace
) -> None:
    first, *others = make_rows()
    rows = [replace(first, model_name="m", request_type="chat", turn=0), *others]
    write_trace(tmp_path / "t.parquet", rows, TraceMetadata())
    out = tmp_path / "m.jsonl"
    outcome = run_trace("export", tmp_path / "t.parquet", "--format", "mooncake", "--out", out)
    (note,) = (line for line in outcome.err.splitlines() if "which are lost" in line)
    assert {"request_id", "model_name", "request_type", "turn"} <= {*note.replace(",", "").split()}
    assert "org_id" not in note


def test_a_session_relative_trace_is_not_exported(
    tmp_path: Path, make_rows: MakeRows, run_trace: RunTrace
) -> None:
    rows = [replace(row, provided_session_id="s") for row in make_rows()]
    write_trace(tmp_path / "t.parquet", rows, TraceMetadata(clock=Clock.SESSION_RELATIVE))
    for form in ("mooncake", "baseten"):
        out = tmp_path / "out"
        outcome = run_trace("export", tmp_path / "t.parquet", "--format", form, "--out", out)
        assert outcome.code == 64
        assert "the sessions share no clock" in outcome.err
        assert not out.exists()


def test_mooncake_export_rejects_blocks_of_two_sizes(
    tmp_path: Path, make_rows: MakeRows, run_trace: RunTrace
) -> None:
    rows = [
        replace(row, total_hashes=(1,), block_size=size)
        for row, size in zip(make_rows(2), (16, 64), strict=True)
    ]
    write_trace(tmp_path / "t.parquet", rows, TraceMetadata())
    out = tmp_path / "out"
    outcome = run_trace("export", tmp_path / "t.parquet", "--format", "mooncake", "--out", out)
    assert outcome.code == 64
    assert "row 2 has blocks of 64 tokens, but earlier rows have blocks of 16" in outcome.err
    assert [file.name for file in tmp_path.iterdir()] == ["t.parquet"]
