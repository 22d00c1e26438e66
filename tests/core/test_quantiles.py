"""Nearest-rank quantiles."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.quantiles import P50, P95, P99, quantile, quantiles

SHARES = st.fractions(min_value=0, max_value=1, max_denominator=10_000)
VALUES = st.lists(st.integers(-1000, 1000), min_size=1, max_size=200)


@pytest.mark.parametrize(
    ("count", "q", "rank"),
    [
        pytest.param(1, P99, 1, id="one-value-is-every-quantile"),
        pytest.param(100, P99, 99, id="p99-of-100-is-the-99th"),
        pytest.param(101, P99, 100, id="p99-of-101-is-the-100th"),
        pytest.param(1000, Fraction(999, 1000), 999, id="p999-of-1000-is-the-999th"),
        pytest.param(20, P95, 19, id="p95-of-20-is-the-19th"),
        # 0.07 * 100 is 7.000000000000001.
        pytest.param(100, Fraction(7, 100), 7, id="p7-of-100-where-floats-are-one-rank-off"),
        pytest.param(10, P50, 5, id="median-of-an-even-count-is-the-lower-one"),
        pytest.param(5, Fraction(0), 1, id="zero-is-the-smallest"),
        pytest.param(5, Fraction(1), 5, id="one-is-the-largest"),
    ],
)
def test_quantile_has_the_exact_rank(count: int, q: Fraction, rank: int) -> None:
    assert quantile(range(count, 0, -1), q) == rank


def test_several_quantiles_are_returned_in_order() -> None:
    assert quantiles([3, 1, 2], [P99, Fraction(0), P50]) == (3, 1, 2)


def test_no_values_have_no_quantile() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        quantile([], P50)


@pytest.mark.parametrize("q", [Fraction(-1, 100), Fraction(101, 100)])
def test_a_share_outside_zero_to_one_is_rejected(q: Fraction) -> None:
    with pytest.raises(ValueError, match="not a share"):
        quantile([1], q)


@given(values=VALUES, q=SHARES)
def test_a_quantile_is_the_smallest_value_that_covers_its_share(
    values: list[int], q: Fraction
) -> None:
    found = quantile(values, q)
    assert found in values
    assert sum(v <= found for v in values) >= q * len(values)
    below = [v for v in values if v < found]
    assert not below or sum(v <= max(below) for v in values) < q * len(values)


@given(values=VALUES, one=SHARES, other=SHARES)
def test_quantiles_grow_with_their_share(values: list[int], one: Fraction, other: Fraction) -> None:
    low, high = quantiles(values, sorted([one, other]))
    assert low <= high
