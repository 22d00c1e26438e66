"""Microseconds per `add`, `plan` and `commit` of the scheduler alone, by running requests.

    python benchmarks/scheduler_step.py
    python benchmarks/scheduler_step.py --policy slo --json

*steady*: all requests decode, and none arrives or ends; blocks are allocated as they fill. *mixed*:
all outputs are short, and each request that ends is replaced by a new one, so that every step also
admits requests, prefills chunks and finishes requests. The time of `add` is that of all requests
that arrive in a step. All times are CPU times, so other processes of the machine count little.

*of a decode step* is the share of the time that a device needs to decode one token of each running
request, with their mean context: `llama-3-8b-h100` (`--device`), on which a serving engine such as
vLLM takes such steps. A scheduler that takes a tenth of it can be hidden behind the device. With
another policy than `sarathi`, `sarathi` is measured in the same run, and *of sarathi* is the ratio
of the sums.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Policy
from goodput_core.steptime import StepShape
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.device.load import load_profile
from goodput_engine.kv.blocks import BlockPool
from goodput_engine.scheduler.plan import StepResult
from goodput_engine.scheduler.policies.registry import POLICIES, build_policy
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.request_table import ScheduledRequest
from goodput_engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from goodput_engine.scheduler.plan import StepPlan

RUNNING = (32, 256, 1024)
WORKLOADS = ("steady", "mixed")
STEP_NS = 20 * NS_PER_MS
# Targets that all requests can meet.
TARGETS = Targets(ttft_ns=600 * NS_PER_S, tpot_ns=100 * NS_PER_MS)


class Load:
    """A scheduler with a constant number of running requests."""

    def __init__(self, policy: str, running: int, workload: str, depth: int) -> None:
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

    def arrive(self) -> int:
        """Add a request; return the CPU nanoseconds of the call."""
        self.rid += 1
        prompt = self.random.randint(100, 900)
        limit = self.random.randint(20, 380) if self.mixed else 2000 - prompt
        request = ScheduledRequest(
            rid=self.rid,
            arrival_ns=self.now_ns,
            targets=TARGETS,
            input_tokens=prompt,
            max_output_tokens=limit,
            block_hashes=[self.rid * 1000 + i for i in range(prompt // 16)],
        )
        start = time.thread_time_ns()
        self.scheduler.add(request, self.now_ns)
        return time.thread_time_ns() - start

    def step(self) -> tuple[int, int, int]:
        """Take one step; return the CPU nanoseconds of `add`, `plan` and `commit`."""
        scheduler, plans = self.scheduler, self.plans
        start = time.thread_time_ns()
        while (plan := scheduler.plan(self.now_ns)) is not None:
            plans.append(plan)
        planned = time.thread_time_ns()
        oldest = plans.popleft()
        self.now_ns += STEP_NS
        result = StepResult(plan_id=oldest.plan_id, at_ns=self.now_ns, step_ns=STEP_NS, stopped={})
        middle = time.thread_time_ns()
        outcome = scheduler.commit(oldest, result, self.now_ns)
        end = time.thread_time_ns()
        ended = sum(progress.finish_reason is not None for progress in outcome.progress)
        add_ns = sum(self.arrive() for _ in range(ended))
        return add_ns, planned - start, end - middle

    def decode_ns(self, device: str) -> int:
        """Return the time in which a device decodes a token of each running request."""
        running = list(self.scheduler.running())
        context = sum(request.computed_tokens for request in running)
        shape = StepShape.of(decodes=len(running), decode_context_tokens=context)
        return load_profile(device).form.step_ns(shape)


def measure(
    policy: str,
    running: int,
    workload: str,
    *,
    steps: int,
    repeats: int,
    depth: int,
    device: str,
) -> dict[str, Any]:
    """Return the times of one policy, in microseconds: means over the steps of all repeats.

    The slowest twentieth of the steps, which other processes disturb most, is left out of the
    means.
    """
    times: list[tuple[int, int, int]] = []
    decode_ns: list[int] = []
    for _ in range(repeats):
        load = Load(policy, running, workload, depth)
        for _ in range(50):
            load.step()
        times += [load.step() for _ in range(steps)]
        decode_ns.append(load.decode_ns(device))
    times.sort(key=sum)
    parts = [
        statistics.fmean(part) / 1000 for part in zip(*times[: len(times) * 19 // 20], strict=True)
    ]
    decode_us = statistics.median(decode_ns) / 1000
    return {
        "policy": policy,
        "workload": workload,
        "running": running,
        "depth": depth,
        "add_us": round(parts[0], 1),
        "plan_us": round(parts[1], 1),
        "commit_us": round(parts[2], 1),
        "sum_us": round(sum(parts), 1),
        "p99_us": round(sum(times[len(times) * 99 // 100]) / 1000, 1),
        "decode_step_us": round(decode_us),
        "of_decode_step": sum(parts) / decode_us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--policy", default=Policy.SARATHI, choices=sorted(POLICIES))
    parser.add_argument("--device", default="llama-3-8b-h100", help="profile (%(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--depth", type=int, default=0, choices=(0, 1, 2))
    parser.add_argument("--quick", action="store_true", help="one repeat of 100 steps")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.repeats = 100, 1
    rows = []
    for workload in WORKLOADS:
        for running in RUNNING:
            measured = {
                policy: measure(
                    policy,
                    running,
                    workload,
                    steps=args.steps,
                    repeats=args.repeats,
                    depth=args.depth,
                    device=args.device,
                )
                for policy in dict.fromkeys([Policy.SARATHI, args.policy])
            }
            sarathi_us = measured[Policy.SARATHI]["sum_us"]
            rows += [row | {"of_sarathi": row["sum_us"] / sarathi_us} for row in measured.values()]
    if args.json:
        print(json.dumps({"python": platform.python_version(), "rows": rows}))
        return
    print("microseconds per step: means without the slowest twentieth of the steps, and p99 of all")
    print(
        f"{'policy':<10}{'workload':<9}{'running':>8}{'add':>10}{'plan':>8}{'commit':>8}"
        f"{'sum':>10}{'p99':>10}{'of a decode step':>24}{'of sarathi':>12}"
    )
    for row in rows:
        share = f"{row['of_decode_step']:.1%} of {row['decode_step_us'] / 1000:.1f} ms"
        print(
            f"{row['policy']:<10}{row['workload']:<9}{row['running']:>8,}{row['add_us']:>10,}"
            f"{row['plan_us']:>8,}{row['commit_us']:>8,}{row['sum_us']:>10,}{row['p99_us']:>10,}"
            f"{share:>24}{row['of_sarathi']:>12.2f}"
        )


if __name__ == "__main__":
    main()
