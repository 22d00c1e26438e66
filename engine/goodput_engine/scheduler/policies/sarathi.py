"""Sarathi-Serve: stall-free batching with chunked prefills."""

from __future__ import annotations

from typing import ClassVar

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policy import SchedulingPolicy

__all__ = ["SarathiPolicy"]


class SarathiPolicy(SchedulingPolicy):
    """Decodes first, then the prefills that run, then new ones, all within the token budget.

    A decode is never held up by a prefill: a prompt gets what the decodes leave of the budget, so
    a long one is computed in chunks. Blocks for the whole prompt are allocated at admission. Out
    of blocks, the newest request yields, is computed again later, and returns to the queue's head.
    This is what the scheduler does when no hook objects, so nothing is overridden.

    Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with
    Sarathi-Serve", OSDI 2024, algorithm 3.
    """

    name: ClassVar[Policy] = Policy.SARATHI
    paced: ClassVar[bool] = True
