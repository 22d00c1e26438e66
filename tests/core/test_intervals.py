"""Wilson's bounds."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from goodput_core.slo.intervals import Interval, IntervalMethod, requests_needed, wilson

COUNTS = st.integers(1, 5_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
CONFIDENCES = st.floats(0.5, 0.999)
SIZES = st.floats(0.5, 10_000)


@pytest.mark.parametrize(
    ("good", "total", "lower", "upper"),
    [
        # z = 1.6448536: n/(n + z²) for all good, z²/(n + z²) for none.
        pytest.param(30, 30, 30 / 32.705543, 1.0, id="30-of-30-shows-91.7-percent"),
        pytest.param(0, 30, 0.0, 2.705543 / 32.705543, id="0-of-30"),
        # Roots of (p̂ − p)² = z²·p(1 − p)/n for p̂ = 0.9, n = 100.
        pytest.param(90, 100, 0.839644, 0.939282, id="90-of-100"),
        pytest.param(0, 0, 0.0, 1.0, id="nothing-judged-says-nothing"),
    ],
)
def test_wilson_bounds(good: int, total: int, lower: float, upper: float) -> None:
    interval = wilson(good, total)
    assert interval.lower == pytest.approx(lower, abs=1e-6)
    assert interval.upper == pytest.approx(upper, abs=1e-6)


def test_bounds_at_the_edges_are_exact() -> None:
    assert wilson(7, 7).upper == 1.0
    assert wilson(0, 7).lower == 0.0
    assert (wilson(0, 0).lower, wilson(0, 0).upper, wilson(0, 0).effective) == (0.0, 1.0, 0.0)


def test_a_bound_solves_wilsons_equation() -> None:
    interval = wilson(45, 50, confidence=0.9)
    z = 1.2815515655446004
    for bound in (interval.lower, interval.upper):
        assert abs(0.9 - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / 50))


@pytest.mark.parametrize(
    ("objective", "needed"),
    [("0.99", 268), ("0.95", 52), ("0.999", 2703), ("0.5", 3)],
)
def test_requests_needed_is_where_a_clean_run_first_reaches_the_objective(
    objective: str, needed: int
) -> None:
    goal = Fraction(objective)
    assert requests_needed(goal) == needed
    assert wilson(needed, needed).lower >= goal
    assert wilson(needed - 1, needed - 1).lower < goal


def test_sharing_the_error_widens_the_upper_bound_only() -> None:
    alone, shared = wilson(90, 100), wilson(90, 100, classes=3)
    assert shared.lower == alone.lower
    assert shared.uppers[0] == alone.upper
    assert shared.uppers == tuple(sorted(shared.uppers))
    assert shared.uppers[1] == wilson(90, 100, confidence=0.975).upper


@pytest.mark.parametrize("confidence", [0.49, 1.0, 95.0])
def test_a_confidence_that_is_none_is_refused(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence"):
        wilson(1, 2, confidence=confidence)


def test_requests_worth_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="worth"):
        wilson(1, 2, effective=0)


@pytest.mark.parametrize(("lower", "uppers"), [(0.5, (0.4,)), (-0.1, (1.0,)), (0.5, ()), (0, (2,))])
def test_an_interval_out_of_order_is_refused(lower: float, uppers: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="not in order"):
        Interval(
            lower=lower, uppers=uppers, confidence=0.95, effective=1, method=IntervalMethod.WILSON
        )


@given(counts=COUNTS, size=SIZES, confidence=CONFIDENCES, classes=st.integers(1, 20))
def test_bounds_are_ordered_and_contain_the_share(
    counts: tuple[int, int], size: float, confidence: float, classes: int
) -> None:
    good, total = counts
    found = wilson(good, total, effective=size, confidence=confidence, classes=classes)
    assert 0 <= found.lower <= good / total <= found.upper <= 1
    assert list(found.uppers) == sorted(found.uppers)


@given(counts=COUNTS, sizes=st.tuples(SIZES, SIZES), confidence=CONFIDENCES)
def test_more_independent_requests_narrow_both_bounds(
    counts: tuple[int, int], sizes: tuple[float, float], confidence: float
) -> None:
    few, many = (wilson(*counts, effective=n, confidence=confidence) for n in sorted(sizes))
    assert few.lower <= many.lower + 1e-12
    assert few.upper >= many.upper - 1e-12


@given(counts=COUNTS, confidences=st.tuples(CONFIDENCES, CONFIDENCES))
def test_more_confidence_widens_both_bounds(
    counts: tuple[int, int], confidences: tuple[float, float]
) -> None:
    low, high = (wilson(*counts, confidence=c) for c in sorted(confidences))
    assert high.lower <= low.lower + 1e-12
    assert high.upper >= low.upper - 1e-12


@given(counts=COUNTS)
def test_one_more_attained_request_raises_both_bounds(counts: tuple[int, int]) -> None:
    good, total = counts
    assume(good < total)
    less, more = wilson(good, total), wilson(good + 1, total)
    assert less.lower <= more.lower
    assert less.upper <= more.upper
