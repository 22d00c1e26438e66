"""The curve of a control law: GPU-hours over the time below an objective."""

from __future__ import annotations

import pytest
from benchmarks.control_view import gpu_hours_at

POINTS = [(0.0, 14.0), (1.0, 10.0), (0.5, 16.0), (2.0, 9.0)]


@pytest.mark.parametrize(
    ("below_h", "expected"),
    [
        pytest.param(0.0, 14.0, id="a point"),
        pytest.param(0.5, 12.0, id="between two points, without one that others beat"),
        pytest.param(1.5, 9.5, id="the next line"),
        pytest.param(3.0, 9.0, id="beyond the last point"),
    ],
)
def test_gpu_hours_follow_the_lines_between_the_best_runs(below_h: float, expected: float) -> None:
    assert gpu_hours_at(POINTS, below_h) == pytest.approx(expected)


def test_a_law_that_is_never_as_little_below_an_objective_has_no_value() -> None:
    assert gpu_hours_at([(1.0, 10.0)], 0.5) is None
