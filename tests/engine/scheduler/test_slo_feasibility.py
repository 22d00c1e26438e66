"""The largest number of jobs that can be done in time."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from goodput_engine.scheduler.policies.slo.feasibility import Job, most_in_time

_JOBS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 15)), max_size=8)


def _jobs(pairs: list[tuple[int, int]]) -> list[Job[int]]:
    return [Job(item=i, due_ns=due, work_ns=work) for i, (due, work) in enumerate(pairs)]


def _in_time(jobs: list[Job[int]], start_ns: int) -> bool:
    at_ns = start_ns
    for job in sorted(jobs, key=lambda j: j.due_ns):
        at_ns += job.work_ns
        if at_ns > job.due_ns:
            return False
    return True


@given(pairs=_JOBS, start_ns=st.integers(0, 10))
def test_no_larger_set_of_jobs_can_be_done_in_time(
    pairs: list[tuple[int, int]], start_ns: int
) -> None:
    jobs = _jobs(pairs)
    chosen, late = most_in_time(jobs, start_ns)
    assert sorted(j.item for j in chosen + late) == list(range(len(jobs)))
    assert [j.due_ns for j in chosen] == sorted(j.due_ns for j in chosen)
    assert _in_time(chosen, start_ns)
    assert not any(_in_time(list(more), start_ns) for more in combinations(jobs, len(chosen) + 1))


def test_what_takes_longest_is_given_up_for_the_many() -> None:
    chosen, late = most_in_time(_jobs([(10, 9), (11, 2), (12, 2), (13, 2)]), 0)
    assert [j.item for j in chosen] == [1, 2, 3]
    assert [j.item for j in late] == [0]


def test_jobs_that_are_due_together_keep_their_order() -> None:
    chosen, _ = most_in_time(_jobs([(20, 2), (20, 5), (20, 1)]), 0)
    assert [j.item for j in chosen] == [0, 1, 2]
