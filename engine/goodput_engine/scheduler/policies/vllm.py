"""vLLM as in its paper: prompts first, and recomputation when blocks run out."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policy import Phase, SchedulingPolicy

if TYPE_CHECKING:
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["VllmPolicy"]


class VllmPolicy(SchedulingPolicy):
    """While a prompt can start, steps hold whole prompts alone and decodes wait; else all decode.

    First come, first served. Blocks are allocated as tokens come, with one in a hundred kept free
    at admission. Out of blocks, the newest request yields, is computed again later, and returns to
    the queue's head. A prompt longer than the token budget, which vLLM refuses, is split.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023, section 4.5; the order of a step as in vLLM 0.2.
    """

    name: ClassVar[Policy] = Policy.VLLM

    def phase(self, view: SchedulerView) -> Phase:  # noqa: ARG002
        """Decodes only where no prompt can be computed."""
        return Phase(prompts_alone=True)

    def chunk_tokens(
        self, request: ScheduledRequest, remaining: int, budget_left: int, view: SchedulerView
    ) -> int:
        """The whole prompt, or nothing yet."""
        if request.total_tokens <= view.limits.token_budget and remaining > budget_left:
            return 0
        return min(remaining, budget_left)

    def steady(self, view: SchedulerView) -> bool:  # noqa: ARG002
        """Who waits starts when a place or blocks fall free, and none do while all decode."""
        return True
