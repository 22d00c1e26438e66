"""The ladder before memory runs out: what each rung does, what it is good for, when it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.builders.schedulers import (
    SteppedScheduler,
    add_request,
    commit_plan,
    make_scheduler,
)

from goodput_core.spec.choices import Policy, Preemption
from goodput_core.units import NS_PER_MS
from goodput_engine.scheduler import admission, preemption
from goodput_engine.scheduler.admission import Rejection
from goodput_engine.scheduler.preemption import Evictor
from goodput_engine.scheduler.request_table import RequestState, ScheduledRequest

if TYPE_CHECKING:
    from goodput_engine.scheduler.scheduler import Scheduler

_STEP_NS = 10 * NS_PER_MS


def _engine(
    *,
    blocks: int,
    host: int,
    steps_per_block: float = 0.1,
    depth: int = 0,
    preemption: Preemption = Preemption.SWAP,
    policy: str = Policy.SARATHI,
) -> SteppedScheduler:
    """A scheduler with steps of 10 ms."""
    scheduler = make_scheduler(
        policy,
        blocks=blocks,
        budget=512,
        seqs=64,
        waiting=1000,
        model=2000,
        depth=depth,
        host=host,
        ns_per_block=int(steps_per_block * _STEP_NS),
        preemption=preemption,
    )
    return SteppedScheduler(scheduler=scheduler, step_ns=_STEP_NS)


def _gaps(engine: SteppedScheduler, rid: int) -> list[int]:
    """The steps between the tokens of a request."""
    return [gap_ns // _STEP_NS for gap_ns in engine.gaps_ns(rid)]


# --- the first rung ----------------------------------------------------------------------------
def _crowd(depth: int = 0, steps_per_block: float = 1.0) -> SteppedScheduler:
    """Four answers that outgrow the pool, over a link that copies a block in each step."""
    engine = _engine(blocks=16, host=64, steps_per_block=steps_per_block, depth=depth)
    for rid in range(4):
        engine.add(rid, 40 + 3 * rid, 60)
    engine.run()
    return engine


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("steps_per_block", [0.01, 1.0, 3.0])
def test_a_victim_is_offloaded_early_enough_that_no_other_request_waits_for_its_blocks(
    depth: int, steps_per_block: float
) -> None:
    engine = _crowd(depth, steps_per_block)
    assert engine.scheduler.stats.swapped_tokens > 0
    assert _gaps(engine, 0) == [1] * 59, "the oldest had to wait"


def test_hybrid_offloads_ahead_even_if_outputs_have_been_short_so_far() -> None:
    scheduler = make_scheduler(
        blocks=16,
        budget=512,
        seqs=64,
        host=64,
        ns_per_block=_STEP_NS // 2,
        preemption=Preemption.HYBRID,
    )
    for rid in range(10, 40):
        add_request(scheduler, rid, 8, 4)
    _drain(scheduler)
    oldest, *_ = [add_request(scheduler, rid, 40 + 3 * rid, 60) for rid in range(4)]
    for tokens in range(1, 61):
        _step_with_slow_prompts(scheduler)
        assert oldest.output_tokens == tokens, "the oldest had to wait"
    assert scheduler.stats.swapped_tokens


@pytest.mark.parametrize(
    ("preemption", "offloads"), [(Preemption.SWAP, True), (Preemption.HYBRID, False)]
)
def test_hybrid_offloads_no_request_for_blocks_that_an_expected_end_frees(
    preemption: Preemption, *, offloads: bool
) -> None:
    scheduler = make_scheduler(
        blocks=7,
        budget=512,
        seqs=64,
        host=64,
        ns_per_block=3 * _STEP_NS,
        preemption=preemption,
    )
    for rid in range(10, 40):
        add_request(scheduler, rid, 8, 4)
    _drain(scheduler)
    add_request(scheduler, 1, 40, 4)  # ends one step before the other needs a block
    add_request(scheduler, 2, 60, 20)
    _drain(scheduler)
    assert bool(scheduler.stats.preemptions) is offloads


def _drain(scheduler: Scheduler) -> None:
    while scheduler.has_work:
        _step_with_slow_prompts(scheduler)


def _step_with_slow_prompts(scheduler: Scheduler) -> None:
    """Take a step; if prompts did not make it longer, hybrid would recompute."""
    plan = scheduler.plan(0)
    assert plan is not None
    prompt_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
    commit_plan(scheduler, plan, step_ns=_STEP_NS + prompt_tokens * 20 * NS_PER_MS)


def test_without_offloading_ahead_the_others_wait_for_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead = max(_gaps(_crowd(), 0))
    monkeypatch.setattr(Evictor, "offload_ahead", lambda _: None)
    assert (ahead, max(_gaps(_crowd(), 0))) == (1, 4)


def test_a_pool_that_will_be_just_full_offloads_no_request() -> None:
    engine = _engine(blocks=8, host=64, steps_per_block=2.0)
    for rid in range(2):
        engine.add(rid, 40, 25)  # 64 tokens are stored at the end: four blocks each
    engine.run()
    assert engine.scheduler.stats.preemptions == 0


@pytest.mark.parametrize("policy", ["orca", "request"])
def test_blocks_that_were_reserved_are_not_mistaken_for_a_shortage(policy: str) -> None:
    engine = _engine(blocks=128, host=64, steps_per_block=2.0, policy=policy)
    engine.add(0, 1000, 1000)
    engine.run()
    assert engine.scheduler.stats.preemptions == 0


def test_a_victim_to_recompute_stays_until_its_blocks_are_needed() -> None:
    preempted_in: dict[Preemption, int] = {}
    for mode in (Preemption.RECOMPUTE, Preemption.HYBRID):
        # So slow a link that hybrid recomputes.
        engine = _engine(blocks=4, host=16, steps_per_block=50.0, preemption=mode)
        engine.add(1, 30, 20)
        victim = engine.add(2, 30, 20)
        steps = 0
        while not victim.preemptions:
            engine.step()
            steps += 1
        assert engine.scheduler.stats.recomputed_tokens == 32
        preempted_in[mode] = steps
    assert len(set(preempted_in.values())) == 1


# --- the second rung ---------------------------------------------------------------------------
def _stream(
    *, host: int, preemption: Preemption = Preemption.SWAP
) -> tuple[SteppedScheduler, int, int]:
    """A hundred answers, one begun every four steps, of which the pool holds ten to their ends.

    Returns:
        The engine at the end; how many were rejected; the longest that an accepted one took.
    """
    engine = _engine(blocks=200, host=host, preemption=preemption)
    begun: dict[int, int] = {}
    offered = 0
    while offered < 100 or engine.scheduler.has_work:
        while offered < 100 and offered * 4 * _STEP_NS <= engine.now_ns:
            answer = engine.offer(offered, 100 + offered * 7 % 20, 300 + offered * 13 % 40)
            if isinstance(answer, ScheduledRequest):
                begun[offered] = engine.now_ns
            else:
                assert answer.reason == "memory_full"
                assert answer.retry_after_s > 0
            offered += 1
        engine.step()
    return (
        engine,
        100 - len(begun),
        max(engine.token_times_ns[rid][-1] - at for rid, at in begun.items()),
    )


def test_while_a_copy_waits_a_request_starts_only_if_all_running_ones_can_grow() -> None:
    engine = _engine(blocks=24, host=200)
    for rid in range(8):
        engine.add(rid, 30, 90)
    while engine.scheduler.has_work:
        host_free, host_total = engine.scheduler.host_blocks
        free, running = engine.scheduler.free_blocks, engine.scheduler.num_running
        plan = engine.step()
        if host_free < host_total and running:
            for admitted in plan.admitted:
                free -= len(admitted.blocks)
                assert free > running
                running += 1


def test_keeping_the_width_saves_a_quarter_of_the_copies_and_costs_a_hundredth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, _, _ = _stream(host=2000)
    monkeypatch.setattr(preemption, "room_to_widen", lambda **_: True)
    eager, _, _ = _stream(host=2000)
    assert kept.scheduler.stats.preemptions < 0.75 * eager.scheduler.stats.preemptions
    assert kept.scheduler.stats.swapped_tokens <= 0.76 * eager.scheduler.stats.swapped_tokens
    assert kept.now_ns <= 1.01 * eager.now_ns


# --- the third rung ----------------------------------------------------------------------------
def test_with_host_memory_full_refusing_spares_the_accepted_recomputation_and_half_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    picky, rejected, longest_ns = _stream(host=60)
    assert rejected > 0
    monkeypatch.setattr(admission, "host_memory_is_full", lambda **_: False)
    patient, none, patient_ns = _stream(host=60)
    assert none == 0
    assert longest_ns < patient_ns / 2
    shares = [
        e.scheduler.stats.recomputed_tokens / e.scheduler.stats.output_tokens
        for e in (picky, patient)
    ]
    assert shares[0] < 0.8 * shares[1]


@pytest.mark.parametrize(
    ("host", "preemption"),
    [(60, Preemption.RECOMPUTE), (0, Preemption.SWAP), (2000, Preemption.SWAP)],
    ids=["recompute", "no host memory", "enough of it"],
)
def test_no_request_is_rejected_for_memory_without_host_memory_or_with_room_in_it(
    host: int, preemption: Preemption
) -> None:
    host = 0 if preemption is Preemption.RECOMPUTE else host  # as `build_core` has it
    _, rejected, _ = _stream(host=host, preemption=preemption)
    assert rejected == 0


def _full() -> SteppedScheduler:
    """Both memories are full of background requests."""
    engine = _engine(blocks=12, host=8, policy=Policy.PRIORITY)
    for rid in range(8):
        engine.add(rid, 30, 90, priority=-1)
    while engine.scheduler.host_blocks[0] >= 4:
        engine.step()
    return engine


def test_a_request_that_may_displace_others_is_not_rejected_for_memory_that_they_hold() -> None:
    engine = _full()
    assert isinstance(engine.offer(98, 30, 9, priority=-1), Rejection)
    assert engine.scheduler.stats.shed == 1
    urgent = engine.add(99, 30, 9, priority=2)
    while urgent.state is not RequestState.FINISHED:
        engine.step()
    assert max(_gaps(engine, 99)) == 1


@pytest.mark.parametrize(
    ("free", "total", "typical", "full"),
    [
        (9, 100, 1, True),
        (10, 100, 1, False),
        (10, 100, 11, True),
        (3, 3, 4, False),
        (0, 0, 1, False),
    ],
    ids=["a tenth", "more", "no place for a typical copy", "too small for any", "none"],
)
def test_host_memory_is_full(*, free: int, total: int, typical: int, full: bool) -> None:
    found = admission.host_memory_is_full(free_blocks=free, total_blocks=total, mean_blocks=typical)
    assert found is full


def test_hybrid_rejects_no_request_for_host_memory_because_it_can_recompute() -> None:
    engine, rejected, _ = _stream(host=60, preemption=Preemption.HYBRID)
    assert rejected == 0
    assert engine.scheduler.stats.recomputed_tokens > 0


@pytest.mark.parametrize("policy", [Policy.SARATHI, Policy.PRIORITY])
def test_a_request_that_is_more_important_than_another_is_not_rejected_for_memory(
    policy: str,
) -> None:
    engine = _engine(blocks=12, host=8, policy=policy)
    for rid in range(8):
        engine.add(rid, 30, 90)
    while engine.scheduler.host_blocks[0] >= 4:
        engine.step()
    assert isinstance(engine.offer(98, 30, 9), Rejection)
    assert not isinstance(engine.offer(99, 30, 9, priority=1), Rejection)
