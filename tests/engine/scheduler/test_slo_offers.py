"""The account of offered work: ranks, fading, and requests that are outbid."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.policies.slo.offers import OfferedWork

_BETTER = OfferedWork.rank(0, 8.0, 1.0)
_WORSE = OfferedWork.rank(0, 1.0, 1.0)


def _offered(
    rank: tuple[int, int],
    *,
    load: float,
    seconds: float = 20,
    per_s: int = 10,
    refused: bool = False,
    window_s: float = 0.0,
) -> OfferedWork:
    """Offer a load of equal requests at a constant rate."""
    offered = OfferedWork()
    work_ns = load * NS_PER_S / per_s
    for i in range(int(seconds * per_s)):
        now_ns = i * NS_PER_S // per_s
        offered.add(rank, work_ns, window_ns=window_s * NS_PER_S, stay_ns=0.0, now_ns=now_ns)
        if refused:
            offered.refuse(rank, work_ns)
    return offered


@pytest.mark.parametrize(
    ("lower", "higher"),
    [((0, 100.0, 1.0), (1, 1.0, 100.0)), ((0, 1.0, 1.0), (0, 3.0, 1.0)), ((0, 1, 3), (0, 1, 1))],
    ids=["the priority first", "more value", "less work"],
)
def test_a_rank_is_the_priority_then_the_value_per_work(
    lower: tuple[int, float, float], higher: tuple[int, float, float]
) -> None:
    assert OfferedWork.rank(*lower) < OfferedWork.rank(*higher)


def test_a_rank_depends_only_on_the_ratio_of_value_to_work() -> None:
    assert OfferedWork.rank(0, 3.0, 7.0) == OfferedWork.rank(0, 12.0, 28.0)
    assert OfferedWork.rank(0, 0.0, 1.0) < OfferedWork.rank(0, 1.0, 0.0), "zeros are no errors"


def test_nothing_is_held_back_before_the_first_offer() -> None:
    assert OfferedWork().held_back(_WORSE, 0) == 0
    assert OfferedWork().expected_above(_WORSE, 0)(NS_PER_S) == 0
    assert not OfferedWork().outbids(_WORSE, 100 * NS_PER_S)


def test_under_full_load_capacity_is_held_back_for_better_requests_and_none_for_equals_alone() -> (
    None
):
    now_ns = 20 * NS_PER_S
    offered = _offered(_BETTER, load=2.0)
    assert offered.held_back(_WORSE, now_ns) == pytest.approx(0.6)
    assert offered.held_back(_BETTER, now_ns) == 0
    best = OfferedWork.rank(1, 1.0, 1.0)
    assert offered.held_back(best, now_ns) == 0


def _shared(higher: tuple[int, int], *, asked: float, others: float) -> OfferedWork:
    """Offer the work of a higher rank and of `_WORSE` for 20 s, as shares of the capacity."""
    offered = OfferedWork(reserves=True)
    for i in range(200):
        at_ns = i * NS_PER_S // 10
        offered.add(higher, asked * NS_PER_S / 10, window_ns=0.0, stay_ns=0.0, now_ns=at_ns)
        offered.add(_WORSE, others * NS_PER_S / 10, window_ns=0.0, stay_ns=0.0, now_ns=at_ns)
    return offered


@pytest.mark.parametrize(
    ("higher", "asked", "held"),
    [
        (OfferedWork.rank(0, 1.42, 1.0), 0.5, 0.7 * 0.5),
        (OfferedWork.rank(0, 64.0, 1.0), 0.5, 1.5 * 0.5),
        (OfferedWork.rank(0, 64.0, 1.0), 0.9, 0.95),
        (OfferedWork.rank(1, 64.0, 1.0), 0.5, 0.7 * 0.5),
    ],
    ids=["worth little more", "worth far more", "nearly all", "a higher level"],
)
def test_more_is_reserved_for_requests_that_are_worth_far_more(
    higher: tuple[int, int], asked: float, held: float
) -> None:
    offered = _shared(higher, asked=asked, others=2.0)
    assert offered.held_back(_WORSE, 20 * NS_PER_S) == pytest.approx(held, rel=0.02)


def _jumped(*, silent_s: float = 0.0, window_s: float = 0.5, stay_s: float = 0.0) -> float:
    """Return the share that is held back after a jump from a quarter to twice the capacity."""
    offered = OfferedWork()
    for i, load in enumerate([0.25] * 2000 + [2.0] * 100):
        offered.add(
            _BETTER if i % 2 else _WORSE,
            load * NS_PER_S / 100,
            window_ns=window_s * NS_PER_S,
            stay_ns=stay_s * NS_PER_S,
            now_ns=i * NS_PER_S // 100,
        )
    return offered.held_back(_WORSE, round((21 + silent_s) * NS_PER_S))


def test_a_load_that_jumps_shows_in_the_time_in_which_its_requests_must_be_served() -> None:
    assert _jumped() > 0.2
    assert _jumped(silent_s=1) == 0, "the burst has passed"
    assert _jumped(window_s=10) == 0, "there is time to serve all"
    assert _jumped(stay_s=20) == 0, "its work is done over a longer time"


def test_better_requests_leave_room_to_equal_ones_only() -> None:
    """A third of the work is of equals. It counts half, times the two thirds of the others."""
    offered = _shared(_BETTER, asked=0.9, others=1.8)
    assert offered.held_back(_BETTER, 20 * NS_PER_S) == pytest.approx(0.6 / 9, rel=0.02)


@given(
    work_ns=st.floats(1e3, 1e12),
    factors=st.lists(st.floats(1, 1.18), min_size=20, max_size=40),
    load=st.floats(0.5, 10),
)
def test_requests_of_nearly_equal_work_leave_no_room_to_each_other(
    work_ns: float, factors: list[float], load: float
) -> None:
    offered = OfferedWork(reserves=True)
    ranks = [OfferedWork.rank(0, 1.0, work_ns * factor) for factor in factors]
    for i, rank in enumerate(ranks):
        offered.add(rank, load * NS_PER_S, window_ns=0.0, stay_ns=0.0, now_ns=i * NS_PER_S)
    assert [offered.held_back(rank, len(ranks) * NS_PER_S) for rank in ranks] == [
        pytest.approx(0, abs=1e-9)
    ] * len(ranks)


def test_the_shortest_window_is_that_of_a_recent_rank() -> None:
    offered = OfferedWork()
    assert offered.shortest_window_ns(0) == math.inf
    offered.add(_BETTER, 1.0, window_ns=100, stay_ns=0.0, now_ns=0)
    offered.add(_WORSE, 1.0, window_ns=500, stay_ns=0.0, now_ns=10 * NS_PER_S)
    assert offered.shortest_window_ns(10 * NS_PER_S) == 100
    assert offered.shortest_window_ns(25 * NS_PER_S) == 500
    assert offered.shortest_window_ns(60 * NS_PER_S) == math.inf


def test_less_is_held_back_under_less_load() -> None:
    now_ns = 100 * NS_PER_S
    held = [
        _offered(_BETTER, load=load, seconds=100).held_back(_WORSE, now_ns)
        for load in (0.9, 1.2, 1.4, 1.6)
    ]
    assert held == pytest.approx([0, 0.24, 0.48, 0.6], rel=0.1)


def test_a_burst_that_may_be_served_for_longer_is_less_load() -> None:
    """Ten seconds of work in one second, due after ten seconds, and due at once."""
    held = [
        _offered(_BETTER, load=10, seconds=1, per_s=200, window_s=window_s).held_back(
            _WORSE, NS_PER_S
        )
        for window_s in (10.0, 0.0)
    ]
    assert held == pytest.approx([0, 0.6], abs=0.01)


def test_the_standard_error_of_the_load_is_subtracted_while_the_account_is_young() -> None:
    """At 1.4 times the capacity: a second with 16 requests, and 100 seconds with 16 a second."""
    short = _offered(_BETTER, load=1.4, seconds=1, per_s=16).held_back(_WORSE, NS_PER_S)
    long = _offered(_BETTER, load=1.4, seconds=100, per_s=16).held_back(_WORSE, 100 * NS_PER_S)
    assert short < 0.2
    assert long > 0.45


@given(
    offers=st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(0, 10**10), st.integers(1, 10**10)),
        min_size=1,
        max_size=8,
    ),
    horizon_ns=st.integers(1, 2 * 10**10),
    above=st.integers(-1, 8),
)
def test_the_expected_work_is_the_sum_over_better_ranks(
    offers: list[tuple[int, int, int]], horizon_ns: int, above: int
) -> None:
    offered = OfferedWork()
    for density, (work_ns, window_ns, stay_ns) in enumerate(offers):
        offered.add((0, density), work_ns, window_ns=window_ns, stay_ns=stay_ns, now_ns=0)
    total = 0.0
    for work_ns, window_ns, stay_ns in offers[above + 1 :]:
        started_ns = max(0, horizon_ns - window_ns)
        grows_ns = min(started_ns, stay_ns)
        total += work_ns * (grows_ns**2 / (2 * stay_ns) + started_ns - grows_ns)
    expected = offered.expected_above((0, above), 0)(horizon_ns)
    assert expected == pytest.approx(total / horizon_ns, rel=1e-6, abs=1.0)


def test_of_a_long_stay_only_the_part_within_the_time_is_expected() -> None:
    """At 200 requests per second that use a tenth each for 0.3 s, 20 ms see few of them."""
    offered = OfferedWork()
    for i in range(4000):
        at_ns = i * NS_PER_S // 200
        offered.add(_BETTER, 3e7, window_ns=8e6, stay_ns=3e8, now_ns=at_ns)
    expected = offered.expected_above(_WORSE, 20 * NS_PER_S)
    assert expected(20e6) == pytest.approx(0.2 * 0.012**2 / 2 * 1e3 * 1e8, rel=0.2)
    assert expected(20e6) < 2e6, "less than a tenth of the capacity until then"


def test_the_first_offers_at_one_time_are_no_error() -> None:
    offered = OfferedWork()
    for _ in range(20):
        offered.add(_BETTER, 1e9, window_ns=0.0, stay_ns=0.0, now_ns=5)
    assert 0 <= offered.held_back(_WORSE, 5) <= 0.95
