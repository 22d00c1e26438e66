"""Decisions of `slo` that wait: for the end of another request, or for the first measured step."""

from __future__ import annotations

import math
import random

import pytest
from tests.builders.slo_bench import SloBench

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Preemption
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.scheduler.policies.slo import admission
from goodput_engine.scheduler.policies.slo.memory import copies_ns
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.prediction import LearnedLengths
from goodput_engine.scheduler.request_table import RequestState, ScheduledRequest


def _full_pool(*, priority: int = 0, left: int = 200) -> SloBench:
    """Return a bench whose only running request holds 63 of 100 blocks, it seems for long.

    It can pause for 0.1 s.
    """
    bench = SloBench(blocks=100, left=left)
    bench.add(1, 1000, tpot_ms=6, outputs=500, priority=priority)
    bench.step()
    return bench


def test_a_request_without_memory_waits_and_enters_if_another_ends_early() -> None:
    bench = _full_pool()
    waiting = bench.add(2, 800, ttft_ms=200, outputs=30)
    assert bench.refusals[-1] is None
    assert not bench.is_admitted(2)
    for _ in range(5):
        bench.step()
    assert waiting.state is RequestState.WAITING
    bench.step(stops=[1])
    bench.step()
    assert bench.is_admitted(2)
    assert 0 < waiting.first_token_ns <= 200 * NS_PER_MS
    assert not bench.removed


def test_a_request_that_waits_in_vain_is_refused_when_it_could_no_longer_be_in_time() -> None:
    bench = _full_pool()
    waiting = bench.add(2, 800, ttft_ms=200, outputs=30)
    arrival_ns = bench.now_ns
    for _ in range(60):
        bench.step()
    assert waiting.state is RequestState.CANCELLED
    assert not waiting.admitted_tokens
    # Its prompt takes 40 ms of the 200 ms, and steps take 5 ms.
    waited_ms = (bench.removed[2] - arrival_ns) / NS_PER_MS
    assert 140 <= waited_ms <= 166
    assert not bench.policy._undecided.by_rid


def test_a_request_that_waits_takes_nothing_from_one_that_is_admitted_later() -> None:
    bench = _full_pool()
    waiting = bench.add(2, 800, ttft_ms=5000, outputs=10)
    small = bench.add(3, 160, ttft_ms=200, outputs=10)
    assert bench.is_admitted(3)
    bench.step()
    bench.step()
    assert small.first_token_ns
    assert waiting.state is RequestState.WAITING


def test_a_prompt_for_which_the_device_has_no_time_is_refused_at_once() -> None:
    bench = SloBench()
    bench.add(1, 4000, ttft_ms=220, outputs=10)
    bench.add(2, 1000, ttft_ms=60, outputs=10)
    rejection = bench.refusals[-1]
    assert rejection is not None
    assert rejection.reason == "unattainable"
    assert not bench.policy._undecided.by_rid


def test_the_most_important_of_those_that_wait_enters_first() -> None:
    bench = _full_pool(priority=1)
    low = bench.add(2, 1400, ttft_ms=400, outputs=10)
    high = bench.add(3, 1400, ttft_ms=400, outputs=10, priority=1)
    assert set(bench.policy._undecided.by_rid) == {2, 3}
    bench.step(stops=[1])
    bench.step()
    assert high.first_token_ns
    assert not low.first_token_ns


def test_an_idle_engine_serves_a_request_that_waits() -> None:
    bench = _full_pool()
    waiting = bench.add(2, 1560, ttft_ms=600, outputs=10)
    assert not bench.is_admitted(2)
    bench.step(stops=[1])
    bench.step()
    assert waiting.first_token_ns, "98 of the 100 blocks, of which 5 are to be left free"


def test_a_cancelled_request_waits_no_longer() -> None:
    bench = _full_pool()
    bench.add(2, 800, ttft_ms=200, outputs=10)
    bench.scheduler.cancel(2)
    bench.step()
    assert not bench.policy._undecided.by_rid
    assert not bench.removed


def test_only_so_many_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_MOST_CONTESTED", 1.0)
    bench = _full_pool(left=1500)
    for rid in range(2, 300):
        bench.add(rid, 800, ttft_ms=2000, outputs=10)
    assert len(bench.policy._undecided.by_rid) == 250, "a quarter of the places of the queue"
    assert bench.refusals[-1] is not None


