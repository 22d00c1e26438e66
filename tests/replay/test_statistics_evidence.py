"""Evidence gathered from records, and the verdicts based on it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_core.slo.attainment import Attainment
from goodput_core.slo.conformance import Deviation
from goodput_core.slo.intervals import requests_needed
from goodput_core.slo.judging import MissReason
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.stalls import NO_STALLS, Stall, Stalls
from goodput_core.slo.targets import SLOClass, Targets
from goodput_core.slo.verdict import Reason, VerdictKind, decide
from goodput_replay.statistics.evidence import RunEvidence, gather

MS = 1_000_000
SECOND = 1_000 * MS
CHAT = SLOClass(name="chat", ttft_ms=500, tpot_ms=50, objective=Fraction(99, 100))
BATCH = SLOClass(name="batch", ttft_ms=30_000, tpot_ms=200, objective=Fraction(95, 100))
NOTED = SLOClass(name="noted", ttft_ms=500, tpot_ms=50)


def request(
    at_s: float,
    *,
    ttft_s: float = 0.15,
    lag_s: float = 0.0,
    slo_class: str = "chat",
    outcome: Outcome = Outcome.OK,
    targets: Targets | None = None,
) -> RequestRecord:
    scheduled = round(at_s * SECOND)
    first = scheduled + round(ttft_s * SECOND)
    return RequestRecord(
        request_id=f"{at_s}",
        slo_class=slo_class,
        scheduled_ns=scheduled,
        sent_ns=None if outcome is Outcome.UNSENT else scheduled + round(lag_s * SECOND),
        first_token_ns=first,
        last_token_ns=first + 200 * MS,
        end_ns=first + 200 * MS,
        output_tokens=11,
        outcome=outcome,
        targets=targets or Targets(),
    )


def steady(
    per_s: int = 5, seconds: int = 300, *, ttft_s: float = 0.15, lag_s: float = 0.0
) -> list[RequestRecord]:
    return [request(k / per_s, ttft_s=ttft_s, lag_s=lag_s) for k in range(per_s * seconds)]


def poisson(per_s: float, seconds: int, seed: int = 0) -> list[RequestRecord]:
    """Make requests of a healthy service: TTFT around 150 ms, about 1 % above 500 ms."""
    draw = np.random.default_rng(seed)
    arrivals = np.sort(draw.uniform(0, seconds, draw.poisson(per_s * seconds)))
    ttfts = draw.lognormal(np.log(0.15), 0.5, len(arrivals))
    return [request(float(a), ttft_s=float(t)) for a, t in zip(arrivals, ttfts, strict=True)]


def gathered(
    records: list[RequestRecord],
    seconds: int = 300,
    *,
    window_start_ns: int = 0,
    rows_planned: int | None = None,
    incomplete: str = "",
    outage_s: int = 0,
    stalls: Stalls = NO_STALLS,
) -> RunEvidence:
    return gather(
        records,
        classes=[CHAT],
        window_ns=seconds * SECOND,
        window_start_ns=window_start_ns,
        rows_planned=rows_planned,
        incomplete=incomplete,
        outage_s=outage_s,
        stalls={0: stalls},
    )


def failed(at_s: float, status: int | None, detail: str, *, sent: bool = True) -> RequestRecord:
    """Return a request with an error."""
    return replace(
        request(at_s, outcome=Outcome.ERROR),
        sent_ns=round(at_s * SECOND) if sent else None,
        first_token_ns=None,
        last_token_ns=None,
        output_tokens=0,
        status=status,
        detail=detail,
    )


def every_second(status: int | None, *, sent: bool = True) -> list[RequestRecord]:
    return [failed(second, status, "failed", sent=sent) for second in range(300)]


SETUP_ERRORS = {
    "every connection is refused": (every_second(None, sent=False), Reason.NEVER_CONNECTED),
    "every connection times out": (
        [replace(one, outcome=Outcome.TIMEOUT) for one in every_second(None, sent=False)],
        Reason.NEVER_CONNECTED,
    ),
    "every key is wrong": (every_second(401), Reason.CLIENT_ERROR),
    "every request is redirected": (every_second(307), Reason.CLIENT_ERROR),
    "no file is free": (
        [replace(one, outcome=Outcome.UNSENT) for one in every_second(None, sent=False)],
        Reason.UNSENT_ROWS,
    ),
    "one name is not resolved": (
        [
            replace(failed(0, None, "no such host", sent=False), outcome=Outcome.UNSENT),
            *(request(second) for second in range(1, 300)),
        ],
        Reason.UNSENT_ROWS,
    ),
    "every response is ended by the time limit": (
        [replace(request(second), outcome=Outcome.TIMEOUT) for second in range(300)],
        Reason.NON_CONFORMING,
    ),
    "every response is a page": (
        [replace(one, deviations=(Deviation.NOT_STREAMED,)) for one in every_second(200)],
        Reason.NON_CONFORMING,
    ),
}


@pytest.mark.parametrize(("records", "reason"), SETUP_ERRORS.values(), ids=SETUP_ERRORS)
def test_errors_of_the_client_and_of_set_up_are_no_verdict_on_the_service(
    records: list[RequestRecord], reason: Reason
) -> None:
    found = gathered(records)
    verdict = decide(found.classes, found.validity)
    assert (verdict.kind, verdict.reason) == (VerdictKind.INVALID, reason)


SERVICE_ERRORS = {
    "a crash after one response": (
        [request(0), *every_second(None, sent=False)[1:]],
        "299 of 299 misses are connection errors",
    ),
    "connections that time out after one response": (
        [
            request(0),
            *(
                replace(one, outcome=Outcome.TIMEOUT, end_ns=one.scheduled_ns + 10 * SECOND)
                for one in every_second(None, sent=False)[1:]
            ),
        ],
        "299 of 299 misses are time-outs",
    ),
    "connections that break": (every_second(None), "300 of 300 misses are connection errors"),
    "every response is 500": (every_second(500), "300 of 300 misses are error responses"),
    "every request is shed": (
        [replace(one, outcome=Outcome.SHED) for one in every_second(429)],
        "300 of 300 misses are rejections for load (429 or 503)",
    ),
    "nothing is answered": (
        [
            replace(one, outcome=Outcome.TIMEOUT, end_ns=one.scheduled_ns + 10 * SECOND)
            for one in every_second(None)
        ],
        "300 of 300 misses are time-outs",
    ),
}


@pytest.mark.parametrize(("records", "cause"), SERVICE_ERRORS.values(), ids=SERVICE_ERRORS)
def test_errors_of_the_service_fail_and_are_named(records: list[RequestRecord], cause: str) -> None:
    found = gathered(records)
    verdict = decide(found.classes, found.validity)
    assert verdict.kind is VerdictKind.FAIL
    assert cause in verdict.sentence


def test_classes_come_in_order_with_their_counts() -> None:
    records = [
        request(0),
        request(1, ttft_s=0.6),
        request(2, slo_class="noted"),
        request(3, slo_class="unknown"),
        request(4, slo_class="unknown", targets=Targets(ttft_ns=1)),
        request(5, outcome=Outcome.CANCELLED),
    ]
    found = gather(records, classes=[CHAT, BATCH, NOTED], window_ns=10 * SECOND)
    assert [c.name for c in found.classes] == ["chat", "batch", "noted", "unknown"]
    chat, batch, noted, unknown = found.classes
    assert chat.attainment == Attainment(good=1, total=2)
    assert (batch.attainment.total, batch.interval) == (0, None)
    assert (noted.objective, noted.attainment) == (None, Attainment(good=1, total=1))
    assert (unknown.attainment, unknown.unjudged) == (Attainment(good=0, total=1), 1)
    assert [c.name for c in found.counts] == [c.name for c in found.classes]
    assert found.counts[0].excluded == 1
    assert found.overall.rows == len(records)
    assert found.goodput_per_s == Fraction(2, 10)


def test_a_healthy_run_passes() -> None:
    found = gathered(steady())
    assert found.classes[0].interval is not None
    assert found.classes[0].interval.effective == 1500
    assert decide(found.classes, found.validity).kind is VerdictKind.PASS


@pytest.mark.parametrize("per_s", [5, 50, 200])
def test_a_busy_healthy_service_keeps_most_of_its_sample(per_s: int) -> None:
    # At 50/s some request always waits for a first token; that alone must not bar a verdict.
    found = gathered(poisson(per_s, 300))
    chat = found.classes[0]
    assert chat.interval is not None
    assert chat.interval.effective > chat.attainment.total / 3
    assert chat.blocks == 60


def test_thirty_of_thirty_proves_nothing() -> None:
    found = gathered([request(k * 10) for k in range(30)])
    verdict = decide(found.classes, found.validity)
    assert (verdict.kind, verdict.reason) == (VerdictKind.INCONCLUSIVE, Reason.TOO_FEW_REQUESTS)
    assert "300" in verdict.sentence


def test_as_many_clean_requests_as_the_objective_needs_pass() -> None:
    needed = requests_needed(Fraction(99, 100))
    found = gathered([request(k) for k in range(needed)])
    assert decide(found.classes, found.validity).kind is VerdictKind.PASS


def test_ten_seconds_are_too_short_to_pass_but_long_enough_to_fail() -> None:
    good = gathered(steady(per_s=50, seconds=10), seconds=10)
    assert decide(good.classes, good.validity).reason is Reason.TOO_FEW_BLOCKS
    bad = gathered(steady(per_s=50, seconds=10, ttft_s=0.51), seconds=10)
    assert decide(bad.classes, bad.validity).kind is VerdictKind.FAIL


def test_one_miss_in_a_short_run_is_no_failure() -> None:
    records = [*steady(per_s=2, seconds=10), request(5.1, ttft_s=0.6)]
    found = gathered(records, seconds=10)
    assert decide(found.classes, found.validity).kind is VerdictKind.INCONCLUSIVE


@pytest.mark.parametrize("growth", [0.05, 0.5, 5], ids=["slowly", "fast", "hopelessly"])
def test_an_overloaded_run_fails(growth: float) -> None:
    records = [request(k / 5, ttft_s=0.15 + growth * k / 5) for k in range(1500)]
    found = gathered(records)
    assert decide(found.classes, found.validity).kind is VerdictKind.FAIL


@pytest.mark.parametrize("per_s", [Fraction(737, 100), 20, 100])
def test_overload_fails_at_every_rate_beyond_the_one_that_fails(per_s: float) -> None:
    # A queue that serves five requests a second: once a rate fails, no higher one is open.
    interval_s, free_s = 1 / float(per_s), 0.0
    records = []
    for k in range(int(300 * per_s)):
        arrival_s = k * interval_s
        free_s = max(free_s, arrival_s) + 0.2
        records.append(request(arrival_s, ttft_s=free_s - arrival_s))
    verdict = decide((found := gathered(records)).classes, found.validity)
    assert (verdict.kind, verdict.reason) == (VerdictKind.FAIL, Reason.BELOW_OBJECTIVE)


@pytest.mark.parametrize("late_s", [2, 20, 60])
def test_one_hung_request_is_one_miss(late_s: float) -> None:
    found = gathered([*steady(), request(100.05, ttft_s=late_s)])
    assert found.classes[0].attainment == Attainment(good=1500, total=1501)
    assert decide(found.classes, found.validity).kind is VerdictKind.PASS


def test_one_hung_request_of_an_hour_leaves_the_verdict_a_pass() -> None:
    hung = request(1000.05, ttft_s=600, outcome=Outcome.TIMEOUT)
    found = gathered([*steady(5, 3600), hung], 3600)
    assert found.classes[0].attainment == Attainment(good=18_000, total=18_001)
    assert decide(found.classes, found.validity).kind is VerdictKind.PASS


@pytest.mark.parametrize(
    ("outage_s", "kind"),
    [(0, VerdictKind.PASS), (1, VerdictKind.PASS), (2, VerdictKind.INCONCLUSIVE)],
)
def test_a_declared_outage_needs_a_long_window(outage_s: int, kind: VerdictKind) -> None:
    found = gathered(steady(), outage_s=outage_s)
    assert decide(found.classes, found.validity).kind is kind


def test_requests_are_counted_by_their_scheduled_second() -> None:
    # Two requests of the same second miss together; so do two of one second near its edges.
    apart = [request(k, ttft_s=0.6 if k in (10, 150) else 0.15) for k in range(300)]
    together = [*apart[:150], request(10.999, ttft_s=0.6), *apart[151:]]
    lower = [
        found.interval.lower
        for found in (gathered(records).classes[0] for records in (apart, together))
        if found.interval is not None
    ]
    assert lower[0] > lower[1]


def test_a_request_at_the_windows_end_counts_into_its_last_second() -> None:
    found = gathered([request(0), request(2.6)], seconds=2)
    assert found.classes[0].attainment == Attainment(good=2, total=2)


def test_unsent_rows_and_missing_records_are_counted_together() -> None:
    found = gathered([*steady(), request(1.05, outcome=Outcome.UNSENT)], rows_planned=1505)
    assert found.validity.unsent == 1 + 4
    assert found.classes[0].attainment == Attainment(good=1500, total=1501)
    assert decide(found.classes, found.validity).reason is Reason.UNSENT_ROWS


def test_an_incomplete_run_is_invalid() -> None:
    found = gathered(steady(), incomplete="interrupted after 20 s")
    assert decide(found.classes, found.validity).reason is Reason.INCOMPLETE


def test_lag_is_measured_over_the_requests_that_were_sent() -> None:
    records = [*steady(per_s=1, seconds=98), request(98, lag_s=0.03), request(99, lag_s=0.04)]
    found = gathered(records, seconds=100)
    assert found.validity.lag_p99_ns == 30 * MS
    assert found.validity.tightest_ttft_ns == 500 * MS
    assert gathered([]).validity.lag_p99_ns is None


def test_the_tightest_ttft_may_be_of_a_row() -> None:
    records = [request(0, targets=Targets(ttft_ns=100 * MS))]
    assert gathered(records).validity.tightest_ttft_ns == 100 * MS


def test_a_failure_caused_by_send_lag_is_invalid() -> None:
    # Every tenth request is sent 200 ms late and misses by 100 ms.
    records = [
        request(k / 5, ttft_s=0.6 if k % 10 == 0 else 0.15, lag_s=0.2 if k % 10 == 0 else 0)
        for k in range(1500)
    ]
    found = gathered(records)
    assert found.classes[0].attainment == Attainment(good=1350, total=1500)
    assert found.validity.without_lag[0].attainment == Attainment(good=1500, total=1500)
    verdict = decide(found.classes, found.validity)
    assert verdict.kind is VerdictKind.INVALID
    assert (
        "without the client's lag (late sends and stalls) chat would be PASS, not FAIL"
        in verdict.sentence
    )


def test_a_failure_caused_by_stalls_is_invalid() -> None:
    # The client stops for 0.4 s every ten seconds, and a tenth of the requests waits for that.
    records = [request(k / 5, ttft_s=0.6 if k % 10 == 0 else 0.15) for k in range(1500)]
    stalls = Stalls(
        Stall(start_ns=k * SECOND // 5 + 100 * MS, end_ns=k * SECOND // 5 + 500 * MS,
              stalled_ns=400 * MS)
        for k in range(0, 1500, 10)
    )  # fmt: skip
    assert decide((found := gathered(records)).classes, found.validity).kind is VerdictKind.FAIL
    found = gathered(records, stalls=stalls)
    assert found.validity.without_lag[0].attainment == Attainment(good=1500, total=1500)
    verdict = decide(found.classes, found.validity)
    assert (verdict.kind, verdict.reason) == (VerdictKind.INVALID, Reason.CLIENT_LAG_DECIDES)


def test_stalls_of_one_sender_do_not_excuse_the_requests_of_another() -> None:
    slow = [request(k / 5, ttft_s=0.6 if k % 10 == 0 else 0.15) for k in range(1500)]
    stalls = Stalls(
        Stall(start_ns=k * SECOND // 5 + 100 * MS, end_ns=k * SECOND // 5 + 500 * MS,
              stalled_ns=400 * MS)
        for k in range(0, 1500, 10)
    )  # fmt: skip
    found = gather(
        [replace(one, sender=number % 2) for number, one in enumerate(slow)],
        classes=[CHAT], window_ns=300 * SECOND, stalls={1: stalls, 7: stalls},
    )  # fmt: skip
    assert found.validity.without_lag[0] == found.classes[0], "the slow ones are those of sender 0"
    verdict = decide(found.classes, found.validity)
    assert (verdict.kind, verdict.reason) == (VerdictKind.FAIL, Reason.BELOW_OBJECTIVE)


def test_lag_that_changes_no_judgement_leaves_the_evidence_as_it_is() -> None:
    found = gathered(steady(lag_s=0.02))
    assert found.validity.without_lag[0] is found.classes[0]


def test_the_order_of_records_does_not_matter() -> None:
    records = poisson(5, 300)
    assert gathered(records).classes == gathered(records[::-1]).classes


def test_a_cancelled_request_that_was_late_by_lag_leaves_the_counts_without_it() -> None:
    late = replace(
        request(10, outcome=Outcome.CANCELLED, lag_s=0.2),
        first_token_ns=None,
        end_ns=10 * SECOND + 600 * MS,
    )
    found = gathered([*steady(), late])
    assert found.classes[0].attainment == Attainment(good=1500, total=1501)
    assert found.validity.without_lag[0].attainment == Attainment(good=1500, total=1500)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        pytest.param(404, Reason.CLIENT_ERROR, id="not-found-is-a-client-error"),
        pytest.param(422, Reason.CLIENT_ERROR, id="an-unprocessable-body-is-a-client-error"),
        pytest.param(408, Reason.BELOW_OBJECTIVE, id="a-time-out-is-not"),
        pytest.param(424, Reason.BELOW_OBJECTIVE, id="a-failed-generation-is-not"),
        pytest.param(500, Reason.BELOW_OBJECTIVE, id="a-server-error-is-not"),
        pytest.param(None, Reason.BELOW_OBJECTIVE, id="no-response-is-not"),
    ],
)
def test_a_run_of_client_errors_is_invalid(status: int | None, reason: Reason) -> None:
    records = [replace(request(k, outcome=Outcome.ERROR), status=status) for k in range(300)]
    found = gathered(records)
    assert found.validity.requests == 300
    assert decide(found.classes, found.validity).reason is reason


def mixed(shares: dict[str, float], *, per_s: int = 5, seconds: int = 300) -> list[RequestRecord]:
    """Return an even load with stated shares of some kinds of requests, in a fixed random order."""
    total = per_s * seconds
    kinds = [kind for kind, share in shares.items() for _ in range(round(share * total))]
    kinds += ["met"] * (total - len(kinds))
    Random(0).shuffle(kinds)
    return [_of_kind(kind, k / per_s) for k, kind in enumerate(kinds)]


def _of_kind(kind: str, at_s: float) -> RequestRecord:
    """Return a request; the kind is an HTTP status or one of these names.

    `met`, `slow`, `late` (slow because of the send lag), `short` (ended early by the server), or
    `untargeted`.
    """
    if kind.isdigit():
        status = int(kind)
        one = failed(at_s, status, f"HTTP {status}")
        return replace(one, outcome=Outcome.SHED) if status in {429, 503} else one
    if kind == "late":
        return request(at_s, ttft_s=0.509, lag_s=0.0099)
    if kind == "short":
        deviations = (Deviation.ENDED_EARLY,)
        return replace(request(at_s), pinned_output_tokens=50, deviations=deviations)
    slo_class = "none" if kind == "untargeted" else "chat"
    return request(at_s, ttft_s=0.6 if kind == "slow" else 0.15, slo_class=slo_class)


CLIENT_ERRORS = {
    "a key expires half-way": ({"401": 0.5}, VerdictKind.INVALID, "chat would be PASS, not FAIL"),
    "a key is missing for a part, and the rest is slow": (
        {"401": 0.3, "slow": 0.3},
        VerdictKind.FAIL,
        "at most",
    ),
    "few prompts are too long": ({"400": 0.003}, VerdictKind.PASS, "at least"),
    "prompts that are too long prevent a PASS": (
        {"400": 0.008},
        VerdictKind.INVALID,
        "without them chat would be PASS, not INCONCLUSIVE; correct the key, the address or the",
    ),
    "overload is the service's decision": ({"429": 0.5}, VerdictKind.FAIL, "at most"),
    "a redirected path": ({"308": 0.1}, VerdictKind.INVALID, "chat would be PASS, not FAIL"),
    "more slow requests than rejected ones": (
        {"403": 0.02, "slow": 0.004},
        VerdictKind.INVALID,
        "chat would be PASS, not FAIL",
    ),
}


@pytest.mark.parametrize(("shares", "kind", "text"), CLIENT_ERRORS.values(), ids=CLIENT_ERRORS)
def test_errors_of_the_client_never_decide(
    shares: dict[str, float], kind: VerdictKind, text: str
) -> None:
    found = gathered(mixed(shares))
    verdict = decide(found.classes, found.validity)
    assert verdict.kind is kind
    assert text in verdict.sentence


_SHARES = st.fixed_dictionaries(
    {
        kind: st.sampled_from([0, 0.003, 0.01, 0.03, 0.1, 0.3])
        for kind in ("401", "422", "429", "500", "slow", "untargeted", "late", "short")
    }
)
_KINDS = (VerdictKind.PASS, VerdictKind.FAIL)


TOGETHER = {
    "rejections and outputs that ended early": (
        {"401": 0.06, "short": 0.06},
        "90 requests rejected as invalid (3xx or 4xx) and 90 deviations of responses decide",
    ),
    "rejections and late sends": (
        {"401": 0.06, "late": 0.06},
        "90 requests rejected as invalid (3xx or 4xx) and the client's lag decide together",
    ),
    "outputs that ended early and late sends": (
        {"short": 0.06, "late": 0.06},
        "90 deviations of responses and the client's lag decide together",
    ),
    "all of them": (
        {"401": 0.03, "late": 0.03, "short": 0.03},
        "(3xx or 4xx) and 45 deviations of responses and the client's lag decide together",
    ),
}


@pytest.mark.parametrize(("shares", "text"), TOGETHER.values(), ids=TOGETHER)
def test_several_disturbances_do_not_decide_together_either(
    shares: dict[str, float], text: str
) -> None:
    """Each of them alone leaves a FAIL, but every request was served in time."""
    found = gathered(mixed(shares))
    verdict = decide(found.classes, found.validity)
    assert verdict.kind is VerdictKind.INVALID
    assert text in verdict.sentence
    assert "without them chat would be PASS, not FAIL" in verdict.sentence
    slow = gathered(mixed({**shares, "slow": 0.2}))
    assert decide(slow.classes, slow.validity).kind is VerdictKind.FAIL


@settings(max_examples=examples(60))
@given(shares=_SHARES, objective=st.sampled_from(["0.5", "0.9", "0.97", "0.99"]))
def test_a_run_without_its_disturbances_has_the_same_pass_or_fail(
    shares: dict[str, float], objective: str
) -> None:
    classes = [replace(CHAT, objective=Fraction(objective))]
    records = mixed(shares)
    undisturbed = [
        request(one.scheduled_ns / SECOND) if one.lag_ns or one.deviations else one
        for one in records
        if not one.client_error
    ]
    found, other = (
        gather(some, classes=classes, window_ns=300 * SECOND) for some in (records, undisturbed)
    )
    verdict = decide(found.classes, found.validity)
    event(f"{verdict.reason}")
    if verdict.kind in _KINDS:
        assert decide(other.classes, other.validity).kind is verdict.kind


def test_a_class_without_targets_that_is_rejected_makes_a_pass_too_easy() -> None:
    rejected = [
        replace(failed(k / 5 + 0.1, 401, "no key"), slo_class="background") for k in range(167)
    ]
    found = gathered([*steady(), *rejected])
    verdict = decide(found.classes, found.validity)
    assert (verdict.kind, verdict.reason) == (VerdictKind.INVALID, Reason.CLIENT_ERROR)
    assert "167 of 1667 requests" in verdict.sentence
    assert "its load was lighter than that of the trace" in verdict.sentence
    found = gathered([*steady(), *rejected[1:]])
    assert decide(found.classes, found.validity).kind is VerdictKind.PASS


def test_one_class_with_a_wrong_key_leaves_no_verdict_on_the_others() -> None:
    batch = [replace(failed(k * 10, 401, "no key"), slo_class="batch") for k in range(30)]
    found = gather([*steady(), *batch], classes=[CHAT, BATCH], window_ns=300 * SECOND)
    verdict = decide(found.classes, found.validity)
    assert (verdict.kind, verdict.reason) == (VerdictKind.INVALID, Reason.CLIENT_ERROR)
    assert "batch would be without a judged request, not FAIL" in verdict.sentence


@settings(max_examples=examples(60))
@given(
    shares=_SHARES,
    objective=st.sampled_from(["0.5", "0.9", "0.97", "0.99"]),
    per_s=st.sampled_from([1, 5]),
)
def test_removing_the_errors_of_the_client_never_changes_a_pass_or_fail(
    shares: dict[str, float], objective: str, per_s: int
) -> None:
    classes = [replace(CHAT, objective=Fraction(objective))]
    records = mixed(shares, per_s=per_s)
    without = [one for one in records if not one.client_error]
    found, other = (
        gather(some, classes=classes, window_ns=300 * SECOND) for some in (records, without)
    )
    verdict, alone = (decide(one.classes, one.validity) for one in (found, other))
    event(f"{verdict.reason}")
    if verdict.kind in _KINDS:
        assert alone.kind is verdict.kind
    if verdict.kind is VerdictKind.PASS:
        assert len(without) >= 0.9 * len(records)
    if verdict.reason is Reason.CLIENT_ERROR:
        assert len(without) < len(records)


def test_responses_shorter_than_their_rows_are_counted() -> None:
    records = [replace(request(k), pinned_output_tokens=50) for k in range(300)]
    found = gathered(records)
    assert found.classes[0].misses.by_reason[MissReason.SHORT] == 300
    assert "--length-pinning none" in decide(found.classes, found.validity).sentence


def test_an_empty_run_is_inconclusive() -> None:
    found = gathered([])
    verdict = decide(found.classes, found.validity)
    assert (verdict.kind, verdict.reason) == (VerdictKind.INCONCLUSIVE, Reason.NO_ROWS)
    assert verdict.skipped == ("chat",)


@pytest.mark.parametrize(("start_ns", "seconds"), [(1, 300), (0, 0)], ids=["late", "empty"])
def test_a_record_before_the_window_or_an_empty_window_is_rejected(
    start_ns: int, seconds: int
) -> None:
    with pytest.raises(ValueError, match="window"):
        gathered([request(0)], seconds, window_start_ns=start_ns)
