"""The deadlines of many steps at once are those of one after the other."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import example, given
from hypothesis import strategies as st

from goodput_engine.executor.emulated import foresee


def _one_by_one(
    under_way: list[int], times: list[int], host_ns: int, host_free_ns: int
) -> tuple[list[int], list[int]]:
    """As `EmulatedExecutor.submit` has it."""
    done, made = list(under_way), []
    for step, time_ns in enumerate(times):
        host_free_ns = max(done[step], host_free_ns) + host_ns
        made.append(host_free_ns)
        done.append(max(done[-1], host_free_ns) + time_ns)
    return done, made


@given(
    gaps=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    times=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    host_ns=st.integers(0, 40),
    host_ahead_ns=st.integers(0, 60),
)
@example(gaps=[10, 10], times=[9, 9], host_ns=10, host_ahead_ns=20)
@example(gaps=[10, 3], times=[10, 10], host_ns=10, host_ahead_ns=20)
@example(gaps=[10, 10], times=[10, 10], host_ns=10, host_ahead_ns=3)
def test_many_steps_at_once_are_done_when_one_after_the_other_would_be(
    gaps: list[int], times: list[int], host_ns: int, host_ahead_ns: int
) -> None:
    under_way = list(accumulate(gaps, initial=100))[1:]
    host_free_ns = under_way[-1] - host_ahead_ns
    done, made = foresee(under_way, times, host_ns=host_ns, host_free_ns=host_free_ns)
    if made is None:
        made = [ready_ns + host_ns for ready_ns in done[: len(times)]]
    assert (done, made) == _one_by_one(under_way, times, host_ns, host_free_ns)
