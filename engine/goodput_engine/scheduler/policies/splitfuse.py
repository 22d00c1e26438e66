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

    The tokens of all started and waiting prompts are divided equally over the fewest steps that
    the budget allows. Each step computes its share beside the decodes, from one or more prompts.

    `sarathi` instead fills each step to the budget, and the last one has the remainder. When
    arithmetic bounds a step, its time grows faster than in proportion to its tokens. A large step
    and a small one then take longer than two equal ones, and the large step is the longest gap
    between two tokens.

    Source: Holmes et al., "DeepSpeed-FastGen", 2024, section 3 (insight 3: with P tokens to
    process in F passes, divide them equally; 3.2: Dynamic SplitFuse).
    """

    name: ClassVar[Policy] = Policy.SPLITFUSE

    def phase(self) -> Phase:
        """Every kind of work, up to the decodes and an equal share of the prompt tokens."""
        return Phase(token_budget=self._token_budget())

    def can_fast_forward(self) -> bool:
        """True: the share depends on the same prompts until one starts."""
        return True

    def _token_budget(self) -> int:
        """Return the decodes and an equal share of the prompt tokens."""
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
