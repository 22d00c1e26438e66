"""The rules of the verdict on one run."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.errors import ExitCode
from goodput_core.slo.attainment import NO_MISSES, MissCounts, SecondCounts
from goodput_core.slo.conformance import Deviation
from goodput_core.slo.evidence import ClassEvidence, ValidityEvidence, class_evidence
from goodput_core.slo.intervals import Interval, IntervalMethod, requests_needed
from goodput_core.slo.judging import MissReason
from goodput_core.slo.verdict import (
    MIN_BLOCKS,
    Reason,
    Verdict,
    VerdictKind,
    decide,
)

MS = 1_000_000
SECOND = 1_000 * MS


def evidence(
    good: int = 1000,
    total: int = 1000,
    *,
    name: str = "chat",
    objective: str | None = "0.99",
    seconds: int = 300,
    unjudged: int = 0,
    misses: MissCounts = NO_MISSES,
    outage_s: int = 0,
    classes: int = 3,
    burst: bool = False,
) -> ClassEvidence:
    """Return the evidence of evenly spread requests; the misses are spread too, or in one burst."""
    totals, missed = _even(total, seconds), _even(total - good, seconds)
    if burst:
        left, missed = total - good, []
        for n in totals:
            missed.append(min(left, n))
            left -= missed[-1]
    return class_evidence(
        name,
        None if objective is None else Fraction(objective),
        SecondCounts(good=[n - m for n, m in zip(totals, missed, strict=True)], total=totals),
        classes=classes,
        outage_s=outage_s,
        unjudged=unjudged,
        misses=misses,
    )


def burst_of(total: int, *, seconds: int) -> ClassEvidence:
    """Return the evidence of a window without misses whose requests arrive in its first seconds."""
    totals = [*_even(total, seconds), *[0] * (300 - seconds)]
    return class_evidence("chat", Fraction("0.99"), SecondCounts(good=totals, total=totals))


def _even(count: int, seconds: int) -> list[int]:
    return [count * (s + 1) // seconds - count * s // seconds for s in range(seconds)]


def valid(
    *classes: ClassEvidence,
    without_lag: tuple[ClassEvidence, ...] | None = None,
    if_conforming: tuple[ClassEvidence, ...] = (),
    deviations: dict[Deviation, int] | None = None,
    lag_p99_ns: int | None = MS,
    tightest_ttft_ns: int | None = 500 * MS,
    unsent: int = 0,
    requests: int = 0,
    client_errors: int = 0,
    without_client_errors: tuple[ClassEvidence, ...] = (),
    incomplete: str = "",
) -> ValidityEvidence:
    return ValidityEvidence(
        lag_p99_ns=lag_p99_ns,
        tightest_ttft_ns=tightest_ttft_ns,
        unsent=unsent,
        requests=requests,
        client_errors=client_errors,
        without_client_errors=without_client_errors,
        incomplete=incomplete,
        without_lag=classes if without_lag is None else without_lag,
        if_conforming=if_conforming,
        deviations=deviations or {},
    )


def verdict_on(*classes: ClassEvidence) -> Verdict:
    return decide(classes, valid(*classes))


PASS, FAIL, INCONCLUSIVE = VerdictKind.PASS, VerdictKind.FAIL, VerdictKind.INCONCLUSIVE
SPANS = Reason.INTERVAL_SPANS_OBJECTIVE
ONE_CLASS = {
    "1000 of 1000 pass": (evidence(), PASS, Reason.ATTAINED),
    "300 requests without a miss pass": (evidence(300, 300), PASS, Reason.ATTAINED),
    "299 are too few": (evidence(299, 299), INCONCLUSIVE, Reason.TOO_FEW_REQUESTS),
    "30 of 30 are too few": (evidence(30, 30), INCONCLUSIVE, Reason.TOO_FEW_REQUESTS),
    "20 of 20 are too few": (evidence(20, 20), INCONCLUSIVE, Reason.TOO_FEW_REQUESTS),
    "misses far apart may pass": (evidence(1494, 1500), PASS, Reason.ATTAINED),
    "misses in one burst do not": (evidence(1494, 1500, burst=True), INCONCLUSIVE, SPANS),
    "2210 are not too few": (evidence(2100, 2210), FAIL, Reason.BELOW_OBJECTIVE),
    "2210 with one burst are not": (evidence(2186, 2210, burst=True), INCONCLUSIVE, SPANS),
    "objective between the bounds": (evidence(990, 1000), INCONCLUSIVE, SPANS),
    "far below the objective": (evidence(900, 1000), FAIL, Reason.BELOW_OBJECTIVE),
    "0 of 10": (evidence(0, 10, seconds=2), FAIL, Reason.BELOW_OBJECTIVE),
    "too few blocks": (evidence(seconds=MIN_BLOCKS - 1), INCONCLUSIVE, Reason.TOO_FEW_BLOCKS),
    "enough blocks": (evidence(seconds=MIN_BLOCKS), PASS, Reason.ATTAINED),
    "1000 at once in 300 s are one block": (
        burst_of(1000, seconds=1),
        INCONCLUSIVE,
        Reason.TOO_FEW_BLOCKS,
    ),
    "requests in 19 seconds of 300": (
        burst_of(1000, seconds=MIN_BLOCKS - 1),
        INCONCLUSIVE,
        Reason.TOO_FEW_BLOCKS,
    ),
    "requests in 20 seconds of 300": (
        burst_of(1000, seconds=MIN_BLOCKS),
        PASS,
        Reason.ATTAINED,
    ),
    "overload": (evidence(200, 1000, burst=True), FAIL, Reason.BELOW_OBJECTIVE),
    "an outage of 1 s is excluded": (evidence(outage_s=1), PASS, Reason.ATTAINED),
    "an outage of 2 s is not": (evidence(outage_s=2), INCONCLUSIVE, SPANS),
    "3000 s exclude 10 s": (
        evidence(3000, 3000, outage_s=10, seconds=3000),
        PASS,
        Reason.ATTAINED,
    ),
    "unjudged requests": (evidence(500, 1000, unjudged=3), INCONCLUSIVE, Reason.UNJUDGED),
    "no rows": (evidence(0, 0), INCONCLUSIVE, Reason.NO_ROWS),
    "no objective": (evidence(0, 1000, objective=None), INCONCLUSIVE, Reason.NO_OBJECTIVE),
}


@pytest.mark.parametrize(("found", "kind", "reason"), ONE_CLASS.values(), ids=ONE_CLASS)
def test_verdict_on_one_class(found: ClassEvidence, kind: VerdictKind, reason: Reason) -> None:
    verdict = verdict_on(found)
    assert (verdict.kind, verdict.reason) == (kind, reason)


def test_no_class_at_all_is_inconclusive() -> None:
    assert verdict_on().reason is Reason.NO_OBJECTIVE


def test_a_class_without_rows_is_named_and_skipped() -> None:
    verdict = verdict_on(evidence(), evidence(0, 0, name="batch"))
    assert verdict.kind is PASS
    assert verdict.skipped == ("batch",)
    assert "Classes without a judged request: batch." in verdict.sentence


def test_pass_needs_every_class_and_fail_needs_one() -> None:
    good, open_, bad = evidence(), evidence(990, 1000, name="b"), evidence(1, 1000, name="c")
    assert verdict_on(good, open_).kind is INCONCLUSIVE
    assert verdict_on(good, bad).kind is FAIL
    failed = decide([good, open_, bad], valid(good, open_, bad))
    assert failed.kind is FAIL
    assert [v.kind for v in failed.classes] == [
        PASS,
        INCONCLUSIVE,
        FAIL,
    ]
    assert "c: 1 of 1000" in failed.sentence
    assert "b:" not in failed.sentence


def bounds(name: str, *uppers: float) -> ClassEvidence:
    interval = Interval(
        lower=0.1, uppers=uppers, confidence=0.95, effective=500, method=IntervalMethod.BLOCKS
    )
    return replace(evidence(name=name), interval=interval)


def test_two_classes_share_the_error_probability_of_fail() -> None:
    alone = bounds("a", 0.985, 0.991)
    assert verdict_on(alone).kind is FAIL
    assert verdict_on(alone, bounds("b", 1.0, 1.0)).kind is INCONCLUSIVE


def test_a_class_that_cannot_be_judged_has_no_share_of_the_error_probability() -> None:
    unknown = replace(bounds("b", 0.5, 0.5), unjudged=1)
    assert verdict_on(bounds("a", 0.985, 0.991), unknown).kind is FAIL


def test_a_failed_class_no_longer_shares_the_error_probability() -> None:
    sure, unsure = bounds("a", 0.5, 0.5), bounds("b", 0.985, 0.991)
    verdict = verdict_on(sure, unsure)
    assert [v.kind for v in verdict.classes] == [FAIL, FAIL]


def test_a_fail_states_the_bound_of_its_class_alone_and_the_corrected_one() -> None:
    verdict = verdict_on(bounds("a", 0.97214, 0.97847), bounds("b", 1.0, 1.0))
    assert (
        "at most 97.21% with 95% confidence, 97.84% with the correction for 2 classes "
        "(objective 99%)" in verdict.sentence
    )
    assert [one.proof for one in verdict.classes] == [0.97847, None]


def test_a_fail_states_one_bound_if_no_correction_shows() -> None:
    alone, equal = bounds("a", 0.97214), bounds("a", 0.97214, 0.97219)
    for verdict in (verdict_on(alone), verdict_on(equal, bounds("b", 1.0, 1.0))):
        assert "at most 97.21% with 95% confidence (objective 99%)" in verdict.sentence


def test_the_sentence_of_a_single_run_mentions_the_spread_between_runs() -> None:
    for found in (evidence(), evidence(0, 1000), evidence(30, 30)):
        assert "single run" in verdict_on(found).sentence


def test_the_sentence_of_a_pass_names_the_bound_and_the_tolerated_outage() -> None:
    assert verdict_on(evidence()).sentence == (
        "chat: 1000 of 1000 requests met their targets, at least 99.70% with 95% confidence "
        "(objective 99%); the objective would still be met with an unobserved outage of 1 s. "
        "This is a single run: the spread between runs is not included."
    )


def test_the_sentence_of_an_inconclusive_verdict_names_the_window_that_would_decide() -> None:
    assert verdict_on(evidence(993, 1000)).sentence == (
        "chat: 993 of 1000 requests met their targets, between 98.68% and 99.67%, each bound "
        "with 95% confidence (objective 99%); a window of about 37 min would probably decide. "
        "This is a single run: the spread between runs is not included."
    )


def test_no_window_is_estimated_if_the_share_is_the_objective() -> None:
    assert verdict_on(evidence(990, 1000)).sentence == (
        "chat: 990 of 1000 requests met their targets, between 98.30% and 99.45%, each bound "
        "with 95% confidence (objective 99%); even a window of a day would probably not decide. "
        "This is a single run: the spread between runs is not included."
    )


def test_no_window_is_estimated_if_requests_could_not_be_judged() -> None:
    assert "window" not in verdict_on(evidence(993, 1000, unjudged=3)).sentence


def test_the_sentence_names_the_window_that_a_declared_outage_needs() -> None:
    sentence = verdict_on(evidence(outage_s=10)).sentence
    assert "met with an unobserved outage of 1 s, but slo.outageSeconds requires 10 s" in sentence
    assert "requires 10 s; a window of about 53 min would probably decide" in sentence


def test_the_sentence_counts_the_missing_requests_or_seconds() -> None:
    assert (
        "but an objective of 99% requires at least 300 requests, 270 more; "
        "a window of about 55 min would probably decide" in verdict_on(evidence(30, 30)).sentence
    )
    assert (
        "but a PASS requires a window of at least 20 s, 5 s more than the 15 s of this one; "
        "a window of about 20 s would probably decide" in verdict_on(evidence(seconds=15)).sentence
    )


def test_mostly_short_outputs_name_the_option_that_allows_them() -> None:
    many, few = (MissCounts(by_reason={MissReason.SHORT: short}) for short in (800, 400))
    assert "--length-pinning none" in verdict_on(evidence(100, 1000, misses=many)).sentence
    assert "--length-pinning none" not in verdict_on(evidence(100, 1000, misses=few)).sentence
    assert "--length-pinning none" not in verdict_on(evidence()).sentence


CAUSES = {
    "latency": (
        MissCounts(by_reason={MissReason.TTFT: 80, MissReason.TPOT: 70}),
        "80 of 100 misses exceed the TTFT target",
    ),
    "rejections": (
        MissCounts(by_reason={MissReason.SHED: 60, MissReason.TTFT: 40}),
        "60 of 100 misses are rejections for load (429 or 503)",
    ),
    "time-outs": (
        MissCounts(by_reason={MissReason.TIMEOUT: 100}),
        "100 of 100 misses are time-outs",
    ),
    "refused connections": (
        MissCounts(by_reason={MissReason.ERROR: 90, MissReason.TTFT: 10}, without_response=85),
        "85 of 100 misses are connection errors",
    ),
    "HTTP errors": (
        MissCounts(by_reason={MissReason.ERROR: 90, MissReason.TTFT: 10}, without_response=5),
        "85 of 100 misses are error responses",
    ),
}


@pytest.mark.parametrize(("misses", "cause"), CAUSES.values(), ids=CAUSES)
def test_a_fail_names_the_main_cause_of_its_misses(misses: MissCounts, cause: str) -> None:
    assert f"(objective 99%); {cause}. " in verdict_on(evidence(900, 1000, misses=misses)).sentence


def test_only_a_fail_names_the_cause_of_its_misses() -> None:
    misses = MissCounts(by_reason={MissReason.TTFT: 6})
    for found in (evidence(1494, 1500, misses=misses), evidence(294, 300, misses=misses)):
        assert "misses" not in verdict_on(found).sentence


def test_the_sentence_of_a_rolling_window_mentions_neither_client_nor_runs() -> None:
    verdict = decide([evidence()], None)
    assert verdict.kind is PASS
    assert "run" not in verdict.sentence


REJECTED = {
    "a FAIL that becomes a PASS": (evidence(850, 1000), (evidence(850, 851),), 149, True),
    "a FAIL that becomes open": (evidence(900, 1000), (evidence(900, 908),), 92, True),
    "an open verdict that becomes a PASS": (evidence(992, 1000), (evidence(992, 992),), 8, True),
    "a class without another request": (evidence(0, 10), (evidence(0, 0),), 10, True),
    "a FAIL that stays one": (evidence(500, 1000), (evidence(500, 700),), 300, False),
    "a PASS that stays one": (evidence(1999, 2000), (evidence(1999, 1999),), 1, False),
    "no rejection": (evidence(900, 1000), (evidence(900, 1000),), 0, False),
}


@pytest.mark.parametrize(("found", "others", "count", "invalid"), REJECTED.values(), ids=REJECTED)
def test_rejections_invalidate_if_the_verdict_depends_on_them(
    found: ClassEvidence, others: tuple[ClassEvidence, ...], count: int, invalid: bool
) -> None:
    validity = valid(
        found,
        requests=found.attainment.total,
        client_errors=count,
        without_client_errors=others,
    )
    verdict = decide([found], validity)
    assert (verdict.kind is VerdictKind.INVALID) is invalid
    assert (verdict.reason is Reason.CLIENT_ERROR) is invalid
    assert (f"{count} of {found.attainment.total} requests as invalid" in verdict.sentence) is (
        invalid
    )


@pytest.mark.parametrize(
    ("objective", "rejected", "kind"),
    [
        pytest.param("0.8", 100, PASS, id="a-tenth-may-be-absent-from-the-load"),
        pytest.param("0.8", 101, VerdictKind.INVALID, id="more-made-a-pass-too-easy"),
        pytest.param("0.99", 101, FAIL, id="a-lighter-load-does-not-excuse-a-fail"),
    ],
)
def test_a_pass_needs_most_of_the_load(objective: str, rejected: int, kind: VerdictKind) -> None:
    """The class itself has no rejection, but those of another one made the load lighter."""
    found = evidence(950, 1000, objective=objective)
    validity = valid(found, requests=1000, client_errors=rejected, without_client_errors=(found,))
    assert decide([found], validity).kind is kind


def test_a_target_that_no_request_could_connect_to_is_no_evidence_about_the_service() -> None:
    found = evidence(0, 1000)
    verdict = decide([found], replace(valid(found), never_connected=1000))
    assert (verdict.kind, verdict.reason) == (VerdictKind.INVALID, Reason.NEVER_CONNECTED)
    assert "none of 1000 requests could connect to the target" in verdict.sentence


def test_a_bound_that_misses_the_objective_is_not_rounded_up_to_it() -> None:
    interval = Interval(
        lower=0.98999, uppers=(0.995,), confidence=0.95, effective=9e4, method=IntervalMethod.BLOCKS
    )
    verdict = verdict_on(replace(evidence(), interval=interval))
    assert verdict.kind is INCONCLUSIVE
    assert "98.99%" in verdict.sentence


@pytest.mark.parametrize(
    ("lag_ms", "ttft_ms", "invalid"),
    [
        pytest.param(10, 100, False, id="ten-milliseconds-are-always-allowed"),
        pytest.param(11, 100, True, id="more-is-not-allowed-for-a-tight-target"),
        pytest.param(25, 500, False, id="five-percent-of-the-tightest-ttft-is-allowed"),
        pytest.param(26, 500, True, id="more-than-five-percent-is-not"),
        pytest.param(11, None, True, id="without-a-ttft-target-the-limit-is-ten-milliseconds"),
        pytest.param(100, 30_000, False, id="a-tenth-of-a-second-is-allowed-for-a-slow-target"),
        pytest.param(101, 30_000, True, id="more-is-never-allowed"),
        pytest.param(None, 500, False, id="nothing-sent-has-no-lag"),
    ],
)
def test_client_lag_invalidates(lag_ms: int | None, ttft_ms: int | None, invalid: bool) -> None:
    found = evidence()
    verdict = decide(
        [found],
        valid(
            found,
            lag_p99_ns=None if lag_ms is None else lag_ms * MS,
            tightest_ttft_ns=None if ttft_ms is None else ttft_ms * MS,
        ),
    )
    assert (verdict.reason is Reason.CLIENT_LAG) is invalid
    assert (verdict.kind is VerdictKind.INVALID) is invalid


@pytest.mark.parametrize(
    ("as_it_was", "without_lag", "invalid"),
    [
        pytest.param(evidence(900), evidence(900), False, id="the-same-failure"),
        pytest.param(evidence(900), evidence(1000), True, id="lag-made-it-fail"),
        pytest.param(evidence(990), evidence(1000), True, id="lag-made-it-inconclusive"),
        pytest.param(evidence(997), evidence(1000), False, id="passes-with-and-without-lag"),
        pytest.param(
            evidence(900, objective=None), evidence(objective=None), False, id="no-objective"
        ),
    ],
)
def test_lag_that_decides_a_class_invalidates(
    as_it_was: ClassEvidence, without_lag: ClassEvidence, invalid: bool
) -> None:
    verdict = decide([as_it_was], valid(as_it_was, without_lag=(without_lag,)))
    assert (verdict.kind is VerdictKind.INVALID) is invalid
    assert (verdict.reason is Reason.CLIENT_LAG_DECIDES) is invalid


@pytest.mark.parametrize(
    ("as_it_was", "if_conforming", "invalid"),
    [
        pytest.param(evidence(900), evidence(905), False, id="the-same-failure"),
        pytest.param(evidence(900), evidence(1000), True, id="short-outputs-made-it-fail"),
        pytest.param(evidence(990), evidence(1000), True, id="they-made-it-inconclusive"),
        pytest.param(evidence(997), evidence(1000), False, id="passes-in-any-case"),
        pytest.param(
            evidence(900, objective=None), evidence(objective=None), False, id="no-verdict"
        ),
    ],
)
def test_deviations_that_decide_a_class_invalidate_and_are_named(
    as_it_was: ClassEvidence, if_conforming: ClassEvidence, invalid: bool
) -> None:
    deviations = {Deviation.ENDED_EARLY: 100, Deviation.SEVERAL_TOKENS_PER_EVENT: 1000}
    verdict = decide(
        [as_it_was], valid(as_it_was, if_conforming=(if_conforming,), deviations=deviations)
    )
    assert (verdict.kind is VerdictKind.INVALID) is invalid
    assert (verdict.reason is Reason.NON_CONFORMING) is invalid
    assert ("100 outputs ended before the length of their rows" in verdict.sentence) is invalid
    assert "several tokens per event" not in verdict.sentence


@pytest.mark.parametrize(
    ("good", "ratio", "invalid"),
    [
        pytest.param(900, 1.3, True, id="longer-prompts-explain-a-fail"),
        pytest.param(900, 1.09, False, id="slightly-longer-prompts-do-not"),
        pytest.param(900, 0.5, False, id="shorter-prompts-explain-no-fail"),
        pytest.param(900, None, False, id="not-counted"),
        pytest.param(1000, 0.5, True, id="shorter-prompts-explain-a-pass"),
        pytest.param(1000, 0.91, False, id="slightly-shorter-prompts-do-not"),
        pytest.param(1000, 1.3, False, id="longer-prompts-explain-no-pass"),
        pytest.param(990, 1.3, False, id="nothing-to-explain"),
    ],
)
def test_prompts_of_another_length_invalidate_the_verdict_that_they_explain(
    good: int, ratio: float | None, invalid: bool
) -> None:
    found = evidence(good)
    verdict = decide([found], replace(valid(found), prompt_ratio=ratio))
    assert (verdict.reason is Reason.PROMPT_LENGTHS) is invalid
    assert (verdict.kind is VerdictKind.INVALID) is invalid
    assert ("--tokenizer" in verdict.sentence) is invalid


def test_an_invalid_run_names_every_problem() -> None:
    found = evidence(0, 1000)
    verdict = decide(
        [found],
        valid(found, incomplete="interrupted after 20 s", unsent=3, lag_p99_ns=80 * MS),
    )
    assert verdict.kind is VerdictKind.INVALID
    assert verdict.reason is Reason.INCOMPLETE
    assert verdict.sentence == (
        "The run is invalid: it is incomplete, interrupted after 20 s; 3 rows were never sent; "
        "the p99 of the client's send lag is 80 ms, above the limit 25 ms."
    )
    assert [v.kind for v in verdict.classes] == [FAIL]


def test_a_closed_loop_gets_no_verdict_on_any_class_but_may_be_invalid() -> None:
    found = evidence(0, 1000)
    closed = replace(valid(found), closed_loop=True)
    verdict = decide([found, evidence(name="batch")], closed)
    assert (verdict.kind, verdict.reason) == (INCONCLUSIVE, Reason.CLOSED_LOOP)
    assert (verdict.classes, verdict.skipped) == ((), ())
    assert decide([found], replace(closed, unsent=1)).reason is Reason.UNSENT_ROWS


def test_a_shard_gets_no_verdict_on_any_class_but_may_be_invalid() -> None:
    found = evidence(0, 1000)
    shard = replace(valid(found), shard="2 of 4")
    verdict = decide([found, evidence(name="batch")], shard)
    assert (verdict.kind, verdict.reason) == (INCONCLUSIVE, Reason.SHARD)
    assert (verdict.classes, verdict.skipped) == ((), ())
    assert "shard 2 of 4" in verdict.sentence
    assert decide([found], replace(shard, unsent=1)).reason is Reason.UNSENT_ROWS


def test_unsent_rows_invalidate_even_a_run_without_objectives() -> None:
    assert decide([], valid(unsent=1)).reason is Reason.UNSENT_ROWS


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (PASS, ExitCode.PASS),
        (FAIL, ExitCode.FAIL),
        (INCONCLUSIVE, ExitCode.INCONCLUSIVE),
        (VerdictKind.INVALID, ExitCode.INVALID),
    ],
)
def test_each_verdict_has_its_exit_code(kind: VerdictKind, code: ExitCode) -> None:
    assert kind.exit_code is code


def test_reasons_never_change() -> None:
    assert sorted(Reason) == [
        "Attained",
        "Backlog",
        "BelowObjective",
        "ClientError",
        "ClientLag",
        "ClientLagDecides",
        "ClosedLoop",
        "Incomplete",
        "IntervalSpansMargin",
        "IntervalSpansObjective",
        "InvalidRun",
        "NeverConnected",
        "NoObjective",
        "NoRows",
        "NonConforming",
        "PromptLengths",
        "RunOrder",
        "Shard",
        "SinglePair",
        "TooFewBlocks",
        "TooFewRequests",
        "Unjudged",
        "UnsentRows",
        "WorseThanBaseline",
    ]


@st.composite
def any_class(draw: st.DrawFn, name: str) -> ClassEvidence:
    total = draw(st.integers(0, 3000))
    return evidence(
        draw(st.integers(0, total)),
        total,
        name=name,
        objective=draw(st.sampled_from([None, "0.5", "0.9", "0.99"])),
        burst=draw(st.booleans()),
        seconds=draw(st.integers(1, 90)),
        outage_s=draw(st.sampled_from([0, 0, 1, 5])),
        unjudged=draw(st.sampled_from([0, 0, 0, 5])),
    )


@st.composite
def any_classes(draw: st.DrawFn) -> list[ClassEvidence]:
    return [draw(any_class(name)) for name in "abc"[: draw(st.integers(0, 3))]]


@given(classes=any_classes(), unsent=st.integers(0, 2), lag=st.integers(0, 100))
def test_the_verdicts_have_a_fixed_precedence(
    classes: list[ClassEvidence], unsent: int, lag: int
) -> None:
    validity = valid(*classes, unsent=unsent, lag_p99_ns=lag * MS)
    verdict = decide(classes, validity)
    kinds = {v.kind for v in verdict.classes}
    if unsent or lag > 25:
        expected = VerdictKind.INVALID
    elif FAIL in kinds:
        expected = FAIL
    elif INCONCLUSIVE in kinds or not kinds:
        expected = INCONCLUSIVE
    else:
        expected = PASS
    assert verdict.kind is expected
    assert VerdictKind.INVALID not in kinds


@given(classes=any_classes())
def test_pass_and_fail_exclude_each_other(classes: list[ClassEvidence]) -> None:
    verdict = verdict_on(*classes)
    by_name = {c.name: c for c in classes}
    for class_verdict in verdict.classes:
        found = by_name[class_verdict.name]
        assert found.objective is not None
        if found.interval is None:
            assert class_verdict.reason is Reason.UNJUDGED
            continue
        if class_verdict.kind is PASS:
            assert found.interval.lower >= found.objective
            assert found.blocks >= MIN_BLOCKS
            needed = requests_needed(found.objective, found.interval.confidence)
            assert found.busy_s >= min(MIN_BLOCKS, needed)
        if class_verdict.kind is FAIL:
            assert found.interval.upper < found.objective


@given(good=st.integers(0, 2000), more=st.integers(0, 2000))
def test_more_attained_requests_never_make_a_verdict_worse(good: int, more: int) -> None:
    order = [FAIL, INCONCLUSIVE, PASS]
    before = verdict_on(evidence(good, 2000)).kind
    after = verdict_on(evidence(min(2000, good + more), 2000)).kind
    assert order.index(after) >= order.index(before)


@pytest.mark.parametrize(
    ("unjudged", "reason", "text"),
    [
        pytest.param(1500, Reason.UNJUDGED, "could be judged from the records", id="unjudged"),
        pytest.param(0, Reason.NO_ROWS, "because they were cancelled", id="cancelled"),
    ],
)
def test_a_class_whose_requests_could_not_be_judged_is_open_and_not_skipped(
    unjudged: int, reason: Reason, text: str
) -> None:
    nothing = SecondCounts(good=[0] * 300, total=[0] * 300)
    open_class = class_evidence("chat", Fraction("0.99"), nothing, unjudged=unjudged, rows=1500)
    verdict = verdict_on(open_class, replace(evidence(), name="batch"))
    assert (verdict.kind, verdict.reason, verdict.skipped) == (INCONCLUSIVE, reason, ())
    assert verdict.sentence.startswith("chat: none of its 1500 requests could be judged")
    assert text in verdict.sentence
