"""The limits of a server, as far as its steps show them: budget, running requests, policy."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_core.spec.choices import Policy, Preemption
from goodput_core.spec.workloads import EngineSpec, TokenBudgetSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from goodput_replay.calibration.steps import Chunks, ReplicaSteps

__all__ = ["infer_engine", "largest_step", "next_power", "plans_ahead", "saturated_budget"]

_MAX_SATURATED: Final = 5
_SATURATED_PERCENT: Final = 2
_AHEAD_STEPS: Final = 2
_MAX_NUM_SEQS: Final = 1024


def largest_step(observed: Sequence[ReplicaSteps], chunks: Sequence[Chunks]) -> int:
    """Return the largest number of tokens in a step with prompts and decodes.

    Without such a step, as on a server that runs one request at a time, that of any step.
    """
    prompts = (sum(size for _, size in parts) for found in chunks for parts in found.parts)
    return max(_mixed_tokens(observed, chunks), default=0) or max(prompts, default=1)


def saturated_budget(observed: Sequence[ReplicaSteps], chunks: Sequence[Chunks]) -> int | None:
    """Return the number of tokens that the largest steps have in common; None if they have none.

    It is a power of two, as most servers have it, if one is near.
    """
    sizes = sorted(_mixed_tokens(observed, chunks), reverse=True)[:_MAX_SATURATED]
    if len(sizes) < _MAX_SATURATED:
        return None
    middle = round(median(sizes))
    if abs(sizes[-1] - middle) * 100 > middle * _SATURATED_PERCENT:
        return None
    power = 1 << round(math.log2(middle))
    return power if abs(power - middle) * 100 <= power * _SATURATED_PERCENT else middle


def _mixed_tokens(observed: Sequence[ReplicaSteps], chunks: Sequence[Chunks]) -> Iterator[int]:
    """Yield the tokens of each step with prompts, and decodes unless prompts have own steps."""
    for steps, found in zip(observed, chunks, strict=True):
        separate = steps.separates_prompts
        for parts, decodes in zip(found.parts, steps.decodes.tolist(), strict=True):
            if parts and (decodes or separate):
                yield decodes + sum(tokens for _, tokens in parts)


def plans_ahead(observed: Sequence[ReplicaSteps], delay_ns: int) -> bool:
    """True if new requests usually miss the step after the one during which they arrive."""
    waits: list[int] = []
    for steps in observed:
        arrived = steps.arrival_steps(delay_ns)
        alone = np.concatenate(([True], steps.first_steps[:-1] < arrived[1:]))
        busy = steps.decodes[arrived] > 0
        waits += (steps.first_steps - arrived)[alone & busy].tolist()
    return len(waits) > 0 and median(waits) >= _AHEAD_STEPS


def next_power(tokens: int) -> int:
    """Return the next power of two that is larger."""
    return 1 << tokens.bit_length()


def infer_engine(observed: Sequence[ReplicaSteps], budget: int) -> EngineSpec:
    """Return the settings of a server as far as its steps show them.

    The number of running requests is not limited.
    """
    separate = sum(one.separates_prompts for one in observed) * 2 > len(observed)
    return EngineSpec(
        policy=Policy.VLLM if separate else Policy.SARATHI,
        preemption=Preemption.RECOMPUTE,
        token_budget=TokenBudgetSpec(min=min(64, budget), max=max(8192, budget), initial=budget),
        max_num_seqs=_MAX_NUM_SEQS,
        max_waiting=1_000_000,
    )
