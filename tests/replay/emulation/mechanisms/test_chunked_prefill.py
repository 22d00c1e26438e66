"""Chunked prefill beside decodes, and prefill of complete prompts.

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve",
OSDI 2024: complete prompts stall the decodes; chunks bound the stall and delay the prompt.
"""

from __future__ import annotations

from tests.builders.fleets import make_fleet, plan, run_fleet


def test_chunks_bound_the_stalls_of_decodes() -> None:
    requests = [plan(f"chat{i}", 0, 200, 600) for i in range(16)]
    requests += [plan(f"document{i}", 500 + 300 * i, 6_000, 20) for i in range(10)]
    complete = run_fleet(
        requests, make_fleet(device="llama-3-8b-h100", policy="vllm", token_budget=8_192)
    )
    chunked = run_fleet(requests, make_fleet(device="llama-3-8b-h100", token_budget=512))
    assert max(complete["chat0"].gaps_us) > 170_000, "6,000 tokens at 30 µs"
    assert max(chunked["chat0"].gaps_us) < 30_000, "512 tokens, and the context they read"
    assert chunked.ttft_ms(50, "document") > complete.ttft_ms(50, "document"), "the cost"


def test_each_small_chunk_reads_all_weights() -> None:
    # There are no decodes to protect. Each chunk of 64 tokens reads all weights, which takes as
    # long as 203 tokens.
    requests = [plan(f"r{i}", 0, 4_000, 1) for i in range(10)]
    complete = run_fleet(
        requests, make_fleet(device="llama-3-8b-h100", policy="vllm", token_budget=8_192)
    )
    chunked = run_fleet(requests, make_fleet(device="llama-3-8b-h100", token_budget=64))
    assert chunked.outcome.end_ns > 2.5 * complete.outcome.end_ns
