"""Targets and objectives."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.slo.targets import (
    SLOClass,
    Targets,
    format_objective,
    parse_margin,
    parse_objective,
)

BOUNDS = st.none() | st.integers(0, 10**12)
TARGETS = st.builds(Targets, ttft_ns=BOUNDS, tpot_ns=BOUNDS, tbt_p99_ns=BOUNDS, e2e_ns=BOUNDS)


@pytest.mark.parametrize(
    ("text", "objective"),
    [
        ("99%", Fraction(99, 100)),
        ("99.95%", Fraction(1999, 2000)),
        ("0.000001%", Fraction(1, 10**8)),
        ("99.999999%", Fraction(99_999_999, 10**8)),
        ("5.50%", Fraction(11, 200)),
    ],
)
def test_objective_is_an_exact_fraction(text: str, objective: Fraction) -> None:
    assert parse_objective(text) == objective


@pytest.mark.parametrize(
    "text", ["99", "0.99", "99 %", "--1%", "-%", "1e1%", "99.%", "", "%", "99.0000001%"]
)
def test_text_that_is_not_a_percentage_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="not a percentage"):
        parse_objective(text)


@pytest.mark.parametrize(
    ("text", "margin"), [("0%", 0), ("0.00%", 0), ("0.5%", Fraction(1, 200)), ("99%", 0.99)]
)
def test_a_margin_of_0_percent_is_allowed(text: str, margin: Fraction) -> None:
    assert parse_margin(text) == Fraction(str(margin))


@pytest.mark.parametrize("text", ["-1%", "-0.5%", "100%"])
def test_a_margin_below_0_percent_or_of_100_percent_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="out of bounds; a margin is at least 0% and below 100%"):
        parse_margin(text)


@pytest.mark.parametrize("text", ["-1%", "0%", "0.0%", "100%", "100.5%"])
def test_objectives_of_0_and_100_percent_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="out of bounds"):
        parse_objective(text)


@pytest.mark.parametrize("text", ["99%", "99.9%", "99.95%", "0.000001%", "50%"])
def test_objective_is_written_as_it_was_read(text: str) -> None:
    assert format_objective(parse_objective(text)) == text


@given(st.integers(1, 10**8 - 1))
def test_every_objective_is_read_back_as_written(hundred_millionths: int) -> None:
    objective = Fraction(hundred_millionths, 10**8)
    assert parse_objective(format_objective(objective)) == objective


def test_targets_of_a_class_are_in_nanoseconds() -> None:
    chat = SLOClass(name="chat", ttft_ms=500, tpot_ms=50, tbt_p99_ms=120, e2e_ms=9000)
    assert chat.targets == Targets(
        ttft_ns=500_000_000, tpot_ns=50_000_000, tbt_p99_ns=120_000_000, e2e_ns=9_000_000_000
    )
    assert SLOClass(name="chat", ttft_ms=1, tpot_ms=1).targets.e2e_ns is None


def test_targets_are_empty_only_without_any_bound() -> None:
    assert Targets().empty
    for field in fields(Targets):
        assert not Targets(**{field.name: 0}).empty


@given(own=TARGETS, row=TARGETS)
def test_targets_of_the_row_override_those_of_the_class(own: Targets, row: Targets) -> None:
    merged = own.overridden_by(row)
    for field in fields(Targets):
        theirs = getattr(row, field.name)
        expected = getattr(own, field.name) if theirs is None else theirs
        assert getattr(merged, field.name) == expected
