"""Deadline-aware scheduling: each thing it does, and what that is worth."""

from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.slo_bench import STEP_TIME, ExactModel, FixedLengths, SloBench

from goodput_core.spec.choices import LateRequests, Preemption
from goodput_core.steptime import RooflineForm
from goodput_core.units import NS_PER_MS
from goodput_engine.scheduler.prediction import KnownLengths
from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from goodput_engine.scheduler.plan import StepPlan


def _chunks(plan: StepPlan) -> list[tuple[int, int]]:
    return [(chunk.rid, chunk.num_tokens) for chunk in plan.chunks]


def test_the_most_urgent_prompt_starts_first_and_overtakes_one_that_has_started() -> None:
    bench = SloBench(budget=100)
    bench.add(1, 150, ttft_ms=9000)
    assert _chunks(bench.step()) == [(1, 100)]
    bench.add(2, 120, ttft_ms=8000)
    bench.add(3, 40, ttft_ms=500)
    assert _chunks(bench.step()) == [(3, 40), (2, 60)]


def test_a_step_ends_before_the_next_token_of_a_running_request_is_due() -> None:
    bench = SloBench()
    bench.add(1, 50, ttft_ms=1000, tpot_ms=40)
    bench.step()
    bench.add(2, 3000, ttft_ms=10_000, tpot_ms=40)
    plan = bench.step()
    # 0.95 of 40 ms at 0.05 ms per token, the decode among them.
    assert (plan.num_decodes, _chunks(plan)) == (1, [(2, 759)])


def test_a_request_ahead_of_its_schedule_leaves_time_for_prompts() -> None:
    bench = SloBench()
    bench.add(1, 50, ttft_ms=1000, tpot_ms=40)
    for _ in range(3):
        bench.step()  # 5 ms each: 70 ms ahead after the two that follow the first token
    bench.add(2, 3000, ttft_ms=10_000, tpot_ms=40)
    assert _chunks(bench.step()) == [(2, 1999)]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_the_most_urgent_running_request_bounds_a_step_wherever_it_stands(
    order: tuple[int, int],
) -> None:
    bench = SloBench()
    tpot_ms = {1: 40, 2: 200}
    running = {rid: bench.add(rid, 50, ttft_ms=1000, tpot_ms=tpot_ms[rid]) for rid in order}
    bench.step()
    # The second one has paused: its next token is due in 5 ms, though it may take 200 ms.
    running[2].first_token_ns = bench.now_ns - 195 * NS_PER_MS
    bench.add(3, 3000, ttft_ms=10_000, tpot_ms=500)
    # 0.95 of 40 ms at 0.05 ms per token, two decodes among them.
    assert _chunks(bench.step()) == [(3, 758)]


def test_a_request_that_is_behind_catches_up_until_its_end() -> None:
    bench = SloBench(left=20)
    bench.add(1, 50, ttft_ms=1000, tpot_ms=40)
    bench.step()
    bench.pass_time(140)  # 100 ms behind: 20 tokens in 700 ms
    bench.add(2, 3000, ttft_ms=10_000, tpot_ms=40)
    # 0.95 of 35 ms at 0.05 ms per token, the decode among them.
    assert _chunks(bench.step()) == [(2, 664)]


def test_no_step_is_longer_than_half_of_the_time_that_recent_requests_can_wait() -> None:
    bench = SloBench(budget=10_000)
    bench.add(1, 160, ttft_ms=100)  # its prompt takes 8 ms, so it can wait for 92 ms
    bench.step()
    bench.add(2, 9000, ttft_ms=10_000)
    assert _chunks(bench.step()) == [(2, 46 * 20 - 1)]


def test_steps_leave_room_for_urgent_requests_as_long_as_prompts_progress() -> None:
    """Half of the 15 ms that the urgent one can wait are less than two steps without prompts."""
    bench = SloBench()
    bench.add(1, 40, outputs=1000)
    bench.step()
    bench.add(2, 20, outputs=1, ttft_ms=20)
    bench.step()
    bench.add(3, 10_000, outputs=1, ttft_ms=60_000)
    assert [bench.step().shape.num_tokens for _ in range(3)] == [200, 200, 200]


