"""Judging one request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.records import finished_request

from goodput_core.slo.judging import (
    Judgement,
    JudgementKind,
    MissReason,
    judge,
    targets_for,
    without_lag,
)
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import SLOClass, Targets

MS = 1_000_000
SECOND = 1_000 * MS
CHAT = SLOClass(name="chat", ttft_ms=500, tpot_ms=50)
TARGETS = CHAT.targets
ATTAINED = Judgement(kind=JudgementKind.ATTAINED)
EXCLUDED = Judgement(kind=JudgementKind.EXCLUDED)
UNJUDGED = Judgement(kind=JudgementKind.UNJUDGED)


def missed(*reasons: MissReason) -> Judgement:
    return Judgement(kind=JudgementKind.MISSED, reasons=reasons)


def finished(
    *, ttft_ms: float = 400, tpot_ms: float = 40, tokens: int = 11, lag_ms: float = 0, **more: Any
) -> RequestRecord:
    """Return a finished request, scheduled at 1 s; keyword arguments replace its fields."""
    return finished_request(
        scheduled_ns=SECOND, ttft_ms=ttft_ms, tpot_ms=tpot_ms, tokens=tokens, lag_ms=lag_ms, **more
    )


def cancelled(*, waited_ms: float, ttft_ms: float | None = None) -> RequestRecord:
    """Return a request that the trace cancelled after a wait, with or without a first token."""
    return finished(
        outcome=Outcome.CANCELLED,
        first_token_ns=None if ttft_ms is None else SECOND + round(ttft_ms * MS),
        last_token_ns=None,
        end_ns=SECOND + round(waited_ms * MS),
        output_tokens=0 if ttft_ms is None else 1,
    )


JUDGED = {
    "every target met": (finished(), ATTAINED),
    "equal to the targets": (finished(ttft_ms=500, tpot_ms=50), ATTAINED),
    "1 ns above the TTFT target": (
        finished(first_token_ns=SECOND + 500 * MS + 1),
        missed(MissReason.TTFT),
    ),
    "1 ns above the TPOT target in ten gaps": (
        finished(last_token_ns=SECOND + 400 * MS + 10 * 50 * MS + 1),
        missed(MissReason.TPOT),
    ),
    "several reasons at once": (
        finished(ttft_ms=501, tpot_ms=51, tokens=3, pinned_output_tokens=4),
        missed(MissReason.TTFT, MissReason.TPOT, MissReason.SHORT),
    ),
    "one token is judged by the other targets": (finished(tokens=1), ATTAINED),
    "one token can miss its TTFT": (finished(tokens=1, ttft_ms=501), missed(MissReason.TTFT)),
    "short output": (finished(tokens=10, pinned_output_tokens=11), missed(MissReason.SHORT)),
    "longer than pinned": (finished(tokens=12, pinned_output_tokens=11), ATTAINED),
    "no token": (
        finished(first_token_ns=None, last_token_ns=None, output_tokens=0),
        missed(MissReason.TTFT),
    ),
    "shed": (finished(outcome=Outcome.SHED), missed(MissReason.SHED)),
    "error": (finished(outcome=Outcome.ERROR), missed(MissReason.ERROR)),
    "timeout": (finished(outcome=Outcome.TIMEOUT), missed(MissReason.TIMEOUT)),
    "unsent": (finished(outcome=Outcome.UNSENT, sent_ns=None), missed(MissReason.UNSENT)),
    "cancelled before the TTFT target": (cancelled(waited_ms=300), EXCLUDED),
    "cancelled at the TTFT target": (cancelled(waited_ms=500), EXCLUDED),
    "cancelled after it without a token": (cancelled(waited_ms=501), missed(MissReason.TTFT)),
    "cancelled after a timely token": (cancelled(waited_ms=2000, ttft_ms=300), EXCLUDED),
    "cancelled after a late token": (
        cancelled(waited_ms=2000, ttft_ms=700),
        missed(MissReason.TTFT),
    ),
    "cancelled after the wait in the trace": (
        replace(cancelled(waited_ms=0), end_ns=None, cancel_after_ns=501 * MS),
        missed(MissReason.TTFT),
    ),
    "cancelled at an unknown time": (replace(cancelled(waited_ms=0), end_ns=None), EXCLUDED),
}


@pytest.mark.parametrize(("record", "expected"), JUDGED.values(), ids=JUDGED)
def test_request_is_judged(record: RequestRecord, expected: Judgement) -> None:
    assert judge(record, TARGETS) == expected


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_request_without_targets_is_unjudged_with_any_outcome(outcome: Outcome) -> None:
    assert judge(finished(outcome=outcome), Targets()) == UNJUDGED


def test_cancelled_request_without_a_ttft_target_is_excluded() -> None:
    assert judge(cancelled(waited_ms=9_000), Targets(e2e_ns=SECOND)) == EXCLUDED


def test_e2e_counts_from_the_scheduled_arrival() -> None:
    record = finished(ttft_ms=100, tpot_ms=10, tokens=11)
    assert judge(record, Targets(e2e_ns=200 * MS)) == ATTAINED
    assert judge(record, Targets(e2e_ns=200 * MS - 1)) == missed(MissReason.E2E)


GAPS_US = [20_000] * 98 + [90_000, 90_000]


@pytest.mark.parametrize(
    ("gaps_us", "p99_us", "expected"),
    [
        pytest.param([20_000] * 99 + [90_000], None, ATTAINED, id="one-gap-of-100-may-be-long"),
        pytest.param(GAPS_US, None, missed(MissReason.TBT), id="two-gaps-of-100-may-not"),
        pytest.param((), 60_000, ATTAINED, id="only-the-p99-recorded"),
        pytest.param((), 60_001, missed(MissReason.TBT), id="only-the-p99-recorded-and-too-long"),
        pytest.param((), None, UNJUDGED, id="neither-gaps-nor-p99-recorded"),
    ],
)
def test_tbt_is_the_p99_of_the_requests_own_gaps(
    gaps_us: list[int], p99_us: int | None, expected: Judgement
) -> None:
    record = finished(tokens=101, gaps_us=gaps_us, tbt_p99_us=p99_us)
    assert judge(record, Targets(ttft_ns=SECOND, tbt_p99_ns=60 * MS)) == expected


def test_one_token_has_no_gaps_to_miss() -> None:
    assert judge(finished(tokens=1), Targets(tbt_p99_ns=1)) == ATTAINED


def test_tokens_of_one_event_have_no_gaps_to_miss() -> None:
    targets = Targets(ttft_ns=SECOND, tpot_ns=1, tbt_p99_ns=1)
    assert judge(finished(tokens=11, tpot_ms=0), targets) == ATTAINED
    late = finished(tokens=11, ttft_ms=1_001, tpot_ms=0)
    assert judge(late, targets) == missed(MissReason.TTFT)
    unseen = finished(tokens=11, first_token_ns=None, last_token_ns=None)
    assert judge(unseen, Targets(tbt_p99_ns=1)) == UNJUDGED


def test_another_missed_target_decides_if_gaps_are_unknown() -> None:
    targets = Targets(ttft_ns=1, tbt_p99_ns=60 * MS)
    assert judge(finished(), targets) == missed(MissReason.TTFT)


def test_the_rows_own_targets_override_those_of_its_class() -> None:
    record = finished(targets=Targets(ttft_ns=100 * MS, e2e_ns=SECOND))
    assert targets_for(record, {"chat": CHAT}) == Targets(
        ttft_ns=100 * MS, tpot_ns=50 * MS, e2e_ns=SECOND
    )


def test_an_unknown_class_has_only_the_rows_own_targets() -> None:
    assert targets_for(finished(), {"chat": CHAT}) == TARGETS
    assert targets_for(finished(slo_class="other"), {"chat": CHAT}).empty
    assert targets_for(finished(slo_class="", targets=TARGETS), {}) == TARGETS


def test_without_lag_times_are_measured_from_the_actual_send() -> None:
    late = finished(ttft_ms=510, lag_ms=20)
    assert judge(late, TARGETS) == missed(MissReason.TTFT)
    assert judge(without_lag(late), TARGETS) == ATTAINED
    assert without_lag(late).ttft_ns == late.ttft_from_send_ns


def test_without_lag_a_cancelled_request_waited_less() -> None:
    late = replace(cancelled(waited_ms=510), sent_ns=SECOND + 20 * MS)
    assert judge(late, TARGETS) == missed(MissReason.TTFT)
    assert judge(without_lag(late), TARGETS) == EXCLUDED
    known_from_trace = replace(late, end_ns=None, cancel_after_ns=510 * MS)
    assert judge(without_lag(known_from_trace), TARGETS) == EXCLUDED


def test_a_request_without_lag_is_unchanged() -> None:
    for record in (finished(), finished(sent_ns=None, outcome=Outcome.UNSENT)):
        assert without_lag(record) is record


TIMES = st.integers(0, 2_000)
BOUNDS = st.none() | TIMES.map(lambda ms: ms * MS)
ANY_TARGETS = st.builds(Targets, ttft_ns=BOUNDS, tpot_ns=BOUNDS, tbt_p99_ns=BOUNDS, e2e_ns=BOUNDS)
RANK = {JudgementKind.ATTAINED: 1, JudgementKind.MISSED: 0}


@given(
    targets=ANY_TARGETS,
    ttft=TIMES,
    gaps=st.lists(TIMES, max_size=30),
    saved=TIMES,
    factor=st.integers(0, 100),
)
def test_a_faster_response_never_turns_attained_into_missed(
    targets: Targets, ttft: int, gaps: list[int], saved: int, factor: int
) -> None:
    def with_times(ttft_ms: int, gaps_us: list[int]) -> RequestRecord:
        first = SECOND + ttft_ms * MS
        last = first + sum(gaps_us) * 1_000
        return finished(
            first_token_ns=first,
            last_token_ns=last,
            end_ns=last,
            output_tokens=len(gaps_us) + 1,
            gaps_us=gaps_us,
        )

    slow = judge(with_times(ttft, [g * 1_000 for g in gaps]), targets)
    fast = judge(with_times(max(0, ttft - saved), [g * 10 * factor for g in gaps]), targets)
    if slow.kind in RANK:
        assert RANK[fast.kind] >= RANK[slow.kind]
        assert set(fast.reasons) <= set(slow.reasons)


@given(targets=ANY_TARGETS, ttft=TIMES, lag=TIMES, outcome=st.sampled_from(Outcome))
def test_removing_lag_never_adds_a_miss(
    targets: Targets, ttft: int, lag: int, outcome: Outcome
) -> None:
    record = finished(ttft_ms=ttft, lag_ms=lag, outcome=outcome)
    before, after = judge(record, targets), judge(without_lag(record), targets)
    assert set(after.reasons) <= set(before.reasons)
    if before.kind is not JudgementKind.MISSED:
        assert after == before
