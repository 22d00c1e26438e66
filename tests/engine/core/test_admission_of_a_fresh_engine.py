"""Rejections of the policy `slo` come from the load, not from the start of an engine."""

from __future__ import annotations

import pytest

from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.core.build import build_core
from goodput_engine.device.load import load_profile
from goodput_engine.messages import Configure, ExecutorInput, Submit

DEVICE = "llama-3-8b-h100"
REQUESTS = 300


def rejections(*, per_s: int, served_before: int) -> list[tuple[int, str, int]]:
    """Milliseconds, reason and `retry_after_s` of each rejection, in virtual time.

    Prompts have 300 to 599 tokens of their own, and outputs 100.
    """
    core = build_core(
        Configure(
            device=DEVICE, policy="slo", preemption="hybrid", token_budget=2048,
            min_token_budget=256, max_token_budget=8192, max_num_seqs=256, max_waiting=1024,
        ),
        load_profile(DEVICE),
    )  # fmt: skip
    begin_ns = served_before * NS_PER_S // 20 + NS_PER_S
    arrivals = [rid * NS_PER_S // 20 for rid in range(served_before)]
    arrivals += [begin_ns + number * NS_PER_S // per_s for number in range(REQUESTS)]
    found: list[tuple[int, str, int]] = []
    for rid, arrival_ns in enumerate(arrivals):
        while (due_ns := core.next_event_ns()) is not None and due_ns <= arrival_ns:
            core.step(due_ns)
        submit = Submit(
            rid=rid, arrival_ns=arrival_ns, input_tokens=300 + rid * 37 % 300,
            max_output_tokens=1000, executor=ExecutorInput(output_tokens=100),
            targets=Targets(ttft_ns=500 * NS_PER_MS, tpot_ns=50 * NS_PER_MS),
        )  # fmt: skip
        rejected = core.submit(submit, arrival_ns)
        core.step(arrival_ns)
        if rejected is not None:
            at_ms = (arrival_ns - begin_ns) // NS_PER_MS
            found.append((at_ms, rejected.reason, rejected.retry_after_s))
    return found


def test_at_the_edge_of_its_capacity_a_fresh_engine_rejects_no_more_than_a_warm_one() -> None:
    fresh = rejections(per_s=100, served_before=0)
    warm = rejections(per_s=100, served_before=300)
    assert {reason for _, reason, _ in fresh} == {"unattainable"}
    assert all(1 <= after_s <= 10 for _, _, after_s in fresh)
    # It can serve about three in four: `sjf`, which rejects none, serves 231 of 300 in time.
    assert 60 <= len(fresh) <= 85
    assert len(fresh) <= len(warm) + 5 <= 95
    assert fresh[0][0] > 500, "none at the start"


@pytest.mark.parametrize("served_before", [0, 300], ids=["fresh", "warm"])
def test_below_its_capacity_no_engine_rejects(served_before: int) -> None:
    assert rejections(per_s=50, served_before=served_before) == []
