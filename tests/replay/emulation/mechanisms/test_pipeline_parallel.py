"""Four devices as one or two pipeline stages: more prompts per second, but longer steps.

The same 70B model on the same four H100, as the shipped profiles with four tensor-parallel devices,
and with two pipeline stages of two. The all-reduces of the second profile are cheaper and its steps
twice as long, but the next step may start when the first stage is free.

Source: Zhong et al., "DistServe", OSDI 2024, section 3.1: for prefills, intra-operator parallelism
wins at low rates and inter-operator parallelism at high ones.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.builders.fleets import make_fleet, plan, run_fleet

if TYPE_CHECKING:
    from tests.builders.fleets import FleetRun


ONE_STAGE = "llama-3-70b-4xh100"
TWO_STAGES = "llama-3-70b-4xh100-pp2"


def run_on(device: str, per_s: float, *, outputs: int = 1, **changes: Any) -> FleetRun:
    """Serve prompts of 1,500 to 2,500 tokens, at a rate in requests per second."""
    draw = random.Random(5)
    requests, at_ms = [], 0.0
    for i in range(100):
        at_ms += draw.expovariate(per_s / 1000)
        requests.append(plan(f"r{i}", at_ms, draw.randint(1_500, 2_500), outputs))
    values: dict[str, Any] = {"token_budget": 2_500, "policy": "vllm"} | changes
    return run_fleet(requests, make_fleet(device=device, max_waiting=10_000, **values))


def test_two_stages_have_more_throughput_under_overload() -> None:
    one, two = run_on(ONE_STAGE, 50), run_on(TWO_STAGES, 50)
    assert two.outcome.end_ns < 0.95 * one.outcome.end_ns
    assert two.ttft_ms(90) < 0.95 * one.ttft_ms(90)


def test_a_single_prompt_takes_longer_with_two_stages() -> None:
    one, two = run_on(ONE_STAGE, 0.1), run_on(TWO_STAGES, 0.1)
    assert two.ttft_ms(50) > 1.7 * one.ttft_ms(50)


def test_decodes_take_longer_with_two_stages() -> None:
    one, two = run_on(ONE_STAGE, 1, outputs=50), run_on(TWO_STAGES, 1, outputs=50)
    assert two.tbt_ms(50) > 1.7 * one.tbt_ms(50)


def test_without_queued_plans_only_one_stage_is_busy() -> None:
    ahead, alone = run_on(TWO_STAGES, 50), run_on(TWO_STAGES, 50, depth=0)
    assert alone.outcome.end_ns > 1.8 * ahead.outcome.end_ns


def test_the_transfer_between_stages_takes_time() -> None:
    fast = run_on(TWO_STAGES, 0.1)
    slow = run_on(TWO_STAGES, 0.1, profile={"handover_ns_per_token": 10_000.0})
    assert slow.ttft_ms(50) - fast.ttft_ms(50) == pytest.approx(20, rel=0.1), "2,000 × 10 µs"
