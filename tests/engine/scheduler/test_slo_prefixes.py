"""Shared prefixes under `slo`: shared blocks count once, and a prefix is computed once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.builders.slo_bench import SloBench

from goodput_core.units import NS_PER_MS
from goodput_engine.scheduler.policies.slo import awaited
from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from goodput_engine.scheduler.request_table import ScheduledRequest

_PREFIX = tuple(range(1, 41))
"""Hashes of 40 blocks, which hold 640 tokens."""


def _ask(
    bench: SloBench, rid: int, *, ttft_ms: int = 500, priority: int = 0, family: int = 0
) -> ScheduledRequest:
    """Add a request with the prefix of a family and eight tokens of its own."""
    return bench.add(
        rid,
        648,
        ttft_ms=ttft_ms,
        priority=priority,
        block_hashes=[1000 * family + one for one in _PREFIX],
        outputs=20,
    )


def _serve(bench: SloBench) -> int:
    """Step until nothing is left, and return the computed prompt tokens."""
    computed = 0
    while bench.scheduler.has_work:
        computed += sum(chunk.num_tokens for chunk in bench.step(stops=()).chunks)
    return computed


def test_requests_that_arrive_together_compute_their_prefix_once() -> None:
    """Each alone takes 32 ms. Without the prefix of the first one, three fit into 100 ms."""
    bench = SloBench()
    requests = [_ask(bench, rid, ttft_ms=100) for rid in range(1, 11)]
    assert bench.refusals == [None] * 10
    assert [request.awaited_tokens for request in requests] == [0] + [640] * 9
    assert _serve(bench) == 640 + 10 * 8
    assert all(0 < request.first_token_ns <= 100 * NS_PER_MS for request in requests)


def test_shared_blocks_count_once() -> None:
    """Each request needs 42 blocks, 40 of which all of them share, in a pool of 100."""
    bench = SloBench(blocks=100)
    _ask(bench, 1)
    bench.step()
    requests = [_ask(bench, rid) for rid in range(2, 22)]
    assert bench.refusals == [None] * 21
    assert not bench.policy._undecided.by_rid
    assert {request.own_tokens for request in requests} == {8}
    bench.step()
    bench.step()
    assert bench.scheduler.num_running == 21
    assert bench.scheduler.shared_blocks() == 0, "the first request owns the prefix"


def test_the_blocks_of_a_request_that_has_ended_still_take_room_while_others_use_them() -> None:
    bench = SloBench(blocks=100)
    _ask(bench, 1)
    bench.step()
    _ask(bench, 2)
    bench.step(stops=[1])
    bench.step()
    assert bench.scheduler.shared_blocks() == 40
    # 56 blocks are left beside the shared ones and those of the second request.
    large = bench.add(3, 57 * 16, ttft_ms=500, outputs=20)
    assert not bench.is_admitted(3)
    small = bench.add(4, 30 * 16, ttft_ms=500, outputs=20)
    assert bench.is_admitted(4)
    bench.step()
    assert small.blocks
    assert not large.blocks


@pytest.mark.parametrize("started", [False, True])
def test_a_request_computes_a_prefix_itself_if_the_other_leaves(started: bool) -> None:
    bench = SloBench(budget=320)
    _ask(bench, 1)
    second = _ask(bench, 2)
    if started:
        bench.step()
        assert second.state is RequestState.WAITING, "more of its prefix is cached after this step"
    bench.scheduler.cancel(1)
    bench.step()
    assert second.state is RequestState.PREFILLING
    assert second.cached_tokens == (320 if started else 0)
    _serve(bench)
    assert second.first_token_ns


def test_a_request_does_not_wait_for_the_prefix_of_one_that_is_late() -> None:
    """A step that takes four times its time makes the first one late."""
    bench = SloBench(budget=320)
    _ask(bench, 1, ttft_ms=50)
    second = _ask(bench, 2)
    bench.step(slower=4)
    bench.step()
    assert second.state is RequestState.PREFILLING
    assert 0 < second.cached_tokens < 640


def test_a_request_does_not_wait_for_the_prefix_of_one_that_was_evicted() -> None:
    bench = SloBench(budget=320)
    first, second = _ask(bench, 1), _ask(bench, 2)
    bench.step()
    bench.scheduler._evictor.evict(first)
    bench.policy._forecast = None
    forecast = bench.policy._look()
    assert bench.policy._awaited.to_start(forecast.prompts, forecast) == [first, second]
    assert second.awaited_tokens == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [({"priority": 0}, {"priority": 1}), ({"ttft_ms": 400}, {"ttft_ms": 300})],
    ids=["less important", "due later"],
)
def test_nothing_is_expected_of_a_prompt_that_is_computed_later(
    first: dict[str, int], second: dict[str, int]
) -> None:
    bench = SloBench()
    _ask(bench, 1, **first)
    assert _ask(bench, 2, **second).awaited_tokens == 0


def test_nothing_is_expected_of_a_rejected_request() -> None:
    bench = SloBench()
    bench.add(1, 640 * 10, ttft_ms=100, block_hashes=_PREFIX)
    assert bench.refusals[-1] is not None
    assert _ask(bench, 2).awaited_tokens == 0


def test_the_number_of_kept_hashes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited, "_MOST_HASHES", 100)
    bench = SloBench()
    bench.policy._awaited = awaited.AwaitedPrefixes(bench.scheduler)
    for rid in range(1, 50):
        _ask(bench, rid, family=rid)
        _serve(bench)
    assert len(bench.policy._awaited._computes) <= 140


def test_the_prefix_of_another_prompt_is_not_found_in_the_same_step() -> None:
    """One step could hold both prompts within 36 ms, but the second one starts a step later."""
    bench = SloBench()
    _ask(bench, 1, ttft_ms=36)
    assert bench.is_admitted(1)
    _ask(bench, 2, ttft_ms=36)
    assert not bench.is_admitted(2)


def test_prefix_hits_are_no_offered_work() -> None:
    """A load of cached prompts must keep no others away."""
    bench = SloBench()

    def offered_ms() -> float:
        return sum(bench.policy._admission._offered._work_ns.values()) / NS_PER_MS

    _ask(bench, 1, ttft_ms=100)
    first_ms = offered_ms()
    bench.step()
    _ask(bench, 2, ttft_ms=100)
    assert first_ms > 640 * 0.05
    assert offered_ms() - first_ms < 2
