"""The tests of a new request's demand on the device, on KV memory and on places."""

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
    late_prompts,
)
from goodput_engine.scheduler.policies.slo.prompts import Prompt, PromptTime, latest_starts
from goodput_engine.scheduler.request_table import ScheduledRequest


def _prompt(rid: int, *, due: int, work: int, share: int | None = None, level: int = 0) -> Prompt:
    request = ScheduledRequest(rid=rid, arrival_ns=0, input_tokens=1, priority=-level)
    return Prompt(level, due, rid, work, work if share is None else share, due, request)


def _late(
    prompts: list[Prompt], new: Prompt, *, begins: int = 0, margin: int = 0, share: float = 1.0
) -> list[int] | None:
    found = late_prompts(sorted(prompts), new, begins_ns=begins, margin_ns=margin, share=share)
    return None if found is None else [request.rid for request in found]


def _ends(prompts: list[Prompt], begins: int) -> dict[int, float]:
    """Compute prompts one after another, or together; return the time at which each ends."""
    ends, at = {}, float(begins)
    for prompt in sorted(prompts):
        at += prompt.share_ns
        ends[prompt.rid] = max(at, begins + prompt.work_ns)
    return ends


def _simulated(
    prompts: list[Prompt], new: Prompt, *, begins: int, margin: int, share: float
) -> list[int] | None:
    before, after = _ends(prompts, begins), _ends([*prompts, new], begins)
    waits = sum(prompt.share_ns for prompt in prompts if prompt < new)
    if begins + waits + new.work_ns + margin > new.due_ns:
        return None
    if waits > share * (new.due_ns - new.work_ns - begins):
        return None
    late = [p for p in sorted(prompts) if before[p.rid] <= p.due_ns < after[p.rid]]
    if any(prompt.request.priority >= new.request.priority for prompt in late):
        return None
    return [prompt.rid for prompt in late]


def test_a_prompt_that_is_late_anyway_is_no_reason_to_refuse() -> None:
    late, new = _prompt(1, due=10, work=11), _prompt(3, due=8, work=2)
    assert _late([late], new) == []
    assert _late([late, _prompt(2, due=23, work=10)], new) == []
    assert _late([late, _prompt(2, due=22, work=10)], new) is None, "in time without the new one"


def test_a_prompt_that_is_alone_needs_its_work_and_the_margin() -> None:
    assert _late([], _prompt(1, due=10, work=10)) == []
    assert _late([], _prompt(1, due=10, work=11)) is None
    assert _late([], _prompt(1, due=10, work=8), margin=2) == []
    assert _late([], _prompt(1, due=10, work=8), margin=3) is None
    assert _late([], _prompt(1, due=10, work=8), begins=3) is None


def test_a_prompt_starts_after_those_that_are_due_before_it() -> None:
    earlier, later = _prompt(1, due=5, work=5), _prompt(2, due=100, work=50)
    assert _late([earlier, later], _prompt(3, due=10, work=5)) == []
    assert _late([earlier, later], _prompt(3, due=10, work=6)) is None


def test_no_prompt_that_is_as_important_becomes_late() -> None:
    other = _prompt(1, due=20, work=10)
    assert _late([other], _prompt(2, due=15, work=10)) == []
    assert _late([other], _prompt(2, due=15, work=11)) is None


def test_less_important_prompts_become_late_for_a_new_one() -> None:
    others = [_prompt(1, due=12, work=10, level=1), _prompt(2, due=40, work=10, level=1)]
    assert _late(others, _prompt(3, due=30, work=5)) == [1]
    assert _late(others, _prompt(3, due=30, work=25)) == [1, 2]


def test_a_less_important_prompt_that_is_late_already_is_not_counted() -> None:
    assert _late([_prompt(1, due=5, work=10, level=1)], _prompt(2, due=30, work=5)) == []


def test_more_important_prompts_come_first_even_if_they_are_due_later() -> None:
    other = _prompt(1, due=100, work=10)
    assert _late([other], _prompt(2, due=15, work=6, level=1)) is None
    assert _late([other], _prompt(2, due=16, work=6, level=1)) == []


def test_prompts_before_a_new_one_take_only_its_share_of_the_time() -> None:
    other, new = _prompt(1, due=10, work=10), _prompt(2, due=30, work=10)
    assert _late([other], new, share=0.5) == []
    assert _late([other], new, share=0.49) is None
    assert _late([], new, share=0.01) == [], "an idle device is never kept free"


# Level, due time, and two times: the shorter one is what a prompt adds to the steps of others.
_PROMPTS = st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 20), st.integers(0, 20))


