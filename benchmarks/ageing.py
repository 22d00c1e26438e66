"""The effect of priorities and of ageing on short requests beside long ones.

    python benchmarks/ageing.py
    python benchmarks/ageing.py --plot docs/images/ageing.png

One replica on the `unit` device, whose steps take 1 ms, with 120 KV blocks of 16 tokens and 24
slots. 70 % of the requests are short, of class interactive and priority 2; 30 % are long, of class
batch and priority -1; their order is random (seed 7). Each request has a deadline, and the load
exceeds the capacity. The first table shows the share of each kind that meets its deadline, by
policy. The second one sweeps W, the waiting time that raises a request by one priority level, at
six times that rate.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Preemption
from goodput_core.units import NS_PER_MS
from goodput_engine.core.engine_core import EngineCore
from goodput_engine.device.load import load_profile
from goodput_engine.executor.emulated import EmulatedExecutor
from goodput_engine.kv.blocks import BlockPool, HostPool
from goodput_engine.messages import ExecutorInput, Submit
from goodput_engine.scheduler.policies.registry import build_policy
from goodput_engine.scheduler.policy import PolicySettings, SchedulerLimits
from goodput_engine.scheduler.scheduler import Scheduler

SEED = 7
POLICIES = ("vllm", "sarathi", "fastserve", "priority", "slo")
AGEING_STEPS = (5, 10, 25, 50, 100, 150, 200, 250, 300, 400, 800, 1600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of request: ranges of tokens, steps from arrival to deadline, priority."""

    prompt: tuple[int, int]
    outputs: tuple[int, int]
    deadline: int
    priority: int


