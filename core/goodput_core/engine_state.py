"""The state of one engine, declared once for scheduler, server and control loop.

The scheduler fills `EngineStatistics`, and the engine core extends it to an `EngineState`. The core
process sends that state with each step. The server returns its fields at the top level of
`GET /control/state` and in its metrics. The operator decodes the same class from that JSON, and an
emulated fleet reads it directly. Fields are part of the HTTP contract: add, but do not rename.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from goodput_core.slo.importance import Importance

__all__ = ["NO_STATISTICS", "EngineState", "EngineStatistics"]


_SETTLED_ERROR: Final = 0.1
"""A prefill budget has settled once step times deviate from their prediction by at most this
share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """Counters since the start of an engine.

    Args:
        steps: committed steps that computed tokens.
        step_ns: their summed device time.
        scheduled_tokens: computed tokens, including recomputed ones.
        output_tokens: tokens emitted.
        preemptions: evictions of running requests.
        recomputed_tokens: computed tokens discarded by evictions, to be computed again.
        swapped_tokens: computed tokens copied to host memory by evictions.
        prefix_queried_tokens: tokens of admitted requests looked up in the prefix cache.
        prefix_hit_tokens: tokens found in the prefix cache.
        shed: requests rejected, displaced or dropped because of load.
    """

    steps: int = 0
    step_ns: int = 0
    scheduled_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    shed: int = 0

    def plus(self, other: EngineStatistics) -> EngineStatistics:
        """Return the sums of two engines' counters."""
        return EngineStatistics(
            **{name: getattr(self, name) + getattr(other, name) for name in _COUNTERS}
        )

    def counters(self) -> dict[str, int]:
        """Return the counters by name, as `asdict` does, but fast enough for every step."""
        return {name: getattr(self, name) for name in _COUNTERS}


_COUNTERS: Final = tuple(field.name for field in fields(EngineStatistics))
NO_STATISTICS: Final = EngineStatistics()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState(EngineStatistics):
    """A snapshot of an engine core.

    Args:
        at_ns: time of the snapshot, monotonic clock of the engine's machine.
        running: admitted requests, including those whose blocks are still in use.
        waiting: requests in the queue.
        kv_total_blocks, kv_free_blocks: KV blocks on the device; `free` includes the cached ones.
        kv_cached_blocks: free blocks that hold a reusable prefix.
        block_size: tokens per KV block.
        host_total_blocks, host_free_blocks: host memory for copies of KV blocks.
        limits_revision: revision of the limits in force.
        token_budget, max_num_seqs, max_waiting: the limits in force.
        draining: True if new requests are rejected.
        behind_ns: how far an emulated device's clock trails real time; 0 for a real device.
        predicted_lengths: finished requests whose output length was predicted.
        length_error: recent mean of |ln(predicted / true length)|; 0 if the policy predicts none.
        step_time_error: recent mean of |measured / predicted − 1| of step times; 0 without a
            step-time model.
        budget_law: law that sizes the prefill budget; empty if none does.
        safety_percent: share of the tightest TPOT that a step is planned to take; 0 if no law
            sizes the prefill budget.
        prompt_tokens, prompt_reason: latest prefill budget and its reason; 0 and empty before the
            first one.
        displaceable: importance of the waiting request that a full queue rejects first; None if
            there is none, or if less than half of the queue is used.
    """

    at_ns: int = 0
    running: int = 0
    waiting: int = 0
    kv_total_blocks: int = 0
    kv_free_blocks: int = 0
    kv_cached_blocks: int = 0
    block_size: int = 0
    host_total_blocks: int = 0
    host_free_blocks: int = 0
    limits_revision: int = 0
    token_budget: int = 0
    max_num_seqs: int = 0
    max_waiting: int = 0
    draining: bool = False
    behind_ns: int = 0
    predicted_lengths: int = 0
    length_error: float = 0.0
    step_time_error: float = 0.0
    budget_law: str = ""
    safety_percent: int = 0
    prompt_tokens: int = 0
    prompt_reason: str = ""
    displaceable: Importance | None = None

    @property
    def settled(self) -> bool:
        """False while a law still adapts the prefill budget to a change of the device."""
        return not self.budget_law or self.step_time_error <= _SETTLED_ERROR
