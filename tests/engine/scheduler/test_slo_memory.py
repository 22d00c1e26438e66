"""The most KV memory that running requests will hold at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_engine.scheduler.policies.slo.memory import peak_tokens


def _simulated(requests: list[tuple[int, int]]) -> int:
    """Every request grows by one token a step and leaves with its last."""
    peak = sum(held for held, _ in requests)
    for step in range(1, max((left for _, left in requests), default=0) + 1):
        peak = max(peak, sum(held + step for held, left in requests if left >= step))
    return peak


@given(requests=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=8))
def test_the_peak_is_what_a_step_by_step_count_finds(requests: list[tuple[int, int]]) -> None:
    assert peak_tokens([(held, float(left)) for held, left in requests]) == _simulated(requests)


@pytest.mark.parametrize(
    ("requests", "peak"),
    [([], 0), ([(10, 5)], 15), ([(100, 1), (10, 50)], 112), ([(10, 50), (10, 50)], 120)],
    ids=["nobody", "one grows", "one leaves before the other has grown", "both grow"],
)
def test_an_early_end_makes_room(requests: list[tuple[int, float]], peak: float) -> None:
    assert peak_tokens(requests) == peak
