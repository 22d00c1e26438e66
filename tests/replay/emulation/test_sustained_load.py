"""Emulated engines keep the TTFT objective at the load that the queueing model predicts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.builders.fleets import make_fleet, plan

from goodput_core.control import DeviceCapacity
from goodput_core.control.capacity import replica_capacity
from goodput_core.control.queueing import TTFTTarget, sustained_load
from goodput_core.histogram import LengthMix
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import RouterPolicy
from goodput_core.steptime import RooflineForm
from goodput_core.units import NS_PER_MS
from goodput_replay.emulation.emulate import emulate
from goodput_replay.runs.slo import SLOClasses

if TYPE_CHECKING:
    from goodput_replay.plan import PlannedRequest

FORM = RooflineForm(
    c0_ns=40 * NS_PER_MS,
    c1_ns_per_token=200_000,
    c2_ns_per_context_token=2_000,
    c4_ns_per_request=100_000,
)
TTFT_MS, TPOT_MS, LATE = 2000, 100, 0.05
LENGTHS = ((100, 20), (200, 60), (400, 100), (1500, 150))


def _late(replicas: int, rate: float, width: int) -> float:
    """Return the share of requests that miss the TTFT target at a constant rate."""
    fleet = make_fleet(
        replicas=replicas,
        placement=RouterPolicy.LEAST_LOADED,
        slo=SLOClasses(
            classes=(SLOClass(name="fast", ttft_ms=TTFT_MS, tpot_ms=TPOT_MS),), default="fast"
        ),
        profile={"kv_blocks": 4000, "form": FORM},
        max_num_seqs=width,
        token_budget=1024,
    )
    rng, at_s = random.Random(5), 0.0
    requests: list[PlannedRequest] = []
    while len(requests) < 3000:
        at_s += rng.expovariate(rate)
        requests.append(plan(f"r{len(requests)}", at_s * 1000, *rng.choice(LENGTHS)))
    late: list[bool] = []

    def ended(_: Any, record: Any) -> None:
        late.append(record.ttft_ns is None or record.ttft_ns > TTFT_MS * NS_PER_MS)

    emulate(iter(requests), fleet, ended)
    return sum(late) / len(late)


@pytest.mark.slow
@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_objective_is_kept_at_the_predicted_load_and_missed_well_above(
    replicas: int, width: int
) -> None:
    one = replica_capacity(
        DeviceCapacity(form=FORM, kv_tokens=64_000),
        LengthMix.of_requests((prompt, 0, output) for prompt, output in LENGTHS),
        tpot_ns=TPOT_MS * NS_PER_MS,
        max_num_seqs=width,
        max_tokens=1024,
    )
    assert one is not None
    targets = [TTFTTarget(ttft_s=TTFT_MS / 1000, late=LATE)]
    load = sustained_load(one, targets, replicas=replicas, burstiness=1, most=0.98)
    assert 0.3 < load < 0.98
    rate = replicas * load / one.device_s
    assert _late(replicas, rate, width) <= 1.5 * LATE
    assert _late(replicas, 1.3 * rate, width) > LATE
