"""Ranks found in several passes are those of a sort, whatever the values are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.quantiles import P50, P90, P95, P99
from goodput_replay.statistics.rank_search import RankSearch
from goodput_replay.statistics.ranks import nearest_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_VALUES = st.one_of(
    # Few distinct values have ties, and values over many orders of magnitude are in many bins.
    st.sampled_from([0.0, -0.0, 1.0, 1e-3, 1e9, np.nan, np.inf, -np.inf]),
    st.floats(width=64),
    st.floats(1, 10).flatmap(lambda x: st.integers(-6, 6).map(lambda power: x * 10.0**power)),
    st.integers(-(2**53), 2**53).map(float),
)
_GROUPS = st.lists(st.lists(_VALUES, max_size=40), min_size=1, max_size=3)


def _every_rank(counts: Sequence[int]) -> list[list[int]]:
    return [list(range(count)) for count in counts]


def _search(
    groups: Sequence[Sequence[float]], *, max_kept: int, max_bins: int, part: int = 7
) -> tuple[list[NDArray[np.float64]], int]:
    """Return the sorted values of each group, and the number of passes."""
    search = RankSearch(len(groups), _every_rank, max_kept=max_kept, max_bins=max_bins)
    passes = 0
    while not search.finished:
        for group, values in enumerate(groups):
            # Each pass has another order.
            added = np.array(values[:: 1 if passes % 2 else -1], dtype=np.float64)
            for start in range(0, len(added), part):
                search.add(group, added[start : start + part])
        search.end_pass()
        passes += 1
        assert passes <= 65
    return [search.values(group) for group in range(len(groups))], passes


@given(groups=_GROUPS, max_kept=st.integers(0, 40), max_bins=st.sampled_from([4, 64, 1 << 12]))
def test_every_rank_is_that_of_a_sort(
    groups: list[list[float]], max_kept: int, max_bins: int
) -> None:
    found, _ = _search(groups, max_kept=max_kept, max_bins=max_bins)
    for values, ranked in zip(groups, found, strict=True):
        finite = np.sort([value for value in values if np.isfinite(value)])
        assert ranked.tolist() == finite.tolist()


def test_few_values_need_one_pass() -> None:
    _, passes = _search([[3.0, 1.0, 2.0]], max_kept=3, max_bins=4)
    assert passes == 1


def test_equal_values_are_found_although_they_do_not_fit() -> None:
    values = [7.5] * 1000 + [8.0]
    (found,), passes = _search([values], max_kept=10, max_bins=1 << 12)
    assert found.tolist() == values
    assert passes <= 9


@pytest.mark.parametrize("spread", [0.001, 1.0, 6.0])
def test_quantiles_of_many_values_are_exact(spread: float) -> None:
    values = np.rint(np.random.default_rng(1).lognormal(16, spread, 200_000))
    qs = (P50, P90, P95, P99)
    expected = nearest_ranks(values.astype(np.int64), qs)

    def ranks(counts: Sequence[int]) -> list[list[int]]:
        return [[-(-q.numerator * n // q.denominator) - 1 for q in qs] for n in counts]

    search = RankSearch(1, ranks, max_kept=1000)
    passes = 0
    while not search.finished:
        for part in np.array_split(values, 30):
            search.add(0, part)
        search.end_pass()
        passes += 1
    assert search.values(0).tolist() == expected
    assert 1 < passes <= 4
