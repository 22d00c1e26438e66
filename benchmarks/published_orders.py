"""Orders that papers publish about scheduling, on emulated devices.

    python -m benchmarks.published_orders
    python -m benchmarks.published_orders --examples stalls,ageing

*batching*: requests of lengths drawn as in the Orca paper (prompts of 32 to 512 tokens, outputs of
1 to 128, `max_tokens` as long as the output) are all present at the start. Iteration-level
scheduling must have a higher throughput than batches that run to their end.

*reservation*: requests of the mean lengths of ShareGPT (prompts of 161, outputs of 338 tokens) on a
small KV pool. Orca reserves the model's limit (*Max*), the output rounded up to a power of two
(*Pow2*), or its true length (*Oracle*), and vLLM reserves nothing. The throughput must rise in this
order, as in the vLLM paper.

*stalls*: prompts arrive beside decodes. The longest gap between tokens must be shorter where
prompts are computed in chunks (Sarathi-Serve, SplitFuse) than where a whole prompt is computed at
once (Orca, vLLM).

*minima*: 32 requests decode with a TBT target of 100 ms on the published table of a 70B model, and
prompts arrive beside them. The law `model` sizes the steps; `tokenBudget.min` is its lower bound.
The share of gaps between tokens above the target is that of the 32 requests.

*chunks*: a prompt of 8,192 tokens arrives just before sixteen prompts of 256 tokens, beside eight
decodes. Steps have the same token budget; only the prefill chunk differs.

*swapping*: requests on a small KV pool, with preemption by recomputation and by swapping over
links of different bandwidth. Recomputation must not depend on the bandwidth, and swapping must be
the slower one on a slow link and the faster one on a fast link, as in the vLLM paper.

*feedback*: requests with lengths of a wide distribution. The mean time to completion must be lower
with the feedback queue of FastServe than first come, first served, without knowing the lengths.

*ageing*: urgent requests beside background ones under `priority`, above the capacity. The larger W,
the more urgent and the fewer background requests must be kept.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from benchmarks.comparison.arguments import names_of
from msgspec import structs

from goodput_core.quantiles import P99, quantile
from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import BudgetLaw, Policy, Preemption
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.core.build import build_core
from goodput_engine.device.load import load_profile
from goodput_engine.messages import Configure, ExecutorInput, Submit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from goodput_engine.device.profile import DeviceProfile

BATCHING: Final = (Policy.REQUEST, Policy.STATIC, Policy.ORCA, Policy.VLLM, Policy.SARATHI)
SEED: Final = 1
DECODES: Final = 32
NO_TARGETS: Final = Targets()
TBT: Final = Targets(tbt_p99_ns=100 * NS_PER_MS)
MINIMA: Final = (256, 128, 64)
CHUNKS: Final = (None, 512, 256, 128)
STALLS: Final = (
    (Policy.ORCA, 8192),
    (Policy.VLLM, 8192),
    (Policy.SPLITFUSE, 512),
    (Policy.SARATHI, 512),
)
"""Policies and token budgets."""
GB_PER_S: Final = (1, 4, 16, 64)
FEEDBACK: Final = (Policy.VLLM, Policy.SARATHI, Policy.FASTSERVE)
AGEING_S: Final = (0.25, 1, 3, 10, 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request; `limit` is its `max_tokens`, None if the client sets none."""

    prompt: int
    outputs: int
    arrival_ns: int = 0
    targets: Targets = NO_TARGETS
    limit: int | None = None
    priority: int = 0


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

    def latency_ns(self, job: int) -> int:
        """Return the time from the arrival of a job to its last token so far."""
        return self.first_ns[job] + sum(self.gaps_ns[job])


def serve(
    jobs: Sequence[Job],
    config: Configure,
    until_ns: int | None = None,
    *,
    profile: DeviceProfile | None = None,
) -> Served:
    """Serve jobs, given in order of arrival, in virtual time.

    Args:
        jobs: the requests.
        config: the engine; steps that only decode are taken one by one.
        until_ns: time at which to stop; None to serve all jobs to their end.
        profile: device profile; None for that of the configured device.
    """
    core = build_core(config, load_profile(config.device) if profile is None else profile)
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
                max_output_tokens=job.limit,
                targets=job.targets,
                priority=job.priority,
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


class Example(Protocol):
    """A comparison that a paper has published."""

    def __call__(self, *, quick: bool) -> list[dict[str, object]]:
        """Return the rows of its table.

        Args:
            quick: True for fewer requests.
        """
        ...


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


