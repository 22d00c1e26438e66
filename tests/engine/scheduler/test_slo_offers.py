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
        st.tuples(st.integers(-2, 2), st.floats(0, 1e3), st.floats(0, 1e10), st.integers(0, 10**9)),
        max_size=50,
    ),
    reserves=st.booleans(),
)
def test_the_share_held_back_is_within_bounds_and_falls_with_the_rank(
    offers: list[tuple[int, float, float, int]], *, reserves: bool
) -> None:
    """Ranks that lie closer together may count partly different ranks as equal."""
    offered, now_ns = OfferedWork(reserves=reserves), 0
    ranks = []
    for priority, value, work_ns, passed_ns in offers:
        now_ns += passed_ns
        ranks.append(OfferedWork.rank(priority, value, work_ns))
        offered.add(ranks[-1], work_ns, window_ns=0.0, stay_ns=0.0, now_ns=now_ns)
    held = {rank: offered.held_back(rank, now_ns) for rank in sorted(ranks)}
    assert all(0 <= share <= (0.95 if reserves else 0.6) for share in held.values())
    for lower, higher in combinations(held, 2):
        same_level = lower[0] == higher[0]
        if (same_level and higher[1] > lower[1] + 2) or not (same_level or reserves):
            assert held[higher] <= held[lower] + 1e-12


def test_old_offers_fade() -> None:
    offered = _offered(_BETTER, load=2.0, refused=True)
    assert offered.outbids(_WORSE, 20 * NS_PER_S)
    for second in range(20, 120):
        offered.add(_WORSE, 0.9 * NS_PER_S, window_ns=0.0, stay_ns=0.0, now_ns=second * NS_PER_S)
    assert not offered.outbids(_WORSE, 120 * NS_PER_S)
    above = offered.held_back(_WORSE, 120 * NS_PER_S)
    assert above == 0, "the load is 1 now"


def test_a_full_load_of_clearly_better_and_refused_requests_outbids() -> None:
    offered = _offered(_BETTER, load=1.5, refused=True)
    assert offered.outbids(_WORSE, 20 * NS_PER_S)


def test_a_full_load_of_a_higher_priority_outbids_whatever_its_value() -> None:
    offered = _offered(OfferedWork.rank(1, 1.0, 100.0), load=1.5, refused=True)
    assert offered.outbids(OfferedWork.rank(0, 1e6, 1.0), 20 * NS_PER_S)


def test_nothing_is_outbid_after_the_better_requests_have_stopped() -> None:
    offered = _offered(_BETTER, load=4, refused=True, window_s=0.5)
    ended_ns = 199 * NS_PER_S // 10
    assert offered.outbids(_WORSE, ended_ns + NS_PER_S)
    assert not offered.outbids(_WORSE, ended_ns + NS_PER_S + 1)


def test_a_class_with_an_hour_until_its_latest_start_hides_no_load() -> None:
    offered = _offered(_BETTER, load=2.0, window_s=0.5)
    held = offered.held_back(_WORSE, 20 * NS_PER_S)
    patient = OfferedWork.rank(0, 0.1, 1.0)
    for _ in range(3):
        offered.add(
            patient, NS_PER_S / 10, window_ns=3600 * NS_PER_S, stay_ns=0.0, now_ns=20 * NS_PER_S
        )
    assert offered.held_back(_WORSE, 20 * NS_PER_S) == pytest.approx(held, rel=0.1)
    assert offered.held_back(patient, 20 * NS_PER_S) == pytest.approx(held, rel=0.1)


@pytest.mark.parametrize(
    ("load", "refused"), [(0.8, True), (1.5, False)], ids=["not a full load", "none is refused"]
)
def test_better_requests_that_can_all_be_served_do_not_outbid(load: float, refused: bool) -> None:
    offered = _offered(_BETTER, load=load, refused=refused)
    assert not offered.outbids(_WORSE, 20 * NS_PER_S)


@pytest.mark.parametrize(
    ("seconds", "per_s"), [(20, 3), (0.9, 100)], ids=["60 offers", "less than a second"]
)
def test_nothing_is_outbid_without_evidence(seconds: float, per_s: int) -> None:
    offered = _offered(_BETTER, load=10, seconds=seconds, per_s=per_s, refused=True)
    assert not offered.outbids(_WORSE, int(seconds * NS_PER_S))


