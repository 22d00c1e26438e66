"""Loads of the comparison of policies: reproducible, at their rate, and as published."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from benchmarks.design import covering, settings
from benchmarks.loads import MIXES, Arrivals, Load, offered

from goodput_core.units import NS_PER_MS, NS_PER_S


def published_generator(seed: int) -> list[tuple[int, int, int, int]]:
    """Return arrival, prompt, answer and end-to-end target in milliseconds, by arrival."""
    rng = random.Random(seed)
    rows = []
    for _ in range(80):
        arrival = rng.randint(0, 200)
        if rng.random() < 0.7:
            prompt, answer, slack = rng.randint(8, 40), rng.randint(8, 32), rng.randint(30, 60)
        else:
            prompt, answer = rng.randint(64, 200), rng.randint(160, 320)
            slack = rng.randint(220, 360)
        rows.append((arrival, prompt, answer, slack + 1))
    return sorted(rows, key=lambda row: row[0])


def test_the_textbook_load_is_the_published_generator() -> None:
    requests = offered(Load(mix="textbook", rate_per_s=400), 7)
    assert [
        (
            request.arrival_ns // NS_PER_MS,
            request.prompt_tokens,
            request.output_tokens,
            (request.targets.e2e_ns or 0) // NS_PER_MS,
        )
        for request in requests
    ] == published_generator(7)
    assert all(request.max_tokens == request.output_tokens for request in requests)


@pytest.mark.parametrize("mix", [*MIXES, "textbook"])
def test_a_seed_determines_a_load(mix: str) -> None:
    load = Load(mix=mix, rate_per_s=100, horizon_s=3)
    assert offered(load, 1) == offered(load, 1)
    assert offered(load, 1) != offered(load, 2)


@pytest.mark.parametrize("arrivals", list(Arrivals))
def test_every_arrival_process_has_the_rate_of_the_load(arrivals: Arrivals) -> None:
    load = Load(mix="chat", arrivals=arrivals, rate_per_s=50, horizon_s=10)
    counts = []
    for seed in range(40):
        times = [request.arrival_ns for request in offered(load, seed)]
        assert times == sorted(times)
        assert times[-1] < 10 * NS_PER_S
        counts.append(len(times))
    assert statistics.fmean(counts) == pytest.approx(500, rel=0.06)


def test_bursts_are_burstier_than_poisson_arrivals() -> None:
    def variation(arrivals: Arrivals) -> float:
        load = Load(mix="chat", arrivals=arrivals, rate_per_s=50, horizon_s=40)
        times = [request.arrival_ns for request in offered(load, 1)]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        return statistics.stdev(gaps) / statistics.fmean(gaps)

    assert variation(Arrivals.EVEN) == pytest.approx(0, abs=1e-6)
    assert variation(Arrivals.POISSON) == pytest.approx(1, abs=0.1)
    assert variation(Arrivals.ON_OFF) > 1.5
    assert variation(Arrivals.GAMMA) > 2


def test_hidden_lengths_change_nothing_but_the_limit() -> None:
    known = offered(Load(mix="bimodal", rate_per_s=50), 1)
    hidden = offered(Load(mix="bimodal", rate_per_s=50, known_lengths=False), 1)
    assert {request.max_tokens for request in hidden} == {512}
    assert [r.output_tokens for r in known] == [r.output_tokens for r in hidden]
    assert [r.arrival_ns for r in known] == [r.arrival_ns for r in hidden]


def test_the_design_covers_every_pair_of_values() -> None:
    values: list[list[object]] = [list("abcdefghi"), list(range(6)), list("wxyz"), [1, 4], [0, 1]]
    rows = covering(values)
    for i, j in itertools.combinations(range(len(values)), 2):
        pairs = {(row[i], row[j]) for row in rows}
        assert pairs == set(itertools.product(values[i], values[j]))
    assert len(rows) < 1.2 * 9 * 6
    assert len(set(rows)) == len(rows)


def test_the_design_has_every_mix_at_every_load() -> None:
    rows = settings(list(MIXES))
    assert len({(row.mix, row.factor) for row in rows}) == len(MIXES) * 6
