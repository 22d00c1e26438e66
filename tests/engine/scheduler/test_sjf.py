"""`sjf`: the shortest first, by learned lengths; true lengths only with an oracle."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.schedulers import make_configure, make_scheduler, take_step

from goodput_core.spec.choices import Preemption
from goodput_engine.core.build import build_core
from goodput_engine.device.load import load_profile
from goodput_engine.messages import ExecutorInput, Submit
from goodput_engine.scheduler.policies.registry import POLICIES, build_policy
from goodput_engine.scheduler.policies.sjf import ShortestFirst, SjfPolicy
from goodput_engine.scheduler.policy import PolicySettings, SchedulingPolicy
from goodput_engine.scheduler.prediction import KnownLengths, LearnedLengths
from goodput_engine.scheduler.request_table import RequestState, ScheduledRequest
from goodput_engine.server.metrics import EngineMetrics
from goodput_engine.server.settings import ReplicaIdentity

if TYPE_CHECKING:
    from goodput_engine.core.engine_core import EngineCore
    from goodput_engine.scheduler.scheduler import Scheduler

W_NS = 500


def _scheduler(policy: SchedulingPolicy, *, blocks: int = 100, seqs: int = 1) -> Scheduler:
    return make_scheduler(policy, blocks=blocks, seqs=seqs)


def _request(
    rid: int, *, tokens: int = 10, asked: int | None = 50, slo_class: str = "", at_ns: int = 0
) -> ScheduledRequest:
    return ScheduledRequest(
        rid=rid,
        arrival_ns=at_ns,
        input_tokens=tokens,
        max_output_tokens=asked,
        slo_class=slo_class,
    )


def _step(scheduler: Scheduler, at_ns: int, stops: tuple[int, ...] = ()) -> list[int]:
    plan = take_step(scheduler, at_ns=at_ns, stopped=stops)
    return [chunk.rid for chunk in plan.chunks]


def _head(scheduler: Scheduler, at_ns: int) -> int | None:
    head = scheduler.waiting.peek(at_ns)
    return None if head is None else head.rid


def _order(scheduler: Scheduler, at_ns: int = 0) -> list[int]:
    """The order of starts on one place if every answer stops after one token."""
    order: list[int] = []
    while scheduler.has_work:
        head = _head(scheduler, at_ns)
        assert head is not None
        order += _step(scheduler, at_ns, stops=(head,))
    return order


def test_before_it_has_learned_it_orders_by_max_tokens() -> None:
    scheduler = _scheduler(SjfPolicy())
    for rid, asked in ((1, 50), (2, 5), (3, 20), (4, None)):
        scheduler.add(_request(rid, asked=asked), 0)
    assert _order(scheduler) == [2, 3, 1, 4]


def test_it_learns_from_finished_requests_which_class_is_short() -> None:
    policy = SjfPolicy()
    scheduler = _scheduler(policy)
    rid = 0
    for length, slo_class in ((1, "chat"), (12, "batch")):
        for _ in range(10):
            rid += 1
            scheduler.add(_request(rid, slo_class=slo_class), 0)
            for token in range(length):
                _step(scheduler, 0, stops=(rid,) if token == length - 1 else ())
    scheduler.add(_request(100, slo_class="batch"), 0)
    scheduler.add(_request(101, slo_class="chat"), 0)
    assert policy.prediction_error.judged == 20
    assert _order(scheduler) == [101, 100]


def test_those_who_wait_are_put_in_order_again_when_it_learns() -> None:
    lengths = LearnedLengths()
    queue = ShortestFirst(lengths, W_NS)
    one, two = _request(1, slo_class="batch"), _request(2, slo_class="chat")
    for request in (one, two):
        request.output_limit = 50
        queue.push(request)
    assert queue.peek(0) is one
    for slo_class, tokens in (("batch", 40), ("chat", 2)):
        for _ in range(8):
            ended = _request(3, slo_class=slo_class)
            ended.output_limit = 50
            ended.base_emitted = tokens
            lengths.learn(ended, ())
    assert queue.peek(0) is two
    assert [r.rid for r in queue] == [2, 1]
    queue.remove(two)
    assert queue.peek(0) is one
    assert len(queue) == 1


def test_a_prompt_counts_as_much_as_an_answer() -> None:
    scheduler = _scheduler(SjfPolicy())
    scheduler.add(_request(1, tokens=60, asked=10), 0)
    scheduler.add(_request(2, tokens=10, asked=50), 0)
    assert _order(scheduler) == [2, 1]


def test_a_running_request_is_not_displaced_by_a_shorter_one() -> None:
    scheduler = _scheduler(SjfPolicy())
    scheduler.add(_request(1, asked=50), 0)
    assert _step(scheduler, 0) == [1]
    scheduler.add(_request(2, asked=1), 0)
    assert _step(scheduler, 0) == []
    assert [r.rid for r in scheduler.waiting] == [2]
    assert scheduler.stats.preemptions == 0


def test_out_of_blocks_the_request_with_the_most_left_is_evicted() -> None:
    scheduler = _scheduler(SjfPolicy(), blocks=3, seqs=2)
    scheduler.add(_request(1, tokens=16, asked=30), 0)
    scheduler.add(_request(2, tokens=16, asked=4, at_ns=1), 0)
    assert _step(scheduler, 1) == [2, 1]
    _step(scheduler, 1)
    assert [r.rid for r in scheduler.waiting] == [1], "the older, longer one"


def test_no_request_starves_behind_shorter_ones() -> None:
    scheduler = _scheduler(build_policy("sjf", PolicySettings(ageing_ns=W_NS)))
    scheduler.add(_request(1, asked=50), 0)
    started: list[int] = []
    for at_ns in range(0, 2 * W_NS, 100):
        rid = at_ns + 2
        scheduler.add(_request(rid, asked=1, at_ns=at_ns), at_ns)
        started += _step(scheduler, at_ns)
        if 1 in started:
            break
    assert started[-1] == 1
    assert len(started) == W_NS // 100 + 1, "as soon as it has waited long enough"


@settings(max_examples=examples(50), deadline=None)
@given(
    patience=st.integers(1, 60),
    seqs=st.integers(1, 4),
    flood=st.tuples(st.integers(1, 20), st.integers(1, 12)),
    slow=st.tuples(st.integers(1, 300), st.integers(1, 200)),
)
def test_wait_is_bounded_although_shorter_requests_never_cease_to_come(
    patience: int, seqs: int, flood: tuple[int, int], slow: tuple[int, int]
) -> None:
    scheduler = _scheduler(build_policy("sjf", PolicySettings(ageing_ns=patience)), seqs=seqs)
    request = _request(1, tokens=slow[0], asked=slow[1])
    assert scheduler.add(request, 0) is None
    rid = 1
    for at_ns in range(10_000):
        while len(scheduler.waiting) <= seqs:
            rid += 1
            scheduler.add(_request(rid, tokens=flood[0], asked=flood[1], at_ns=at_ns), at_ns)
        if 1 in _step(scheduler, at_ns):
            # It is the oldest, so every fourth start is its, or is kept from it for three more.
            assert at_ns <= patience + 4 * (flood[1] + 1)
            return
    raise AssertionError("it starves")


def test_however_many_have_waited_too_long_most_starts_go_to_the_shortest() -> None:
    known = KnownLengths(lambda rid: 100 - rid)
    queue = ShortestFirst(known, W_NS)
    cancelled: list[ScheduledRequest] = []
    for rid in range(30):
        request = _request(rid, asked=100, at_ns=rid)
        request.output_limit = 100
        queue.push(request)
        if 10 <= rid < 19:
            cancelled.append(request)
    started = []
    for turn in range(9):
        queue.remove(cancelled[turn])
        head = queue.peek(2 * W_NS)
        assert head is not None
        started.append(head.rid)
        queue.remove(head)
    assert started == [0, 29, 28, 27, 1, 26, 25, 24, 2], "though others leave in between"


def test_an_overdue_request_is_evicted_after_the_others() -> None:
    scheduler = _scheduler(SjfPolicy(ageing_ns=W_NS), blocks=3, seqs=2)
    scheduler.add(_request(1, tokens=16, asked=30), 0)
    scheduler.add(_request(2, tokens=16, asked=4, at_ns=1), 1)
    assert _step(scheduler, W_NS) == [1, 2]
    _step(scheduler, W_NS)
    assert [r.rid for r in scheduler.waiting] == [2]


def test_running_is_not_waiting() -> None:
    scheduler = _scheduler(SjfPolicy(ageing_ns=W_NS), blocks=3, seqs=2)
    scheduler.add(_request(1, tokens=16, asked=30), 0)
    assert _step(scheduler, 0) == [1]
    scheduler.add(_request(2, tokens=16, asked=4, at_ns=W_NS), W_NS)
    assert _step(scheduler, W_NS) == [2]
    _step(scheduler, W_NS)
    assert [r.rid for r in scheduler.waiting] == [1], "the longer one, which never had to wait"
    scheduler.add(_request(3, tokens=1, asked=1, at_ns=W_NS), W_NS)
    assert _head(scheduler, 2 * W_NS - 1) == 3
    assert _head(scheduler, 2 * W_NS) == 1


# --- the oracle ------------------------------------------------------------------------------
def _core(policy: str, oracle: dict[int, int] | None = None) -> EngineCore:
    configure = make_configure(policy=policy, max_num_seqs=1, max_waiting=8)
    profile = replace(load_profile("unit"), kv_blocks=100)
    known = None if oracle is None else SjfPolicy(predictor=KnownLengths(oracle.__getitem__))
    return build_core(configure, profile, policy=known)


def _first_to_start(policy: str, lengths: dict[int, int], *, oracle: bool) -> int:
    core = _core(policy, lengths if oracle else None)
    for rid, length in lengths.items():
        executor = ExecutorInput(output_tokens=length)
        core.submit(Submit(rid=rid, arrival_ns=0, input_tokens=4, executor=executor), 0)
    core.drain()
    core.advance(0)
    (started,) = core.scheduler.running()
    return started.rid


def _one_of_three_is_short(policy: str, *, oracle: bool) -> list[int]:
    """The first request to start if the first, the second, or the third has the shortest answer."""
    return [
        _first_to_start(policy, dict.fromkeys((1, 2, 3), 9) | {shortest: 2}, oracle=oracle)
        for shortest in (1, 2, 3)
    ]


@pytest.mark.parametrize("policy", ["sjf", "sarathi"])
def test_the_oracle_orders_by_true_lengths_whatever_policy_is_named(policy: str) -> None:
    assert _one_of_three_is_short(policy, oracle=True) == [1, 2, 3]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_without_it_no_policy_knows_which_of_equal_requests_is_short(policy: str) -> None:
    assert len(set(_one_of_three_is_short(policy, oracle=False))) == 1


def test_what_the_scheduler_knows_of_a_request_has_no_place_for_its_true_length() -> None:
    core = _core("sjf")
    executor = ExecutorInput(output_tokens=777)
    core.submit(Submit(rid=1, arrival_ns=0, input_tokens=4, executor=executor), 0)
    head = core.scheduler.waiting.peek(0)
    assert head is not None
    assert 777 not in [getattr(head, name) for name in type(head).__slots__]
    policy = SjfPolicy(predictor=KnownLengths({1: 777}.__getitem__))
    assert policy.predictor.output_tokens(head) == 777, "only the oracle has it"


@pytest.mark.parametrize("policy", ["sjf", "slo"])
def test_how_wrong_it_was_is_in_the_engines_state_and_metrics(policy: str) -> None:
    core = _core(policy)
    for rid in range(1, 4):
        executor = ExecutorInput(output_tokens=10)
        core.submit(
            Submit(rid=rid, arrival_ns=0, input_tokens=4, max_output_tokens=20, executor=executor),
            0,
        )
    core.advance(0)
    while (event_ns := core.next_event_ns()) is not None:
        core.advance(event_ns)
    state = core.state(0)
    assert state.predicted_lengths == 3
    assert 0 < state.length_error < math.log(2), "20 were asked for, 10 came"
    names = ReplicaIdentity(llmservice="chat", replica="r", revision="1")
    lines = EngineMetrics(names, lambda: state).text().decode().splitlines()
    labels = '{llmservice="chat",revision="1",role="engine"}'
    assert f"goodput_engine_predicted_lengths_total{labels} 3.0" in lines
    assert f"goodput_engine_length_error_log_ratio{labels} {state.length_error}" in lines


def test_a_policy_that_predicts_nothing_reports_none() -> None:
    state = _core("sarathi").state(0)
    assert (state.predicted_lengths, state.length_error) == (0, 0)


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
def test_a_preempted_request_returns_to_the_same_place_in_both_modes(
    preemption: Preemption,
) -> None:
    scheduler = make_scheduler(
        SjfPolicy(), blocks=8, seqs=2, host=0 if preemption is Preemption.RECOMPUTE else 50
    )
    scheduler.add(_request(1, tokens=30, asked=60), 0)
    long = _request(2, tokens=30, asked=66)
    scheduler.add(long, 0)
    while not long.preemptions:
        take_step(scheduler)
    # It has fewer tokens left than the third request, but needs its earlier blocks too.
    assert long.output_limit - long.sampled_tokens < 10 + 45
    scheduler.add(_request(3, tokens=10, asked=45), 0)
    while long.state is not RequestState.WAITING:
        take_step(scheduler)
    assert _head(scheduler, 0) == 3


def test_a_request_that_gives_up_is_no_start() -> None:
    queue = ShortestFirst(KnownLengths(lambda rid: 100 - rid), W_NS)
    requests = {rid: _request(rid, asked=100, at_ns=rid) for rid in range(40)}
    for request in requests.values():
        request.output_limit = 100
        queue.push(request)
    started = []
    for _ in range(9):
        queue.remove(min(queue, key=lambda request: request.rid))  # the oldest gives up
        head = queue.peek(2 * W_NS)
        assert head is not None
        started.append(head.rid)
        queue.remove(head)
    assert started == [1, 39, 38, 37, 6, 36, 35, 34, 11]
