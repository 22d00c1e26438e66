"""Waiting requests that take the place of running ones, where a policy says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.builders.schedulers import add_request, make_scheduler, plan_chunks, take_step

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.admission import Rejection
from goodput_engine.scheduler.plan import StepPlan, StepResult
from goodput_engine.scheduler.policies.sarathi import SarathiPolicy
from goodput_engine.scheduler.policy import Phase, SchedulingPolicy
from goodput_engine.scheduler.request_table import FcfsQueue, RequestState, ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_engine.scheduler.scheduler import Scheduler


class _MostUrgentFirst(FcfsQueue):
    def peek(self, now_ns: int) -> ScheduledRequest | None:
        return max(self, key=lambda r: (r.priority, -r.rid), default=None)


class Urgent(SarathiPolicy):
    """A more urgent request displaces the least urgent ones and overtakes their prompts."""

    name = Policy.PRIORITY

    def new_queue(self) -> _MostUrgentFirst:
        return _MostUrgentFirst()

    def displaced_by(self, request: ScheduledRequest) -> Iterable[ScheduledRequest]:
        less = [r for r in self.view.running() if r.priority < request.priority]
        return sorted(less, key=lambda r: (r.priority, -r.rid))

    def precedes(self, waiting: ScheduledRequest, prefilling: ScheduledRequest) -> bool:
        return waiting.priority > prefilling.priority


class Quarrelsome(Urgent):
    """Every request displaces every other."""

    def displaced_by(self, request: ScheduledRequest) -> Iterable[ScheduledRequest]:
        return list(self.view.running())


class Restless(SarathiPolicy):
    """All running requests are evicted before every step."""

    name = Policy.FASTSERVE

    def preempt_ahead(self) -> Iterable[ScheduledRequest]:
        return list(self.view.running())


class OddOnly(SarathiPolicy):
    """Even requests are paused."""

    name = Policy.PRIORITY

    def phase(self) -> Phase:
        return Phase(only=lambda request: request.rid % 2 == 1)


class Choosy(SarathiPolicy):
    """Long answers are turned away."""

    name = Policy.SLO

    def reject(self, request: ScheduledRequest) -> Rejection | None:
        if request.output_limit <= 5:
            return None
        return Rejection(reason="unattainable", detail="too long a way", retry_after_s=3)


def _scheduler(
    policy: SchedulingPolicy,
    *,
    blocks: int = 4,
    seqs: int = 8,
    budget: int = 200,
    depth: int = 0,
    host: int = 0,
) -> Scheduler:
    return make_scheduler(policy, blocks=blocks, seqs=seqs, budget=budget, depth=depth, host=host)


def _add(
    scheduler: Scheduler, rid: int, tokens: int, max_output: int, urgent: int
) -> ScheduledRequest:
    return add_request(scheduler, rid, tokens, max_output, priority=urgent)


def test_an_urgent_request_takes_the_blocks_of_the_least_urgent() -> None:
    scheduler = _scheduler(Urgent(), blocks=6)
    patient = [_add(scheduler, rid, 16, 9, urgent) for rid, urgent in ((1, 2), (2, 1), (3, 0))]
    take_step(scheduler, step_ns=9)
    _add(scheduler, 4, 30, 9, 9)
    plan = take_step(scheduler, step_ns=9)
    assert plan_chunks(plan) == [(4, 30)]
    assert [r.preemptions for r in patient] == [0, 0, 1]


def test_an_urgent_request_takes_a_place_in_the_batch() -> None:
    scheduler = _scheduler(Urgent(), seqs=2, blocks=100)
    _add(scheduler, 1, 16, 9, 0)
    victim = _add(scheduler, 2, 16, 9, 0)
    take_step(scheduler, step_ns=9)
    _add(scheduler, 3, 16, 9, 9)
    plan = take_step(scheduler, step_ns=9)
    assert (plan.num_decodes, plan_chunks(plan)) == (1, [(3, 16)])
    assert victim.state is RequestState.WAITING


def test_no_request_is_displaced_if_all_of_them_would_not_be_enough() -> None:
    scheduler = _scheduler(Urgent(), blocks=6)
    _add(scheduler, 1, 40, 9, 9)
    _add(scheduler, 2, 16, 9, 0)
    take_step(scheduler, step_ns=9)
    _add(scheduler, 3, 64, 9, 5)
    plan = take_step(scheduler, step_ns=9)
    assert (plan.num_decodes, plan_chunks(plan)) == (2, [])
    assert scheduler.stats.preemptions == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_while_displaced_blocks_are_pending_no_other_request_is_displaced(depth: int) -> None:
    scheduler = _scheduler(Urgent(), blocks=4, depth=depth, host=8)
    for rid in (1, 2, 3, 4):
        _add(scheduler, rid, 8, 9, 0)
    flying: list[StepPlan] = []

    def turn() -> None:
        while (plan := scheduler.plan(0)) is not None:
            flying.append(plan)
        done = flying.pop(0)
        result = StepResult(plan_id=done.plan_id, at_ns=0, step_ns=9, stopped={})
        scheduler.commit(done, result, 0)
        scheduler.check_integrity()

    turn()
    urgent = _add(scheduler, 5, 8, 2, 9)
    for _ in range(4 + 3 * depth):
        turn()
    assert urgent.output_tokens == 2
    assert scheduler.stats.preemptions == 1


def test_an_urgent_prompt_overtakes_one_that_has_started() -> None:
    scheduler = _scheduler(Urgent(), blocks=100, budget=20)
    _add(scheduler, 1, 60, 9, 0)
    assert plan_chunks(take_step(scheduler, step_ns=9)) == [(1, 20)]
    _add(scheduler, 2, 15, 9, 9)
    assert plan_chunks(take_step(scheduler, step_ns=9)) == [(2, 15), (1, 5)]


@pytest.mark.parametrize("policy", [Quarrelsome, Restless])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("host", [0, 16])
def test_all_requests_end_whatever_a_policy_displaces(
    policy: type[SchedulingPolicy], depth: int, host: int
) -> None:
    scheduler = _scheduler(policy(), blocks=3, seqs=2, budget=8, depth=depth, host=host)
    requests = [_add(scheduler, rid, 10, 4, rid % 3) for rid in range(6)]
    for _ in range(1000):
        if not scheduler.has_work:
            break
        take_step(scheduler, step_ns=9)
    assert [r.output_tokens for r in requests] == [4] * 6


def test_a_paused_request_keeps_its_blocks_and_resumes_later() -> None:
    policy = OddOnly()
    scheduler = _scheduler(policy, blocks=100, budget=30)
    one, two = (_add(scheduler, rid, 10, 9, 0) for rid in (1, 2))
    take_step(scheduler, step_ns=9)
    assert (one.output_tokens, two.output_tokens) == (1, 1)
    take_step(scheduler, step_ns=9)
    assert (one.output_tokens, two.output_tokens) == (2, 1)
    assert two.state is RequestState.READY
    assert len(two.blocks) == 1


class NobodyYet(SarathiPolicy):
    """Running requests pause for a request that may not start."""

    name = Policy.SLO

    def phase(self) -> Phase:
        return Phase(only=lambda request: len(self.view.waiting) == 0)

    def may_admit(self, request: ScheduledRequest) -> bool:
        return self.view.num_running == 0


def test_no_request_is_paused_if_no_other_makes_progress() -> None:
    scheduler = _scheduler(NobodyYet(), blocks=100)
    requests = [_add(scheduler, rid, 10, 3, 0) for rid in (1, 2)]
    while scheduler.has_work:
        take_step(scheduler, step_ns=9)
    assert [r.output_tokens for r in requests] == [3, 3]


def test_what_a_policy_turns_away_is_shed_and_may_try_again() -> None:
    scheduler = _scheduler(Choosy())
    request = ScheduledRequest(rid=1, arrival_ns=0, input_tokens=4, max_output_tokens=6)
    rejection = scheduler.add(request, 0)
    assert rejection is not None
    assert (rejection.reason, rejection.retry_after_s) == ("unattainable", 3)
    assert scheduler.stats.shed == 1
    assert not scheduler.has_work
    _add(scheduler, 2, 4, 5, 0)
