"""Worked examples of the scheduler: the contents of one step, and the other requests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import goodput_engine.scheduler
from goodput_engine.kv.blocks import BlockPool
from goodput_engine.scheduler.plan import StepOutcome, StepPlan, StepResult
from goodput_engine.scheduler.policies.sarathi import SarathiPolicy
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.request_table import RequestState, ScheduledRequest
from goodput_engine.scheduler.scheduler import Scheduler

_S = 1_000_000_000


def _limits(budget: int = 1024, seqs: int = 256, waiting: int = 100) -> SchedulerLimits:
    return SchedulerLimits(token_budget=budget, max_num_seqs=seqs, max_waiting=waiting)


def _scheduler(
    *,
    blocks: int = 1000,
    block_size: int = 16,
    depth: int = 0,
    limits: SchedulerLimits | None = None,
    model: int = 100_000,
) -> Scheduler:
    return Scheduler(
        policy=SarathiPolicy(),
        kv=BlockPool(total_blocks=blocks, block_size=block_size),
        limits=limits or _limits(),
        max_model_tokens=model,
        depth=depth,
    )


def _request(
    rid: int, tokens: int, max_output: int | None = None, *, hashes: list[int] | None = None
) -> ScheduledRequest:
    return ScheduledRequest(
        rid=rid,
        arrival_ns=rid,
        input_tokens=tokens,
        max_output_tokens=max_output,
        block_hashes=hashes or [],
    )


def _commit(scheduler: Scheduler, plan: StepPlan, *stopped: int, at_ns: int = 0) -> StepOutcome:
    result = StepResult(
        plan_id=plan.plan_id, at_ns=at_ns, step_ns=1, stopped=dict.fromkeys(stopped, "stop")
    )
    return scheduler.commit(plan, result, at_ns)


def _step(scheduler: Scheduler, *stopped: int) -> tuple[StepPlan, StepOutcome]:
    plan = scheduler.plan(0)
    assert plan is not None
    outcome = _commit(scheduler, plan, *stopped)
    scheduler.check_integrity()
    return plan, outcome


def _chunks(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(c.rid, c.start, c.num_tokens) for c in plan.chunks]


def _ends(outcome: StepOutcome) -> list[tuple[int, str | None]]:
    return [(p.request.rid, p.finish_reason) for p in outcome.progress]


def test_a_prompt_of_4000_tokens_at_chunk_512_takes_eight_chunks_the_last_of_416() -> None:
    scheduler = _scheduler(limits=_limits(budget=512))
    scheduler.add(_request(1, 4000, 1), 0)
    steps = [_step(scheduler) for _ in range(8)]
    assert [_chunks(plan)[0][2] for plan, _ in steps] == [512] * 7 + [416]
    assert [_ends(outcome) for _, outcome in steps] == [[]] * 7 + [[(1, "length")]]
    assert scheduler.plan(0) is None


def test_budget_1024_with_96_decodes_leaves_928_of_1800_prefill_tokens_now_and_872_later() -> None:
    scheduler = _scheduler(limits=_limits(budget=1024))
    for rid in range(96):
        scheduler.add(_request(rid, 10), 0)
    _step(scheduler)
    scheduler.add(_request(96, 1800), 0)
    first, _ = _step(scheduler)
    second, outcome = _step(scheduler)
    assert (first.num_decodes, _chunks(first)) == (96, [(96, 0, 928)])
    assert (second.num_decodes, _chunks(second)) == (96, [(96, 928, 872)])
    assert first.shape.num_tokens == 1024
    assert _ends(outcome) == [(96, None)]


def test_decodes_come_first_then_running_prefills_then_new_ones() -> None:
    scheduler = _scheduler(limits=_limits(budget=100))
    scheduler.add(_request(1, 20), 0)
    _step(scheduler)
    scheduler.add(_request(2, 150), 0)
    scheduler.add(_request(3, 30), 0)
    plan, _ = _step(scheduler)
    assert (plan.num_decodes, _chunks(plan)) == (1, [(2, 0, 99)])
    plan, _ = _step(scheduler)
    assert (plan.num_decodes, _chunks(plan)) == (1, [(2, 99, 51), (3, 0, 30)])
    plan, _ = _step(scheduler)
    assert (plan.num_decodes, _chunks(plan)) == (3, [])


def test_a_new_budget_and_width_hold_from_the_next_plan_on() -> None:
    scheduler = _scheduler(limits=_limits(budget=64))
    for rid in range(6):
        scheduler.add(_request(rid, 16), 0)
    assert len(_step(scheduler)[0].chunks) == 4
    scheduler.set_limits(_limits(budget=3, seqs=5))
    plan, outcome = _step(scheduler)
    assert (plan.num_decodes, plan.chunks) == (3, ())
    assert outcome.advanced == [0, 1, 2]
    scheduler.set_limits(_limits(budget=64, seqs=5))
    plan, _ = _step(scheduler)
    assert plan.num_decodes == 4
    assert [c.rid for c in plan.chunks] == [4]


def test_the_newest_of_those_that_decode_sit_out_when_the_budget_shrinks_below_them() -> None:
    scheduler = _scheduler()
    for rid in range(4):
        scheduler.add(_request(rid, 16), 0)
    _step(scheduler)
    _step(scheduler)
    scheduler.set_limits(_limits(budget=2))
    assert _step(scheduler)[1].advanced == [0, 1]
    assert _step(scheduler, 0)[1].advanced == [1]
    assert sorted(_step(scheduler)[1].advanced) == [1, 2]
    scheduler.set_limits(_limits())
    assert sorted(_step(scheduler)[1].advanced) == [1, 2, 3]


def test_out_of_blocks_the_newest_yields_and_returns_to_the_queues_head() -> None:
    scheduler = _scheduler(blocks=2)
    scheduler.add(_request(1, 16, 4), 0)
    scheduler.add(_request(2, 16, 4), 0)
    plan, outcome = _step(scheduler)
    assert _chunks(plan) == [(1, 0, 16), (2, 0, 16)]
    assert _ends(outcome) == [(1, None), (2, None)]
    scheduler.add(_request(3, 16, 1), 0)
    plan, _ = _step(scheduler)
    assert (plan.num_decodes, plan.chunks) == (1, ())
    assert [r.rid for r in scheduler.waiting] == [2, 3]
    assert scheduler.stats.preemptions == 1
    _step(scheduler)
    assert _ends(_step(scheduler)[1]) == [(1, "length")]
    plan, outcome = _step(scheduler)
    assert _chunks(plan) == [(2, 0, 17)]
    assert _ends(outcome) == [(2, None)]
    assert scheduler.stats.preemptions == 1


def test_a_preempted_request_recomputes_only_what_the_cache_has_lost() -> None:
    scheduler = _scheduler(blocks=4, block_size=4)
    scheduler.add(_request(1, 6, 6), 0)
    scheduler.add(_request(2, 7, 3, hashes=[77]), 0)
    _step(scheduler)
    _step(scheduler)
    plan, _ = _step(scheduler)
    assert scheduler.stats.preemptions == 1
    while not plan.admitted:
        plan, _ = _step(scheduler)
    (again,) = plan.admitted
    assert (again.rid, again.cached_tokens) == (2, 4)
    assert _chunks(plan) == [(2, 4, 5)]


@pytest.mark.parametrize("depth", [1, 2])
def test_with_plans_in_flight_a_victims_blocks_come_free_only_when_its_last_step_commits(
    depth: int,
) -> None:
    scheduler = _scheduler(blocks=2, depth=depth)
    scheduler.add(_request(1, 16, 4), 0)
    scheduler.add(_request(2, 16, 4), 0)
    first = scheduler.plan(0)
    assert first is not None
    assert scheduler.plan(0) is None, "no request has a block to decode into"
    assert scheduler.free_blocks == 0
    outcome = _commit(scheduler, first)
    assert _ends(outcome) == [(1, None), (2, None)], "tokens in flight are still given out"
    assert scheduler.free_blocks == 1
    plan = scheduler.plan(0)
    assert plan is not None
    assert [j.rid for j in plan.joined] == [1]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_up_to_depth_plans_wait_beside_the_one_that_runs(depth: int) -> None:
    scheduler = _scheduler(depth=depth)
    scheduler.add(_request(1, 10), 0)
    plans = [scheduler.plan(0) for _ in range(depth + 1)]
    assert all(plans)
    assert scheduler.plan(0) is None


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_discards_what_is_in_flight_and_frees_when_the_last_of_it_commits(
    depth: int,
) -> None:
    scheduler = _scheduler(depth=depth)
    scheduler.add(_request(1, 10), 0)
    plans = [plan for _ in range(depth + 1) if (plan := scheduler.plan(0))]
    outcome = _commit(scheduler, plans[0], 1)
    assert _ends(outcome) == [(1, "stop")]
    assert outcome.released == ([1] if depth == 0 else [])
    for plan in plans[1:]:
        outcome = _commit(scheduler, plan)
        assert not outcome.advanced
        assert not outcome.progress
    assert outcome.released == [1]
    assert not scheduler.has_work


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_end_at_the_bound_is_foreseen_and_never_overshoots(depth: int) -> None:
    scheduler = _scheduler(depth=depth)
    scheduler.add(_request(1, 10, 3), 0)
    tokens = 0
    pending: list[StepPlan] = []
    while scheduler.has_work:
        while (plan := scheduler.plan(0)) is not None:
            pending.append(plan)
        tokens += pending[0].shape.num_tokens
        _commit(scheduler, pending.pop(0))
    assert tokens == 10 + 2


def test_a_prompt_whose_prefix_is_cached_computes_the_rest() -> None:
    scheduler = _scheduler()
    scheduler.add(_request(1, 50, 1, hashes=[11, 12, 13]), 0)
    _step(scheduler)
    scheduler.add(_request(2, 70, 1, hashes=[11, 12, 99, 98]), 0)
    plan, _ = _step(scheduler)
    assert _chunks(plan) == [(2, 32, 38)]
    assert plan.admitted[0].cached_tokens == 32
    assert (scheduler.stats.prefix_queried_tokens, scheduler.stats.prefix_hit_tokens) == (120, 32)


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    scheduler = _scheduler()
    scheduler.add(_request(1, 48, 1, hashes=[11, 12, 13]), 0)
    _step(scheduler)
    scheduler.add(_request(2, 48, 1, hashes=[11, 12, 13]), 0)
    plan, outcome = _step(scheduler)
    assert _chunks(plan) == [(2, 32, 16)]
    assert _ends(outcome) == [(2, "length")]


def test_a_block_is_found_by_others_only_after_the_step_that_computes_it_has_committed() -> None:
    scheduler = _scheduler(depth=1, limits=_limits(budget=32))
    scheduler.add(_request(1, 32, 5, hashes=[11, 12]), 0)
    scheduler.add(_request(2, 32, 5, hashes=[11, 12]), 0)
    first, second = scheduler.plan(0), scheduler.plan(0)
    assert first is not None
    assert second is not None
    assert second.admitted[0].cached_tokens == 0
    _commit(scheduler, first)
    scheduler.add(_request(3, 32, 5, hashes=[11, 12]), 0)
    third = scheduler.plan(0)
    assert third is not None
    assert third.admitted[0].cached_tokens == 16
    scheduler.check_integrity()


def test_cancelling_a_waiting_request_is_at_once() -> None:
    scheduler = _scheduler()
    scheduler.add(_request(1, 10), 0)
    assert scheduler.cancel(1)
    assert not scheduler.has_work
    assert not scheduler.cancel(1)


@pytest.mark.parametrize(
    ("tokens", "max_output", "sentence"),
    [
        (161, None, "this model's context of 161 must hold the prompt and at least one output"),
        (100, 62, "after a prompt of 100 tokens this model's context of 161 leaves 61"),
    ],
    ids=["prompt", "prompt and answer"],
)
def test_what_can_never_fit_is_rejected_at_the_door(
    tokens: int, max_output: int | None, sentence: str
) -> None:
    scheduler = _scheduler(blocks=10)
    rejection = scheduler.add(_request(1, tokens, max_output), 0)
    assert rejection is not None
    assert rejection.reason == "too_long"
    assert sentence in rejection.detail
    assert rejection.retry_after_s == 0


@pytest.mark.parametrize(("tokens", "max_output"), [(160, 1), (1, 160), (160, None)])
def test_what_just_fits_runs_to_its_end(tokens: int, max_output: int | None) -> None:
    scheduler = _scheduler(blocks=10)
    assert scheduler.add(_request(1, tokens, max_output), 0) is None
    while scheduler.has_work:
        _step(scheduler)
    assert scheduler.stats.output_tokens == (max_output or 1)


@pytest.mark.parametrize(("tokens", "max_output"), [(0, None), (5, 0), (-1, 3)])
def test_nonsense_is_rejected_rather_than_trusted(tokens: int, max_output: int | None) -> None:
    rejection = _scheduler().add(_request(1, tokens, max_output), 0)
    assert rejection is not None
    assert rejection.reason == "invalid"


def test_a_full_queue_rejects_and_says_when_to_come_back() -> None:
    scheduler = _scheduler(limits=_limits(seqs=1, waiting=2))
    for rid in range(3):
        assert scheduler.add(_request(rid, 10, 1), 0) is None
    rejection = scheduler.add(_request(3, 10, 1), 0)
    assert rejection is not None
    assert (rejection.reason, rejection.retry_after_s) == ("queue_full", 1)
    assert scheduler.stats.shed == 1
    for second in range(2):
        plan = scheduler.plan(second * 4 * _S)
        assert plan is not None
        _commit(scheduler, plan, at_ns=second * 4 * _S)
        scheduler.add(_request(10 + second, 10, 1), second * 4 * _S)
    rejection = scheduler.add(_request(20, 10, 1), 4 * _S)
    assert rejection is not None
    assert rejection.retry_after_s == 6, "three in line, two admitted in four seconds"


def test_with_no_queue_at_all_a_request_that_can_start_at_once_is_taken() -> None:
    scheduler = _scheduler(blocks=10, limits=_limits(seqs=2, waiting=0))
    assert scheduler.add(_request(1, 16), 0) is None
    assert scheduler.add(_request(2, 16), 0) is None
    rejection = scheduler.add(_request(3, 16), 0)
    assert rejection is not None
    assert rejection.reason == "queue_full"


def test_a_step_costs_what_changes_not_what_runs() -> None:
    scheduler = _scheduler(blocks=10_000, limits=_limits(budget=20_000, seqs=1000))
    for rid in range(500):
        scheduler.add(_request(rid, 17), 0)
    _step(scheduler)
    joined, _ = _step(scheduler)
    assert len(joined.joined) == 500
    plan, outcome = _step(scheduler)
    assert plan.num_decodes == len(outcome.advanced) == 500
    assert (plan.joined, plan.left, plan.chunks, plan.new_blocks) == ((), (), (), ())


def test_the_first_plan_and_the_cached_tokens_are_remembered_through_a_preemption() -> None:
    scheduler = _scheduler(blocks=2)
    scheduler.add(_request(1, 16, 4), 0)
    newest = _request(2, 16, 4)
    scheduler.add(newest, 0)
    plan = scheduler.plan(7)
    assert plan is not None
    _commit(scheduler, plan)
    for _ in range(4):
        _step(scheduler)
    assert newest.preemptions == 1
    assert newest.state is not RequestState.WAITING
    assert newest.first_scheduled_ns == 7


def test_the_scheduler_cannot_reach_a_hidden_length() -> None:
    forbidden = ("goodput_engine.executor", "goodput_engine.messages", "goodput_engine.core")
    (folder,) = goodput_engine.scheduler.__path__
    for path in Path(folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            assert not [n for n in names if n.startswith((*forbidden, "torch", "time"))], path
