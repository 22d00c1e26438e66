"""Preempted requests whose KV blocks go to host memory and come back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.builders.schedulers import add_request, commit_plan, make_scheduler, take_step

from goodput_core.spec.choices import Policy, Preemption
from goodput_core.steptime import StepShape
from goodput_engine.device.load import load_profile
from goodput_engine.executor.emulated import EmulatedExecutor
from goodput_engine.messages import ExecutorInput, Submit
from goodput_engine.scheduler.plan import Copy, StepOutcome, StepPlan, StepResult
from goodput_engine.scheduler.request_table import RequestState, ScheduledRequest

if TYPE_CHECKING:
    from goodput_engine.scheduler.scheduler import Scheduler

_BLOCK = 16


def _scheduler(
    preemption: Preemption,
    *,
    blocks: int = 4,
    host: int = 16,
    ns_per_block: int = 1,
    depth: int = 0,
    policy: Policy = Policy.SARATHI,
) -> Scheduler:
    return make_scheduler(
        policy,
        blocks=blocks,
        block_size=_BLOCK,
        budget=200,
        depth=depth,
        host=host,
        ns_per_block=ns_per_block,
        preemption=preemption,
    )


def _add(
    scheduler: Scheduler, rid: int, tokens: int, max_output: int, hashes: list[int] | None = None
) -> ScheduledRequest:
    return add_request(scheduler, rid, tokens, max_output, hashes=hashes or [])


def _step(scheduler: Scheduler, step_ns: int = 100) -> StepPlan:
    return take_step(scheduler, step_ns=step_ns)


def _run(scheduler: Scheduler, step_ns: int = 100) -> list[StepPlan]:
    plans: list[StepPlan] = []
    while scheduler.has_work:
        plans.append(_step(scheduler, step_ns))
    return plans


def _copies(plans: list[StepPlan]) -> list[tuple[int, bool, int]]:
    return [(c.rid, c.to_host, len(c.host_blocks)) for p in plans for c in p.copies]


def test_a_swapped_request_goes_on_where_it_was_and_computes_no_token_twice() -> None:
    work = {}
    for mode in (Preemption.SWAP, Preemption.RECOMPUTE):
        scheduler = _scheduler(mode)
        _add(scheduler, 1, 30, 20)
        _add(scheduler, 2, 30, 20)
        plans = _run(scheduler)
        work[mode] = sum(plan.shape.num_tokens for plan in plans)
        assert scheduler.stats.preemptions == 1
        if mode is Preemption.SWAP:
            assert _copies(plans) == [(2, True, 2), (2, False, 2)]
            assert scheduler.stats.swapped_tokens == 31
            assert scheduler.stats.recomputed_tokens == 0
        else:
            assert not _copies(plans)
            assert scheduler.stats.recomputed_tokens == 32
    assert work == {Preemption.SWAP: 2 * (30 + 19), Preemption.RECOMPUTE: 2 * (30 + 19) + 32}


def test_its_blocks_are_free_when_the_step_that_copies_them_is_done_and_not_before() -> None:
    scheduler = _scheduler(Preemption.SWAP, ns_per_block=100)
    _add(scheduler, 1, 30, 20)
    victim = _add(scheduler, 2, 30, 20)
    first = _step(scheduler)
    while victim.state is not RequestState.SWAPPING_OUT:
        first = _step(scheduler)
    # One block fits beside a step of 100 ns.
    assert _copies([first]) == [(2, True, 1)]
    assert scheduler.free_blocks == 0
    second = _step(scheduler)
    assert _copies([second]) == [(2, True, 1)]
    assert scheduler.free_blocks == 2
    assert len(scheduler.waiting) == 1
    assert scheduler.host_blocks == (14, 16)


def test_copies_go_on_alone_when_there_is_nothing_to_compute() -> None:
    scheduler = _scheduler(Preemption.SWAP)
    running = _add(scheduler, 1, 30, 20)
    victim = _add(scheduler, 2, 30, 20)
    while not victim.preemptions or victim.state is not RequestState.WAITING:
        _step(scheduler)
    scheduler.cancel(running.rid)
    plan = _step(scheduler)
    assert plan.shape.num_tokens == 0
    assert _copies([plan]) == [(2, False, 2)]
    assert _step(scheduler).num_decodes == 1


def test_without_room_in_host_memory_a_victim_is_recomputed() -> None:
    scheduler = _scheduler(Preemption.SWAP, host=1)
    _add(scheduler, 1, 30, 20)
    _add(scheduler, 2, 30, 20)
    assert not _copies(_run(scheduler))
    assert scheduler.stats.recomputed_tokens == 32


@pytest.mark.parametrize("policy", [Policy.SARATHI, Policy.VLLM, Policy.SJF, Policy.PRIORITY])
@pytest.mark.parametrize(
    ("ns_per_block", "swapped"), [(10, True), (10_000, False)], ids=["fast copies", "slow copies"]
)
def test_hybrid_takes_what_brings_the_request_back_sooner(
    *, ns_per_block: int, swapped: bool, policy: Policy
) -> None:
    scheduler = _scheduler(Preemption.HYBRID, ns_per_block=ns_per_block, policy=policy)
    _add(scheduler, 1, 30, 20)
    _add(scheduler, 2, 30, 20)
    plans: list[StepPlan] = []
    while scheduler.has_work:
        plan = scheduler.plan(0)
        assert plan is not None
        # If prompts did not make steps longer, a recomputation would cost less than any copy.
        prompt_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
        commit_plan(scheduler, plan, step_ns=1000 + 200 * prompt_tokens)
        plans.append(plan)
    assert bool(_copies(plans)) is swapped
    assert bool(scheduler.stats.swapped_tokens) is swapped
    assert bool(scheduler.stats.recomputed_tokens) is not swapped


def test_a_copy_takes_no_more_of_a_step_than_its_computation_takes_after_a_long_prompt() -> None:
    scheduler = make_scheduler(
        blocks=42, block_size=_BLOCK, budget=600, seqs=8, host=99, ns_per_block=100, model=700
    )
    _add(scheduler, 1, 30, 400)
    victim = _add(scheduler, 2, 500, 160)
    copied: list[int] = []
    for _ in range(400):
        plan = scheduler.plan(0)
        assert plan is not None
        copies = sum(len(copy.host_blocks) for copy in plan.copies)
        copied += [copies] if copies and not plan.chunks else []
        # 10 µs with a prompt, else 300 ns, or longer if the copies take longer.
        result = StepResult(
            plan_id=plan.plan_id,
            at_ns=0,
            step_ns=max(10_000 if plan.chunks else 300, 100 * copies),
            stopped={},
        )
        scheduler.commit(plan, result, 0)
        if not scheduler.has_work:
            break
    assert victim.preemptions
    assert max(copied) == 3


def test_a_short_request_starts_while_a_copy_of_a_longer_one_waits() -> None:
    scheduler = make_scheduler("sjf", blocks=14, block_size=_BLOCK, budget=600, seqs=30, host=99)
    running = [_add(scheduler, rid, 16 + 3 * rid, 100) for rid in range(1, 5)]
    long = _add(scheduler, 9, 30, 150)
    while long.state is not RequestState.WAITING or not 0 < scheduler.free_blocks <= len(running):
        _step(scheduler)  # until some blocks are free, but too few for all to grow
    short = _add(scheduler, 10, 8, 2)
    assert [admitted.rid for admitted in _step(scheduler).admitted] == [short.rid]
    assert long.state is RequestState.WAITING, "it would be evicted before all others"


@pytest.mark.parametrize(
    ("ns_per_token", "swapped"), [(0, False), (100, True)], ids=["free beside decodes", "dear"]
)
def test_hybrid_counts_only_the_time_by_which_a_recomputation_makes_steps_longer(
    *, ns_per_token: int, swapped: bool
) -> None:
    scheduler = _scheduler(Preemption.HYBRID, ns_per_block=1_000)
    _add(scheduler, 1, 30, 20)
    _add(scheduler, 2, 30, 20)
    while scheduler.has_work:
        plan = scheduler.plan(0)
        assert plan is not None
        prompt_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
        commit_plan(scheduler, plan, step_ns=1_000 + ns_per_token * prompt_tokens)
    assert scheduler.stats.preemptions
    assert bool(scheduler.stats.swapped_tokens) is swapped


def test_what_the_prefix_cache_still_holds_is_not_copied_back() -> None:
    scheduler = _scheduler(Preemption.SWAP, blocks=6)
    _add(scheduler, 1, 33, 60, hashes=[7, 8])
    victim = _add(scheduler, 2, 33, 30, hashes=[7, 8])
    while victim.state is not RequestState.WAITING or not victim.preemptions:
        _step(scheduler)
    scheduler.cancel(1)
    copies = _copies([_step(scheduler)])
    assert copies
    assert copies[0][2] < len(victim.blocks)
    assert victim.computed_tokens > 33


@pytest.mark.parametrize("state", [RequestState.SWAPPING_OUT, RequestState.SWAPPING_IN])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_cancelling_while_blocks_are_copied_frees_both_sides(
    depth: int, state: RequestState
) -> None:
    scheduler = _scheduler(Preemption.SWAP, ns_per_block=100, depth=depth)
    running = _add(scheduler, 1, 30, 20)
    victim = _add(scheduler, 2, 30, 20)
    flying: list[StepPlan] = []

    def turn() -> None:
        while (plan := scheduler.plan(0)) is not None:
            flying.append(plan)
        done = flying.pop(0)
        result = StepResult(plan_id=done.plan_id, at_ns=0, step_ns=100, stopped={})
        scheduler.commit(done, result, 0)
        scheduler.check_integrity()

    while victim.state is not state:
        turn()
        if victim.state is RequestState.WAITING and victim.preemptions:
            scheduler.cancel(running.rid)
    turn()
    scheduler.cancel(victim.rid)
    scheduler.cancel(running.rid)
    for _ in range(depth + 1):
        if flying:
            turn()
    assert scheduler.free_blocks == scheduler.total_blocks
    assert scheduler.host_blocks == (16, 16)


def test_a_step_takes_as_long_as_the_longer_of_its_computing_and_its_copying() -> None:
    profile = replace(load_profile("unit"), swap_bytes_per_s=1, kv_bytes_per_token=0)
    profile = replace(profile, kv_bytes_per_token=1000, swap_bytes_per_s=16_000_000_000)
    assert profile.swap_ns_per_block == 1000
    scheduler = _scheduler(Preemption.SWAP, ns_per_block=profile.swap_ns_per_block)
    executor = EmulatedExecutor(replace(profile, swap_bytes_per_s=16_000))  # a block takes 1 s
    for rid in (1, 2):
        _add(scheduler, rid, 30, 20)
        known = ExecutorInput(ignore_eos=True)
        executor.add(Submit(rid=rid, arrival_ns=0, input_tokens=30, executor=known))
    now_ns, times = 0, {False: set[int](), True: set[int]()}
    while scheduler.has_work:
        plan = scheduler.plan(now_ns)
        assert plan is not None
        executor.submit(plan, now_ns)
        due_ns = executor.next_event_ns()
        assert due_ns is not None
        times[bool(plan.copies)].add(due_ns - now_ns)
        now_ns = due_ns
        result = executor.collect(now_ns)
        assert result is not None
        scheduler.commit(plan, result, now_ns)
    assert times == {False: {1_000_000}, True: {2_000_000_000}}


def test_steps_of_a_nanosecond_that_copies_determine_have_a_price() -> None:
    costs = _scheduler(Preemption.HYBRID)._evictor.costs
    plan = StepPlan(
        plan_id=1,
        at_ns=0,
        shape=StepShape.of(decodes=1, decode_context_tokens=1),
        copies=(Copy(rid=1, to_host=True, device_blocks=(0,), host_blocks=(0,)),),
        num_decodes=1,
    )
    result = StepResult(plan_id=1, at_ns=1, step_ns=1, stopped={})
    costs.observe(StepOutcome(plan, result, [], [], []))
    assert costs.steps_of_copies(1) == 4  # two copies, each beside one that keeps the link busy
