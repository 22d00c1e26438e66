"""The hooks carry policies of other shapes than the one that is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.builders.schedulers import add_request, make_scheduler, plan_chunks, take_step

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policies.sarathi import SarathiPolicy
from goodput_engine.scheduler.policy import Phase
from goodput_engine.scheduler.request_table import FcfsQueue, ScheduledRequest

if TYPE_CHECKING:
    from goodput_engine.scheduler.plan import StepOutcome, StepPlan


class PrefillsAlone(SarathiPolicy):
    """Whole prompts in steps of their own, as long as one waits."""

    name = Policy.VLLM

    def phase(self) -> Phase:
        view = self.view
        waits = len(view.waiting) > 0 and view.num_running < view.limits.max_num_seqs
        return Phase(decodes=not waits)

    def chunk_tokens(
        self,
        request: ScheduledRequest,
        remaining: int,
        budget_left: int,
    ) -> int:
        return remaining if remaining <= budget_left else 0


class Drained(SarathiPolicy):
    """A batch runs to its end before the next one starts."""

    name = Policy.STATIC

    def may_admit(self, request: ScheduledRequest) -> bool:
        return self.view.num_decoding == 0

    def reserved_tokens(self, request: ScheduledRequest) -> int:
        return 64


class _ShortestPromptFirst(FcfsQueue):
    def peek(self, now_ns: int) -> ScheduledRequest | None:
        return min(self, key=lambda r: (r.input_tokens, r.rid), default=None)


class ShortestPrompt(SarathiPolicy):
    """Shortest prompt first; the least urgent yields; steps and ends are watched."""

    name = Policy.PRIORITY

    def __init__(self) -> None:
        self.ended: list[int] = []

    def new_queue(self) -> _ShortestPromptFirst:
        return _ShortestPromptFirst()

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        return (-request.priority, request.rid)

    def after_step(self, outcome: StepOutcome) -> None:
        self.ended += [p.request.rid for p in outcome.progress if p.finish_reason]


class Gathering(SarathiPolicy):
    """No request starts before two wait, ten nanoseconds have passed, or no more can arrive."""

    name = Policy.STATIC

    def wake_ns(self) -> int | None:
        view = self.view
        oldest = view.waiting.peek(view.now_ns)
        return None if oldest is None else oldest.arrival_ns + 10

    def may_admit(self, request: ScheduledRequest) -> bool:
        view = self.view
        due = view.now_ns >= request.arrival_ns + 10
        return due or not view.input_open or len(view.waiting) >= 2 or view.num_running > 0


def _shape(plan: StepPlan) -> tuple[int, list[tuple[int, int]]]:
    return plan.num_decodes, plan_chunks(plan)


def test_a_policy_can_keep_prefills_and_decodes_apart_and_prompts_whole() -> None:
    scheduler = make_scheduler(PrefillsAlone())
    add_request(scheduler, 1, 60, 3)
    add_request(scheduler, 2, 60, 3)
    assert [_shape(take_step(scheduler)) for _ in range(4)] == [
        (0, [(1, 60)]),
        (0, [(2, 60)]),
        (2, []),
        (2, []),
    ]


def test_a_policy_can_drain_a_batch_and_reserve_for_its_whole_length() -> None:
    scheduler = make_scheduler(Drained(), seqs=2)
    for rid in (1, 2, 3):
        add_request(scheduler, rid, 10, rid + 1)
    plans = [take_step(scheduler) for _ in range(4)]
    assert [_shape(plan) for plan in plans] == [
        (0, [(1, 10), (2, 10)]),
        (2, []),
        (1, []),
        (0, [(3, 10)]),
    ]
    assert [len(a.blocks) for a in plans[0].admitted] == [4, 4]


def test_a_policy_can_order_the_queue_and_the_evictions() -> None:
    policy = ShortestPrompt()
    scheduler = make_scheduler(policy, blocks=2, seqs=2, budget=32)
    add_request(scheduler, 1, 16, 3, priority=0)
    add_request(scheduler, 2, 15, 4, priority=9)
    assert _shape(take_step(scheduler)) == (0, [(2, 15), (1, 16)])
    assert _shape(take_step(scheduler)) == (1, [])
    assert [r.rid for r in scheduler.waiting] == [1]
    while scheduler.has_work:
        take_step(scheduler)
    assert policy.ended == [2, 1]
    assert scheduler.stats.preemptions == 1


def test_a_policy_that_waits_says_when_to_ask_again() -> None:
    scheduler = make_scheduler(Gathering())
    assert scheduler.wake_ns() is None
    add_request(scheduler, 1, 10, 1)
    assert scheduler.plan(5) is None
    assert scheduler.wake_ns() == 11
    plan = scheduler.plan(11)
    assert plan is not None
    assert scheduler.wake_ns() is None, "something is in flight"


def test_a_wake_up_that_has_passed_is_not_asked_for_again() -> None:
    scheduler = make_scheduler(Gathering(), blocks=1)
    add_request(scheduler, 1, 10, 1)
    scheduler.now_ns = 11
    assert scheduler.wake_ns() is None


def test_a_policy_that_fills_batches_knows_when_no_request_can_arrive() -> None:
    scheduler = make_scheduler(Gathering())
    add_request(scheduler, 1, 10, 1)
    assert scheduler.plan(5) is None
    scheduler.end_input()
    assert scheduler.plan(5) is not None
