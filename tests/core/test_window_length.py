"""The estimated window decides in most runs that go on like the recorded one."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.slo.attainment import SecondCounts
from goodput_core.slo.intervals import LONGEST_WINDOW_S, WindowEstimate

_LONGEST_SIMULATED_S = 4000


def simulate(
    rng: random.Random, seconds: int, *, per_s: float, miss: float, outage_s: int
) -> SecondCounts:
    """Simulate requests at random times, which miss independently or in outages."""
    total = [0] * seconds
    for _ in range(max(1, round(rng.gauss(per_s * seconds, math.sqrt(per_s * seconds))))):
        total[rng.randrange(seconds)] += 1
    if outage_s:
        down = [False] * seconds
        expected = seconds * miss / outage_s
        for _ in range(max(0, round(rng.gauss(expected, math.sqrt(expected))))):
            start = rng.randrange(seconds)
            for second in range(start, start + outage_s):
                down[second % seconds] = True
        good = [0 if is_down else n for n, is_down in zip(total, down, strict=True)]
    else:
        good = [sum(rng.random() >= miss for _ in range(n)) for n in total]
    return SecondCounts(good=good, total=total)


def decides(sample: SecondCounts, objective: Fraction, classes: int, outage_s: int = 0) -> bool:
    interval = WindowEstimate(sample, outage_s=outage_s).interval(classes=classes)
    return interval.lower >= objective or interval.uppers[-1] < objective


PROCESSES = {
    "no misses": ("0.99", 60, 3, 0.0, 0, 1),
    "few requests": ("0.95", 60, 0.3, 0.0, 0, 2),
    "half of the allowed misses": ("0.95", 120, 3, 0.5, 0, 1),
    "a third of the allowed misses": ("0.99", 300, 3, 0.3, 0, 2),
    "too many misses": ("0.95", 60, 3, 1.6, 0, 2),
    "twice the allowed misses": ("0.99", 120, 3, 2.0, 0, 1),
    "short outages": ("0.9", 120, 2, 0.4, 3, 1),
    "too many short outages": ("0.9", 120, 2, 2.0, 3, 3),
}


@pytest.mark.parametrize(
    ("text", "seconds", "per_s", "ratio", "outage_s", "classes"), PROCESSES.values(), ids=PROCESSES
)
def test_most_windows_of_the_estimated_length_decide(
    text: str, seconds: int, per_s: float, ratio: float, outage_s: int, classes: int
) -> None:
    rng, objective = random.Random(13), Fraction(text)
    miss = ratio * float(1 - objective)
    decided: list[bool] = []
    while len(decided) < 60:
        sample = simulate(rng, seconds, per_s=per_s, miss=miss, outage_s=outage_s)
        if decides(sample, objective, classes):
            continue
        window_s = WindowEstimate(sample).deciding_window_s(objective, classes=classes)
        if window_s is None or window_s > _LONGEST_SIMULATED_S:
            continue
        attainment = sample.attainment
        for _ in range(3):
            longer = simulate(
                rng,
                math.ceil(window_s),
                per_s=attainment.total / seconds,
                miss=1 - attainment.good / attainment.total,
                outage_s=outage_s,
            )
            decided.append(decides(longer, objective, classes))
    assert sum(decided) / len(decided) > 0.5


@given(
    seed=st.integers(0, 2**32),
    text=st.sampled_from(["0.5", "0.9", "0.99", "0.999"]),
    seconds=st.integers(1, 150),
    per_s=st.sampled_from([0.1, 1, 5]),
    ratio=st.sampled_from([0.0, 0.2, 0.6, 1.5]),
    outage_s=st.sampled_from([0, 4]),
    classes=st.integers(1, 4),
)
def test_the_recorded_window_repeated_to_twice_the_estimated_length_decides(
    seed: int, text: str, seconds: int, per_s: float, ratio: float, outage_s: int, classes: int
) -> None:
    objective = Fraction(text)
    miss = ratio * float(1 - objective)
    sample = simulate(random.Random(seed), seconds, per_s=per_s, miss=miss, outage_s=outage_s)
    window_s = WindowEstimate(sample).deciding_window_s(objective, classes=classes)
    if window_s is None:
        return
    assert seconds <= window_s <= LONGEST_WINDOW_S
    times = 2 * math.ceil(window_s / seconds)
    repeated = SecondCounts(good=[*sample.good] * times, total=[*sample.total] * times)
    assert decides(repeated, objective, classes)


@given(
    misses=st.integers(0, 50), allowed=st.sampled_from([10, 20, 100]), seconds=st.integers(1, 600)
)
def test_no_window_is_estimated_if_the_share_is_the_objective(
    misses: int, allowed: int, seconds: int
) -> None:
    missed = 1 + misses
    total = [0] * seconds
    bad = [0] * seconds
    for number in range(missed * allowed):
        total[number * 7 % seconds] += 1
    for number in range(missed):
        second = next(
            s for s in range(number, number + seconds) if bad[s % seconds] < total[s % seconds]
        )
        bad[second % seconds] += 1
    sample = SecondCounts(good=[n - b for n, b in zip(total, bad, strict=True)], total=total)
    objective = 1 - Fraction(1, allowed)
    assert sample.attainment.share == objective
    assert WindowEstimate(sample).deciding_window_s(objective) is None


@pytest.mark.parametrize("missed", [9, 11])
def test_no_window_is_estimated_if_a_day_would_not_decide(missed: int) -> None:
    total = [1] * 1000
    sample = SecondCounts(good=[int(s % 1000 >= missed) for s in range(1000)], total=total)
    assert WindowEstimate(sample).deciding_window_s(Fraction("0.99")) is None


def test_a_declared_outage_needs_a_window_in_which_it_is_rare() -> None:
    sample = SecondCounts(good=[4] * 300, total=[4] * 300)
    window_s = WindowEstimate(sample, outage_s=10).deciding_window_s(Fraction("0.99"))
    assert window_s is not None
    assert 3000 <= window_s < 3300  # 300 times the outage, without a miss


@pytest.mark.parametrize("seconds", [LONGEST_WINDOW_S + 1, 10 * LONGEST_WINDOW_S])
def test_a_window_of_more_than_a_day_has_no_estimate(seconds: int) -> None:
    sample = SecondCounts(good=[0] * seconds, total=[1, *[0] * (seconds - 1)])
    assert WindowEstimate(sample).deciding_window_s(Fraction("0.99")) is None


def test_a_window_without_requests_has_no_estimate() -> None:
    assert (
        WindowEstimate(SecondCounts(good=[0], total=[0])).deciding_window_s(Fraction(1, 2)) is None
    )
