"""The length predictor: learning, classes, its error, and forgetting."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_engine.scheduler.prediction import KnownLengths, LearnedLengths, PredictionError
from goodput_engine.scheduler.request_table import ScheduledRequest


def _request(slo_class: str = "chat", *, has: int = 0, limit: int = 1000) -> ScheduledRequest:
    return ScheduledRequest(
        rid=1,
        arrival_ns=0,
        input_tokens=1,
        slo_class=slo_class,
        output_limit=limit,
        base_sampled=has,
        base_emitted=has,
    )


def _taught(answers: dict[str, list[int]]) -> LearnedLengths:
    lengths = LearnedLengths()
    for slo_class, tokens in answers.items():
        for has in tokens:
            lengths.learn(_request(slo_class, has=has))
    return lengths


def test_before_anything_is_known_an_answer_is_as_long_as_it_may_be() -> None:
    assert LearnedLengths().output_tokens(_request(limit=123)) == 123


def test_a_class_is_predicted_by_its_own_answers() -> None:
    lengths = _taught({"chat": [10] * 20, "batch": [500] * 20})
    assert lengths.output_tokens(_request("chat")) == 10
    assert lengths.output_tokens(_request("batch")) == 500


def test_a_class_without_answers_is_predicted_by_those_of_all() -> None:
    lengths = _taught({"chat": [10] * 20, "batch": [500] * 20, "rare": [7] * 3})
    assert lengths.output_tokens(_request("rare")) == pytest.approx(255, rel=0.1)
    assert lengths.output_tokens(_request("new")) == lengths.output_tokens(_request("rare"))


def test_what_an_answer_has_already_rules_out_shorter_ones() -> None:
    lengths = _taught({"chat": [10] * 30 + [100] * 10})
    assert lengths.output_tokens(_request(has=5)) == pytest.approx(32, rel=0.1)
    assert lengths.output_tokens(_request(has=20)) == 100
    assert lengths.output_tokens(_request(has=200)) == 400, "longer than all: as long again"


@given(
    answers=st.lists(st.integers(1, 2000), max_size=60),
    limit=st.integers(1, 1000),
    has=st.integers(0, 999),
)
def test_a_prediction_is_more_than_there_is_and_no_more_than_there_may_be(
    answers: list[int], limit: int, has: int
) -> None:
    has = min(has, limit - 1)
    lengths = _taught({"chat": answers})
    assert has < lengths.output_tokens(_request(has=has, limit=limit)) <= limit


def test_a_change_of_lengths_is_followed() -> None:
    lengths = _taught({"chat": [10] * 5000 + [300] * 5000})
    assert lengths.output_tokens(_request()) == pytest.approx(300, rel=0.05)


def test_the_revision_rises_after_an_eighth_more_answers() -> None:
    lengths = LearnedLengths()
    seen = []
    for _ in range(5000):
        lengths.learn(_request(has=10))
        seen.append(lengths.revision)
    assert seen == sorted(seen)
    assert seen[7] >= 2, "at once where there is little evidence"
    assert seen[-1] - seen[-1025] == 2 * 8, "of the class, and of all"


def test_memory_is_bounded_whatever_classes_and_lengths_come() -> None:
    lengths = LearnedLengths()
    draw = random.Random(4)
    for i in range(20_000):
        lengths.learn(_request(f"class-{i % 500}", has=draw.randint(1, 1 << 20)))
    assert len(lengths.errors) <= 64
    assert len(lengths._all._weights) <= 8 * 20 + 1


def test_its_error_is_the_mean_log_ratio_of_its_predictions() -> None:
    lengths = _taught({"chat": [100] * 8})
    assert lengths.error.judged == 8
    assert lengths.error.mean_abs_log_ratio == pytest.approx(math.log(10))
    for _ in range(8):
        lengths.learn(_request(has=100))
    assert lengths.error.judged == 16
    assert lengths.error.mean_abs_log_ratio == pytest.approx(math.log(10) / 2)
    for _ in range(20_000):
        lengths.learn(_request(has=100))
    assert lengths.error.mean_abs_log_ratio < 0.001, "old mistakes fade"


def test_its_error_is_kept_by_class() -> None:
    lengths = _taught({"even": [100] * 500, "wild": [10, 1000] * 250})
    assert lengths.errors["even"].mean_abs_log_ratio < 0.1
    assert lengths.errors["wild"].mean_abs_log_ratio > 1
    assert lengths.error.judged == 1000


def test_the_oracle_is_never_wrong_but_for_the_limit() -> None:
    known = KnownLengths({1: 700}.__getitem__)
    assert known.output_tokens(_request()) == 700
    assert known.output_tokens(_request(limit=50)) == 50
    known.learn(_request(has=700))
    assert known.error == PredictionError()