@given(works=st.lists(st.floats(1.0, 1.41), min_size=64, max_size=200), own=st.floats(1.0, 1.41))
def test_equal_requests_never_outbid_each_other(works: list[float], own: float) -> None:
    """Predictions of their work may differ by a factor of 1.41."""
    offered = OfferedWork()
    for i, work in enumerate(works):
        rank = OfferedWork.rank(0, 1.0, work)
        offered.add(rank, work * NS_PER_S, window_ns=0.0, stay_ns=0.0, now_ns=i * NS_PER_S // 10)
        offered.refuse(rank, work * NS_PER_S)
    now_ns = len(works) * NS_PER_S // 10
    assert not offered.outbids(OfferedWork.rank(0, 1.0, own), now_ns)


def test_the_number_of_ranks_is_bounded_and_the_least_work_is_forgotten() -> None:
    offered = OfferedWork()
    offered.add((9, 0), 1e12, window_ns=0.0, stay_ns=0.0, now_ns=0)
    for i in range(2000):
        offered.add((0, i), 1.0 + i, window_ns=0.0, stay_ns=0.0, now_ns=i)
        offered.refuse((0, i), 1.0 + i)
    assert len(offered._work_ns) <= 256
    for means in (offered._windows_ns, offered._stays_ns, offered._seen_ns):
        assert means.keys() == offered._work_ns.keys()
    assert offered._refused_ns.keys() <= offered._work_ns.keys()
    assert (9, 0) in offered._work_ns


def test_the_expected_work_grows_with_the_time_after_the_window() -> None:
    now_ns = 100 * NS_PER_S
    offered = _offered(_BETTER, load=0.5, seconds=100, window_s=1.0)
    expected = [
        offered.expected_above(_WORSE, now_ns)(horizon_s * NS_PER_S) for horizon_s in (0, 1, 2, 4)
    ]
    assert expected[:2] == [0, 0], "requests that arrive later may start after their window"
    assert expected[2] == pytest.approx(0.5 * NS_PER_S, rel=0.15)
    assert expected[3] == pytest.approx(0.5 * 3 * NS_PER_S, rel=0.25)
    assert offered.expected_above(_BETTER, now_ns)(4 * NS_PER_S) == 0, "equals are not above"


def test_less_is_held_back_while_the_load_is_young() -> None:
    """Fifty or five hundred requests a second: their number makes no difference."""
    for per_s in (50, 500):
        held = [
            _offered(_BETTER, load=4, seconds=age_s, per_s=per_s).held_back(
                _WORSE, round(age_s * NS_PER_S)
            )
            for age_s in (0.2, 0.5, 1, 5)
        ]
        assert held == pytest.approx([0.2 * 0.6, 0.5 * 0.6, 0.6, 0.6], abs=0.02)


@pytest.mark.parametrize(("silent_s", "share"), [(0.1, 1), (0.5, 1), (3, 1), (30, 0.2)])
def test_a_burst_after_silence_is_a_young_load(silent_s: float, share: float) -> None:
    """A load of 20 s whose requests stay for 10 s, silence, and a burst of 0.2 s."""
    offered = OfferedWork()
    starts_s = 20 + silent_s
    times = [i / 100 for i in range(2000)] + [starts_s + i / 500 for i in range(100)]
    for at_s in times:
        now_ns = round(at_s * NS_PER_S)
        offered.add(_BETTER, NS_PER_S / 4, window_ns=0.0, stay_ns=10 * NS_PER_S, now_ns=now_ns)
    now_ns = round((starts_s + 0.2) * NS_PER_S)
    assert offered.held_back(_WORSE, now_ns) == pytest.approx(share * 0.6, abs=0.01)
    before_ns = round((starts_s - 0.05) * NS_PER_S)
    assert 0 <= offered.held_back(_WORSE, before_ns) <= 0.6, "a step that ends earlier"


@given(window_ns=st.floats(-1e10, 1e10), count=st.integers(1, 20))
def test_no_work_is_expected_within_no_time(window_ns: float, count: int) -> None:
    offered = OfferedWork()
    for i in range(count):
        offered.add(_BETTER, 1e9, window_ns=window_ns, stay_ns=0.0, now_ns=i * NS_PER_S)
    assert offered.expected_above(_WORSE, count * NS_PER_S)(0.0) == 0


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
