"""Signs of overload: the expected wait for a first token, and the pace of tokens."""

from __future__ import annotations

import pytest

from goodput_core.tenants.congestion import FirstTokenWait, TokenPace
from goodput_core.units import NS_PER_MS, NS_PER_S


def test_nothing_waits() -> None:
    assert FirstTokenWait().expected_ns(5) == 0


def test_without_a_rate_the_oldest_stream_is_the_estimate() -> None:
    wait = FirstTokenWait()
    wait.begin("a", 500, 10)
    wait.begin("b", 500, 30)
    assert wait.expected_ns(40) == 30
    wait.end("a", 50, started=True)
    wait.end("a", 60, started=True)
    assert wait.expected_ns(50) == 20


def test_the_rate_of_starts_while_streams_wait_gives_the_wait_of_a_new_one() -> None:
    wait = FirstTokenWait()
    for number in range(200):
        wait.begin(number, 500, 0)
    for number in range(100):  # 50 per second
        wait.end(number, (number + 1) * 20 * NS_PER_MS, started=True)
    assert wait.expected_ns(2 * NS_PER_S) == pytest.approx(2 * NS_PER_S, rel=0.02)
    assert wait.expected_ns(70 * NS_PER_S) == 70 * NS_PER_S


def test_a_low_rate_of_arrivals_is_not_taken_for_the_rate_of_starts() -> None:
    wait = FirstTokenWait()
    for second in range(10):
        wait.begin(second, 500, second * NS_PER_S)
        wait.end(second, second * NS_PER_S + 40 * NS_PER_MS, started=True)
    for number in range(20):
        wait.begin(f"burst {number}", 500, 11 * NS_PER_S)
    assert wait.expected_ns(11 * NS_PER_S) == 0


def test_a_stream_that_ends_without_a_token_did_not_start() -> None:
    wait = FirstTokenWait()
    for number in range(60):
        wait.begin(number, 500, 0)
    for number in range(50):
        wait.end(number, (number + 1) * 20 * NS_PER_MS, started=number % 2 == 0)
    assert wait.expected_ns(NS_PER_S) == NS_PER_S  # the oldest one
    for number in range(60, 110):
        wait.begin(number, 500, NS_PER_S)
    assert wait.expected_ns(NS_PER_S) == pytest.approx(60 / 25 * NS_PER_S, rel=0.1)


def test_long_prompts_count_by_their_tokens() -> None:
    wait = FirstTokenWait()
    for number in range(100):
        wait.begin(number, 500, 0)
    for number in range(100):
        wait.end(number, (number + 1) * 20 * NS_PER_MS, started=True)
    now_ns = 2 * NS_PER_S
    wait.begin("short", 500, now_ns)
    short_ns = wait.expected_ns(now_ns)
    wait.begin("long", 9500, now_ns)
    assert wait.expected_ns(now_ns) == pytest.approx(11 * short_ns, rel=0.01)


def test_before_a_rate_is_known_the_fastest_start_behind_others_stands_for_it() -> None:
    wait = FirstTokenWait()
    wait.begin("a", 500, 0)
    wait.begin("b", 500, 0)
    wait.end("a", 100 * NS_PER_MS, started=True)
    wait.end("b", 100 * NS_PER_MS, started=True)  # 2,000 tokens in 0.1 s
    wait.begin("c", 9500, NS_PER_S)
    assert wait.expected_ns(NS_PER_S) == pytest.approx(500 * NS_PER_MS, rel=0.02)


def test_slow_tokens_are_an_overload_until_streams_with_faster_ones_end() -> None:
    pace, target_ns = TokenPace(), 50 * NS_PER_MS
    assert not pace.pressure(0)
    for number in range(10):
        pace.end(20 * NS_PER_MS, target_ns, number * NS_PER_S)
    assert not pace.pressure(10 * NS_PER_S)
    for number in range(10, 20):
        pace.end(50 * NS_PER_MS, target_ns, number * NS_PER_S)
    assert pace.pressure(20 * NS_PER_S) == pytest.approx(1, abs=0.01)
    assert not pace.pressure(25 * NS_PER_S)


def test_tokens_that_are_always_slow_are_no_overload() -> None:
    pace = TokenPace()
    for number in range(100):
        pace.end(60 * NS_PER_MS, 50 * NS_PER_MS, number * NS_PER_S // 10)
        assert not pace.pressure(number * NS_PER_S // 10)
