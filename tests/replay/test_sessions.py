"""Follow-ups of sessions: what they follow, their think times, and their storage."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.sessions import follow_ups_of, plan_of_rows, session_row

from goodput_core.errors import InputError
from goodput_core.units import NS_PER_MS
from goodput_replay.runs.files import DiskFullError
from goodput_replay.sessions import _reported, open_follow_ups
from goodput_traces.format.schema import Clock
from goodput_traces.transforms import Window, parse_session_arrivals

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_replay.sessions import FollowUps
    from goodput_traces.format.schema import TraceRow


def followed(follow_ups: FollowUps, requests: int) -> dict[str, tuple[int, float]]:
    """Return predecessor and think time in ms by the request id of each follow-up."""
    return {
        follow_ups.load(turn.number).request_id: (number, turn.think_ns / NS_PER_MS)
        for number in range(requests)
        for turn in follow_ups.after(number)
    }


def links(folder: Path, rows: Iterable[TraceRow], **plan: Any) -> dict[str, tuple[int, float]]:
    rows = list(rows)
    with follow_ups_of(folder, rows, **plan) as follow_ups:
        requests = sum(1 for _ in plan_of_rows(folder, rows, **plan).requests())
        assert follow_ups.summary.starts + follow_ups.summary.follow_ups == requests
        starts = {planned.request_id for planned in follow_ups.starts()}
        found = followed(follow_ups, requests)
        assert len(starts) == follow_ups.summary.starts
        assert starts.isdisjoint(found)
        assert len(found) == len(follow_ups) == follow_ups.summary.follow_ups
        return found


def test_a_follow_up_follows_the_request_before_it_in_its_session(tmp_path: Path) -> None:
    rows = [
        session_row(0, 0, "a", delay_ms=70),
        session_row(1, 10, "b"),
        session_row(2, 20, None),
        session_row(3, 30, "a", delay_ms=5),
        session_row(4, 40, "b", delay_ms=6.5),
        session_row(5, 50, None),
        session_row(6, 60, "a", delay_ms=0),
    ]
    assert links(tmp_path, rows) == {"row-3": (0, 5), "row-4": (1, 6.5), "row-6": (3, 0)}


def test_requests_at_the_same_time_follow_each_other_in_the_order_of_the_trace(
    tmp_path: Path,
) -> None:
    rows = [session_row(0, 5, turn=2), session_row(1, 5, turn=0), session_row(2, 5, turn=1)]
    assert links(tmp_path, rows) == {"row-1": (0, 0), "row-2": (1, 0)}


def test_a_session_id_that_the_source_derived_counts_as_well(tmp_path: Path) -> None:
    rows = [session_row(i, i, None, poor_man_session_id=7) for i in range(2)]
    assert links(tmp_path, rows) == {"row-1": (0, 1)}


def test_think_times_are_recorded_or_from_the_recorded_end_or_from_arrivals(
    tmp_path: Path,
) -> None:
    rows = [
        session_row(0, 0, duration_e2e_ms=100),
        session_row(1, 150, delay_ms=7, duration_e2e_ms=20),
        session_row(2, 200, duration_e2e_ms=400),
        session_row(3, 300),
        session_row(4, 350),
    ]
    with follow_ups_of(tmp_path, rows) as follow_ups:
        assert followed(follow_ups, 5) == {
            "row-1": (0, 7),
            "row-2": (1, 30),
            "row-3": (2, 0),
            "row-4": (3, 50),
        }
        counts = follow_ups.summary
    assert (counts.think_recorded, counts.think_from_ends, counts.think_from_arrivals) == (1, 2, 1)
    assert (counts.starts, counts.follow_ups, counts.overlapping) == (1, 4, 1)


def test_a_parent_is_followed_by_several_requests_and_from_other_sessions(tmp_path: Path) -> None:
    rows = [
        session_row(0, 0, "a"),
        session_row(1, 1, "a", delay_ms=1),
        session_row(2, 2, "a", parent_request_id="row-0", delay_ms=2),
        session_row(3, 3, "b", parent_request_id="row-0", delay_ms=3),
        session_row(4, 4, None, parent_request_id="row-3", delay_ms=4),
        session_row(5, 5, "b", delay_ms=5),
    ]
    assert links(tmp_path, rows) == {
        "row-1": (0, 1),
        "row-2": (0, 2),
        "row-3": (0, 3),
        "row-4": (3, 4),
        "row-5": (3, 5),
    }


def test_a_request_whose_parent_is_not_an_earlier_request_starts_at_its_own_time(
    tmp_path: Path,
) -> None:
    rows = [
        session_row(0, 0),
        session_row(1, 1, parent_request_id="row-1"),
        session_row(2, 2, parent_request_id="row-3"),
        session_row(3, 3, parent_request_id="gone"),
        session_row(4, 4, delay_ms=1),
    ]
    with follow_ups_of(tmp_path, rows) as follow_ups:
        assert followed(follow_ups, 5) == {"row-4": (3, 1)}
        assert [p.scheduled_ns // NS_PER_MS for p in follow_ups.starts()] == [0, 1, 2, 3]
        assert follow_ups.summary.without_parent == 3


def test_the_first_request_of_a_session_in_the_window_starts_at_its_own_time(
    tmp_path: Path,
) -> None:
    rows = [
        session_row(i, 100 * i, delay_ms=1, parent_request_id=f"row-{i - 1}" if i > 1 else None)
        for i in range(5)
    ]
    window = Window(start_ns=150 * NS_PER_MS, end_ns=350 * NS_PER_MS)
    with follow_ups_of(tmp_path, rows, window=window) as follow_ups:
        assert followed(follow_ups, 2) == {"row-3": (0, 1)}
        (start,) = follow_ups.starts()
        assert (start.request_id, start.scheduled_ns) == ("row-2", 50 * NS_PER_MS)
        assert follow_ups.summary.without_parent == 1


def test_a_limit_never_separates_a_follow_up_from_its_predecessor(tmp_path: Path) -> None:
    rows = [session_row(i, i, f"s{i % 3}", delay_ms=i) for i in range(12)]
    assert links(tmp_path, rows, limit=5) == {"row-3": (0, 3), "row-4": (1, 4)}


@pytest.mark.parametrize("scale", [Fraction(1, 3), Fraction(5, 2)])
def test_scaled_rates_keep_and_copy_complete_sessions(tmp_path: Path, scale: Fraction) -> None:
    rows = [session_row(i, i, f"s{i % 10}", delay_ms=3) for i in range(40)]
    with follow_ups_of(tmp_path, rows, rate_scale=scale) as follow_ups:
        assert follow_ups.summary.follow_ups == 3 * follow_ups.summary.starts
        for number in range(4 * follow_ups.summary.starts):
            for turn in follow_ups.after(number):
                copy = follow_ups.load(turn.number).request_id.partition("~")[2]
                other = [p for p in follow_ups.starts() if p.number == number]
                assert all(p.request_id.partition("~")[2] == copy for p in other)


def test_a_speed_shortens_think_times(tmp_path: Path) -> None:
    rows = [
        session_row(0, 0, duration_e2e_ms=40),
        session_row(1, 100, duration_e2e_ms=20),
        session_row(2, 200, delay_ms=9),
        session_row(3, 300),
    ]
    assert links(tmp_path, rows, speed=Fraction(3)) == {
        "row-1": (0, pytest.approx(20, abs=1e-5)),
        "row-2": (1, 3),
        "row-3": (2, pytest.approx(100 / 3, abs=1e-5)),
    }


def test_sessions_without_a_common_clock_start_by_a_process(tmp_path: Path) -> None:
    rows = [session_row(2 * s + t, 50 * t, f"s{s}", delay_ms=4) for s in range(3) for t in range(2)]
    arrivals = parse_session_arrivals("poisson:1/s")
    with follow_ups_of(
        tmp_path, rows, clock=Clock.SESSION_RELATIVE, session_arrivals=arrivals
    ) as follow_ups:
        assert (follow_ups.summary.starts, follow_ups.summary.follow_ups) == (3, 3)


@pytest.mark.parametrize("days", [100, 366])
def test_think_times_of_more_than_a_year_in_one_session_are_rejected(
    days: int, tmp_path: Path
) -> None:
    delay_ms = days * 86_400_000
    rows = [session_row(2 * s + t, 0, f"s{s}", delay_ms=delay_ms) for s in range(5) for t in (0, 1)]
    assert links(tmp_path, rows), "each session waits for less than a year"
    rows = [session_row(n, n, "a", delay_ms=delay_ms) for n in range(5)]
    with pytest.raises(InputError, match="more than a year; correct delay_ms"):
        links(tmp_path, rows)


def test_a_trace_without_follow_ups_is_rejected(tmp_path: Path) -> None:
    rows = [session_row(0, 0, "a"), session_row(1, 1, "b"), session_row(2, 2, None)]
    with pytest.raises(InputError, match=r"no request follows another one.*remove --sessions"):
        links(tmp_path, rows)


ORPHANS = {
    "no request has that id": (
        ["gone", None, "gone", "lost"],
        "row-0 (the first of 3 such requests) has the parent_request_id 'gone', which no request",
    ),
    "the row itself": (
        [None, "row-1", None, None],
        "row-1 has its own id as its parent_request_id; correct",
    ),
    "a later row": (
        ["row-3", None, None, None],
        "row-0 has the parent_request_id 'row-3', which is the id of a later request; correct",
    ),
    "a hostile and long id": (
        ["\x1b[2J" + "x" * 500, None, None, None],
        "row-0 has the parent_request_id '\\x1b[2Jxxx",
    ),
}


@pytest.mark.parametrize(("parents", "text"), ORPHANS.values(), ids=ORPHANS)
def test_requests_without_an_earlier_parent_are_named(
    parents: list[str | None], text: str, tmp_path: Path
) -> None:
    rows = [session_row(i, i, None, parent_request_id=parent) for i, parent in enumerate(parents)]
    with pytest.raises(InputError) as error:
        links(tmp_path, rows)
    assert text in str(error.value)
    assert str(error.value).endswith(", or remove --sessions causal")
    assert len(str(error.value)) < 500


def test_a_stored_follow_up_is_read_back_unchanged(tmp_path: Path) -> None:
    rows = [
        session_row(
            i,
            i,
            total_hashes=(2**63 - 1, -(2**63), 0),
            block_size=16,
            input_tokens=48,
            ttft_target_ms=1.5,
            priority=-3,
            cancel_after_ms=2.25,
            model_name="Ω",
        )
        for i in range(4)
    ]
    plan = plan_of_rows(tmp_path, rows, warmup=2)
    planned = list(plan.requests())
    with open_follow_ups(plan) as follow_ups:
        for number in (3, 1, 2):
            loaded = follow_ups.load(number)
            assert tuple(loaded.prompt.hashes) == planned[number].prompt.hashes
            changed = {"prompt": None}
            assert [getattr(loaded, name) for name in loaded.__slots__ if name not in changed] == [
                getattr(planned[number], name) for name in loaded.__slots__ if name != "prompt"
            ]
        assert [follow_ups.load(n).warmup for n in (1, 2)] == [True, False]


def test_a_full_disk_is_one_sentence() -> None:
    with closing(sqlite3.connect("")) as database:
        database.execute("PRAGMA max_page_count = 3")
        database.execute("CREATE TABLE stored (request BLOB)")
        with pytest.raises(DiskFullError, match=r"disk.*is full.*TMPDIR"), _reported():
            database.execute("INSERT INTO stored VALUES (zeroblob(100000))")


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_links_agree_with_a_plain_search(data: st.DataObject) -> None:
    rows: list[TraceRow] = []
    at_ms = 0
    for number in range(data.draw(st.integers(1, 25))):
        at_ms += data.draw(st.sampled_from([0, 0, 1, 7]))
        parent = data.draw(st.none() | st.integers(-1, 26))
        rows.append(
            session_row(
                number,
                at_ms,
                data.draw(st.sampled_from(["a", "b", None])),
                parent_request_id=None if parent is None else f"row-{parent}",
                delay_ms=data.draw(st.none() | st.integers(0, 5)),
                duration_e2e_ms=data.draw(st.none() | st.integers(0, 5)),
            )
        )
    expected: dict[str, tuple[int, float]] = {}
    for number, row in enumerate(rows):
        earlier = list(enumerate(rows[:number]))
        if row.parent_request_id is not None:
            found = [n for n, other in earlier if other.request_id == row.parent_request_id]
        else:
            found = [
                n
                for n, other in earlier
                if row.session_id is not None and other.session_id == row.session_id
            ]
        if found:
            before = rows[found[-1]]
            gap_ns = row.timestamp_start_unix_ns - before.timestamp_start_unix_ns
            think_ms = gap_ns / NS_PER_MS - (before.duration_e2e_ms or 0)
            think_ms = max(0, think_ms) if row.delay_ms is None else row.delay_ms
            expected[row.request_id] = (found[-1], think_ms)
    with TemporaryDirectory() as folder:
        if expected:
            assert links(Path(folder), rows) == expected
        else:
            with pytest.raises(InputError, match="no request follows"):
                links(Path(folder), rows)
