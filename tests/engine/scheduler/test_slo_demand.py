"""The demand of requests for KV memory and for places in the batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_engine.scheduler.policies.slo.demand import (
    Held,
    PoolDemand,
    PoolQueue,
    PromptDelay,
    Stay,
)


def _none(until_ns: float) -> float:
    return 0.0


def _fits(pool: PoolDemand, new: Stay, *, blocks: int, places: int) -> bool:
    return pool.fits(new, blocks=blocks, places=places, reserved=_none, reserved_places=_none)


def _fit(stays: list[tuple[int, int, int]], *, blocks: int, places: int = 100) -> bool:
    *others, new = (
        Stay(float(latest), float(length), float(held)) for latest, length, held in stays
    )
    return _fits(PoolDemand(others), new, blocks=blocks, places=places)


@pytest.mark.parametrize(
    ("stays", "fits"),
    [
        ([(0, 10, 10)], True),
        ([(0, 10, 5), (0, 10, 5)], True),
        ([(0, 10, 5), (0, 10, 6)], False),
        ([(0, 10, 10), (10, 10, 10)], True),
        ([(0, 10, 10), (5, 10, 10)], False),
        ([(10, 10, 20)], True),
        ([(10, 10, 21)], False),
    ],
    ids=[
        "alone",
        "both at once",
        "too many blocks at once",
        "one after the other",
        "the second has to start too early",
        "what was free before counts",
        "more than there was until its end",
    ],
)
def test_the_demand_until_each_time_is_at_most_the_pool(
    stays: list[tuple[int, int, int]], fits: bool
) -> None:
    assert _fit(stays, blocks=10) is fits


def test_places_are_a_limit_of_their_own() -> None:
    stays = [(0, 10, 1)] * 3
    assert _fit(stays, blocks=100, places=3)
    assert not _fit(stays, blocks=100, places=2)


@pytest.mark.parametrize("kept", ["reserved", "reserved_places"])
def test_memory_and_places_are_kept_for_others(kept: str) -> None:
    stay = Stay(0.0, 10.0, 5.0)

    def fits(rate: float) -> bool:
        reserved = {"reserved": _none, "reserved_places": _none}
        reserved[kept] = lambda until_ns: rate * until_ns
        return PoolDemand(()).fits(stay, blocks=10, places=6, **reserved)

    assert fits(5)
    assert not fits(6)


_STAYS = st.lists(
    st.tuples(st.integers(0, 15), st.integers(0, 15), st.integers(0, 20)), min_size=1, max_size=8
)


@given(stays=_STAYS, blocks=st.integers(1, 40), places=st.integers(1, 8))
def test_stays_fit_if_a_count_at_every_time_finds_room(
    stays: list[tuple[int, int, int]], blocks: int, places: int
) -> None:
    block_time = place_time = 0
    fits = True
    for at in range(31):
        held = [blocks for latest, length, blocks in stays if latest <= at < latest + length]
        block_time += sum(held)
        place_time += len(held)
        fits &= block_time <= blocks * (at + 1) and place_time <= places * (at + 1)
    assert _fit(stays, blocks=blocks, places=places) is fits


@given(stays=_STAYS, spare_blocks=st.integers(0, 5), spare_places=st.integers(0, 2))
def test_requests_that_fit_all_at_once_fit_whenever_they_start(
    stays: list[tuple[int, int, int]], spare_blocks: int, spare_places: int
) -> None:
    blocks = sum(held for _, _, held in stays) + spare_blocks
    assert _fit(stays, blocks=blocks, places=len(stays) + spare_places)


@given(stays=_STAYS, blocks=st.integers(1, 40), places=st.integers(1, 8))
def test_requests_fit_exactly_as_if_all_were_known_from_the_start(
    stays: list[tuple[int, int, int]], blocks: int, places: int
) -> None:
    *others, new = (Stay(*map(float, stay)) for stay in stays)
    pool_demand = PoolDemand(others[::2])
    for other in others[1::2]:
        pool_demand.add(other)
    fits = _fits(pool_demand, new, blocks=blocks, places=places)
    assert fits is _fit(stays, blocks=blocks, places=places)


def test_of_many_requests_the_demand_is_compared_at_some_times() -> None:
    many = [Stay(float(i), 50.0, 1.0) for i in range(1000)]
    new = Stay(0.0, 1000.0, 1.0)
    assert _fits(PoolDemand(many), new, blocks=60, places=1000)
    assert not _fits(PoolDemand(many), new, blocks=45, places=1000)


def _waiting(stays: list[tuple[int, int, int]]) -> list[tuple[int, Stay]]:
    return [(rid, Stay(*map(float, stay))) for rid, stay in enumerate(stays)]


def _late_starts(
    held: list[tuple[int, int]], waiting: list[tuple[int, int, int]], *, blocks: int, places: int
) -> set[int]:
    """Add up the blocks of all requests at every end."""
    used = [(0, end, size) for end, size in held]
    late, now = set(), 0
    for rid, (latest, length, size) in enumerate(waiting):
        for at in sorted({now, *(end for _, end, _ in used if now < end <= latest)}):
            now = at
            active = [held for start, end, held in used if start <= at < end]
            if at <= latest and sum(active) + size <= blocks and len(active) < places:
                used.append((at, at + length, size))
                break
        else:
            late.add(rid)
    return late


@given(
    held=st.lists(st.tuples(st.integers(1, 15), st.integers(1, 9)), max_size=4),
    waiting=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 15), st.integers(1, 20)), max_size=6
    ),
    spare=st.integers(0, 20),
    places=st.integers(4, 8),
)
def test_a_request_starts_when_the_blocks_and_a_place_are_free_and_not_before_others(
    held: list[tuple[int, int]],
    waiting: list[tuple[int, int, int]],
    spare: int,
    places: int,
) -> None:
    blocks = sum(size for _, size in held) + spare
    running = [Held(float(end), float(size), 0.0) for end, size in held]
    queue = PoolQueue(running, blocks=blocks, places=places)
    late = _late_starts(held, waiting, blocks=blocks, places=places)
    assert queue.late(_waiting(waiting)) == late
    # The same if some of the running requests started later.
    some = PoolQueue(running[::2], blocks=blocks, places=places)
    started = [Stay(0.0, float(end), float(size)) for end, size in held[1::2]]
    assert some.late(_waiting(waiting), started=started) == late


@pytest.mark.parametrize(
    ("most", "slowest", "end"),
    [(0, 3, 10), (4, 3, 14), (100, 3, 26), (100, 1, 10)],
    ids=["no prompts", "few", "until its end", "as fast"],
)
def test_prompts_delay_an_end_until_they_are_computed(most: int, slowest: int, end: int) -> None:
    prompts = PromptDelay(float(most), float(slowest))
    assert prompts.delayed(10.0, 2.0) == end
    queue = PoolQueue([Held(10.0, 8.0, 0.0)], blocks=10, places=2)
    for latest, late in ((end - 1, {0}), (end, set())):
        assert queue.late(_waiting([(latest, 5, 9)]), begins_ns=2.0, prompts=prompts) == late


@pytest.mark.parametrize(("latest", "late"), [(2, {0}), (3, set()), (4, set())])
def test_no_request_starts_before_the_queue_is_looked_at(latest: int, late: set[int]) -> None:
    queue = PoolQueue([Held(1.0, 8.0, 0.0)], blocks=10, places=2)
    assert queue.late(_waiting([(latest, 10, 9)]), begins_ns=3.0) == late
    assert queue.late(_waiting([(3, 10, 9), (12, 5, 9)]), begins_ns=3.0) == {1}, "ends at 13"


@pytest.mark.parametrize(
    ("pause", "late"), [(0, {0}), (10, {0}), (11, set())], ids=["no", "too short", "long enough"]
)
def test_at_its_latest_start_a_request_uses_blocks_of_one_that_can_pause_for_its_stay(
    pause: int, late: set[int]
) -> None:
    queue = PoolQueue([Held(100.0, 8.0, float(pause))], blocks=10, places=1)
    assert queue.late(_waiting([(5, 10, 6)])) == late
    assert queue.late(_waiting([(5, 10, 1)])) == late, "blocks are free, but no place is"


def test_blocks_are_lent_once_and_their_free_part_comes_back() -> None:
    queue = PoolQueue([Held(100.0, 8.0, 50.0)], blocks=10, places=4)
    assert queue.late(_waiting([(5, 10, 6), (5, 10, 5)])) == {1}, "4 are lent, 4 are left"
    assert queue.late(_waiting([(5, 10, 6), (15, 10, 6)])) == set(), "2 are free again at 15"


def test_a_lender_gives_one_place() -> None:
    queue = PoolQueue([Held(100.0, 8.0, 50.0)], blocks=100, places=1)
    assert queue.late(_waiting([(5, 10, 1), (5, 10, 1)])) == {1}
    queue = PoolQueue([Held(100.0, 8.0, 50.0), Held(100.0, 1.0, 50.0)], blocks=100, places=2)
    assert queue.late(_waiting([(5, 10, 1), (5, 10, 1)])) == set()


def test_a_lender_also_waits_for_the_prompts_before_it_goes_on() -> None:
    queue = PoolQueue([Held(100.0, 8.0, 50.0)], blocks=10, places=4)
    assert queue.late(_waiting([(5, 10, 6)]), backlog_ns=39.0) == set()
    assert queue.late(_waiting([(5, 10, 6)]), backlog_ns=40.0) == {0}


def test_evictions_need_time() -> None:
    queue = PoolQueue([Held(100.0, 8.0, 50.0)], blocks=10, places=4)
    assert queue.late(_waiting([(5, 10, 6)]), lends_ns=5.0) == set()
    assert queue.late(_waiting([(5, 10, 6)]), lends_ns=6.0) == {0}


def test_blocks_and_places_that_are_kept_free_start_no_request() -> None:
    queue = PoolQueue([Held(20.0, 2.0, 0.0)], blocks=10, places=3)
    waiting = _waiting([(5, 10, 4)])
    assert queue.late(waiting, kept_free=4.0, kept_places=1) == set()
    assert queue.late(waiting, kept_free=5.0) == {0}
    assert queue.late(waiting, kept_places=2) == {0}


def test_a_request_with_no_latest_start_waits_for_any_end() -> None:
    assert PoolQueue([Held(9.0, 10.0, 0.0)], blocks=10, places=1).late(
        _waiting([(1 << 62, 10, 10), (1 << 62, 10, 11)])
    ) == {1}, "the second is larger than the pool"
