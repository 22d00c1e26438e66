from __future__ import annotations

from fractions import Fraction

import pytest

from goodput_core.slo.record import Outcome
from goodput_core.units import NS_PER_S
from goodput_replay.sending.abort import AbortRule, ErrorRateWatch, parse_abort_rule


@pytest.mark.parametrize(
    ("text", "limit", "seconds"),
    [
        ("error-rate=5%", "1/20", 30),
        ("error-rate=0.5%/2m", "1/200", 120),
        ("error-rate=0%/1s", "0", 1),
    ],
)
def test_a_rule_is_parsed(text: str, limit: str, seconds: int) -> None:
    rule = AbortRule(limit=Fraction(limit), window_ns=seconds * NS_PER_S)
    assert parse_abort_rule(text) == rule


@pytest.mark.parametrize(
    "text", ["", "5%", "error-rate=5", "error-rate=100%", "error-rate=5%/", "error-rate=5%/0s",
             "errors=5%", "error-rate=-1%"]
)  # fmt: skip
def test_an_invalid_rule_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"write|can never"):
        parse_abort_rule(text)


def watch(limit: str = "1/10", seconds: int = 30) -> ErrorRateWatch:
    return ErrorRateWatch(AbortRule(limit=Fraction(limit), window_ns=seconds * NS_PER_S))


def test_fewer_than_twenty_requests_never_abort() -> None:
    errors = watch()
    assert all(errors.count(Outcome.ERROR, 0) is None for _ in range(19))
    assert errors.count(Outcome.ERROR, 0) == (
        "20 of 20 requests failed within 30 s, more than the 10% of --abort-on"
    )


def test_a_rate_at_the_limit_is_allowed() -> None:
    errors = watch()
    for number in range(100):
        outcome = Outcome.TIMEOUT if number % 10 == 9 else Outcome.OK
        assert errors.count(outcome, number) is None
    assert errors.count(Outcome.ERROR, 100) is not None


def test_failures_are_forgotten_after_the_window() -> None:
    errors = watch(seconds=10)
    for number in range(19):
        errors.count(Outcome.ERROR, number)
    for number in range(40):
        assert errors.count(Outcome.OK, 11 * NS_PER_S + number) is None


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.SHED, Outcome.CANCELLED])
def test_other_outcomes_than_errors_and_timeouts_never_abort(outcome: Outcome) -> None:
    errors = watch("0")
    assert all(errors.count(outcome, number) is None for number in range(100))
