"""Cells and the resampling of their blocks."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp

from goodput_core.slo.attainment import Attainment
from goodput_core.slo.intervals import IntervalMethod, wilson
from goodput_replay.statistics.cells import Cells, count_cells
from goodput_replay.statistics.resample import block_length, design_effect, resampled_interval

SECOND = 1_000_000_000


def cells(good: list[int], total: list[int]) -> Cells:
    return Cells(good=np.array(good, dtype=np.int64), total=np.array(total, dtype=np.int64))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_requests_are_counted_by_their_scheduled_second() -> None:
    scheduled = np.array([0, SECOND - 1, SECOND, 3 * SECOND - 1, 3 * SECOND])
    attained = np.array([True, False, True, True, False])
    found = count_cells(scheduled, attained, 2 * SECOND + SECOND // 2)
    assert found.good.tolist() == [1, 1, 1]
    assert found.total.tolist() == [2, 1, 2]
    assert found.attainment == Attainment(good=3, total=5)


def test_a_class_without_requests_has_empty_cells() -> None:
    none = count_cells(np.zeros(0, np.int64), np.zeros(0, np.bool_), 2 * SECOND)
    assert none.total.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("num_cells", "backlog_ns", "expected"),
    [
        pytest.param(300, 0, 10, id="a-thirtieth-of-the-window"),
        pytest.param(10, 0, 1, id="at-least-a-second"),
        pytest.param(300, 14 * SECOND, 15, id="longer-than-a-backlog-of-whole-seconds"),
        pytest.param(300, 14 * SECOND + 1, 16, id="a-part-of-a-second-touches-one-more"),
        pytest.param(30, 1, 2, id="even-a-short-backlog-may-touch-two-seconds"),
    ],
)
def test_blocks_outlast_the_longest_backlog(num_cells: int, backlog_ns: int, expected: int) -> None:
    assert block_length(num_cells, backlog_ns) == expected


def test_misses_spread_evenly_have_no_design_effect() -> None:
    even = cells([9] * 300, [10] * 300)
    assert design_effect(even, 10) == 1.0


def test_misses_in_whole_blocks_count_as_blocks() -> None:
    total = [10] * 300
    clustered = cells([0] * 10 + [10] * 290, total)
    # One block of 100 requests missed: about a hundred requests share one fate.
    assert design_effect(clustered, 10) > 100


@pytest.mark.parametrize("good", [0, 10], ids=["all-missed", "all-attained"])
def test_without_both_kinds_the_sample_is_worth_what_it_counts(good: int) -> None:
    assert design_effect(cells([good] * 60, [10] * 60), 2) == 1.0


def test_independent_requests_keep_most_of_their_worth() -> None:
    effects = []
    for seed in range(50):
        draw = rng(seed)
        total = draw.poisson(5, 300)
        effects.append(design_effect(cells(list(draw.binomial(total, 0.95)), list(total)), 10))
    assert np.mean(effects) < 1.6


def test_one_seed_gives_one_interval() -> None:
    total = rng(1).poisson(5, 300)
    sample = cells(list(rng(2).binomial(total, 0.9)), list(total))
    one, again = (resampled_interval(sample, block_cells=10, rng=rng(3)) for _ in range(2))
    assert one == again
    assert one.method is IntervalMethod.BLOCKS


def test_clustered_misses_widen_the_interval() -> None:
    total = [10] * 300
    spread = cells([9] * 300, total)
    clumped = cells(([0] + [10] * 9) * 30, total)
    clustered = cells(([0] * 10 + [10] * 90) * 3, total)
    low = [
        resampled_interval(sample, block_cells=10, rng=rng()).lower
        for sample in (spread, clumped, clustered)
    ]
    assert low[0] >= low[1] > low[2]


def test_a_sample_can_be_worth_no_more_than_said() -> None:
    sample = cells([10] * 10, [10] * 10)
    found = resampled_interval(sample, block_cells=1, rng=rng(), worth=10)
    assert found.effective == 10
    assert found.lower == wilson(10, 10).lower


def test_seconds_without_requests_are_no_trouble() -> None:
    sample = cells([1] + [0] * 299, [1] + [0] * 299)
    found = resampled_interval(sample, block_cells=10, rng=rng())
    assert (found.lower, found.upper) == (wilson(1, 1).lower, 1.0)


TOTALS = stnp.arrays(np.int64, st.integers(1, 60), elements=st.integers(0, 8))


@given(data=st.data(), total=TOTALS, block=st.integers(1, 60), classes=st.integers(1, 4))
def test_bounds_contain_the_share_and_are_never_narrower_than_wilson(
    data: st.DataObject, total: np.ndarray[tuple[int], np.dtype[np.int64]], block: int, classes: int
) -> None:
    total[0] += 1
    good = np.array([data.draw(st.integers(0, int(n))) for n in total], dtype=np.int64)
    sample = Cells(good=good, total=total)
    found = resampled_interval(
        sample, block_cells=min(block, len(total)), rng=rng(), classes=classes
    )
    count = sample.attainment
    plain = wilson(count.good, count.total, effective=found.effective, classes=classes)
    assert found.effective <= count.total
    assert found.lower <= plain.lower <= count.good / count.total <= plain.upper
    assert all(a >= b for a, b in zip(found.uppers, plain.uppers, strict=True))


def test_an_hour_of_four_classes_takes_less_than_a_second() -> None:
    total = rng(1).poisson(20, 3600)
    sample = cells(list(rng(2).binomial(total, 0.97)), list(total))
    started = time.process_time()
    for seed in range(4):
        resampled_interval(sample, block_cells=120, rng=rng(seed), classes=4)
    assert time.process_time() - started < 1
