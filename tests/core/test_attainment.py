"""Counts of judged requests."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.records import request_record

from goodput_core.slo.attainment import Attainment, AttainmentTally, goodput_per_s
from goodput_core.slo.judging import Judgement, JudgementKind, MissReason, judge
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import SLOClass

SECOND = 1_000_000_000
MS = 1_000_000
ATTAINED = Judgement(kind=JudgementKind.ATTAINED)


def record(slo_class: str, outcome: Outcome = Outcome.OK) -> RequestRecord:
    return request_record(slo_class=slo_class, outcome=outcome)


def missed(*reasons: MissReason) -> Judgement:
    return Judgement(kind=JudgementKind.MISSED, reasons=reasons)


def test_share_is_an_exact_fraction() -> None:
    assert Attainment(good=1, total=3).share == Fraction(1, 3)
    assert Attainment(good=990, total=1000).share == Fraction("0.99")


def test_zero_judged_requests_have_no_share() -> None:
    assert Attainment(good=0, total=0).share is None


@pytest.mark.parametrize(("good", "total"), [(2, 1), (-1, 1), (0, -1)])
def test_impossible_counts_are_rejected(good: int, total: int) -> None:
    with pytest.raises(ValueError, match="cannot be counts"):
        Attainment(good=good, total=total)


def test_attainments_add_up_exactly() -> None:
    together = Attainment(good=1, total=3) + Attainment(good=2, total=3)
    assert together == Attainment(good=3, total=6)


def test_goodput_is_good_per_second_of_the_window() -> None:
    assert goodput_per_s(1000, 300 * SECOND) == Fraction(10, 3)
    assert goodput_per_s(1, 1) == SECOND


def test_two_of_four_requests_meet_both_targets() -> None:
    targets = SLOClass(name="chat", ttft_ms=300, tpot_ms=30).targets
    latencies = [(120, 25), (450, 22), (180, 42), (190, 27)]
    tally = AttainmentTally()
    for ttft_ms, tpot_ms in latencies:
        first_ns = ttft_ms * MS
        one = RequestRecord(
            request_id="r",
            slo_class="chat",
            scheduled_ns=0,
            outcome=Outcome.OK,
            sent_ns=0,
            first_token_ns=first_ns,
            last_token_ns=first_ns + 10 * tpot_ms * MS,
            end_ns=first_ns + 10 * tpot_ms * MS,
            output_tokens=11,
        )
        tally.add(one, judge(one, targets))
    judged = tally.overall().attainment
    assert judged == Attainment(good=2, total=4)
    assert goodput_per_s(judged.total, 10 * SECOND) == Fraction("0.40"), "throughput"
    assert goodput_per_s(judged.good, 10 * SECOND) == Fraction("0.20")


def test_tally_counts_by_class_outcome_and_reason() -> None:
    tally = AttainmentTally(["chat", "batch"])
    tally.add(record("chat"), ATTAINED)
    tally.add(record("chat"), missed(MissReason.TTFT, MissReason.TPOT))
    tally.add(record("chat", Outcome.SHED), missed(MissReason.SHED))
    tally.add(record("chat", Outcome.CANCELLED), Judgement(kind=JudgementKind.EXCLUDED))
    tally.add(record("extra"), Judgement(kind=JudgementKind.UNJUDGED))

    chat, batch, extra = tally.by_class()
    assert chat.attainment == Attainment(good=1, total=3)
    assert (chat.excluded, chat.unjudged, chat.rows) == (1, 0, 4)
    assert chat.outcomes == {Outcome.OK: 2, Outcome.SHED: 1, Outcome.CANCELLED: 1}
    assert chat.misses.by_reason == {MissReason.TTFT: 1, MissReason.TPOT: 1, MissReason.SHED: 1}
    assert (batch.name, batch.rows, batch.attainment.share) == ("batch", 0, None)
    assert (extra.name, extra.unjudged) == ("extra", 1)

    overall = tally.overall()
    assert overall.attainment == Attainment(good=1, total=3)
    assert overall.rows == 5
    assert sum(overall.outcomes.values()) == 5


def test_an_empty_tally_has_no_attainment() -> None:
    assert AttainmentTally().by_class() == ()
    assert AttainmentTally().overall().attainment.share is None


JUDGEMENTS = st.sampled_from(
    [ATTAINED, *(Judgement(kind=kind) for kind in JudgementKind), missed(MissReason.TTFT)]
)
ROWS = st.lists(st.tuples(st.sampled_from("abc"), JUDGEMENTS), max_size=50)


@given(rows=ROWS)
def test_classes_add_up_to_the_overall_counts(rows: list[tuple[str, Judgement]]) -> None:
    tally = AttainmentTally("a")
    for name, judgement in rows:
        tally.add(record(name), judgement)
    total = sum((c.attainment for c in tally.by_class()), Attainment(good=0, total=0))
    assert total == tally.overall().attainment
    assert tally.overall().rows == len(rows) == sum(c.rows for c in tally.by_class())


@given(rows=ROWS)
def test_attainment_never_falls_when_another_request_attains(
    rows: list[tuple[str, Judgement]],
) -> None:
    tally = AttainmentTally()
    for name, judgement in rows:
        tally.add(record(name), judgement)
    before = tally.overall().attainment.share
    tally.add(record("a"), ATTAINED)
    after = tally.overall().attainment.share
    assert after is not None
    assert before is None or after >= before
