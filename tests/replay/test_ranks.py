"""Quantiles of arrays are those of `goodput_core.quantiles`."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.quantiles import P50, P90, P95, P99, quantiles
from goodput_replay.statistics.ranks import nearest_ranks

QS = (P50, P90, P95, P99, Fraction(1))


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=300))
def test_quantiles_of_arrays_are_exact(values: list[int]) -> None:
    found = nearest_ranks(np.array(values, dtype=np.int64), QS)
    assert tuple(found) == quantiles(values, QS)


@pytest.mark.parametrize("count", [1, 99, 100, 101, 200])
def test_a_rank_is_computed_in_integers(count: int) -> None:
    values = np.arange(1, count + 1)[::-1]
    assert nearest_ranks(values, [P99]) == [-(-99 * count // 100)]


def test_no_values_have_no_quantile() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        nearest_ranks(np.array([], dtype=np.int64), [P50])
