"""Four devices as one tensor-parallel replica, or as four replicas.

Tensor parallelism is a property of the device model: its coefficients are those of the group.
Both fleets here are the same 8B model on the same four devices, derived from one profile. In a step
of the group, each device has a quarter of the weights, the arithmetic and the context. The step
also has 64 all-reduces of 10 µs, two in each of 32 layers, that do not overlap with computation.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3, for the two all-reduces of a layer; Zhong
et al., "DistServe", OSDI 2024, section 3.1: intra-operator parallelism shortens execution and
wins at low rates, more capacity wins at high ones.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.builders.fleets import make_fleet, plan, run_fleet

from goodput_core.spec.choices import RouterPolicy
from goodput_core.steptime import RooflineForm
from goodput_core.units import NS_PER_MS, NS_PER_US
from goodput_engine.device.load import load_profile

if TYPE_CHECKING:
    from tests.builders.fleets import FleetRun


DEVICE = "llama-3-8b-h100"
ALL_REDUCES_NS = 64 * 10 * NS_PER_US


def _group(devices: int) -> dict[str, Any]:
    """Return the profile values of a group: those of one device divided, plus communication."""
    one = load_profile(DEVICE)
    numbers = one.numbers
    # The all-reduces of each token transfer 64 × 2 × 3/4 × 4,096 × 2 bytes at 360e9 bytes/s.
    wire_ns = 64 * 2 * 0.75 * 4_096 * 2 / 360
    return {
        "tensor_parallel": devices,
        "kv_blocks": one.kv_blocks * devices + (devices - 1) * 16_060_000_000 // 131_072 // 16,
        "form": RooflineForm(
            c0_ns=numbers["c0_ms"] * NS_PER_MS / devices + ALL_REDUCES_NS,
            c1_ns_per_token=numbers["c1_us_per_token"] * NS_PER_US / devices + wire_ns,
            c2_ns_per_context_token=numbers["c2_ns_per_context_token"] / devices,
            c4_ns_per_request=numbers["c4_us_per_request"] * NS_PER_US,
        ),
    }


def run_both(per_s: float) -> tuple[FleetRun, FleetRun]:
    """Serve requests on one group of four devices and on four replicas, at a rate per second."""
    draw = random.Random(5)
    requests, at_ms = [], 0.0
    for i in range(300):
        at_ms += draw.expovariate(per_s / 1000)
        requests.append(plan(f"r{i}", at_ms, draw.randint(500, 3_500), 100))
    wide: dict[str, Any] = {"device": DEVICE, "token_budget": 2_048, "max_waiting": 10_000}
    group = make_fleet(replicas=1, profile=_group(4), max_num_seqs=256, **wide)
    single = make_fleet(replicas=4, placement=RouterPolicy.LEAST_LOADED, max_num_seqs=64, **wide)
    return run_fleet(requests, group), run_fleet(requests, single)


def test_a_group_has_lower_latency_at_low_load() -> None:
    group, single = run_both(2)
    assert group.ttft_ms(50) < 0.6 * single.ttft_ms(50)
    assert group.tbt_ms(50) < 0.6 * single.tbt_ms(50)


def test_single_devices_have_more_throughput_under_overload() -> None:
    group, single = run_both(150)
    assert single.outcome.end_ns < 0.95 * group.outcome.end_ns
    assert single.ttft_ms(90) < group.ttft_ms(90)
