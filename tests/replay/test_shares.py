"""Every request of a plan belongs to exactly one share, and a session is never divided."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.replay.sending.builders import make_planned

from goodput_replay.plan import PlanStats, choose_workers
from goodput_replay.shares import ALL, Share, parse_shard

if TYPE_CHECKING:
    from goodput_replay.plan import PlannedRequest

SESSIONS = st.text(max_size=6)


@st.composite
def requests(draw: st.DrawFn) -> list[PlannedRequest]:
    """Requests with unique ids, of which some have a session."""
    ids = draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=40))
    return [make_planned(request_id=name, session_id=draw(SESSIONS)) for name in ids]


@given(requests(), st.integers(1, 9), st.lists(st.integers(1, 4), min_size=9, max_size=9))
def test_each_request_is_in_one_share_and_sessions_stay_together(
    plan: list[PlannedRequest], shards: int, workers: list[int]
) -> None:
    """Each shard is divided again, among a number of workers of its own."""
    held: Counter[str] = Counter()
    of_session: defaultdict[str, set[Share]] = defaultdict(set)
    for index in range(shards):
        shard = Share(index=index, count=shards)
        for worker in range(workers[index]):
            part = shard.part(worker, workers[index])
            for request in filter(part.holds, plan):
                assert shard.holds(request)
                held[request.request_id] += 1
                if request.session_id:
                    of_session[request.session_id].add(part)
    assert held == {request.request_id: 1 for request in plan}
    assert all(len(parts) == 1 for parts in of_session.values())


@given(requests(), st.integers(0, 6))
def test_a_share_does_not_depend_on_the_other_requests(
    plan: list[PlannedRequest], index: int
) -> None:
    share = Share(index=index, count=7)
    alone = [request for one in plan for request in filter(share.holds, [one])]
    assert list(filter(share.holds, plan)) == alone


def test_shares_are_the_same_on_every_machine_and_in_every_version() -> None:
    share = Share(index=1, count=4)
    held = [n for n in range(40) if share.holds(make_planned(n))]
    assert held == [18, 19, 24, 29, 36]
    assert all(ALL.holds(make_planned(n)) for n in range(40))


def test_shares_have_similar_sizes() -> None:
    shares = [Share(index=index, count=8) for index in range(8)]
    sizes = [sum(share.holds(make_planned(n)) for n in range(4000)) for share in shares]
    assert sum(sizes) == 4000
    assert all(400 < size < 600 for size in sizes), sizes


@pytest.mark.parametrize(
    "text",
    ["", "1", "0/2", "3/2", "1/0", "1/1001", "-1/2", "1/2/3", "a/b", "1.0/2", "\u0661/\u0662"],
)
def test_what_is_not_a_shard_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a shard; write i/n, such as 2/4"):
        parse_shard(text)


def test_a_shard_is_counted_from_one() -> None:
    assert parse_shard("2/4") == Share(index=1, count=4)
    assert parse_shard("1/1") == ALL


@pytest.mark.parametrize(
    ("peak", "tokens", "shards", "cpus", "workers"),
    [
        pytest.param(5, 200, 1, 16, 1, id="a few requests"),
        pytest.param(1000, 16, 1, 16, 1, id="one process is enough"),
        pytest.param(1000, 400, 1, 16, 13, id="many tokens"),
        pytest.param(1000, 400, 4, 16, 4, id="four machines"),
        pytest.param(1000, 400, 1, 2, 1, id="two processors: one records"),
        pytest.param(1000, 400, 1, 1, 1, id="one processor"),
        pytest.param(100_000, 400, 1, 64, 63, id="more than the machine can send"),
    ],
)
def test_the_busiest_second_and_the_processors_choose_the_number_of_workers(
    peak: int, tokens: int, shards: int, cpus: int, workers: int
) -> None:
    stats = PlanStats(rows=10, output_tokens=10 * tokens, peak_1s=peak)
    assert choose_workers(stats, shards, cpus) == workers


def test_a_pod_of_an_indexed_job_sends_the_shard_of_its_number() -> None:
    assert parse_shard("job/3", {"JOB_COMPLETION_INDEX": "2"}) == Share(index=2, count=3)


@pytest.mark.parametrize("index", [None, "", "-1", "one", "3"])
def test_a_number_outside_the_job_is_rejected(index: str | None) -> None:
    with pytest.raises(ValueError, match=r"write i/n"):
        parse_shard("job/3", {} if index is None else {"JOB_COMPLETION_INDEX": index})
