"""`fastserve`: levels by expected prompt and by time run, and swapping ahead of need."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.schedulers import SteppedScheduler, make_scheduler

from goodput_core.spec.choices import Preemption
from goodput_core.steptime import RooflineForm
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.scheduler.policies.fastserve import FastServePolicy, FeedbackQueue
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.request_table import RequestState, ScheduledRequest

# A millisecond for each prompt token.
_MODEL = RooflineForm(
    c0_ns=1, c1_ns_per_token=NS_PER_MS, c2_ns_per_context_token=0, c4_ns_per_request=0
)


def _engine(
    *,
    blocks: int = 400,
    host: int = 400,
    seqs: int = 8,
    preemption: Preemption = Preemption.SWAP,
    model: RooflineForm | None = _MODEL,
    ns_per_block: int = 1,
) -> SteppedScheduler:
    """A scheduler with steps of a millisecond."""
    scheduler = make_scheduler(
        FastServePolicy(model=model),
        blocks=blocks,
        budget=512,
        seqs=seqs,
        waiting=1000,
        model=4000,
        host=host,
        ns_per_block=ns_per_block,
        preemption=preemption,
    )
    return SteppedScheduler(scheduler=scheduler, step_ns=NS_PER_MS)


def test_a_long_prompt_skips_the_levels_whose_quantum_it_would_only_exhaust() -> None:
    engine = _engine(seqs=1)
    engine.add(1, 5, 1)
    engine.add(2, 100, 1)  # 160 ms: the fifth level
    engine.add(3, 70, 1)  # 80 ms: the fourth
    engine.add(4, 9, 1)
    engine.add(5, 10, 1)
    engine.add(6, 11, 1)
    assert [engine.start() for _ in range(6)] == [[1], [4], [5], [6], [3], [2]]


def test_a_request_beyond_its_quantum_goes_down_and_is_displaced_by_the_next_newcomer() -> None:
    engine = _engine(seqs=1)
    long = engine.add(1, 5, 300)
    engine.step(4 * NS_PER_MS)
    engine.step(6 * NS_PER_MS)
    engine.add(2, 5, 1)
    assert engine.start() == [], "10 ms are not more than the quantum"
    engine.step()
    engine.step()
    assert long.preemptions == 1
    assert engine.scheduler.stats.swapped_tokens > 0


def test_a_prompt_that_takes_longer_than_expected_goes_down_too() -> None:
    engine = _engine(seqs=1)
    slow = engine.add(1, 5, 300)
    engine.step(11 * NS_PER_MS)
    engine.add(2, 5, 1)
    engine.step()
    assert slow.preemptions == 1


def test_the_quantum_doubles_from_level_to_level() -> None:
    engine = _engine(seqs=2)
    engine.add(1, 5, 900)
    downs: list[int] = []
    queue = engine.scheduler.waiting
    while engine.now_ns < 400 * NS_PER_MS:
        level = queue.level(engine.scheduler._table.requests[1])  # type: ignore[attr-defined]
        engine.step()
        if queue.level(engine.scheduler._table.requests[1]) > level:  # type: ignore[attr-defined]
            downs.append(engine.now_ns // NS_PER_MS)
    assert downs == [11, 32, 73, 154, 315]


def test_a_preempted_request_keeps_its_level_and_higher_levels_come_back_first() -> None:
    engine = _engine(seqs=2)
    engine.add(1, 100, 300)  # the fifth level
    engine.add(2, 15, 300)  # the second
    engine.step()
    newcomers = [engine.add(rid, 5, 2) for rid in (3, 4)]
    while not all(r.state is RequestState.FINISHED for r in newcomers):
        engine.step()
    back: list[int] = []
    while len(back) < 2:
        back += engine.start()
    assert back == [2, 1]


def test_a_request_that_has_waited_for_three_seconds_goes_to_the_top() -> None:
    engine = _engine(seqs=1)
    engine.add(1, 100, 300)
    engine.step()
    begun: dict[int, int] = {}
    rid = 1
    while not begun and engine.now_ns < 4 * NS_PER_S:
        rid += 1
        engine.add(rid, 5, 1)
        for admitted in engine.step(9 * NS_PER_MS).admitted:
            if admitted.rid == 1:
                begun[1] = engine.now_ns
    assert 3 * NS_PER_S < begun[1] < 3.1 * NS_PER_S


@settings(max_examples=examples(40), deadline=None)
@given(
    seqs=st.integers(1, 3),
    step_ms=st.integers(20, 300),
    flood=st.tuples(st.integers(1, 40), st.integers(1, 12)),
    slow=st.tuples(st.integers(1, 600), st.integers(2, 30)),
    preemption=st.sampled_from(Preemption),
)
def test_wait_is_bounded_although_short_requests_never_cease_to_come(
    seqs: int,
    step_ms: int,
    flood: tuple[int, int],
    slow: tuple[int, int],
    preemption: Preemption,
) -> None:
    engine = _engine(seqs=seqs, blocks=200, host=200, preemption=preemption)
    rid, request, waited_ms = 1, engine.add(1, *slow), 0
    while request.state is not RequestState.FINISHED:
        while len(engine.scheduler.waiting) <= seqs:
            rid += 1
            engine.add(rid, *flood)
        engine.step(step_ms * NS_PER_MS)
        waiting = request.state is RequestState.WAITING
        waited_ms = waited_ms + step_ms if waiting else 0
        # Three seconds to the top; then those who are there already have a quantum left.
        assert waited_ms <= 3_000 + 4 * step_ms, "it starves"


def test_blocks_are_kept_free_by_swapping_the_lowest_level_out_before_they_are_needed() -> None:
    engine = _engine(blocks=40, seqs=8)  # four of the forty are kept free
    top = engine.add(1, 5, 300)
    low, lower = engine.add(2, 200, 300), engine.add(3, 300, 300)
    engine.step()
    while engine.scheduler.free_blocks >= 4:
        assert not lower.preemptions
        engine.step()
    engine.step()
    assert (top.preemptions, low.preemptions, lower.preemptions) == (0, 0, 1)
    assert engine.scheduler.free_blocks > 4
    for _ in range(30):
        engine.step()
        assert engine.scheduler.free_blocks >= 4
    assert lower.preemptions == 1, "it came back into the blocks that are kept free"


def _swap_out_the_longer(
    engine: SteppedScheduler, *, low_outputs: int
) -> tuple[ScheduledRequest, ScheduledRequest]:
    """Run a long and a longer request on 40 blocks until the longer one is swapped out."""
    low = engine.add(2, 160, low_outputs)  # 160 ms: the fifth level
    longest = engine.add(3, 300, 300)  # the sixth
    while not longest.host_blocks:
        engine.step()
    return low, longest


def test_a_swapped_request_resumes_when_the_reserve_remains_complete() -> None:
    engine = _engine(blocks=40, seqs=8)
    _, longest = _swap_out_the_longer(engine, low_outputs=90)
    waited, resumed = 0, False
    while not resumed:
        free, needed = engine.scheduler.free_blocks, len(longest.host_blocks) + 1
        resumed = 3 in engine.start()
        assert resumed == (free - needed >= 4)
        waited += 1
    assert waited > 10
    assert engine.scheduler.num_requests == 1, "the other request has ended"


def test_a_swapped_request_resumes_into_the_reserve_if_a_lower_level_can_leave_it() -> None:
    engine = _engine(blocks=40, seqs=8)
    low, longest = _swap_out_the_longer(engine, low_outputs=300)
    queue = engine.scheduler.waiting
    assert isinstance(queue, FeedbackQueue)
    resumed, waited = False, 0
    while not resumed:
        assert 0 <= engine.scheduler.free_blocks - (len(longest.host_blocks) + 1) < 4
        lower = queue.level(low) > queue.level(longest)
        resumed = 3 in engine.start(200 * NS_PER_MS)
        assert resumed == lower
        waited += 1
    assert waited > 1
    engine.step()
    engine.step()
    assert (low.preemptions, longest.preemptions) == (1, 1)
    assert engine.scheduler.free_blocks >= 4


def test_a_swapped_request_resumes_without_a_reserve_if_nothing_else_runs() -> None:
    engine = _engine(blocks=40, seqs=1)
    large = engine.add(1, 530, 60)
    while engine.now_ns < 50 * NS_PER_MS:
        engine.step()
    engine.add(2, 5, 3)
    while not large.host_blocks or engine.scheduler.num_requests > 1:
        engine.step()
    assert 40 - (len(large.host_blocks) + 1) < 4
    assert engine.start() == [1]


def test_no_prompt_starts_while_less_than_a_tenth_of_host_memory_is_free() -> None:
    engine = _engine(blocks=60, host=20, seqs=2)
    engine.add(1, 300, 300)  # nineteen blocks: almost all of host memory
    engine.add(2, 100, 300)
    engine.step()
    engine.add(3, 5, 5)
    engine.step()
    assert engine.scheduler.host_blocks[0] < 2
    engine.scheduler.set_limits(SchedulerLimits(token_budget=512, max_num_seqs=8, max_waiting=9))
    engine.add(4, 5, 5)
    assert engine.start() == [1], "it has a copy, and a lower level than 4"
    assert 4 in engine.start() + engine.start()


@pytest.mark.parametrize(
    ("host", "preemption", "copy_s"),
    [
        (400, Preemption.SWAP, 10),
        (400, Preemption.HYBRID, 0),
        (400, Preemption.HYBRID, 10),
        (0, Preemption.RECOMPUTE, 0),
    ],
    ids=[
        "swapped though recomputing were cheaper",
        "swapped over a fast link",
        "hybrid recomputes over a slow link",
        "recomputed where there is no host memory",
    ],
)
def test_victims_are_swapped_unless_hybrid_finds_recomputation_cheaper_for_all(
    host: int, preemption: Preemption, copy_s: int
) -> None:
    engine = _engine(
        seqs=1, host=host, preemption=preemption, ns_per_block=max(1, copy_s * NS_PER_S)
    )
    victim = engine.add(1, 100, 300)
    # A recomputation takes longer than two steps with copies. With the slow link, it takes less
    # than the time for which the second request goes before the first, or `hybrid` would not
    # displace the first.
    engine.step(200 * NS_PER_MS if not copy_s or preemption is Preemption.SWAP else 20 * NS_PER_MS)
    engine.add(2, 5, 1)
    engine.step()
    assert victim.preemptions == 1
    stats = engine.scheduler.stats
    swapped = preemption is Preemption.SWAP or (preemption is Preemption.HYBRID and not copy_s)
    assert (stats.swapped_tokens > 0, stats.recomputed_tokens > 0) == (swapped, not swapped)


@pytest.mark.parametrize(
    ("preemption", "displaced"),
    [(Preemption.HYBRID, False), (Preemption.SWAP, True), (Preemption.RECOMPUTE, True)],
)
def test_only_hybrid_displaces_no_request_if_that_takes_more_time_than_it_gains(
    preemption: Preemption, *, displaced: bool
) -> None:
    engine = _engine(seqs=1, host=20, preemption=preemption, ns_per_block=200 * NS_PER_MS)
    victim = engine.add(1, 100, 300)  # the fifth level
    engine.step(400 * NS_PER_MS)
    engine.add(2, 5, 1)  # goes before it for 150 ms, but a recomputation takes 400 ms
    for _ in range(10):
        engine.step()
    assert bool(victim.preemptions) is displaced


def test_a_request_that_has_waited_long_enough_displaces_at_a_high_cost_too() -> None:
    engine = _engine(seqs=1, host=20, preemption=Preemption.HYBRID, ns_per_block=200 * NS_PER_MS)
    victim = engine.add(1, 100, 1000)
    engine.step(NS_PER_S)  # so long that a recomputation costs three seconds
    engine.add(2, 5, 1)
    while not victim.preemptions:
        assert engine.now_ns < 8 * NS_PER_S, "it starves"
        engine.step(100 * NS_PER_MS)
    assert engine.now_ns > 4 * NS_PER_S


def test_how_long_prompts_take_is_learned() -> None:
    engine = _engine(seqs=1, model=None)
    for rid in range(20):
        tokens = (5, 50)[rid % 2]
        engine.add(rid, tokens, 1)
        engine.step(tokens * NS_PER_MS)
    engine.add(30, 50, 1)
    engine.add(31, 5, 1)
    assert engine.start() == [31]
