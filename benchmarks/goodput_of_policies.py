"""Goodput of every policy on a production trace, around the load at which `vllm` saturates.

One replica in virtual time serves a window of the trace with two classes. The benchmark first
searches the rate scale at which half of the requests meet their targets under `vllm`, which is
first come, first served. Every policy then serves 80 %, 100 % and 120 % of this load. The ratio of
the goodput of `slo` to that of each policy has an interval from resampled blocks of thirty seconds
of arrivals, the same blocks for both.

    python benchmarks/goodput_of_policies.py --trace azure.parquet --window 10m..20m
    python benchmarks/goodput_of_policies.py … --plot goodput.png
    python benchmarks/goodput_of_policies.py --quick  # the sample trace, three policies
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from goodput_core.slo.judging import JudgementKind, judge, targets_for
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import Policy
from goodput_core.spec.llmservice import LLMService
from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.policies.registry import POLICIES
from goodput_replay.emulation.emulate import emulate
from goodput_replay.emulation.settings import fleet_settings
from goodput_replay.plan import RequestPlan
from goodput_replay.runs.slo import SLOClasses
from goodput_traces.format.reader import open_trace
from goodput_traces.sample import trace_path
from goodput_traces.transforms import TransformPlan, parse_class_rules, parse_window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.plan import PlannedRequest

BLOCK_S = 30
RESAMPLES = 2000
TIMEOUT_S = 600
CLASSES = (
    SLOClass(name="interactive", ttft_ms=500, tpot_ms=50),
    SLOClass(name="batch", ttft_ms=10_000, tpot_ms=200),
)
SLO = SLOClasses(classes=CLASSES, default="interactive")
RULES = ("batch: input_tokens >= 2048", "interactive: *")


@dataclass(frozen=True, kw_only=True)
class TraceLoad:
    """A workload."""

    trace: str
    window: str | None
    scale: Fraction


@dataclass(frozen=True, kw_only=True)
class Served:
    """Results of one policy under one load: good requests in total, by class and by block."""

    policy: str
    load: str
    requests: int
    good: int
    classes: dict[str, tuple[int, int]]
    blocks: list[int]
    preemptions: int
    shed: int

    @property
    def attainment(self) -> float:
        """Share of the requests that met their targets."""
        return self.good / self.requests


def plan_of(load: TraceLoad) -> RequestPlan:
    """Return the requests of a load."""
    trace = open_trace(trace_path(load.trace))
    return RequestPlan(
        trace=trace,
        transforms=TransformPlan(
            window=None if load.window is None else parse_window(load.window),
            rate_scale=load.scale,
            class_rules=parse_class_rules(RULES),
            first_ns=trace.first_ns,
        ),
        slo=SLO,
    )


def serve(policy: str, load: TraceLoad, device: str) -> Served:
    """Run one policy in virtual time."""
    plan = plan_of(load)
    service = LLMService.from_dict(
        {
            "apiVersion": "goodput.dev/v1alpha1",
            "kind": "LLMService",
            "metadata": {"name": "bench"},
            "spec": {
                "model": {"source": f"emulated://{device}"},
                "engine": {"policy": policy, "preemption": "hybrid", "maxWaiting": 1_000_000},
                "replicas": 1,
                "router": {"policy": "least-loaded"},
                "slo": {
                    "classes": [
                        {"name": c.name, "ttftMs": c.ttft_ms, "tpotMs": c.tpot_ms} for c in CLASSES
                    ],
                    "default": "interactive",
                },
                "control": {"mode": "Manual"},
            },
        }
    )
    settings = fleet_settings(
        service,
        device=None,
        source="benchmark",
        timeout_ns=TIMEOUT_S * NS_PER_S,
    )
    by_name = SLO.by_name()
    blocks: dict[int, int] = {}
    classes = {c.name: [0, 0] for c in CLASSES}
    shed = 0

    def on_record(planned: PlannedRequest, record: RequestRecord) -> None:
        nonlocal shed
        met = judge(record, targets_for(record, by_name)).kind is JudgementKind.ATTAINED
        block = planned.scheduled_ns // (BLOCK_S * NS_PER_S)
        blocks[block] = blocks.get(block, 0) + met
        classes[planned.slo_class][0] += met
        classes[planned.slo_class][1] += 1
        shed += record.outcome == "shed"

    outcome = emulate(plan.requests(), settings, on_record)
    return Served(
        policy=policy,
        load=str(float(load.scale)),
        requests=outcome.requests,
        good=sum(blocks.values()),
        classes={name: (good, total) for name, (good, total) in classes.items()},
        blocks=[blocks.get(i, 0) for i in range(max(blocks, default=0) + 1)],
        preemptions=outcome.preemptions,
        shed=shed,
    )


def ratio(one: Served, other: Served, seed: int = 1) -> tuple[float, float, float]:
    """Return the ratio of two goodputs with its 95 % bounds; blocks are resampled in pairs."""
    count = max(len(one.blocks), len(other.blocks))
    pairs: NDArray[np.int64] = np.zeros((2, count), dtype=np.int64)
    pairs[0, : len(one.blocks)] = one.blocks
    pairs[1, : len(other.blocks)] = other.blocks
    drawn = np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, count))
    sums = pairs[:, drawn].sum(axis=2)
    ratios = sums[0] / np.maximum(sums[1], 1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return one.good / max(other.good, 1), float(low), float(high)


def half_load(load: TraceLoad, device: str, steps: int) -> Fraction:
    """Return the rate scale at which about half of the requests meet their targets under `vllm`."""
    low, high = Fraction(1, 4), Fraction(1)
    while serve(Policy.VLLM, _scaled(load, high), device).attainment > 0.5:
        low, high = high, high * 2
    for _ in range(steps):
        middle = (low + high) / 2
        attainment = serve(Policy.VLLM, _scaled(load, middle), device).attainment
        low, high = (middle, high) if attainment > 0.5 else (low, middle)
    return (low + high) / 2


def _scaled(load: TraceLoad, scale: Fraction) -> TraceLoad:
    return TraceLoad(trace=load.trace, window=load.window, scale=scale)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", default="sample", help="a Parquet trace (default: %(default)s)")
    parser.add_argument("--window", help="part of the trace, for example 10m..25m")
    parser.add_argument("--device", default="llama-3-8b-h100", help="profile (%(default)s)")
    parser.add_argument("--policies", default=",".join(sorted(POLICIES)), help="comma-separated")
    parser.add_argument("--loads", default="0.8,1,1.2", help="factors of the searched load")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="the sample trace, three policies")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    args = parser.parse_args(argv)
    policies = ["vllm", "sarathi", "slo"] if args.quick else args.policies.split(",")
    start = TraceLoad(trace=args.trace, window=args.window, scale=Fraction(1))
    half = half_load(start, args.device, steps=3 if args.quick else 6)
    scales = [half * Fraction(text) for text in args.loads.split(",")]
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        runs = [
            (scale, policy, pool.submit(serve, policy, _scaled(start, scale), args.device))
            for scale in scales
            for policy in policies
        ]
        served = {(scale, policy): run.result() for scale, policy, run in runs}
    if args.plot is not None:
        groups = {f"{float(s / half):.0%}": [served[s, p] for p in policies] for s in scales}
        draw(groups, args.plot)
    if args.json:
        print(json.dumps([asdict(one) for one in served.values()]))
        return
    print(
        "vllm meets the targets of half of the requests at "
        f"{float(half):.3f} times the trace's rate"
    )
    for scale in scales:
        ours = served[scale, Policy.SLO]
        print(f"\nAt {float(scale / half):.0%} of that rate: {ours.requests} requests")
        print("policy       met   interactive  batch   goodput, slo / policy (95 %)   shed")
        for policy in sorted(policies, key=lambda p: -served[scale, p].good):
            one = served[scale, policy]
            shares = [f"{good / max(total, 1):.1%}" for good, total in one.classes.values()]
            times, low, high = ratio(ours, one)
            print(
                f"{policy:10} {one.attainment:6.1%}  {shares[0]:>10}  {shares[1]:>6}   "
                f"{times:6.2f}  ({low:.2f} to {high:.2f})   {one.shed:10}"
            )


def draw(groups: dict[str, list[Served]], path: Path) -> None:
    """Draw the attainment of each policy, a bar for each load.

    Args:
        groups: results by load, as a share of the searched one; the same policies in each.
        path: the PNG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    results = {load: {one.policy: one for one in served} for load, served in groups.items()}
    order = sorted(
        next(iter(results.values())), key=lambda p: -sum(k[p].attainment for k in results.values())
    )
    width = 0.8 / len(groups)
    colours = ("#9cc3e6", "#1f5fa8", "#0b2545")
    for number, (load, by_policy) in enumerate(results.items()):
        at = [index + (number - (len(groups) - 1) / 2) * width for index in range(len(order))]
        shares = [100 * by_policy[policy].attainment for policy in order]
        axes.bar(at, shares, width, color=colours[number % 3], label=f"{load} of the load")
    axes.set_xticks(range(len(order)), order)
    axes.set_ylabel("requests that met their targets, %")
    axes.legend(frameon=False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
