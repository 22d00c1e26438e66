"""Orders that papers publish about scheduling, on emulated devices.

    python -m benchmarks.published_orders

*Batching*: requests of lengths drawn as in the Orca paper (prompts of 32 to 512 tokens, outputs of
1 to 128, `max_tokens` as long as the output) are all present at the start. Iteration-level
scheduling must have a higher throughput than batches that run to their end.

*Budget*: 32 requests decode with a TBT target of 100 ms on the published table of a 70B model, and
prompts arrive beside them. The law `model` sizes the steps; `tokenBudget.min` is its lower bound.
The share of gaps between tokens above the target is that of the 32 requests.

*Chunks*: a prompt of 8,192 tokens arrives just before sixteen prompts of 256 tokens, beside eight
decodes. Steps have the same token budget; only the prefill chunk differs.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec import structs

from goodput_core.quantiles import P99, quantile
from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import BudgetLaw, Policy, Preemption
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.core.build import build_core
from goodput_engine.device.load import load_profile
from goodput_engine.messages import Configure, ExecutorInput, Submit

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCHING: Final = (Policy.REQUEST, Policy.STATIC, Policy.ORCA, Policy.VLLM, Policy.SARATHI)
SEED: Final = 1
DECODES: Final = 32
NO_TARGETS: Final = Targets()
TBT: Final = Targets(tbt_p99_ns=100 * NS_PER_MS)
MINIMA: Final = (256, 128, 64)
CHUNKS: Final = (None, 512, 256, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request; `limited` is True if the client sets `max_tokens` to the length of the output."""

    prompt: int
    outputs: int
    arrival_ns: int = 0
    targets: Targets = NO_TARGETS
    limited: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Times of a workload, in nanoseconds.

    Args:
        end_ns: end of the last request.
        first_ns: time from arrival to first token, by job.
        gaps_ns: gaps between tokens, by job.
    """

    end_ns: int
    first_ns: list[int]
    gaps_ns: list[list[int]]


def serve(jobs: Sequence[Job], config: Configure, until_ns: int | None = None) -> Served:
    """Serve jobs, given in order of arrival, in virtual time.

    Args:
        jobs: the requests.
        config: the engine; steps that only decode are taken one by one.
        until_ns: time at which to stop; None to serve all jobs to their end.
    """
    core = build_core(config, load_profile(config.device))
    left = list(enumerate(jobs))[::-1]
    last: dict[int, int] = {}
    first_ns = [0] * len(jobs)
    gaps_ns: list[list[int]] = [[] for _ in jobs]
    now_ns = 0
    while (left or core.scheduler.has_work) and (until_ns is None or now_ns < until_ns):
        event_ns = core.next_event_ns()
        if left and (event_ns is None or left[-1][1].arrival_ns <= event_ns):
            now_ns = left[-1][1].arrival_ns
        else:
            assert event_ns is not None, "unfinished work without a next event"
            now_ns = event_ns
        while left and left[-1][1].arrival_ns <= now_ns:
            rid, job = left.pop()
            submit = Submit(
                rid=rid,
                arrival_ns=now_ns,
                input_tokens=job.prompt,
                max_output_tokens=job.outputs if job.limited else None,
                targets=job.targets,
                executor=ExecutorInput(output_tokens=job.outputs, ignore_eos=True),
            )
            assert core.submit(submit, now_ns) is None
            if not left:
                core.drain()  # incomplete batches start
        outcome = core.advance(now_ns)
        if outcome is None:
            continue
        at_ns = outcome.result.at_ns
        for rid in (*outcome.advanced, *(p.request.rid for p in outcome.progress)):
            if rid in last:
                gaps_ns[rid].append(at_ns - last[rid])
            else:
                first_ns[rid] = at_ns - jobs[rid].arrival_ns
            last[rid] = at_ns
    return Served(end_ns=now_ns, first_ns=first_ns, gaps_ns=gaps_ns)


def configure(policy: Policy, *, device: str, token_budget: int, slots: int) -> Configure:
    """Return a configuration without a token-budget law."""
    return Configure(
        device=device,
        policy=policy,
        preemption=Preemption.RECOMPUTE,
        token_budget=token_budget,
        min_token_budget=1,
        max_token_budget=token_budget,
        max_num_seqs=slots,
        max_waiting=10**6,
    )


def compare_batching(requests: int) -> list[dict[str, object]]:
    """Serve requests of the Orca paper's lengths with and without `max_tokens`."""
    rng = random.Random(SEED)
    lengths = [(rng.randint(32, 512), rng.randint(1, 128)) for _ in range(requests)]
    rows: list[dict[str, object]] = []
    for policy in BATCHING:
        config = configure(policy, device="llama-3-8b-h100", token_budget=8192, slots=32)
        rates = []
        for limited in (True, False):
            jobs = [Job(prompt=p, outputs=n, limited=limited) for p, n in lengths]
            served = serve(jobs, config)
            rates.append(sum(n for _, n in lengths) * NS_PER_S // served.end_ns)
        rows.append({"policy": policy, "tokens_per_s": rates[0], "without_max_tokens": rates[1]})
    return rows


def compare_minima(seconds: int) -> list[dict[str, object]]:
    """Serve prompts beside 32 decodes with a TBT target, by `tokenBudget.min`."""
    rng = random.Random(SEED)
    jobs = [Job(prompt=1024, outputs=100_000, targets=TBT)] * DECODES
    at_s = 25.0  # by then the prompts of the decoding requests are computed
    while (at_s := at_s + rng.expovariate(0.5)) < seconds:
        jobs.append(Job(prompt=rng.randint(256, 1024), outputs=1, arrival_ns=int(at_s * NS_PER_S)))
    rows: list[dict[str, object]] = []
    for low in MINIMA:
        config = structs.replace(
            configure(Policy.SARATHI, device="published-70b-table", token_budget=2048, slots=64),
            min_token_budget=low,
            budget_law=BudgetLaw.MODEL,
        )
        served = serve(jobs, config, until_ns=seconds * NS_PER_S)
        gaps = [gap for gaps in served.gaps_ns[:DECODES] for gap in gaps]
        over = sum(gap > 100 * NS_PER_MS for gap in gaps) / len(gaps)
        rows.append({"min": low, "over": over, "tbt_p99_ms": quantile(gaps, P99) / NS_PER_MS})
    return rows


def compare_chunks() -> list[dict[str, object]]:
    """Serve short prompts behind a long one, by prefill chunk."""
    jobs = [Job(prompt=256, outputs=400)] * 8
    jobs += [Job(prompt=8192, outputs=1, arrival_ns=NS_PER_S)]
    jobs += [Job(prompt=256, outputs=1, arrival_ns=NS_PER_S)] * 16
    rows: list[dict[str, object]] = []
    for chunk in CHUNKS:
        config = structs.replace(
            configure(Policy.SARATHI, device="llama-3-8b-h100", token_budget=2048, slots=64),
            prefill_chunk_tokens=chunk,
        )
        served = serve(jobs, config)
        first_ms = [ns / NS_PER_MS for ns in served.first_ns[8:]]
        rows.append(
            {
                "chunk": chunk,
                "long_ttft_ms": first_ms[0],
                "short_ttft_ms": sum(first_ms[1:]) / len(first_ms[1:]),
                "tbt_max_ms": max(max(gaps) for gaps in served.gaps_ns[:8]) / NS_PER_MS,
            }
        )
    return rows


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    tables = {
        "batching": compare_batching(128 if options.quick else 512),
        "minima": compare_minima(40 if options.quick else 90),
        "chunks": compare_chunks(),
    }
    if options.json:
        print(json.dumps(tables, indent=2))
        return
    print("policy     tokens/s   without max_tokens")
    for row in tables["batching"]:
        print(f"{row['policy']:<10}{row['tokens_per_s']:>9,}{row['without_max_tokens']:>21,}")
    print("\ntokenBudget.min   gaps over 100 ms   TBT p99")
    for row in tables["minima"]:
        print(f"{row['min']:>15}{row['over']:>19.1%}{row['tbt_p99_ms']:>7.0f} ms")
    print("\nprefillChunkTokens   TTFT, long prompt   TTFT, short prompts   longest gap")
    for row in tables["chunks"]:
        print(
            f"{row['chunk'] or 'none':>18}{row['long_ttft_ms']:>17.0f} ms"
            f"{row['short_ttft_ms']:>19.0f} ms{row['tbt_max_ms']:>11.0f} ms"
        )


if __name__ == "__main__":
    main()
