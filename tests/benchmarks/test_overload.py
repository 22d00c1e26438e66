"""Loads above the knee on which `slo` once kept much less than it could."""

from __future__ import annotations

import random

from benchmarks.comparison.cells import Cell, Fleet, run_cell
from benchmarks.comparison.design import poisson_cell, read_knees
from benchmarks.comparison.loads import Arrivals, Load, OfferedRequest
from benchmarks.comparison.plateau import Series

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_MS, NS_PER_S


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


def test_a_load_that_jumps_makes_no_admitted_request_late() -> None:
    """Steps are cut where prompts are due, and each prompt that is computed adds a decode."""
    rng = random.Random(1)
    targets = Targets(ttft_ns=500 * NS_PER_MS, tpot_ns=50 * NS_PER_MS)
    arrivals_s = [*(i / 20 for i in range(100)), *(5 + i / 100 for i in range(300))]
    requests = [
        OfferedRequest(
            arrival_ns=round(at_s * NS_PER_S),
            prompt_tokens=rng.randint(300, 599),
            output_tokens=100,
            max_tokens=100,
            slo_class="all",
            targets=targets,
        )
        for at_s in arrivals_s
    ]
    cell = Cell(name="jump", load=Load(mix="chat", rate_per_s=100), fleet=Fleet())
    ours, theirs = (run_cell(cell, policy, requests=requests) for policy in ("slo", "sjf"))
    assert ours.kept >= 0.99 * ours.admitted
    assert ours.kept >= theirs.kept
