"""Fitting a roofline to timed steps."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goodput_core.steptime import PiecewiseForm, RooflineForm, StepShape, largest_prefill
from goodput_core.steptime.fitting import (
    StepSample,
    errors_ppm,
    fit_roofline,
    hold_out,
    nonnegative_least_squares,
)
from goodput_core.steptime.piecewise import fit_piecewise
from goodput_core.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Callable

LAW = RooflineForm(
    c0_ns=6e6, c1_ns_per_token=30_000, c2_ns_per_context_token=50, c4_ns_per_request=5_000
)
_MATRICES = st.integers(1, 9).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(-9, 9), min_size=width + 1, max_size=width + 1),
        min_size=1,
        max_size=12,
    )
)


@given(rows=_MATRICES)
def test_least_squares_without_negative_coefficients_are_optimal(rows: list[list[int]]) -> None:
    width = len(rows[0]) - 1
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(width)] for i in range(width)]
    right = [sum(row[i] * row[-1] for row in rows) for i in range(width)]
    found = nonnegative_least_squares(gram, right)
    # Karush, Kuhn and Tucker: no allowed change of a coefficient lowers the error.
    for i, x in enumerate(found):
        slope = sum(gram[i][j] * found[j] for j in range(width)) - right[i]
        assert x >= 0
        assert slope >= -1e-6 * (1 + abs(right[i]))
        assert abs(slope) <= 1e-6 * (1 + abs(right[i])) or x == 0


def steps(
    count: int,
    *,
    law: RooflineForm = LAW,
    most_prefill: int = 2048,
    fewest_decodes: int = 0,
    most_decodes: int = 200,
    prefills: float = 0.4,
    noise: Callable[[random.Random], float] = lambda _: 1.0,
) -> list[StepSample]:
    """Return steps of an artificial load, timed by a law."""
    draw = random.Random(count)
    samples = []
    for _ in range(count):
        decodes = draw.randint(fewest_decodes, most_decodes)
        shape = StepShape.of(
            decodes=decodes, decode_context_tokens=decodes * draw.randint(100, 3000)
        )
        if not decodes or draw.random() < prefills:
            start = draw.choice([0, 0, 2048])
            shape = shape.with_chunk(start, draw.randint(min(1, most_prefill), most_prefill))
        samples.append(StepSample(shape, max(1, round(law.step_ns(shape) * noise(draw)))))
    return samples


def assert_like(found: RooflineForm, law: RooflineForm, rel: float) -> None:
    assert found.c0_ns == pytest.approx(law.c0_ns, rel=rel)
    assert found.c1_ns_per_token == pytest.approx(law.c1_ns_per_token, rel=rel)
    assert found.c2_ns_per_context_token == pytest.approx(law.c2_ns_per_context_token, rel=rel)
    assert found.c4_ns_per_request == pytest.approx(law.c4_ns_per_request, rel=rel, abs=500)


@given(
    c0_ms=st.floats(2, 20),
    bend=st.integers(60, 600),
    c2=st.floats(5, 100),
    c4=st.floats(0, 20_000),
)
@settings(deadline=None)
def test_the_law_of_the_steps_is_found_for_any_bend(
    c0_ms: float, bend: int, c2: float, c4: float
) -> None:
    law = RooflineForm(
        c0_ns=c0_ms * NS_PER_MS,
        c1_ns_per_token=c0_ms * NS_PER_MS / bend,
        c2_ns_per_context_token=c2,
        c4_ns_per_request=c4,
    )
    assert_like(fit_roofline(steps(300, law=law)), law, rel=0.001)


def test_noise_of_the_clock_averages_out() -> None:
    noisy = steps(5000, noise=lambda draw: draw.gauss(1, 0.03))
    fit, held_out = hold_out(noisy)
    found = fit_roofline(fit)
    assert_like(found, LAW, rel=0.02)
    errors = sorted(errors_ppm(found, held_out))
    assert 15_000 < errors[len(errors) // 2] < 25_000, "the median of |N(0, 3 %)| is 2.02 %"


def test_the_law_has_the_mean_of_steps_that_other_processes_delay() -> None:
    form = fit_roofline(steps(4000, noise=lambda draw: draw.choice((1.0, 1.2, 2.5))))
    for decodes, chunk in ((20, 0), (0, 1500), (50, 1500)):
        shape = StepShape.of(
            decodes=decodes,
            decode_context_tokens=decodes * 1000,
            chunks=[(0, chunk)] if chunk else [],
        )
        mean_ns = LAW.step_ns(shape) * (1.0 + 1.2 + 2.5) / 3
        assert form.step_ns(shape) == pytest.approx(mean_ns, rel=0.05)


def test_no_cost_is_negative_under_strong_noise() -> None:
    for seed in range(20):
        wild = steps(60 + seed, noise=lambda draw: draw.lognormvariate(0, 0.3))
        form = fit_roofline(wild)
        assert form.c2_ns_per_context_token >= 0
        assert form.c4_ns_per_request >= 0


# Iteration times of a 70B model on H100: 32 decodes of 1,024 tokens of context beside a prefill.
_BESIDE = StepShape.of(decodes=32, decode_context_tokens=32 * 1024)
_PUBLISHED = [
    StepSample(_BESIDE.with_chunk(0, tokens) if tokens else _BESIDE, ms * NS_PER_MS)
    for tokens, ms in ((0, 21), (128, 72), (256, 126), (512, 237), (1024, 460))
]


def test_a_device_fitted_to_the_published_70b_times_meets_them_and_their_chunk() -> None:
    form = fit_roofline(_PUBLISHED, least_per_side=1)
    assert max(errors_ppm(form, _PUBLISHED)) <= 50_000
    chunk = largest_prefill(form, beside=_BESIDE, target_ns=100 * NS_PER_MS, most_tokens=2048)
    assert 192 <= chunk <= 208
    assert chunk - chunk % 64 == 192


@pytest.mark.parametrize(
    ("samples", "problem"),
    [
        pytest.param(steps(15), "are too few", id="too-few"),
        pytest.param(steps(1), "1 steps of 1 different sizes are too few", id="one"),
        pytest.param([], "0 steps of 0 different sizes", id="none"),
        pytest.param(
            steps(500, most_prefill=40, most_decodes=100), "no step is large", id="only-small"
        ),
        pytest.param(
            steps(500, fewest_decodes=400, most_decodes=900), "no step is small", id="only-large"
        ),
    ],
)
def test_steps_on_one_side_of_the_bend_are_rejected(
    samples: list[StepSample], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        fit_roofline(samples)


@given(count=st.integers(0, 400))
def test_a_fifth_is_held_out_in_sections(count: int) -> None:
    shape = StepShape.of()
    samples = [StepSample(shape, i + 1) for i in range(count)]
    fit, held_out = hold_out(samples)
    assert sorted(sample.step_ns for sample in fit + held_out) == [*range(1, count + 1)]
    assert abs(len(held_out) - count / 5) <= 5
    cuts = [b.step_ns - a.step_ns != 1 for a, b in pairwise(held_out)]
    assert sum(cuts) <= 4


CURVE = PiecewiseForm(
    tokens=(1, 8, 32, 512),
    times_ns=(66e6, 100e6, 192e6, 1_400e6),
    c2_ns_per_context_token=900,
    c3_ns_per_square=40,
    c4_ns_per_request=300_000,
)


def test_a_curve_over_tokens_is_recovered_within_the_noise() -> None:
    draw = random.Random(5)
    samples = []
    for _ in range(3000):
        decodes = draw.randint(0, 40)
        chunks = [(0, draw.randint(1, 480))] if not decodes or draw.random() < 0.3 else []
        shape = StepShape.of(
            decodes=decodes, decode_context_tokens=decodes * draw.randint(20, 900), chunks=chunks
        )
        samples.append(StepSample(shape, round(CURVE.step_ns(shape) * draw.gauss(1, 0.02))))
    training, held_out = hold_out(samples)
    errors = sorted(errors_ppm(fit_piecewise(training), held_out))
    assert errors[len(errors) // 2] < 16_000, "the median of |N(0, 2 %)| is 1.35 %"
    roofline_errors = sorted(errors_ppm(fit_roofline(training), held_out))
    assert roofline_errors[len(errors) // 2] > 25_000


def test_a_curve_has_the_mean_of_steps_that_other_processes_delay() -> None:
    """Many steps take up to twice their time. A fit to relative errors would be 15 % too low."""
    draw = random.Random(6)
    samples = []
    for _ in range(3000):
        decodes = draw.randint(0, 10)
        chunks = [(0, draw.randint(1, 200))] if not decodes or draw.random() < 0.3 else []
        shape = StepShape.of(decodes=decodes, decode_context_tokens=decodes * 100, chunks=chunks)
        delay = draw.choice((1.0, 1.2, 2.5))
        samples.append(StepSample(shape, round(CURVE.step_ns(shape) * delay)))
    form = fit_piecewise(samples)
    for decodes, chunks in ((1, []), (8, []), (0, [(0, 64)]), (4, [(0, 150)])):
        shape = StepShape.of(decodes=decodes, decode_context_tokens=decodes * 100, chunks=chunks)
        mean_ns = CURVE.step_ns(shape) * (1.0 + 1.2 + 2.5) / 3
        assert form.step_ns(shape) == pytest.approx(mean_ns, rel=0.05)


def test_a_curve_needs_steps_of_two_sizes() -> None:
    same = [StepSample(StepShape.of(decodes=4), 5_000_000)] * 100
    with pytest.raises(ValueError, match="100 steps of 1 different sizes are too few"):
        fit_piecewise(same)
    with pytest.raises(ValueError, match="0 steps of 0 different sizes are too few"):
        fit_piecewise([])
