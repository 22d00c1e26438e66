"""Backlogs, and what requests in one queue are worth."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_replay.statistics.backlog import Backlogs, effective_size, find_backlogs

WAITS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=40)


def backlogs(*waits: tuple[int, int]) -> Backlogs:
    """From pairs of (when patience ended, when the first token came)."""
    overdue, until = np.array(waits, dtype=np.int64).reshape(-1, 2).T
    return find_backlogs(overdue, until)


def spans(found: Backlogs) -> list[tuple[int, int]]:
    return list(zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True))


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        pytest.param([], [], id="no-requests"),
        pytest.param([(10, 5), (20, 20)], [], id="nobody-overdue"),
        pytest.param([(10, 15)], [(10, 15)], id="one-overdue-request"),
        pytest.param([(10, 15), (12, 30)], [(10, 30)], id="overlapping-waits-are-one-backlog"),
        pytest.param([(10, 30), (12, 15)], [(10, 30)], id="a-short-wait-within-a-long-one"),
        pytest.param([(10, 15), (15, 20)], [(10, 20)], id="touching-waits-are-one-backlog"),
        pytest.param([(16, 20), (10, 15)], [(10, 15), (16, 20)], id="a-gap-ends-a-backlog"),
    ],
)
def test_backlogs_are_maximal_stretches_with_somebody_overdue(
    waits: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    found = backlogs(*waits)
    assert spans(found) == expected
    assert found.longest_ns == max((end - start for start, end in expected), default=0)


@pytest.mark.parametrize(
    ("scheduled", "until", "expected"),
    [
        pytest.param(0, 9, -1, id="answered-before-it-began"),
        pytest.param(0, 10, 0, id="still-waiting-when-it-began"),
        pytest.param(12, 13, 0, id="in-the-midst-of-it"),
        pytest.param(15, 40, 0, id="first-of-two"),
        pytest.param(16, 19, -1, id="between-two"),
        pytest.param(25, 26, 1, id="second"),
        pytest.param(31, 90, -1, id="after-the-last"),
    ],
)
def test_a_request_belongs_to_the_first_backlog_it_waited_in(
    scheduled: int, until: int, expected: int
) -> None:
    found = backlogs((10, 15), (20, 30))
    assert found.of(np.array([scheduled]), np.array([until])).tolist() == [expected]


def test_without_backlogs_nobody_is_in_one() -> None:
    assert backlogs().of(np.array([1, 2]), np.array([3, 4])).tolist() == [-1, -1]


@given(waits=WAITS)
def test_backlogs_cover_exactly_the_instants_at_which_somebody_is_overdue(
    waits: list[tuple[int, int]],
) -> None:
    pairs = [(overdue, overdue + late) for overdue, late in waits]
    found = spans(backlogs(*pairs))
    for instant in range(270):
        overdue = any(start <= instant < end for start, end in pairs)
        assert overdue == any(start <= instant < end for start, end in found)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("clusters", "worth"),
    [
        pytest.param([1, 2, 3, 4], 4.0, id="all-alone"),
        pytest.param([7, 7, 7, 7], 1.0, id="all-in-one-queue"),
        pytest.param([1, 1, 2, 2], 2.0, id="two-equal-queues"),
        pytest.param([1, 1, 1, 2], 1.6, id="one-queue-and-one-alone"),
    ],
)
def test_requests_of_one_queue_are_worth_one(clusters: list[int], worth: float) -> None:
    assert effective_size(np.array(clusters)) == pytest.approx(worth)
