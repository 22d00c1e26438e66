"""`priority`: the smaller W, the fewer urgent and the more background requests are kept."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from tests.builders.schedulers import SteppedCore, make_configure

from goodput_core.spec.choices import Preemption
from goodput_core.units import NS_PER_MS
from goodput_engine.core.build import build_core
from goodput_engine.device.load import load_profile
from goodput_engine.messages import ExecutorInput, Submit

W_MS = (10, 150, 400, 1_000, 100_000)
SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKind:
    """A kind of request: ranges of tokens, milliseconds from arrival to deadline, priority."""

    prompt: tuple[int, int]
    outputs: tuple[int, int]
    deadline_ms: int
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoKinds:
    """Requests of two kinds with exponential gaps; the load exceeds the capacity."""

    every_ms: float
    share: float
    urgent: RequestKind
    background: RequestKind


MIXES = {
    "half background, long outputs": TwoKinds(
        every_ms=4.0,
        share=0.5,
        urgent=RequestKind(prompt=(8, 32), outputs=(8, 60), deadline_ms=150, priority=2),
        background=RequestKind(
            prompt=(100, 200), outputs=(200, 400), deadline_ms=1500, priority=-1
        ),
    ),
    "few background, long prompts": TwoKinds(
        every_ms=2.5,
        share=0.8,
        urgent=RequestKind(prompt=(8, 32), outputs=(20, 40), deadline_ms=100, priority=2),
        background=RequestKind(
            prompt=(200, 400), outputs=(100, 300), deadline_ms=1200, priority=-1
        ),
    ),
    "neighbouring levels": TwoKinds(
        every_ms=2.0,
        share=0.7,
        urgent=RequestKind(prompt=(8, 32), outputs=(8, 24), deadline_ms=80, priority=1),
        background=RequestKind(prompt=(64, 128), outputs=(100, 200), deadline_ms=1000, priority=0),
    ),
}


def _kept(mix: TwoKinds, seed: int, ageing_ms: int, preemption: Preemption) -> tuple[int, int]:
    """Return the urgent and the background requests that meet their deadlines."""
    rng = random.Random(seed)
    arrivals: list[tuple[int, RequestKind]] = []
    at_ms = 0.0
    for _ in range(300):
        at_ms += rng.expovariate(1 / mix.every_ms)
        kind = mix.urgent if rng.random() < mix.share else mix.background
        arrivals.append((int(at_ms * NS_PER_MS), kind))
    core = build_core(
        make_configure(
            policy="priority",
            preemption=preemption,
            token_budget=256,
            max_num_seqs=24,
            max_waiting=1000,
            ageing_ns=ageing_ms * NS_PER_MS,
            swap_space_bytes=1 << 34,
        ),
        replace(load_profile("unit"), kv_blocks=120),
    )
    stepped = SteppedCore(core=core)
    for rid, (at_ns, kind) in enumerate(arrivals):
        stepped.move_to(at_ns)
        stepped.submit(
            Submit(
                rid=rid,
                arrival_ns=at_ns,
                input_tokens=rng.randint(*kind.prompt),
                max_output_tokens=rng.randint(*kind.outputs),
                priority=kind.priority,
                executor=ExecutorInput(ignore_eos=True),
            )
        )
        stepped.wake()
    stepped.run()
    kept = {mix.urgent: 0, mix.background: 0}
    for outcome in stepped.outcomes:
        for progress in outcome.progress:
            at_ns, kind = arrivals[progress.request.rid]
            took_ns = outcome.result.at_ns - at_ns
            if progress.finish_reason and took_ns <= kind.deadline_ms * NS_PER_MS:
                kept[kind] += 1
    return kept[mix.urgent], kept[mix.background]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mix", "preemption"),
    [
        *((mix, Preemption.SWAP) for mix in MIXES.values()),
        (MIXES["half background, long outputs"], Preemption.RECOMPUTE),
    ],
    ids=[*MIXES, "recomputed"],
)
def test_a_larger_w_keeps_no_fewer_urgent_and_no_more_background_requests(
    mix: TwoKinds, preemption: Preemption
) -> None:
    runs = [[_kept(mix, seed, w_ms, preemption) for seed in SEEDS] for w_ms in W_MS]
    urgent = [sum(run[0] for run in row) for row in runs]
    background = [sum(run[1] for run in row) for row in runs]
    # Two requests per run are left to chance: which of two starts first changes all that follows.
    chance = 2 * len(SEEDS)
    assert all(low <= high + chance for low, high in pairwise(urgent)), urgent
    assert all(low + chance >= high for low, high in pairwise(background)), background
    assert all(more + chance >= background[-1] for more in background), background
    assert urgent[0] < urgent[-1], urgent
    assert background[0] + chance >= background[-1], background
