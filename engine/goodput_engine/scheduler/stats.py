"""What a scheduler counts, and how soon a refused client may try again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from goodput_engine.scheduler.plan import StepPlan

__all__ = ["AdmissionRate", "SchedulerStats"]

_REMEMBERED: Final = 64
_MAX_RETRY_S: Final = 60
_PROMPT_WEIGHT: Final = 0.1


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the start.

    Args:
        steps: steps committed.
        step_ns: their summed device time.
        scheduled_tokens: tokens they computed.
        output_tokens: tokens that requests gained.
        preemptions: evictions.
        recomputed_tokens: computed tokens of evicted requests that are computed again.
        swapped_tokens: computed tokens of evicted requests that were copied to host memory.
        prefix_queried_tokens: tokens of admitted requests that the cache was asked for.
        prefix_hit_tokens: of these, how many it had.
        shed: requests refused at the door because there was too much to do.
        last_step_ns: of the last step that computed; before any, ten milliseconds.
        ns_per_prompt_token: recent time per token of steps that computed prompts for the most
            part; 0 before any.
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
    last_step_ns: int = 10 * NS_PER_MS
    ns_per_prompt_token: float = 0.0

    def count(self, plan: StepPlan, step_ns: int, output_tokens: int) -> None:
        """A step that computed has committed."""
        tokens = plan.shape.num_tokens
        self.steps += 1
        self.step_ns += step_ns
        self.scheduled_tokens += tokens
        self.output_tokens += output_tokens
        self.last_step_ns = step_ns
        if tokens > 2 * plan.num_decodes:
            old, new = self.ns_per_prompt_token, step_ns / tokens
            self.ns_per_prompt_token = old + (new - old) * _PROMPT_WEIGHT if old else new

    def count_decodes(self, *, steps: int, step_ns: int, tokens: int, last_step_ns: int) -> None:
        """Steps that only decoded have committed: `count` for all of them."""
        self.steps += steps
        self.step_ns += step_ns
        self.scheduled_tokens += tokens
        self.output_tokens += tokens
        self.last_step_ns = last_step_ns


class AdmissionRate:
    """How fast the queue has been moving of late."""

    __slots__ = ("_admitted",)

    def __init__(self) -> None:
        self._admitted: deque[int] = deque(maxlen=_REMEMBERED)

    def admitted(self, now_ns: int) -> None:
        """A request left the queue to run."""
        self._admitted.append(now_ns)

    def retry_after_s(self, waiting: int, now_ns: int) -> int:
        """Whole seconds, 1 to 60, in which a queue of this length should have moved on.

        The queue's length over the rate of the last admissions, measured up to now: a queue that
        has stopped moving asks for ever more patience.
        """
        if not self._admitted:
            return 1
        elapsed_ns = max(1, now_ns - self._admitted[0])
        seconds = -(-waiting * elapsed_ns // (len(self._admitted) * NS_PER_S))
        return min(max(1, seconds), _MAX_RETRY_S)
