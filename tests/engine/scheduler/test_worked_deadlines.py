"""The textbook's overload with deadlines: first come, first served against most urgent first."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks import ageing
from goodput_engine.scheduler.policies.priority import PriorityPolicy
from goodput_engine.scheduler.policy import SchedulingPolicy


@pytest.mark.parametrize("policy", ["priority", "slo"])
def test_policies_that_know_urgency_meet_all_short_deadlines_at_almost_twice_the_goodput(
    policy: str,
) -> None:
    jobs = ageing.workload()
    fcfs, aware = ageing.serve("sarathi", jobs), ageing.serve(policy, jobs)
    assert fcfs.short_met < 0.5
    assert aware.short_met == aware.long_met == 1.0
    assert 1.75 < aware.goodput / fcfs.goodput < 2.0
    assert aware.steps < 1.05 * fcfs.steps


def test_where_waiting_counts_at_once_priority_is_first_come_first_served() -> None:
    assert ageing.serve("priority", ageing.workload(), ageing_steps=1).short_met < 0.5


def test_tighter_promises_are_kept_by_displacing_others_and_by_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ageing, "SHORT", replace(ageing.SHORT, deadline=24))
    jobs = ageing.workload(every=1.8)
    assert ageing.serve("priority", jobs).short_met == 1.0
    monkeypatch.setattr(PriorityPolicy, "displaced_by", SchedulingPolicy.displaced_by)
    assert ageing.serve("priority", jobs).short_met < 0.98


@pytest.mark.slow
def test_the_faster_waiting_counts_the_more_batch_finishes_and_the_less_interactive_is_kept() -> (
    None
):
    jobs = ageing.workload(2000, every=0.6)
    sweep = [ageing.serve("priority", jobs, ageing_steps=w) for w in (10, 50, 150, 300, 10**6)]
    assert all(a.short_goodput < b.short_goodput for a, b in pairwise(sweep))
    assert all(a.long_done > b.long_done for a, b in pairwise(sweep))
    assert sweep[-1].short_met == 1.0
