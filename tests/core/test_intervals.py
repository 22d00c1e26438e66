"""The interval of one window."""

from __future__ import annotations

import math
import random
import time
from fractions import Fraction
from itertools import groupby, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from goodput_core.slo.attainment import SecondCounts
from goodput_core.slo.distributions import (
    beta_quantile,
    chi_square_quantile,
    normal_quantile,
    student_t_quantile,
)
from goodput_core.slo.intervals import (
    Exposure,
    Interval,
    IntervalMethod,
    WindowEstimate,
    requests_needed,
)

CONFIDENCES = st.floats(0.5, 0.999)


def counts(good: list[int], total: list[int]) -> SecondCounts:
    return SecondCounts(good=good, total=total)


def with_misses(per_s: int, seconds: int, *misses: tuple[int, int]) -> SecondCounts:
    """Return a steady load; `misses` are pairs of a second and its missed requests."""
    good = [per_s] * seconds
    for second, missed in misses:
        good[second] -= missed
    return counts(good, [per_s] * seconds)


def interval(sample: SecondCounts, confidence: float = 0.95) -> Interval:
    return WindowEstimate(sample).interval(confidence)


@st.composite
def windows(draw: st.DrawFn, max_seconds: int = 200) -> SecondCounts:
    """Draw any loads and misses, with at least one request."""
    seconds = draw(st.integers(1, max_seconds))
    rng = random.Random(draw(st.integers(0, 2**32)))
    busiest = draw(st.sampled_from([1, 5, 50]))
    total = [rng.randint(0, busiest) for _ in range(seconds)]
    total[rng.randrange(seconds)] += 1
    chance = draw(st.sampled_from([0.0, 0.01, 0.2, 1.0]))
    burst = draw(st.integers(0, seconds))
    missed = [n if s < burst // 4 or rng.random() < chance else 0 for s, n in enumerate(total)]
    return counts([n - m for n, m in zip(total, missed, strict=True)], total)


def formula(sample: SecondCounts, confidence: float, outage_s: int) -> tuple[float, float]:
    """Compute the bounds by the formula of docs/verdicts.md."""
    good, total = sample.good, sample.total
    seconds, n = len(total), sum(total)
    missed = n - sum(good)
    highest, lowest = 0.0, math.inf
    # Seconds at whose start a visible outage can begin, around the end of the window.
    visible = sum(
        any([*total, *total][second : second + min(outage_s, seconds)]) for second in range(seconds)
    )
    visible = visible or 1
    kept: list[int] = []
    for is_idle, run in groupby(range(seconds), key=lambda second: total[second] == 0):
        gap = list(run)
        kept += [] if is_idle and len(gap) > max(1, seconds // 60) else gap
    e = [total[at] - good[at] - missed / n * total[at] for at in kept]
    # The most of these seconds that an outage can hit.
    hit = max(sum(first <= at < first + outage_s for at in kept) for first in kept)
    gaps, seconds = len(kept) < seconds, len(kept)
    scales = [60, 30, 15, 8]
    if hit > seconds / 8:
        scales.append(max(2, seconds // hit))
    for blocks in scales:
        length = seconds // blocks
        ends = [b * (seconds if gaps else length * blocks) // blocks for b in range(blocks + 1)]
        sums = [sum(e[begin:end]) for begin, end in pairwise(ends)]
        mean = sum(sums) / blocks
        spread = sum((s - mean) ** 2 for s in sums) * blocks / (blocks - 1)
        inflation = student_t_quantile(confidence, blocks - 1) / normal_quantile(confidence)
        v = max(spread * seconds / ends[-1] * inflation**2, missed * (1 - missed / n))
        s = max(
            1.0, outage_s * n / visible, *(sum((e + e)[at : at + length]) for at in range(seconds))
        )
        y, w = missed + s, v + s * s
        highest = max(highest, w / (2 * y) * chi_square_quantile(confidence, 2 * y * y / w))
        if v:
            low = v / (2 * missed) * chi_square_quantile(1 - confidence, 2 * missed**2 / v)
            lowest = min(lowest, low)
        else:
            lowest = missed
    return max(0.0, 1 - highest / n), 1 - lowest / n


@given(
    sample=windows(),
    confidence=st.floats(0.8, 0.999),
    outage_s=st.sampled_from([0, 2, 10, 40, 900]),
)
@settings(deadline=None)
def test_bounds_follow_the_formula(sample: SecondCounts, confidence: float, outage_s: int) -> None:
    longer = counts([*sample.good, *[1] * 60], [*sample.total, *[1] * 60])
    found = WindowEstimate(longer, outage_s=outage_s).interval(confidence)
    lower, upper = formula(longer, confidence, outage_s)
    share = longer.attainment.good / longer.attainment.total
    assert found.lower == pytest.approx(min(lower, share), abs=1e-9)
    # The upper bound is raised to the exact one of independent requests if that is wider.
    assert found.upper >= max(upper, share) - 1e-9
    missed = longer.attainment.total - longer.attainment.good
    exact = beta_quantile(confidence, longer.attainment.good + 1, missed) if missed else 1.0
    assert found.upper == pytest.approx(max(upper, exact, share), abs=1e-9)


@pytest.mark.parametrize(
    ("objective", "needed"),
    [("0.99", 300), ("0.95", 60), ("0.999", 2996), ("0.5", 6)],
)
def test_requests_needed_is_the_smallest_window_without_misses_that_reaches_the_objective(
    objective: str, needed: int
) -> None:
    goal = Fraction(objective)
    assert requests_needed(goal) == needed
    assert interval(counts([1] * needed, [1] * needed)).lower >= goal
    assert interval(counts([1] * (needed - 1), [1] * (needed - 1))).lower < goal


@pytest.mark.parametrize(
    ("sample", "lower", "upper"),
    [
        # 1 + ln(0.05) / n, the rule of three.
        pytest.param(counts([1] * 300, [1] * 300), 0.990014, 1.0, id="300-of-300"),
        pytest.param(counts([30], [30]), 0.900142, 1.0, id="30-of-30-in-one-second"),
        # 0.95 to the power of 1 / 30, below 1.
        pytest.param(counts([0] * 30, [1] * 30), 0.0, 0.095034, id="0-of-30"),
        pytest.param(counts([0], [0]), 0.0, 1.0, id="0-of-0"),
    ],
)
def test_bounds_of_windows_with_only_one_kind_of_request(
    sample: SecondCounts, lower: float, upper: float
) -> None:
    found = interval(sample)
    assert found.lower == pytest.approx(lower, abs=1e-6)
    assert found.upper == pytest.approx(upper, abs=1e-6)


def test_bounds_at_the_edges_are_exact() -> None:
    assert interval(counts([7], [7])).upper == 1.0
    assert interval(counts([0], [7])).lower == 0.0
    nothing = interval(counts([0, 0], [0, 0]))
    assert (nothing.lower, nothing.upper, nothing.effective) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("misses", "lower", "effective"),
    [
        pytest.param([(k, 1) for k in range(25, 300, 50)], 0.99211, 1500, id="far-apart"),
        pytest.param([(60, 3), (200, 3)], 0.98751, 432, id="in-two-bursts"),
        pytest.param([(60, 5), (61, 1)], 0.98108, 185, id="in-one-burst"),
    ],
)
def test_the_example_of_the_documentation(
    misses: list[tuple[int, int]], lower: float, effective: float
) -> None:
    found = interval(with_misses(5, 300, *misses))
    assert found.lower == pytest.approx(lower, abs=1e-5)
    assert found.effective == pytest.approx(effective, abs=0.5)


def test_misses_in_bursts_widen_both_bounds() -> None:
    apart = interval(with_misses(10, 300, *((k * 10, 1) for k in range(30))))
    seconds = interval(with_misses(10, 300, *((k * 100, 10) for k in range(3))))
    together = interval(with_misses(10, 300, *((k, 10) for k in range(100, 103))))
    assert apart.lower > seconds.lower > together.lower
    assert apart.upper < seconds.upper < together.upper
    assert apart.effective > seconds.effective > together.effective


def test_misses_far_apart_have_the_full_effective_sample_size() -> None:
    found = interval(with_misses(10, 300, *((k * 10, 1) for k in range(30))))
    assert found.effective == pytest.approx(3000)


def test_a_block_of_misses_has_a_small_effective_sample_size() -> None:
    found = interval(with_misses(10, 300, *((k, 10) for k in range(10))))
    assert found.effective < 3000 / 50


@pytest.mark.parametrize("good", [0, 10], ids=["all-missed", "all-attained"])
def test_windows_with_only_one_kind_have_the_full_effective_sample_size(good: int) -> None:
    assert interval(counts([good] * 60, [10] * 60)).effective == 600


def test_independent_requests_have_a_large_effective_sample_size() -> None:
    rng = random.Random(5)
    worth = []
    for _ in range(50):
        total = [rng.randint(0, 10) for _ in range(300)]
        good = [sum(rng.random() < 0.95 for _ in range(n)) for n in total]
        worth.append(interval(counts(good, total)).effective / sum(total))
    assert sum(worth) / len(worth) > 0.5


def test_a_declared_outage_lowers_the_lower_bound_only() -> None:
    sample = with_misses(5, 300)
    plain, declared = interval(sample), WindowEstimate(sample, outage_s=2).interval()
    assert declared.lower < plain.lower
    assert declared.upper == plain.upper
    assert declared.lower == pytest.approx(1 - 2.9957 * 2 / 300, abs=1e-4)


def test_an_outage_longer_than_an_eighth_of_the_window_raises_the_upper_bound() -> None:
    # Two outages of 10 s, each cut in two by the blocks of 7 s but not by those of 10 s.
    sample = with_misses(20, 60, *((k, 20) for k in (*range(10, 20), *range(40, 50))))
    plain = interval(sample)
    assert plain.upper < 0.9
    assert WindowEstimate(sample, outage_s=7).interval().upper == plain.upper
    assert WindowEstimate(sample, outage_s=10).interval().upper > 0.9


def test_a_declared_outage_hits_one_of_several_runs() -> None:
    sample = with_misses(20, 300)
    one, four = (WindowEstimate(sample, outage_s=8, runs=runs).interval() for runs in (1, 4))
    assert four.lower == pytest.approx(1 - 2.9957 * 2 / 300, abs=1e-4)
    assert one.lower == pytest.approx(1 - 2.9957 * 8 / 300, abs=1e-4)


def test_a_window_without_misses_excludes_a_third_of_the_allowed_outage() -> None:
    sample = with_misses(5, 300)
    tolerated_s = WindowEstimate(sample).tolerated_outage_s(Fraction(99, 100))
    assert tolerated_s == pytest.approx(300 * 0.01 / 2.9957, rel=2e-3)
    assert WindowEstimate(sample, outage_s=tolerated_s).interval().lower >= 0.99
    assert WindowEstimate(sample, outage_s=tolerated_s * 1.01).interval().lower < 0.99
    four_runs = WindowEstimate(sample, runs=4).tolerated_outage_s(Fraction(99, 100))
    assert four_runs == pytest.approx(4 * tolerated_s)


def test_arrivals_at_few_instants_exclude_less_than_the_window_suggests() -> None:
    batches = [300 if second % 60 == 0 else 0 for second in range(900)]
    sample = counts(batches, batches)
    steady = with_misses(5, 900)
    assert interval(sample).lower == interval(steady).lower
    # An outage of up to 60 s hits at most one of the 15 batches.
    for outage_s in (3, 60):
        declared = WindowEstimate(sample, outage_s=outage_s).interval()
        assert declared.lower == pytest.approx(1 - 2.9957 / 15, abs=1e-4)
    tolerated_s = WindowEstimate(sample).tolerated_outage_s(Fraction(99, 100))
    assert tolerated_s == pytest.approx(15 * 0.01 / 2.9957, rel=1e-3)
    usual_s = WindowEstimate(steady).tolerated_outage_s(Fraction(99, 100))
    assert usual_s == pytest.approx(900 * 0.01 / 2.9957, rel=1e-3)


@given(sample=windows(), outage_s=st.integers(1, 250), runs=st.integers(1, 4))
def test_the_exposure_is_the_time_at_which_a_visible_outage_can_begin(
    sample: SecondCounts, outage_s: int, runs: int
) -> None:
    total = list(sample.total)
    length = min(outage_s, len(total))
    visible = sum(any((total + total)[s : s + length]) for s in range(len(total)))
    exposure = Exposure(total, runs=runs)
    assert exposure.seconds(outage_s) == visible
    assert exposure.missed_share(outage_s) == pytest.approx(outage_s / visible)


@given(sample=windows(), outages_s=st.tuples(*[st.floats(0.001, 300)] * 2))
def test_longer_outages_miss_no_smaller_share(
    sample: SecondCounts, outages_s: tuple[float, float]
) -> None:
    exposure = Exposure(sample.total)
    short, long = (exposure.missed_share(outage_s) for outage_s in sorted(outages_s))
    assert short <= long * (1 + 1e-9)
    assert exposure.missed_share(0) == 0


@given(sample=windows(), percent=st.integers(50, 99))
def test_the_tolerated_outage_is_the_longest_that_keeps_the_objective(
    sample: SecondCounts, percent: int
) -> None:
    objective = Fraction(percent, 100)
    tolerated_s = WindowEstimate(sample).tolerated_outage_s(objective)
    if tolerated_s:
        estimate = WindowEstimate(sample, outage_s=tolerated_s * 0.99)
        # If it hits more than an eighth of the seconds with requests, it also adds a scale.
        if tolerated_s < sum(map(bool, sample.total)) / 8:
            assert estimate.interval().lower >= float(objective) - 1e-9
            longer = WindowEstimate(sample, outage_s=tolerated_s * 1.05)
            assert longer.interval().lower < objective


def test_a_window_below_its_objective_excludes_no_outage() -> None:
    estimate = WindowEstimate(with_misses(5, 300, (100, 5), (200, 5)))
    assert estimate.tolerated_outage_s(Fraction(999, 1000)) == 0.0


def test_sharing_the_error_widens_the_upper_bound_only() -> None:
    estimate = WindowEstimate(with_misses(10, 300, *((k * 10, 1) for k in range(30))))
    alone, shared = estimate.interval(), estimate.interval(classes=3)
    assert shared.lower == alone.lower
    assert shared.uppers[0] == alone.upper
    assert shared.uppers == tuple(sorted(shared.uppers))
    assert shared.uppers[1] == estimate.interval(0.975).upper


@pytest.mark.parametrize("confidence", [0.49, 1.0, 95.0])
def test_a_confidence_out_of_bounds_is_rejected(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence"):
        interval(counts([1], [2]), confidence)


@pytest.mark.parametrize(("good", "total"), [([], []), ([1], [1, 2])])
def test_counts_of_different_lengths_are_rejected(good: list[int], total: list[int]) -> None:
    with pytest.raises(ValueError, match="entries"):
        counts(good, total)


@pytest.mark.parametrize(("lower", "uppers"), [(0.5, (0.4,)), (-0.1, (1.0,)), (0.5, ()), (0, (2,))])
def test_an_interval_out_of_order_is_rejected(lower: float, uppers: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="not in order"):
        Interval(
            lower=lower, uppers=uppers, confidence=0.95, effective=1, method=IntervalMethod.BLOCKS
        )


def test_one_second_has_no_blocks() -> None:
    assert interval(counts([30], [30])).method is IntervalMethod.EXACT
    assert interval(counts([30, 30], [30, 30])).method is IntervalMethod.BLOCKS


def test_seconds_without_requests_change_nothing() -> None:
    alone = interval(counts([1], [1]))
    idle = interval(counts([1] + [0] * 299, [1] + [0] * 299))
    assert (idle.lower, idle.upper) == (alone.lower, 1.0)


def test_counts_of_billions_are_handled() -> None:
    estimate = WindowEstimate(with_misses(10**8, 60, *((k, 10**6) for k in range(60))))
    found = estimate.interval(classes=4)
    assert 0.98999 < found.lower < 0.99 < found.upper < 0.99001


def test_a_day_of_seconds_takes_less_than_a_second() -> None:
    rng = random.Random(1)
    total = [rng.randint(0, 40) for _ in range(86_400)]
    sample = counts([n - (rng.random() < 0.03 and n > 0) for n in total], total)
    started = time.process_time()
    WindowEstimate(sample).interval(classes=4)
    assert time.process_time() - started < 1


@given(sample=windows(), confidence=CONFIDENCES, classes=st.integers(1, 20))
@settings(deadline=None)
def test_bounds_are_ordered_and_contain_the_share(
    sample: SecondCounts, confidence: float, classes: int
) -> None:
    found = WindowEstimate(sample).interval(confidence, classes=classes)
    share = sample.attainment.good / sample.attainment.total
    assert 0 <= found.lower <= share <= found.upper <= 1
    assert list(found.uppers) == sorted(found.uppers)
    assert 0 < found.effective <= sample.attainment.total


@given(sample=windows(), confidence=CONFIDENCES)
@settings(deadline=None)
def test_bounds_are_never_narrower_than_the_exact_ones_of_independent_requests(
    sample: SecondCounts, confidence: float
) -> None:
    found = interval(sample, confidence)
    good, total = sample.attainment.good, sample.attainment.total
    exact_lower = beta_quantile(1 - confidence, good, total - good + 1) if good else 0.0
    exact_upper = beta_quantile(confidence, good + 1, total - good) if good < total else 1.0
    assert found.lower <= exact_lower + 1e-9
    assert found.upper >= exact_upper - 1e-9


@given(sample=windows(), confidences=st.tuples(CONFIDENCES, CONFIDENCES))
@settings(deadline=None)
def test_more_confidence_widens_both_bounds(
    sample: SecondCounts, confidences: tuple[float, float]
) -> None:
    low, high = (interval(sample, c) for c in sorted(confidences))
    assert high.lower <= low.lower + 1e-9
    assert high.upper >= low.upper - 1e-9


@given(per_s=st.integers(1, 20), seconds=st.integers(1, 120), times=st.integers(2, 10))
@settings(deadline=None)
def test_a_longer_window_without_misses_raises_the_lower_bound(
    per_s: int, seconds: int, times: int
) -> None:
    short = interval(with_misses(per_s, seconds))
    long = interval(with_misses(per_s, seconds * times))
    assert long.lower >= short.lower


@given(good=st.integers(0, 500), missed=st.integers(1, 500))
@settings(deadline=None)
def test_one_more_attained_request_raises_both_bounds(good: int, missed: int) -> None:
    total = good + missed
    less, more = (interval(counts([g], [total])) for g in (good, good + 1))
    assert less.lower <= more.lower
    assert less.upper <= more.upper


@given(sample=windows())
@settings(deadline=None)
def test_equal_windows_have_equal_bounds(sample: SecondCounts) -> None:
    again = counts(list(sample.good), list(sample.total))
    assert interval(sample) == interval(again)


@given(windows(), st.lists(st.integers(0, 2), min_size=3, max_size=3), CONFIDENCES)
def test_long_periods_without_requests_show_nothing(
    sample: SecondCounts, gaps: list[int], confidence: float
) -> None:
    """A minute of requests is the same evidence anywhere in a window, and in one of an hour."""
    assume(any(gaps))
    busy = [(g, n) for g, n in zip(sample.good, sample.total, strict=True) if n]
    before, within, after = ([(0, 0)] * (gap * (len(busy) + 10)) for gap in gaps)
    middle = len(busy) // 3
    padded = [*before, *busy[:middle], *within, *busy[middle:], *after]
    dense, sparse = (
        interval(counts([g for g, _ in one], [n for _, n in one]), confidence)
        for one in ([*busy, *[(0, 0)] * (len(busy) + 10)], padded)
    )
    assert (sparse.lower, sparse.uppers) == (dense.lower, dense.uppers)
