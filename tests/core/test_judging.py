"""Judging one request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.records import answered_request

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


def answer(
    *, ttft_ms: float = 400, tpot_ms: float = 40, tokens: int = 11, lag_ms: float = 0, **more: Any
) -> RequestRecord:
    """A finished answer, scheduled at 1 s; keyword arguments replace its fields."""
    return answered_request(
        scheduled_ns=SECOND, ttft_ms=ttft_ms, tpot_ms=tpot_ms, tokens=tokens, lag_ms=lag_ms, **more
    )


def cancelled(*, waited_ms: float, ttft_ms: float | None = None) -> RequestRecord:
    """A request that the trace cancelled after a wait, with or without a first token."""
    return answer(
        outcome=Outcome.CANCELLED,
        first_token_ns=None if ttft_ms is None else SECOND + round(ttft_ms * MS),
        last_token_ns=None,
        end_ns=SECOND + round(waited_ms * MS),
        output_tokens=0 if ttft_ms is None else 1,
    )


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        pytest.param(answer(), ATTAINED, id="every-target-held"),
        pytest.param(answer(ttft_ms=500, tpot_ms=50), ATTAINED, id="a-bound-met-exactly-holds"),
        pytest.param(
            answer(first_token_ns=SECOND + 500 * MS + 1),
            missed(MissReason.TTFT),
            id="one-nanosecond-over-the-ttft-target",
        ),
        pytest.param(
            answer(last_token_ns=SECOND + 400 * MS + 10 * 50 * MS + 1),
            missed(MissReason.TPOT),
            id="one-nanosecond-over-the-tpot-target-in-ten-gaps",
        ),
        pytest.param(
            answer(ttft_ms=501, tpot_ms=51, tokens=3, pinned_output_tokens=4),
            missed(MissReason.TTFT, MissReason.TPOT, MissReason.SHORT),
            id="several-reasons-at-once",
        ),
        pytest.param(answer(tokens=1), ATTAINED, id="one-token-is-judged-by-the-rest"),
        pytest.param(
            answer(tokens=1, ttft_ms=501),
            missed(MissReason.TTFT),
            id="one-token-can-still-miss-its-ttft",
        ),
        pytest.param(
            answer(tokens=10, pinned_output_tokens=11), missed(MissReason.SHORT), id="short-answer"
        ),
        pytest.param(answer(tokens=12, pinned_output_tokens=11), ATTAINED, id="longer-than-pinned"),
        pytest.param(
            answer(first_token_ns=None, last_token_ns=None, output_tokens=0),
            missed(MissReason.TTFT),
            id="an-answer-without-any-token-misses-its-ttft",
        ),
        pytest.param(answer(outcome=Outcome.SHED), missed(MissReason.SHED), id="shed"),
        pytest.param(answer(outcome=Outcome.ERROR), missed(MissReason.ERROR), id="error"),
        pytest.param(answer(outcome=Outcome.TIMEOUT), missed(MissReason.TIMEOUT), id="timeout"),
        pytest.param(
            answer(outcome=Outcome.UNSENT, sent_ns=None), missed(MissReason.UNSENT), id="unsent"
        ),
        pytest.param(cancelled(waited_ms=300), EXCLUDED, id="cancelled-before-the-ttft-target"),
        pytest.param(cancelled(waited_ms=500), EXCLUDED, id="cancelled-at-the-ttft-target"),
        pytest.param(
            cancelled(waited_ms=501),
            missed(MissReason.TTFT),
            id="cancelled-after-the-ttft-target-without-a-token",
        ),
        pytest.param(
            cancelled(waited_ms=2000, ttft_ms=300), EXCLUDED, id="cancelled-after-a-timely-token"
        ),
        pytest.param(
            cancelled(waited_ms=2000, ttft_ms=700),
            missed(MissReason.TTFT),
            id="cancelled-after-a-late-token",
        ),
        pytest.param(
            replace(cancelled(waited_ms=0), end_ns=None, cancel_after_ns=501 * MS),
            missed(MissReason.TTFT),
            id="when-it-was-cancelled-is-read-from-the-trace-if-need-be",
        ),
        pytest.param(
            replace(cancelled(waited_ms=0), end_ns=None),
            EXCLUDED,
            id="cancelled-nobody-knows-when",
        ),
    ],
)
def test_request_is_judged(record: RequestRecord, expected: Judgement) -> None:
    assert judge(record, TARGETS) == expected


@pytest.mark.parametrize("outcome", list(Outcome))
def test_request_without_targets_is_unjudged_however_it_ended(outcome: Outcome) -> None:
    assert judge(answer(outcome=outcome), Targets()) == UNJUDGED


def test_cancelled_request_without_a_ttft_target_is_excluded() -> None:
    assert judge(cancelled(waited_ms=9_000), Targets(e2e_ns=SECOND)) == EXCLUDED


def test_e2e_counts_from_the_scheduled_arrival() -> None:
    record = answer(ttft_ms=100, tpot_ms=10, tokens=11)
    assert judge(record, Targets(e2e_ns=200 * MS)) == ATTAINED
    assert judge(record, Targets(e2e_ns=200 * MS - 1)) == missed(MissReason.E2E)


GAPS_US = [20_000] * 98 + [90_000, 90_000]


@pytest.mark.parametrize(
    ("gaps_us", "p99_us", "expected"),
    [
        pytest.param([20_000] * 99 + [90_000], None, ATTAINED, id="one-gap-of-100-may-be-long"),
        pytest.param(GAPS_US, None, missed(MissReason.TBT), id="two-gaps-of-100-may-not"),
        pytest.param((), 60_000, ATTAINED, id="gaps-dropped-but-their-p99-kept"),
        pytest.param((), 60_001, missed(MissReason.TBT), id="gaps-dropped-and-their-p99-too-long"),
        pytest.param((), None, UNJUDGED, id="neither-gaps-nor-p99-kept"),
    ],
)
def test_tbt_is_the_p99_of_the_requests_own_gaps(
    gaps_us: list[int], p99_us: int | None, expected: Judgement
) -> None:
    record = answer(tokens=101, gaps_us=gaps_us, tbt_p99_us=p99_us)
    assert judge(record, Targets(ttft_ns=SECOND, tbt_p99_ns=60 * MS)) == expected


def test_one_token_has_no_gaps_to_miss() -> None:
    assert judge(answer(tokens=1), Targets(tbt_p99_ns=1)) == ATTAINED


def test_another_miss_decides_even_where_gaps_are_unknown() -> None:
    targets = Targets(ttft_ns=1, tbt_p99_ns=60 * MS)
    assert judge(answer(), targets) == missed(MissReason.TTFT)


def test_the_rows_own_targets_win_over_its_class() -> None:
    record = answer(targets=Targets(ttft_ns=100 * MS, e2e_ns=SECOND))
    assert targets_for(record, {"chat": CHAT}) == Targets(
        ttft_ns=100 * MS, tpot_ns=50 * MS, e2e_ns=SECOND
    )


def test_a_class_without_a_promise_leaves_the_rows_own_targets() -> None:
    assert targets_for(answer(), {"chat": CHAT}) == TARGETS
    assert targets_for(answer(slo_class="other"), {"chat": CHAT}).empty
    assert targets_for(answer(slo_class="", targets=TARGETS), {}) == TARGETS


def test_without_lag_times_count_from_the_actual_send() -> None:
    late = answer(ttft_ms=510, lag_ms=20)
    assert judge(late, TARGETS) == missed(MissReason.TTFT)
    assert judge(without_lag(late), TARGETS) == ATTAINED
    assert without_lag(late).ttft_ns == late.ttft_from_send_ns


def test_without_lag_a_cancelled_request_waited_less() -> None:
    late = replace(cancelled(waited_ms=510), sent_ns=SECOND + 20 * MS)
    assert judge(late, TARGETS) == missed(MissReason.TTFT)
    assert judge(without_lag(late), TARGETS) == EXCLUDED
    known_from_trace = replace(late, end_ns=None, cancel_after_ns=510 * MS)
    assert judge(without_lag(known_from_trace), TARGETS) == EXCLUDED


def test_a_request_sent_on_time_or_never_has_no_lag_to_take_out() -> None:
    for record in (answer(), answer(sent_ns=None, outcome=Outcome.UNSENT)):
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
def test_a_faster_answer_never_turns_attained_into_missed(
    targets: Targets, ttft: int, gaps: list[int], saved: int, factor: int
) -> None:
    def with_times(ttft_ms: int, gaps_us: list[int]) -> RequestRecord:
        first = SECOND + ttft_ms * MS
        last = first + sum(gaps_us) * 1_000
        return answer(
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
def test_taking_lag_out_never_makes_a_request_worse(
    targets: Targets, ttft: int, lag: int, outcome: Outcome
) -> None:
    record = answer(ttft_ms=ttft, lag_ms=lag, outcome=outcome)
    before, after = judge(record, targets), judge(without_lag(record), targets)
    assert set(after.reasons) <= set(before.reasons)
    if before.kind is not JudgementKind.MISSED:
        assert after == before
