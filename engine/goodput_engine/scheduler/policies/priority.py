"""Four levels of priority with ageing, and pauses that keep urgent requests on time."""

from __future__ import annotations

from bisect import bisect_left, insort
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, Final, Self

from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.scheduler.policy import MIXED, Phase, SchedulingPolicy
from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from goodput_engine.scheduler.plan import StepOutcome
    from goodput_engine.scheduler.policy import PolicySettings
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["PriorityPolicy"]

_AGEING_NS: Final = 30 * NS_PER_S
_LITTLE_SLACK_NS: Final = 10 * NS_PER_MS
_ENOUGH_SLACK_NS: Final = 20 * NS_PER_MS
_ENDED: Final = (RequestState.FINISHED, RequestState.CANCELLED)
_DECODES: Final = (RequestState.DECODING, RequestState.READY)


class PriorityPolicy(SchedulingPolicy):
    """The highest level goes first in all decisions; steps are sized as by `sarathi`.

    Levels are realtime, high, normal and low. A request that waits for `ageing_ns` rises by one
    level. A waiting request displaces running ones of lower levels, the lowest and newest first,
    if it lacks a place or blocks, but never one of its own level. If blocks run out, the lowest
    and newest request is evicted. Prompts of higher levels continue, and start, before those of
    lower ones.

    While a realtime or high request with a TPOT or TBT target has too little slack, lower levels
    are paused: they keep their blocks and are not scheduled. An urgent decode then lacks time,
    not memory. Eviction would not make a step shorter, and resuming would cost a copy or a
    recomputation for a pause of a few steps. If blocks run out as well, paused requests are
    evicted first.

    Args:
        ageing_ns: waiting time worth one level; None for half a minute.

    Source: the four levels, and ageing as in multi-level schedulers since Corbató et al., "An
    Experimental Time-Sharing System", AFIPS 1962; displacing for a place as well as for blocks:
    the request of vLLM issue 40004.
    """

    name: ClassVar[Policy] = Policy.PRIORITY
    uses_prefill_budget: ClassVar[bool] = True

    def __init__(self, *, ageing_ns: int | None = None) -> None:
        self._ageing = Ageing(_AGEING_NS if ageing_ns is None else ageing_ns)
        self._pauses = Pauses(self._ageing.ageing_ns)

    @classmethod
    def configured(cls, settings: PolicySettings) -> Self:
        """Build the policy with the ageing time of a manifest."""
        return cls(ageing_ns=settings.ageing_ns)

    # --- order -------------------------------------------------------------------------------
    def new_queue(self) -> AgeingQueue:
        """Order by level, then by age."""
        return AgeingQueue(self._ageing)

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """The lowest level first, the newest of it first."""
        return (-self._ageing.running(request), self._ageing.top_ns(request), request.rid)

    def prefill_order(self, prefilling: Iterable[ScheduledRequest]) -> Iterable[ScheduledRequest]:
        """The highest level first, the oldest admission of it first."""
        return sorted(prefilling, key=self._ageing.running, reverse=True)

    def precedes(self, waiting: ScheduledRequest, prefilling: ScheduledRequest) -> bool:
        """A higher level starts before a lower one continues."""
        level = self._ageing.waiting(waiting, self.view.now_ns)
        return level > self._ageing.running(prefilling)

    def displaced_by(self, request: ScheduledRequest) -> Iterable[ScheduledRequest]:
        """Requests of lower levels, the lowest and newest first."""
        level = self._ageing.waiting(request, self.view.now_ns)
        lower = [r for r in self.view.running() if self._ageing.running(r) < level]
        return sorted(lower, key=self.eviction_key, reverse=True)

    # --- admit -------------------------------------------------------------------------------
    def may_admit(self, request: ScheduledRequest) -> bool:
        """Not while requests of its level are paused."""
        now_ns = self.view.now_ns
        return self._ageing.waiting(request, now_ns) >= self._pauses.threshold(now_ns)

    def reserved_tokens(self, request: ScheduledRequest) -> int:
        """The whole prompt, and after a preemption the answer so far."""
        return request.total_tokens

    def headroom_blocks(self) -> int:
        """One block in a hundred, so that decodes can grow."""
        return self.view.total_blocks // 100

    # --- size --------------------------------------------------------------------------------
    def phase(self) -> Phase:
        """Every kind of work, without the paused requests."""
        if not self._pauses.threshold(self.view.now_ns):
            return MIXED
        return Phase(only=self._is_scheduled)

    def _is_scheduled(self, request: ScheduledRequest) -> bool:
        return self._pauses.schedules(self._ageing.running(request), self.view.now_ns)

    def chunk_tokens(self, request: ScheduledRequest, remaining: int, budget_left: int) -> int:  # noqa: ARG002
        """The rest of the prompt within the budget."""
        return min(remaining, budget_left)

    # --- after a step ------------------------------------------------------------------------
    def after_step(self, outcome: StepOutcome) -> None:
        """Measure the slack of urgent requests."""
        self._pauses.observe(outcome, self.view.now_ns)

    def can_fast_forward(self) -> bool:
        """Unless time may raise a waiting request, or an urgent answer may become late."""
        return not len(self.view.waiting) and self._pauses.idle