def compare_batching(*, quick: bool) -> list[dict[str, object]]:
    """Serve requests of the Orca paper's lengths with and without `max_tokens`."""
    rng = random.Random(SEED)
    lengths = [(rng.randint(32, 512), rng.randint(1, 128)) for _ in range(128 if quick else 512)]
    rows: list[dict[str, object]] = []
    for policy in BATCHING:
        config = configure(policy, device="llama-3-8b-h100", token_budget=8192, slots=32)
        rates = []
        for limited in (True, False):
            jobs = [Job(prompt=p, outputs=n, limit=n if limited else None) for p, n in lengths]
            served = serve(jobs, config)
            rates.append(sum(n for _, n in lengths) * NS_PER_S // served.end_ns)
        rows.append({"policy": policy, "tokens/s": rates[0], "without max_tokens": rates[1]})
    return rows


def compare_reservations(*, quick: bool) -> list[dict[str, object]]:
    """Serve requests of ShareGPT's mean lengths on a pool of 16,384 tokens, by reservation."""
    rng = random.Random(SEED)
    lengths = [(rng.randint(16, 306), rng.randint(16, 660)) for _ in range(128 if quick else 512)]
    profile = replace(load_profile("llama-3-8b-h100"), kv_blocks=1024, max_model_tokens=2048)
    limits: list[tuple[str, Policy, Callable[[int], int | None]]] = [
        ("orca, Max", Policy.ORCA, lambda _: None),
        ("orca, Pow2", Policy.ORCA, lambda n: 1 << (n - 1).bit_length()),
        ("orca, Oracle", Policy.ORCA, lambda n: n),
        ("vllm", Policy.VLLM, lambda n: n),
    ]
    rows: list[dict[str, object]] = []
    for name, policy, limit in limits:
        config = configure(policy, device=profile.name, token_budget=8192, slots=256)
        jobs = [Job(prompt=p, outputs=n, limit=limit(n)) for p, n in lengths]
        served = serve(jobs, config, profile=profile)
        tokens = sum(n for _, n in lengths)
        rows.append({"reservation": name, "tokens/s": tokens * NS_PER_S // served.end_ns})
    return rows


def compare_stalls(*, quick: bool) -> list[dict[str, object]]:
    """Serve prompts of 2,000 to 6,000 tokens beside sixteen decodes."""
    rng = random.Random(SEED)
    jobs = [Job(prompt=256, outputs=400 if quick else 1600, limit=1600)] * 16
    at_s = 0.5
    while at_s < (2 if quick else 10):
        jobs.append(
            Job(prompt=rng.randint(2000, 6000), outputs=8, limit=8, arrival_ns=int(at_s * NS_PER_S))
        )
        at_s += rng.expovariate(2)
    rows: list[dict[str, object]] = []
    for policy, budget in STALLS:
        config = configure(policy, device="llama-3-8b-h100", token_budget=budget, slots=64)
        served = serve(jobs, config)
        gaps = [gap for gaps in served.gaps_ns[:16] for gap in gaps]
        rows.append(
            {
                "policy": policy,
                "token budget": budget,
                "longest gap, ms": round(max(gaps) / NS_PER_MS),
                "TBT p99, ms": round(quantile(gaps, P99) / NS_PER_MS),
                "mean TTFT, ms": round(statistics.fmean(served.first_ns[16:]) / NS_PER_MS),
            }
        )
    return rows


def compare_minima(*, quick: bool) -> list[dict[str, object]]:
    """Serve prompts beside 32 decodes with a TBT target, by `tokenBudget.min`."""
    rng = random.Random(SEED)
    seconds = 40 if quick else 90
    jobs = [Job(prompt=1024, outputs=100_000, limit=100_000, targets=TBT)] * DECODES
    at_s = 25.0  # by then the prompts of the decoding requests are computed
    while (at_s := at_s + rng.expovariate(0.5)) < seconds:
        prompt, arrival_ns = rng.randint(256, 1024), int(at_s * NS_PER_S)
        jobs.append(Job(prompt=prompt, outputs=1, limit=1, arrival_ns=arrival_ns))
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
        rows.append(
            {
                "tokenBudget.min": low,
                "gaps over 100 ms": f"{over:.1%}",
                "TBT p99, ms": round(quantile(gaps, P99) / NS_PER_MS),
            }
        )
    return rows


def compare_chunks(*, quick: bool) -> list[dict[str, object]]:
    """Serve short prompts behind a long one, by prefill chunk."""
    del quick  # the example is small
    jobs = [Job(prompt=256, outputs=400, limit=400)] * 8
    jobs += [Job(prompt=8192, outputs=1, limit=1, arrival_ns=NS_PER_S)]
    jobs += [Job(prompt=256, outputs=1, limit=1, arrival_ns=NS_PER_S)] * 16
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
                "prefillChunkTokens": chunk or "none",
                "TTFT, long prompt, ms": round(first_ms[0]),
                "TTFT, short prompts, ms": round(statistics.fmean(first_ms[1:])),
                "longest gap, ms": round(max(max(gaps) for gaps in served.gaps_ns[:8]) / NS_PER_MS),
            }
        )
    return rows


def compare_swapping(*, quick: bool) -> list[dict[str, object]]:
    """Serve long prompts that do not fit together, by preemption mode and bandwidth."""
    rng = random.Random(SEED)
    jobs = [
        Job(prompt=rng.randint(1000, 3000), outputs=400, limit=400)
        for _ in range(16 if quick else 48)
    ]
    rows: list[dict[str, object]] = []
    for bandwidth in GB_PER_S:
        profile = replace(
            load_profile("llama-3-8b-h100"), kv_blocks=1536, swap_bytes_per_s=bandwidth * 10**9
        )
        row: dict[str, object] = {"GB/s": bandwidth}
        for mode in (Preemption.RECOMPUTE, Preemption.SWAP):
            config = structs.replace(
                configure(Policy.VLLM, device=profile.name, token_budget=8192, slots=64),
                preemption=mode,
                swap_space_bytes=1 << 36,
            )
            served = serve(jobs, config, profile=profile)
            row[f"{mode}, s"] = round(served.end_ns / NS_PER_S, 2)
        rows.append(row)
    return rows


def compare_feedback(*, quick: bool) -> list[dict[str, object]]:
    """Serve requests of log-normal lengths at a high load, without `max_tokens`."""
    rng = random.Random(SEED)
    jobs: list[Job] = []
    at_s = 0.0
    for _ in range(300 if quick else 1200):
        at_s += rng.expovariate(24)
        prompt, outputs = (min(2000, max(4, round(rng.lognormvariate(4.5, 1.2)))) for _ in range(2))
        jobs.append(Job(prompt=prompt, outputs=outputs, arrival_ns=int(at_s * NS_PER_S)))
    rows: list[dict[str, object]] = []
    for policy in FEEDBACK:
        config = structs.replace(
            configure(policy, device="llama-3-8b-h100", token_budget=2048, slots=16),
            preemption=Preemption.SWAP,
            swap_space_bytes=1 << 36,
        )
        served = serve(jobs, config)
        latencies = [served.latency_ns(number) / NS_PER_S for number in range(len(jobs))]
        short = [s for s, job in zip(latencies, jobs, strict=True) if job.outputs <= 90]
        rows.append(
            {
                "policy": policy,
                "mean latency, s": round(statistics.fmean(latencies), 2),
                "of short outputs, s": round(statistics.fmean(short), 2),
            }
        )
    return rows


def compare_ageing(*, quick: bool) -> list[dict[str, object]]:
    """Serve two priority levels at twice the capacity, by `ageingSeconds`."""
    rng = random.Random(SEED)
    jobs: list[Job] = []
    at_s = 0.0
    while at_s < (25 if quick else 120):
        at_s += rng.expovariate(20)
        urgent = rng.random() < 0.7
        jobs.append(
            Job(
                prompt=rng.randint(64, 512) if urgent else rng.randint(512, 2048),
                outputs=rng.randint(16, 128) if urgent else rng.randint(256, 512),
                arrival_ns=int(at_s * NS_PER_S),
                priority=2 if urgent else -1,
            )
        )
    rows: list[dict[str, object]] = []
    for ageing_s in AGEING_S:
        config = structs.replace(
            configure(Policy.PRIORITY, device="llama-3-8b-h100", token_budget=2048, slots=8),
            ageing_ns=round(ageing_s * NS_PER_S),
        )
        served = serve(jobs, config, until_ns=jobs[-1].arrival_ns)
        kept = {2: 0, -1: 0}
        for number, job in enumerate(jobs):
            done = len(served.gaps_ns[number]) == job.outputs - 1 and served.first_ns[number]
            limit_s = 4 if job.priority == 2 else 60
            kept[job.priority] += bool(done) and served.latency_ns(number) <= limit_s * NS_PER_S
        rows.append({"W, s": ageing_s, "urgent kept": kept[2], "background kept": kept[-1]})
    return rows


EXAMPLES: Final[Mapping[str, Example]] = {
    "batching": compare_batching,
    "reservation": compare_reservations,
    "stalls": compare_stalls,
    "minima": compare_minima,
    "chunks": compare_chunks,
    "swapping": compare_swapping,
    "feedback": compare_feedback,
    "ageing": compare_ageing,
}


def show(rows: Sequence[dict[str, object]]) -> None:
    """Print a table whose columns are the keys of the rows."""
    names = list(rows[0])
    cells = [
        [f"{row[name]:,}" if isinstance(row[name], int) else str(row[name]) for name in names]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    for line in [names, *cells]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--examples",
        type=names_of(EXAMPLES),
        default=",".join(EXAMPLES),
        help="(default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    tables = {name: EXAMPLES[name](quick=options.quick) for name in options.examples}
    if options.json:
        print(json.dumps(tables, indent=2))
        return
    for name, rows in tables.items():
        print(f"{name}:")
        show(rows)
        print()


if __name__ == "__main__":
    main()
