"""Prefill here, decode there: what the scheduler keeps, reserves and lets go."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from msgspec import structs
from tests.builders.schedulers import make_configure

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_MS
from goodput_engine.core.build import build_core
from goodput_engine.device.load import load_profile
from goodput_engine.messages import ExecutorInput, Submit

if TYPE_CHECKING:
    from goodput_engine.core.engine_core import EngineCore


def _core(*, blocks: int, depth: int, width: int = 8, policy: str = "sarathi") -> EngineCore:
    configure = make_configure(policy=policy, token_budget=1024, max_num_seqs=width, depth=depth)
    return build_core(configure, replace(load_profile("unit"), kv_blocks=blocks))


def _submit(rid: int, prompt: int, output: int, *, limit: int | None = None) -> Submit:
    return Submit(
        rid=rid,
        arrival_ns=0,
        input_tokens=prompt,
        max_output_tokens=limit,
        block_hashes=range(rid * 100, rid * 100 + prompt // 16),
        executor=ExecutorInput(output_tokens=output),
    )


def _run(core: EngineCore, now_ns: int) -> dict[int, list[int]]:
    """Everything until the core is idle: when each request got tokens."""
    times: dict[int, list[int]] = {}
    due: int | None = now_ns
    while due is not None:
        outputs = core.step(due)
        for output in outputs.outputs if outputs is not None else ():
            times.setdefault(output.rid, []).append(outputs.at_ns if outputs else 0)
        core.scheduler.check_integrity()
        due = core.next_event_ns()
    return times


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_that_keeps_its_blocks_holds_them_until_it_is_let_go(depth: int) -> None:
    core = _core(blocks=10, depth=depth)
    core.submit(_submit(1, 96, 1, limit=1), 0, holds_blocks=True)
    core.submit(_submit(2, 96, 1, limit=1), 0)
    assert set(_run(core, 0)) == {1}, "the other one does not fit beside it"
    assert core.scheduler.free_blocks == 4
    core.release_held(1)
    assert set(_run(core, 5 * NS_PER_MS)) == {2}
    assert not core.scheduler.has_work
    core.scheduler.check_integrity()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_that_is_taken_over_decodes_once_it_has_arrived(depth: int) -> None:
    core = _core(blocks=10, depth=depth)
    submit = _submit(1, 40, 5)
    assert core.reserve_transfer(submit, 0, emitted=1, first_token_ns=7)
    assert core.scheduler.free_blocks == 7, "three blocks for 41 tokens"
    assert _run(core, 0) == {}
    core.finish_transfer(1)
    # One token was given elsewhere, and no step is spent on the prompt.
    assert _run(core, 3 * NS_PER_MS) == {1: [at * NS_PER_MS for at in (4, 5, 6, 7)]}
    assert 4 <= core.scheduler.stats.scheduled_tokens <= 4 + depth, "beside what is surplus"
    assert not core.scheduler.has_work


def test_a_transferred_request_is_dropped_once_it_is_late() -> None:
    configure = make_configure(token_budget=1024, late_requests="drop")
    core = build_core(configure, load_profile("unit"))
    submit = structs.replace(_submit(1, 40, 9), targets=Targets(e2e_ns=2 * NS_PER_MS))
    assert core.reserve_transfer(submit, 0, emitted=1, first_token_ns=7)
    core.finish_transfer(1)
    assert _run(core, 0) == {1: [at * NS_PER_MS for at in (1, 2, 3)]}
    assert [(r.rid, r.reason) for r in core.take_rejected()] == [(1, "late")]


@pytest.mark.parametrize(
    ("blocks", "width", "room"),
    [(6, 8, True), (5, 8, False), (20, 1, False)],
    ids=["room for both", "too few blocks", "too narrow"],
)
def test_what_does_not_fit_is_not_taken_over(blocks: int, width: int, room: bool) -> None:
    core = _core(blocks=blocks, depth=0, width=width)
    assert core.reserve_transfer(_submit(1, 40, 5), 0, emitted=1, first_token_ns=0)
    assert core.reserve_transfer(_submit(2, 40, 5), 0, emitted=1, first_token_ns=0) is room
    core.scheduler.check_integrity()


def test_waiting_requests_precede_transferred_ones() -> None:
    core = _core(blocks=20, depth=0, width=1)
    core.submit(_submit(1, 16, 9), 0)
    core.step(0)
    core.submit(_submit(2, 16, 9), 0)
    assert not core.reserve_transfer(_submit(3, 16, 9), 0, emitted=1, first_token_ns=0)


@pytest.mark.parametrize("arrived", [False, True])
def test_one_that_was_taken_over_can_be_cancelled(arrived: bool) -> None:
    core = _core(blocks=10, depth=1)
    core.reserve_transfer(_submit(1, 40, 50), 0, emitted=1, first_token_ns=0)
    if arrived:
        core.finish_transfer(1)
        core.step(0)
    core.cancel(1)
    _run(core, NS_PER_MS)
    assert core.scheduler.free_blocks == 10
    assert not core.scheduler.has_work


@pytest.mark.parametrize("when_ms", [0, 1, 9])
def test_one_that_keeps_its_blocks_can_be_cancelled(when_ms: int) -> None:
    core = _core(blocks=10, depth=1)
    core.submit(_submit(1, 40, 1, limit=1), 0, holds_blocks=True)
    core.step(0)
    if when_ms:
        core.step(when_ms * NS_PER_MS)
    core.cancel(1)
    _run(core, (when_ms + 1) * NS_PER_MS)
    assert core.scheduler.free_blocks == 10
    assert not core.scheduler.has_work


@pytest.mark.parametrize("policy", sorted(Policy))
def test_one_that_was_taken_over_and_evicted_is_computed_again_here(policy: str) -> None:
    core = _core(blocks=6, depth=0, policy=policy)
    for rid in (1, 2):
        assert core.reserve_transfer(_submit(rid, 46, 30), 0, emitted=1, first_token_ns=0)
        core.finish_transfer(rid)
    times = _run(core, 0)
    assert core.scheduler.stats.preemptions
    assert {rid: len(at) for rid, at in times.items()} == {1: 29, 2: 29}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_one_that_departs_gets_what_is_in_flight_and_goes_on_elsewhere(depth: int) -> None:
    here, there = _core(blocks=10, depth=depth), _core(blocks=10, depth=depth)
    submit = _submit(1, 40, 20)
    here.submit(submit, 0)
    outputs = [here.step(at * NS_PER_MS) for at in range(4)]
    given = sum(len(o.outputs) for o in outputs if o is not None)
    assert given == 3
    assert there.reserve_transfer(submit, 3 * NS_PER_MS, emitted=given, first_token_ns=NS_PER_MS)
    here.detach(1)
    in_flight = len(_run(here, 4 * NS_PER_MS).get(1, []))
    assert in_flight == depth + 1
    assert here.scheduler.free_blocks == 7, "its blocks are kept"
    assert there.grow_transfer(1, emitted=given + in_flight)
    there.finish_transfer(1)
    here.release_held(1)
    assert not here.scheduler.has_work
    here.scheduler.check_integrity()
    assert len(_run(there, 10 * NS_PER_MS)[1]) == 20 - given - in_flight
    assert not there.scheduler.has_work


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_one_that_ends_while_it_departs_is_over(depth: int) -> None:
    core = _core(blocks=10, depth=depth)
    core.submit(_submit(1, 40, 4), 0)
    for at in range(4):
        core.step(at * NS_PER_MS)
    core.detach(1)
    assert len(_run(core, 4 * NS_PER_MS)[1]) == 1, "the fourth was in flight"
    assert not core.scheduler.has_work
    assert core.scheduler.free_blocks == 10


@pytest.mark.parametrize("later", [False, True], ids=["in flight", "kept"])
def test_one_that_departs_can_be_cancelled(later: bool) -> None:
    core = _core(blocks=10, depth=1)
    core.submit(_submit(1, 40, 50), 0)
    for at in range(4):
        core.step(at * NS_PER_MS)
    core.detach(1)
    if later:
        _run(core, 4 * NS_PER_MS)
    core.cancel(1)
    _run(core, 9 * NS_PER_MS)
    assert core.scheduler.free_blocks == 10
    assert not core.scheduler.has_work


def test_a_reservation_grows_only_where_there_is_room() -> None:
    core = _core(blocks=5, depth=0)
    assert core.reserve_transfer(_submit(1, 40, 90), 0, emitted=1, first_token_ns=0)
    assert core.grow_transfer(1, emitted=40)
    assert core.scheduler.free_blocks == 0
    assert not core.grow_transfer(1, emitted=41)
    core.scheduler.check_integrity()
