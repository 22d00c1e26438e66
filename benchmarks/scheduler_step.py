"""Microseconds per `plan` + `commit` of the scheduler alone, by number of running requests.

    python benchmarks/scheduler_step.py
    python benchmarks/scheduler_step.py --policy slo --json

*steady*: all requests decode, and none arrives or ends; blocks are allocated as they fill. *mixed*:
all outputs are short, and each request that ends is replaced by a new one, so that every step also
admits requests, prefills chunks and finishes requests.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from typing import TYPE_CHECKING

from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.kv.blocks import BlockPool
from goodput_engine.scheduler.plan import StepResult
from goodput_engine.scheduler.policies.registry import POLICIES, build_policy
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.request_table import ScheduledRequest
from goodput_engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from collections import deque

    from goodput_engine.scheduler.plan import StepPlan

RUNNING = (32, 256, 1024)
WORKLOADS = ("steady", "mixed")
STEP_NS = 20 * NS_PER_MS
# Targets that all requests can meet.
TARGETS = Targets(ttft_ns=600 * NS_PER_S, tpot_ns=100 * NS_PER_MS)


class Load:
    """A scheduler with a constant number of running requests."""

    def __init__(self, policy: str, running: int, workload: str, depth: int) -> None:
        from collections import deque

        self.random = random.Random(running)
        self.mixed = workload == "mixed"
        self.scheduler = Scheduler(
            policy=build_policy(policy),
            kv=BlockPool(total_blocks=running * 140, block_size=16),
            limits=SchedulerLimits(
                token_budget=running + 2048, max_num_seqs=running, max_waiting=10**6
            ),
            max_model_tokens=10**6,
            depth=depth,
        )
        self.plans: deque[StepPlan] = deque()
        self.rid = 0
        self.now_ns = 0
        for _ in range(running):
            self.arrive()
        while self.scheduler.num_decoding < running * 0.9:
            self.step()

    def arrive(self) -> None:
        self.rid += 1
        prompt = self.random.randint(100, 900)
        limit = self.random.randint(20, 380) if self.mixed else 2000 - prompt
        self.scheduler.add(
            ScheduledRequest(
                rid=self.rid,
                arrival_ns=self.now_ns,
                targets=TARGETS,
                input_tokens=prompt,
                max_output_tokens=limit,
                block_hashes=[self.rid * 1000 + i for i in range(prompt // 16)],
            ),
            self.now_ns,
        )

    def step(self) -> int:
        """Plan and commit one step; return the nanoseconds of both."""
        scheduler, plans = self.scheduler, self.plans
        start = time.perf_counter_ns()
        while (plan := scheduler.plan(self.now_ns)) is not None:
            plans.append(plan)
        planned = time.perf_counter_ns()
        oldest = plans.popleft()
        self.now_ns += STEP_NS
        result = StepResult(plan_id=oldest.plan_id, at_ns=self.now_ns, step_ns=STEP_NS, stopped={})
        middle = time.perf_counter_ns()
        outcome = scheduler.commit(oldest, result, self.now_ns)
        end = time.perf_counter_ns()
        for progress in outcome.progress:
            if progress.finish_reason is not None:
                self.arrive()
        return end - middle + planned - start


def measure(
    policy: str, running: int, workload: str, *, steps: int, repeats: int, depth: int
) -> dict[str, object]:
    medians, p99s = [], []
    for _ in range(repeats):
        load = Load(policy, running, workload, depth)
        for _ in range(50):
            load.step()
        times = sorted(load.step() for _ in range(steps))
        medians.append(times[len(times) // 2] / 1000)
        p99s.append(times[len(times) * 99 // 100] / 1000)
    return {
        "policy": policy,
        "workload": workload,
        "running": running,
        "depth": depth,
        "median_us": round(statistics.median(medians), 1),
        "median_us_by_repeat": [round(m, 1) for m in medians],
        "p99_us": round(statistics.median(p99s), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--policy", default="sarathi", choices=sorted(POLICIES))
    parser.add_argument("--steps", type=int, default=500, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--depth", type=int, default=0, choices=(0, 1, 2))
    parser.add_argument("--quick", action="store_true", help="one repeat of 100 steps")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.repeats = 100, 1
    rows = [
        measure(
            args.policy,
            running,
            workload,
            steps=args.steps,
            repeats=args.repeats,
            depth=args.depth,
        )
        for workload in WORKLOADS
        for running in RUNNING
    ]
    if args.json:
        print(json.dumps({"python": platform.python_version(), "rows": rows}))
        return
    print(f"{'workload':<10}{'running':>8}{'depth':>7}{'median µs':>11}{'p99 µs':>9}")
    for row in rows:
        print(
            f"{row['workload']:<10}{row['running']:>8}{row['depth']:>7}"
            f"{row['median_us']:>11}{row['p99_us']:>9}"
        )


if __name__ == "__main__":
    main()
