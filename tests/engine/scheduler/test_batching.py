"""`static` and `dynamic`: the contents of a batch, its start, and that none joins it later."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.builders.schedulers import add_request, commit_plan, make_configure, make_scheduler

from goodput_core.errors import InputError
from goodput_engine.core.build import build_core
from goodput_engine.device.load import load_profile
from goodput_engine.messages import Configure, ExecutorInput, Submit
from goodput_engine.scheduler.plan import StepResult
from goodput_engine.scheduler.policies.dynamic import DynamicPolicy
from goodput_engine.scheduler.policies.static import StaticPolicy

if TYPE_CHECKING:
    from goodput_engine.scheduler.policy import SchedulingPolicy
    from goodput_engine.scheduler.scheduler import Scheduler

GATHERING = [
    pytest.param(StaticPolicy, id="static"),
    pytest.param(DynamicPolicy, id="dynamic"),
]


def _scheduler(
    policy: SchedulingPolicy, *, blocks: int = 100, seqs: int = 3, budget: int = 100, depth: int = 0
) -> Scheduler:
    return make_scheduler(policy, blocks=blocks, seqs=seqs, budget=budget, depth=depth)


def _add(
    scheduler: Scheduler, rid: int, *, at_ns: int = 0, tokens: int = 10, max_output: int
) -> None:
    add_request(scheduler, rid, tokens, max_output, at_ns=at_ns, arrival_ns=at_ns)


def _step(scheduler: Scheduler, at_ns: int) -> list[int] | None:
    """Requests with a prompt in the next step, which is committed; None if there is no step."""
    plan = scheduler.plan(at_ns)
    if plan is None:
        return None
    commit_plan(scheduler, plan, at_ns=at_ns)
    return [chunk.rid for chunk in plan.chunks]


@pytest.mark.parametrize("kind", GATHERING)
def test_a_full_batch_starts_at_once_and_no_request_joins_it_until_all_have_ended(
    kind: type[StaticPolicy | DynamicPolicy],
) -> None:
    scheduler = _scheduler(kind(timeout_ns=50))
    _add(scheduler, 1, max_output=1)
    _add(scheduler, 2, max_output=2)
    assert _step(scheduler, 0) is None
    _add(scheduler, 3, max_output=4)
    for rid in (4, 5, 6):
        _add(scheduler, rid, max_output=1)
    assert _step(scheduler, 1) == [1, 2, 3]
    assert [_step(scheduler, at) for at in (2, 3, 4)] == [[], [], []]
    assert _step(scheduler, 5) == [4, 5, 6]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_batch_starts_only_when_the_last_step_of_the_one_before_it_is_done(depth: int) -> None:
    scheduler = _scheduler(StaticPolicy(), seqs=1, depth=depth)
    for rid in (1, 2):
        _add(scheduler, rid, max_output=1)
    plan = scheduler.plan(0)
    assert plan is not None
    assert scheduler.plan(0) is None
    result = StepResult(plan_id=plan.plan_id, at_ns=1, step_ns=1, stopped={})
    scheduler.commit(plan, result, 1)
    assert _step(scheduler, 1) == [2]


@pytest.mark.parametrize(
    ("kind", "starts_ns"),
    [
        pytest.param(StaticPolicy, 80, id="static counts from the newest"),
        pytest.param(DynamicPolicy, 50, id="dynamic counts from the oldest"),
    ],
)
def test_a_batch_that_is_not_full_starts_after_the_timeout(
    kind: type[StaticPolicy | DynamicPolicy], starts_ns: int
) -> None:
    scheduler = _scheduler(kind(timeout_ns=50))
    _add(scheduler, 1, max_output=1)
    _add(scheduler, 2, at_ns=30, max_output=1)
    assert _step(scheduler, 30) is None
    assert scheduler.wake_ns() == starts_ns
    assert _step(scheduler, starts_ns - 1) is None
    assert _step(scheduler, starts_ns) == [1, 2]


@pytest.mark.parametrize("kind", GATHERING)
def test_a_batch_is_full_when_memory_holds_no_longer_answer(
    kind: type[StaticPolicy | DynamicPolicy],
) -> None:
    scheduler = _scheduler(kind(), blocks=5, seqs=8)
    _add(scheduler, 1, max_output=23)
    _add(scheduler, 2, max_output=23)
    assert _step(scheduler, 0) is None, "they need four blocks: another might fit"
    _add(scheduler, 3, max_output=23)
    assert _step(scheduler, 0) == [1, 2]
    while scheduler.num_running:
        assert _step(scheduler, 0) == []
    assert scheduler.stats.preemptions == 0


@pytest.mark.parametrize("kind", GATHERING)
def test_a_batch_beyond_the_token_budget_starts_over_several_steps_without_other_requests(
    kind: type[StaticPolicy | DynamicPolicy],
) -> None:
    scheduler = _scheduler(kind(), budget=15)
    for rid in (1, 2, 3, 4):
        _add(scheduler, rid, max_output=2)
    assert [_step(scheduler, 0) for _ in range(4)] == [[1, 2], [2, 3], [3], []]
    assert [r.rid for r in scheduler.waiting] == [4]


@pytest.mark.parametrize("kind", GATHERING)
def test_a_request_that_leaves_while_its_batch_starts_is_not_replaced(
    kind: type[StaticPolicy | DynamicPolicy],
) -> None:
    scheduler = _scheduler(kind(), budget=10)
    for rid in (1, 2, 3, 4):
        _add(scheduler, rid, max_output=1)
    assert _step(scheduler, 0) == [1]
    scheduler.cancel(2)
    assert _step(scheduler, 0) == [3]
    assert _step(scheduler, 0) is None
    assert [r.rid for r in scheduler.waiting] == [4]


@pytest.mark.parametrize("kind", GATHERING)
def test_an_incomplete_batch_starts_when_no_request_can_arrive(
    kind: type[StaticPolicy | DynamicPolicy],
) -> None:
    scheduler = _scheduler(kind())
    _add(scheduler, 1, max_output=1)
    assert _step(scheduler, 0) is None
    scheduler.end_input()
    assert _step(scheduler, 0) == [1]


def _configure(policy: str, timeout_ns: int | None) -> Configure:
    return make_configure(policy=policy, max_waiting=8, batch_timeout_ns=timeout_ns)


@pytest.mark.parametrize(
    ("policy", "timeout_ns", "wakes_ns"),
    [
        ("static", None, 1_000_000_000),
        ("dynamic", None, 100_000_000),
        ("static", 7, 7),
        ("dynamic", 7, 7),
        ("sarathi", 7, None),
    ],
)
def test_the_core_wakes_by_itself_when_the_manifests_timeout_is_over(
    policy: str, timeout_ns: int | None, wakes_ns: int | None
) -> None:
    profile = replace(load_profile("unit"), kv_blocks=100)
    core = build_core(_configure(policy, timeout_ns), profile)
    executor = ExecutorInput(ignore_eos=True)
    core.submit(
        Submit(rid=1, arrival_ns=0, input_tokens=4, max_output_tokens=1, executor=executor), 0
    )
    core.advance(0)
    if wakes_ns is None:
        assert core.next_event_ns() == 1_000_000, "it runs already"
        return
    assert core.next_event_ns() == wakes_ns
    core.advance(wakes_ns)
    assert core.next_event_ns() == wakes_ns + 1_000_000


def test_a_timeout_below_nothing_is_rejected() -> None:
    with pytest.raises(InputError, match="batch timeout must be at least 0, not -1"):
        build_core(_configure("static", -1), load_profile("unit"))
