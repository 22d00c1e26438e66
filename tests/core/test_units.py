"""Durations and numbers as users read and write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.units import (
    NS_PER_MS,
    NS_PER_S,
    NS_PER_US,
    format_duration,
    format_estimate,
    format_number,
    ms_to_ns,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1ns", 1),
        ("250us", 250 * NS_PER_US),
        ("250ms", 250 * NS_PER_MS),
        ("90s", 90 * NS_PER_S),
        ("10m", 600 * NS_PER_S),
        ("1h30m", 5400 * NS_PER_S),
        ("1.5s", 1_500_000_000),
        ("0.1s", 100_000_000),
        (" 2d ", 2 * 86_400 * NS_PER_S),
        ("0s", 0),
        ("3650d", 3650 * 86_400 * NS_PER_S),
    ],
)
def test_duration_is_read_exactly(text: str, ns: int) -> None:
    assert parse_duration(text) == ns


@pytest.mark.parametrize(
    "text", ["", "10", "s", "1 s", "10m 5s", "1.s", ".5s", "1e3s", "5 parsecs", "1s!", "x1s"]
)
def test_an_invalid_duration_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="write for example"):
        parse_duration(text)


def test_a_negative_duration_is_rejected_as_such() -> None:
    with pytest.raises(ValueError, match="'-1s' is negative"):
        parse_duration("-1s")


def test_duration_beyond_ten_years_is_rejected() -> None:
    with pytest.raises(ValueError, match="ten years"):
        parse_duration("3651d")


@given(st.integers(0, 3650 * 86_400 * NS_PER_S))
def test_every_number_of_nanoseconds_can_be_written(ns: int) -> None:
    seconds, rest = divmod(ns, NS_PER_S)
    assert parse_duration(f"{seconds}s{rest}ns") == ns


@given(st.text(alphabet="0123456789.smhdnu ", max_size=12))
def test_any_text_is_a_duration_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_duration(text) >= 0


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 µs"),
        (420, "0.42 µs"),
        (420_000, "420 µs"),
        (1_500_000, "1.5 ms"),
        (12_340_000_000, "12.3 s"),
        (99_900_000_000, "99.9 s"),
        (100 * NS_PER_S, "1 min 40 s"),
        (300 * NS_PER_S, "5 min 00 s"),
        (2 * 3600 * NS_PER_S, "2 h 00 min"),
        (-250 * NS_PER_MS, "-250 ms"),
    ],
)
def test_duration_is_shown_in_three_digits(ns: int, text: str) -> None:
    assert format_duration(ns) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00333, "0.00333"),
        (1.914, "1.91"),
        (99.96, "100"),
        (999.7, "1000"),
        (1234.5, "1234"),
        (2_000_000, "2000000"),
        (-1234.0, "-1234"),
    ],
)
def test_a_number_is_shown_in_three_digits_and_never_with_an_exponent(
    value: float, text: str
) -> None:
    assert format_number(value) == text


def test_milliseconds_are_rounded_to_the_nearest_nanosecond() -> None:
    assert ms_to_ns(0.1) == 100_000
    assert ms_to_ns(1.0000004) == 1_000_000
    assert ms_to_ns(1.0000006) == 1_000_001


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 << 20), (" 4GiB ", 4 << 30), ("1TiB", 1 << 40)]
)
def test_sizes_have_binary_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "4", "4GB", "-1GiB", "1.5GiB", "9999999GiB", "٤GiB"])
def test_other_sizes_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="write for example 512MiB or 4GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1, "10 s"),
        (20, "20 s"),
        (20.1, "30 s"),
        (90, "90 s"),
        (91, "2 min"),
        (540, "9 min"),
        (541, "10 min"),
        (90 * 60, "90 min"),
        (90 * 60 + 1, "2 h"),
        (2.4 * 3600, "2.5 h"),
        (86_400, "24 h"),
    ],
)
def test_an_estimated_duration_is_rounded_up(seconds: float, text: str) -> None:
    assert format_estimate(round(seconds * NS_PER_S)) == text
