"""The latencies of a record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from goodput_core.slo.record import Outcome, RequestRecord

RECORD = RequestRecord(
    request_id="r",
    slo_class="chat",
    scheduled_ns=1_000,
    sent_ns=1_100,
    first_token_ns=1_500,
    last_token_ns=1_900,
    end_ns=2_000,
    output_tokens=5,
    outcome=Outcome.OK,
)


def test_latencies_start_at_the_scheduled_arrival() -> None:
    assert RECORD.ttft_ns == 500
    assert RECORD.e2e_ns == 1_000


def test_ttft_is_also_measured_from_the_actual_send() -> None:
    assert RECORD.ttft_from_send_ns == 400
    assert RECORD.lag_ns == 100


def test_tpot_is_the_mean_of_the_gaps() -> None:
    assert RECORD.tpot_ns == 100.0


@pytest.mark.parametrize("tokens", [0, 1])
def test_tpot_is_undefined_below_two_tokens(tokens: int) -> None:
    assert replace(RECORD, output_tokens=tokens).tpot_ns is None


def test_a_request_without_a_token_has_no_ttft() -> None:
    silent = replace(RECORD, first_token_ns=None, last_token_ns=None, output_tokens=0)
    assert (silent.ttft_ns, silent.ttft_from_send_ns, silent.tpot_ns) == (None, None, None)


def test_a_request_that_was_never_sent_has_no_lag() -> None:
    unsent = replace(RECORD, sent_ns=None, outcome=Outcome.UNSENT)
    assert (unsent.lag_ns, unsent.ttft_from_send_ns) == (None, None)


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.OK])
def test_only_a_complete_response_has_an_end_to_end_time(outcome: Outcome) -> None:
    assert replace(RECORD, outcome=outcome).e2e_ns is None


@pytest.mark.parametrize(
    ("outcome", "status", "expected"),
    [
        (Outcome.ERROR, 302, True),
        (Outcome.ERROR, 400, True),
        (Outcome.ERROR, 401, True),
        (Outcome.ERROR, 402, True),
        (Outcome.ERROR, 404, True),
        (Outcome.ERROR, 413, True),
        (Outcome.ERROR, 422, True),
        (Outcome.ERROR, 431, True),
        (Outcome.ERROR, 408, False),
        (Outcome.ERROR, 409, False),
        (Outcome.ERROR, 423, False),
        (Outcome.ERROR, 424, False),
        (Outcome.ERROR, 425, False),
        (Outcome.ERROR, 429, False),
        (Outcome.ERROR, 499, False),
        (Outcome.ERROR, 500, False),
        (Outcome.ERROR, None, False),
        (Outcome.SHED, 429, False),
        (Outcome.OK, 200, False),
    ],
)
def test_a_redirect_and_4xx_that_blame_the_request_are_client_errors(
    outcome: Outcome, status: int | None, expected: bool
) -> None:
    assert replace(RECORD, outcome=outcome, status=status).client_error is expected
