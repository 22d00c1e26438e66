"""The predicted capacity of a replica equals the throughput of a saturated emulated one."""

from __future__ import annotations

import random

import pytest
from tests.builders.fleets import make_fleet, plan, run_fleet

from goodput_core.control import DeviceCapacity
from goodput_core.control.capacity import replica_capacity
from goodput_core.histogram import LengthMix
from goodput_core.units import NS_PER_MS, NS_PER_S

TPOT_MS = 30
WARM_S, LENGTH_S = 20, 90


@pytest.mark.parametrize(
    ("kv_blocks", "max_tokens"),
    [(26_674, 2048), (3000, 2048), (3000, 128)],
    ids=["bound by time per token", "bound by memory", "bound by memory, small chunks"],
)
def test_a_saturated_replica_has_the_predicted_throughput(kv_blocks: int, max_tokens: int) -> None:
    settings = make_fleet(
        device="llama-3-8b-h100",
        profile={"kv_blocks": kv_blocks},
        token_budget=max_tokens,
        max_num_seqs=256,
    )
    profile = settings.profile
    rng = random.Random(7)
    lengths = [(rng.randint(200, 2000), rng.randint(50, 350)) for _ in range(3000)]
    one = replica_capacity(
        DeviceCapacity(form=profile.form, kv_tokens=kv_blocks * profile.block_size),
        LengthMix.of_requests((prompt, 0, output) for prompt, output in lengths),
        tpot_ns=TPOT_MS * NS_PER_MS,
        max_num_seqs=256,
        max_tokens=max_tokens,
    )
    assert one is not None
    predicted = 1 / one.device_s
    every_ms = 1000 / (1.5 * predicted)
    requests = [
        plan(f"r{i}", i * every_ms, prompt, output)
        for i, (prompt, output) in enumerate(lengths)
        if i * every_ms < 1000 * LENGTH_S
    ]
    run = run_fleet(requests, settings)
    ends = [(r.end_ns or 0) / NS_PER_S for r in run.records if r.outcome == "ok"]
    served = sum(WARM_S <= end < LENGTH_S for end in ends) / (LENGTH_S - WARM_S)
    assert served == pytest.approx(predicted, rel=0.05)