@given(
    queue=st.lists(_PROMPTS, max_size=8),
    new=_PROMPTS,
    begins=st.integers(0, 10),
    margin=st.integers(0, 10),
    share=st.sampled_from([0.25, 0.5, 0.75, 1.0]),
)
def test_late_prompts_agree_with_a_simulation(
    queue: list[tuple[int, int, int, int]],
    new: tuple[int, int, int, int],
    begins: int,
    margin: int,
    share: float,
) -> None:
    prompts: list[Prompt] = []
    for prompt in sorted(
        _prompt(rid, level=level, due=due, work=max(work, share), share=share)
        for rid, (level, due, work, share) in enumerate(queue, start=1)
    ):
        # Admitted prompts are in time without the new one.
        if _ends([*prompts, prompt], begins)[prompt.rid] <= prompt.due_ns:
            prompts.append(prompt)
    level, due, work, share_of_step = new
    added = _prompt(99, level=level, due=due, work=max(work, share_of_step), share=share_of_step)
    expected = _simulated(prompts, added, begins=begins, margin=margin, share=share)
    assert _late(prompts, added, begins=begins, margin=margin, share=share) == expected


def test_a_prompt_that_only_another_order_computes_in_time_is_made_late() -> None:
    waiting, above = _prompt(1, due=10, work=4, level=0), _prompt(2, due=40, work=8, level=-1)
    new = _prompt(3, due=40, work=1, level=-1)
    prompts = sorted([waiting, above])

    def late(new: Prompt, *, reorders: bool) -> list[ScheduledRequest] | None:
        return late_prompts(prompts, new, begins_ns=0, margin_ns=0.0, share=1.0, reorders=reorders)

    assert late(new, reorders=False) == [], "late behind its level without the new one"
    assert late(new, reorders=True) == [waiting.request]
    assert late(_prompt(4, due=40, work=1, level=0), reorders=True) is None, "it is no better"


@given(
    prompts=st.lists(
        st.tuples(st.integers(-2, 0), st.integers(5, 60), st.integers(1, 9)), min_size=1, max_size=7
    )
)
def test_the_latest_start_of_a_prompt_leaves_time_for_those_behind_it(
    prompts: list[tuple[int, int, int]],
) -> None:
    ordered = sorted(
        _prompt(rid, due=due, work=work, level=level)
        for rid, (level, due, work) in enumerate(prompts)
    )
    starts = latest_starts(ordered)
    for at, first in enumerate(ordered):
        behind = [prompt for prompt in ordered[at:] if prompt.level == first.level]

        def in_time(start: float, prompts: list[Prompt] = behind) -> bool:
            return all(
                start + sum(p.work_ns for p in prompts[: n + 1]) <= prompt.due_ns
                for n, prompt in enumerate(prompts)
            )

        assert in_time(starts[first.rid])
        assert not in_time(starts[first.rid] + 1)


# --- memory and places ---------------------------------------------------------------------------
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
    ("pause", "late"), [(0, {0}), (20, {0}), (21, set())], ids=["no", "too short", "long enough"]
)
def test_at_its_latest_start_a_request_uses_blocks_of_one_that_can_pause_for_twice_its_stay(
    pause: int, late: set[int]
) -> None:
    queue = PoolQueue([Held(100.0, 8.0, float(pause))], blocks=10, places=1)
    assert queue.late(_waiting([(5, 10, 6)])) == late
    assert queue.late(_waiting([(5, 10, 1)])) == late, "blocks are free, but no place is"


def test_blocks_are_lent_once_and_their_free_part_comes_back() -> None:
    queue = PoolQueue([Held(100.0, 8.0, 50.0)], blocks=10, places=4)
    assert queue.late(_waiting([(5, 10, 6), (5, 10, 5)])) == {1}, "4 are lent, 4 are left"
    assert queue.late(_waiting([(5, 10, 6), (15, 10, 6)])) == set(), "2 are free again at 15"


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


def test_the_time_of_prompts_is_a_mean_over_steps_with_decodes() -> None:
    prompt_time = PromptTime()
    assert prompt_time.mean_ns(0) == 0
    for epoch in range(4, 1000, 4):
        prompt_time.observe(80.0, epoch=epoch)
    assert prompt_time.mean_ns(999) == pytest.approx(20, rel=0.05), "every fourth step has prompts"
    assert prompt_time.mean_ns(999 + 64) == pytest.approx(20 / 2.72, rel=0.05)


def test_the_first_prompt_is_not_taken_as_the_mean() -> None:
    prompt_time = PromptTime()
    prompt_time.observe(80.0, epoch=1)
    assert prompt_time.mean_ns(1) == pytest.approx(80 / 17, rel=0.2)
