"""The search for the highest sustained rate."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_replay.sweep.search import (
    Probe,
    RateLevel,
    SearchLimits,
    beyond,
    boundary,
    next_scale,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def _search(limits: SearchLimits, shown: float, seems: float | None = None) -> list[Probe]:
    """Search where rates are shown to be sustained up to `shown`, and seem so up to `seems`."""

    def level_of(scale: Fraction) -> RateLevel:
        if scale <= shown:
            return RateLevel.SHOWN
        return RateLevel.SEEMS if seems is not None and scale <= seems else RateLevel.FAILED

    return _search_where(limits, level_of)


def _search_where(limits: SearchLimits, level_of: Callable[[Fraction], RateLevel]) -> list[Probe]:
    probes: list[Probe] = []
    while (scale := next_scale(probes, limits)) is not None:
        probes.append(Probe(scale=scale, level=level_of(scale)))
    return probes


@given(
    shown=st.floats(0.02, 200),
    percent=st.fractions(Fraction(1, 10), 20),
    start=st.fractions(Fraction(1, 64), 16, max_denominator=1000),
)
def test_the_limit_is_found_to_the_given_precision(
    shown: float, percent: Fraction, start: Fraction
) -> None:
    limits = SearchLimits(precision=percent / 100, start=start, most=Fraction(512), probes=100)
    level, best, above = boundary(_search(limits, shown))
    assert level is RateLevel.SHOWN
    assert best is not None
    assert above is not None
    assert best <= shown < above
    assert above - best <= best * limits.precision


def test_the_first_rate_is_that_of_the_trace_and_then_doubles() -> None:
    scales = [float(p.scale) for p in _search(SearchLimits(precision=Fraction(1, 2)), 5.0)]
    assert scales == [1, 2, 4, 8, 6]


def test_the_rate_is_halved_until_it_is_sustained() -> None:
    scales = [float(p.scale) for p in _search(SearchLimits(precision=Fraction(1, 2)), 0.2)]
    assert scales == [1, 0.5, 0.25, 0.125, 0.1875]


@pytest.mark.parametrize(
    ("shown", "best", "above"),
    [(1000.0, 256, None), (0.0, None, Fraction(1, 64))],
    ids=["every rate is sustained", "no rate is"],
)
def test_the_search_ends_at_its_limits(
    shown: float, best: Fraction | None, above: Fraction | None
) -> None:
    _, found, not_found = boundary(_search(SearchLimits(), shown))
    assert (found, not_found) == (best, above)


def test_without_a_shown_rate_the_search_finds_the_highest_that_seems_sustained() -> None:
    probes = _search(SearchLimits(precision=Fraction(1, 10)), shown=-1, seems=3.0)
    level, best, above = boundary(probes)
    assert level is RateLevel.SEEMS
    assert best is not None
    assert above is not None
    assert best <= 3 < above
    assert above - best <= best / 10


def test_a_rate_that_only_seems_sustained_is_ignored_after_one_is_shown() -> None:
    level, best, above = boundary(_search(SearchLimits(precision=Fraction(1, 10)), 2.5, seems=9.0))
    assert level is RateLevel.SHOWN
    assert best is not None
    assert above is not None
    assert best <= 2.5 < above < 3


def test_the_limits_of_the_search_are_tried() -> None:
    limits = SearchLimits(most=Fraction(3), least=Fraction(1, 3), precision=Fraction(1, 2))
    assert [float(p.scale) for p in _search(limits, 100.0)] == [1, 2, 3]
    assert [p.scale for p in _search(limits, 0.0)] == [1, Fraction(1, 2), Fraction(1, 3)]


def test_the_number_of_tried_rates_is_limited() -> None:
    assert len(_search(SearchLimits(probes=4), 100.0)) == 4


def test_a_first_rate_above_the_maximum_is_replaced_by_the_maximum() -> None:
    assert _search(SearchLimits(most=Fraction(1, 2), start=Fraction(4)), 100.0)[
        0
    ].scale == Fraction(1, 2)


def test_the_precision_is_reached_at_the_lowest_rates() -> None:
    limits = SearchLimits(precision=Fraction(1, 1000))
    _, best, above = boundary(_search(limits, 1.001 / 64))
    assert best is not None
    assert above is not None
    assert Fraction(1, 64) <= best < above <= best * Fraction(1001, 1000)


def test_a_single_failed_rate_below_sustained_ones_is_not_the_limit() -> None:
    def fails_at_four(scale: Fraction) -> RateLevel:
        return RateLevel.FAILED if scale > 7 or scale == 4 else RateLevel.SHOWN

    probes = _search_where(SearchLimits(), fails_at_four)
    _, best, above = boundary(probes)
    assert best is not None
    assert above is not None
    assert best <= 7 < above <= best * Fraction(21, 20)
    assert Probe(scale=Fraction(4), level=RateLevel.FAILED) in probes


def test_a_rate_below_the_first_one_is_tried() -> None:
    def passes_at_one(scale: Fraction) -> RateLevel:
        return RateLevel.SHOWN if scale == 1 else RateLevel.FAILED

    probes = _search_where(SearchLimits(), passes_at_one)
    assert boundary(probes)[1] == 1
    assert any(p.scale < 1 for p in probes)


@given(
    shown=st.floats(0.05, 100), start=st.sampled_from([Fraction(1, 2), Fraction(1), Fraction(7)])
)
def test_the_result_has_two_tried_rates_on_either_side(shown: float, start: Fraction) -> None:
    probes = _search(SearchLimits(start=start, most=Fraction(512)), shown)
    _, best, above = boundary(probes)
    assert best is not None
    assert above is not None
    assert sum(p.scale <= best for p in probes) >= 2
    assert sum(p.scale >= above for p in probes) >= 2


@pytest.mark.parametrize(
    ("scale", "lowest", "highest"),
    [(Fraction(1, 4), Fraction(1, 2), Fraction(256)), (Fraction(8), Fraction(1, 64), Fraction(4))],
    ids=["too few requests", "too many"],
)
def test_a_rate_that_cannot_be_tried_ends_the_search_on_its_side(
    scale: Fraction, lowest: Fraction, highest: Fraction
) -> None:
    probes = [Probe(scale=s, level=RateLevel.SHOWN) for s in (Fraction(1, 2), Fraction(4))]
    assert beyond(scale, probes)
    assert not beyond(Fraction(1), probes)
    limits = SearchLimits().without(scale, probes)
    assert (limits.least, limits.most) == (lowest, highest)


def test_the_search_ends_if_no_rate_further_out_can_be_tried() -> None:
    probes = [Probe(scale=Fraction(1), level=RateLevel.SHOWN)]
    probes += [Probe(scale=Fraction(s), level=RateLevel.FAILED) for s in ("1.04", "2")]
    limits = SearchLimits()
    assert next_scale(probes, limits) == Fraction(1, 2)
    assert next_scale(probes, limits.without(Fraction(1, 2), probes)) is None


def test_an_estimate_above_a_failed_rate_is_not_the_result() -> None:
    probes = [
        Probe(scale=Fraction(1), level=RateLevel.FAILED),
        Probe(scale=Fraction(2), level=RateLevel.SEEMS),
        Probe(scale=Fraction(4), level=RateLevel.FAILED),
    ]
    assert boundary(probes) == (RateLevel.SEEMS, None, Fraction(1))
    assert next_scale(probes, SearchLimits()) == Fraction(1, 2)
