"""A step-time law learnt from the steps of a device that serves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goodput_core.steptime import (
    DistServeForm,
    LinearTime,
    OnlineStepTime,
    RooflineForm,
    StepShape,
    StepTimeForm,
    largest_prefill,
)

_ROOFLINE = RooflineForm(
    c0_ns=5_993_000, c1_ns_per_token=29_520, c2_ns_per_context_token=48.9, c4_ns_per_request=5_000
)
_DISTSERVE = DistServeForm(
    prefill_fixed_ns=18.1e6,
    prefill_ns_per_token=0.102e6,
    prefill_ns_per_square=7.12,
    small=LinearTime(fixed_ns=19.9e6, ns_per_context_token=627, ns_per_request=38_500),
    large=LinearTime(fixed_ns=7.17e6, ns_per_context_token=580, ns_per_request=158_000),
    large_from_requests=95,
)


def _shapes(seed: int, steps: int) -> list[StepShape]:
    """Steps of a serving engine: decodes that come and go, every other one with a chunk."""
    rng = random.Random(seed)
    decodes = 20
    shapes: list[StepShape] = []
    for _ in range(steps):
        decodes = min(max(1, decodes + rng.randint(-3, 3)), 90)
        chunks = [(rng.choice([0, 0, 512]), rng.randint(1, 1500))] if rng.random() < 0.5 else []
        context = decodes * rng.randint(600, 1400)
        shapes.append(StepShape.of(decodes=decodes, decode_context_tokens=context, chunks=chunks))
    return shapes


def _taught(form: StepTimeForm, steps: int, *, factor: float = 1.0) -> OnlineStepTime:
    model = OnlineStepTime()
    for shape in _shapes(1, steps):
        model.observe(shape, round(form.step_ns(shape) * factor))
    return model


def _errors(model: OnlineStepTime, form: StepTimeForm, *, factor: float = 1.0) -> list[float]:
    return sorted(
        abs(model.step_ns(shape) / (form.step_ns(shape) * factor) - 1) for shape in _shapes(2, 400)
    )


@pytest.mark.parametrize(
    ("form", "p50", "p95"),
    [(_ROOFLINE, 0.02, 0.05), (_DISTSERVE, 0.05, 0.15)],
    ids=["a roofline", "DistServe's form, of another kind"],
)
def test_a_device_is_known_after_two_hundred_steps(
    form: StepTimeForm, p50: float, p95: float
) -> None:
    errors = _errors(_taught(form, 200), form)
    assert errors[200] < p50
    assert errors[380] < p95


def test_a_device_that_turns_a_third_slower_is_followed_within_twenty_steps() -> None:
    model = _taught(_ROOFLINE, 300)
    slower = [(shape, round(_ROOFLINE.step_ns(shape) * 1.3)) for shape in _shapes(3, 25)]
    wrong: list[float] = []
    for shape, step_ns in slower:
        wrong.append(abs(model.step_ns(shape) / step_ns - 1))
        model.observe(shape, step_ns)
    assert wrong[0] > 0.2
    assert max(wrong[20:]) < 0.05


def test_its_own_error_tells_how_far_it_can_be_trusted() -> None:
    model = OnlineStepTime()
    shapes = _shapes(1, 200)
    model.observe(shapes[0], _ROOFLINE.step_ns(shapes[0]))
    first = model.error
    for shape in shapes[1:]:
        model.observe(shape, _ROOFLINE.step_ns(shape))
    assert model.error < 0.02 < first


def test_steady_decoding_does_not_make_it_forget_what_prompts_take() -> None:
    model = _taught(_ROOFLINE, 300)
    decode = StepShape.of(decodes=32, decode_context_tokens=32_000)
    for _ in range(2000):
        model.observe(decode, _ROOFLINE.step_ns(decode))
    assert _errors(model, _ROOFLINE)[200] < 0.02


@settings(max_examples=100)
@given(
    taught=st.lists(st.tuples(st.integers(0, 399), st.integers(1, 10**10)), max_size=30),
    asked=st.integers(0, 399),
)
def test_whatever_it_has_seen_a_prediction_is_positive(
    taught: list[tuple[int, int]], asked: int
) -> None:
    shapes = _shapes(2, 400)
    model = OnlineStepTime()
    for which, step_ns in taught:
        model.observe(shapes[which], step_ns)
    assert model.step_ns(shapes[asked]) >= 1


@settings(max_examples=200)
@given(
    steps=st.integers(0, 60),
    beside=st.integers(0, 399),
    target_ns=st.integers(1, 200_000_000),
    start=st.integers(0, 4000),
)
def test_it_is_turned_around_exactly(steps: int, beside: int, target_ns: int, start: int) -> None:
    model = _taught(_DISTSERVE, steps)
    shape = _shapes(2, 400)[beside]
    tokens = largest_prefill(
        model, beside=shape, target_ns=target_ns, most_tokens=4096, start=start
    )
    if tokens:
        assert model.step_ns(shape.with_chunk(start, tokens)) <= target_ns
    if tokens < 4096:
        assert model.step_ns(shape.with_chunk(start, tokens + 1)) > target_ns