def test_a_request_waits_for_better_ones_only_if_the_overload_may_pass_in_its_time() -> None:
    bench = _full_pool()
    for rid in range(2, 60):
        bench.add(rid, 160, ttft_ms=100, outputs=10)
        bench.pass_time(40)
    bench.add(100, 800, ttft_ms=2000, outputs=10)
    bench.add(101, 800, ttft_ms=10_000, outputs=10)
    assert [refusal is None for refusal in bench.refusals[-2:]] == [False, True]
    assert 101 in bench.policy._undecided.by_rid


def test_before_the_first_step_one_request_starts_and_the_others_wait() -> None:
    bench = SloBench()
    bench.policy.model.steps = 0
    requests = [bench.add(rid, 1000, ttft_ms=160, outputs=10) for rid in range(1, 6)]
    assert bench.refusals == [None] * 5
    assert list(bench.policy._undecided.by_rid) == [2, 3, 4, 5]
    bench.step()  # 50 ms
    bench.policy.model.steps = 1
    while bench.scheduler.has_work:
        bench.step()
    in_time = [r.rid for r in requests if r.first_token_ns]
    assert in_time == [1, 2, 3], "in 160 ms, less a step of decodes as a margin"
    assert set(bench.removed) == {4, 5}
    assert all(r.first_token_ns <= 160 * NS_PER_MS for r in requests[:3])


def test_all_requests_of_a_burst_wait_for_the_first_step() -> None:
    bench = SloBench()
    bench.policy.model.steps = 0
    for rid in range(1, 201):
        bench.add(rid, 100, ttft_ms=600_000, outputs=10)
    assert bench.refusals == [None] * 200
    bench.step()
    bench.policy.model.steps = 1
    while bench.scheduler.has_work:
        bench.step()
    assert not bench.removed


def test_a_request_does_not_wait_for_a_step_that_never_comes() -> None:
    bench = SloBench()
    bench.policy.model.steps = 0
    bench.add(1, 1000, ttft_ms=160, outputs=10)
    bench.add(2, 1000, ttft_ms=160, outputs=10)
    bench.scheduler.cancel(1)
    bench.pass_time(1000)
    assert bench.scheduler.plan(bench.now_ns) is None
    assert not bench.scheduler.has_work
    third = bench.add(3, 1000, ttft_ms=160, outputs=10)
    bench.step()
    assert third.first_token_ns


def test_a_prompt_that_is_being_computed_lends_no_place() -> None:
    bench = SloBench(seqs=1, budget=200, left=20)
    bench.add(1, 4000, ttft_ms=10_000, outputs=20)
    bench.step()
    bench.add(2, 40, ttft_ms=100, outputs=20)
    assert not bench.is_admitted(2)


@pytest.mark.parametrize(("tokens", "admitted"), [(1000, True), (8000, False)])
def test_a_prompt_that_has_just_arrived_delays_those_that_pause(
    tokens: int, *, admitted: bool
) -> None:
    bench = SloBench(seqs=1, left=40)
    bench.add(1, 40, tpot_ms=20, outputs=40)  # it can pause for about 0.3 s
    bench.step()
    bench.add(2, tokens, ttft_ms=10_000, outputs=40)  # 0.05 ms per token
    bench.add(3, 40, ttft_ms=100, outputs=20)  # 0.1 s
    assert bench.is_admitted(3) is admitted


@pytest.mark.parametrize(("blocks", "admitted"), [(200, True), (60, False)])
def test_a_place_is_lent_at_once_if_blocks_are_free(blocks: int, *, admitted: bool) -> None:
    """A copy of the request that pauses takes longer than the new one may wait."""
    bench = SloBench(
        seqs=1, blocks=blocks, ns_per_copied_block=NS_PER_MS, preemption=Preemption.SWAP
    )
    running = bench.add(1, 800, tpot_ms=100, outputs=40)  # 50 blocks, copied in 50 ms
    while not bench.policy._look().all_decodes.num_decodes:
        bench.step()
    new = bench.add(2, 320, ttft_ms=70, outputs=20)
    assert bench.is_admitted(2) is admitted
    while bench.scheduler.has_work:
        bench.step()
    if admitted:
        assert new.first_token_ns - new.arrival_ns <= 70 * NS_PER_MS
        assert running.preemptions == 1


def test_a_request_that_is_not_admitted_displaces_none_from_a_full_queue() -> None:
    bench = SloBench(blocks=100, seqs=1, left=200)
    bench.scheduler.set_limits(SchedulerLimits(token_budget=2000, max_num_seqs=1, max_waiting=1))
    bench.add(1, 1000, tpot_ms=6, outputs=500, priority=1)
    bench.step()
    low = bench.add(2, 160, ttft_ms=60_000, outputs=10)
    bench.add(3, 160, ttft_ms=300, outputs=60, priority=1)
    assert bench.refusals[-1] is not None
    assert low.state is RequestState.WAITING


