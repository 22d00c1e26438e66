"""Overlapped scheduling: steps are planned before the results of earlier steps are known.

Source: Zheng et al., SGLang v0.4 ("zero-overhead batch scheduler", 2024); Srivatsa et al., "Can
Scheduling Overhead Dominate LLM Inference Performance?", 2024.
"""

from __future__ import annotations

from tests.builders.fleets import make_fleet, plan, run_fleet

from goodput_core.units import NS_PER_MS
from goodput_engine.device.profile import Overlap


def test_overlap_hides_the_host_time() -> None:
    requests = [plan(f"r{i}", 0, 100, 300) for i in range(32)]
    runs = {
        overlap: run_fleet(
            requests,
            make_fleet(
                device="llama-3-8b-h100",
                profile={"overlap": overlap, "host_ns_per_step": 5 * NS_PER_MS},
            ),
        )
        for overlap in Overlap
    }
    sequential, overlapped = runs[Overlap.ADD], runs[Overlap.MAX]
    assert sequential.tbt_ms(50) > 11, "6 ms on the device and 5 ms on the host"
    assert overlapped.tbt_ms(50) < 7, "6 ms on the device, which hide 5 ms on the host"
    assert overlapped.outcome.end_ns < 0.65 * sequential.outcome.end_ns


def test_with_overlap_a_stop_is_noticed_one_step_late() -> None:
    # There is no host time to hide. Each output of two tokens computes a third one, which is
    # discarded, and keeps its slot during that step.
    requests = [plan(f"r{i}", 0, 16, 2) for i in range(40)]
    runs = {
        overlap: run_fleet(requests, make_fleet(max_num_seqs=4, profile={"overlap": overlap}))
        for overlap in Overlap
    }
    sequential, overlapped = runs[Overlap.ADD], runs[Overlap.MAX]
    assert sequential.outcome.end_ns == 20 * NS_PER_MS
    assert overlapped.outcome.end_ns >= 1.4 * sequential.outcome.end_ns
    assert overlapped.outcome.scheduled_tokens == sequential.outcome.scheduled_tokens + 40
    assert overlapped.outcome.output_tokens == sequential.outcome.output_tokens == 80
