"""The forms of step time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.steptime import (
    DistServeForm,
    LinearTime,
    RooflineForm,
    StepShape,
    StepTimeForm,
    TableForm,
    UnitForm,
)

ROOFLINE = RooflineForm(
    c0_ns=10_000, c1_ns_per_token=100, c2_ns_per_context_token=2, c4_ns_per_request=50
)
DISTSERVE = DistServeForm(
    prefill_fixed_ns=1000,
    prefill_ns_per_token=10,
    prefill_ns_per_square=0.5,
    small=LinearTime(fixed_ns=2000, ns_per_context_token=3, ns_per_request=7),
    large=LinearTime(fixed_ns=500, ns_per_context_token=2, ns_per_request=90),
    large_from_requests=4,
)
TABLE = TableForm(
    decodes=(8, 16),
    prefill_tokens=(0, 100, 300),
    times_ns=((1000, 2000, 6000), (3000, 5000, 8000)),
)
FORMS: list[StepTimeForm] = [ROOFLINE, DISTSERVE, TABLE, UnitForm(), UnitForm(chunk_tokens=7)]


def shape(decodes: int = 0, context: int = 0, *chunks: tuple[int, int]) -> StepShape:
    return StepShape.of(decodes=decodes, decode_context_tokens=context, chunks=chunks)


def test_a_shape_is_the_sum_of_its_requests() -> None:
    assert shape(3, 300, (0, 10), (20, 5)) == StepShape(
        num_requests=5,
        num_tokens=18,
        context_tokens=335,
        max_chunk_tokens=10,
        num_decodes=3,
        decode_context_tokens=300,
        prefill_squares=10**2 + 25**2 - 20**2,
    )
    assert shape(3, 300, (0, 10), (20, 5)).prefill_tokens == 15
    assert shape(2, 9).max_chunk_tokens == 1


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=9))
def test_the_chunks_of_a_prompt_add_up_to_its_square(lengths: list[int]) -> None:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    chunks = list(zip(starts, lengths, strict=True))
    assert StepShape.of(chunks=chunks).prefill_squares == sum(lengths) ** 2


@pytest.mark.parametrize(
    ("step", "expected_ns"),
    [
        pytest.param(shape(1, 100), 10_000 + 200 + 50, id="few-tokens-read-the-weights"),
        pytest.param(shape(100, 0), 10_000 + 5000, id="the-knee-is-where-both-are-equal"),
        pytest.param(
            shape(3, 503, (0, 497)), 50_000 + 2000 + 200, id="many-tokens-are-bound-by-arithmetic"
        ),
        pytest.param(shape(), 10_000, id="an-empty-step-reads-the-weights-too"),
    ],
)
def test_roofline_step(step: StepShape, expected_ns: int) -> None:
    assert ROOFLINE.step_ns(step) == expected_ns


@pytest.mark.parametrize(
    ("step", "expected_ns"),
    [
        pytest.param(shape(0, 0, (0, 20)), 1000 + 200 + 200, id="a-complete-prompt"),
        pytest.param(shape(0, 0, (0, 20), (0, 10)), 1000 + 300 + 250, id="two-prompts"),
        pytest.param(
            shape(0, 0, (10, 10)), 1000 + 100 + 150, id="a-second-chunk-attends-to-the-first"
        ),
        pytest.param(shape(3, 100), 2000 + 300 + 21, id="a-small-batch-of-decodes"),
        pytest.param(shape(4, 100), 500 + 200 + 360, id="a-large-batch-of-decodes"),
        pytest.param(shape(3, 100, (0, 20)), 2321 + 1400, id="both-kinds-are-added"),
    ],
)
def test_distserve_step(step: StepShape, expected_ns: int) -> None:
    assert DISTSERVE.step_ns(step) == expected_ns


@pytest.mark.parametrize(
    ("step", "expected_ns"),
    [
        pytest.param(shape(8, 9, (0, 100)), 2000, id="a-point-of-the-table"),
        pytest.param(shape(8, 9, (5, 100), (7, 100)), 4000, id="between-two-columns"),
        pytest.param(shape(12, 9), 2000, id="between-two-rows"),
        pytest.param(shape(12, 9, (0, 200)), 5250, id="between-four-points"),
        pytest.param(shape(2, 9, (0, 100)), 2000, id="fewer-decodes-than-the-first-row"),
        pytest.param(shape(0, 0, (0, 300)), 6000, id="no-decodes"),
        pytest.param(shape(26, 9), 3200, id="a-decode-beyond-the-last-row-is-a-prefill-token"),
        pytest.param(shape(16, 9, (0, 500)), 11_000, id="beyond-the-last-column"),
        pytest.param(shape(66, 9, (0, 350)), 9500, id="beyond-both"),
    ],
)
def test_table_step(step: StepShape, expected_ns: int) -> None:
    assert TABLE.step_ns(step) == expected_ns


@pytest.mark.parametrize(
    ("decodes", "columns", "times", "problem"),
    [
        ((8, 8), (0, 1), ((1, 2), (1, 2)), "decodes must increase"),
        ((8,), (0, 2, 1), ((1, 2, 3),), "prefill_tokens must increase"),
        ((8,), (1, 2), ((1, 2),), "prefill_tokens must begin with 0"),
        ((8,), (0,), ((1,),), "prefill_tokens must begin with 0 and have at least two"),
        ((), (0, 1), (), "decodes must have at least one number"),
        ((8,), (0, 1), ((1, 2), (1, 2)), "one row for each of decodes"),
        ((8,), (0, 1), ((1, 2, 3),), "one time for each of prefill_tokens"),
        ((8,), (0, 1), ((2, 1),), "times must not decrease"),
        ((8, 9), (0, 1), ((3, 4), (3, 3)), "times must not decrease"),
    ],
)
def test_invalid_tables_are_rejected(
    decodes: tuple[int, ...],
    columns: tuple[int, ...],
    times: tuple[tuple[int, ...], ...],
    problem: str,
) -> None:
    with pytest.raises(ValueError, match=problem):
        TableForm(decodes=decodes, prefill_tokens=columns, times_ns=times)


COUNTS = st.integers(0, 10**6)
SHAPES = st.builds(shape, COUNTS, COUNTS, st.tuples(COUNTS, COUNTS))


@pytest.mark.parametrize("form", FORMS, ids=repr)
@given(one=SHAPES, start=COUNTS, chunk=st.integers(0, 10**5), more=st.integers(0, 10**5))
def test_a_larger_chunk_never_makes_a_shorter_step(
    form: StepTimeForm, one: StepShape, start: int, chunk: int, more: int
) -> None:
    smaller, larger = one.with_chunk(start, chunk), one.with_chunk(start, chunk + more)
    assert form.step_ns(larger) >= form.step_ns(smaller) >= form.step_ns(one) >= 1


@pytest.mark.parametrize(
    ("chunk_tokens", "largest", "units"),
    [(None, 10_000, 1), (512, 1, 1), (512, 512, 1), (512, 513, 2), (512, 0, 1)],
)
def test_unit_steps_count_whole_chunks(chunk_tokens: int | None, largest: int, units: int) -> None:
    form = UnitForm(unit_ns=5, chunk_tokens=chunk_tokens)
    assert form.step_ns(shape(0, 0, (0, largest))) == 5 * units


@pytest.mark.parametrize("fields", [{"unit_ns": 0}, {"chunk_tokens": 0}], ids=str)
def test_units_and_chunks_of_nothing_are_rejected(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        UnitForm(**fields)


def test_a_step_takes_at_least_a_nanosecond() -> None:
    free = RooflineForm(c0_ns=0, c1_ns_per_token=0, c2_ns_per_context_token=0, c4_ns_per_request=0)
    assert free.step_ns(shape(1, 1)) == 1
