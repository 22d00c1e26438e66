"""The forms of step time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.steptime import RooflineForm, StepShape, StepTimeForm, UnitForm

ROOFLINE = RooflineForm(
    c0_ns=10_000, c1_ns_per_token=100, c2_ns_per_context_token=2, c4_ns_per_request=50
)


def shape(requests: int = 1, tokens: int = 1, context: int = 1, chunk: int = 1) -> StepShape:
    return StepShape(
        num_requests=requests, num_tokens=tokens, context_tokens=context, max_chunk_tokens=chunk
    )


@pytest.mark.parametrize(
    ("step", "expected_ns"),
    [
        pytest.param(shape(1, 1, 100), 10_000 + 200 + 50, id="few-tokens-read-the-weights"),
        pytest.param(shape(1, 100, 0), 10_000 + 50, id="the-knee-is-where-both-are-equal"),
        pytest.param(shape(4, 500, 1000), 50_000 + 2000 + 200, id="many-tokens-compute"),
        pytest.param(shape(0, 0, 0, 0), 10_000, id="an-empty-step-reads-the-weights-too"),
    ],
)
def test_roofline_step(step: StepShape, expected_ns: int) -> None:
    assert ROOFLINE.step_ns(step) == expected_ns


SHAPES = st.builds(shape, *(st.integers(0, 10**6) for _ in range(4)))


@given(one=SHAPES, more=SHAPES)
def test_a_larger_step_never_takes_less_time(one: StepShape, more: StepShape) -> None:
    larger = shape(
        one.num_requests + more.num_requests,
        one.num_tokens + more.num_tokens,
        one.context_tokens + more.context_tokens,
        one.max_chunk_tokens + more.max_chunk_tokens,
    )
    forms: list[StepTimeForm] = [ROOFLINE, UnitForm(), UnitForm(chunk_tokens=7)]
    for form in forms:
        assert form.step_ns(larger) >= form.step_ns(one) >= 1


@pytest.mark.parametrize(
    ("chunk_tokens", "largest", "units"),
    [(None, 10_000, 1), (512, 1, 1), (512, 512, 1), (512, 513, 2), (512, 0, 1)],
)
def test_unit_steps_count_whole_chunks(chunk_tokens: int | None, largest: int, units: int) -> None:
    form = UnitForm(unit_ns=5, chunk_tokens=chunk_tokens)
    assert form.step_ns(shape(chunk=largest)) == 5 * units


def test_a_step_takes_at_least_a_nanosecond() -> None:
    free = RooflineForm(c0_ns=0, c1_ns_per_token=0, c2_ns_per_context_token=0, c4_ns_per_request=0)
    assert free.step_ns(shape()) == 1