def test_those_that_are_late_are_refused_although_more_important_ones_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "_MOST_CONTESTED", 1.0)
    bench = _full_pool(priority=1, left=1500)
    bench.add(2, 800, ttft_ms=200, outputs=10)
    for rid in range(3, 15):
        bench.add(rid, 800, ttft_ms=2000, outputs=10, priority=1)
    for _ in range(60):
        bench.step()
    assert len(bench.policy._undecided.by_rid) > 8
    assert set(bench.removed) == {2}


def test_of_many_ends_none_is_predicted_at_the_longest_possible_output() -> None:
    lengths = LearnedLengths()
    for tokens in range(50, 400):
        lengths.learn(_finished(tokens), ())
    bench = SloBench(blocks=2000, seqs=128)
    bench.policy.predictor = lengths
    for rid in range(64):
        bench.add(rid, 10, tpot_ms=100, outputs=20_000)
    bench.step()
    bench.policy._forecast = None
    assert max(tokens for tokens, *_ in bench.policy._look().ends()) < 1000


@pytest.mark.parametrize("number", [1, 4, 15])
def test_the_ends_of_equal_requests_are_spread_over_their_lengths(number: int) -> None:
    draw = random.Random(3)
    lengths = LearnedLengths()
    for _ in range(2000):
        tokens = round(draw.expovariate(1 / 200)) + 1
        lengths.learn(_finished(tokens), ())
    bench = SloBench(blocks=2000)
    bench.policy.predictor = lengths
    for rid in range(number):
        bench.add(rid, 10, tpot_ms=100, outputs=5000)
    bench.step()
    bench.policy._forecast = None
    left = [tokens for tokens, *_ in bench.policy._look().ends()]
    assert left == sorted(left)
    # The first of n exponential ends comes after 1 / n of the mean, here by its quantile.
    assert left[0] == pytest.approx(200 * _exponential(1 / (number + 1)), rel=0.35, abs=4)
    assert left[-1] == pytest.approx(200 * _exponential(number / (number + 1)), rel=0.35)


def _exponential(share: float) -> float:
    """Return a quantile of the exponential distribution with mean 1, by sixteenths."""
    return -math.log(1 - round(16 * share) / 16)


def _finished(tokens: int) -> ScheduledRequest:
    return ScheduledRequest(
        rid=1,
        arrival_ns=0,
        input_tokens=10,
        max_output_tokens=5000,
        output_limit=5000,
        base_sampled=tokens,
        base_emitted=tokens,
        targets=Targets(),
    )


def test_of_a_class_without_outputs_one_request_is_served_to_learn_them() -> None:
    bench = SloBench(blocks=34)
    bench.policy.predictor = LearnedLengths()
    for rid in (1, 2):
        bench.add(rid, 200, ttft_ms=1000, tpot_ms=6, outputs=100, slo_class="long")
    bench.step()
    # With the lengths that are assumed for an unknown load, the pool is full.
    bench.add(3, 40, e2e_ms=150, outputs=200, slo_class="short")
    assert bench.is_admitted(3)
    bench.add(4, 40, e2e_ms=150, outputs=200, slo_class="short")
    assert not bench.is_admitted(4), "the first will show how long they are"
    bench.step()
    bench.step(stops=[3])
    bench.add(5, 40, e2e_ms=150, outputs=200, slo_class="short")
    assert bench.is_admitted(5), "it is as short as the first"


def _crowded(*, sure: bool) -> tuple[SloBench, ScheduledRequest, ScheduledRequest]:
    """Return a bench with two undecided requests, whose outputs may be too long for their targets.

    13 of 20 blocks are free. By predicted lengths, neither request fits until the running one ends.

    Args:
        sure: True if even the longest output of the running request meets its target.
    """
    bench = SloBench(blocks=20, left=100)
    bench.add(1, 100, e2e_ms=600, outputs=110 if sure else 200)
    bench.step()
    long = bench.add(2, 190, e2e_ms=540, outputs=125)
    short = bench.add(3, 120, e2e_ms=540, outputs=125)
    assert bench.refusals[1:] == [None, None]
    assert set(bench.policy._undecided.by_rid) == {2, 3}
    return bench, long, short


def test_the_shortest_undecided_request_starts_if_no_target_can_be_ensured() -> None:
    bench, long, short = _crowded(sure=False)
    bench.step()
    assert short.state is not RequestState.WAITING
    assert long.state is RequestState.WAITING, "its 12 blocks are not free any more"
    bench.step()
    assert set(bench.policy._undecided.by_rid) == {2}


