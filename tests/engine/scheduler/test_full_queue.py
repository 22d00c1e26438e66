"""A full queue rejects the least important request, whether it is new or waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.schedulers import NO_TARGETS, commit_plan, make_scheduler, take_step

from goodput_core.slo.targets import Targets
from goodput_engine.scheduler.policies.priority import PriorityPolicy
from goodput_engine.scheduler.policies.registry import POLICIES
from goodput_engine.scheduler.request_table import RequestState, ScheduledRequest

if TYPE_CHECKING:
    from goodput_engine.scheduler.admission import Rejection
    from goodput_engine.scheduler.scheduler import Scheduler

_LATER = Targets(ttft_ns=10**12)
"""A target that never passes, and that no policy expects to be missed."""


def _full(policy: str = "sarathi", *, waiting: int = 2) -> Scheduler:
    """Return a scheduler whose only slot is taken; its queue has this number of places."""
    scheduler = make_scheduler(policy, seqs=1, waiting=waiting)
    assert _add(scheduler, 100, priority=0) is None
    take_step(scheduler)
    assert scheduler.num_running == 1
    return scheduler


def _add(
    scheduler: Scheduler,
    rid: int,
    *,
    priority: int = 0,
    weight: int = 1,
    targets: Targets = _LATER,
    at_ns: int = 1,
) -> Rejection | None:
    request = ScheduledRequest(
        rid=rid,
        arrival_ns=at_ns,
        input_tokens=8,
        max_output_tokens=30,
        priority=priority,
        weight=weight,
        targets=targets,
    )
    rejection = scheduler.add(request, at_ns)
    scheduler.check_integrity()
    return rejection


def _waiting(scheduler: Scheduler) -> list[int]:
    return sorted(request.rid for request in scheduler.waiting)


def _removed(scheduler: Scheduler) -> list[tuple[int, str]]:
    return [(r.request.rid, r.rejection.reason) for r in scheduler.admission.take_removed()]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_under_every_policy_a_more_important_request_takes_the_place_of_a_waiting_one(
    policy: str,
) -> None:
    scheduler = _full(policy)
    assert _add(scheduler, 1, priority=1) is None
    assert _add(scheduler, 2, priority=0) is None
    assert _add(scheduler, 3, priority=1) is None
    assert _waiting(scheduler) == [1, 3]
    assert _removed(scheduler) == [(2, "displaced")]
    assert scheduler.stats.shed == 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_under_every_policy_a_request_that_is_not_more_important_is_rejected(policy: str) -> None:
    scheduler = _full(policy)
    assert _add(scheduler, 1, priority=1) is None
    assert _add(scheduler, 2, priority=0) is None
    for rid, priority in ((3, 0), (4, -1)):
        rejection = _add(scheduler, rid, priority=priority, at_ns=2)
        assert rejection is not None
        assert rejection.reason == "queue_full"
    assert _waiting(scheduler) == [1, 2]
    assert not scheduler.admission.take_removed()


@pytest.mark.parametrize(
    ("first", "second", "newcomer", "victim"),
    [
        pytest.param({"priority": 1}, {"priority": 2}, {"priority": 3}, 1, id="lowest priority"),
        pytest.param({"weight": 5}, {"weight": 3}, {"weight": 4}, 2, id="least weight"),
        pytest.param({"weight": 5}, {"weight": 3}, {"weight": 2}, 3, id="new one weighs least"),
        pytest.param(
            {"targets": Targets(ttft_ns=500)},
            {"targets": Targets(ttft_ns=400)},
            {"targets": Targets(ttft_ns=450)},
            2,
            id="shortest target",
        ),
        pytest.param(
            {"targets": Targets(ttft_ns=500)},
            {"targets": Targets(e2e_ns=400)},
            {"targets": NO_TARGETS},
            2,
            id="an end-to-end target bounds the first token",
        ),
        pytest.param(
            {"targets": Targets(ttft_ns=500)},
            {"targets": NO_TARGETS},
            {"targets": Targets(ttft_ns=100)},
            3,
            id="new one has the shortest target",
        ),
        pytest.param(
            {"weight": 2, "targets": Targets(ttft_ns=100)},
            {"weight": 1, "targets": Targets(ttft_ns=900)},
            {"weight": 2, "targets": Targets(ttft_ns=500)},
            2,
            id="weight before the target",
        ),
        pytest.param(
            {"priority": 1, "weight": 1, "targets": Targets(ttft_ns=10)},
            {"priority": 0, "weight": 9, "targets": NO_TARGETS},
            {"priority": 1, "weight": 9},
            2,
            id="priority before everything",
        ),
        pytest.param({}, {}, {"weight": 2}, 2, id="of equal ones the newest"),
    ],
)
def test_the_least_important_of_all_is_rejected(
    first: dict[str, object], second: dict[str, object], newcomer: dict[str, object], victim: int
) -> None:
    scheduler = _full()
    assert _add(scheduler, 1, at_ns=1, **first) is None  # type: ignore[arg-type]
    assert _add(scheduler, 2, at_ns=2, **second) is None  # type: ignore[arg-type]
    rejection = _add(scheduler, 3, at_ns=3, **newcomer)  # type: ignore[arg-type]
    rejected = [rid for rid, _ in _removed(scheduler)] + ([3] if rejection is not None else [])
    assert rejected == [victim]
    assert len(_waiting(scheduler)) == 2


def test_a_waiting_request_whose_target_has_passed_is_rejected_before_any_of_its_priority() -> None:
    scheduler = _full()
    late = Targets(ttft_ns=100)
    assert _add(scheduler, 1, weight=9, targets=late, at_ns=1) is None
    assert _add(scheduler, 2, weight=5, targets=late, at_ns=50) is None
    assert _add(scheduler, 3, weight=4, targets=late, at_ns=101) is not None, "still in time"
    assert _add(scheduler, 4, weight=1, targets=late, at_ns=102) is None
    assert _waiting(scheduler) == [2, 4]


def test_a_late_request_of_a_higher_priority_stays() -> None:
    scheduler = _full()
    assert _add(scheduler, 1, priority=1, targets=Targets(ttft_ns=100)) is None
    assert _add(scheduler, 2, priority=0) is None
    assert _add(scheduler, 3, priority=1, at_ns=500) is None
    assert _waiting(scheduler) == [1, 3]


def test_a_request_that_has_started_is_not_displaced() -> None:
    scheduler = make_scheduler(blocks=3, seqs=2, waiting=0)
    for rid in (1, 2):
        request = ScheduledRequest(
            rid=rid, arrival_ns=0, input_tokens=16, max_output_tokens=20, priority=0
        )
        assert scheduler.add(request, 0) is None
    while not scheduler.stats.preemptions:
        take_step(scheduler)
    (preempted,) = scheduler.waiting
    rejection = _add(scheduler, 3, priority=9)
    assert rejection is not None
    assert rejection.reason == "queue_full"
    assert preempted.state is RequestState.WAITING


def test_a_request_at_its_target_is_not_overdue() -> None:
    scheduler = _full()
    assert _add(scheduler, 1, weight=5, targets=Targets(ttft_ns=99)) is None
    assert _add(scheduler, 2, weight=1) is None
    assert _add(scheduler, 3, weight=3, at_ns=100) is None
    assert _removed(scheduler) == [(2, "displaced")]
    assert _add(scheduler, 4, weight=1, at_ns=101) is None
    assert _removed(scheduler) == [(1, "displaced")]


@pytest.mark.parametrize(
    ("blocks", "accepted"),
    [
        pytest.param(49, True, id="it starts in the next step"),
        pytest.param(50, False, id="too few blocks would stay free"),
        pytest.param(51, False, id="too few blocks are free"),
    ],
)
def test_without_places_only_a_request_that_can_start_at_once_is_accepted(
    *, blocks: int, accepted: bool
) -> None:
    scheduler = make_scheduler(blocks=100, waiting=0, budget=2000, model=1600)
    for rid, count in ((1, 50), (2, blocks)):
        request = ScheduledRequest(
            rid=rid, arrival_ns=0, input_tokens=16 * count - 5, max_output_tokens=9
        )
        rejection = scheduler.add(request, 0)
        if rid == 1:
            take_step(scheduler)
    assert (rejection is None) is accepted
    assert scheduler.free_blocks == 50
    if accepted:
        assert [admitted.rid for admitted in take_step(scheduler).admitted] == [2]


def test_without_places_a_more_important_request_takes_the_free_slot() -> None:
    scheduler = make_scheduler(seqs=1, waiting=0)
    assert _add(scheduler, 1, priority=0) is None
    assert _add(scheduler, 2, priority=1) is None
    assert _waiting(scheduler) == [2]
    assert _removed(scheduler) == [(1, "displaced")]


def test_under_priority_a_request_that_has_aged_is_as_important_as_its_level() -> None:
    policy = PriorityPolicy(ageing_ns=1000)
    scheduler = make_scheduler(policy, seqs=1, waiting=1)
    assert _add(scheduler, 100, priority=2) is None
    take_step(scheduler)
    assert _add(scheduler, 1, priority=-1, at_ns=0, targets=NO_TARGETS) is None
    assert _add(scheduler, 2, priority=0, at_ns=1000, targets=NO_TARGETS) is not None
    assert _add(scheduler, 3, priority=1, at_ns=1999, targets=NO_TARGETS) is None
    assert _removed(scheduler) == [(1, "displaced")]


def test_the_importance_of_the_first_victim_is_reported() -> None:
    scheduler = _full()
    assert scheduler.admission.displaceable() is None
    assert _add(scheduler, 1, priority=3, weight=2, targets=Targets(ttft_ns=100)) is None
    assert scheduler.admission.displaceable() == (3, 2, 100)
    scheduler.now_ns = 500
    assert scheduler.admission.displaceable() == (3, 0, 100)


def test_no_importance_is_reported_while_less_than_half_of_the_queue_is_used() -> None:
    scheduler = make_scheduler(seqs=1, waiting=4)
    assert _add(scheduler, 1) is None
    assert scheduler.admission.displaceable() is None
    assert _add(scheduler, 2) is None
    assert scheduler.admission.displaceable() is not None


def test_a_step_that_ended_before_the_latest_arrival_hides_no_victim() -> None:
    scheduler = make_scheduler(PriorityPolicy(ageing_ns=1000), seqs=1, waiting=1)
    assert _add(scheduler, 100, priority=2) is None
    take_step(scheduler)
    assert _add(scheduler, 1, priority=-1, at_ns=0, targets=NO_TARGETS) is None
    plan = scheduler.plan(10)
    assert plan is not None
    assert _add(scheduler, 2, priority=0, at_ns=1000, targets=NO_TARGETS) is not None
    commit_plan(scheduler, plan, at_ns=999)
    reported = scheduler.admission.displaceable()
    assert reported is not None
    assert reported.priority == -1, "it rises at 1000 ns"
    assert _add(scheduler, 3, priority=1, at_ns=1001, targets=NO_TARGETS) is None
    assert _removed(scheduler) == [(1, "displaced")]


_TARGETS = [NO_TARGETS, Targets(ttft_ns=20), Targets(ttft_ns=60), Targets(e2e_ns=40)]


@pytest.mark.parametrize("ageing_ns", [None, 15], ids=["strict", "ageing"])
@settings(max_examples=examples(200), deadline=None)
@given(
    actions=st.lists(
        st.tuples(
            st.integers(0, 10),  # time since the previous action
            st.integers(-1, 3),  # priority, or 3 to take a step instead
            st.integers(1, 3),
            st.sampled_from(_TARGETS),
        ),
        max_size=60,
    )
)
def test_the_victim_is_the_minimum_over_all_waiting_requests(
    ageing_ns: int | None, actions: list[tuple[int, int, int, Targets]]
) -> None:
    policy = "sarathi" if ageing_ns is None else PriorityPolicy(ageing_ns=ageing_ns)
    scheduler = make_scheduler(policy, seqs=2, waiting=5, blocks=8)
    index, now_ns = scheduler.admission._unstarted, 0
    for rid, (passed_ns, priority, weight, targets) in enumerate(actions, 1):
        now_ns += passed_ns
        if priority == 3:
            if scheduler.has_work:
                take_step(scheduler, at_ns=now_ns)
            continue
        before = {r.rid: r for r in scheduler.waiting if not r.admitted_tokens}
        worth = {r.rid: index.importance(r, now_ns) for r in before.values()}
        rejection = _add(
            scheduler, rid, priority=priority, weight=weight, targets=targets, at_ns=now_ns
        )
        request = ScheduledRequest(
            rid=rid,
            arrival_ns=now_ns,
            input_tokens=8,
            priority=priority,
            weight=weight,
            targets=targets,
        )
        newcomer = index.importance(request, now_ns)
        for removed, _ in _removed(scheduler):
            least = min(worth.values())
            assert worth[removed][:2] == least[:2]
            # Of overdue requests, which have no weight, the one that was due first is rejected.
            assert worth[removed] == least or not least.weight
            assert worth[removed] < newcomer
        if rejection is not None:
            assert all(newcomer <= other for other in worth.values())


def test_the_index_forgets_requests_that_have_started() -> None:
    scheduler = make_scheduler(seqs=8, waiting=100)
    for rid in range(1, 5000):
        request = ScheduledRequest(
            rid=rid, arrival_ns=rid, input_tokens=8, max_output_tokens=1, priority=rid % 7
        )
        assert scheduler.add(request, rid) is None
        take_step(scheduler, at_ns=rid)
    levels = scheduler.admission._unstarted._levels.values()
    assert sum(len(level.by_worth) for level in levels) < 600
    assert sum(len(level.by_due) for level in levels) < 600


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_free_places_do_not_make_the_queue_longer_than_the_next_step_can_shorten_it(
    policy: str,
) -> None:
    """The prompts of three waiting requests fill the next step."""
    scheduler = make_scheduler(policy, seqs=64, waiting=4, budget=64, blocks=1000)
    answers = [
        scheduler.add(
            ScheduledRequest(
                rid=rid, arrival_ns=1, input_tokens=24, max_output_tokens=8, targets=_LATER
            ),
            1,
        )
        for rid in range(12)
    ]
    reasons = [None if answer is None else answer.reason for answer in answers]
    assert reasons[:4] == [None] * 4
    assert reasons[-6:] == ["queue_full"] * 6
    assert len(scheduler.waiting) <= 6
