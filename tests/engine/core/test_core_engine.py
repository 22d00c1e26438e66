"""The engine core in virtual time: its messages to the server, and their times."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tests.builders.examples import examples
from tests.builders.schedulers import make_configure

from goodput_core.errors import InputError
from goodput_core.slo.targets import Targets
from goodput_engine.core.build import build_core
from goodput_engine.device.load import load_profile
from goodput_engine.messages import (
    Configure,
    ExecutorInput,
    FollowManifest,
    Limits,
    RequestOutput,
    SetLimits,
    StepOutputs,
    Submit,
)

if TYPE_CHECKING:
    from goodput_engine.core.engine_core import EngineCore

_MS = 1_000_000


def _config(**changes: Any) -> Configure:
    values: dict[str, Any] = {
        "token_budget": 512,
        "min_token_budget": 64,
        "max_token_budget": 1024,
        "depth": 0,
    }
    return make_configure(**(values | changes))


def _core(**changes: Any) -> EngineCore:
    config = _config(**changes)
    return build_core(config, load_profile(config.device))


def _submit(rid: int, tokens: int = 10, *, length: int = 3, arrival_ns: int = 0) -> Submit:
    return Submit(
        rid=rid,
        arrival_ns=arrival_ns,
        input_tokens=tokens,
        executor=ExecutorInput(output_tokens=length),
    )


def _run(core: EngineCore, now_ns: int = 0) -> list[StepOutputs]:
    """Return all messages of the core until it is idle, jumping from event to event."""
    emitted = [core.step(now_ns)]
    while (event := core.next_event_ns()) is not None:
        emitted.append(core.step(event))
        core.scheduler.check_integrity()
    return [s for s in emitted if s is not None]


def test_a_dropped_request_is_reported_once_and_counted_and_gets_no_more_output() -> None:
    core = _core(late_requests="drop", max_num_seqs=1)
    for rid, targets in ((1, Targets(e2e_ns=2 * _MS)), (2, Targets(ttft_ns=2 * _MS))):
        submit = structs.replace(_submit(rid, length=9), targets=targets)
        assert core.submit(submit, 0) is None
    reported: list[tuple[int, int, str]] = []
    emitted: list[tuple[int, int]] = []
    now_ns: int | None = 0
    while now_ns is not None:
        outputs = core.step(now_ns)
        emitted += [(now_ns, o.rid) for o in (outputs.outputs if outputs else ())]
        rejected = core.take_rejected()
        assert all(r.retry_after_s >= 1 for r in rejected)
        assert core.take_rejected() == []
        reported += [(now_ns, r.rid, r.reason) for r in rejected]
        now_ns = core.next_event_ns()
    # The first request is late at the end of the third step, and so is the second one.
    assert reported == [(3 * _MS, 1, "late"), (3 * _MS, 2, "late")]
    assert emitted == [(_MS, 1), (2 * _MS, 1), (3 * _MS, 1)]
    state = core.state(4 * _MS)
    assert (state.running, state.waiting, state.shed) == (0, 0, 2)
    assert state.kv_free_blocks == state.kv_total_blocks
    assert core._one_token_outputs == {}
    assert vars(core._executor)["_sequences"] == {}
    core.scheduler.check_integrity()


def test_an_unknown_treatment_of_late_requests_is_named() -> None:
    with pytest.raises(InputError, match="treatment of late requests 'keep' is not one of finish"):
        _core(late_requests="keep")


def test_each_step_emits_a_request_once_and_the_last_one_has_the_finish_reason() -> None:
    core = _core()
    assert core.submit(_submit(1, arrival_ns=0), 5) is None
    emitted = _run(core, 5)
    assert [s.at_ns for s in emitted] == [5 + _MS, 5 + 2 * _MS, 5 + 3 * _MS]
    assert [s.outputs for s in emitted] == [
        [RequestOutput(rid=1, new_tokens=1, first_scheduled_ns=5)],
        [RequestOutput(rid=1, new_tokens=1)],
        [RequestOutput(rid=1, new_tokens=1, finish_reason="stop")],
    ]
    assert emitted[-1].state.running == 0
    assert emitted[-1].state.output_tokens == 3


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_deeper_pipeline_changes_when_not_what(depth: int) -> None:
    core = _core(depth=depth)
    for rid in range(20):
        core.submit(_submit(rid, 40 + rid, length=1 + rid), 0)
    tokens: Counter[int] = Counter()
    for emitted in _run(core):
        for output in emitted.outputs:
            tokens[output.rid] += output.new_tokens
    assert tokens == {rid: 1 + rid for rid in range(20)}
    assert not core.scheduler.has_work


def test_cached_prompt_tokens_come_with_the_first_token() -> None:
    core = _core()
    for rid in (1, 2):
        submit = Submit(
            rid=rid,
            arrival_ns=0,
            input_tokens=40,
            max_output_tokens=2,
            block_hashes=[5, 6],
            executor=ExecutorInput(ignore_eos=True),
        )
        core.submit(submit, 0)
        last = [output for emitted in _run(core, rid * 10 * _MS) for output in emitted.outputs]
    assert [o.cached_tokens for o in last] == [32, 0]
    assert [o.finish_reason for o in last] == [None, "length"]


def test_limits_apply_within_the_manifests_bounds_and_an_older_revision_is_ignored() -> None:
    core = _core()
    core.set_limits(SetLimits(revision=3, limits=Limits(token_budget=4096, max_waiting=7)))
    emitted = core.step(0)
    assert emitted is not None, "a change is sent even while nothing runs"
    state = emitted.state
    assert (state.limits_revision, state.token_budget, state.max_num_seqs) == (3, 1024, 8)
    assert state.max_waiting == 7
    core.set_limits(SetLimits(revision=2, limits=Limits(token_budget=100)))
    assert core.state(0).token_budget == 1024
    core.set_limits(SetLimits(revision=4, limits=Limits(token_budget=1)))
    assert core.state(0).token_budget == 64


def test_a_changed_manifest_holds_for_the_budget_in_force_and_for_later_ones() -> None:
    core = _core()
    core.set_limits(SetLimits(revision=3, limits=Limits(token_budget=1000)))
    core.follow_manifest(FollowManifest(min_token_budget=128, max_token_budget=256))
    emitted = core.step(0)
    assert emitted is not None, "a change is sent even while nothing runs"
    assert (emitted.state.limits_revision, emitted.state.token_budget) == (3, 256)
    for budget, applies in ((1, 128), (4096, 256)):
        core.set_limits(SetLimits(revision=4, limits=Limits(token_budget=budget)))
        assert core.state(0).token_budget == applies
    core.follow_manifest(FollowManifest(min_token_budget=64, max_token_budget=4096))
    assert core.state(0).token_budget == 256, "wider bounds alone change nothing"
    core.set_limits(SetLimits(revision=5, limits=Limits(token_budget=4096)))
    assert core.state(0).token_budget == 4096


def test_a_law_that_comes_and_goes_with_the_manifest_loses_no_token() -> None:
    core = _core(depth=2, max_token_budget=512)
    laws = (None, "model", None, "ema", "model", "fixed")
    received: dict[int, int] = {}
    for rid, law in enumerate(laws):
        now_ns = rid * 10 * _MS
        core.submit(_submit(rid, 400, length=30, arrival_ns=now_ns), now_ns)
        core.follow_manifest(
            FollowManifest(min_token_budget=64 * (rid + 1), max_token_budget=512, budget_law=law)
        )
        assert core.state(now_ns).budget_law == (law or "")
        emitted = [core.step(now_ns)]
        while (event := core.next_event_ns()) is not None and event < now_ns + 10 * _MS:
            emitted.append(core.step(event))
        if rid == len(laws) - 1:
            emitted += _run(core, now_ns + 10 * _MS)
        for output in (output for one in emitted if one is not None for output in one.outputs):
            received[output.rid] = received.get(output.rid, 0) + output.new_tokens
    assert received == dict.fromkeys(range(len(laws)), 30)


def test_no_law_sizes_the_steps_of_a_policy_that_keeps_prompts_whole() -> None:
    core = _core(policy="orca")
    core.follow_manifest(
        FollowManifest(min_token_budget=64, max_token_budget=1024, budget_law="model")
    )
    assert core.state(0).budget_law == ""


def test_a_draining_core_finishes_what_it_has_and_rejects_what_is_new() -> None:
    core = _core()
    core.submit(_submit(1), 0)
    core.drain()
    rejected = core.submit(_submit(2), 0)
    assert rejected is not None
    assert rejected.reason == "draining"
    emitted = _run(core)
    assert [o.rid for s in emitted for o in s.outputs] == [1, 1, 1]
    assert emitted[-1].state.draining
    assert emitted[-1].state.shed == 1


def test_a_cancelled_request_is_heard_of_no_more_and_leaves_nothing() -> None:
    core = _core(depth=1)
    core.submit(_submit(1, length=100), 0)
    core.submit(_submit(2, length=5), 0)
    core.step(0)
    core.step(_MS)
    core.cancel(1)
    assert {o.rid for s in _run(core, _MS) for o in s.outputs} == {2}
    assert core.state(0).kv_free_blocks == core.state(0).kv_total_blocks
    assert core._one_token_outputs == {}


def test_a_rejection_names_its_reason() -> None:
    rejected = _core(max_waiting=0, max_num_seqs=1).submit(_submit(1, 10**6), 0)
    assert rejected is not None
    assert (rejected.rid, rejected.reason) == (1, "too_long")


@pytest.mark.parametrize("depth", [0, 1])
def test_real_time_and_virtual_time_decide_alike(depth: int) -> None:
    """Waking late, within the bound, moves no step of a device that is continuously busy."""

    def ends(lateness: list[int]) -> list[tuple[int, int]]:
        core = _core(device="llama-3-8b-h100", depth=depth)
        for rid in range(5):
            core.submit(_submit(rid, 700, length=20), 0)
        core.step(0)
        seen: list[tuple[int, int]] = []
        while (event := core.next_event_ns()) is not None:
            emitted = core.step(event + lateness[len(seen) % len(lateness)])
            if emitted is not None:
                seen.append((emitted.at_ns, len(emitted.outputs)))
        return seen

    assert ends([0]) == ends([3 * _MS, 0, 60_000, 40 * _MS])


@settings(max_examples=examples(40), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=15),
    depth=st.integers(0, 2),
)
def test_every_token_is_emitted_under_block_shortage(
    lengths: list[tuple[int, int]], depth: int
) -> None:
    profile = replace(load_profile("unit"), kv_blocks=25)  # hardly more than one long request
    core = build_core(_config(depth=depth), profile)
    for rid, (tokens, length) in enumerate(lengths):
        assert core.submit(_submit(rid, tokens, length=length), 0) is None
    tokens_received: Counter[int] = Counter()
    for emitted in _run(core):
        for output in emitted.outputs:
            tokens_received[output.rid] += output.new_tokens
    assert tokens_received == {rid: length for rid, (_, length) in enumerate(lengths)}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"policy": "nope"}, "policy 'nope' is not a policy"),
        ({"preemption": "swop"}, "preemption 'swop' is not one of recompute, swap, hybrid"),
        ({"token_budget": 32}, "the token budget must be 64 to 1024, not 32"),
        ({"min_token_budget": 0, "token_budget": 1}, "minimum token budget must be 1 to 1024"),
        ({"max_num_seqs": 0}, "the number of sequences must be at least 1, not 0"),
        ({"max_waiting": -1}, "the number of waiting requests must be at least 0, not -1"),
        ({"depth": 3}, "the depth must be 0 to 2, not 3"),
    ],
)
def test_a_configuration_that_cannot_be_is_rejected(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        _core(**changes)


@pytest.mark.parametrize(("device", "depth"), [("unit", 0), ("llama-3-8b-h100", 1)])
def test_the_depth_follows_the_device_unless_configured(device: str, depth: int) -> None:
    assert _core(device=device, depth=None).scheduler.depth == depth
