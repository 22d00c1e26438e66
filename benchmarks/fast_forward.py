"""Requests and steps per second of one engine core in virtual time, with and without fast-forward.

    python benchmarks/fast_forward.py
    python benchmarks/fast_forward.py --json

Measures one core on the profile llama-3-8b-h100, without a trace, placement, records or judging.
Arrivals are Poisson. Prompt and output lengths are geometric with the means of the Azure
conversation trace, 1,155 and 211 tokens. *Events* are engine calls per request: submissions, and
steps that are planned and committed one by one.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import time
from typing import TYPE_CHECKING

from goodput_engine.core.build import build_core
from goodput_engine.device.load import load_profile
from goodput_engine.messages import Configure, ExecutorInput, Submit

if TYPE_CHECKING:
    from goodput_engine.core.engine_core import EngineCore

DEVICE = "llama-3-8b-h100"
# Requests per second, with about 6 and about 60 running at once.
RATES = (4.5, 16.0)
POLICIES = ("sarathi", "vllm", "sjf")
PROMPT_TOKENS, OUTPUT_TOKENS = 1155, 211


def arrivals(rate: float, requests: int) -> list[Submit]:
    rng = random.Random(1)
    now_ns = 0
    submits = []
    for rid in range(1, requests + 1):
        now_ns += round(rng.expovariate(rate) * 1e9)
        tokens = _geometric(rng, PROMPT_TOKENS)
        first = rng.getrandbits(63)
        submits.append(
            Submit(
                rid=rid,
                arrival_ns=now_ns,
                input_tokens=tokens,
                block_hashes=list(range(first, first + tokens // 16)),
                executor=ExecutorInput(output_tokens=_geometric(rng, OUTPUT_TOKENS)),
            )
        )
    return submits


def _geometric(rng: random.Random, mean: int) -> int:
    return 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean))


class TimedRun:
    """One core that serves all arrivals."""

    def __init__(self, policy: str, *, skips: bool) -> None:
        profile = load_profile(DEVICE)
        self.core: EngineCore = build_core(
            Configure(
                device=DEVICE,
                policy=policy,
                preemption="recompute",
                token_budget=2048,
                min_token_budget=64,
                max_token_budget=8192,
                max_num_seqs=256,
                max_waiting=10**6,
            ),
            profile,
        )
        self.skips = skips
        self.events = 0
        self.skipped = 0

    def run(self, until_ns: int) -> None:
        core = self.core
        while (due_ns := core.next_event_ns()) is not None and due_ns < until_ns:
            skipped = core.fast_forward(until_ns) if self.skips else None
            if skipped is not None:
                self.skipped += len(skipped.ends_ns)
            else:
                core.advance(due_ns)
                self.events += 1

    def serve(self, submits: list[Submit]) -> float:
        """Serve all requests and return the CPU seconds."""
        start = time.process_time()
        for submit in submits:
            self.run(submit.arrival_ns)
            self.core.submit(submit, submit.arrival_ns)
            self.core.advance(submit.arrival_ns)
        self.run(1 << 62)
        return time.process_time() - start


def measure(policy: str, rate: float, requests: int, *, skips: bool) -> dict[str, object]:
    submits = arrivals(rate, requests)
    run = TimedRun(policy, skips=skips)
    took_s = run.serve(submits)
    stats = run.core.scheduler.stats
    return {
        "policy": policy,
        "rate_per_s": rate,
        "fast_forward": skips,
        "mean_batch": round(stats.output_tokens / stats.steps, 1),
        "steps_per_request": round(stats.steps / requests, 1),
        "skipped_share": round(run.skipped / stats.steps, 3),
        "events_per_request": round(1 + run.events / requests, 1),
        "steps_per_s": round(stats.steps / took_s),
        "requests_per_s": round(requests / took_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--quick", action="store_true", help="500 requests")
    args = parser.parse_args()
    requests = 500 if args.quick else args.requests
    rows = [
        measure(policy, rate, requests, skips=skips)
        for policy in POLICIES
        for rate in RATES
        for skips in (False, True)
    ]
    if args.json:
        print(json.dumps({"python": platform.python_version(), "rows": rows}))
        return
    for number, row in enumerate(rows):
        if not number:
            print("  ".join(row))
        print("  ".join(str(value).rjust(len(name)) for name, value in row.items()))


if __name__ == "__main__":
    main()
