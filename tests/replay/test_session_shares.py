"""Causal sessions that several processes and machines divide: each session is on one of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.sessions import plan_of_rows, session_row
from tests.replay.sending.conftest import trace_of
from tests.replay.sending.stand_ins import DONE, StandIn, finish, running, tokens, usage
from tests.replay.test_merge import replay

from goodput_core.units import NS_PER_MS
from goodput_replay.merge import merge_runs
from goodput_replay.runs.record_rows import read_judged
from goodput_replay.runs.summary import read_summary
from goodput_replay.sessions import open_follow_ups
from goodput_replay.shares import ALL, Share

if TYPE_CHECKING:
    from tests.replay.sending.builders import WriteTrace

    from goodput_replay.sessions import FollowUps
    from goodput_traces.format.schema import TraceRow

__all__ = ["trace_of"]


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRow]:
    """Rows of a few sessions, with parents in any session, later ones, and unknown ones."""
    rows = []
    for number in range(draw(st.integers(1, 30))):
        parent = draw(st.none() | st.integers(-1, 31))
        rows.append(
            session_row(
                number,
                10 * number,
                draw(st.sampled_from(["a", "b", "c", "d", "e", None])),
                parent_request_id=None if parent is None else f"row-{parent}",
            )
        )
    # At least one follow-up, without which a plan is rejected.
    return [*rows, session_row(98, 1000, "last"), session_row(99, 1001, "last")]


def sent_by(follow_ups: FollowUps) -> list[int]:
    """Return the positions of the requests that a sender sends: its starts, and what follows."""
    numbers = [planned.number for planned in follow_ups.starts()]
    for number in numbers:
        for follow_up in follow_ups.after(number):
            assert follow_ups.load(follow_up.number).number == follow_up.number
            numbers.append(follow_up.number)
    return numbers


@given(rows=traces(), shards=st.integers(1, 4), workers=st.integers(1, 3), warmup=st.integers(0, 5))
@settings(max_examples=examples(80), deadline=None)
def test_the_shares_have_all_requests_once_and_no_session_is_split(
    rows: list[TraceRow], shards: int, workers: int, warmup: int
) -> None:
    with TemporaryDirectory() as folder, ExitStack() as stack:
        plan = plan_of_rows(Path(folder), rows, warmup=min(warmup, len(rows) - 1))
        planned = list(plan.requests())
        whole = stack.enter_context(open_follow_ups(plan))
        sent: Counter[int] = Counter()
        places: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
        for index in range(shards):
            shard = Share(index=index, count=shards)
            counted = stack.enter_context(open_follow_ups(plan, shard, stored=False))
            own: list[int] = []
            for worker in range(workers):
                part = shard.part(worker, workers)
                follow_ups = stack.enter_context(open_follow_ups(plan, part))
                assert follow_ups.summary == whole.summary
                mine = sent_by(follow_ups)
                assert len(mine) == follow_ups.own_rows
                own += mine
                for number in mine:
                    if planned[number].session_id:
                        places[planned[number].session_id].add((index, worker))
            assert counted.own_rows == len(own)
            assert counted.own_warmup_rows == sum(planned[number].warmup for number in own)
            sent.update(own)
        assert sent == Counter(range(len(rows)))
        assert all(len(found) == 1 for found in places.values())


def test_a_process_stores_only_the_follow_ups_that_it_sends(tmp_path: Path) -> None:
    rows = [session_row(i, i, f"s{i % 40}") for i in range(400)]
    plan = plan_of_rows(tmp_path, rows)
    sizes = []
    for share in (ALL, *(Share(index=index, count=4) for index in range(4))):
        with open_follow_ups(plan, share) as follow_ups:
            sizes.append(follow_ups.stored_bytes)
    assert sum(sizes[1:]) == sizes[0]
    assert max(sizes[1:]) < sizes[0] / 2
    with open_follow_ups(plan, stored=False) as follow_ups:
        assert follow_ups.stored_bytes == 0


@pytest.mark.slow
async def test_merged_shards_of_causal_sessions_are_the_undivided_run(
    trace_of: WriteTrace, tmp_path: Path
) -> None:
    # Sessions s0 to s9 in three turns; every other one goes on in a session of its own.
    rows = [session_row(i, 40 * i, f"s{i}", output_tokens=4) for i in range(10)]
    rows += [
        session_row(
            10 * turn + i,
            60_000 * turn + i,
            f"t{i}" if i % 2 else f"s{i}",
            parent_request_id=f"row-{i}" if i % 2 and turn == 1 else None,
            delay_ms=150,
            output_tokens=4,
        )
        for turn in (1, 2)
        for i in range(10)
    ]
    trace = trace_of(rows)
    answer = lambda count: [*tokens(count), finish(), usage(count), DONE]  # noqa: E731
    async with running(StandIn(answer=answer)) as url:
        start_s = int(time.time()) + 15
        common = ["--trace", trace, "--target", url, "--ttft", "5s", "--tpot", "5s"]
        common += ["--objective", "90%", "--start-at", start_s, "--salt", "x", "--warmup", 3]
        common += ["--sessions", "causal"]
        ended = await asyncio.gather(
            replay(tmp_path, *common, "--shard", "1/2", "--out", "one"),
            replay(tmp_path, *common, "--shard", "2/2", "--out", "two", "--workers", "2"),
        )
    assert {code for code, _ in ended} <= {0, 3}, ended  # a busy test machine can be late
    merged = merge_runs([tmp_path / "two", tmp_path / "one"], tmp_path / "merged")
    found = list(read_judged(tmp_path / "merged"))
    records = {row.record.request_id: row.record for row in found}
    assert set(records) == {f"row-{i}" for i in range(30)}
    assert len(found) == 30
    assert sum(row.warmup for row in found) == 3
    for i in range(10):
        chain = [records[f"row-{10 * turn + i}"] for turn in range(3)]
        assert len({record.sender for record in chain}) == 1
        for before, after in pairwise(chain):
            assert before.end_ns is not None
            assert after.scheduled_ns == before.end_ns + 150 * NS_PER_MS
    judged = [row.record.scheduled_ns for row in found if not row.warmup]
    assert merged.window.start_s == round(min(judged) / 1e9, 6)
    span_ns = max(1_000_000_000, max(judged) + 1 - min(judged))
    assert abs(merged.window.length_s * 1e9 - span_ns) < 2000
    assert merged.window.rows_planned == merged.window.rows_sent == 27
    assert merged.run.sessions is not None
    assert merged.run.sessions.follow_ups == 20
    parts = [read_summary(tmp_path / name) for name in ("one", "two")]
    assert sum(part.window.rows_planned for part in parts) == 27
    assert all(part.verdict.reason == "Shard" or not part.validity.valid for part in parts)
