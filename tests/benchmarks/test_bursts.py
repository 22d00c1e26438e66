"""Isolated bursts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from benchmarks.bursts import Burst, burst_requests, main
from benchmarks.comparison.cells import Cell, Fleet, run_cell
from benchmarks.comparison.loads import Load

from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from benchmarks.comparison.loads import OfferedRequest


def _around_one_burst(requests: list[OfferedRequest]) -> list[OfferedRequest]:
    return [one for one in requests if 15 < one.arrival_ns / NS_PER_S < 55]


def test_a_burst_arrives_within_a_second() -> None:
    requests = burst_requests(Burst(size=300, ttft_s=5, known_lengths=False), 1)
    arrivals = [request.arrival_ns for request in requests]
    assert arrivals == sorted(arrivals)
    assert len(requests) == 2 * 300 + 200
    for begin_s in (20, 60):
        within = [at for at in arrivals if begin_s <= at / NS_PER_S <= begin_s + 1]
        assert len(within) >= 300
    assert {request.max_tokens for request in requests} == {1024}


@pytest.mark.parametrize("known", [True, False], ids=["known", "hidden"])
def test_slo_keeps_a_burst_that_the_memory_cannot_hold_at_once(known: bool) -> None:
    """A policy that admits everything and pauses requests keeps all of them.

    If no request waits for a decision while the load is above the capacity, `slo` keeps 132 and
    135.
    """
    burst = Burst(size=60, ttft_s=5, known_lengths=known)
    requests = _around_one_burst(burst_requests(burst, 1))
    fleet = Fleet(kv_blocks=1000)
    cell = Cell(name="burst", load=Load(mix="burst", rate_per_s=2), fleet=fleet)
    kept = run_cell(cell, "slo", requests=requests)
    assert kept.offered == 149
    assert kept.kept >= 146
    assert kept.admitted - kept.kept <= 1


def test_each_policy_serves_each_burst(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--sizes", "20", "--ttft", "2", "--policies", "sjf", "--json"])
    results = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [one["burst"]["known_lengths"] for one in results] == [True, False]
    for one in results:
        assert one["slo"]["kept"] == one["slo"]["offered"] == one["sjf"]["offered"] == 240
