"""Confidence levels of several looks at growing evidence."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_core.slo.distributions import normal_quantile
from goodput_core.slo.looks import look_confidences


def test_five_equal_looks_have_the_published_bounds() -> None:
    """Jennison and Turnbull, "Group Sequential Methods", 1999, O'Brien–Fleming-like spending."""
    bounds = [normal_quantile(c) for c in look_confidences([1, 2, 3, 4, 5], 0.975)]
    assert bounds == pytest.approx([4.8769, 3.3569, 2.6803, 2.2898, 2.0310], abs=2e-4)


def test_one_look_keeps_its_confidence() -> None:
    assert look_confidences([4], 0.95) == pytest.approx((0.95,), abs=1e-9)


@settings(max_examples=examples(25), deadline=None)
@given(
    looks=st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).map(sorted),
    confidence=st.floats(0.8, 0.999),
)
def test_no_look_is_laxer_than_a_single_one(looks: list[int], confidence: float) -> None:
    levels = look_confidences(looks, confidence)
    assert len(levels) == len(looks)
    assert all(level >= confidence - 1e-6 for level in levels)


def test_a_true_limit_is_crossed_as_rarely_as_with_one_look() -> None:
    looks, rng = [4, 6, 8], random.Random(5)
    bounds = [normal_quantile(c) for c in look_confidences(looks, 0.95)]
    trials, crossed = 20_000, 0
    for _ in range(trials):
        total, count = 0.0, 0
        for look, bound in zip(looks, bounds, strict=True):
            total += rng.gauss(0, (look - count) ** 0.5)
            count = look
            if total > bound * look**0.5:
                crossed += 1
                break
    assert crossed / trials == pytest.approx(0.05, abs=3 * (0.05 * 0.95 / trials) ** 0.5)


@pytest.mark.parametrize("looks", [[], [0, 4], [4, 4], [6, 4]])
def test_looks_must_increase(looks: list[int]) -> None:
    with pytest.raises(ValueError, match="do not increase"):
        look_confidences(looks, 0.95)


@pytest.mark.parametrize("confidence", [0.49, 1.0, float("nan")])
def test_the_confidence_has_bounds(confidence: float) -> None:
    with pytest.raises(ValueError, match="out of bounds"):
        look_confidences([4], confidence)
