"""The costs by which `hybrid` selects the preemption mode of each evicted request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.builders.schedulers import add_request, commit_plan, make_scheduler

from goodput_core.spec.choices import Preemption
from goodput_engine.scheduler.request_table import RequestState, ScheduledRequest

if TYPE_CHECKING:
    from goodput_engine.scheduler.plan import StepPlan
    from goodput_engine.scheduler.scheduler import Scheduler

_STEP_NS = 1_000
_NS_PER_TOKEN = 100


def _step(scheduler: Scheduler) -> StepPlan:
    """Take a step; each prompt token makes it longer."""
    plan = scheduler.plan(0)
    assert plan is not None
    prompt_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
    commit_plan(scheduler, plan, step_ns=_STEP_NS + _NS_PER_TOKEN * prompt_tokens)
    return plan


def _displaced(
    *, blocks: int, ns_per_block: int, others: int = 0, waiting: int = 0
) -> tuple[Scheduler, ScheduledRequest]:
    """Return a scheduler in which an urgent request has displaced one of 160 prompt tokens."""
    scheduler = make_scheduler(
        "priority",
        blocks=blocks,
        budget=200,
        seqs=1 + others,
        host=1000,
        ns_per_block=ns_per_block,
        preemption=Preemption.HYBRID,
    )
    for rid in range(2, 2 + others):
        add_request(scheduler, rid, 8, 150, priority=2)
    victim = add_request(scheduler, 1, 160, 150, priority=-1)
    for _ in range(40):
        _step(scheduler)
    assert victim.state is RequestState.DECODING
    for rid in range(50, 50 + waiting):
        add_request(scheduler, rid, 8, 2, priority=-1)
    add_request(scheduler, 99, 8, 2, priority=2)
    while not victim.preemptions:
        _step(scheduler)
    return scheduler, victim


@pytest.mark.parametrize(
    ("blocks", "swapped"), [(40, False), (1000, True)], ids=["a third of the pool", "a small part"]
)
def test_a_copy_costs_the_share_of_the_pool_that_is_idle_meanwhile(
    *, blocks: int, swapped: bool
) -> None:
    scheduler, _ = _displaced(blocks=blocks, ns_per_block=8_000, others=5, waiting=30)
    assert bool(scheduler.stats.swapped_tokens) is swapped
    assert bool(scheduler.stats.recomputed_tokens) is not swapped


@pytest.mark.parametrize(("waiting", "swapped"), [(0, False), (30, True)])
def test_device_time_counts_for_every_request_that_waits(*, waiting: int, swapped: bool) -> None:
    # The copy back takes the victim longer than a recomputation, which delays all others.
    scheduler, _ = _displaced(blocks=1000, ns_per_block=6_000, waiting=waiting)
    assert bool(scheduler.stats.swapped_tokens) is swapped


@pytest.mark.parametrize(
    ("ns_per_block", "swapped"), [(6_000, True), (10_000, False)], ids=["much less", "little less"]
)
def test_a_copy_must_cost_less_than_half_of_a_recomputation(
    *, ns_per_block: int, swapped: bool
) -> None:
    scheduler, _ = _displaced(blocks=1000, ns_per_block=ns_per_block, waiting=30)
    assert bool(scheduler.stats.swapped_tokens) is swapped


def test_a_request_without_a_copy_starts_although_a_copy_waits() -> None:
    scheduler = make_scheduler(
        blocks=60, budget=300, seqs=64, host=200, ns_per_block=1, preemption=Preemption.HYBRID
    )
    for rid in range(24):
        add_request(scheduler, rid, 60, 90)
    without_room = 0
    while scheduler.has_work:
        host_free, host_total = scheduler.host_blocks
        free, running = scheduler.free_blocks, scheduler.num_running
        copied = {request.rid for request in scheduler.waiting if request.host_blocks}
        plan = _step(scheduler)
        if host_free < host_total and running:
            for admitted in plan.admitted:
                free -= len(admitted.blocks)
                without_room += free <= running and admitted.rid not in copied
                running += 1
    assert scheduler.stats.swapped_tokens
    assert without_room


@pytest.mark.parametrize(("budget", "swapped"), [(4_000, False), (170, True)], ids=["idle", "used"])
def test_a_recomputation_takes_budget_from_other_prompts_only_if_they_use_it(
    *, budget: int, swapped: bool
) -> None:
    scheduler = make_scheduler(
        "priority",
        blocks=1000,
        budget=budget,
        seqs=1,
        host=1000,
        ns_per_block=1,
        preemption=Preemption.HYBRID,
    )
    victim = add_request(scheduler, 1, 160, 150, priority=-1)
    for _ in range(4):
        plan = scheduler.plan(0)
        assert plan is not None
        commit_plan(scheduler, plan, step_ns=_STEP_NS)  # prompts do not make steps longer
    for rid in range(50, 150):
        add_request(scheduler, rid, 8, 2, priority=-1)
    add_request(scheduler, 99_999, 8, 2, priority=2)
    while not victim.preemptions:
        plan = scheduler.plan(0)
        assert plan is not None
        commit_plan(scheduler, plan, step_ns=_STEP_NS)
    assert bool(scheduler.stats.swapped_tokens) is swapped
