"""Loads of the comparison of policies: reproducible, at their rate, and as published."""

from __future__ import annotations

import itertools
import random
import statistics
from typing import TYPE_CHECKING

import pytest
from benchmarks.comparison.design import HORIZON_SLACKS, cell_of, covering, read_knees, settings
from benchmarks.comparison.loads import (
    MIXES,
    Arrivals,
    Load,
    TraceWindow,
    long_slack_s,
    offered,
    slack_ns,
)
from tests.builders.traces import trace_row, write_rows

from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from pathlib import Path


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
    assert {request.max_tokens for request in hidden} == {128}
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


def test_the_design_prefers_cheap_rows() -> None:
    values: list[list[int]] = [list(range(6)), list(range(6)), [1, 10], [0, 1]]

    def cost(row: tuple[int, ...]) -> float:
        return row[2]

    cheap, other = covering(values, cost=cost), covering(values)
    assert sum(map(cost, cheap)) < 0.7 * sum(map(cost, other))
    for i, j in itertools.combinations(range(len(values)), 2):
        assert {(row[i], row[j]) for row in cheap} == set(itertools.product(values[i], values[j]))


def test_arrivals_last_several_times_the_longest_slack() -> None:
    for setting in settings(list(MIXES)):
        load = cell_of(setting, read_knees(), {}).load
        slacks_ns = [request.slack_ns or 0 for request in offered(load, 1)]
        assert load.horizon_s * NS_PER_S >= HORIZON_SLACKS * max(slacks_ns), setting


@pytest.mark.parametrize(
    ("targets", "tokens", "slack_ms"),
    [
        (Targets(ttft_ns=500, tpot_ns=50), 11, 1000),
        (Targets(ttft_ns=500, tpot_ns=50), 1, 500),
        (Targets(ttft_ns=500), 1, 500),
        (Targets(ttft_ns=500), 2, None),
        (Targets(e2e_ns=700), 20, 700),
        (Targets(ttft_ns=500, tpot_ns=50, e2e_ns=700), 11, 700),
        (Targets(tpot_ns=50), 5, None),
    ],
)
def test_the_slack_is_the_time_to_the_last_token(
    targets: Targets, tokens: int, slack_ms: int | None
) -> None:
    assert slack_ns(targets, tokens) == slack_ms


def write_minutes(path: Path, *, per_s: int, minutes: int) -> TraceWindow:
    """Write a steady trace of short and long requests, and return a window of a minute."""
    rows = (
        trace_row(
            number, number / per_s, input_tokens=3000 if number % 10 == 0 else 100, output_tokens=11
        )
        for number in range(per_s * 60 * minutes)
    )
    return TraceWindow(
        path=str(write_rows(path, rows)),
        window_s=60,
        interactive=Targets(ttft_ns=NS_PER_S, tpot_ns=NS_PER_S // 10),
        batch=Targets(ttft_ns=3 * NS_PER_S, tpot_ns=NS_PER_S // 10),
    )


@pytest.mark.parametrize(
    ("rate_per_s", "seconds"), [(2, 30), (10, 30), (40, 15)], ids=["some", "half", "too-few"]
)
def test_a_window_of_a_trace_has_the_rate_and_the_duration_of_the_load(
    tmp_path: Path, rate_per_s: float, seconds: float
) -> None:
    window = write_minutes(tmp_path / "trace.parquet", per_s=10, minutes=5)
    load = Load(rate_per_s=rate_per_s, horizon_s=30, trace=window)
    counts = []
    for seed in range(10):
        requests = offered(load, seed)
        counts.append(len(requests))
        assert requests[-1].arrival_ns == pytest.approx(seconds * NS_PER_S, rel=0.1)
    assert statistics.fmean(counts) == pytest.approx(rate_per_s * seconds, rel=0.1)


def test_the_long_slack_of_a_trace_covers_all_but_a_twentieth(tmp_path: Path) -> None:
    assert long_slack_s(write_minutes(tmp_path / "trace.parquet", per_s=1, minutes=2)) == 4
