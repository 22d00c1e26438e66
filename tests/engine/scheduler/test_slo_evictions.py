"""Which requests run and give way while blocks are few, and what is learned from cancelled ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.builders.slo_bench import FixedLengths, SloBench

from goodput_core.spec.choices import LateRequests
from goodput_engine.scheduler.policies.slo.evictions import EvictionOrder
from goodput_engine.scheduler.prediction import LearnedLengths
from goodput_engine.scheduler.request_table import RequestState, ScheduledRequest

if TYPE_CHECKING:
    from goodput_engine.scheduler.policies.slo.policy import SloPolicy


class _Censored(FixedLengths):
    """Records the outputs that were cancelled: rid, tokens."""

    def __init__(self, left: int) -> None:
        super().__init__(left)
        self.censored: list[tuple[int, int]] = []

    def censor(self, request: ScheduledRequest) -> None:
        self.censored.append((request.rid, request.sampled_tokens))


def _loss(policy: SloPolicy, request: ScheduledRequest) -> float:
    return EvictionOrder(policy.view, policy._look()).loss(request)


@pytest.mark.parametrize(
    ("priority", "ttft_ms", "others_ms"),
    [(0, None, None), (0, 1900, 5000), (5, None, 5000), (5, 1900, 5000)],
    ids=["no targets", "equal", "higher, no target", "higher"],
)
def test_a_large_request_starts_though_small_ones_fit_again_and_again(
    priority: int, ttft_ms: int | None, others_ms: int | None
) -> None:
    bench = SloBench(blocks=20)
    for rid in range(1, 5):
        bench.add(rid, 40, ttft_ms=others_ms, outputs=20)
    bench.step()
    large = bench.add(5, 200, ttft_ms=ttft_ms, priority=priority, outputs=20)
    for step in range(200):
        if step % 4 == 0:
            bench.add(6 + step, 40, ttft_ms=others_ms, outputs=20)
        bench.step()
        if large.first_scheduled_ns:
            return
    raise AssertionError("it starves")


def test_a_favoured_request_gives_way_to_a_higher_level() -> None:
    bench = SloBench(blocks=20)
    old = bench.add(1, 200, ttft_ms=100, outputs=100)
    bench.pass_time(30_000)
    bench.step()
    assert bench.policy._favoured is old
    urgent = bench.add(2, 200, ttft_ms=60, priority=1, outputs=50)
    while not urgent.first_scheduled_ns:
        bench.step()
    assert old.preemptions == 1


@pytest.mark.parametrize("favoured", [False, True])
def test_a_stuck_late_request_holds_no_blocks_that_others_need_unless_it_is_favoured(
    *, favoured: bool
) -> None:
    bench = SloBench(blocks=20, budget=100)
    late = bench.add(1, 200, ttft_ms=50, outputs=100)
    bench.pass_time(30_000 if favoured else 100)
    bench.step()
    assert late.state is RequestState.PREFILLING
    late.gained_nothing = True
    urgent = bench.add(2, 200, ttft_ms=100, priority=1, outputs=5)
    bench.step()
    assert late.preemptions == (0 if favoured else 1)
    while not urgent.first_scheduled_ns:
        bench.step()


def test_a_favoured_request_does_not_start_where_a_higher_level_would_evict_it() -> None:
    bench = SloBench(blocks=20)
    bench.add(1, 200, outputs=30)
    bench.step()
    old = bench.add(2, 200, ttft_ms=60, outputs=100)
    bench.pass_time(30_000)
    bench.step()
    assert bench.policy._favoured is old
    above = bench.add(3, 200, ttft_ms=5000, priority=1, outputs=5)
    while not old.first_scheduled_ns:
        bench.step()
    assert above.sampled_tokens == 5
    assert old.preemptions == 0


def test_the_request_with_the_least_weight_is_evicted_if_any_would_miss() -> None:
    bench = SloBench(blocks=6, left=1)
    light = bench.add(1, 40, ttft_ms=1000, tpot_ms=6, outputs=40)
    heavy = bench.add(2, 40, ttft_ms=1000, tpot_ms=6, outputs=40, weight=2)
    while not bench.scheduler.stats.preemptions:
        bench.step()
    assert (heavy.preemptions, light.preemptions) == (0, 1)


@pytest.mark.parametrize("other_ms", [120, 400], ids=["can hardly be met", "is far"])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_request_whose_chance_falls_least_is_evicted(other_ms: int, *, is_first: bool) -> None:
    """A pause loses little if the target can hardly be met, or is far; else nearly all."""
    bench = SloBench(blocks=7, left=1)
    targets_ms = (200, other_ms) if is_first else (other_ms, 200)
    held = {
        e2e_ms: bench.add(rid, 40, e2e_ms=e2e_ms, outputs=40)
        for rid, e2e_ms in enumerate(targets_ms)
    }
    bench.step()
    bench.policy.predictor = LearnedLengths()
    losses = dict.fromkeys(held, 0.0)
    while not bench.scheduler.stats.preemptions:
        losses = {e2e_ms: _loss(bench.policy, one) for e2e_ms, one in held.items()}
        bench.step()
    assert losses[200] > 0.5
    assert losses[other_ms] < 0.05
    assert (held[200].preemptions, held[other_ms].preemptions) == (0, 1)


def test_what_a_pause_loses_is_at_most_the_chance_that_is_left() -> None:
    bench = SloBench()
    sure = bench.add(1, 40, tpot_ms=5, ttft_ms=1000)
    unsure = bench.add(2, 40, tpot_ms=5, ttft_ms=1000, e2e_ms=500)
    bench.policy.predictor = LearnedLengths()
    bench.step()
    assert _loss(bench.policy, sure) == 1, "it cannot resume before its next token is due"
    forecast = bench.policy._look()
    tokens = forecast.tokens_in_time(unsure)
    assert tokens is not None
    lost = _loss(bench.policy, unsure)
    assert lost == pytest.approx(forecast.chance_within(unsure, tokens), abs=0.01)
    assert lost < 0.5


def test_the_output_of_a_cancelled_request_is_learned_once() -> None:
    bench = SloBench()
    bench.policy.predictor = lengths = _Censored(left=20)
    bench.add(1, 40, ttft_ms=5000)
    bench.step()
    bench.step()
    bench.add(2, 40, ttft_ms=5000)
    for rid in (1, 2, 1):
        bench.scheduler.cancel(rid)
    assert lengths.censored == [(1, 2)], "the other has no output"


def test_an_output_that_has_ended_is_not_learned_again_when_its_blocks_are_freed() -> None:
    bench = SloBench()
    bench.policy.predictor = lengths = _Censored(left=20)
    held = bench.add(1, 40, ttft_ms=5000, outputs=2)
    held.holds_blocks = True
    bench.step()
    bench.step()
    assert held.state is RequestState.HELD
    assert bench.scheduler.cancel(1)
    assert not lengths.censored


def test_the_output_of_a_dropped_request_is_learned() -> None:
    bench = SloBench(late_requests=LateRequests.DROP)
    bench.policy.predictor = lengths = _Censored(left=200)
    bench.add(1, 40, ttft_ms=5000, tpot_ms=7)
    bench.step()
    bench.pass_time(5000)
    bench.add(2, 40, ttft_ms=5000)
    bench.step()
    assert lengths.censored == [(1, 1)]


def test_if_no_target_can_be_ensured_the_request_goes_that_frees_most_memory() -> None:
    bench = SloBench(left=100)
    small = bench.add(1, 40, e2e_ms=4000)
    large = bench.add(2, 400, e2e_ms=4500)
    bench.step()
    bench.step()
    policy = bench.policy
    assert _loss(policy, small) == _loss(policy, large) == 0
    assert policy.eviction_key(large) > policy.eviction_key(small)


def test_if_targets_can_be_ensured_the_request_goes_that_loses_the_least_weight() -> None:
    bench = SloBench(left=100)
    small = bench.add(1, 40, ttft_ms=10_000, tpot_ms=100)
    large = bench.add(2, 400, ttft_ms=10_000, tpot_ms=50)
    bench.step()
    bench.step()
    policy = bench.policy
    assert _loss(policy, small) == _loss(policy, large) == 0
    assert policy.eviction_key(small) > policy.eviction_key(large), "its next token is due last"


@pytest.mark.parametrize(("tpot_ms", "important_goes"), [(1000, True), (50, False)])
def test_a_more_important_request_is_evicted_first_if_it_can_wait_until_the_others_have_ended(
    tpot_ms: int, *, important_goes: bool
) -> None:
    # The other one has 20 tokens left, which take 100 ms.
    bench = SloBench()
    important = bench.add(1, 40, ttft_ms=10_000, tpot_ms=tpot_ms, priority=1)
    other = bench.add(2, 40, ttft_ms=10_000, tpot_ms=100)
    bench.step()
    bench.step()
    policy = bench.policy
    assert _loss(policy, important) == _loss(policy, other) == 0
    assert (policy.eviction_key(important) > policy.eviction_key(other)) is important_goes


def test_a_paused_request_with_time_does_not_take_its_blocks_back_from_urgent_prompts() -> None:
    bench = SloBench(blocks=20, left=5)
    important = bench.add(1, 100, ttft_ms=10_000, tpot_ms=1000, priority=1, outputs=100)
    bench.step()
    bench.add(2, 150, ttft_ms=10_000, tpot_ms=100, outputs=100)
    while not important.preemptions:
        bench.step()
    urgent = bench.add(3, 40, ttft_ms=40, tpot_ms=100, outputs=20)
    bench.step()
    bench.step()
    assert urgent.sampled_tokens
    assert not important.blocks
