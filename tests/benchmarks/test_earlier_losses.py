"""Loads on which earlier versions lost requests."""

from __future__ import annotations

import json

import pytest
from benchmarks.comparison.design import textbook_cells
from benchmarks.comparison.fates import Fate
from benchmarks.comparison.loads import offered
from benchmarks.earlier_losses import GENERATOR_AIM, MEMORY, LossRow, main, memory_load, run

from goodput_core.spec.choices import Preemption


def test_the_long_answers_alone_need_more_memory_than_there_is() -> None:
    requests = memory_load(3)
    arrivals = [request.arrival_ns for request in requests]
    assert arrivals == sorted(arrivals)
    long = [request for request in requests if request.slo_class == "long"]
    # Half of each is held on average, and none ends before its last of at least 600 tokens.
    assert sum(request.prompt_tokens + request.output_tokens // 2 for request in long) > 2048 * 16
    assert {request.max_tokens for request in requests} == {4096}


def test_refused_requests_do_not_count_among_the_admitted() -> None:
    fates = {"a": {"kept": 3, "refused": 5}, "b": {"late": 1}}
    row = LossRow(check="levels", load="", policy="slo", fates=fates)
    assert row.admitted_share == 0.75
    assert row.count(Fate.REFUSED) == 5


def test_a_full_queue_refuses_the_lower_level_first(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--checks", "levels", "--jobs", "1", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in rows] == ["priority", "slo"]
    assert code == sum(row["missed"] for row in rows) == 0
    for row in rows:
        assert row["fates"]["batch"]["refused"] > 20
        assert row["fates"]["interactive"].get("refused", 0) == 0


@pytest.mark.parametrize("mode", list(Preemption))
def test_most_requests_of_the_generator_are_in_time_in_every_mode(mode: Preemption) -> None:
    (cell,) = [cell for cell in textbook_cells() if cell.preemption is mode]
    row = run("generator", "seed 7", cell, offered(cell.load, 7), 7)
    assert row.count(Fate.KEPT) >= GENERATOR_AIM


@pytest.mark.slow(19)
def test_short_and_long_answers_are_in_time_though_the_long_ones_fill_the_memory() -> None:
    requests = memory_load(9551)
    row = run("memory", "without labels", MEMORY, requests, 9551)
    assert row.count(Fate.KEPT) == len(requests)
