"""Tests whether a new prompt can be computed in time beside those that were admitted before it.

The device computes prompts in the order of their due times, in steps that have all decodes, too.
Room is left for requests that are worth more.

Source: the processor-demand test of Baruah, Rosier and Howell, "Algorithms and complexity
concerning the preemptive scheduling of periodic, real-time tasks on one processor", Real-Time
Systems 1990. The steps are Goodput's own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from goodput_core.steptime import StepShape, StepTimeForm
from goodput_engine.scheduler.policies.slo.forecast import SAFETY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.scheduler.policies.slo.forecast import Forecast
    from goodput_engine.scheduler.policies.slo.prompts import Prompt
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = [
    "SAMPLE_DECODES",
    "LearningStepTime",
    "PromptSteps",
    "WalkedPrompts",
    "late_prompts",
    "prompt_steps",
]

SAMPLE_DECODES: Final = 16
"""The cost of a decode is that of so many more, because steps are rounded."""
_MOST_SLOWER: Final = 4
"""Prompts take at most so many times longer because of decodes that are added."""


class LearningStepTime(StepTimeForm, Protocol):
    """A step-time model that learns from measured steps.

    Args:
        error: recent mean of |measured / predicted − 1|.
        steps: number of measured steps.
    """

    error: float
    steps: int

    def observe(self, shape: StepShape, step_ns: int) -> None:
        """Learn the measured time of a step."""
        ...


class PromptSteps(NamedTuple):
    """Steps that compute prompts beside decodes.

    A full step is as long as the decodes allow. A step in which a prompt is due is cut, so the
    prompts behind it wait for the decodes of one more step. Each prompt that is computed adds a
    decode to the next steps, and each output that ends takes one away.

    Args:
        step_ns: time of a full step.
        decodes_ns: the part of it that the decodes take.
        decode_ns: time that one more decode would take.
        ends: tokens until the ends of the running requests, in order, from an earlier step on.
        passed: steps since then.
    """

    step_ns: float
    decodes_ns: float
    decode_ns: float
    ends: Sequence[float]
    passed: int

    def slower(self, computed: int, at_ns: float) -> float:
        """Return the factor by which prompts take longer at a time than now.

        Fewer decodes than now are no reason to promise more.

        Args:
            computed: number of prompts that are computed until then.
            at_ns: the time from now.
        """
        ended = bisect_right(self.ends, self.passed + at_ns / self.step_ns)
        ended -= bisect_right(self.ends, self.passed)
        more_ns = self.decode_ns * max(0, computed - ended)
        return self.step_ns / max(self.step_ns - more_ns, self.step_ns / _MOST_SLOWER)


def prompt_steps(
    forecast: Forecast, model: StepTimeForm, ends: Sequence[float], passed: int
) -> PromptSteps:
    """Return the steps that compute prompts beside the decodes in time.

    Args:
        forecast: the state before the next step.
        model: predicts step times.
        ends: tokens until the ends of the running requests, in order, from an earlier step on.
        passed: steps since then.
    """
    kept, tokens = forecast.kept_decodes, max(2, int(forecast.step_ns / forecast.prompt_ns))
    step_ns, half_ns = (model.step_ns(kept.with_chunk(0, n)) for n in (tokens, tokens // 2))
    context = kept.decode_context_tokens
    more = StepShape.of(
        decodes=kept.num_decodes + SAMPLE_DECODES,
        decode_context_tokens=context + SAMPLE_DECODES * context // max(1, kept.num_decodes),
    )
    more_ns = model.step_ns(more.with_chunk(0, tokens)) - step_ns
    factor = forecast.step_ns / step_ns
    return PromptSteps(
        step_ns=forecast.step_ns,
        decodes_ns=max(0, 2 * half_ns - step_ns) * factor,
        decode_ns=max(0, more_ns) / SAMPLE_DECODES * factor,
        ends=ends,
        passed=passed,
    )


class _Walk:
    """Puts prompts into steps, one after the other. All times count from the first step.

    Args:
        steps: the steps.
    """

    __slots__ = (
        "begins_ns",
        "computed",
        "ends_ns",
        "fits_ns",
        "prompt_part",
        "steps",
        "used_ns",
    )

    def __init__(self, steps: PromptSteps) -> None:
        self.steps = steps
        self.prompt_part = 1 - steps.decodes_ns / steps.step_ns
        self.begins_ns = self.used_ns = 0.0
        """Begin of the last step, and the time of its prompts, as their share of full steps."""
        self.ends_ns = self.fits_ns = steps.step_ns
        """End of this step, and the time of prompts for which it has room."""
        self.computed = 0

    @property
    def now_ns(self) -> float:
        """Time at which the next prompt begins."""
        return self.begins_ns + self.used_ns

    def copy(self) -> _Walk:
        """Return a walk that goes on from here."""
        other = _Walk.__new__(_Walk)
        other.steps = self.steps
        other.prompt_part = self.prompt_part
        other.begins_ns, other.used_ns = self.begins_ns, self.used_ns
        other.ends_ns, other.fits_ns = self.ends_ns, self.fits_ns
        other.computed = self.computed
        return other

    def add(self, share_ns: float, left_ns: float) -> float:
        """Add a prompt, and return the earliest time at which it can end.

        Args:
            share_ns: its time in full steps.
            left_ns: time until it is due.
        """
        steps = self.steps
        used_ns = self.used_ns + share_ns * steps.slower(self.computed, self.now_ns)
        self.computed += 1
        if used_ns > self.fits_ns:
            full, used_ns = divmod(used_ns - self.fits_ns, steps.step_ns)
            self.begins_ns = self.ends_ns + full * steps.step_ns
            self.ends_ns = self.begins_ns + steps.step_ns
            self.fits_ns = steps.step_ns
        self.used_ns = used_ns
        end_ns = self.begins_ns + steps.decodes_ns + used_ns * self.prompt_part
        due_ns = self.begins_ns + SAFETY * (left_ns - self.begins_ns)
        if due_ns < self.ends_ns:
            self.ends_ns = max(end_ns, due_ns)
            if self.prompt_part > 0:
                room_ns = self.ends_ns - self.begins_ns - steps.decodes_ns
                self.fits_ns = min(self.fits_ns, room_ns / self.prompt_part)
        return end_ns


class WalkedPrompts:
    """Prompts that were put into steps.

    Several requests may arrive before a step. The prompts that precede the new ones are put into
    steps once.

    Args:
        steps: the steps.
        begins_ns: start of the first prompt.
    """

    __slots__ = ("_ends_ns", "_prompts", "_walks", "begins_ns", "steps")

    def __init__(self, steps: PromptSteps, begins_ns: int) -> None:
        self.steps = steps
        self.begins_ns = begins_ns
        self._prompts: list[Prompt] = []
        self._ends_ns: list[float] = []
        self._walks = [_Walk(steps)]

    def ends_ns(self, prompts: Sequence[Prompt]) -> list[float]:
        """Return the earliest end of each prompt, in the order in which they are computed."""
        same = 0
        for known, prompt in zip(self._prompts, prompts, strict=False):
            if known is not prompt:
                break
            same += 1
        del self._prompts[same:], self._ends_ns[same:], self._walks[same + 1 :]
        for prompt in prompts[same:]:
            walk = self._walks[-1].copy()
            self._ends_ns.append(walk.add(prompt.share_ns, prompt.due_ns - self.begins_ns))
            self._walks.append(walk)
            self._prompts.append(prompt)
        return self._ends_ns

    def walk(self, count: int) -> _Walk:
        """Return a walk that goes on after the first prompts of the last call."""
        return self._walks[count].copy()


def late_prompts(
    prompts: Sequence[Prompt],
    new: Prompt,
    *,
    walked: WalkedPrompts,
    margin_ns: float,
    share: float,
    is_next: bool = False,
    reorders: bool = False,
) -> list[ScheduledRequest] | None:
    """Return the less important requests that a new prompt would make late.

    Args:
        prompts: the prompts to compute, in order.
        new: the new prompt.
        walked: the steps that compute them, with prompts of earlier calls.
        margin_ns: time that must be left before the new prompt is due.
        share: share of the time until the new prompt's latest start that the prompts before it may
            take, above 0, at most 1. The rest is kept for requests that are worth more.
        is_next: True if the next step computes the new prompt in time.
        reorders: True if all prompts are in time without the new one, in another order.

    Returns:
        Those requests. None if the new prompt would be late, or would make a prompt late that is at
        least as important.
    """
    begins_ns, ends_ns = walked.begins_ns, walked.ends_ns(prompts)
    late: list[ScheduledRequest] = []

    def is_lost(prompt: Prompt) -> bool:
        """Note a prompt that would be late; return True if it must not be."""
        late.append(prompt.request)
        return prompt.request.priority >= new.request.priority

    place = bisect_left(prompts, new)
    if reorders:
        for prompt, end_ns in zip(prompts[:place], ends_ns, strict=False):
            if prompt.due_ns - begins_ns < end_ns and is_lost(prompt):
                return None
    walk = walked.walk(place)
    left_ns, ahead_ns = new.due_ns - begins_ns, walk.now_ns
    # The last of several short prompts takes at least a step.
    end_ns = max(walk.add(new.share_ns, left_ns), ahead_ns + new.work_ns)
    in_time = end_ns + margin_ns <= left_ns and ahead_ns <= share * (left_ns - new.work_ns)
    if not (is_next or in_time):
        return None
    for prompt, alone_ns in zip(prompts[place:], ends_ns[place:], strict=True):
        left_ns = prompt.due_ns - begins_ns
        if left_ns >= walk.add(prompt.share_ns, left_ns):
            continue
        # A prompt that would be late without the new one as well is no reason to refuse it.
        if (reorders or max(alone_ns, prompt.work_ns) <= left_ns) and is_lost(prompt):
            return None
    return late
