"""Prompts to compute: their due times and work, and whether all of them are in time."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from goodput_core.steptime import StepShape
from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.steptime import StepTimeForm
    from goodput_engine.scheduler.policies.slo.forecast import Forecast
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = [
    "Prompt",
    "PromptOrder",
    "PromptTime",
    "best_order",
    "is_ensurable",
    "is_hopeless",
    "latest_starts",
    "prompts_left",
]

_EARLY: Final = 0.25
"""Prompts of a higher level may wait for those that are due before them if this share of the time
until their due time suffices. More prompts of the higher level may arrive meanwhile."""
_REMEMBERED: Final = 1 - 1 / 64
"""Weight of the earlier steps in a mean over about 64 steps."""
_STEPS_WITHOUT: Final = 16
"""The mean starts with so many steps without prompts."""
_PROMPT_STATES: Final = (RequestState.WAITING, RequestState.PREFILLING)
_HOPELESS: Final = 1.05
"""A step of one decode that takes so many times as long as a target allows cannot meet it."""


def is_ensurable(request: ScheduledRequest, model: StepTimeForm) -> bool:
    """Return True if an idle engine meets the end-to-end target even with the longest output."""
    if request.targets.e2e_ns is None:
        return True
    one = StepShape.of(decodes=1, decode_context_tokens=request.input_tokens)
    return request.output_limit * model.step_ns(one) <= request.targets.e2e_ns


def exceeds_pace(request: ScheduledRequest, model: StepTimeForm) -> bool:
    """Return True if even a step with this request alone breaks its target between tokens."""
    pace_ns = request.targets.pace_ns
    if pace_ns is None or request.output_limit == 1:
        return False
    one = StepShape.of(decodes=1, decode_context_tokens=request.input_tokens)
    return model.step_ns(one) > pace_ns * _HOPELESS


def is_hopeless(
    request: ScheduledRequest, model: StepTimeForm, *, token_budget: int, output_tokens: int
) -> bool:
    """Return True if even an idle engine would miss the targets of a request.

    Args:
        request: a request that has not started.
        model: predicts step times.
        token_budget: most prompt tokens of a step.
        output_tokens: length of a short output, which an end-to-end target must permit.
    """
    if exceeds_pace(request, model):
        return True
    targets, tokens = request.targets, request.input_tokens
    one = StepShape.of(decodes=1, decode_context_tokens=tokens)
    token_ns = model.step_ns(one) / _HOPELESS
    limits_ns: list[float] = []
    if targets.ttft_ns is not None:
        limits_ns.append(targets.ttft_ns)
    if targets.e2e_ns is not None:
        limits_ns.append(targets.e2e_ns - (output_tokens - 1) * token_ns)
    if not limits_ns:
        return False
    left_ns = min(limits_ns)
    for computed in range(request.expected_hits, tokens, token_budget):
        chunk = min(token_budget, tokens - computed)
        left_ns -= model.step_ns(StepShape.of().with_chunk(computed, chunk))
        if left_ns < 0:
            return True
    return False


class Prompt(NamedTuple):
    """A prompt that can be computed in time. Prompts are computed in the order of these tuples.

    Args:
        level: its level in the order of prompts, lower first.
        due_ns: time at which its next token is due.
        rid: the request's rid.
        work_ns: predicted time of the work that is left, at least that of a step.
        share_ns: predicted time by which this work makes the steps of other prompts longer. Several
            short prompts fit into one step.
        last_ns: the due time if no prompts are computed beside its decodes. After it, the request
            is lost.
        request: the request, running or waiting.
    """

    level: int
    due_ns: int
    rid: int
    work_ns: float
    share_ns: float
    last_ns: int
    request: ScheduledRequest


class PromptOrder(NamedTuple):
    """The order in which prompts are computed.

    Args:
        by_level: True for by priority, then by due time; False for by due time alone.
        started_first: True if, by priority, started prompts come before all others.
        highest, lowest: the highest and the lowest priority.
        later_ns: by priority, paused requests that are due after this time come last.
    """

    by_level: bool = True
    started_first: bool = False
    highest: int = 0
    lowest: int = 0
    later_ns: float = math.inf

    def level(self, request: ScheduledRequest, due_ns: int) -> int:
        """Return the level of a request's prompt; lower ones are computed first."""
        if not self.by_level:
            return 0
        if due_ns > self.later_ns and request.base_sampled and not request.blocks:
            return -self.lowest
        first = self.started_first and request.blocks
        return -(self.highest if first else request.priority)

    def placed(self, prompt: Prompt) -> Prompt:
        """Return a prompt with its level in this order."""
        return prompt._replace(level=self.level(prompt.request, prompt.due_ns))


