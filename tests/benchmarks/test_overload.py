"""Loads above the knee on which `slo` once kept much less than it could."""

from __future__ import annotations

from benchmarks.comparison.cells import run_cell
from benchmarks.comparison.design import poisson_cell, read_knees
from benchmarks.comparison.loads import Arrivals
from benchmarks.comparison.plateau import Series

from goodput_core.spec.choices import Policy


def test_equal_requests_in_bursts_do_not_leave_room_to_each_other() -> None:
    """Their predicted work differs a little, and a fifth was lost at the edge of two ranks."""
    series = Series(mix="chat-8b", arrivals=Arrivals.ON_OFF)
    kept = [
        run_cell(series.cell(factor, read_knees(), {}), Policy.SLO, 71).kept for factor in (1, 4)
    ]
    assert kept[1] >= 0.97 * kept[0]


def test_requests_that_cost_far_more_than_others_do_not_take_their_room() -> None:
    """A document costs as much as many chats, of which `sjf` kept more."""
    cell = poisson_cell("bimodal", 4, read_knees(), known_lengths=True)
    ours, theirs = (run_cell(cell, policy, 71) for policy in (Policy.SLO, Policy.SJF))
    assert ours.kept > 1.03 * theirs.kept
