"""Requests that are rejected after their admission: displaced, or dropped because they are late."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.schedulers import add_request, commit_plan, make_scheduler, take_step

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import LateRequests, Policy
from goodput_engine.scheduler.admission import Rejection, Removal
from goodput_engine.scheduler.policies.registry import POLICIES
from goodput_engine.scheduler.policies.sarathi import SarathiPolicy
from goodput_engine.scheduler.request_table import RequestState, ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_engine.scheduler.scheduler import Scheduler

_SHED = Rejection(reason="displaced", detail="a more important request came", retry_after_s=3)


class Displacing(SarathiPolicy):
    """Every new request displaces the waiting requests of lower priority."""

    name = Policy.SLO

    def displaced_waiting(self, request: ScheduledRequest) -> Iterable[Removal]:
        return (
            Removal(request=waiting, rejection=_SHED)
            for waiting in self.view.waiting
            if waiting.priority < request.priority and not waiting.first_scheduled_ns
        )


class Impatient(SarathiPolicy):
    """Requests with a TBT target of 1 ns are expected to be late."""

    name = Policy.SLO

    def requests_to_drop(self) -> Iterable[Removal]:
        return [
            Removal(request=request, rejection=_SHED)
            for request in [*self.view.running(), *self.view.waiting]
            if request.targets.tbt_p99_ns == 1
        ]


def _waiting(scheduler: Scheduler) -> list[int]:
    return [request.rid for request in scheduler.waiting]


def _removed(scheduler: Scheduler) -> list[tuple[int, str]]:
    return [(r.request.rid, r.rejection.reason) for r in scheduler.admission.take_removed()]


def test_a_new_request_displaces_the_waiting_requests_that_the_policy_names() -> None:
    scheduler = make_scheduler(Displacing(), seqs=1)
    add_request(scheduler, 1, 10, 5)
    take_step(scheduler)
    low, high = add_request(scheduler, 2, 10, 5), add_request(scheduler, 3, 10, 5, priority=1)
    add_request(scheduler, 4, 10, 5, priority=1)
    assert low.state is RequestState.CANCELLED
    assert high.state is RequestState.WAITING
    assert _waiting(scheduler) == [3, 4]
    assert _removed(scheduler) == [(2, "displaced")]
    assert _removed(scheduler) == [], "a removal is reported once"
    assert scheduler.stats.shed == 1
    scheduler.check_integrity()


def test_a_request_that_is_rejected_displaces_no_other() -> None:
    scheduler = make_scheduler(Displacing(), seqs=1, model=50)
    add_request(scheduler, 1, 10, 5)
    take_step(scheduler)
    add_request(scheduler, 2, 10, 5)
    too_long = ScheduledRequest(rid=3, arrival_ns=3, input_tokens=60, priority=9)
    assert scheduler.add(too_long, 3) is not None
    assert _waiting(scheduler) == [2]
    assert not scheduler.admission.take_removed()


class DisplacingByWeight(SarathiPolicy):
    """A new request of weight 9 displaces the waiting requests of weight 7."""

    name = Policy.SLO

    def displaced_waiting(self, request: ScheduledRequest) -> Iterable[Removal]:
        sevens = [waiting for waiting in self.view.waiting if waiting.weight == 7]
        displaced = sevens if request.weight == 9 else []
        return [Removal(request=waiting, rejection=_SHED) for waiting in displaced]


@pytest.mark.parametrize(
    ("weights", "removed"),
    [
        pytest.param([1, 7], [3], id="the policy makes room, so the least important one stays"),
        pytest.param([7, 8], [2], id="the policy displaces the least important one itself"),
        pytest.param([1, 2], [2], id="the policy displaces none"),
    ],
)
def test_a_full_queue_displaces_no_request_if_the_policy_has_made_room(
    weights: list[int], removed: list[int]
) -> None:
    scheduler = make_scheduler(DisplacingByWeight(), seqs=1, waiting=2)
    add_request(scheduler, 1, 10, 5)
    take_step(scheduler)
    for rid, weight in enumerate([*weights, 9], 2):
        request = ScheduledRequest(
            rid=rid, arrival_ns=rid, input_tokens=10, max_output_tokens=5, weight=weight
        )
        assert scheduler.add(request, rid) is None
    assert [rid for rid, _ in _removed(scheduler)] == removed


def _dropping(**changes: object) -> Scheduler:
    values: dict[str, object] = {"late_requests": LateRequests.DROP, **changes}
    return make_scheduler(**values)  # type: ignore[arg-type] # the values of one test


def test_a_waiting_request_is_dropped_once_its_ttft_target_has_passed() -> None:
    scheduler = _dropping(seqs=1)
    add_request(scheduler, 1, 10, 50)
    add_request(scheduler, 2, 10, 5, arrival_ns=0, targets=Targets(ttft_ns=100))
    take_step(scheduler, at_ns=99)
    take_step(scheduler, at_ns=100)
    assert not scheduler.admission.take_removed(), "a token at the target is in time"
    take_step(scheduler, at_ns=101)
    (removal,) = scheduler.admission.take_removed()
    assert removal.request.rid == 2
    assert removal.rejection.reason == "late"
    assert removal.rejection.overload
    assert "time to first token" in removal.rejection.detail
    assert scheduler.stats.shed == 1


@pytest.mark.parametrize(("at_ns", "removed"), [(100, []), (101, [(1, "late")])])
def test_a_request_whose_first_token_came_late_is_dropped(
    at_ns: int, removed: list[tuple[int, str]]
) -> None:
    scheduler = _dropping()
    add_request(scheduler, 1, 10, 5, arrival_ns=0, targets=Targets(ttft_ns=100))
    plan = scheduler.plan(99)
    assert plan is not None
    commit_plan(scheduler, plan, at_ns=at_ns)
    scheduler.plan(200)
    assert _removed(scheduler) == removed


@pytest.mark.parametrize(
    ("targets", "in_time_ns", "late_ns"),
    [
        pytest.param(Targets(e2e_ns=100), 100, 101, id="end to end"),
        # The first token is emitted at 10 ns, and at most four gaps follow it.
        pytest.param(Targets(tpot_ns=20), 90, 91, id="time per output token"),
        pytest.param(Targets(ttft_ns=50, tpot_ns=20), 90, 91, id="first token and the others"),
    ],
)
def test_a_running_request_is_dropped_once_no_continuation_is_in_time(
    targets: Targets, in_time_ns: int, late_ns: int
) -> None:
    scheduler = _dropping()
    request = add_request(scheduler, 1, 10, 5, arrival_ns=0, targets=targets)
    take_step(scheduler, at_ns=10)
    assert request.output_tokens == 1
    take_step(scheduler, at_ns=in_time_ns)
    assert not scheduler.admission.take_removed()
    assert scheduler.plan(late_ns) is None
    assert _removed(scheduler) == [(1, "late")]
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_requests_in_time_and_requests_without_targets_are_never_dropped() -> None:
    scheduler = _dropping()
    add_request(scheduler, 1, 10, 40)
    add_request(scheduler, 2, 10, 40, targets=Targets(ttft_ns=100, tpot_ns=10, e2e_ns=1000))
    for at_ns in range(10, 410, 10):
        take_step(scheduler, at_ns=at_ns)
    assert not scheduler.has_work
    assert not scheduler.admission.take_removed()


def test_a_request_whose_blocks_are_copied_when_it_gets_late_is_dropped_after_the_copy() -> None:
    scheduler = _dropping(blocks=4, host=8, ns_per_block=1000)  # one block in each step
    add_request(scheduler, 1, 30, 30)
    late = add_request(scheduler, 2, 30, 30, targets=Targets(e2e_ns=998))
    while late.state is not RequestState.SWAPPING_OUT:
        take_step(scheduler)
    take_step(scheduler, at_ns=1001)
    assert _waiting(scheduler) == [2]
    take_step(scheduler, at_ns=1002)
    assert not scheduler.admission.take_removed(), "it is checked again after a millisecond"
    take_step(scheduler, at_ns=2_000_000)
    assert _removed(scheduler) == [(2, "late")]
    assert scheduler.host_blocks == (8, 8)


def test_checks_of_ended_requests_are_forgotten_long_before_their_targets_pass() -> None:
    scheduler = _dropping()
    for rid in range(1, 3000):
        add_request(scheduler, rid, 8, 1, at_ns=rid, targets=Targets(e2e_ns=10**15))
        take_step(scheduler, at_ns=rid)
    overdue = scheduler.admission.overdue
    assert overdue is not None
    assert len(overdue._due) < 300


def test_late_requests_are_served_to_their_end_by_default() -> None:
    scheduler = make_scheduler()
    add_request(scheduler, 1, 10, 5, targets=Targets(ttft_ns=1, tpot_ns=1, e2e_ns=1))
    for at_ns in range(100, 600, 100):
        take_step(scheduler, at_ns=at_ns)
    assert not scheduler.has_work
    assert scheduler.stats.shed == 0


def test_a_request_dropped_beside_plans_in_flight_gives_its_blocks_back_after_them() -> None:
    scheduler = _dropping(depth=2)
    late = add_request(scheduler, 1, 10, 50, arrival_ns=0, targets=Targets(e2e_ns=20))
    add_request(scheduler, 2, 10, 50)
    plans = [scheduler.plan(0), scheduler.plan(0)]
    assert scheduler.plan(21) is not None
    assert late.state is RequestState.CANCELLED
    assert late.blocks
    released: list[int] = []
    for at_ns, plan in enumerate(plans, 30):
        assert plan is not None
        outcome = commit_plan(scheduler, plan, at_ns=at_ns)
        released += outcome.released
        assert all(progress.request.rid == 2 for progress in outcome.progress)
    assert released == [1]
    assert not late.blocks


def test_a_policy_can_drop_requests_that_it_expects_to_be_late() -> None:
    expected_late = Targets(tbt_p99_ns=1)
    scheduler = _dropping(policy=Impatient())
    running = add_request(scheduler, 1, 10, 50)
    take_step(scheduler)
    add_request(scheduler, 2, 10, 50, targets=expected_late)
    running.targets = expected_late
    assert scheduler.plan(2) is None
    assert _removed(scheduler) == [(1, "displaced"), (2, "displaced")]
    assert scheduler.stats.shed == 2

    finishing = make_scheduler(Impatient())
    add_request(finishing, 1, 10, 50, targets=expected_late)
    take_step(finishing)
    assert not finishing.admission.take_removed(), "the hook is for lateRequests: drop"


_ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 20),  # arrival, steps after the previous one
        st.integers(1, 40),  # prompt
        st.integers(1, 20),  # output
        st.sampled_from(
            [
                Targets(),
                Targets(ttft_ns=30),
                Targets(e2e_ns=200),
                Targets(tpot_ns=12),
                Targets(ttft_ns=50, tpot_ns=15, e2e_ns=400),
            ]
        ),
    ),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=examples(25), deadline=None)
@given(arrivals=_ARRIVALS, depth=st.integers(0, 2), host=st.sampled_from([0, 20]))
def test_under_every_policy_each_request_ends_or_is_dropped_late_and_blocks_come_back(
    policy: str, arrivals: list[tuple[int, int, int, Targets]], depth: int, host: int
) -> None:
    """Steps take 10 ns; outputs have their full length."""
    scheduler = make_scheduler(
        policy, blocks=8, seqs=3, depth=depth, host=host, late_requests=LateRequests.DROP
    )
    now_ns, rid = 0, 0
    left = list(arrivals)
    accepted: dict[int, ScheduledRequest] = {}
    dropped: dict[int, int] = {}
    flight = []
    next_ns = left[0][0] * 10
    for _ in range(20_000):
        while left and next_ns <= now_ns:
            _, tokens, output, targets = left.pop(0)
            rid += 1
            request = ScheduledRequest(
                rid=rid,
                arrival_ns=now_ns,
                input_tokens=tokens,
                max_output_tokens=output,
                targets=targets,
            )
            if scheduler.add(request, now_ns) is None:
                accepted[rid] = request
            next_ns = now_ns + (left[0][0] * 10 if left else 0)
        if not left:
            scheduler.end_input()
        while (plan := scheduler.plan(now_ns)) is not None:
            flight.append(plan)
        for removal in scheduler.admission.take_removed():
            assert removal.request.rid not in dropped
            dropped[removal.request.rid] = now_ns
        now_ns += 10
        if flight:
            commit_plan(scheduler, flight.pop(0), at_ns=now_ns, step_ns=10)
        elif not left and not scheduler.has_work:
            break
    assert not scheduler.has_work
    scheduler.check_integrity()
    for number, request in accepted.items():
        if number not in dropped:
            assert request.output_tokens == request.max_output_tokens
            continue
        targets, at_ns, first_ns = request.targets, dropped[number], request.first_token_ns
        assert not targets.empty
        if policy != "slo":  # which may drop by prediction
            waited_ns = at_ns - request.arrival_ns
            missed = (
                (
                    targets.ttft_ns is not None
                    and (first_ns or at_ns) - request.arrival_ns > targets.ttft_ns
                )
                or (targets.e2e_ns is not None and waited_ns > targets.e2e_ns)
                or (
                    targets.tpot_ns is not None
                    and first_ns > 0
                    and at_ns - first_ns > targets.tpot_ns * (request.output_limit - 1)
                )
            )
            assert missed
