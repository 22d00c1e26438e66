"""The rules of the verdict on one run."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.errors import ExitCode
from goodput_core.slo.attainment import SecondCounts
from goodput_core.slo.intervals import Interval, IntervalMethod
from goodput_core.slo.verdict import (
    MIN_BLOCKS,
    ClassEvidence,
    Reason,
    ValidityEvidence,
    Verdict,
    VerdictKind,
    class_evidence,
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
    short: int = 0,
    outage_s: int = 0,
    classes: int = 3,
    burst: bool = False,
) -> ClassEvidence:
    """A class whose requests, and whose misses unless in one burst, lie evenly in the window."""
    totals, misses = _even(total, seconds), _even(total - good, seconds)
    if burst:
        left, misses = total - good, []
        for n in totals:
            misses.append(min(left, n))
            left -= misses[-1]
    return class_evidence(
        name,
        None if objective is None else Fraction(objective),
        SecondCounts(good=[n - m for n, m in zip(totals, misses, strict=True)], total=totals),
        classes=classes,
        outage_s=outage_s,
        unjudged=unjudged,
        short=short,
    )


def _even(count: int, seconds: int) -> list[int]:
    return [count * (s + 1) // seconds - count * s // seconds for s in range(seconds)]


def valid(
    *classes: ClassEvidence,
    without_lag: tuple[ClassEvidence, ...] | None = None,
    lag_p99_ns: int | None = MS,
    tightest_ttft_ns: int | None = 500 * MS,
    unsent: int = 0,
    missed: int = 0,
    client_errors: int = 0,
    baseline_answered: bool = False,
    incomplete: str = "",
) -> ValidityEvidence:
    return ValidityEvidence(
        lag_p99_ns=lag_p99_ns,
        tightest_ttft_ns=tightest_ttft_ns,
        unsent=unsent,
        missed=missed,
        client_errors=client_errors,
        baseline_answered=baseline_answered,
        incomplete=incomplete,
        without_lag=classes if without_lag is None else without_lag,
    )


def verdict_on(*classes: ClassEvidence) -> Verdict:
    return decide(classes, valid(*classes))


@pytest.mark.parametrize(
    ("found", "kind", "reason"),
    [
        pytest.param(evidence(), VerdictKind.PASS, Reason.ATTAINED, id="1000-of-1000-pass"),
        pytest.param(
            evidence(300, 300), VerdictKind.PASS, Reason.ATTAINED, id="300-clean-requests-show-99"
        ),
        pytest.param(
            evidence(299, 299),
            VerdictKind.INCONCLUSIVE,
            Reason.TOO_FEW_REQUESTS,
            id="299-clean-requests-do-not",
        ),
        pytest.param(
            evidence(30, 30),
            VerdictKind.INCONCLUSIVE,
            Reason.TOO_FEW_REQUESTS,
            id="30-of-30-proves-nothing",
        ),
        pytest.param(
            evidence(20, 20),
            VerdictKind.INCONCLUSIVE,
            Reason.TOO_FEW_REQUESTS,
            id="20-of-20-proves-nothing",
        ),
        pytest.param(
            evidence(1494, 1500), VerdictKind.PASS, Reason.ATTAINED, id="misses-far-apart-may-pass"
        ),
        pytest.param(
            evidence(1494, 1500, burst=True),
            VerdictKind.INCONCLUSIVE,
            Reason.INTERVAL_SPANS_OBJECTIVE,
            id="as-many-misses-in-one-burst-do-not",
        ),
        pytest.param(
            evidence(2100, 2210),
            VerdictKind.FAIL,
            Reason.BELOW_OBJECTIVE,
            id="2210-requests-are-never-too-few",
        ),
        pytest.param(
            evidence(2186, 2210, burst=True),
            VerdictKind.INCONCLUSIVE,
            Reason.INTERVAL_SPANS_OBJECTIVE,
            id="2210-requests-are-never-too-few-in-one-burst-either",
        ),
        pytest.param(
            evidence(990, 1000),
            VerdictKind.INCONCLUSIVE,
            Reason.INTERVAL_SPANS_OBJECTIVE,
            id="the-objective-lies-between-the-bounds",
        ),
        pytest.param(
            evidence(900, 1000), VerdictKind.FAIL, Reason.BELOW_OBJECTIVE, id="far-below-fails"
        ),
        pytest.param(
            evidence(0, 10, seconds=2),
            VerdictKind.FAIL,
            Reason.BELOW_OBJECTIVE,
            id="nothing-attained-fails-even-on-ten-requests",
        ),
        pytest.param(
            evidence(seconds=MIN_BLOCKS - 1),
            VerdictKind.INCONCLUSIVE,
            Reason.TOO_FEW_BLOCKS,
            id="too-few-blocks",
        ),
        pytest.param(
            evidence(seconds=MIN_BLOCKS), VerdictKind.PASS, Reason.ATTAINED, id="enough-blocks"
        ),
        pytest.param(
            evidence(200, 1000, burst=True),
            VerdictKind.FAIL,
            Reason.BELOW_OBJECTIVE,
            id="an-overloaded-run-fails",
        ),
        pytest.param(
            evidence(outage_s=1), VerdictKind.PASS, Reason.ATTAINED, id="a-declared-outage-fits"
        ),
        pytest.param(
            evidence(outage_s=2),
            VerdictKind.INCONCLUSIVE,
            Reason.INTERVAL_SPANS_OBJECTIVE,
            id="a-longer-declared-outage-takes-a-longer-window",
        ),
        pytest.param(
            evidence(3000, 3000, outage_s=10, seconds=3000),
            VerdictKind.PASS,
            Reason.ATTAINED,
            id="3000-s-exclude-10-s-of-outage",
        ),
        pytest.param(
            evidence(500, 1000, unjudged=3),
            VerdictKind.INCONCLUSIVE,
            Reason.UNJUDGED,
            id="requests-that-could-not-be-judged",
        ),
        pytest.param(
            evidence(0, 0), VerdictKind.INCONCLUSIVE, Reason.NO_ROWS, id="a-class-without-rows"
        ),
        pytest.param(
            evidence(0, 1000, objective=None),
            VerdictKind.INCONCLUSIVE,
            Reason.NO_OBJECTIVE,
            id="a-class-without-objective-is-never-judged",
        ),
    ],
)
def test_verdict_on_one_class(found: ClassEvidence, kind: VerdictKind, reason: Reason) -> None:
    verdict = verdict_on(found)
    assert (verdict.kind, verdict.reason) == (kind, reason)


def test_no_class_at_all_is_inconclusive() -> None:
    assert verdict_on().reason is Reason.NO_OBJECTIVE


def test_a_class_without_rows_is_named_and_skipped() -> None:
    verdict = verdict_on(evidence(), evidence(0, 0, name="batch"))
    assert verdict.kind is VerdictKind.PASS
    assert verdict.skipped == ("batch",)
    assert "Skipped, without a judged request: batch." in verdict.sentence


def test_pass_needs_every_class_and_one_class_is_enough_to_fail() -> None:
    good, open_, bad = evidence(), evidence(990, 1000, name="b"), evidence(1, 1000, name="c")
    assert verdict_on(good, open_).kind is VerdictKind.INCONCLUSIVE
    assert verdict_on(good, bad).kind is VerdictKind.FAIL
    failed = decide([good, open_, bad], valid(good, open_, bad))
    assert failed.kind is VerdictKind.FAIL
    assert [v.kind for v in failed.classes] == [
        VerdictKind.PASS,
        VerdictKind.INCONCLUSIVE,
        VerdictKind.FAIL,
    ]
    assert "c: 1 of 1000" in failed.sentence
    assert "b:" not in failed.sentence


def bounds(name: str, *uppers: float) -> ClassEvidence:
    interval = Interval(
        lower=0.1, uppers=uppers, confidence=0.95, effective=500, method=IntervalMethod.BLOCKS
    )
    return replace(evidence(name=name), interval=interval)


def test_two_classes_share_the_error_of_a_false_alarm() -> None:
    alone = bounds("a", 0.985, 0.991)
    assert verdict_on(alone).kind is VerdictKind.FAIL
    assert verdict_on(alone, bounds("b", 1.0, 1.0)).kind is VerdictKind.INCONCLUSIVE


def test_a_class_that_cannot_be_judged_takes_no_share_of_the_error() -> None:
    unknown = replace(bounds("b", 0.5, 0.5), unjudged=1)
    assert verdict_on(bounds("a", 0.985, 0.991), unknown).kind is VerdictKind.FAIL


def test_a_class_that_fails_leaves_its_share_of_the_error_to_the_others() -> None:
    sure, unsure = bounds("a", 0.5, 0.5), bounds("b", 0.985, 0.991)
    verdict = verdict_on(sure, unsure)
    assert [v.kind for v in verdict.classes] == [VerdictKind.FAIL, VerdictKind.FAIL]


def test_a_single_run_says_that_it_excludes_the_spread_between_runs() -> None:
    for found in (evidence(), evidence(0, 1000), evidence(30, 30)):
        assert "single run" in verdict_on(found).sentence


def test_the_sentence_of_a_pass_names_the_bound_and_the_excluded_outage() -> None:
    assert verdict_on(evidence()).sentence == (
        "chat: 1000 of 1000 attained, at least 99.70% with 95% confidence, the objective is 99%; "
        "it would still be met with one unobserved outage of 1 s. "
        "This is a single run: the spread between runs is not included."
    )


def test_the_sentence_of_an_open_verdict_says_what_to_do() -> None:
    assert verdict_on(evidence(990, 1000)).sentence == (
        "chat: 990 of 1000 attained, between 98.30% and 99.45%, each bound with 95% confidence, "
        "the objective is 99%. Replay a longer window, or repeat the run. "
        "This is a single run: the spread between runs is not included."
    )


def test_the_sentence_names_the_window_that_a_declared_outage_takes() -> None:
    sentence = verdict_on(evidence(outage_s=10)).sentence
    assert "rules out an unobserved outage of 1 s, not of 10 s" in sentence
    assert "takes a window of about 49 min" in sentence


def test_mostly_short_answers_name_the_option_that_allows_them() -> None:
    assert "--length-pinning none" in verdict_on(evidence(100, 1000, short=800)).sentence
    assert "--length-pinning none" not in verdict_on(evidence(100, 1000, short=400)).sentence
    assert "--length-pinning none" not in verdict_on(evidence()).sentence


def test_a_rolling_window_has_no_client_and_no_runs() -> None:
    verdict = decide([evidence()], None)
    assert verdict.kind is VerdictKind.PASS
    assert "run" not in verdict.sentence


@pytest.mark.parametrize(
    ("client_errors", "baseline_answered", "invalid"),
    [
        pytest.param(50, False, False, id="half-of-the-misses-may-be-rejections"),
        pytest.param(51, False, True, id="most-misses-may-not"),
        pytest.param(51, True, False, id="unless-a-baseline-answered-the-same-requests"),
        pytest.param(0, False, False, id="no-rejection"),
    ],
)
def test_rejected_requests_invalidate(
    client_errors: int, baseline_answered: bool, invalid: bool
) -> None:
    found = evidence(900, 1000)
    verdict = decide(
        [found],
        valid(found, missed=100, client_errors=client_errors, baseline_answered=baseline_answered),
    )
    assert (verdict.reason is Reason.CLIENT_ERROR) is invalid
    assert (verdict.kind is VerdictKind.INVALID) is invalid


def test_a_bound_that_misses_the_objective_is_not_rounded_up_to_it() -> None:
    interval = Interval(
        lower=0.98999, uppers=(0.995,), confidence=0.95, effective=9e4, method=IntervalMethod.BLOCKS
    )
    verdict = verdict_on(replace(evidence(), interval=interval))
    assert verdict.kind is VerdictKind.INCONCLUSIVE
    assert "98.99%" in verdict.sentence


@pytest.mark.parametrize(
    ("lag_ms", "ttft_ms", "invalid"),
    [
        pytest.param(10, 100, False, id="ten-milliseconds-are-always-allowed"),
        pytest.param(11, 100, True, id="more-is-not-for-a-tight-target"),
        pytest.param(25, 500, False, id="five-percent-of-the-tightest-ttft-is-allowed"),
        pytest.param(26, 500, True, id="more-than-five-percent-is-not"),
        pytest.param(11, None, True, id="without-a-ttft-target-ten-milliseconds-hold"),
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
        pytest.param(evidence(997), evidence(1000), False, id="it-passes-all-the-same"),
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


def test_an_invalid_run_names_everything_that_is_wrong_with_it() -> None:
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
    assert [v.kind for v in verdict.classes] == [VerdictKind.FAIL]


def test_unsent_rows_invalidate_even_a_run_without_objectives() -> None:
    assert decide([], valid(unsent=1)).reason is Reason.UNSENT_ROWS


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (VerdictKind.PASS, ExitCode.PASS),
        (VerdictKind.FAIL, ExitCode.FAIL),
        (VerdictKind.INCONCLUSIVE, ExitCode.INCONCLUSIVE),
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
        "Incomplete",
        "IntervalSpansObjective",
        "NoObjective",
        "NoRows",
        "TooFewBlocks",
        "TooFewRequests",
        "Unjudged",
        "UnsentRows",
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
def test_the_worst_answer_wins(classes: list[ClassEvidence], unsent: int, lag: int) -> None:
    validity = valid(*classes, unsent=unsent, lag_p99_ns=lag * MS)
    verdict = decide(classes, validity)
    kinds = {v.kind for v in verdict.classes}
    if unsent or lag > 25:
        expected = VerdictKind.INVALID
    elif VerdictKind.FAIL in kinds:
        expected = VerdictKind.FAIL
    elif VerdictKind.INCONCLUSIVE in kinds or not kinds:
        expected = VerdictKind.INCONCLUSIVE
    else:
        expected = VerdictKind.PASS
    assert verdict.kind is expected
    assert VerdictKind.INVALID not in kinds


@given(classes=any_classes())
def test_pass_and_fail_exclude_each_other(classes: list[ClassEvidence]) -> None:
    verdict = verdict_on(*classes)
    by_name = {c.name: c for c in classes}
    for class_verdict in verdict.classes:
        found = by_name[class_verdict.name]
        assert found.objective is not None
        assert found.interval is not None
        if class_verdict.kind is VerdictKind.PASS:
            assert found.interval.lower >= found.objective
            assert found.blocks >= MIN_BLOCKS
        if class_verdict.kind is VerdictKind.FAIL:
            assert found.interval.upper < found.objective


@given(good=st.integers(0, 2000), more=st.integers(0, 2000))
def test_more_attained_requests_never_make_a_verdict_worse(good: int, more: int) -> None:
    order = [VerdictKind.FAIL, VerdictKind.INCONCLUSIVE, VerdictKind.PASS]
    before = verdict_on(evidence(good, 2000)).kind
    after = verdict_on(evidence(min(2000, good + more), 2000)).kind
    assert order.index(after) >= order.index(before)