SHORT = Kind(prompt=(8, 32), outputs=(8, 24), deadline=80, priority=2)
LONG = Kind(prompt=(64, 128), outputs=(100, 200), deadline=2000, priority=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request; its arrival in steps."""

    kind: Kind
    arrival: int
    prompt: int
    outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a workload.

    Args:
        steps: steps until the last request ended.
        short_goodput: short requests that met their deadline, per 1,000 steps of input.
        short_met, long_met: share of each kind that met its deadline.
        long_done: share of the long requests that had ended at the last arrival.
        goodput: requests that met their deadline, per 1,000 steps.
        preemptions: number of evictions.
    """

    steps: int
    short_goodput: float
    short_met: float
    long_met: float
    long_done: float
    goodput: float
    preemptions: int


def workload(requests: int = 200, every: float = 3.5, seed: int = SEED) -> list[Job]:
    """Return requests with random arrivals, in order."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    at = 0.0
    kinds = [SHORT] * (requests * 7 // 10) + [LONG] * (requests * 3 // 10)
    rng.shuffle(kinds)
    for kind in kinds:
        at += rng.expovariate(1 / every)
        jobs.append(
            Job(
                kind=kind,
                arrival=int(at),
                prompt=rng.randint(*kind.prompt),
                outputs=rng.randint(*kind.outputs),
            )
        )
    return jobs


def serve(policy: str, jobs: list[Job], *, ageing_steps: int = 10**6) -> Result:
    """Serve all jobs in virtual time."""
    profile = replace(load_profile("unit"), kv_blocks=120)
    assert profile.block_size == 16
    scheduler = Scheduler(
        policy=build_policy(policy, PolicySettings(ageing_ns=ageing_steps * NS_PER_MS)),
        kv=BlockPool(total_blocks=120, block_size=16),
        limits=SchedulerLimits(token_budget=256, max_num_seqs=24, max_waiting=10**6),
        max_model_tokens=1024,
        host=HostPool(total_blocks=10**4, ns_per_block=NS_PER_MS // 100),
        preemption=Preemption.SWAP,
    )
    core = EngineCore(scheduler=scheduler, executor=EmulatedExecutor(profile))
    ended: dict[int, int] = {}
    upcoming = list(enumerate(jobs))[::-1]
    now_ns = 0
    while upcoming or scheduler.has_work:
        event_ns = core.next_event_ns()
        arrival_ns = upcoming[-1][1].arrival * NS_PER_MS if upcoming else None
        if arrival_ns is not None and (event_ns is None or arrival_ns <= event_ns):
            now_ns = arrival_ns
        else:
            assert event_ns is not None, "unfinished work without a next event"
            now_ns = event_ns
        while upcoming and upcoming[-1][1].arrival * NS_PER_MS <= now_ns:
            rid, job = upcoming.pop()
            core.submit(
                Submit(
                    rid=rid,
                    arrival_ns=now_ns,
                    input_tokens=job.prompt,
                    max_output_tokens=job.outputs,
                    slo_class="interactive" if job.kind is SHORT else "batch",
                    targets=Targets(e2e_ns=job.kind.deadline * NS_PER_MS),
                    priority=job.kind.priority,
                    executor=ExecutorInput(ignore_eos=True),
                ),
                now_ns,
            )
        outcome = core.advance(now_ns)
        if outcome is not None:
            for progress in outcome.progress:
                if progress.finish_reason is not None:
                    ended[progress.request.rid] = outcome.result.at_ns // NS_PER_MS
    met = [rid for rid, at in ended.items() if at - jobs[rid].arrival <= jobs[rid].kind.deadline]
    steps, last = max(ended.values()), jobs[-1].arrival
    short_met = sum(jobs[rid].kind is SHORT for rid in met)
    return Result(
        steps=steps,
        short_goodput=1000 * short_met / last,
        short_met=_share(met, jobs, SHORT),
        long_met=_share(met, jobs, LONG),
        long_done=_share([r for r, at in ended.items() if at <= last], jobs, LONG),
        goodput=1000 * len(met) / steps,
        preemptions=scheduler.stats.preemptions,
    )


def main() -> None:
    """Print both tables, and draw the second one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="every fourth W, a quarter of the load"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plot", type=Path, help="PNG to draw the sweep into")
    options = parser.parse_args()
    jobs = workload()
    policies = {policy: serve(policy, jobs) for policy in POLICIES}
    many = workload(500 if options.quick else 2000, every=0.6)
    ageing = AGEING_STEPS[::4] if options.quick else AGEING_STEPS
    sweep = {steps: serve("priority", many, ageing_steps=steps) for steps in ageing}
    if options.plot is not None:
        draw(sweep, options.plot)
    if options.json:
        tables = {"policies": policies, "ageing_steps": sweep}
        print(json.dumps(tables, default=asdict, indent=2))
        return
    print("policy      short met   long met  goodput/1,000 steps  steps  preemptions")
    for policy, r in policies.items():
        print(
            f"{policy:<9}{r.short_met:>12.0%}{r.long_met:>11.0%}{r.goodput:>21.0f}"
            f"{r.steps:>7,}{r.preemptions:>13}"
        )
    print("\nW, steps   short met  short goodput/1,000 steps  long done when input ends")
    for steps, r in sweep.items():
        print(f"{steps:>8}{r.short_met:>12.0%}{r.short_goodput:>27.0f}{r.long_done:>26.1%}")


def draw(sweep: dict[int, Result], path: Path) -> None:
    """Draw interactive goodput against the share of finished batch requests, by W."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    batch = [100 * r.long_done for r in sweep.values()]
    interactive = [r.short_goodput for r in sweep.values()]
    axes.plot(batch, interactive, "o-", color="#1f5fa8")
    for steps, x, y in zip(sweep, batch, interactive, strict=True):
        if steps in {5, 25, 100, 200, 300, 1600}:
            axes.annotate(f"W = {steps} ms", (x, y), (6, 4), textcoords="offset points")
    axes.set_xlabel("batch requests finished when the input ends, %")
    axes.set_ylabel("interactive requests on time, per second")
    axes.set_xlim(0, 13)
    axes.set_ylim(0, 1300)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _share(rids: list[int], jobs: list[Job], kind: Kind) -> float:
    return sum(jobs[rid].kind is kind for rid in rids) / sum(job.kind is kind for job in jobs)


if __name__ == "__main__":
    main()