def test_no_undecided_request_starts_beside_one_whose_target_can_be_ensured() -> None:
    bench, long, short = _crowded(sure=True)
    bench.step()
    assert short.state is long.state is RequestState.WAITING
    assert set(bench.policy._undecided.by_rid) == {2, 3}


@pytest.mark.parametrize("idle", [True, False])
def test_an_idle_engine_rejects_nothing_for_better_requests_that_are_not_there(
    *, idle: bool
) -> None:
    """A burst of better requests was rejected lately, but no other request is here now."""
    bench = SloBench()
    bench.add(1, 100, outputs=1 if idle else 100)
    bench.pass_time(2000)
    bench.step()
    offered = bench.policy._admission._offered
    best = offered.rank(0, 1e9, 1.0)
    for i in range(100):
        offered.add(
            best, NS_PER_S, window_ns=0.0, stay_ns=0.0, now_ns=bench.now_ns + (i - 100) * 10**7
        )
        offered.refuse(best, NS_PER_S)
    request = bench.add(2, 2500, ttft_ms=200, outputs=1)
    assert bench.is_admitted(2) == idle
    if idle:
        while bench.scheduler.has_work:
            bench.step()
        assert 0 < request.first_token_ns - request.arrival_ns <= 200 * NS_PER_MS


def test_short_prompts_that_share_a_step_are_all_admitted() -> None:
    bench = SloBench()
    bench.add(1, 10, tpot_ms=100, outputs=200)
    bench.step()
    burst = [bench.add(rid, 10, ttft_ms=8, outputs=10) for rid in range(2, 11)]
    assert bench.refusals == [None] * 10
    bench.step()
    assert all(0 < r.first_token_ns - r.arrival_ns <= 8 * NS_PER_MS for r in burst)
    more = [bench.add(rid, 10, ttft_ms=8, outputs=10) for rid in range(20, 60)]
    admitted = [r for r, refusal in zip(more, bench.refusals[10:], strict=True) if refusal is None]
    assert 9 <= len(admitted) < 40, "100 tokens take 5 ms, and more of them longer"
    while bench.scheduler.has_work:
        bench.step()
    assert all(r.first_token_ns - r.arrival_ns <= 8 * NS_PER_MS for r in admitted)


@pytest.mark.parametrize(("ttft_ms", "admitted"), [(5, False), (6, True)])
def test_a_prompt_of_the_next_step_needs_no_margin(ttft_ms: int, *, admitted: bool) -> None:
    bench = SloBench()
    request = bench.add(1, 90, ttft_ms=ttft_ms, outputs=10)
    assert bench.is_admitted(1) == admitted
    if admitted:
        bench.step()
        assert request.first_token_ns == 5 * NS_PER_MS


def test_an_end_to_end_target_leaves_time_for_the_prompts_of_others() -> None:
    bench = SloBench(left=20)
    bench.add(1, 10, tpot_ms=100, outputs=1000)
    bench.step()
    request = bench.add(2, 90, e2e_ms=1000, outputs=20)
    prompt = bench.policy._look().prompt(request)
    end_ns = request.arrival_ns + 1000 * NS_PER_MS
    assert prompt.due_ns == prompt.last_ns == end_ns - 19 * 5 * NS_PER_MS
    for epoch in range(1, 200):  # prompts make each step much longer
        bench.policy._prompt_time.observe(20e6, epoch=epoch)
    bench.step()
    prompt = bench.policy._look().prompt(bench.add(3, 90, e2e_ms=1000, outputs=20))
    rest_ms = (prompt.request.arrival_ns - prompt.due_ns) / NS_PER_MS + 1000
    assert rest_ms == 2 * 19 * 5, "twice the time of the decodes alone, and not more"
    assert prompt.last_ns - prompt.request.arrival_ns == (1000 - 19 * 5) * NS_PER_MS


def test_a_more_important_prompt_waits_for_one_that_is_due_before_it() -> None:
    bench = SloBench()
    low = bench.add(1, 600, ttft_ms=60, outputs=10)
    high = bench.add(2, 1000, ttft_ms=1000, outputs=10, priority=1)
    assert bench.refusals == [None, None]
    while bench.scheduler.has_work:
        bench.step()
    assert low.first_token_ns <= 60 * NS_PER_MS, "the other prompt takes 50 ms"
    assert 0 < high.first_token_ns <= 1000 * NS_PER_MS
    assert not bench.removed


