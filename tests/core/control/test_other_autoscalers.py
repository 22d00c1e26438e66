"""The laws of other autoscalers behave as their documentation describes."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from benchmarks.scaling import autoscalers as laws

from goodput_core.control import (
    DeviceCapacity,
    ReplicaPhase,
    ReplicaWindow,
    ServiceObservation,
    ServiceParams,
    Signal,
    Traffic,
)
from goodput_core.histogram import LengthMix
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import ControlMode
from goodput_core.steptime import RooflineForm
from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

S = NS_PER_S
PARAMS = ServiceParams(
    mode=ControlMode.AUTO,
    classes=(SLOClass(name="chat", ttft_ms=1000, tpot_ms=22, objective=Fraction(9, 10)),),
    max_replicas=20,
    max_num_seqs=64,
)
DEVICE = DeviceCapacity(
    form=RooflineForm(
        c0_ns=20 * NS_PER_MS,
        c1_ns_per_token=500_000,
        c2_ns_per_context_token=0,
        c4_ns_per_request=0,
    ),
    kv_tokens=100_000,
)


def _replica(name: str, *, kv: int = 0, waiting: int = 0, running: int = 0) -> ReplicaWindow:
    return ReplicaWindow(
        name=name,
        phase=ReplicaPhase.READY,
        signal=Signal.FRESH,
        running=running,
        waiting=waiting,
        kv_used_blocks=kv,
        kv_total_blocks=100,
    )


def _observe(
    replicas: list[ReplicaWindow], *, desired: int | None = None, **traffic: Any
) -> ServiceObservation:
    desired = len(replicas) if desired is None else desired
    starting = [
        ReplicaWindow(name=f"new-{i}", phase=ReplicaPhase.STARTING, signal=Signal.MISSING)
        for i in range(desired - len(replicas))
    ]
    return ServiceObservation(
        interval_ns=15 * S,
        traffic=Traffic(**({"signal": Signal.FRESH} | traffic)),
        replicas=(*replicas, *starting),
        desired_replicas=desired,
        device=DEVICE,
    )


def _run(law: Callable[..., Any], state: Any, seen: ServiceObservation, seconds: int) -> list[int]:
    """Return the replicas after each interval of 15 s with the same observation."""
    numbers: list[int] = []
    for i in range(seconds // 15):
        state, replicas = law(state, seen, PARAMS, (i + 1) * 15 * S)
        numbers.append(replicas)
    return numbers


@pytest.mark.parametrize(
    ("in_flight", "wanted"),
    [(40, 4), (43, 4), (37, 4), (45, 5), (80, 8), (400, 8)],
    ids=["on target", "10% above", "10% below", "above", "twice", "at most doubled"],
)
def test_hpa_scales_by_the_ratio_outside_its_tolerance(in_flight: int, wanted: int) -> None:
    hpa = laws.HpaParams(target=10)
    seen = _observe([_replica(f"r{i}") for i in range(4)], in_flight=in_flight)
    numbers = _run(partial(laws.hpa_law, hpa=hpa), laws.HpaState(), seen, 15)
    assert numbers == [wanted]


def test_hpa_removes_replicas_after_its_window() -> None:
    hpa = laws.HpaParams(target=10)
    busy = _observe([_replica(f"r{i}") for i in range(4)], in_flight=40)
    idle = _observe([_replica(f"r{i}") for i in range(4)], in_flight=10)
    state, _ = laws.hpa_law(laws.HpaState(), busy, PARAMS, 0, hpa)
    numbers = []
    for i in range(1, 23):
        state, replicas = laws.hpa_law(state, idle, PARAMS, i * 15 * S, hpa)
        numbers.append(replicas)
    assert numbers[:20] == [4] * 20
    assert numbers[-1] == 1


def test_hpa_counts_starting_pods_as_idle_and_needs_its_metric() -> None:
    hpa = laws.HpaParams(target=10)
    starting = _observe([_replica("r0"), _replica("r1")], desired=4, in_flight=40)
    assert laws.hpa_law(laws.HpaState(), starting, PARAMS, 0, hpa)[1] == 4
    blind = _observe([_replica("r0")], signal=Signal.FAILED, in_flight=90)
    assert laws.hpa_law(laws.HpaState(), blind, PARAMS, 0, hpa)[1] == 1


def test_dynamo_sets_a_minimum_by_throughput_every_three_minutes() -> None:
    # 40 requests in a batch give 20 requests per second of 100 tokens each at 20 ms a step.
    finished = LengthMix.of_requests([(1, 1, 100)] * 50)
    seen = _observe([_replica("r0", running=30)], arrivals=750, finished=finished)
    numbers = _run(laws.dynamo_law, laws.DynamoState(), seen, 195)
    assert numbers[:11] == [1] * 11
    assert numbers[11] == 3


@pytest.mark.parametrize(
    ("replicas", "wanted"),
    [
        ([{"waiting": 50, "running": 20}] * 2, 3),
        ([{"waiting": 50, "running": 20}, {"running": 2}], 2),
        ([{"running": 42}] * 2, 3),
        ([{"running": 5}] * 2, 2),
    ],
    ids=["all late", "one has time", "all slow", "within the targets"],
)
def test_dynamo_moves_one_replica_if_all_engines_agree(
    replicas: list[dict[str, int]], wanted: int
) -> None:
    state = laws.DynamoState(mean=(100, 0, 100), floor=1)
    seen = _observe([_replica(f"r{i}", **how) for i, how in enumerate(replicas)])
    assert laws.dynamo_law(state, seen, PARAMS, 0)[1] == wanted
    changing = _observe([_replica(f"r{i}", **how) for i, how in enumerate(replicas)], desired=3)
    assert laws.dynamo_law(state, changing, PARAMS, 0)[1] == 3, "unchanged while replicas change"


@pytest.mark.parametrize(
    ("replicas", "moves"),
    [
        ([{"kv": 50}, {"kv": 50}], 0),
        ([{"kv": 75}, {"kv": 75}], 1),
        ([{"waiting": 3}, {"waiting": 3}], 1),
        ([{"kv": 95}, {"waiting": 9}], 1),
        ([{"kv": 20}, {"kv": 20}], -1),
        ([{"kv": 36}, {"kv": 36}], 0),
        ([{"kv": 10}], 0),
    ],
    ids=[
        "enough",
        "KV short",
        "queue short",
        "all saturated",
        "fewer suffice",
        "fewer do not suffice",
        "last",
    ],
)
def test_llm_d_moves_one_replica_by_spare_capacity_after_four_minutes(
    replicas: list[dict[str, int]], moves: int
) -> None:
    seen = _observe([_replica(f"r{i}", **how) for i, how in enumerate(replicas)])
    numbers = _run(laws.llmd_law, laws.LlmdState(), seen, 300)
    assert set(numbers[:15]) == {len(replicas)}
    assert numbers[-1] == len(replicas) + moves


def test_llm_d_waits_for_starting_replicas() -> None:
    seen = _observe([_replica("r0", kv=95)], desired=2)
    assert set(_run(laws.llmd_law, laws.LlmdState(), seen, 600)) == {2}
