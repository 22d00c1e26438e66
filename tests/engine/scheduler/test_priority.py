"""`priority`: the order, evictions, ageing, and pauses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.schedulers import (
    NO_TARGETS,
    SteppedCore,
    SteppedScheduler,
    add_request,
    make_configure,
    make_scheduler,
    take_step,
)

from goodput_core.errors import InputError
from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.core.build import build_core
from goodput_engine.device.load import load_profile
from goodput_engine.messages import Configure, Submit
from goodput_engine.scheduler.policies.priority import PriorityPolicy
from goodput_engine.scheduler.request_table import RequestState, ScheduledRequest

REALTIME, HIGH, NORMAL, LOW = 2, 1, 0, -1


def _engine(
    *, ageing_ns: int = 100, blocks: int = 100, seqs: int = 8, budget: int = 100
) -> SteppedScheduler:
    scheduler = make_scheduler(
        PriorityPolicy(ageing_ns=ageing_ns),
        blocks=blocks,
        budget=budget,
        seqs=seqs,
        waiting=1000,
        model=10_000,
    )
    return SteppedScheduler(scheduler=scheduler)


def _add(
    engine: SteppedScheduler,
    rid: int,
    priority: int,
    *,
    tokens: int = 10,
    max_output: int = 9,
    targets: Targets = NO_TARGETS,
) -> ScheduledRequest:
    return engine.add(rid, tokens, max_output, priority=priority, targets=targets)


def test_higher_levels_start_first_and_equals_in_the_order_of_their_arrival() -> None:
    engine = _engine()
    for rid, priority in enumerate((LOW, -7, NORMAL, HIGH, REALTIME, 9, NORMAL)):
        _add(engine, rid, priority)
    assert engine.start() == [4, 5, 3, 2, 6, 0, 1]


def test_the_least_urgent_and_newest_is_displaced_by_a_waiting_request() -> None:
    engine = _engine(blocks=6)
    running = [_add(engine, rid, p, tokens=15) for rid, p in ((1, LOW), (2, NORMAL), (3, LOW))]
    engine.step()
    _add(engine, 4, HIGH, tokens=60)
    assert engine.start() == [4]
    assert [r.preemptions for r in running] == [0, 0, 1]


def test_for_a_place_in_the_batch_a_higher_level_displaces_and_an_equal_one_waits() -> None:
    engine = _engine(seqs=2)
    running = [_add(engine, rid, NORMAL) for rid in (1, 2)]
    engine.step()
    _add(engine, 3, NORMAL)
    assert engine.start() == []
    _add(engine, 4, HIGH)
    assert engine.start() == [4]
    assert [r.preemptions for r in running] == [0, 1]


def test_out_of_blocks_the_least_urgent_yields_although_it_is_older() -> None:
    engine = _engine(blocks=2)
    background, urgent = _add(engine, 1, LOW, tokens=16), _add(engine, 2, HIGH, tokens=16)
    engine.step()
    engine.step()
    assert (background.preemptions, urgent.preemptions) == (1, 0)


def test_a_displaced_request_makes_no_room_with_the_blocks_that_its_successor_shares() -> None:
    scheduler = make_scheduler("priority", blocks=5, block_size=4)
    low = add_request(scheduler, 0, 9, 9, priority=NORMAL, hashes=(1, 2))  # three blocks
    high = add_request(scheduler, 1, 5, 3, priority=HIGH)  # two blocks
    take_step(scheduler)
    # Two of its four blocks are those of the first request; only one more would become free.
    shares = add_request(scheduler, 2, 13, 2, priority=HIGH, hashes=(1, 2, 3))
    for _ in range(2):
        assert take_step(scheduler).admitted == ()
    assert (low.preemptions, high.blocks) == (0, [])
    (admitted,) = take_step(scheduler).admitted
    assert (admitted.rid, len(admitted.blocks)) == (shares.rid, 4)


def test_an_urgent_prompt_goes_on_and_starts_before_a_less_urgent_one() -> None:
    engine = _engine(budget=20)
    _add(engine, 1, LOW, tokens=60)
    engine.step()
    _add(engine, 2, HIGH, tokens=30)
    assert [(c.rid, c.num_tokens) for c in engine.step().chunks] == [(2, 20)]
    assert [(c.rid, c.num_tokens) for c in engine.step().chunks] == [(2, 10), (1, 10)]


def test_waiting_raises_a_request_level_by_level_and_running_does_not() -> None:
    engine = _engine(ageing_ns=100, seqs=1)
    _add(engine, 1, NORMAL, max_output=500)
    engine.step(10)
    _add(engine, 2, LOW, max_output=500)
    started: dict[int, int] = {}
    while len(started) < 2:
        now_ns = engine.now_ns
        for rid in engine.start(10):
            started[rid] = now_ns
    # Low is high after two W and displaces; normal needs two W to get above it.
    assert started == {2: 10 + 200, 1: 10 + 200 + 200}


def test_what_waiting_has_earned_is_not_lost_by_a_preemption() -> None:
    engine = _engine(ageing_ns=100, seqs=1)
    _add(engine, 1, HIGH, max_output=25)
    engine.step(10)
    aged = _add(engine, 2, LOW, max_output=100)
    engine.step(50)
    younger = _add(engine, 3, LOW, max_output=1)
    while aged.state is RequestState.WAITING:
        engine.step(10)
    assert engine.now_ns > 200
    _add(engine, 4, REALTIME, max_output=2)
    engine.step(10)
    assert aged.preemptions == 1
    engine.step(10)
    assert engine.start(10) == [2]
    assert younger.state is RequestState.WAITING


@given(
    ageing=st.integers(1, 60),
    seqs=st.integers(1, 4),
    longest=st.integers(1, 12),
    victim=st.tuples(st.integers(-2, 3), st.integers(1, 30), st.integers(1, 12)),
    lead=st.integers(0, 20),
)
def test_wait_is_bounded_although_more_urgent_requests_never_cease_to_come(
    ageing: int, seqs: int, longest: int, victim: tuple[int, int, int], lead: int
) -> None:
    engine = _engine(ageing_ns=ageing, seqs=seqs)
    priority, tokens, max_output = victim
    rid = 0
    request: ScheduledRequest | None = None
    while request is None or request.state is not RequestState.FINISHED:
        while len(engine.scheduler.waiting) < seqs + 1:
            rid += 1
            _add(engine, rid, REALTIME, max_output=1 + rid % longest)
        if engine.now_ns == lead:
            rid += 1
            request = _add(engine, rid, priority, tokens=tokens, max_output=max_output)
        engine.step()
        if request is not None:
            # To the top, then three rounds: of those that run, and of seqs + 1 before it.
            levels = max(0, min(3, 2 - priority))
            waited_ns = engine.now_ns - request.arrival_ns - request.ran_ns
            if request.state is RequestState.WAITING:
                assert waited_ns <= levels * ageing + 3 * (longest + 1) + 1, "it starves"


def _decoding(engine: SteppedScheduler, targets: Targets) -> list[ScheduledRequest]:
    """An urgent request with targets, a normal and a low one, all decoding."""
    requests = [
        _add(engine, 1, HIGH, max_output=900, targets=targets),
        _add(engine, 2, NORMAL, max_output=900),
        _add(engine, 3, LOW, max_output=900),
    ]
    engine.step(20 * NS_PER_MS)
    return requests


def _who_advances(
    engine: SteppedScheduler, requests: list[ScheduledRequest], step_ms: int
) -> list[int]:
    before = [r.output_tokens for r in requests]
    engine.step(step_ms * NS_PER_MS)
    gained = zip(requests, before, strict=True)
    return [r.rid for r, tokens in gained if r.output_tokens > tokens]


def test_lower_levels_sit_out_below_10_ms_of_slack_and_come_back_at_20() -> None:
    engine = _engine(ageing_ns=NS_PER_S)
    requests = _decoding(engine, Targets(tbt_p99_ns=50 * NS_PER_MS))
    steps_ms = (40, 41, 41, 31, 30, 30, 30)
    advanced = [_who_advances(engine, requests, ms) for ms in steps_ms]
    assert advanced == [
        [1, 2, 3],
        [1, 2, 3],  # the step before it left 10 ms
        [1, 2],
        [1],
        [1],  # 19 ms are not enough to come back
        [1, 2],
        [1, 2, 3],
    ]
    assert engine.scheduler.stats.preemptions == 0


def test_slack_against_tpot_counts_the_time_that_earlier_tokens_left_over() -> None:
    engine = _engine(ageing_ns=NS_PER_S)
    requests = _decoding(engine, Targets(tpot_ns=50 * NS_PER_MS))
    # Three times 25 ms early; each step of 65 ms eats 15 of them, and a sixth would be late.
    steps_ms = (25, 25, 25, 65, 65, 65, 65, 65)
    advanced = [_who_advances(engine, requests, ms) for ms in steps_ms]
    assert advanced[:7] == [[1, 2, 3]] * 7
    assert advanced[7] == [1, 2]


@pytest.mark.parametrize(
    ("priority", "targets"),
    [(NORMAL, Targets(tbt_p99_ns=NS_PER_MS)), (REALTIME, Targets(ttft_ns=1, e2e_ns=1))],
    ids=["not urgent", "no target for its tokens' times"],
)
def test_no_request_is_paused_for_one_without_urgency_or_targets(
    priority: int, targets: Targets
) -> None:
    engine = _engine()
    requests = [_add(engine, 1, priority, targets=targets), _add(engine, 2, LOW)]
    for _ in range(4):
        assert _who_advances(engine, requests, 50) == [1, 2]


def test_a_paused_level_starts_no_request_and_resumes_when_the_urgent_one_ends() -> None:
    engine = _engine(ageing_ns=100 * NS_PER_S)
    requests = _decoding(engine, Targets(tbt_p99_ns=NS_PER_MS))
    for _ in range(3):
        _who_advances(engine, requests, 20)
    _add(engine, 4, NORMAL)
    assert engine.start(20 * NS_PER_MS) == []
    engine.scheduler.cancel(1)
    assert engine.start(20 * NS_PER_MS) == [4]
    assert _who_advances(engine, requests, 20) == [2, 3]


def test_a_pause_ends_with_the_realtime_request_it_was_for_whatever_its_slack() -> None:
    engine = _engine(ageing_ns=100 * NS_PER_S)
    hopeless = Targets(tbt_p99_ns=NS_PER_MS)
    realtime = _add(engine, 1, REALTIME, max_output=5, targets=hopeless)
    high = _add(engine, 2, HIGH, max_output=9, targets=hopeless)
    while realtime.state is not RequestState.FINISHED:
        engine.step(20 * NS_PER_MS)
    assert high.output_tokens == 4, "it sat out once three levels did"
    assert _who_advances(engine, [high], 20) == [2]


def test_a_pause_is_over_for_a_level_that_has_sat_out_as_long_as_waiting_would_lift_it() -> None:
    engine = _engine(ageing_ns=200 * NS_PER_MS)
    requests = _decoding(engine, Targets(tbt_p99_ns=NS_PER_MS))
    _who_advances(engine, requests, 20)
    advanced = [_who_advances(engine, requests, 20) for _ in range(25)]
    low = [number for number, rids in enumerate(advanced) if 3 in rids]
    normal = [number for number, rids in enumerate(advanced) if 2 in rids]
    # Low sits out from the first step on and has two levels to rise, normal from the next one.
    assert low == list(range(20, 25))
    assert normal == [0, *range(11, 25)]


def _configure(ageing_ns: int | None) -> Configure:
    return make_configure(policy="priority", max_num_seqs=1, max_waiting=8, ageing_ns=ageing_ns)


@pytest.mark.parametrize(("ageing_ns", "first"), [(None, 3), (4 * NS_PER_MS, 2)])
def test_w_comes_from_the_manifest(ageing_ns: int | None, first: int) -> None:
    core = build_core(_configure(ageing_ns), replace(load_profile("unit"), kv_blocks=100))
    stepped = SteppedCore(core=core)
    submits = ((1, 0, NORMAL), (2, 0, NORMAL), (3, 5, HIGH))
    for rid, at_ms, priority in submits:
        stepped.move_to(at_ms * NS_PER_MS)
        stepped.submit(
            Submit(
                rid=rid,
                arrival_ns=stepped.now_ns,
                input_tokens=4,
                max_output_tokens=20 if rid == 1 else 1,
                priority=priority + (rid == 1) * 9,
            )
        )
        stepped.wake()
    earlier = len(stepped.outcomes)
    stepped.run()
    started = [a.rid for outcome in stepped.outcomes[earlier:] for a in outcome.plan.admitted]
    assert started[0] == first


def test_an_ageing_of_nothing_is_rejected() -> None:
    with pytest.raises(InputError, match="ageing must be at least 1, not 0"):
        build_core(_configure(0), load_profile("unit"))
