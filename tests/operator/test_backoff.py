"""Back-off depends on the number of failures alone, which a stable run resets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_operator.backoff import BackOff

BACK_OFF = BackOff(seed=7)


@given(st.text(max_size=8), st.integers(0, 10**9))
def test_a_delay_stays_within_its_bounds(name: str, failures: int) -> None:
    full = min(BACK_OFF.max_ns, BACK_OFF.first_ns << min(max(failures - 1, 0), 32))
    assert 3 * full // 4 <= BACK_OFF.delay_ns(name, failures) <= full


def test_delays_double_up_to_the_maximum() -> None:
    longest = [BACK_OFF.delay_ns("chat-0", n) / NS_PER_MS for n in range(1, 10)]
    for n, delay_ms in enumerate(longest):
        assert delay_ms == pytest.approx(min(500 * 2**n, 30_000) * 0.875, rel=0.143)


def test_replicas_that_fail_together_restart_at_different_times() -> None:
    assert len({BACK_OFF.delay_ns(f"chat-{i}", 4) for i in range(50)}) == 50


def test_the_same_seed_gives_the_same_delay() -> None:
    assert BackOff(seed=7).delay_ns("chat-0", 3) == BACK_OFF.delay_ns("chat-0", 3)
    assert BackOff(seed=8).delay_ns("chat-0", 3) != BACK_OFF.delay_ns("chat-0", 3)


@pytest.mark.parametrize(
    ("ready_ns", "exited_ns", "failures"),
    [
        (None, 3600 * NS_PER_S, 6),
        (0, 60 * NS_PER_S - 1, 6),
        (0, 60 * NS_PER_S, 1),
    ],
    ids=["never-ready", "ready-but-not-for-long", "stable"],
)
def test_failures_are_forgotten_after_a_stable_run(
    ready_ns: int | None, exited_ns: int, failures: int
) -> None:
    assert BACK_OFF.count_failures(5, ready_ns=ready_ns, exited_ns=exited_ns) == failures