def best_order(
    prompts: Sequence[Prompt], view: SchedulerView, *, begins_ns: int, token_ns: float
) -> PromptOrder:
    """Return the order by due time if all prompts can be in time so, else an order by priority.

    In the latter, prompts that have started come first if those of higher levels can be in time
    after them, and paused requests that have time come last: they would take back the memory that
    their pause has freed. The arguments are those of `all_in_time`.
    """
    in_time = partial(all_in_time, view=view, begins_ns=begins_ns, token_ns=token_ns)
    priorities = [prompt.request.priority for prompt in prompts]
    order = PromptOrder(by_level=False)
    if not prompts or in_time(sorted(map(order.placed, prompts))):
        return order
    lowest = min(priorities)
    work_ns = sum(prompt.share_ns for prompt in prompts) + token_ns
    by_level = PromptOrder(lowest=lowest, later_ns=begins_ns + work_ns / _EARLY)
    order = by_level._replace(started_first=True, highest=max(priorities))
    first = [p for p in prompts if p.request.priority > lowest or p.request.blocks]
    if first and in_time(sorted(map(order.placed, first))):
        return order
    return by_level


def all_in_time(
    prompts: Sequence[Prompt], view: SchedulerView, *, begins_ns: int, token_ns: float
) -> bool:
    """Return True if all prompts find room now and are in time in this order.

    Args:
        prompts: the prompts, in order; at least one.
        view: the scheduler.
        begins_ns: start of the first prompt.
        token_ns: time of a step without prompts, which is left as a margin.
    """
    waiting = [prompt.request for prompt in prompts if not prompt.request.blocks]
    needed = sum(-(-request.own_tokens // view.block_size) for request in waiting)
    places = view.limits.max_num_seqs - view.num_running
    if needed > view.free_blocks or len(waiting) > places:
        return False
    lowest = min(prompt.request.priority for prompt in prompts)
    ends_ns = float(token_ns)
    for prompt in prompts:
        ends_ns += prompt.share_ns
        # More of a higher level may arrive, and then the others must wait.
        left_ns = prompt.due_ns - begins_ns
        if ends_ns > (left_ns if prompt.request.priority == lowest else left_ns * _EARLY):
            return False
    return True


def latest_starts(prompts: Sequence[Prompt]) -> dict[int, float]:
    """Return, by rid, the time at which each prompt must start so that those behind are in time.

    A prompt does not start earlier for prompts of a lower level.
    """
    starts: dict[int, float] = {}
    next_ns, level = math.inf, 0
    for prompt in reversed(prompts):
        if prompt.level != level:
            next_ns, level = math.inf, prompt.level
        next_ns = min(prompt.due_ns - prompt.work_ns, next_ns - prompt.share_ns)
        starts[prompt.rid] = next_ns
    return starts


class PromptTime:
    """The mean time by which prompts make a step with decodes longer.

    Each decoding request gets one token in such a step, so its tokens take this much longer.
    """

    __slots__ = ("_epoch", "_sum_ns")

    def __init__(self) -> None:
        self._sum_ns = 0.0
        self._epoch = 0

    def observe(self, longer_ns: float, *, epoch: int) -> None:
        """Learn the time of the prompts of a step; `epoch` is its number among steps with decodes.

        Steps that are left out had no prompts.
        """
        self._sum_ns = self._sum_ns * _REMEMBERED ** (epoch - self._epoch) + longer_ns
        self._epoch = epoch

    def mean_ns(self, epoch: int) -> float:
        """Return the mean until a step with decodes, the latest ones having the largest weight."""
        total_ns = self._sum_ns * _REMEMBERED ** max(0, epoch - self._epoch)
        return total_ns * (1 - _REMEMBERED) / (1 - _REMEMBERED ** (epoch + _STEPS_WITHOUT))


def prompts_left(forecast: Forecast, *, planned: bool) -> list[Prompt]:
    """Return the prompts of the forecast that are still to be computed, with the work left.

    Args:
        forecast: the forecast.
        planned: True if a step was planned since the forecast was made.
    """
    left = [prompt for prompt in forecast.prompts if prompt.request.state in _PROMPT_STATES]
    if not planned:
        return left
    return [
        Prompt(
            level,
            due_ns,
            rid,
            *forecast.times_ns(request),
            last_ns,
            request,
        )
        for level, due_ns, rid, _, _, last_ns, request in left
    ]
