"""Requests that a replica drops after their admission, in virtual time: a step takes 1 ms."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.builders.fleets import make_fleet, plan, run_fleet

from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import RouterPolicy
from goodput_core.units import NS_PER_MS

if TYPE_CHECKING:
    from goodput_replay.emulation.fleet import VirtualFleet


def test_a_request_that_is_dropped_in_the_queue_is_shed_without_tokens() -> None:
    requests = [
        plan("long", 0, 8, 100),
        plan("late", 0, 8, 5, targets=Targets(ttft_ns=10 * NS_PER_MS)),
        plan("last", 50, 8, 5, slo_class="slow"),
    ]
    run = run_fleet(requests, make_fleet(max_num_seqs=1, late_requests="drop"))
    late = run["late"]
    assert (late.outcome, late.output_tokens, late.first_token_ns) == (Outcome.SHED, 0, None)
    assert late.end_ns == 11 * NS_PER_MS, "the first plan after its target has passed"
    assert "time to first token" in late.detail
    assert late.replica == "chat-0"
    assert run["long"].outcome is run["last"].outcome is Outcome.OK
    assert run.outcome.shed == 1


def test_a_running_request_that_is_dropped_keeps_its_tokens_and_frees_its_slot() -> None:
    requests = [
        plan("late", 0, 8, 100, targets=Targets(e2e_ns=20 * NS_PER_MS)),
        plan("next", 5, 8, 2, slo_class="slow"),
    ]
    run = run_fleet(requests, make_fleet(max_num_seqs=1, late_requests="drop"))
    assert run["late"].outcome is Outcome.SHED
    assert run.tokens_ms("late") == list(range(1, 22))
    assert run["late"].end_ns == 21 * NS_PER_MS
    assert run.tokens_ms("next") == [22, 23]


def test_late_requests_are_served_to_their_end_by_default() -> None:
    requests = [plan("late", 0, 8, 100, targets=Targets(e2e_ns=20 * NS_PER_MS))]
    run = run_fleet(requests, make_fleet())
    assert run["late"].outcome is Outcome.OK
    assert run["late"].output_tokens == 100


def test_every_request_of_an_overload_is_in_time_or_shed() -> None:
    target = Targets(ttft_ns=30 * NS_PER_MS)
    requests = [plan(f"r{i}", 3 * i, 40, 30, targets=target) for i in range(40)]
    settings = make_fleet(max_num_seqs=4, late_requests="drop")
    run, slow = (
        run_fleet(requests, settings),
        run_fleet(requests, replace(settings, fast_forward=False)),
    )
    assert run.records == slow.records
    shed = [record for record in run.records if record.outcome is Outcome.SHED]
    kept = [record for record in run.records if record.outcome is Outcome.OK]
    assert len(shed) + len(kept) == 40
    assert len(shed) == run.outcome.shed
    assert min(len(shed), len(kept)) > 10
    assert all(r.ttft_ns is not None and r.ttft_ns <= 30 * NS_PER_MS for r in kept)


def test_a_request_that_is_overdue_is_not_retried_on_another_replica() -> None:
    requests = [
        plan("a", 0, 8, 100),
        plan("b", 0, 8, 20),
        plan("late", 1, 8, 5, targets=Targets(ttft_ns=5 * NS_PER_MS)),
    ]
    settings = make_fleet(
        replicas=2, max_num_seqs=1, late_requests="drop", placement=RouterPolicy.ROUND_ROBIN
    )
    run = run_fleet(requests, settings)
    assert run["late"].outcome is Outcome.SHED
    assert run["late"].replica == "chat-0"
    assert run.outcome.shed == 1


class _Drainer:
    """An actor that drains the first replica at one time."""

    def __init__(self, at_ms: int) -> None:
        self._at_ns: int | None = at_ms * NS_PER_MS

    def next_ns(self) -> int:
        return 1 << 62 if self._at_ns is None else self._at_ns

    def act(self, fleet: VirtualFleet, now_ns: int) -> None:
        fleet.drain_replica(fleet.replicas[0], now_ns)
        self._at_ns = None


@pytest.mark.parametrize("target_ms", [5, 9, 10], ids=["before", "as", "after"])
def test_a_draining_replica_drops_requests_before_as_or_after_its_last_one_completes(
    target_ms: int,
) -> None:
    targets = Targets(ttft_ns=target_ms * NS_PER_MS)
    requests = [plan("long", 0, 8, 10), *(plan(f"late{i}", 0, 8, 5, targets=targets) for i in "ab")]
    settings = make_fleet(max_num_seqs=1, late_requests="drop")
    run = run_fleet(requests, settings, [_Drainer(2)])
    outcomes = {record.request_id: record.outcome for record in run.records}
    assert outcomes == {"long": Outcome.OK, "latea": Outcome.SHED, "lateb": Outcome.SHED}
    assert run.outcome.shed == 2
    assert run.outcome.replica_ns == run.outcome.end_ns, "its time is counted once"
