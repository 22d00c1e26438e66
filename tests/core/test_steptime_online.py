"""The step-time law that is learned while an engine serves."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_core.steptime import (
    DistServeForm,
    LinearTime,
    OnlineStepTime,
    RooflineForm,
    StepShape,
    StepTimeForm,
    TableForm,
    UnitForm,
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
    """Return steps of an engine with a varying batch, every other step with a chunk."""
    rng = random.Random(seed)
    decodes = 20
    shapes: list[StepShape] = []
    for _ in range(steps):
        decodes = min(max(1, decodes + rng.randint(-3, 3)), 90)
        chunks = [(rng.choice([0, 0, 512]), rng.randint(1, 1500))] if rng.random() < 0.5 else []
        context = decodes * rng.randint(600, 1400)
        shapes.append(StepShape.of(decodes=decodes, decode_context_tokens=context, chunks=chunks))
    return shapes


def _learn(form: StepTimeForm, steps: int, *, factor: float = 1.0) -> OnlineStepTime:
    model = OnlineStepTime()
    for shape in _shapes(1, steps):
        model.observe(shape, round(form.step_ns(shape) * factor))
    return model


def _errors(model: OnlineStepTime, form: StepTimeForm, *, factor: float = 1.0) -> list[float]:
    return sorted(
        abs(model.step_ns(shape) / (form.step_ns(shape) * factor) - 1) for shape in _shapes(2, 400)
    )


# A model a tenth of the size, on which arithmetic shows only in long prompts.
_SMALL = RooflineForm(
    c0_ns=900_000, c1_ns_per_token=2_300, c2_ns_per_context_token=40, c4_ns_per_request=5_000
)
# Within its table nearly a straight line with an early bend.
_TABLE = TableForm(
    decodes=(32,),
    prefill_tokens=(0, 128, 256, 512, 1024),
    times_ns=((21_000_000, 72_000_000, 126_000_000, 237_000_000, 460_000_000),),
)


@pytest.mark.parametrize(
    ("form", "p50", "p95"),
    [
        pytest.param(_ROOFLINE, 0.01, 0.02, id="a roofline"),
        pytest.param(_SMALL, 0.01, 0.02, id="a small model"),
        pytest.param(_DISTSERVE, 0.02, 0.05, id="DistServe's form"),
        pytest.param(_TABLE, 0.05, 0.15, id="a table"),
        pytest.param(UnitForm(), 0.01, 0.02, id="every step alike"),
    ],
)
def test_two_hundred_steps_suffice_to_predict_a_device(
    form: StepTimeForm, p50: float, p95: float
) -> None:
    errors = _errors(_learn(form, 200), form)
    assert errors[200] < p50
    assert errors[380] < p95


def test_noise_of_three_percent_averages_out() -> None:
    rng = random.Random(5)
    model = OnlineStepTime()
    for shape in _shapes(1, 1000):
        model.observe(shape, round(_ROOFLINE.step_ns(shape) * rng.gauss(1, 0.03)))
    errors = _errors(model, _ROOFLINE)
    assert errors[200] < 0.02
    assert errors[380] < 0.05
    assert 0.015 < model.error < 0.035, "the mean of |N(0, 3 %)| is 2.4 %"


def test_first_predictions_are_those_of_the_prior() -> None:
    model = OnlineStepTime(prior=_ROOFLINE)
    assert _errors(model, _ROOFLINE)[380] < 0.1
    for shape in _shapes(1, 200):
        model.observe(shape, _DISTSERVE.step_ns(shape))
    assert _errors(model, _DISTSERVE)[200] < 0.02


def test_the_first_step_gives_the_scale_of_an_unknown_device() -> None:
    model = OnlineStepTime()
    prompt = StepShape.of(chunks=[(0, 1000)])
    model.observe(prompt, _ROOFLINE.step_ns(prompt))
    assert _errors(model, _ROOFLINE)[380] < 0.2


_DECODES = StepShape.of(decodes=32, decode_context_tokens=32_000)


@pytest.mark.parametrize("mix", [True, False], ids=["prompts and decodes", "decodes alone"])
def test_a_device_that_becomes_slower_is_followed_within_twenty_steps(mix: bool) -> None:
    model = _learn(_ROOFLINE, 300)
    slower = [
        (shape, round(_ROOFLINE.step_ns(shape) * 1.3))
        for shape in (_shapes(3, 60) if mix else [_DECODES] * 60)
    ]
    wrong: list[float] = []
    for shape, step_ns in slower:
        wrong.append(abs(model.step_ns(shape) / step_ns - 1))
        model.observe(shape, step_ns)
    assert wrong[0] > 0.2
    assert max(wrong[20:]) < 0.05
    errors = _errors(model, _ROOFLINE, factor=1.3)
    assert errors[200] < 0.1, "also for the kind of steps without new observations"
    assert errors[380] < 0.15


@pytest.mark.parametrize("form", [_ROOFLINE, _DISTSERVE, UnitForm()])
def test_a_slower_device_is_known_for_rare_steps_too(form: StepTimeForm) -> None:
    """Old steps show how the time depends on the shape, at the new speed."""
    model = _learn(form, 1000)
    for shape in [shape for shape in _shapes(3, 400) if not shape.prefill_tokens][:200]:
        model.observe(shape, 2 * form.step_ns(shape))
    assert _errors(model, form, factor=2)[200] < 0.05
    for shape in _shapes(4, 150):
        model.observe(shape, 2 * form.step_ns(shape))
    assert _errors(model, form, factor=2)[380] < 0.05


def test_a_load_with_other_steps_is_not_taken_for_another_device() -> None:
    """The fit explains both kinds of steps, and the first kind is still predicted afterwards."""
    few = [StepShape.of(decodes=2, decode_context_tokens=600 + at) for at in range(400)]
    many = [StepShape.of(decodes=200, decode_context_tokens=800_000 + at) for at in range(300)]
    model = OnlineStepTime()
    for shape in few + many:
        model.observe(shape, _ROOFLINE.step_ns(shape))
    for shape in (few[0], many[0]):
        assert model.step_ns(shape) == pytest.approx(_ROOFLINE.step_ns(shape), rel=0.02)


def test_one_delayed_step_changes_predictions_little() -> None:
    model = _learn(_ROOFLINE, 300)
    model.observe(_DECODES, 1_000 * _ROOFLINE.step_ns(_DECODES))
    assert max(_errors(model, _ROOFLINE)) < 0.5
    for _ in range(10):
        model.observe(_DECODES, _ROOFLINE.step_ns(_DECODES))
    assert max(_errors(model, _ROOFLINE)) < 0.1


def test_a_step_without_requests_is_ignored() -> None:
    model = _learn(_ROOFLINE, 300)
    for _ in range(100):
        model.observe(StepShape.of(), 50_000_000)
    assert model.steps == 300
    assert max(_errors(model, _ROOFLINE)) < 0.05


def test_learning_continues_after_a_hundred_thousand_steps() -> None:
    model = _learn(_ROOFLINE, 100)
    for _ in range(100_000):
        model.observe(_DECODES, _ROOFLINE.step_ns(_DECODES))
    assert _errors(model, _ROOFLINE)[200] < 0.02
    dearer = replace(_ROOFLINE, c1_ns_per_token=2 * _ROOFLINE.c1_ns_per_token)
    for shape in _shapes(1, 300):
        model.observe(shape, dearer.step_ns(shape))
    assert _errors(model, dearer)[200] < 0.02


def test_the_reported_error_is_the_recent_prediction_error() -> None:
    model = OnlineStepTime()
    shapes = _shapes(1, 200)
    model.observe(shapes[0], _ROOFLINE.step_ns(shapes[0]))
    first = model.error
    for shape in shapes[1:]:
        model.observe(shape, _ROOFLINE.step_ns(shape))
    assert model.error < 0.02 < first


def test_steady_decoding_does_not_change_predictions_of_prompts() -> None:
    model = _learn(_ROOFLINE, 300)
    for _ in range(2000):
        model.observe(_DECODES, _ROOFLINE.step_ns(_DECODES))
    assert _errors(model, _ROOFLINE)[200] < 0.02


@settings(max_examples=examples(100))
@given(
    observed=st.lists(st.tuples(st.integers(0, 399), st.integers(1, 10**10)), max_size=30),
    chosen=st.integers(0, 399),
)
def test_predictions_are_positive_after_any_observations(
    observed: list[tuple[int, int]], chosen: int
) -> None:
    shapes = _shapes(2, 400)
    model = OnlineStepTime()
    for which, step_ns in observed:
        model.observe(shapes[which], step_ns)
    assert model.step_ns(shapes[chosen]) >= 1


@settings(max_examples=examples(200))
@given(
    steps=st.integers(0, 60),
    beside=st.integers(0, 399),
    target_ns=st.integers(1, 200_000_000),
    start=st.integers(0, 4000),
)
def test_chunk_within_is_the_inverse_of_the_law(
    steps: int, beside: int, target_ns: int, start: int
) -> None:
    model = _learn(_DISTSERVE, steps)
    shape = _shapes(2, 400)[beside]
    tokens = largest_prefill(
        model, beside=shape, target_ns=target_ns, most_tokens=4096, start=start
    )
    if tokens:
        assert model.step_ns(shape.with_chunk(start, tokens)) <= target_ns
    if tokens < 4096:
        assert model.step_ns(shape.with_chunk(start, tokens + 1)) > target_ns
