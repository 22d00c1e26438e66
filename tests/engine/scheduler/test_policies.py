"""The characteristic of each policy: the sentence of its paper that holds for no other."""

from __future__ import annotations

import pytest

from goodput_engine.kv.blocks import BlockPool
from goodput_engine.scheduler.plan import StepPlan, StepResult
from goodput_engine.scheduler.policies.registry import build_policy
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.request_table import ScheduledRequest
from goodput_engine.scheduler.scheduler import Scheduler


def _scheduler(
    policy: str, *, blocks: int = 100, budget: int = 100, model: int = 1000, depth: int = 0
) -> Scheduler:
    return Scheduler(
        policy=build_policy(policy),
        kv=BlockPool(total_blocks=blocks, block_size=16),
        limits=SchedulerLimits(token_budget=budget, max_num_seqs=8, max_waiting=100),
        max_model_tokens=model,
        depth=depth,
    )


def _add(scheduler: Scheduler, rid: int, tokens: int, asked: int) -> None:
    request = ScheduledRequest(
        rid=rid, arrival_ns=rid, input_tokens=tokens, max_output_tokens=asked
    )
    assert scheduler.add(request, 0) is None


def _step(scheduler: Scheduler) -> tuple[int, list[tuple[int, int]]]:
    """Decodes, and (request, tokens) of the chunks, of the next step, which is committed."""
    plan = scheduler.plan(0)
    assert plan is not None
    _commit(scheduler, plan)
    return plan.num_decodes, [(c.rid, c.num_tokens) for c in plan.chunks]


def _commit(scheduler: Scheduler, plan: StepPlan) -> None:
    scheduler.commit(plan, StepResult(plan_id=plan.plan_id, at_ns=0, step_ns=1, stopped={}), 0)
    scheduler.check_integrity()


def test_request_level_scheduling_lets_no_request_join_a_running_batch() -> None:
    scheduler = _scheduler("request")
    _add(scheduler, 1, 10, 4)
    _add(scheduler, 2, 10, 1)
    assert _step(scheduler) == (0, [(1, 10), (2, 10)])
    _add(scheduler, 3, 10, 1)
    _add(scheduler, 4, 10, 1)
    assert [_step(scheduler) for _ in range(3)] == [(1, [])] * 3
    assert _step(scheduler) == (0, [(3, 10), (4, 10)])


def test_a_batch_is_closed_while_one_of_its_prompts_is_still_in_chunks() -> None:
    scheduler = _scheduler("request", budget=16)
    _add(scheduler, 1, 30, 1)
    _add(scheduler, 2, 2, 1)
    assert [_step(scheduler) for _ in range(3)] == [(0, [(1, 16)]), (0, [(1, 14)]), (0, [(2, 2)])]


def test_request_level_scheduling_reserves_the_whole_answer_and_never_evicts() -> None:
    scheduler = _scheduler("request", blocks=4)
    _add(scheduler, 1, 16, 17)
    _add(scheduler, 2, 16, 17)
    _add(scheduler, 3, 16, 17)
    assert _step(scheduler) == (0, [(1, 16), (2, 16)])
    assert scheduler.free_blocks == 0
    assert [_step(scheduler) for _ in range(16)] == [(2, [])] * 16
    assert _step(scheduler) == (0, [(3, 16)])
    assert scheduler.stats.preemptions == 0


def test_orca_computes_whole_prompts_beside_the_decodes() -> None:
    scheduler = _scheduler("orca", blocks=300)
    _add(scheduler, 1, 60, 9)
    _add(scheduler, 2, 60, 9)
    _add(scheduler, 3, 30, 9)
    assert _step(scheduler) == (0, [(1, 60)])
    assert _step(scheduler) == (1, [(2, 60), (3, 30)])
    assert _step(scheduler) == (3, [])


@pytest.mark.parametrize(("policy", "together"), [("orca", 2), ("request", 8), ("sarathi", 8)])
def test_orca_reserves_the_longest_sequence_so_that_few_run_together(
    policy: str, together: int
) -> None:
    scheduler = _scheduler(policy, blocks=16, model=129)
    for rid in range(8):
        _add(scheduler, rid, 8, 2)
    assert _step(scheduler) == (0, [(rid, 8) for rid in range(together)])


def test_vllm_stops_the_decodes_while_a_prompt_can_start() -> None:
    scheduler = _scheduler("vllm")
    _add(scheduler, 1, 60, 9)
    assert _step(scheduler) == (0, [(1, 60)])
    assert _step(scheduler) == (1, [])
    _add(scheduler, 2, 60, 9)
    _add(scheduler, 3, 60, 9)
    assert _step(scheduler) == (0, [(2, 60)])
    assert _step(scheduler) == (0, [(3, 60)])
    assert _step(scheduler) == (3, [])


def test_vllm_decodes_when_the_prompt_that_waits_finds_no_blocks() -> None:
    scheduler = _scheduler("vllm", blocks=5)
    _add(scheduler, 1, 60, 4)
    _add(scheduler, 2, 30, 1)
    assert [_step(scheduler) for _ in range(5)] == [
        (0, [(1, 60)]),
        (1, []),
        (1, []),
        (1, []),
        (0, [(2, 30)]),
    ]


def test_vllm_evicts_the_newest_computes_it_again_and_puts_it_at_the_head() -> None:
    scheduler = _scheduler("vllm", blocks=2)
    _add(scheduler, 1, 16, 3)
    _add(scheduler, 2, 16, 3)
    assert _step(scheduler) == (0, [(1, 16), (2, 16)])
    _add(scheduler, 3, 16, 1)
    assert _step(scheduler) == (1, [])
    assert [r.rid for r in scheduler.waiting] == [2, 3]
    assert scheduler.stats.preemptions == 1
    assert _step(scheduler) == (1, [])
    assert _step(scheduler) == (0, [(2, 17)])


@pytest.mark.parametrize("policy", ["orca", "vllm"])
def test_a_prompt_longer_than_the_whole_budget_is_split(policy: str) -> None:
    scheduler = _scheduler(policy)
    _add(scheduler, 1, 250, 1)
    assert [_step(scheduler) for _ in range(3)] == [
        (0, [(1, 100)]),
        (0, [(1, 100)]),
        (0, [(1, 50)]),
    ]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_block_from_an_eviction_is_not_taken_by_a_prompt(depth: int) -> None:
    scheduler = _scheduler("vllm", blocks=5, depth=depth)
    flying: list[StepPlan] = []
    _add(scheduler, 1, 31, 20)
    _add(scheduler, 2, 33, 20)
    while scheduler.has_work:
        while (plan := scheduler.plan(0)) is not None:
            flying.append(plan)
        _commit(scheduler, flying.pop(0))
    # Once, for the one block: its claimant has it, and ends before the other starts again.
    assert scheduler.stats.preemptions == 1
