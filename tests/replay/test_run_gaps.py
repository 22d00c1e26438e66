"""Quantiles of counted gaps are those of sorted gaps, to a thousandth."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.quantiles import quantile
from goodput_replay.runs.columns import GapCounts

_GAPS = st.lists(
    st.integers(0, 5000) | st.integers(0, 2**31 - 1) | st.just(2**31 - 1), min_size=1, max_size=60
)


def _counted(gaps: list[int]) -> GapCounts:
    counts = GapCounts()
    counts.add(np.array(gaps, dtype=np.int32))
    return counts


@given(gaps=_GAPS, percent=st.integers(0, 100))
def test_a_quantile_is_at_most_a_thousandth_above_the_exact_one(
    gaps: list[int], percent: int
) -> None:
    exact = quantile(gaps, Fraction(percent, 100))
    counted = _counted(gaps).quantile_us(Fraction(percent, 100))
    assert exact <= counted <= exact + exact // 1000


@given(gaps=_GAPS, at=st.integers(0, 60))
def test_merged_parts_equal_one_count(gaps: list[int], at: int) -> None:
    merged = GapCounts.merged([_counted(gaps[:at]), _counted(gaps[at:])])
    whole = _counted(gaps)
    assert (merged.counts == whole.counts).all()
    assert (merged.total, merged.largest_us) == (len(gaps), max(gaps))


@given(gaps=_GAPS)
def test_cumulative_shares_rise_to_one_at_the_largest_gap(gaps: list[int]) -> None:
    edges, shares = _counted(gaps).cumulative()
    assert edges[-1] == max(gaps)
    assert shares[-1] == 1
    assert (np.diff(shares) > 0).all()
    assert (np.diff(edges) > 0).all()


def test_no_gaps_have_no_quantile() -> None:
    assert GapCounts().total == 0
    with pytest.raises(ValueError, match="at least one gap"):
        GapCounts().quantile_us(Fraction(1, 2))
