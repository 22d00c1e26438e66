"""The closed-form token budget: the largest prefill whose predicted step is in time."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from goodput_core.steptime import (
    DeviceForm,
    DistServeForm,
    LinearTime,
    PiecewiseForm,
    RooflineForm,
    StepShape,
    StepTimeForm,
    TableForm,
    UnitForm,
    largest_prefill,
)

_MOST = 4096


def _by_trial(form: StepTimeForm, beside: StepShape, target_ns: int, start: int) -> int:
    """Find the largest chunk by bisection: a step grows with its chunk."""
    low, high = 0, _MOST
    while low < high:
        middle = (low + high + 1) // 2
        if form.step_ns(beside.with_chunk(start, middle)) <= target_ns:
            low = middle
        else:
            high = middle - 1
    return low


_COEFFICIENT = st.just(0.0) | st.floats(0.001, 1) | st.floats(1, 100_000)
_LINEAR = st.builds(
    LinearTime,
    fixed_ns=_COEFFICIENT,
    ns_per_context_token=_COEFFICIENT,
    ns_per_request=_COEFFICIENT,
)


@st.composite
def _tables(draw: st.DrawFn) -> TableForm:
    decodes = draw(st.lists(st.integers(1, 64), min_size=1, max_size=4))
    columns = draw(st.lists(st.integers(1, 2000), min_size=1, max_size=6))
    step = st.integers(0, 10**7)
    times: list[list[int]] = []
    above = [0] * (len(columns) + 1)
    for _ in decodes:
        row: list[int] = []
        for least in above:
            row.append(max(least, row[-1] if row else 1) + draw(step))
        above = row
        times.append(row)
    return TableForm(
        decodes=tuple(sum(decodes[: i + 1]) for i in range(len(decodes))),
        prefill_tokens=(0, *(sum(columns[: i + 1]) for i in range(len(columns)))),
        times_ns=tuple(map(tuple, times)),
    )


@st.composite
def _curves(draw: st.DrawFn) -> PiecewiseForm:
    gaps = draw(st.lists(st.integers(1, 500), min_size=2, max_size=6))
    rises = [draw(st.floats(0, 10**7)) for _ in gaps]
    return PiecewiseForm(
        tokens=tuple(sum(gaps[: i + 1]) for i in range(len(gaps))),
        times_ns=tuple(math.fsum(rises[: i + 1]) for i in range(len(rises))),
        c2_ns_per_context_token=draw(_COEFFICIENT),
        c3_ns_per_square=draw(st.just(0.0) | st.floats(1e-6, 100)),
        c4_ns_per_request=draw(_COEFFICIENT),
    )


_FORMS = st.one_of(
    _curves(),
    st.builds(
        RooflineForm,
        c0_ns=st.floats(0, 10**8),
        c1_ns_per_token=_COEFFICIENT,
        c2_ns_per_context_token=_COEFFICIENT,
        c4_ns_per_request=_COEFFICIENT,
    ),
    st.builds(
        DistServeForm,
        prefill_fixed_ns=st.floats(0, 10**8),
        prefill_ns_per_token=_COEFFICIENT,
        prefill_ns_per_square=st.just(0.0) | st.floats(1e-6, 100),
        small=_LINEAR,
        large=_LINEAR,
        large_from_requests=st.integers(1, 100),
    ),
    _tables(),
    st.builds(
        UnitForm, unit_ns=st.integers(1, 10**7), chunk_tokens=st.none() | st.integers(1, 1000)
    ),
)
_BESIDE = st.builds(
    lambda decodes, context, chunks: StepShape.of(
        decodes=decodes, decode_context_tokens=decodes * context, chunks=chunks
    ),
    st.integers(0, 200),
    st.integers(1, 5000),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 500)), max_size=2),
)
_DRAWN = RooflineForm(
    c0_ns=6e6, c1_ns_per_token=3e4, c2_ns_per_context_token=49, c4_ns_per_request=5e3
)


@given(
    form=_FORMS,
    beside=_BESIDE,
    target_ns=st.integers(0, 10**9),
    start=st.integers(0, 5000),
    multiple=st.sampled_from([1, 64]),
)
@example(_DRAWN, StepShape.of(decodes=32, decode_context_tokens=32_768), 25_000_000, 0, 64)
@example(UnitForm(chunk_tokens=100), StepShape.of(chunks=[(0, 101)]), 1_000_000, 0, 1)
def test_the_closed_form_equals_a_search(
    form: StepTimeForm, beside: StepShape, target_ns: int, start: int, multiple: int
) -> None:
    found = largest_prefill(
        form,
        beside=beside,
        target_ns=target_ns,
        start=start,
        most_tokens=_MOST,
        multiple=multiple,
    )
    assert found == _by_trial(form, beside, target_ns, start) // multiple * multiple


@given(
    form=_FORMS,
    decodes=st.integers(1, 300),
    contexts=st.lists(st.integers(0, 10**7), max_size=20),
)
@example(_DRAWN, 256, [1_000_003])
@example(
    RooflineForm(c0_ns=0, c1_ns_per_token=0, c2_ns_per_context_token=0, c4_ns_per_request=0), 1, [9]
)
def test_decode_times_equal_single_predictions(
    form: DeviceForm, decodes: int, contexts: list[int]
) -> None:
    shapes = [StepShape.of(decodes=decodes, decode_context_tokens=tokens) for tokens in contexts]
    assert form.decode_times(decodes, contexts) == list(map(form.step_ns, shapes))


class _Counting:
    """A form that counts its predictions."""

    def __init__(self, form: StepTimeForm) -> None:
        self.form = form
        self.predictions = 0

    def step_ns(self, shape: StepShape) -> int:
        self.predictions += 1
        return self.form.step_ns(shape)

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        return self.form.chunk_within(beside, start, limit_ns)


@given(form=_FORMS, beside=_BESIDE, target_ns=st.integers(0, 10**9))
def test_the_closed_form_needs_two_predictions_at_most(
    form: StepTimeForm, beside: StepShape, target_ns: int
) -> None:
    counting = _Counting(form)
    largest_prefill(counting, beside=beside, target_ns=target_ns, most_tokens=10**6)
    assert counting.predictions <= 2


@pytest.mark.parametrize(
    ("start", "tokens"),
    [pytest.param(0, 1500, id="a-new-prompt"), pytest.param(20_000, 1079, id="deep-in-a-prompt")],
)
def test_a_chunk_deep_in_a_long_prompt_is_smaller(start: int, tokens: int) -> None:
    form = DistServeForm(
        prefill_fixed_ns=0,
        prefill_ns_per_token=100_000,
        prefill_ns_per_square=1,
        small=LinearTime(fixed_ns=0, ns_per_context_token=0, ns_per_request=0),
        large=LinearTime(fixed_ns=0, ns_per_context_token=0, ns_per_request=0),
        large_from_requests=1,
    )
    found = largest_prefill(
        form, beside=StepShape.of(), start=start, target_ns=152_250_000, most_tokens=10_000
    )
    assert found == tokens
