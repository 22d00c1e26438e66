"""Prefix reuse in a fleet: where it helps, and where it is useless or hurts.

Source: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs",
NeurIPS 2024 (RadixAttention: shared prefixes are computed once, evicted least recently used).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.builders.fleets import make_fleet, plan, run_fleet

from goodput_engine.kv.blocks import BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.builders.fleets import FleetRun

    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.plan import PlannedRequest


BLOCK = 16


def without_reuse(requests: Iterable[PlannedRequest], settings: FleetSettings) -> FleetRun:
    """Serve requests on a fleet without prefix reuse."""

    def no_match(self: BlockPool, hashes: Sequence[int], limit: int) -> list[int]:
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockPool, "match", no_match)
        return run_fleet(requests, settings)


def _sessions(*, every_ms: int = 40) -> list[PlannedRequest]:
    """Return 20 sessions of 6 requests; each prompt extends the previous one by 200 tokens."""
    requests = []
    for turn in range(6):
        for session in range(20):
            prompt = 2_000 + 200 * turn
            hashes = range(session * 1000, session * 1000 + prompt // BLOCK)
            at_ms = (turn * 20 + session) * every_ms
            requests.append(plan(f"s{session}t{turn}", at_ms, prompt, 40, hashes=hashes))
    return requests


def test_requests_of_a_session_reuse_the_earlier_prompts() -> None:
    requests, settings = _sessions(), make_fleet(device="llama-3-8b-h100")
    reuse, none = run_fleet(requests, settings), without_reuse(requests, settings)
    assert none.outcome.prefix_hit_tokens == 0
    assert reuse.outcome.prefix_hit_tokens > 0.7 * reuse.outcome.prefix_queried_tokens
    assert reuse.ttft_ms(50) < none.ttft_ms(50) / 3
    assert reuse.outcome.step_ns < 0.8 * none.outcome.step_ns, "fewer tokens are computed"


def test_reuse_has_no_effect_on_prompts_without_shared_prefixes() -> None:
    requests = [plan(f"r{i}", i * 40, 2_000, 40) for i in range(100)]
    settings = make_fleet(device="llama-3-8b-h100")
    reuse, none = run_fleet(requests, settings), without_reuse(requests, settings)
    assert reuse.outcome.prefix_hit_tokens == 0
    assert reuse.records == none.records


def test_one_off_prompts_evict_frequently_used_prefixes() -> None:
    # 20 sessions of up to 3,000 tokens fit into the memory. Prompts that are never repeated are as
    # recent as the sessions, so least-recently-used eviction removes the sessions too.
    settings = make_fleet(device="llama-3-8b-h100", profile={"kv_blocks": 4_500})
    sessions = _sessions(every_ms=200)
    one_off = [plan(f"o{i}", i * 200 + 100, 6_000, 2) for i in range(len(sessions))]
    mixed = sorted([*sessions, *one_off], key=lambda r: r.scheduled_ns)
    alone, beside = run_fleet(sessions, settings), run_fleet(mixed, settings)
    found = [
        sum(r.cached_tokens or 0 for r in run.records if r.request_id.startswith("s"))
        for run in (alone, beside)
    ]
    assert found[0] > 200_000
    assert found[1] < found[0] / 10
    assert beside.ttft_ms(50, "s") > 2 * alone.ttft_ms(50, "s")


def test_sharing_admits_more_requests_than_can_grow_at_once() -> None:
    # A shared prompt needs its blocks once, so admission by free blocks admits all requests. Their
    # outputs are not shared, so they then evict each other.
    shared = range(128)
    requests = [plan("first", 0, 2_048, 2, hashes=shared)]
    requests += [plan(f"r{i}", 100, 2_060, 400, hashes=shared) for i in range(24)]
    settings = make_fleet(device="llama-3-8b-h100", profile={"kv_blocks": 480}, policy="vllm")
    reuse, none = run_fleet(requests, settings), without_reuse(requests, settings)
    assert reuse.outcome.end_ns < none.outcome.end_ns, "still faster in total"
    assert reuse.tbt_ms(50, "r") > none.tbt_ms(50, "r"), "a wider batch has longer steps"
    assert none.outcome.preemptions == 0
    assert reuse.outcome.preemptions > 0
