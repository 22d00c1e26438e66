"""BurstGPT, Bailian and vLLM's timed_trace, with the rows that their documentation shows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from goodput_traces.format.reader import Trace, open_trace
from goodput_traces.format.schema import Clock, HashSemantics
from goodput_traces.importers import bailian as bailian_module

if TYPE_CHECKING:
    from pathlib import Path

    from tests.traces.conftest import CommandResult, RunTrace

S = 1_000_000_000
BURSTGPT_1 = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,230,1317,Conversation log\n"
    "118,GPT-4,417,276,693,Conversation log\n"
    "120,GPT-4,300,0,300,API log\n"
)
BURSTGPT_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log\n"
    "19440161.0,,2,ChatGPT,36,29,65,API log\n"
)


def chat(number: int, parent: int, at_s: float, tokens: int, turn: int, first_hash: int = 0) -> str:
    hashes = list(range(first_hash, first_hash + -(-tokens // 16)))
    record = {
        "chat_id": number, "parent_chat_id": parent, "timestamp": at_s, "input_length": tokens,
        "output_length": 132, "type": "text", "turn": turn, "hash_ids": hashes,
    }  # fmt: skip
    return json.dumps(record) + "\n"


def run(
    tmp_path: Path, run_trace: RunTrace, content: str, *options: str
) -> tuple[CommandResult, Trace]:
    path, out = tmp_path / "source", tmp_path / "out.parquet"
    path.write_text(content)
    outcome = run_trace("import", path, "--out", out, "--force", *options)
    assert outcome.code == 0, outcome.err
    return outcome, open_trace(out)


def test_burstgpt_counts_seconds_and_keeps_failed_requests(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    outcome, trace = run(tmp_path, run_trace, BURSTGPT_1)
    assert "in the format burstgpt" in outcome.out
    assert "note: zero output tokens were replaced with 1 in 1 rows" in outcome.err
    assert "was not tried on a published file" in outcome.err
    rows = list(trace.rows())
    assert [row.timestamp_start_unix_ns // S for row in rows] == [5, 45, 118, 120]
    assert [(row.input_tokens, row.output_tokens) for row in rows][::3] == [(472, 18), (300, 1)]
    assert (rows[3].model_name, rows[3].request_type) == ("GPT-4", "API log")
    assert trace.metadata.clock is Clock.TRACE_RELATIVE
    assert trace.metadata.timestamp_resolution_ns == S


def test_later_parts_of_burstgpt_have_sessions_and_durations(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    _, trace = run(tmp_path, run_trace, BURSTGPT_3, "--map", "slo_class=Log Type")
    first, second = trace.rows()
    assert first.session_id == "1722ac82-0a46-4bf0-aa08-89794e7a2b3f"
    assert first.duration_e2e_ms == 43_000
    assert first.slo_class == "Conversation log"
    assert second.session_id is None
    assert second.timestamp_start_unix_ns - first.timestamp_start_unix_ns == 51 * S


def test_conditions_select_rows_of_published_formats(tmp_path: Path, run_trace: RunTrace) -> None:
    _, trace = run(tmp_path, run_trace, BURSTGPT_1, "--only", "Log Type=API*")
    assert trace.num_rows == 1


def test_bailian_links_the_chats_of_a_session(tmp_path: Path, run_trace: RunTrace) -> None:
    content = (
        chat(159, -1, 61.114, 521, 1)
        + chat(160, 159, 62.5, 700, 2)
        + chat(161, -1, 62.5, 32, 1, first_hash=90)
        + chat(162, 160, 80.25, 900, 3)
        + chat(163, 12, 81.0, 40, 4, first_hash=70)
    )
    outcome, trace = run(tmp_path, run_trace, content)
    assert "in the format bailian" in outcome.out
    rows = {row.request_id: row for row in trace.rows()}
    assert [row.session_id for row in rows.values()] == ["159", "159", "161", "159", "12"]
    assert [row.turn for row in rows.values()] == [0, 1, 0, 2, 3]
    parents = [row.parent_request_id for row in rows.values()]
    assert parents == [None, "159", None, "160", None]
    assert rows["159"].timestamp_start_unix_ns == 61_114_000_000
    assert rows["160"].total_hashes[:33] == rows["159"].total_hashes
    assert {row.block_size for row in rows.values()} == {16}
    assert trace.metadata.hash_semantics is HashSemantics.LAST_PARTIAL
    assert trace.metadata.timestamp_resolution_ns == 1_000_000


def test_bailian_remembers_a_limited_number_of_chats(
    tmp_path: Path, run_trace: RunTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bailian_module, "_MAX_CHATS", 2)
    content = "".join(
        chat(number, parent, number, 16, 1)
        for number, parent in [(1, -1), (2, 1), (3, 2), (4, 1), (5, 4)]
    )
    _, trace = run(tmp_path, run_trace, content)
    assert [row.session_id for row in trace.rows()] == ["1", "1", "1", "1", "1"]
    assert [row.parent_request_id for row in trace.rows()] == [None, "1", "2", None, "4"]


def test_timed_traces_count_seconds_unless_a_map_names_another_unit(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    line = '{"timestamp": 1500, "input_length": 40, "output_length": 7, "hash_ids": [1, 2, 3]}\n'
    _, trace = run(tmp_path, run_trace, line, "--format", "timed_trace")
    row = next(trace.rows())
    assert row.timestamp_start_unix_ns == 1500 * S
    assert (row.input_tokens, row.output_tokens, row.block_size) == (40, 7, 16)
    options = ("--format", "timed_trace", "--map", "arrival=timestamp:ms", "--block-size", "20")
    _, trace = run(tmp_path, run_trace, line, *options)
    row = next(trace.rows())
    assert (row.timestamp_start_unix_ns, row.block_size) == (3 * S // 2, 20)
    assert trace.metadata.hash_semantics is HashSemantics.UNSPECIFIED


@pytest.mark.parametrize(
    ("tokens", "hashes", "expected"),
    [
        ([32, 48], [2, 3], HashSemantics.FULL_BLOCKS),
        ([40, 48], [2, 3], HashSemantics.FULL_BLOCKS),
        ([40, 48], [3, 3], HashSemantics.LAST_PARTIAL),
        ([40, 40], [2, 3], HashSemantics.UNSPECIFIED),
        ([40], [5], HashSemantics.UNSPECIFIED),
        ([40, 40], [0, 3], HashSemantics.LAST_PARTIAL),
        ([40], [0], HashSemantics.NONE),
    ],
)
def test_the_blocks_with_hashes_follow_from_their_number(
    tokens: list[int],
    hashes: list[int],
    expected: HashSemantics,
    tmp_path: Path,
    run_trace: RunTrace,
) -> None:
    content = "".join(
        json.dumps(
            {"timestamp": at, "input_length": length, "output_length": 1,
             "hash_ids": list(range(count))}
        )
        + "\n"
        for at, (length, count) in enumerate(zip(tokens, hashes, strict=True))
    )  # fmt: skip
    _, trace = run(tmp_path, run_trace, content, "--format", "timed_trace")
    assert trace.metadata.hash_semantics is expected


def test_a_missing_column_of_a_named_format_is_rejected(
    tmp_path: Path, run_trace: RunTrace
) -> None:
    path = tmp_path / "source"
    path.write_text(BURSTGPT_1.replace("Response tokens", "Reply"))
    outcome = run_trace("import", path, "-o", tmp_path / "o", "--format", "burstgpt")
    assert outcome.code == 64
    assert "columns are missing: Response tokens" in outcome.err
    path.write_text('{"timestamp": 1, "input_length": 40}\n')
    outcome = run_trace("import", path, "-o", tmp_path / "o", "--format", "timed_trace")
    assert outcome.code == 64
    assert "line 1, column output_length: the value is missing" in outcome.err