def test_later_chunks_of_a_long_prompt_are_smaller_because_they_read_more() -> None:
    """Each token of context takes 2 µs, so 4,000 tokens take as long as 160 new ones."""

    class Reads(ExactModel):
        form = RooflineForm(
            c0_ns=5e6, c1_ns_per_token=5e4, c2_ns_per_context_token=2000, c4_ns_per_request=0
        )
        step_ns = form.step_ns
        chunk_within = form.chunk_within

    bench = SloBench()
    model = Reads()
    bench.policy.model = model
    bench.add(1, 40, tbt_ms=40, outputs=1000)
    bench.step()
    bench.add(2, 10_000, ttft_ms=60_000)
    plans = [bench.step() for _ in range(12)]
    assert plans[-1].chunks[0].start > 4000
    assert all(35e6 < model.step_ns(plan.shape) <= 38e6 for plan in plans)


def test_a_prompt_that_waits_for_blocks_becomes_urgent_before_it_is_late() -> None:
    bench = SloBench(blocks=400, left=200, preemption=Preemption.RECOMPUTE)
    ahead = bench.add(1, 1600, tpot_ms=40, outputs=300)
    for _ in range(10):
        bench.step()  # 5 ms each, so that it is far ahead of its schedule
    lower = bench.add(2, 4500, ttft_ms=5000, outputs=300)
    bench.step()
    urgent = bench.add(3, 1000, ttft_ms=140, outputs=300, priority=1)
    while not urgent.first_token_ns:
        bench.step()
    assert (ahead.preemptions, lower.preemptions) == (1, 0), "the first one has time to pause"
    assert urgent.first_token_ns - urgent.arrival_ns <= 140 * NS_PER_MS


def test_cached_prompt_tokens_are_no_work() -> None:
    hashes = range(100, 160)
    bench = SloBench()
    bench.add(1, 1000, ttft_ms=1000, outputs=1, block_hashes=hashes)
    bench.step()
    bench.add(2, 1000, ttft_ms=40, outputs=1, block_hashes=hashes)
    bench.add(3, 1000, ttft_ms=40, outputs=1)
    assert [refusal is None for refusal in bench.refusals] == [True, True, False]
    assert _chunks(bench.step()) == [(2, 40)]


def test_a_promise_on_gaps_bounds_a_step_whatever_is_ahead() -> None:
    bench = SloBench()
    bench.add(1, 50, ttft_ms=1000, tpot_ms=40, tbt_ms=20)
    for _ in range(3):
        bench.step()
    bench.add(2, 3000, ttft_ms=10_000, tpot_ms=40)
    assert _chunks(bench.step()) == [(2, 379)]


