"""The emulated device's clock: absolute deadlines, overlap of host and device, and when to stop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.steptime import StepShape
from goodput_engine.device.load import load_profile
from goodput_engine.executor.emulated import EmulatedExecutor, stop_length
from goodput_engine.messages import ExecutorInput, Submit
from goodput_engine.scheduler.plan import Chunk, Join, StepPlan

_MS = 1_000_000
_UNIT = load_profile("unit")


def _plan(
    plan_id: int,
    *,
    epoch: int = 0,
    chunks: tuple[Chunk, ...] = (),
    joined: tuple[Join, ...] = (),
    left: tuple[int, ...] = (),
) -> StepPlan:
    return StepPlan(
        plan_id=plan_id,
        at_ns=0,
        left=left,
        admitted=(),
        joined=joined,
        new_blocks=(),
        decode_epoch=epoch,
        num_decodes=1 if epoch else 0,
        chunks=chunks,
        shape=StepShape.of(decodes=1, decode_context_tokens=1),
    )


def _submit(
    rid: int = 1,
    *,
    length: int | None = None,
    max_output: int | None = None,
    tokens: int = 10,
    min_tokens: int = 0,
    ignore_eos: bool = False,
) -> Submit:
    return Submit(
        rid=rid,
        arrival_ns=0,
        input_tokens=tokens,
        max_output_tokens=max_output,
        executor=ExecutorInput(output_tokens=length, min_tokens=min_tokens, ignore_eos=ignore_eos),
    )


@given(st.lists(st.integers(0, 9 * _MS), min_size=1, max_size=50))
def test_waking_late_does_not_accumulate_while_the_device_is_busy(late: list[int]) -> None:
    executor = EmulatedExecutor(_UNIT)
    ready = 0
    for number, lateness in enumerate(late, 1):
        executor.submit(_plan(number), ready)
        deadline = executor.next_event_ns()
        assert deadline == number * _MS
        assert executor.collect(deadline - 1) is None
        result = executor.collect(deadline + lateness)
        assert result is not None
        ready = result.at_ns
    assert ready == len(late) * _MS
    assert executor.behind_ns == 0


def test_an_idle_device_starts_when_the_plan_comes() -> None:
    executor = EmulatedExecutor(_UNIT)
    executor.submit(_plan(1), 0)
    assert executor.collect(_MS) is not None
    executor.submit(_plan(2), 5 * _MS)
    assert executor.next_event_ns() == 6 * _MS


def test_too_late_sets_the_clock_back_and_counts_by_how_much() -> None:
    executor = EmulatedExecutor(_UNIT, max_late_ns=10 * _MS)
    executor.submit(_plan(1), 0)
    executor.submit(_plan(2), 0)
    result = executor.collect(12 * _MS)
    assert result is not None
    assert (result.at_ns, result.step_ns) == (12 * _MS, _MS)
    assert executor.behind_ns == 11 * _MS
    assert executor.next_event_ns() == 13 * _MS


@pytest.mark.parametrize(
    ("host_ms", "depth", "step_ms"),
    [(3, 0, 4.0), (3, 1, 3.0), (0.25, 0, 1.25), (0.25, 1, 1.0)],
    ids=["slow host adds", "slow host hides the device", "fast host adds", "fast host hides"],
)
def test_host_time_adds_without_a_plan_ahead_and_hides_behind_the_device_with_one(
    host_ms: float, depth: int, step_ms: float
) -> None:
    executor = EmulatedExecutor(replace(_UNIT, host_ns_per_step=round(host_ms * _MS)))
    ends: list[int] = []
    number = 0
    ready = 0
    while len(ends) < 20:
        while number - len(ends) <= depth:
            number += 1
            executor.submit(_plan(number), ready)
        deadline = executor.next_event_ns()
        assert deadline is not None
        result = executor.collect(deadline)
        assert result is not None
        ready = result.at_ns
        ends.append(ready)
    assert ends[-1] - ends[-11] == 10 * step_ms * _MS


def _stops(executor: EmulatedExecutor, plan: StepPlan) -> dict[int, str]:
    executor.submit(plan, 0)
    result = executor.collect(executor.next_event_ns() or 0)
    assert result is not None
    return dict(result.stopped)


def test_a_request_stops_with_the_token_that_reaches_its_hidden_length() -> None:
    executor = EmulatedExecutor(_UNIT)
    executor.add(_submit(1, length=3))
    first = Chunk(rid=1, start=0, num_tokens=10, samples=True, output_tokens=0)
    assert _stops(executor, _plan(1, chunks=(first,))) == {}
    join = Join(rid=1, start=10, output_tokens=1)
    assert _stops(executor, _plan(2, epoch=1, joined=(join,))) == {}
    assert _stops(executor, _plan(3, epoch=2)) == {1: "stop"}


def test_a_request_that_left_the_cohort_and_came_back_stops_no_earlier() -> None:
    executor = EmulatedExecutor(_UNIT)
    executor.add(_submit(1, length=4))
    executor.add(_submit(2, length=99))
    other = Join(rid=2, start=10, output_tokens=1)
    join = Join(rid=1, start=10, output_tokens=1)
    assert _stops(executor, _plan(1, epoch=1, joined=(other, join))) == {}
    assert _stops(executor, _plan(2, epoch=2, left=(1,))) == {}
    assert _stops(executor, _plan(3, epoch=3)) == {}
    again = Join(rid=1, start=11, output_tokens=2)
    assert _stops(executor, _plan(4, epoch=4, joined=(again,))) == {}
    assert _stops(executor, _plan(5, epoch=5)) == {1: "stop"}


def test_one_token_answers_stop_with_their_prompt() -> None:
    executor = EmulatedExecutor(_UNIT)
    executor.add(_submit(1, length=1))
    chunk = Chunk(rid=1, start=0, num_tokens=10, samples=True, output_tokens=0)
    assert _stops(executor, _plan(1, chunks=(chunk,))) == {1: "stop"}


def test_a_forgotten_request_leaves_nothing_behind() -> None:
    executor = EmulatedExecutor(_UNIT)
    executor.add(_submit(1, length=3))
    join = Join(rid=1, start=10, output_tokens=1)
    _stops(executor, _plan(1, epoch=1, joined=(join,)))
    executor.forget([1])
    assert _stops(executor, _plan(2, epoch=2, left=(1,))) == {}
    assert executor._sequences == {}
    assert executor._ends == {}


@pytest.mark.parametrize(
    ("submit", "length"),
    [
        (_submit(length=7), 7),
        (_submit(length=7, max_output=8), 7),
        (_submit(length=7, max_output=7), None),
        (_submit(length=0), 1),
        (_submit(length=7, ignore_eos=True), 7),
        (_submit(ignore_eos=True, max_output=9), None),
        (_submit(max_output=9), None),
        (_submit(min_tokens=300), 300),
        (_submit(min_tokens=300, max_output=200), None),
    ],
    ids=[
        "a row's own",
        "below the bound",
        "at the bound",
        "never empty",
        "a row's own wins",
        "to the bound",
        "cut by the bound",
        "at least",
        "the bound wins",
    ],
)
def test_an_answer_ends_by_the_documented_rule(submit: Submit, length: int | None) -> None:
    assert stop_length(submit) == length


@given(st.integers(1, 10**6))
def test_an_unpinned_answer_has_64_to_256_tokens_and_always_the_same(tokens: int) -> None:
    length = stop_length(_submit(tokens=tokens))
    assert length is not None
    assert 64 <= length <= 256
    assert stop_length(_submit(rid=9, tokens=tokens)) == length
