"""Stalls of the client are taken out of the times of a request, and never add a miss."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.records import finished_request

from goodput_core.slo.judging import JudgementKind, MissReason, judge, without_lag
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.stalls import NO_STALLS, Stall, Stalls
from goodput_core.slo.targets import Targets

MS = 1_000_000


def stalled(*spans_ms: tuple[int, int]) -> Stalls:
    """Return stalls from and to these milliseconds."""
    return Stalls(
        Stall(start_ns=a * MS, end_ns=b * MS, stalled_ns=(b - a) * MS) for a, b in spans_ms
    )


TWO = stalled((100, 220), (300, 310))
SPANS = {
    "before all": (0, 100, 0, 0),
    "a whole stall": (100, 220, 120, 120),
    "its first half": (50, 160, 60, 60),
    "its second half": (160, 250, 60, 60),
    "inside it": (130, 140, 10, 10),
    "both": (0, 400, 130, 120),
    "half of the first and the second": (160, 400, 70, 60),
    "between them": (220, 300, 0, 0),
    "after all": (310, 500, 0, 0),
    "an instant": (150, 150, 0, 0),
}


@pytest.mark.parametrize(("start", "end", "total", "longest"), SPANS.values(), ids=SPANS)
def test_the_stalled_time_between_two_instants_is_found(
    start: int, end: int, total: int, longest: int
) -> None:
    assert TWO.between_ns(start * MS, end * MS) == total * MS
    assert TWO.longest_between_ns(start * MS, end * MS) == longest * MS
    assert NO_STALLS.between_ns(start, end) == NO_STALLS.longest_between_ns(start, end) == 0


def test_merged_stalls_keep_their_time_and_spread_it_evenly() -> None:
    one, two = (
        Stall(start_ns=100, end_ns=120, stalled_ns=20),
        Stall(start_ns=180, end_ns=200, stalled_ns=20),
    )
    merged = one.merged(two)
    assert merged == Stall(start_ns=100, end_ns=200, stalled_ns=40)
    assert Stalls([merged]).total_ns == Stalls([one, two]).total_ns
    assert Stalls([merged]).between_ns(100, 150) == 20


@pytest.mark.parametrize(("start", "end", "time"), [(5, 5, 1), (5, 9, 5), (5, 9, 0), (9, 5, 1)])
def test_a_stall_longer_than_its_span_is_rejected(start: int, end: int, time: int) -> None:
    with pytest.raises(ValueError, match="ns from"):
        Stall(start_ns=start, end_ns=end, stalled_ns=time)


def test_stalls_that_overlap_are_rejected() -> None:
    with pytest.raises(ValueError, match="overlap"):
        stalled((0, 10), (9, 20))
    assert len(stalled((0, 10), (10, 20))) == 2


STARTS = st.lists(st.integers(0, 1000), unique=True, max_size=12).map(sorted)


@given(edges=STARTS, at=st.lists(st.integers(-10, 1010), min_size=3, max_size=3).map(sorted))
def test_stalled_time_adds_up_and_never_exceeds_the_span(edges: list[int], at: list[int]) -> None:
    stalls = Stalls(
        Stall(start_ns=a, end_ns=b, stalled_ns=max(1, (b - a) // 2))
        for a, b in zip(edges[::2], edges[1::2], strict=False)
    )
    first, middle, last = at
    total = stalls.between_ns(first, last)
    assert stalls.between_ns(first, middle) + stalls.between_ns(middle, last) == total
    assert 0 <= stalls.longest_between_ns(first, last) <= total <= last - first
    assert bool(total) == bool(stalls.longest_between_ns(first, last))


TARGETS = Targets(ttft_ns=500 * MS, tpot_ns=50 * MS, tbt_p99_ns=60 * MS, e2e_ns=1500 * MS)


def request(**fields: Any) -> RequestRecord:
    """Return a request that is sent at 0, with its first token at 400 ms and ten of 40 ms."""
    gaps = {"gaps_us": [40_000] * 10}
    return finished_request(**({"ttft_ms": 400, "tpot_ms": 40, "tokens": 11} | gaps | fields))


CASES = {
    "a stall before the first token": (
        request(ttft_ms=510, tpot_ms=40), (350, 470), (MissReason.TTFT,),
    ),
    "a stall between two tokens": (
        request(tpot_ms=52, gaps_us=[40_000] * 5 + [160_000] + [40_000] * 4),
        (600, 720), (MissReason.TPOT, MissReason.TBT),
    ),
    "a stall between two tokens, with the p99 of the gaps": (
        request(gaps_us=(), tbt_p99_us=160_000), (600, 720), (MissReason.TBT,),
    ),
    "a stall before the end": (
        request(end_ns=1600 * MS), (1400, 1590), (MissReason.E2E,),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("record", "span", "reasons"), CASES.values(), ids=CASES)
def test_a_miss_caused_by_a_stall_is_attained_without_it(
    record: RequestRecord, span: tuple[int, int], reasons: tuple[MissReason, ...]
) -> None:
    assert judge(record, TARGETS).reasons == reasons
    assert judge(without_lag(record, stalled(span)), TARGETS).kind is JudgementKind.ATTAINED


def test_a_stall_outside_of_a_request_changes_nothing() -> None:
    record = replace(request(), scheduled_ns=300 * MS, sent_ns=300 * MS)
    assert without_lag(record, stalled((0, 300), (5000, 6000))) is record


def test_a_stall_before_a_late_send_is_counted_once() -> None:
    late = request(lag_ms=120)
    on_time = without_lag(late, stalled((0, 120)))
    assert on_time == without_lag(late)
    assert on_time.ttft_ns == 280 * MS


def test_late_sends_and_stalls_are_both_taken_out() -> None:
    shifted = without_lag(request(lag_ms=120), stalled((100, 220), (500, 510)))
    assert (shifted.scheduled_ns, shifted.first_token_ns) == (120 * MS, 300 * MS)
    assert (shifted.last_token_ns, shifted.end_ns) == (690 * MS, 690 * MS)
    assert shifted.gaps_us == [40_000] * 2 + [30_000] + [40_000] * 7


def test_a_cancelled_request_waited_less_without_a_stall() -> None:
    cancelled = request(
        outcome=Outcome.CANCELLED, first_token_ns=None, last_token_ns=None, end_ns=510 * MS,
        gaps_us=(),
    )  # fmt: skip
    assert judge(cancelled, TARGETS).kind is JudgementKind.MISSED
    assert judge(without_lag(cancelled, TWO), TARGETS).kind is JudgementKind.EXCLUDED


@given(
    edges=st.lists(st.integers(0, 2000), unique=True, max_size=12).map(sorted),
    lag_ms=st.integers(0, 300),
    ttft_ms=st.integers(0, 1000),
    gaps_ms=st.lists(st.integers(0, 200), min_size=1, max_size=20),
    keeps_gaps=st.booleans(),
    outcome=st.sampled_from(Outcome),
)
def test_removing_lag_and_stalls_never_adds_a_miss_or_turns_time_back(
    edges: list[int],
    lag_ms: int,
    ttft_ms: int,
    gaps_ms: list[int],
    keeps_gaps: bool,
    outcome: Outcome,
) -> None:
    stalls = stalled(*zip(edges[::2], edges[1::2], strict=False))
    first = (lag_ms + ttft_ms) * MS
    last = first + sum(gaps_ms) * MS
    record = request(
        lag_ms=lag_ms, first_token_ns=first, last_token_ns=last, end_ns=last, outcome=outcome,
        output_tokens=len(gaps_ms) + 1,
        gaps_us=[gap * 1000 for gap in gaps_ms] if keeps_gaps else (),
        tbt_p99_us=None if keeps_gaps else max(gaps_ms) * 1000,
    )  # fmt: skip
    shifted = without_lag(record, stalls)
    times = (shifted.scheduled_ns, shifted.first_token_ns, shifted.last_token_ns, shifted.end_ns)
    assert all(a <= b for a, b in pairwise(t for t in times if t is not None))
    assert all(gap >= 0 for gap in shifted.gaps_us)
    before, after = judge(record, TARGETS), judge(shifted, TARGETS)
    assert set(after.reasons) <= set(before.reasons)
    if before.kind is not JudgementKind.MISSED:
        assert after == before