class PriorityLevel(IntEnum):
    """Levels of priority, the least urgent first."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    REALTIME = 3

    @classmethod
    def of(cls, request: ScheduledRequest) -> PriorityLevel:
        """Return a request's own level: realtime from priority 2 on, high 1, normal 0, else low."""
        return cls(min(cls.REALTIME, max(cls.LOW, request.priority + cls.NORMAL)))


class Ageing:
    """The rise of a request through the levels while it waits.

    A request that has waited for `ageing_ns` counts as one level more urgent, up to the top. It
    keeps the gained levels while it runs and when it is preempted; running gains none. Within a
    level the oldest goes first, so no request starves: after at most three times `ageing_ns` of
    waiting, only requests that reached the top earlier precede it.

    The order needs no re-sorting: of two requests, the one that reaches the top first (`top_ns`)
    is at every moment at the higher level, or first within the same one.

    Args:
        ageing_ns: waiting time worth one level, at least 1.
    """

    __slots__ = ("ageing_ns",)

    def __init__(self, ageing_ns: int) -> None:
        self.ageing_ns = ageing_ns

    def waiting(self, request: ScheduledRequest, now_ns: int) -> int:
        """Return the level of a waiting request."""
        waited_ns = now_ns - request.arrival_ns - request.ran_ns
        return min(
            PriorityLevel.REALTIME, PriorityLevel.of(request) + max(0, waited_ns) // self.ageing_ns
        )

    def running(self, request: ScheduledRequest) -> int:
        """Return the level of a running request: its level at admission."""
        return self.waiting(request, request.admitted_ns)

    def top_ns(self, request: ScheduledRequest) -> int:
        """Return when a waiting request reaches, or reached, the top level."""
        to_go = PriorityLevel.REALTIME - PriorityLevel.of(request)
        return request.arrival_ns + request.ran_ns + to_go * self.ageing_ns


class AgeingQueue:
    """The waiting requests by level and age.

    Args:
        ageing: the levels.
    """

    __slots__ = ("_ageing", "_order", "_waiting")

    def __init__(self, ageing: Ageing) -> None:
        self._ageing = ageing
        self._order: list[tuple[int, int]] = []
        self._waiting: dict[int, ScheduledRequest] = {}

    def push(self, request: ScheduledRequest) -> None:
        """Add a request, a preempted one with the waiting time that it has gained."""
        self._waiting[request.rid] = request
        insort(self._order, self._key(request))

    push_back = push

    def peek(self, now_ns: int) -> ScheduledRequest | None:  # noqa: ARG002 - time keeps the order
        """Return the most urgent request."""
        return self._waiting[self._order[0][1]] if self._order else None

    def remove(self, request: ScheduledRequest) -> None:
        """Remove an admitted or cancelled request."""
        del self._waiting[request.rid]
        del self._order[bisect_left(self._order, self._key(request))]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (self._waiting[rid] for _, rid in self._order)

    def _key(self, request: ScheduledRequest) -> tuple[int, int]:
        return self._ageing.top_ns(request), request.rid


