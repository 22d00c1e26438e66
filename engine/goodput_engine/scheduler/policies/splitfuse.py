"""DeepSpeed-FastGen's Dynamic SplitFuse: steps of an even size."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Final

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policy import SchedulingPolicy

if TYPE_CHECKING:
    from goodput_engine.scheduler.policy import SchedulerView

__all__ = ["SplitFusePolicy"]

_HORIZON: Final = 8
"""Steps beyond which nobody looks: with more to do, an even share is nearly the whole budget."""


class SplitFusePolicy(SchedulingPolicy):
    """Prompts are split and fused so that steps have the same number of tokens.

    The tokens of all prompts at hand, begun or waiting, are divided equally over the fewest steps
    that the budget allows; each step takes its share beside the decodes, from as many prompts as
    it needs. `sarathi` fills each step up instead and leaves a remainder for the last: the time
    of a step grows faster than in proportion once arithmetic bounds it, so a large step and a
    small one take longer than two alike, and the large one is the pause between two tokens.

    Source: Holmes et al., "DeepSpeed-FastGen", 2024, section 3 (insight 3: with P tokens to
    process in F passes, divide them equally; 3.2: Dynamic SplitFuse).
    """

    name: ClassVar[Policy] = Policy.SPLITFUSE
    paced: ClassVar[bool] = True

    def budget(self, view: SchedulerView) -> int:
        """The decodes and an equal share of the prompts' tokens."""
        most = view.limits.token_budget
        pool = prompts = 0
        for request in view.prefilling():
            prompts += 1
            pool += request.total_tokens - request.computed_tokens
        decodes = view.num_running - prompts
        room = max(1, most - decodes)
        places = max(0, view.limits.max_num_seqs - view.num_running)
        for request in islice(view.waiting, places):
            pool += request.total_tokens - request.computed_tokens
            if pool > _HORIZON * room:
                return most
        steps = -(-pool // room)
        return decodes + -(-pool // steps) if steps else most

    def steady(self, view: SchedulerView) -> bool:  # noqa: ARG002
        """The share is of the same prompts as long as none starts."""
        return True
