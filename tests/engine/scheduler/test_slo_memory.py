"""The most KV memory that running requests will hold at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from goodput_engine.scheduler.policies.slo.demand import TokensInMemory


def _simulated(requests: list[tuple[int, int]]) -> int:
    """Every request grows by one token a step and leaves with its last."""
    peak = sum(held for held, _ in requests)
    for step in range(1, max((left for _, left in requests), default=0) + 1):
        peak = max(peak, sum(held + step for held, left in requests if left >= step))
    return peak


@given(
    requests=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), max_size=8),
    new=st.integers(0, 50),
    steps=st.integers(1, 60),
)
def test_the_peak_beside_a_new_request_is_that_of_its_stay(
    requests: list[tuple[int, int]], new: int, steps: int
) -> None:
    held = TokensInMemory([(tokens, left) for tokens, left in requests])
    stay = [(tokens, min(left, steps)) for tokens, left in requests]
    assert held.peak_beside(new, after=0, steps=steps) == _simulated([*stay, (new, steps)])


def test_the_peak_beside_a_new_request_counts_what_others_have_gained_since() -> None:
    held = TokensInMemory([(100, 50)])
    assert held.peak_beside(10, after=20, steps=10) == 100 + 30 + 10 + 10
    assert held.peak_beside(10, after=20, steps=40) == 10 + 30 + 100 + 50, "when the other ends"
    assert held.peak_beside(500, after=20, steps=200) == 500 + 200, "at its own end"