class _UrgentRequest:
    """An urgent request with a target: its tokens so far, and the time of the last one."""

    __slots__ = ("last_ns", "level", "request", "tokens")

    def __init__(self, request: ScheduledRequest, level: int, now_ns: int) -> None:
        self.request = request
        self.level = level
        self.tokens = request.output_tokens
        self.last_ns = now_ns

    def slack_ns(self, now_ns: int, step_ns: int) -> int:
        """Return how early its next token will be if the next step computes it."""
        request, targets = self.request, self.request.targets
        due: list[int] = []
        if targets.tbt_p99_ns is not None:
            due.append(self.last_ns + targets.tbt_p99_ns)
        if targets.tpot_ns is not None:
            due.append(request.first_token_ns + self.tokens * targets.tpot_ns)
        return min(due) - now_ns - step_ns


class Pauses:
    """The threshold level below which requests are paused.

    The *slack* of an urgent request is the time by which its next token will be early. If it is
    under a first bound, lower levels are paused, one more level with each step, from the lowest;
    if it is above a second bound they are resumed the same way. In between nothing changes, so
    that a request is not paused and resumed with every step. A request without a target for its
    token times has no slack to lose.

    Args:
        ageing_ns: a pause of this length raises a level by one, as waiting does.
    """

    __slots__ = ("_ageing_ns", "_observed", "_since", "_step_ns", "_threshold", "_urgent")

    def __init__(self, ageing_ns: int) -> None:
        self._ageing_ns = ageing_ns
        self._urgent: dict[int, _UrgentRequest] = {}
        self._threshold = 0
        self._since: list[int] = []
        """Start of the pause of each level below the threshold."""
        self._step_ns = 0
        """Device time of the last step that decoded."""
        self._observed = False
        """True if a step was observed since the threshold was last changed."""

    def observe(self, outcome: StepOutcome, now_ns: int) -> None:
        """Update the urgent requests after a committed step."""
        for progress in outcome.progress:
            request = progress.request
            timed = request.targets.tpot_ns is not None or request.targets.tbt_p99_ns is not None
            level = PriorityLevel.of(request)
            if timed and level >= PriorityLevel.HIGH:
                self._urgent.setdefault(request.rid, _UrgentRequest(request, level, now_ns))
        for urgent in self._urgent.values():
            if urgent.tokens != urgent.request.output_tokens:
                urgent.tokens = urgent.request.output_tokens
                urgent.last_ns = now_ns
        if outcome.plan.num_decodes and self._urgent:
            self._step_ns = outcome.result.step_ns
            self._observed = True

    @property
    def idle(self) -> bool:
        """True if there is no urgent request."""
        return not self._urgent

    def threshold(self, now_ns: int) -> int:
        """Return the level below which requests are paused now; 0 for no pause."""
        ended = [rid for rid, u in self._urgent.items() if u.request.state in _ENDED]
        for rid in ended:
            del self._urgent[rid]
        decoding = [u for u in self._urgent.values() if u.request.state in _DECODES]
        # A pause ends with the requests it was for.
        self._set(min(self._threshold, max((u.level for u in decoding), default=0)), now_ns)
        if decoding and self._observed:
            self._observed = False
            slacks = [(u.slack_ns(now_ns, self._step_ns), u.level) for u in decoding]
            late = max((level for slack, level in slacks if slack < _LITTLE_SLACK_NS), default=0)
            if late > self._threshold:
                self._set(self._threshold + 1, now_ns)
            elif self._threshold and min(slacks)[0] >= _ENOUGH_SLACK_NS:
                self._set(self._threshold - 1, now_ns)
        return self._threshold

    def schedules(self, level: int, now_ns: int) -> bool:
        """Return True if requests of this level are not paused."""
        if level >= self._threshold:
            return True
        return level + (now_ns - self._since[level]) // self._ageing_ns >= self._threshold

    def _set(self, threshold: int, now_ns: int) -> None:
        self._threshold = threshold
        del self._since[threshold:]
        self._since += [now_ns] * (threshold - len(self._since))
