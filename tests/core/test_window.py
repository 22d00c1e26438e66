"""The ring of per-second counts and the verdict on rolling windows."""

from __future__ import annotations

import time
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.slo.attainment import Attainment, SecondCounts
from goodput_core.slo.targets import SLOClass
from goodput_core.slo.verdict import Reason, VerdictKind
from goodput_core.slo.window import RING_S, WINDOWS_S, RollingVerdict, SecondRing, judge_rolling

CHAT = SLOClass(name="chat", ttft_ms=500, tpot_ms=50, objective=Fraction(99, 100))
BATCH = SLOClass(name="batch", ttft_ms=500, tpot_ms=50, objective=Fraction(95, 100))


def last_counts(ring: SecondRing, name: str = "chat") -> tuple[list[int], list[int]]:
    counts = ring.counts(name, ring.first_s, ring.end_s)
    return list(counts.good), list(counts.total)


def seconds(good: int, total: int, length_s: int) -> SecondCounts:
    """Return counts that are spread evenly over the window."""

    def even(count: int) -> list[int]:
        return [count * (s + 1) // length_s - count * s // length_s for s in range(length_s)]

    totals, misses = even(total), even(total - good)
    return SecondCounts(good=[n - m for n, m in zip(totals, misses, strict=True)], total=totals)


def judged(good: int, total: int, length_s: int, *, outage_s: int = 0) -> RollingVerdict:
    return judge_rolling({"chat": seconds(good, total, length_s)}, [CHAT], outage_s=outage_s)


def test_requests_are_counted_into_their_seconds() -> None:
    ring = SecondRing(100)
    ring.add("chat", 101, good=1, total=1)
    ring.add("chat", 101, good=0, total=1)
    ring.add("chat", 103, good=2, total=2)
    assert (ring.first_s, ring.end_s) == (100, 104)
    assert last_counts(ring) == ([0, 1, 0, 2], [0, 2, 0, 2])
    assert last_counts(ring, "batch") == ([0] * 4, [0] * 4)


def test_a_late_count_goes_into_its_own_second() -> None:
    ring = SecondRing(0)
    ring.add("chat", 5, good=1, total=1)
    ring.add("chat", 2, good=0, total=3)
    assert last_counts(ring)[1] == [0, 0, 3, 0, 0, 1]


def test_the_ring_holds_one_hour() -> None:
    ring = SecondRing(0)
    for second in range(2 * RING_S):
        ring.add("chat", second, good=0, total=second)
    assert ring.first_s == RING_S
    assert last_counts(ring)[1] == list(range(RING_S, 2 * RING_S))
    ring.add("chat", 5, good=1, total=1)
    assert last_counts(ring)[0] == [0] * RING_S, "older than the ring"


@pytest.mark.parametrize("idle_s", [1, RING_S - 1, RING_S, 5 * RING_S])
def test_seconds_without_requests_are_zeros(idle_s: int) -> None:
    ring = SecondRing(0)
    for second in range(RING_S):
        ring.add("chat", second, good=1, total=1)
    ring.advance(RING_S + idle_s)
    left = max(0, RING_S - idle_s)
    assert last_counts(ring)[0] == [1] * left + [0] * (RING_S - left)


def test_earlier_seconds_can_be_added_to_a_ring_that_began_later() -> None:
    ring = SecondRing(1000)
    ring.extend_back(900)
    ring.add("chat", 900, good=1, total=1)
    ring.advance(1000)
    assert ring.first_s == 900
    assert sum(last_counts(ring)[0]) == 1


def test_recent_seconds_are_limited_to_the_ring() -> None:
    ring = SecondRing(100)
    ring.add("chat", 101, good=1, total=2)
    ring.add("batch", 102, good=0, total=0)
    every = ring.recent(0, 103)
    assert (every.first_s, every.end_s) == (100, 103)
    assert every.classes == {"chat": SecondCounts(good=[0, 1, 0], total=[0, 2, 0])}
    assert ring.recent(102, 104).classes == {}
    later = ring.recent(110, 104)
    assert (later.first_s, later.end_s) == (104, 104)


@pytest.mark.parametrize(("first_s", "end_s"), [(9, 12), (10, 21), (15, 15)])
def test_seconds_outside_of_the_ring_are_rejected(first_s: int, end_s: int) -> None:
    ring = SecondRing(10)
    ring.advance(20)
    with pytest.raises(ValueError, match="not in the ring"):
        ring.counts("chat", first_s, end_s)


@given(
    steps=st.lists(
        st.tuples(st.integers(-50, 4000), st.integers(0, 3), st.integers(0, 3)), max_size=30
    )
)
def test_a_ring_equals_a_dictionary_of_seconds(steps: list[tuple[int, int, int]]) -> None:
    ring, known, now = SecondRing(0), dict[int, tuple[int, int]](), 0
    for ahead, good, missed in steps:
        now = max(0, now + ahead)
        if now >= ring.first_s:
            was = known.get(now, (0, 0))
            known[now] = (was[0] + good, was[1] + good + missed)
        ring.add("chat", now, good=good, total=good + missed)
    if steps:
        kept = [known.get(s, (0, 0)) for s in range(ring.first_s, ring.end_s)]
        assert list(zip(*last_counts(ring), strict=True)) == kept


def test_a_busy_service_is_judged_on_five_minutes() -> None:
    found = judged(36_000, 36_000, 3600)
    assert (found.window_s, found.verdict.kind) == (300, VerdictKind.PASS)
    assert found.classes[0].attainment == Attainment(good=3000, total=3000)


def test_a_quiet_service_is_judged_on_an_hour() -> None:
    # 410 clean requests show 99 % with a third of the error.
    assert judged(409, 409, 3600).verdict.reason is Reason.TOO_FEW_REQUESTS
    found = judged(420, 420, 3600)
    assert (found.window_s, found.verdict.kind) == (3600, VerdictKind.PASS)


def test_the_longest_window_is_reported_if_none_decides() -> None:
    found = judged(3_564, 3_600, 3600)
    assert (found.window_s, found.verdict.reason) == (3600, Reason.INTERVAL_SPANS_OBJECTIVE)


def test_a_short_window_may_fail_although_a_longer_one_would_pass() -> None:
    early, late = seconds(66_000, 66_000, 3300), seconds(3_000, 6_000, 300)
    both = SecondCounts(good=[*early.good, *late.good], total=[*early.total, *late.total])
    found = judge_rolling({"chat": both}, [CHAT])
    assert (found.window_s, found.verdict.kind) == (300, VerdictKind.FAIL)


def test_20_of_20_at_99_percent_is_too_few() -> None:
    found = judged(20, 20, 300)
    assert (found.verdict.kind, found.verdict.reason) == (
        VerdictKind.INCONCLUSIVE,
        Reason.TOO_FEW_REQUESTS,
    )


def test_1066_requests_just_below_95_percent_are_not_too_few() -> None:
    counts = {"batch": seconds(1005, 1066, 300)}
    found = judge_rolling(counts, [BATCH])
    assert found.verdict.reason is Reason.INTERVAL_SPANS_OBJECTIVE


def test_a_window_is_shortened_to_the_available_counts() -> None:
    assert judged(2000, 2000, 120).window_s == 120
    assert judged(2000, 2000, 10).verdict.reason is Reason.TOO_FEW_BLOCKS


def test_a_declared_outage_needs_a_longer_window() -> None:
    assert judged(36_000, 36_000, 3600, outage_s=1).window_s == 900
    assert judged(36_000, 36_000, 3600, outage_s=60).verdict.kind is VerdictKind.INCONCLUSIVE


def test_every_class_must_pass_in_the_same_window() -> None:
    counts = {"chat": seconds(36_000, 36_000, 3600), "batch": seconds(90, 90, 3600)}
    found = judge_rolling(counts, [CHAT, BATCH])
    assert (found.window_s, found.verdict.kind) == (3600, VerdictKind.PASS)
    assert [c.name for c in found.classes] == ["chat", "batch"]


def test_windows_grow() -> None:
    assert all(a < b for a, b in pairwise(WINDOWS_S))


def test_an_hour_of_ten_classes_takes_less_than_half_a_second() -> None:
    classes = [
        SLOClass(name=f"c{k}", ttft_ms=1, tpot_ms=1, objective=Fraction(99, 100)) for k in range(10)
    ]
    counts = {c.name: seconds(35_640, 36_000, 3600) for c in classes}
    started = time.process_time()
    judge_rolling(counts, classes)
    assert time.process_time() - started < 0.5
