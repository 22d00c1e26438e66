"""The curve of a control law: GPU-hours over the time below an objective."""

from __future__ import annotations

import pytest
from benchmarks.control import above_curves
from benchmarks.scaling.control_view import LawResult, gpu_hours_at

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


def result(law: str, below_h: float, device_h: float) -> LawResult:
    return LawResult(
        law=law,
        target=None,
        device_h=device_h,
        peak=1,
        mean=1,
        final=1,
        ups=0,
        downs=0,
        below_h=below_h,
        classes={},
        outcomes={},
        changes=[],
    )


@pytest.mark.parametrize(
    ("below_h", "device_h", "above"),
    [
        pytest.param(0.5, 11.9, [], id="below the curve"),
        pytest.param(0.5, 12.0, ["hpa"], id="on the curve"),
        pytest.param(0.0, 99.0, ["hpa"], id="above a point"),
        pytest.param(3.0, 11.0, ["hpa", "llm-d"], id="above two curves"),
    ],
)
def test_our_law_must_lie_below_each_curve(
    below_h: float, device_h: float, above: list[str]
) -> None:
    others = [*(result("hpa", *point) for point in POINTS), result("llm-d", 1.0, 11.0)]
    fixed = result("fixed-mean", 0.0, 1.0)
    assert above_curves([*others, fixed, result("ours", below_h, device_h)]) == above
