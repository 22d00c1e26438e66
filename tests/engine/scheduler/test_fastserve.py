"""`fastserve`: levels by expected prompt and by time run, and swapping ahead of need."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.schedulers import make_scheduler

from goodput_core.spec.choices import Preemption
from goodput_core.steptime import RooflineForm
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.scheduler.plan import StepPlan, StepResult
from goodput_engine.scheduler.policies.fastserve import FastServePolicy
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.request_table import RequestState, ScheduledRequest

# A millisecond for each prompt token.
_MODEL = RooflineForm(
    c0_ns=1, c1_ns_per_token=NS_PER_MS, c2_ns_per_context_token=0, c4_ns_per_request=0
)


@dataclass
class Engine:
    """A scheduler with steps of a chosen length."""

    blocks: int = 400
    host: int = 400
    seqs: int = 8
    preemption: Preemption = Preemption.SWAP
    model: RooflineForm | None = _MODEL
    ns_per_block: int = 1
    now_ns: int = 0
    evicted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(
            FastServePolicy(model=self.model),
            blocks=self.blocks,
            budget=512,
            seqs=self.seqs,
            waiting=1000,
            model=4000,
            host=self.host,
            ns_per_block=self.ns_per_block,
            preemption=self.preemption,
        )

    def add(self, rid: int, tokens: int, max_output: int = 300) -> ScheduledRequest:
        request = ScheduledRequest(
            rid=rid, arrival_ns=self.now_ns, input_tokens=tokens, max_output_tokens=max_output
        )
        assert self.scheduler.add(request, self.now_ns) is None
        return request

    def step(self, step_ms: int = 1) -> StepPlan:
        plan = self.scheduler.plan(self.now_ns)
        assert plan is not None
        step_ns = step_ms * NS_PER_MS
        self.now_ns += step_ns
        result = StepResult(plan_id=plan.plan_id, at_ns=self.now_ns, step_ns=step_ns, stopped={})
        self.scheduler.commit(plan, result, self.now_ns)
        self.scheduler.check_integrity()
        return plan

    def started(self, step_ms: int = 1) -> list[int]:
        return [admitted.rid for admitted in self.step(step_ms).admitted]


def test_a_long_prompt_skips_the_levels_whose_quantum_it_would_only_exhaust() -> None:
    engine = Engine(seqs=1)
    engine.add(1, 5, max_output=1)
    engine.add(2, 100, max_output=1)  # 160 ms: the fifth level
    engine.add(3, 70, max_output=1)  # 80 ms: the fourth
    engine.add(4, 9, max_output=1)
    engine.add(5, 10, max_output=1)
    engine.add(6, 11, max_output=1)
    assert [engine.started() for _ in range(6)] == [[1], [4], [5], [6], [3], [2]]


def test_a_request_beyond_its_quantum_goes_down_and_is_displaced_by_the_next_newcomer() -> None:
    engine = Engine(seqs=1)
    long = engine.add(1, 5)
    engine.step(4)
    engine.step(6)
    engine.add(2, 5, max_output=1)
    assert engine.started() == [], "10 ms are not more than the quantum"
    engine.step()
    engine.step()
    assert long.preemptions == 1
    assert engine.scheduler.stats.swapped_tokens > 0


def test_a_prompt_that_takes_longer_than_expected_goes_down_too() -> None:
    engine = Engine(seqs=1)
    slow = engine.add(1, 5)
    engine.step(11)
    engine.add(2, 5, max_output=1)
    engine.step()
    assert slow.preemptions == 1


def test_the_quantum_doubles_from_level_to_level() -> None:
    engine = Engine(seqs=2)
    engine.add(1, 5, max_output=900)
    downs: list[int] = []
    queue = engine.scheduler.waiting
    while engine.now_ns < 400 * NS_PER_MS:
        level = queue.level(engine.scheduler._table.requests[1])  # type: ignore[attr-defined]
        engine.step()
        if queue.level(engine.scheduler._table.requests[1]) > level:  # type: ignore[attr-defined]
            downs.append(engine.now_ns // NS_PER_MS)
    assert downs == [11, 32, 73, 154, 315]


def test_a_preempted_request_keeps_its_level_and_higher_levels_come_back_first() -> None:
    engine = Engine(seqs=2)
    engine.add(1, 100)  # the fifth level
    engine.add(2, 15)  # the second
    engine.step()
    newcomers = [engine.add(rid, 5, max_output=2) for rid in (3, 4)]
    while not all(r.state is RequestState.FINISHED for r in newcomers):
        engine.step()
    back: list[int] = []
    while len(back) < 2:
        back += engine.started()
    assert back == [2, 1]


def test_a_request_that_has_waited_for_three_seconds_goes_to_the_top() -> None:
    engine = Engine(seqs=1)
    engine.add(1, 100)
    engine.step()
    begun: dict[int, int] = {}
    rid = 1
    while not begun and engine.now_ns < 4 * NS_PER_S:
        rid += 1
        engine.add(rid, 5, max_output=1)
        for admitted in engine.step(9).admitted:
            if admitted.rid == 1:
                begun[1] = engine.now_ns
    assert 3 * NS_PER_S < begun[1] < 3.1 * NS_PER_S


@settings(max_examples=40, deadline=None)
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
    engine = Engine(seqs=seqs, blocks=200, host=200, preemption=preemption)
    rid, request, waited_ms = 1, engine.add(1, *slow), 0
    while request.state is not RequestState.FINISHED:
        while len(engine.scheduler.waiting) <= seqs:
            rid += 1
            engine.add(rid, *flood)
        engine.step(step_ms)
        waiting = request.state is RequestState.WAITING
        waited_ms = waited_ms + step_ms if waiting else 0
        # Three seconds to the top; then those who are there already have a quantum left.
        assert waited_ms <= 3_000 + 4 * step_ms, "it starves"


def test_blocks_are_kept_free_by_swapping_the_lowest_level_out_before_they_are_needed() -> None:
    engine = Engine(blocks=40, seqs=8)  # four of the forty are kept free
    top = engine.add(1, 5)
    low, lower = engine.add(2, 200), engine.add(3, 300)
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


def test_no_prompt_starts_while_less_than_a_tenth_of_host_memory_is_free() -> None:
    engine = Engine(blocks=60, host=20, seqs=2)
    engine.add(1, 300)  # nineteen blocks: almost all of host memory
    engine.add(2, 100)
    engine.step()
    engine.add(3, 5, max_output=5)
    engine.step()
    assert engine.scheduler.host_blocks[0] < 2
    engine.scheduler.set_limits(SchedulerLimits(token_budget=512, max_num_seqs=8, max_waiting=9))
    engine.add(4, 5, max_output=5)
    assert engine.started() == [1], "it has a copy, and a lower level than 4"
    assert 4 in engine.started() + engine.started()


@pytest.mark.parametrize(
    ("host", "preemption"),
    [(400, Preemption.HYBRID), (0, Preemption.RECOMPUTE)],
    ids=["swapped though recomputing were cheaper", "recomputed where there is no host memory"],
)
def test_victims_are_swapped_wherever_there_is_host_memory(
    host: int, preemption: Preemption
) -> None:
    engine = Engine(seqs=1, host=host, preemption=preemption, ns_per_block=10 * NS_PER_S)
    victim = engine.add(1, 100)
    engine.step()
    engine.add(2, 5, max_output=1)
    engine.step()
    assert victim.preemptions == 1
    stats = engine.scheduler.stats
    assert (stats.swapped_tokens > 0, stats.recomputed_tokens > 0) == (host > 0, host == 0)


def test_how_long_prompts_take_is_learned() -> None:
    engine = Engine(seqs=1, model=None)
    for rid in range(20):
        tokens = (5, 50)[rid % 2]
        engine.add(rid, tokens, max_output=1)
        engine.step(tokens)
    engine.add(30, 50, max_output=1)
    engine.add(31, 5, max_output=1)
    assert engine.started() == [31]
