"""Who sits out so that urgent requests get their next tokens in time.

An urgent request's *slack* is the time by which its next token will be early. Under a first bound
those below it are paused, one level more with each step, from the lowest; above a second bound
they come back the same way. In between nothing changes, so that a request does not come and go
with every step. A request without a target for its token times has no slack to lose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_MS
from goodput_engine.scheduler.levels import Level
from goodput_engine.scheduler.request import RequestState

if TYPE_CHECKING:
    from goodput_engine.scheduler.plan import StepOutcome
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["Pausing"]

_LITTLE_NS: Final = 10 * NS_PER_MS
_ENOUGH_NS: Final = 20 * NS_PER_MS
_GONE: Final = (RequestState.FINISHED, RequestState.CANCELLED)
_DECODES: Final = (RequestState.DECODING, RequestState.READY)


class _Watched:
    """An urgent request with a target: its tokens so far, and when the last one came."""

    __slots__ = ("last_ns", "level", "request", "tokens")

    def __init__(self, request: ScheduledRequest, level: int, now_ns: int) -> None:
        self.request = request
        self.level = level
        self.tokens = request.output_tokens
        self.last_ns = now_ns

    def slack_ns(self, now_ns: int, step_ns: int) -> int:
        """By how much its next token will be early, if it comes with the next step."""
        request, targets = self.request, self.request.targets
        due: list[int] = []
        if targets.tbt_p99_ns is not None:
            due.append(self.last_ns + targets.tbt_p99_ns)
        if targets.tpot_ns is not None:
            due.append(request.first_token_ns + self.tokens * targets.tpot_ns)
        return min(due) - now_ns - step_ns


class Pausing:
    """The level below which requests sit out.

    Args:
        ageing_ns: a pause this long moves a level up by one, as waiting does.
    """

    __slots__ = ("_ageing_ns", "_bar", "_news", "_since", "_step_ns", "_watched")

    def __init__(self, ageing_ns: int) -> None:
        self._ageing_ns = ageing_ns
        self._watched: dict[int, _Watched] = {}
        self._bar = 0
        self._since: list[int] = []
        """When each level below the bar began to sit out."""
        self._step_ns = 0
        """Of the last step in which anybody decoded."""
        self._news = False

    def observe(self, outcome: StepOutcome, now_ns: int) -> None:
        """A step has committed."""
        for progress in outcome.progress:
            request = progress.request
            timed = request.targets.tpot_ns is not None or request.targets.tbt_p99_ns is not None
            level = Level.of(request)
            if timed and level >= Level.HIGH:
                self._watched.setdefault(request.rid, _Watched(request, level, now_ns))
        for watched in self._watched.values():
            if watched.tokens != watched.request.output_tokens:
                watched.tokens = watched.request.output_tokens
                watched.last_ns = now_ns
        if outcome.plan.num_decodes and self._watched:
            self._step_ns = outcome.result.step_ns
            self._news = True

    @property
    def idle(self) -> bool:
        """Whether there is nobody for whom others could have to sit out."""
        return not self._watched

    def bar(self, now_ns: int) -> int:
        """Those of a lower level sit out now; 0: nobody does."""
        gone = [rid for rid, w in self._watched.items() if w.request.state in _GONE]
        for rid in gone:
            del self._watched[rid]
        decoding = [w for w in self._watched.values() if w.request.state in _DECODES]
        # Nobody sits out for one who is not there any more.
        self._set(min(self._bar, max((w.level for w in decoding), default=0)), now_ns)
        if decoding and self._news:
            self._news = False
            slacks = [(w.slack_ns(now_ns, self._step_ns), w.level) for w in decoding]
            squeezed = max((level for slack, level in slacks if slack < _LITTLE_NS), default=0)
            if squeezed > self._bar:
                self._set(self._bar + 1, now_ns)
            elif self._bar and min(slacks)[0] >= _ENOUGH_NS:
                self._set(self._bar - 1, now_ns)
        return self._bar

    def goes_on(self, level: int, now_ns: int) -> bool:
        """Whether a request of this level takes part in the next step."""
        if level >= self._bar:
            return True
        return level + (now_ns - self._since[level]) // self._ageing_ns >= self._bar

    def _set(self, bar: int, now_ns: int) -> None:
        self._bar = bar
        del self._since[bar:]
        self._since += [now_ns] * (bar - len(self._since))
