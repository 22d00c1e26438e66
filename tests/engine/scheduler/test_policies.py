"""The characteristic of each policy: the sentence of its paper that holds for no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.builders.schedulers import (
    add_request,
    commit_plan,
    make_scheduler,
    plan_chunks,
    take_step,
)

if TYPE_CHECKING:
    from goodput_engine.scheduler.plan import StepPlan
    from goodput_engine.scheduler.scheduler import Scheduler


def _step(scheduler: Scheduler) -> tuple[int, list[tuple[int, int]]]:
    """Decodes, and (request, tokens) of the chunks, of the next step, which is committed."""
    plan = take_step(scheduler)
    return plan.num_decodes, plan_chunks(plan)


def test_request_level_scheduling_lets_no_request_join_a_running_batch() -> None:
    scheduler = make_scheduler("request")
    add_request(scheduler, 1, 10, 4)
    add_request(scheduler, 2, 10, 1)
    assert _step(scheduler) == (0, [(1, 10), (2, 10)])
    add_request(scheduler, 3, 10, 1)
    add_request(scheduler, 4, 10, 1)
    assert [_step(scheduler) for _ in range(3)] == [(1, [])] * 3
    assert _step(scheduler) == (0, [(3, 10), (4, 10)])


def test_a_batch_is_closed_while_one_of_its_prompts_is_still_in_chunks() -> None:
    scheduler = make_scheduler("request", budget=16)
    add_request(scheduler, 1, 30, 1)
    add_request(scheduler, 2, 2, 1)
    assert [_step(scheduler) for _ in range(3)] == [(0, [(1, 16)]), (0, [(1, 14)]), (0, [(2, 2)])]


def test_request_level_scheduling_reserves_the_whole_answer_and_never_evicts() -> None:
    scheduler = make_scheduler("request", blocks=4)
    add_request(scheduler, 1, 16, 17)
    add_request(scheduler, 2, 16, 17)
    add_request(scheduler, 3, 16, 17)
    assert _step(scheduler) == (0, [(1, 16), (2, 16)])
    assert scheduler.free_blocks == 0
    assert [_step(scheduler) for _ in range(16)] == [(2, [])] * 16
    assert _step(scheduler) == (0, [(3, 16)])
    assert scheduler.stats.preemptions == 0


def test_orca_computes_whole_prompts_beside_the_decodes() -> None:
    scheduler = make_scheduler("orca", blocks=300)
    add_request(scheduler, 1, 60, 9)
    add_request(scheduler, 2, 60, 9)
    add_request(scheduler, 3, 30, 9)
    assert _step(scheduler) == (0, [(1, 60)])
    assert _step(scheduler) == (1, [(2, 60), (3, 30)])
    assert _step(scheduler) == (3, [])


@pytest.mark.parametrize(
    ("policy", "max_output", "together"),
    [
        ("orca", 2, 8),
        ("orca", 40, 5),
        ("orca", None, 2),
        ("request", None, 2),
        ("sarathi", None, 8),
    ],
)
def test_orca_reserves_prompt_and_max_tokens_or_the_longest_sequence_without_them(
    policy: str, max_output: int | None, together: int
) -> None:
    scheduler = make_scheduler(policy, blocks=16, model=129)
    for rid in range(8):
        add_request(scheduler, rid, 8, max_output)
    assert _step(scheduler) == (0, [(rid, 8) for rid in range(together)])


def test_prompts_advance_together_in_chunks_apart_from_the_budget() -> None:
    scheduler = make_scheduler("sarathi", budget=100, prefill_chunk=30)
    for rid in range(1, 5):
        add_request(scheduler, rid, 70, 9)
    assert [_step(scheduler) for _ in range(4)] == [
        (0, [(1, 30), (2, 30), (3, 30), (4, 10)]),
        (0, [(1, 30), (2, 30), (3, 30), (4, 10)]),
        (0, [(1, 10), (2, 10), (3, 10), (4, 30)]),
        (3, [(4, 20)]),
    ]


@pytest.mark.parametrize("policy", ["request", "orca", "vllm", "splitfuse", "slo", "fastserve"])
def test_the_prefill_chunk_bounds_every_prompt_of_every_policy(policy: str) -> None:
    scheduler = make_scheduler(policy, budget=100, prefill_chunk=7)
    add_request(scheduler, 1, 50, 2)
    sizes: list[int] = []
    while scheduler.has_work:
        sizes += [tokens for _, tokens in _step(scheduler)[1]]
    assert sizes == [7] * 7 + [1]


def test_without_a_prefill_chunk_only_the_budget_limits_a_prompt() -> None:
    scheduler = make_scheduler("sarathi", budget=100)
    for rid in range(1, 3):
        add_request(scheduler, rid, 170, 9)
    assert [_step(scheduler) for _ in range(2)] == [(0, [(1, 100)]), (0, [(1, 70), (2, 30)])]


def test_vllm_stops_the_decodes_while_a_prompt_can_start() -> None:
    scheduler = make_scheduler("vllm")
    add_request(scheduler, 1, 60, 9)
    assert _step(scheduler) == (0, [(1, 60)])
    assert _step(scheduler) == (1, [])
    add_request(scheduler, 2, 60, 9)
    add_request(scheduler, 3, 60, 9)
    assert _step(scheduler) == (0, [(2, 60)])
    assert _step(scheduler) == (0, [(3, 60)])
    assert _step(scheduler) == (3, [])


def test_vllm_decodes_when_the_prompt_that_waits_finds_no_blocks() -> None:
    scheduler = make_scheduler("vllm", blocks=5)
    add_request(scheduler, 1, 60, 4)
    add_request(scheduler, 2, 30, 1)
    assert [_step(scheduler) for _ in range(5)] == [
        (0, [(1, 60)]),
        (1, []),
        (1, []),
        (1, []),
        (0, [(2, 30)]),
    ]


def test_vllm_evicts_the_newest_computes_it_again_and_puts_it_at_the_head() -> None:
    scheduler = make_scheduler("vllm", blocks=2)
    add_request(scheduler, 1, 16, 3)
    add_request(scheduler, 2, 16, 3)
    assert _step(scheduler) == (0, [(1, 16), (2, 16)])
    add_request(scheduler, 3, 16, 1)
    assert _step(scheduler) == (1, [])
    assert [r.rid for r in scheduler.waiting] == [2, 3]
    assert scheduler.stats.preemptions == 1
    assert _step(scheduler) == (1, [])
    assert _step(scheduler) == (0, [(2, 17)])


@pytest.mark.parametrize("policy", ["orca", "vllm"])
def test_a_prompt_longer_than_the_whole_budget_is_split(policy: str) -> None:
    scheduler = make_scheduler(policy)
    add_request(scheduler, 1, 250, 1)
    assert [_step(scheduler) for _ in range(3)] == [
        (0, [(1, 100)]),
        (0, [(1, 100)]),
        (0, [(1, 50)]),
    ]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_block_from_an_eviction_is_not_taken_by_a_prompt(depth: int) -> None:
    scheduler = make_scheduler("vllm", blocks=5, depth=depth)
    flying: list[StepPlan] = []
    add_request(scheduler, 1, 31, 20)
    add_request(scheduler, 2, 33, 20)
    while scheduler.has_work:
        while (plan := scheduler.plan(0)) is not None:
            flying.append(plan)
        commit_plan(scheduler, flying.pop(0))
    # Once, for the one block: its claimant has it, and ends before the other starts again.
    assert scheduler.stats.preemptions == 1
