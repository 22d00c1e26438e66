"""Differences of latency quantiles, and their bounds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from goodput_replay.compare.quantile_differences import (
    LatencySource,
    QuantileDifference,
    find_ranks,
    quantile_differences,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


def source(values_ns: list[float], seconds: list[int], *, part: int = 10**6) -> LatencySource:
    """Return latencies of one group over 300 s, which are read in parts."""

    def read() -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.int64]]]:
        for start in range(0, len(values_ns), part):
            chosen = slice(start, start + part)
            yield 0, np.array(values_ns[chosen]), np.array(seconds[chosen], dtype=np.int64)

    return LatencySource(read=read, window_s=300)


def sample(rng: random.Random, *, shift: float = 0.0, count: int = 3000) -> LatencySource:
    """Return latencies whose level drifts over the window, as under changing load."""
    seconds = [i * 300 // count for i in range(count)]
    level = [rng.gauss(0, 20) for _ in range(30)]
    values = [100 + shift + level[s // 10] + rng.expovariate(1 / 30) for s in seconds]
    return source(values, seconds)


def differences(
    baseline: LatencySource,
    candidate: LatencySource,
    levels: list[float],
    *,
    confidence: float = 0.95,
    paired: bool = True,
) -> list[QuantileDifference] | None:
    """Return the differences of the only group."""
    (found,) = quantile_differences(
        baseline, candidate, 1, levels, confidence=confidence, paired=paired
    )
    return found


def test_bounds_of_a_quantile_hold_about_as_often_as_stated() -> None:
    """Two runs of one service differ only by noise, so 0 should lie between the bounds."""
    rng, trials = random.Random(3), 120
    outside = {0.5: 0, 0.99: 0}
    for _ in range(trials):
        found = differences(sample(rng), sample(rng), [0.5, 0.99])
        assert found is not None
        for level, one in zip(outside, found, strict=True):
            assert one.bounds_ns is not None
            outside[level] += one.bounds_ns[0] > 0 or one.bounds_ns[1] < 0
    assert all(count <= 0.2 * trials for count in outside.values()), outside


def test_a_shift_beyond_the_noise_is_found() -> None:
    rng = random.Random(4)
    found = differences(sample(rng), sample(rng, shift=80), [0.5])
    assert found is not None
    bounds = found[0].bounds_ns
    assert bounds is not None
    assert bounds[0] > 0


def test_a_quantile_beyond_the_requests_has_no_bounds() -> None:
    few = sample(random.Random(6), count=300)
    found = differences(few, few, [0.5, 0.99])
    assert found is not None
    assert found[0].bounds_ns is not None
    assert found[1].bounds_ns is None


def test_runs_without_a_latency_have_no_quantiles() -> None:
    assert differences(source([], []), sample(random.Random(5)), [0.5], confidence=0.9) is None


@given(count=st.integers(1, 500), levels=st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_a_rank_is_the_one_that_numpy_reads(count: int, levels: list[float]) -> None:
    qs = np.array([*levels, 0.5, 0.9, 0.99, 1.0])
    expected = np.quantile(np.arange(count), qs, method="inverted_cdf")
    assert find_ranks(count, qs).tolist() == expected.tolist()


_LATENCIES = st.lists(
    st.tuples(
        st.sampled_from([1e6, 2e6, np.nan, np.inf]) | st.floats(1e3, 1e12), st.integers(0, 299)
    ),
    min_size=1,
    max_size=200,
)


@given(first=_LATENCIES, second=_LATENCIES, part=st.integers(1, 50), paired=st.booleans())
def test_latencies_in_parts_have_the_quantiles_and_bounds_of_all(
    first: list[tuple[float, int]], second: list[tuple[float, int]], part: int, paired: bool
) -> None:
    values = [[value for value, _ in one] for one in (first, second)]
    seconds = [[second for _, second in one] for one in (first, second)]
    found = differences(
        source(values[0], seconds[0], part=part),
        source(values[1], seconds[1], part=part),
        [0.5, 0.9],
        paired=paired,
    )
    at_once = differences(
        source(values[0], seconds[0]), source(values[1], seconds[1]), [0.5, 0.9], paired=paired
    )
    assert found == at_once
    finite = [np.array(one)[np.isfinite(one)] for one in values]
    if found is None:
        assert not all(map(len, finite))
        return
    for level, one in zip([0.5, 0.9], found, strict=True):
        expected = [np.quantile(each, level, method="inverted_cdf") for each in finite]
        assert [one.baseline_ns, one.candidate_ns] == expected
