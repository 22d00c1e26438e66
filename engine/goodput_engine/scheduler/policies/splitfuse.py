"""DeepSpeed-FastGen's Dynamic SplitFuse: steps of an even size."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Final

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policy import Phase, SchedulingPolicy

if TYPE_CHECKING:
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["SplitFusePolicy"]

_HORIZON_STEPS: Final = 8
"""With prompts for more steps than this, an even share is nearly the whole budget."""


class SplitFusePolicy(SchedulingPolicy):
    """Prompts are split and fused so that steps have the same number of tokens.

    The tokens of all started and waiting prompts are divided equally over the fewest steps that
    the budget allows. Each step takes its share beside the decodes, from as many prompts as it
    needs. `sarathi` fills each step up instead and leaves a remainder for the last one: once
    arithmetic bounds a step, its time grows faster than in proportion, so a large step and a
    small one take longer than two equal ones, and the large one is the longest gap between
    tokens. First come, first served; if blocks run out, the newest request is evicted.

    Source: Holmes et al., "DeepSpeed-FastGen", 2024, section 3 (insight 3: with P tokens to
    process in F passes, divide them equally; 3.2: Dynamic SplitFuse).
    """

    name: ClassVar[Policy] = Policy.SPLITFUSE
    uses_prefill_budget: ClassVar[bool] = True

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """The newest first."""
        return (request.arrival_ns, request.rid)

    def reserved_tokens(self, request: ScheduledRequest) -> int:
        """The whole prompt, and after a preemption the answer so far."""
        return request.total_tokens

    def headroom_blocks(self) -> int:
        """One block in a hundred, so that decodes can grow."""
        return self.view.total_blocks // 100

    def phase(self) -> Phase:
        """Decodes, prefills and admissions, with an equal share of the prompt tokens."""
        return Phase(token_budget=self._token_budget())

    def chunk_tokens(self, request: ScheduledRequest, remaining: int, budget_left: int) -> int:  # noqa: ARG002
        """The rest of the prompt within the budget."""
        return min(remaining, budget_left)

    def can_fast_forward(self) -> bool:
        """Always: the share depends on the same prompts until one starts."""
        return True

    def _token_budget(self) -> int:
        view = self.view
        limit = view.limits.token_budget
        pool = prompts = 0
        for request in view.prefilling():
            prompts += 1
            pool += request.total_tokens - request.computed_tokens
        decodes = view.num_running - prompts
        room = max(1, limit - decodes)
        places = max(0, view.limits.max_num_seqs - view.num_running)
        for request in islice(view.waiting, places):
            pool += request.total_tokens - request.computed_tokens
            if pool > _HORIZON_STEPS * room:
                return limit
        steps = -(-pool // room)
        return decodes + -(-pool // steps) if steps else limit
