"""DeepSpeed-FastGen's Dynamic SplitFuse: steps of equal size."""

from __future__ import annotations

from itertools import islice
from typing import ClassVar, Final

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policies.sarathi import SarathiPolicy
from goodput_engine.scheduler.policy import Phase

__all__ = ["SplitFusePolicy"]

_HORIZON_STEPS: Final = 8
"""If the prompts fill more steps than this, an equal share is nearly the complete budget."""


class SplitFusePolicy(SarathiPolicy):
    """`sarathi`, but prompts are split and fused so that steps have the same number of tokens.

    The tokens of all started and waiting prompts are divided equally over the smallest number of
    steps that the budget allows. Each step computes the decodes and its share of the prompt tokens,
    from one or more prompts.

    Under `sarathi` each step is filled to the budget, and the last step has the remainder. If
    arithmetic bounds the time of a step, this time grows more than in proportion to its tokens. A
    large step and a small one then take longer together than two equal steps, and the large step is
    the longest gap between two tokens.

    Source: Holmes et al., "DeepSpeed-FastGen", 2024, section 3 (insight 3: with P tokens to
    process in F passes, divide them equally; 3.2: Dynamic SplitFuse).
    """

    name: ClassVar[Policy] = Policy.SPLITFUSE

    def phase(self) -> Phase:
        """Every kind of work; the budget is the decodes plus an equal share of prompt tokens."""
        return Phase(token_budget=self._token_budget())

    def can_fast_forward(self) -> bool:
        """True: the share is the same until a waiting prompt can start."""
        return True

    def _token_budget(self) -> int:
        """Return the number of decodes plus an equal share of the prompt tokens."""
        view = self.view
        limit = view.limits.token_budget
        pool = prompts = 0
        for request in view.prefilling():
            prompts += 1
            pool += request.total_tokens - request.computed_tokens
        decodes = view.num_running - prompts
        room = max(1, limit - decodes)
        slots = max(0, view.limits.max_num_seqs - view.num_running)
        for request in islice(view.waiting, slots):
            pool += request.total_tokens - request.computed_tokens
            if pool > _HORIZON_STEPS * room:
                return limit
        steps = -(-pool // room)
        return decodes + -(-pool // steps) if steps else limit
