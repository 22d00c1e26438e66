"""Prompts in chunks beside the decodes, or whole and first.

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve",
OSDI 2024: whole prompts stall the decodes; chunks bound the stall and cost the prompt time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.replay.emulation.conftest import Run

    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.plan import PlannedRequest

    Planned = Callable[..., PlannedRequest]
    Settings = Callable[..., FleetSettings]
    RunFleet = Callable[..., Run]


def test_chunks_bound_the_stalls_of_those_who_decode(
    planned: Planned, fleet: Settings, run_fleet: RunFleet
) -> None:
    requests = [planned(f"chat{i}", 0, 200, 600) for i in range(16)]
    requests += [planned(f"document{i}", 500 + 300 * i, 6_000, 20) for i in range(10)]
    whole = run_fleet(requests, fleet(device="llama-3-8b-h100", policy="vllm", token_budget=8_192))
    chunked = run_fleet(requests, fleet(device="llama-3-8b-h100", token_budget=512))
    assert max(whole["chat0"].gaps_us) > 170_000, "6,000 tokens at 30 µs"
    assert max(chunked["chat0"].gaps_us) < 30_000, "512 tokens, and the context they read"
    assert chunked.ttft_ms(50, "document") > whole.ttft_ms(50, "document"), "the price"


def test_small_chunks_pay_the_weights_again_and_again(
    planned: Planned, fleet: Settings, run_fleet: RunFleet
) -> None:
    # Nobody decodes, so there is nobody to protect: each chunk of 64 tokens reads all weights,
    # which takes as long as 203 tokens do.
    requests = [planned(f"r{i}", 0, 4_000, 1) for i in range(10)]
    whole = run_fleet(requests, fleet(device="llama-3-8b-h100", policy="vllm", token_budget=8_192))
    chunked = run_fleet(requests, fleet(device="llama-3-8b-h100", token_budget=64))
    assert chunked.outcome.end_ns > 2.5 * whole.outcome.end_ns