@pytest.mark.parametrize("targets", [{"tbt_ms": 4}, {"tpot_ms": 40, "tbt_ms": 4}])
def test_a_promise_on_gaps_that_no_step_keeps_does_not_shorten_the_steps_of_others(
    targets: dict[str, Any],
) -> None:
    bench = SloBench()
    bench.add(1, 50, ttft_ms=1000, outputs=1000, **targets)
    for _ in range(3):
        bench.step()
    bench.add(2, 3000, ttft_ms=10_000, tpot_ms=40)
    assert _chunks(bench.step()) == [(2, 2000)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_steps_in_flight_are_part_of_the_wait(depth: int) -> None:
    bench = SloBench(depth=depth)
    bench.add(1, 50, ttft_ms=1000, tpot_ms=40, outputs=3000)
    bench.step()
    flying = []
    while (plan := bench.scheduler.plan(bench.now_ns)) is not None:
        flying.append(plan)
        bench.add(2 + len(flying), 3000, ttft_ms=60_000, tpot_ms=60)
    spent_ns = sum(STEP_TIME.step_ns(plan.shape) for plan in flying[:-1])
    due_ns = 40 * NS_PER_MS * len(flying)
    assert STEP_TIME.step_ns(flying[-1].shape) <= due_ns - spent_ns


def test_prompts_get_on_even_where_decodes_fill_the_step() -> None:
    bench = SloBench()
    bench.add(1, 50, ttft_ms=1000, tpot_ms=5)
    bench.step()
    bench.pass_time(3)
    bench.add(2, 500, ttft_ms=60_000)
    assert _chunks(bench.step()) == [(2, 64)]


def test_an_infeasible_request_is_rejected_at_once_with_a_retry_time() -> None:
    bench = SloBench()
    for rid in range(1, 11):
        # 50 ms each, a millisecond for the decodes that they add, and 8 % as margin.
        bench.add(rid, 1000, ttft_ms=546)
    bench.add(11, 1000, ttft_ms=546)
    bench.add(12, 1000, ttft_ms=610)
    assert bench.refusals[:10] == [None] * 10
    assert bench.refusals[11] is None
    rejection = bench.refusals[10]
    assert rejection is not None
    assert (rejection.reason, rejection.retry_after_s) == ("unattainable", 1)
    assert bench.scheduler.stats.shed == 1


def test_the_margin_is_at_least_a_step_of_decodes_and_a_step_is_cut_where_a_prompt_is_due() -> None:
    bench = SloBench()
    requests = [
        bench.add(1, 700, ttft_ms=41),  # 35 ms, and 5 ms as margin; a full step takes 100 ms
        bench.add(2, 700, ttft_ms=75),
        bench.add(3, 700, ttft_ms=77),  # 70 ms, and 8 % as margin
    ]
    assert [refusal is None for refusal in bench.refusals] == [True, False, True]
    while not requests[2].first_token_ns:
        bench.step()
    assert requests[0].first_token_ns <= 41 * NS_PER_MS
    assert requests[2].first_token_ns <= 77 * NS_PER_MS


def test_a_request_without_targets_is_never_rejected() -> None:
    bench = SloBench()
    for rid in range(1, 30):
        bench.add(rid, 1000)
    assert bench.refusals == [None] * 29


def test_an_admitted_request_is_not_sacrificed_for_shorter_ones() -> None:
    bench = SloBench(budget=1000)
    requests = [bench.add(1, 9000, ttft_ms=600)]
    requests += [bench.add(rid, 900, ttft_ms=480) for rid in range(2, 11)]
    # The long prompt takes 450 ms, so three short ones of 45 ms may go before it.
    assert [refusal is None for refusal in bench.refusals] == [True] * 4 + [False] * 6
    while bench.scheduler.has_work and not all(r.output_tokens for r in requests[:4]):
        bench.step()
    for request in requests[:4]:
        assert request.first_token_ns <= request.arrival_ns + (request.targets.ttft_ns or 0)


def test_a_more_important_request_displaces_as_few_waiting_ones_as_it_must() -> None:
    bench = SloBench(budget=1000)
    bench.add(1, 4000, ttft_ms=1000)
    bench.step()
    batch = [bench.add(rid, 1000, ttft_ms=320) for rid in range(2, 5)]
    urgent = bench.add(5, 4000, ttft_ms=330, priority=1)
    assert bench.refusals == [None] * 5
    removed = [removal.request for removal in bench.scheduler.admission.take_removed()]
    assert 0 < len(removed) < len(batch)
    kept = [request for request in (urgent, *batch) if request not in removed]
    while bench.scheduler.has_work and not all(r.output_tokens for r in kept):
        bench.step()
    for request in kept:
        assert request.first_token_ns <= request.arrival_ns + (request.targets.ttft_ns or 0)


@pytest.mark.parametrize(("weight", "admitted"), [(1, False), (2, True)])
def test_of_equal_priority_a_request_displaces_only_less_weight(
    weight: int, *, admitted: bool
) -> None:
    bench = SloBench(budget=1000)
    bench.add(1, 4000, ttft_ms=300)
    bench.step()
    bench.add(2, 3000, ttft_ms=430)
    bench.add(3, 3000, ttft_ms=430, weight=weight)
    assert (bench.refusals[-1] is None) is admitted
    removed = [removal.request.rid for removal in bench.scheduler.admission.take_removed()]
    assert removed == ([2] if admitted else [])


def test_late_requests_are_dropped_before_they_miss_if_the_manifest_says_so() -> None:
    bench = SloBench(budget=1000, late_requests=LateRequests.DROP)
    bench.add(1, 4000, ttft_ms=300)
    late = bench.add(2, 2000, ttft_ms=400)
    bench.pass_time(320)  # not missed yet, but its prompt takes 100 ms
    assert bench.scheduler.plan(bench.now_ns) is None
    removed = [removal.request for removal in bench.scheduler.admission.take_removed()]
    assert late in removed


def test_after_misses_a_class_gets_a_buffer_and_loses_it_again() -> None:
    bench = SloBench(budget=1000, seqs=1)
    bench.add(1, 100, ttft_ms=300, outputs=5)
    bench.add(2, 100, ttft_ms=300, outputs=1)
    bench.pass_time(400)
    while bench.scheduler.has_work:
        bench.step()
    bench.add(3, 5000, ttft_ms=330)
    assert bench.refusals[-1] is not None, "250 ms of work, a step, and a buffer do not fit"
    fresh = SloBench(budget=1000, seqs=1)
    fresh.add(3, 5000, ttft_ms=330)
    assert fresh.refusals[-1] is None


def test_a_late_request_widens_the_buffer_once_and_before_it_ends() -> None:
    bench = SloBench(budget=1000, seqs=1)
    first = bench.add(1, 100, ttft_ms=300, outputs=100)
    bench.add(2, 100, ttft_ms=300, outputs=1)
    bench.pass_time(400)
    bench.step()
    bench.step()
    assert first.output_tokens == 2
    buffers_ns = bench.policy._admission._buffers_ns
    after_ns = buffers_ns[""]
    assert after_ns > 50 * NS_PER_MS, "two of nearly a step"
    while bench.scheduler.has_work:
        bench.step()
    assert buffers_ns[""] == after_ns


def test_a_hundredth_of_the_requests_may_miss_before_the_buffer_of_their_class_is_wider() -> None:
    bench = SloBench(budget=1000, seqs=1)

    def serve(rid: int, ttft_ms: int, *, late_ms: int = 0) -> float:
        bench.add(rid, 100, ttft_ms=ttft_ms, outputs=1, slo_class="a")
        bench.pass_time(late_ms)
        while bench.scheduler.has_work:
            bench.step()
        return bench.policy._admission._buffers_ns["a"]

    widened_ns = serve(1, 300, late_ms=400)
    assert widened_ns > 0
    kept_ns = [serve(rid, 60_000) for rid in range(2, 101)]
    assert kept_ns[49] == pytest.approx(widened_ns * (1 - 50 / 99))
    assert kept_ns[-1] == pytest.approx(0, abs=1), "99 met targets outweigh one that was missed"
    assert bench.policy._admission._buffers_ns.keys() == {"a"}, "no other class has a buffer"


def test_prompts_are_predicted_with_the_95_percent_quantile_of_the_step_times() -> None:
    bench, stream = SloBench(left=9000), random.Random(1)
    bench.add(1, 100, outputs=9000)
    slower = [1 + stream.random() / 2 for _ in range(4000)]
    factors = []
    for ratio in slower:
        bench.step(slower=ratio)
        factors.append(bench.policy._step_factor)
    assert statistics.fmean(factors[2000:]) == pytest.approx(1.475, abs=0.02)
    exceeded = sum(ratio > factor for ratio, factor in zip(slower[1:], factors, strict=False))
    assert exceeded / len(slower) == pytest.approx(0.05, abs=0.02)
    for _ in range(2000):
        bench.step()
    assert bench.policy._step_factor == 1, "every step takes its predicted time"


def test_after_a_missed_tpot_target_a_share_of_the_pool_is_left_free() -> None:
    def admitted(tokens: int, *, tpot_ms: int, is_short: bool = True) -> bool:
        bench = SloBench(blocks=100, left=1)
        bench.add(1, 100, ttft_ms=1000, tpot_ms=tpot_ms, outputs=3)
        if is_short:
            bench.add(9, 1500, ttft_ms=1000, outputs=3)  # waits for the first, and is in time
        while bench.scheduler.has_work:
            bench.step()
            bench.pass_time(20)
        bench.add(2, 800, ttft_ms=1000, outputs=200)
        bench.step()
        bench.add(3, tokens, ttft_ms=300, outputs=40)
        return bench.is_admitted(3)

    assert not admitted(1540, tpot_ms=100), "97 of the 100 blocks, of which 5 are left free"
    assert admitted(1470, tpot_ms=100)
    assert not admitted(1470, tpot_ms=10)
    assert admitted(1400, tpot_ms=10)
    assert admitted(1470, tpot_ms=10, is_short=False), "memory was not the cause"


def test_a_late_request_is_held_back_while_others_can_be_on_time() -> None:
    bench = SloBench(blocks=3000, budget=400)
    bench.add(1, 50, ttft_ms=200)  # favoured, as the oldest
    late = bench.add(2, 50, ttft_ms=200)
    bench.pass_time(30_000)
    bench.step()
    assert late.output_tokens == 1
    bench.add(3, 30_000, ttft_ms=60_000)
    tokens = late.output_tokens
    for _ in range(32):
        bench.step()
    assert late.output_tokens - tokens == 2, "one step in sixteen"
    assert late.state in {RequestState.READY, RequestState.DECODING}


def test_the_oldest_late_request_gets_a_share_of_every_step_once_it_is_overdue() -> None:
    bench = SloBench(budget=1600, blocks=3000)
    bench.add(1, 1000, ttft_ms=500)
    bench.add(2, 1000, ttft_ms=500)
    bench.pass_time(29_900)
    bench.add(3, 20_000, ttft_ms=60_000)
    assert _chunks(bench.step()) == [(3, 1600)]
    bench.pass_time(100)
    assert _chunks(bench.step()) == [(1, 100), (3, 1500)]
    assert _chunks(bench.step()) == [(1, 100), (3, 1500)]


def test_a_late_prompt_that_has_started_progresses_in_the_turns_of_late_requests() -> None:
    bench = SloBench(budget=400, blocks=3000)
    late = bench.add(1, 3000, ttft_ms=200)
    bench.step()
    bench.pass_time(300)
    bench.add(2, 30_000, ttft_ms=60_000)
    done = late.base_computed
    for _ in range(33):
        bench.step()
    assert late.base_computed - done >= 2 * 64, "one step in sixteen"


def test_the_oldest_prompt_is_favoured_even_if_it_has_started_or_has_no_target() -> None:
    for ttft_ms in (1000, None):
        bench = SloBench(budget=1600, blocks=4000)
        oldest = bench.add(1, 9000, ttft_ms=ttft_ms)
        bench.step()
        done = oldest.base_computed
        bench.pass_time(30_000)
        bench.add(2, 40_000, ttft_ms=90_000)
        for _ in range(4):
            bench.step()
        assert oldest.base_computed - done >= 3 * 100, "a sixteenth of each step"


@settings(max_examples=examples(40), deadline=None)
@given(
    seqs=st.integers(1, 6),
    blocks=st.integers(80, 400),
    flood=st.tuples(st.integers(1, 300), st.integers(1, 12)),
    late=st.tuples(st.integers(1, 1200), st.integers(1, 12)),
)
def test_a_late_request_progresses_although_requests_on_time_keep_arriving(
    seqs: int, blocks: int, flood: tuple[int, int], late: tuple[int, int]
) -> None:
    bench = SloBench(seqs=seqs, blocks=blocks, budget=400)
    # The first fills the device, so that the second one misses its promise while it waits.
    bench.add(1, 300, outputs=30)
    tokens, outputs = late
    request = bench.add(2, tokens, outputs=outputs, ttft_ms=100)
    bench.pass_time(30_000)
    rid, steps = 2, 0
    while request.state is not RequestState.FINISHED:
        while len(bench.scheduler.waiting) <= seqs:
            rid += 1
            bench.add(rid, flood[0], outputs=flood[1], ttft_ms=2_000, tpot_ms=100)
            if bench.refusals[-1] is not None:
                break
        bench.step()
        steps += 1
        # A place once another ends, 64 tokens of its prompt a step, every fourth step a token.
        assert steps <= 30 + flood[1] + 8 + tokens // 64 + 8 * outputs, "it starves"


def test_late_requests_get_the_whole_step_if_none_can_be_on_time() -> None:
    bench = SloBench(budget=1600)
    bench.add(1, 1000, ttft_ms=500)
    bench.add(2, 1000, ttft_ms=500)
    bench.pass_time(600)
    assert _chunks(bench.step()) == [(1, 1000), (2, 600)]


def test_the_request_with_the_most_slack_is_evicted() -> None:
    bench = SloBench(blocks=6, left=1)
    patient = bench.add(1, 40, ttft_ms=1000, tpot_ms=900, outputs=40)
    urgent = bench.add(2, 40, ttft_ms=1000, tpot_ms=20, outputs=40)
    while not bench.scheduler.stats.preemptions:
        bench.step()
    assert (patient.preemptions, urgent.preemptions) == (1, 0)


@pytest.mark.parametrize(
    ("ns_per_block", "swapped"),
    [(NS_PER_MS // 100, True), (50 * NS_PER_MS, False)],
    ids=["fast copies", "slow copies"],
)
def test_a_victim_is_swapped_or_recomputed_whichever_resumes_it_sooner(
    *, ns_per_block: int, swapped: bool
) -> None:
    bench = SloBench(blocks=54, left=1, ns_per_copied_block=ns_per_block)
    patient = bench.add(1, 400, ttft_ms=1000, tpot_ms=900, outputs=40)
    bench.add(2, 400, ttft_ms=1000, tpot_ms=20, outputs=40)
    while patient.state is not RequestState.FINISHED:
        bench.step()
    assert patient.preemptions > 0
    stats = bench.scheduler.stats
    assert (stats.swapped_tokens > 0, stats.recomputed_tokens > 0) == (swapped, not swapped)


def test_a_late_request_is_displaced_by_one_that_can_be_on_time() -> None:
    bench = SloBench(blocks=5)
    bench.add(1, 10, ttft_ms=200, outputs=5)  # favoured, as the oldest
    late = bench.add(2, 40, ttft_ms=200, outputs=8)
    bench.pass_time(300)
    bench.step()
    bench.step()
    assert late.output_tokens == 2
    bench.add(3, 40, ttft_ms=500, outputs=8)
    assert _chunks(bench.step()) == [(3, 40)]
    assert late.preemptions == 1


@pytest.mark.parametrize(
    ("preemption", "ms_per_block", "displaces"),
    [
        (Preemption.SWAP, 1, True),
        (Preemption.SWAP, 10, False),
        (Preemption.HYBRID, 10, True),
        (Preemption.RECOMPUTE, None, True),
    ],
)
def test_an_urgent_prompt_displaces_only_one_that_resumes_in_time(
    preemption: Preemption, ms_per_block: int | None, *, displaces: bool
) -> None:
    copy_ns = None if ms_per_block is None else ms_per_block * NS_PER_MS
    bench = SloBench(blocks=100, preemption=preemption, ns_per_copied_block=copy_ns)
    running = bench.add(1, 1000, tpot_ms=1000, outputs=200)
    bench.step()
    bench.add(2, 640, ttft_ms=200, outputs=200)
    assert bench.refusals == [None, None]
    bench.step()
    assert bool(running.preemptions) is displaces


@pytest.mark.parametrize(("priority", "displaces"), [(0, False), (1, True)])
def test_an_urgent_prompt_displaces_a_lower_level_even_if_that_cannot_resume_in_time(
    priority: int, *, displaces: bool
) -> None:
    bench = SloBench(blocks=100)
    running = bench.add(1, 1000, tpot_ms=10, outputs=200)
    bench.step()
    bench.add(2, 640, ttft_ms=150, outputs=200, priority=priority)
    assert bench.refusals[0] is None
    while bench.now_ns < 180 * NS_PER_MS and not running.preemptions:
        bench.step()
    assert bool(running.preemptions) is displaces


@pytest.mark.parametrize("priority", [0, 1], ids=["beside a waiting one", "in place of one"])
def test_an_admitted_request_takes_memory_from_the_next_one_of_the_same_step(
    priority: int,
) -> None:
    bench = SloBench(blocks=100, left=60)
    bench.add(1, 640 if priority else 160, ttft_ms=200, outputs=200)
    bench.add(2, 1000, ttft_ms=200, outputs=200, priority=priority)
    displaced = [removal.request.rid for removal in bench.scheduler.admission.take_removed()]
    assert displaced == ([1] if priority else [])
    bench.add(3, 640, ttft_ms=200, outputs=200, priority=priority)
    assert bench.refusals[:2] == [None, None]
    assert not bench.is_admitted(3)


@pytest.mark.parametrize(("priority", "admitted"), [(0, False), (1, True)])
def test_blocks_of_running_requests_of_a_lower_level_count_as_free(
    priority: int, *, admitted: bool
) -> None:
    bench = SloBench(blocks=100, left=60)
    bench.add(1, 1000, tpot_ms=10, outputs=200)
    bench.step()
    bench.add(2, 640, ttft_ms=150, outputs=200, priority=priority)
    assert bench.is_admitted(2) is admitted


@pytest.mark.parametrize(
    ("passed_ms", "left_ms", "admitted"),
    [(0, 690, False), (0, 720, True), (90, 600, False), (90, 630, True)],
)
def test_a_request_waits_for_an_end_that_was_predicted_before_its_arrival(
    passed_ms: int, left_ms: int, *, admitted: bool
) -> None:
    bench = SloBench(blocks=100, left=60)
    bench.add(1, 1000, tpot_ms=14, outputs=200)  # it cannot pause for the stay of the third
    bench.step()
    bench.add(2, 160, ttft_ms=1000, outputs=200)
    # The first ends in 300 ms, or in 338 ms beside the two prompts. It may take twice as long.
    bench.pass_time(passed_ms)
    bench.add(3, 640, ttft_ms=left_ms - passed_ms, outputs=200)  # 32 ms
    assert bench.is_admitted(3) is admitted


@pytest.mark.parametrize(("left_ms", "admitted"), [(840, False), (870, True)])
def test_while_few_outputs_are_known_a_wait_has_a_margin(left_ms: int, *, admitted: bool) -> None:
    bench = SloBench(blocks=100, left=60)
    bench.policy.predictor = FixedLengths(60, learned=3)
    bench.add(1, 1000, tpot_ms=14, outputs=200)
    bench.step()
    bench.add(2, 160, ttft_ms=1000, outputs=200)
    # The first ends a quarter later than in 300 ms, and 38 ms later beside the two prompts. It may
    # take twice as long.
    bench.add(3, 640, ttft_ms=left_ms, outputs=200)
    assert bench.is_admitted(3) is admitted


def test_a_prompt_that_ends_in_the_step_leaves_a_margin() -> None:
    bench = SloBench()
    bench.add(1, 500, ttft_ms=160)
    bench.add(2, 5000, ttft_ms=1000)
    bench.pass_time(100)
    plan = bench.step()
    assert _chunks(plan)[0] == (1, 500)
    assert 56 * NS_PER_MS <= STEP_TIME.step_ns(plan.shape) <= 57 * NS_PER_MS


def test_the_blocks_of_the_favoured_late_request_are_not_free() -> None:
    bench = SloBench(blocks=100, budget=400)
    bench.add(1, 1200, ttft_ms=100, outputs=200)
    bench.pass_time(30_000)
    bench.step()
    assert bench.policy._favoured is not None
    bench.add(2, 640, ttft_ms=100, outputs=200)
    assert not bench.is_admitted(2), "25 blocks are free, and none for 100 ms"


def test_steps_leave_time_for_the_context_of_the_favoured_late_request() -> None:
    form = RooflineForm(
        c0_ns=5_000_000, c1_ns_per_token=50_000, c2_ns_per_context_token=200, c4_ns_per_request=0
    )
    bench = SloBench(blocks=20_000, left=500, step_time=form)
    late = bench.add(1, 30_000, ttft_ms=10_000)
    bench.pass_time(30_000)
    bench.step()
    paced = bench.add(2, 50, ttft_ms=1000, tpot_ms=20)
    for rid in range(3, 123):  # their prompts fill the steps
        bench.add(rid, 1000, ttft_ms=200_000, outputs=1)
    for at_least in (1, 100):
        while late.sampled_tokens < at_least:
            bench.step()
        mean_ms = (bench.now_ns - paced.first_token_ns) / (paced.sampled_tokens - 1) / NS_PER_MS
        assert 19.5 <= mean_ms <= 20
    assert bench.policy._favoured is late
    assert len(bench.scheduler.waiting), "prompts used the rest of the time"


def test_two_waves_of_requests_take_turns_if_they_can_catch_up() -> None:
    """Each fills the pool. A token takes 5 ms and is due after 20, so all can be in time."""
    bench = SloBench(blocks=110, ns_per_copied_block=1)
    bench.policy.predictor = KnownLengths(lambda _: 50)
    requests = []
    for wave in range(2):
        for rid in range(10 * wave, 10 * wave + 10):
            requests.append(bench.add(rid, 100, outputs=50, ttft_ms=100, tpot_ms=20))
            assert bench.is_admitted(rid)
        bench.step()
    ends_ns: dict[int, int] = {}
    while bench.scheduler.has_work:
        bench.step()
        for request in requests:
            if request.state is RequestState.FINISHED:
                ends_ns.setdefault(request.rid, bench.now_ns)
    assert bench.scheduler.stats.preemptions
    for request in requests:
        assert request.first_token_ns - request.arrival_ns <= 100 * NS_PER_MS
        assert ends_ns[request.rid] - request.first_token_ns <= 49 * 20 * NS_PER_MS


def test_a_request_does_not_start_if_its_decodes_would_break_a_running_target() -> None:
    bench = SloBench(seqs=200)
    for rid in range(130):
        bench.add(rid, 1, ttft_ms=5000, tpot_ms=6)
    for _ in range(4):
        bench.step()
    # 0.95 of 6 ms at 0.05 ms per token.
    assert bench.scheduler.num_running == 114


HOPELESS = {
    "TTFT below the time of the prompt": {"ttft_ms": 20},
    "TPOT below a step": {"ttft_ms": 500, "tpot_ms": 4},
    "gaps below a step": {"ttft_ms": 500, "tbt_ms": 4},
    "end-to-end target below a short output": {"e2e_ms": 100},
}


@pytest.mark.parametrize("targets", HOPELESS.values(), ids=HOPELESS)
def test_nothing_is_kept_free_for_requests_that_even_an_idle_engine_would_miss(
    targets: dict[str, Any],
) -> None:
    """Half of the capacity is asked for, and four times as much by hopeless requests."""
    bench = SloBench(left=20)
    rid, refused = 0, []
    for turn in range(600):
        for _ in range(4):
            rid += 1
            bench.add(rid, 500, outputs=20, priority=1, weight=9, **targets)
        rid += 1
        if turn % 5 == 0:
            bench.add(rid, 500, outputs=20, ttft_ms=500, tpot_ms=100)
            refused.append(bench.refusals[-1])
        if bench.scheduler.has_work:
            bench.step()
        else:
            bench.pass_time(10)
    assert refused.count(None) >= 0.97 * len(refused)


def test_a_hopeless_request_is_served_by_an_idle_engine_only_and_the_client_learns_why() -> None:
    bench = SloBench()
    bench.add(1, 50, ttft_ms=500, tpot_ms=4)
    assert bench.is_admitted(1)
    bench.step()
    bench.add(2, 50, ttft_ms=500, tpot_ms=4)
    refusal = bench.refusals[-1]
    assert refusal is not None
    assert refusal.detail.startswith("this engine cannot meet the latency targets of the request")
    bench.add(3, 50, ttft_ms=500, tpot_ms=40)
    assert bench.is_admitted(3)


@pytest.mark.parametrize(("chunk", "admitted"), [(None, True), (100, False), (50, False)])
def test_a_prompt_in_limited_chunks_takes_a_step_for_each(
    chunk: int | None, *, admitted: bool
) -> None:
    """It takes 50 ms in one step. In chunks of 100 tokens, other chunks may double its steps."""
    bench = SloBench(chunk=chunk)
    bench.add(1, 50, outputs=1000, ttft_ms=500, tpot_ms=40)
    for _ in range(3):
        bench.step()
    bench.add(2, 1000, ttft_ms=90, tpot_ms=40)
    assert bench.is_admitted(2) is admitted
