"""The wait for a first token that a router expects."""

from __future__ import annotations

import pytest

from goodput_core.tenants.congestion import FirstTokenWait
from goodput_core.units import NS_PER_MS, NS_PER_S


def test_nothing_waits() -> None:
    assert FirstTokenWait().expected_ns(5) == 0


def test_without_a_rate_the_oldest_stream_is_the_estimate() -> None:
    wait = FirstTokenWait()
    wait.begin("a", 10)
    wait.begin("b", 30)
    assert wait.expected_ns(40) == 30
    wait.end("a", 50, started=True)
    wait.end("a", 60, started=True)
    assert wait.expected_ns(50) == 20


def test_the_rate_of_starts_while_streams_wait_gives_the_wait_of_a_new_one() -> None:
    wait = FirstTokenWait()
    for number in range(200):
        wait.begin(number, 0)
    for number in range(100):  # 50 per second
        wait.end(number, (number + 1) * 20 * NS_PER_MS, started=True)
    assert wait.expected_ns(2 * NS_PER_S) == pytest.approx(2 * NS_PER_S, rel=0.02)
    assert wait.expected_ns(70 * NS_PER_S) == 70 * NS_PER_S


def test_a_low_rate_of_arrivals_is_not_taken_for_the_rate_of_starts() -> None:
    wait = FirstTokenWait()
    for second in range(10):
        wait.begin(second, second * NS_PER_S)
        wait.end(second, second * NS_PER_S + 40 * NS_PER_MS, started=True)
    for number in range(20):
        wait.begin(f"burst {number}", 11 * NS_PER_S)
    assert wait.expected_ns(11 * NS_PER_S) == 0


def test_a_stream_that_ends_without_a_token_did_not_start() -> None:
    wait = FirstTokenWait()
    for number in range(60):
        wait.begin(number, 0)
    for number in range(50):
        wait.end(number, (number + 1) * 20 * NS_PER_MS, started=number % 2 == 0)
    assert wait.expected_ns(NS_PER_S) == NS_PER_S  # the oldest one
    for number in range(60, 110):
        wait.begin(number, NS_PER_S)
    assert wait.expected_ns(NS_PER_S) == pytest.approx(60 / 25 * NS_PER_S, rel=0.1)
