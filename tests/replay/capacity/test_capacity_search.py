"""Closing in on the highest rate that holds."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_replay.capacity.search import Level, Limits, Probe, boundary, next_scale


def _search(limits: Limits, holds: float, seems: float | None = None) -> list[Probe]:
    """Search where rates up to `holds` are shown to hold, and seem to up to `seems`."""
    probes: list[Probe] = []
    while (scale := next_scale(probes, limits)) is not None:
        level = Level.BROKEN
        if scale <= holds:
            level = Level.SHOWN
        elif seems is not None and scale <= seems:
            level = Level.SEEMS
        probes.append(Probe(scale=scale, level=level))
    return probes


@given(holds=st.floats(0.02, 200), percent=st.integers(1, 20))
def test_the_limit_is_found_to_the_precision_asked_for(holds: float, percent: int) -> None:
    limits = Limits(precision=Fraction(percent, 100), most=Fraction(512))
    level, best, above = boundary(_search(limits, holds))
    assert level is Level.SHOWN
    assert best is not None
    assert above is not None
    assert best <= holds < above
    assert above - best <= best * limits.precision + Fraction(1, 512)


def test_the_first_rate_is_the_traces_own_and_then_it_doubles() -> None:
    scales = [float(p.scale) for p in _search(Limits(precision=Fraction(1, 2)), 5.0)]
    assert scales == [1, 2, 4, 8, 6]


def test_a_trace_that_is_too_much_is_thinned_until_it_holds() -> None:
    scales = [float(p.scale) for p in _search(Limits(precision=Fraction(1, 2)), 0.2)]
    assert scales == [1, 0.5, 0.25, 0.125, 0.1875]


@pytest.mark.parametrize(
    ("holds", "best", "above"),
    [(1000.0, 256, None), (0.0, None, Fraction(1, 64))],
    ids=["every rate holds", "no rate does"],
)
def test_the_search_ends_at_its_limits(
    holds: float, best: Fraction | None, above: Fraction | None
) -> None:
    _, found, not_found = boundary(_search(Limits(), holds))
    assert (found, not_found) == (best, above)


def test_as_long_as_nothing_is_shown_the_search_is_about_what_seems_to_hold() -> None:
    probes = _search(Limits(precision=Fraction(1, 10)), holds=-1, seems=3.0)
    level, best, above = boundary(probes)
    assert level is Level.SEEMS
    assert best is not None
    assert above is not None
    assert best <= 3 < above
    assert above - best <= best / 10


def test_what_seems_to_hold_does_not_count_once_something_is_shown() -> None:
    level, best, above = boundary(_search(Limits(precision=Fraction(1, 10)), 2.5, seems=9.0))
    assert level is Level.SHOWN
    assert best is not None
    assert above is not None
    assert best <= 2.5 < above < 3


def test_the_limits_themselves_are_tried() -> None:
    limits = Limits(most=Fraction(3), least=Fraction(1, 3), precision=Fraction(1, 2))
    assert [float(p.scale) for p in _search(limits, 100.0)] == [1, 2, 3]
    assert [p.scale for p in _search(limits, 0.0)] == [1, Fraction(1, 2), Fraction(1, 3)]


def test_no_more_rates_are_tried_than_allowed() -> None:
    assert len(_search(Limits(probes=4), 100.0)) == 4
