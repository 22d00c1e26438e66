"""How many prompt tokens a step can take and still end in time: the closed-form token budget."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from goodput_core.steptime.form import StepTimeForm
    from goodput_core.steptime.shape import StepShape

__all__ = ["largest_prefill"]


def largest_prefill(
    form: StepTimeForm,
    *,
    beside: StepShape,
    target_ns: int,
    most_tokens: int,
    start: int = 0,
    multiple: int = 1,
) -> int:
    """The longest chunk with which a step is predicted to take at most `target_ns`.

    The form's law is turned around (a line for rooflines and tables, a quadratic for DistServe's
    form), so it costs the same for any budget.

    Args:
        form: the law.
        beside: what the step computes anyway: its decodes, and chunks that are settled.
        target_ns: the time that the tightest running request has left for the step.
        most_tokens: never more than this: the budget that is left, or the prompt's rest.
        start: tokens of the chunk's request that are computed already.
        multiple: round down to a multiple of this.

    Returns:
        Tokens, 0 to `most_tokens`; 0 where even one is too many.
    """
    if target_ns < 1:
        return 0
    # Half a nanosecond: predictions are rounded to whole ones.
    guess = form.chunk_within(beside, start, target_ns + 0.5)
    tokens = most_tokens if guess >= most_tokens else max(0, math.floor(guess))
    # The guess is exact but for the last bit of a float, which may move it across a whole number.
    if tokens > 0 and form.step_ns(beside.with_chunk(start, tokens)) > target_ns:
        tokens -= 1
    elif tokens < most_tokens and (form.step_ns(beside.with_chunk(start, tokens + 1)) <= target_ns):
        tokens += 1
    return tokens - tokens % multiple
