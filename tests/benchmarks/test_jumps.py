"""Loads that jump."""

from __future__ import annotations

import json

import pytest
from benchmarks.comparison.design import knee_key, read_knees
from benchmarks.jumps import Jump, jump_requests, main

from goodput_core.units import NS_PER_S


def test_the_load_jumps_after_ten_seconds() -> None:
    jump = Jump(mix="chat-8b", before=0.5, after=2.0, known_lengths=True)
    requests = jump_requests(jump, 1)
    arrivals = [request.arrival_ns for request in requests]
    assert arrivals == sorted(arrivals)
    before = [at for at in arrivals if at < 10 * NS_PER_S]
    knee = read_knees()[knee_key("chat-8b", small_kv=False)]
    assert len(before) == pytest.approx(10 * 0.5 * knee, rel=0.3)
    assert len(arrivals) - len(before) == pytest.approx(6 * 2 * knee, rel=0.3)


def test_each_policy_serves_each_jump(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--mixes", "chat", "--seeds", "1", "--policies", "sjf", "--json"])
    results = json.loads(capsys.readouterr().out)
    assert code == 0
    assert {(one["jump"]["after"], one["jump"]["known_lengths"]) for one in results} == {
        (after, known) for after in (1.0, 1.3, 1.5, 2.5) for known in (True, False)
    }
    for one in results:
        assert one["late"] <= 0.01 * one["admitted"]
        assert one["shares"]["slo"] >= one["shares"]["sjf"]