def test_a_more_important_prompt_that_has_little_time_goes_first() -> None:
    bench = SloBench()
    low = bench.add(1, 600, ttft_ms=100, outputs=10)
    high = bench.add(2, 1000, ttft_ms=110, outputs=10, priority=1)
    assert bench.is_admitted(2)
    while bench.scheduler.has_work:
        bench.step()
    assert 0 < high.first_token_ns <= 60 * NS_PER_MS, "not after the other prompt"
    assert low.first_token_ns == 0 or low.first_token_ns > high.first_token_ns


def test_a_refused_request_leaves_the_order_of_the_others() -> None:
    bench = SloBench()
    low = bench.add(1, 600, ttft_ms=60, outputs=10)
    high = bench.add(2, 1000, ttft_ms=1000, outputs=10, priority=1)
    assert bench.is_admitted(2)
    bench.add(3, 600, ttft_ms=60, outputs=10)  # both take 60 ms, and the margin is 5 ms
    assert not bench.is_admitted(3)
    while bench.scheduler.has_work:
        bench.step()
    assert low.first_token_ns <= 60 * NS_PER_MS, "before the more important one"
    assert 0 < high.first_token_ns <= 1000 * NS_PER_MS


def test_a_request_is_refused_if_admitted_ones_would_be_late_by_the_order_of_priorities() -> None:
    bench = SloBench()
    low = bench.add(1, 600, ttft_ms=60, outputs=10)
    bench.add(2, 1000, ttft_ms=350, outputs=10, priority=1)
    assert bench.is_admitted(2)
    # By due times, all three would be in time, but the second not in a quarter of its time.
    bench.add(3, 400, ttft_ms=100, outputs=10)
    assert not bench.is_admitted(3)
    while bench.scheduler.has_work:
        bench.step()
    assert low.first_token_ns <= 60 * NS_PER_MS


def test_evictions_begin_while_prompts_that_are_due_before_are_computed() -> None:
    bench = SloBench(blocks=100, budget=100, left=200, preemption=Preemption.RECOMPUTE)
    running = bench.add(1, 600, tpot_ms=10_000, outputs=200)
    while not running.output_tokens:
        bench.step()
    before = bench.add(2, 800, ttft_ms=55, outputs=20)
    after = bench.add(3, 320, ttft_ms=71, outputs=20)
    assert bench.refusals == [None, None, None]
    while not running.preemptions:
        bench.step()
    assert before.state is RequestState.PREFILLING
    while not after.output_tokens:
        bench.step()
    assert before.first_token_ns - before.arrival_ns <= 55 * NS_PER_MS
    assert after.first_token_ns - after.arrival_ns <= 71 * NS_PER_MS


@pytest.mark.parametrize(("second_ms", "copied"), [(48, 2), (2000, 1)])
def test_copies_for_several_urgent_prompts_do_not_wait_in_turn(second_ms: int, copied: int) -> None:
    bench = SloBench(
        blocks=101, left=30, ns_per_copied_block=NS_PER_MS // 10, preemption=Preemption.SWAP
    )
    for rid in range(4):
        bench.add(rid, 370, tpot_ms=100, outputs=40)  # 24 blocks each
    while bench.policy._look().all_decodes.num_decodes < 4:
        bench.step()
    new = [bench.add(8, 320, ttft_ms=48, outputs=20), bench.add(9, 320, ttft_ms=second_ms)]
    assert bench.refusals[-2:] == [None, None]
    assert len({copy.rid for copy in bench.step().copies}) == copied
    while not all(request.first_token_ns for request in new):
        bench.step()
    assert new[0].first_token_ns - new[0].arrival_ns <= 48 * NS_PER_MS
    assert new[1].first_token_ns - new[1].arrival_ns <= second_ms * NS_PER_MS


def test_copies_take_as_long_as_the_requests_that_are_evicted_and_end_with_a_step() -> None:
    bench = SloBench(preemption=Preemption.SWAP, ns_per_copied_block=NS_PER_MS)
    bench.add(1, 1600, outputs=200)
    while not bench.policy._look().all_decodes.num_decodes:
        bench.step()
    small = ScheduledRequest(rid=2, arrival_ns=0, input_tokens=10)
    forecast, view = bench.policy._look(), bench.policy.view
    assert copies_ns(small, forecast, view, step_ns=5e6) == (5 + 101) * NS_PER_MS
    bench.scheduler.preemption = Preemption.RECOMPUTE
    assert copies_ns(small, forecast, view, step_ns=5e6) == 0
