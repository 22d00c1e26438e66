"""Signs of overload: the rate at which prompts are computed, and the pace of tokens."""

from __future__ import annotations

import math

import pytest

from goodput_core.tenants.congestion import START_TOKENS, PromptRate, TokenPace
from goodput_core.units import NS_PER_MS, NS_PER_S


def test_nothing_is_known_of_a_replica_without_requests() -> None:
    assert PromptRate().tokens_within(NS_PER_S, 5) == math.inf


def test_before_a_rate_is_known_the_age_of_the_oldest_stream_is_the_estimate() -> None:
    rate = PromptRate()
    rate.begin("a", "r0", 500, 0)
    assert rate.tokens_within(100 * NS_PER_MS, 100 * NS_PER_MS) == math.inf
    assert rate.tokens_within(100 * NS_PER_MS, 200 * NS_PER_MS) == 250


def test_a_stream_that_waited_shows_the_rate_of_its_replica() -> None:
    rate = PromptRate()
    for number in range(20):  # each replica computes 10,000 tokens per second
        rate.begin(number, f"r{number % 2}", 1000, 0)
    for number in range(20):
        rate.end(number, (number // 2 + 1) * 100 * NS_PER_MS, started=True)
    assert rate.tokens_within(NS_PER_S, 2 * NS_PER_S) == pytest.approx(10_000)
    assert rate.tokens_within(NS_PER_S, 1000 * NS_PER_S) == math.inf, "forgotten"


def test_the_constant_part_of_a_wait_is_not_taken_for_slow_prompts() -> None:
    rate = PromptRate()
    for number in range(1, 40):  # a step of 50 ms, and 30,000 tokens per second
        now_ns, tokens = number * NS_PER_S, 1000 * (1 + number % 3)
        rate.begin(number, "r0", tokens, now_ns)
        wait_ns = 50 * NS_PER_MS + tokens * NS_PER_S // 30_000
        rate.end(number, now_ns + wait_ns, started=True)
    assert rate.tokens_within(NS_PER_S, 41 * NS_PER_S) == pytest.approx(30_000, rel=0.01)


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "behind-others"])
def test_a_cached_prompt_is_not_taken_for_a_fast_replica(alone: bool) -> None:
    rate = PromptRate()
    for second in range(20):  # 10,000 tokens per second
        now_ns = second * NS_PER_S
        rate.begin("a", "r0", 1000, now_ns)
        rate.begin("b", "r0", 1000, now_ns)
        rate.end("a", now_ns + 100 * NS_PER_MS, started=True)
        rate.end("b", now_ns + 200 * NS_PER_MS, started=True)
    if not alone:
        rate.begin("a", "r0", 1000, 20 * NS_PER_S)
    rate.begin("cached", "r0", 20_000, 20 * NS_PER_S)
    rate.end("cached", 20 * NS_PER_S + 30 * NS_PER_MS, started=True)
    assert rate.tokens_within(NS_PER_S, 21 * NS_PER_S) <= 3 * 10_001


def test_a_rate_is_known_only_after_a_second_of_waits() -> None:
    rate = PromptRate()
    for number in range(9):
        rate.begin(number, "r0", 1000, 0)
    for number in range(4):
        rate.end(number, (number + 1) * 100 * NS_PER_MS, started=False)
    rate.end(4, 900 * NS_PER_MS, started=True)
    assert rate.tokens_within(NS_PER_S, NS_PER_S) == math.inf, "one stream may have waited long"
    rate.end(5, 1000 * NS_PER_MS, started=True)
    assert rate.tokens_within(NS_PER_S, NS_PER_S) < 10_000


def test_a_few_requests_are_not_taken_for_a_slow_replica() -> None:
    rate = PromptRate()
    for second in range(100):
        rate.begin(second, "r0", 100 + START_TOKENS, second * NS_PER_S)
        rate.end(second, second * NS_PER_S + 10 * NS_PER_MS, started=True)
    assert rate.tokens_within(NS_PER_S, 100 * NS_PER_S) == math.inf


def test_a_stream_that_ends_without_a_token_shows_nothing() -> None:
    rate = PromptRate()
    rate.begin("a", "r0", 1000, 0)
    rate.end("a", NS_PER_S, started=False)
    rate.end("a", 2 * NS_PER_S, started=True)
    assert rate.tokens_within(NS_PER_S, 3 * NS_PER_S) == math.inf


def test_a_stream_that_is_sent_to_another_replica_waits_there() -> None:
    rate = PromptRate()
    rate.begin("a", "lost", 1000, 0)
    rate.begin("a", "r0", 1000, NS_PER_S)
    rate.end("a", 2 * NS_PER_S, started=True)
    assert rate.tokens_within(NS_PER_S, 2 * NS_PER_S) == pytest.approx(1_000, rel=0.01)


def test_slow_tokens_are_an_overload_until_they_are_faster() -> None:
    pace = TokenPace({"chat": 50 * NS_PER_MS})
    assert not pace.excess(0)
    for second in range(10):
        pace.note("chat", 50, NS_PER_S, second * NS_PER_S)
    assert pace.excess(9 * NS_PER_S) == pytest.approx(20 / 40)
    for second in range(10, 20):
        pace.note("chat", 10, NS_PER_S, second * NS_PER_S)
    assert pace.excess(19 * NS_PER_S) > 2
    for second in range(20, 30):
        pace.note("chat", 50, NS_PER_S, second * NS_PER_S)
    assert pace.excess(29 * NS_PER_S) < 1
    assert not pace.excess(40 * NS_PER_S)


def test_the_slowest_class_counts_and_classes_without_a_target_do_not() -> None:
    pace = TokenPace({"chat": 50 * NS_PER_MS, "batch": 500 * NS_PER_MS})
    for slo_class in ("chat", "batch", "other"):
        pace.note(slo_class, 100, NS_PER_S, 0)
    for slo_class in ("chat", "batch", "other"):
        pace.note(slo_class, 0, 20 * NS_PER_S, NS_PER_S)
    assert pace.excess(NS_PER_S) > 10


def test_tokens_that_are_always_slow_are_no_overload() -> None:
    pace = TokenPace({"chat": 50 * NS_PER_MS})
    for second in range(100):
        pace.note("chat", 16, NS_PER_S, second * NS_PER_S)
        assert pace.excess(second * NS_PER_S) <= 1
