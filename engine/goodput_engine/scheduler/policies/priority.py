"""Four levels of priority with ageing, and pauses of lower levels for late urgent requests."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, Final, Self

from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.scheduler.policies.sarathi import SarathiPolicy
from goodput_engine.scheduler.policy import MIXED, Phase
from goodput_engine.scheduler.request_table import RequestState, ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from goodput_engine.scheduler.plan import StepOutcome
    from goodput_engine.scheduler.policy import PolicySettings

__all__ = ["PriorityPolicy"]

_AGEING_NS: Final = 30 * NS_PER_S
_LITTLE_SLACK_NS: Final = 10 * NS_PER_MS
_ENOUGH_SLACK_NS: Final = 20 * NS_PER_MS
_ENDED: Final = (RequestState.FINISHED, RequestState.CANCELLED)
_DECODES: Final = (RequestState.DECODING, RequestState.READY)


class PriorityPolicy(SarathiPolicy):
    """`sarathi`, but the highest level goes first in every decision.

    Levels are realtime, high, normal and low. Waiting for `ageing_ns` raises a request by a level.
    Prompts of higher levels start and continue before those of lower levels. A waiting request that
    lacks a slot or blocks displaces running requests of lower levels, the lowest and newest first.
    It never displaces a request of its own level, nor one that had the same level before ageing: a
    longer wait is no reason to discard the work of an equal request. If blocks run out, the newest
    request of the lowest level is evicted; ageing does not count for that.

    If a realtime or high request with a TPOT or TBT target has too little slack, lower levels are
    paused: their requests keep their blocks and are not scheduled. They are not evicted, because
    an urgent decode that is late lacks time, not memory. Eviction would not make a step shorter,
    and resuming would cost a copy or a recomputation after a pause of a few steps. If blocks also
    run out, paused requests are evicted first.

    Args:
        ageing_ns: waiting time that raises a request by one level; None for 30 s.

    Source: levels and ageing as in multi-level schedulers since Corbató et al., "An Experimental
    Time-Sharing System", AFIPS 1962; displacement for a slot, and not only for blocks: vLLM issue
    40004.
    """

    name: ClassVar[Policy] = Policy.PRIORITY

    def __init__(self, *, ageing_ns: int | None = None) -> None:
        self._ageing = Ageing(_AGEING_NS if ageing_ns is None else ageing_ns)
        self._pauses = Pauses(self._ageing.ageing_ns)

    @classmethod
    def configured(cls, settings: PolicySettings) -> Self:
        """Build the policy with the ageing time of a manifest."""
        return cls(ageing_ns=settings.ageing_ns)

    # --- order -------------------------------------------------------------------------------
    def new_queue(self) -> AgeingQueue:
        """Return a queue that is ordered by level, then by age."""
        return AgeingQueue(self._ageing)

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """The lowest level without ageing first; within a level, the newest request first."""
        return (-PriorityLevel.of(request), self._ageing.top_ns(request), request.rid)

    def prefill_order(self, prefilling: Iterable[ScheduledRequest]) -> Iterable[ScheduledRequest]:
        """The highest level first; within a level, the oldest admission first."""
        return sorted(prefilling, key=self._ageing.running_level, reverse=True)

    def precedes(self, waiting: ScheduledRequest, prefilling: ScheduledRequest) -> bool:
        """A higher level starts before a lower one continues."""
        level = self._ageing.waiting_level(waiting, self.view.now_ns)
        return level > self._ageing.running_level(prefilling)

    def displaced_by(self, request: ScheduledRequest) -> Iterable[ScheduledRequest]:
        """Requests of lower levels, the lowest and newest first."""
        own = PriorityLevel.of(request)
        level = self._ageing.waiting_level(request, self.view.now_ns)
        lower = [
            r
            for r in self.view.running()
            if PriorityLevel.of(r) is not own and self._ageing.running_level(r) < level
        ]
        return sorted(lower, key=self.eviction_key, reverse=True)

    # --- admit -------------------------------------------------------------------------------
    def priority_level(self, request: ScheduledRequest, now_ns: int) -> tuple[int, int | None]:
        """The level with ageing, so that a request that has aged is not rejected for a new one."""
        level = self._ageing.waiting_level(request, now_ns)
        return level - PriorityLevel.NORMAL, self._ageing.rises_ns(request, level)

    def may_admit(self, request: ScheduledRequest) -> bool:
        """False while requests of its level are paused."""
        now_ns = self.view.now_ns
        level = self._ageing.waiting_level(request, now_ns)
        return level >= self._pauses.update_threshold(now_ns)

    # --- size --------------------------------------------------------------------------------
    def phase(self) -> Phase:
        """Every kind of work, without the paused requests."""
        if not self._pauses.update_threshold(self.view.now_ns):
            return MIXED
        return Phase(only=self._is_scheduled)

    def _is_scheduled(self, request: ScheduledRequest) -> bool:
        return self._pauses.schedules(self._ageing.running_level(request), self.view.now_ns)

    # --- after a step ------------------------------------------------------------------------
    def after_step(self, outcome: StepOutcome) -> None:
        """Measure the slack of urgent requests."""
        self._pauses.observe(outcome, self.view.now_ns)

    def can_fast_forward(self) -> bool:
        """True if no request waits (its level could rise) and none is urgent (it could be late)."""
        return not len(self.view.waiting) and self._pauses.idle


class PriorityLevel(IntEnum):
    """Levels of priority, the least urgent first."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    REALTIME = 3

    @classmethod
    def of(cls, request: ScheduledRequest) -> PriorityLevel:
        """Return a request's own level, without ageing.

        Priority 2 or more is realtime, 1 is high, 0 is normal, and a negative one is low.
        """
        return cls(min(cls.REALTIME, max(cls.LOW, request.priority + cls.NORMAL)))


class Ageing:
    """Levels that requests gain by waiting.

    A request rises by one level, up to the top, for each `ageing_ns` that it has waited. It keeps
    the gained levels while it runs and when it is preempted. Within a level the oldest request
    goes first, so no request starves: after at most three times `ageing_ns` of waiting, only
    requests that reached the top earlier precede it.

    Time never changes the order of two waiting requests: the one that reaches the top first
    (`top_ns`) is always at the higher level, or first within the same level.

    Args:
        ageing_ns: waiting time that raises a request by one level, at least 1.
    """

    __slots__ = ("ageing_ns",)

    def __init__(self, ageing_ns: int) -> None:
        self.ageing_ns = ageing_ns

    def waiting_level(self, request: ScheduledRequest, now_ns: int) -> int:
        """Return the level of a waiting request."""
        waited_ns = now_ns - request.arrival_ns - request.ran_ns
        return min(
            PriorityLevel.REALTIME, PriorityLevel.of(request) + max(0, waited_ns) // self.ageing_ns
        )

    def running_level(self, request: ScheduledRequest) -> int:
        """Return the level of a running request: its level at admission."""
        return self.waiting_level(request, request.admitted_ns)

    def rises_ns(self, request: ScheduledRequest, level: int) -> int | None:
        """Return the time at which a waiting request rises above a level; None at the top."""
        if level >= PriorityLevel.REALTIME:
            return None
        gained = level + 1 - PriorityLevel.of(request)
        return request.arrival_ns + request.ran_ns + gained * self.ageing_ns

    def top_ns(self, request: ScheduledRequest) -> int:
        """Return the time at which a waiting request reaches, or reached, the top level."""
        levels = PriorityLevel.REALTIME - PriorityLevel.of(request)
        return request.arrival_ns + request.ran_ns + levels * self.ageing_ns


class AgeingQueue:
    """The waiting requests, ordered by level and age.

    Args:
        ageing: gives the levels of requests.
    """

    __slots__ = ("_ageing", "_order", "_waiting")

    def __init__(self, ageing: Ageing) -> None:
        self._ageing = ageing
        self._order: list[tuple[int, int]] = []
        self._waiting: dict[int, ScheduledRequest] = {}

    def push(self, request: ScheduledRequest) -> None:
        """Add a new or preempted request."""
        self._waiting[request.rid] = request
        insort(self._order, self._key(request))

    requeue = push

    def peek(self, now_ns: int) -> ScheduledRequest | None:  # noqa: ARG002 - time does not change the order
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


@dataclass(slots=True)
class _UrgentRequest:
    """A high or realtime request with a target for its token times.

    Args:
        request: the scheduled request.
        level: its own level, without ageing.
        tokens: number of its output tokens.
        last_ns: time of its last output token.
    """

    request: ScheduledRequest
    level: int
    tokens: int
    last_ns: int

    def slack_ns(self, now_ns: int, step_ns: int) -> int:
        """Return the time from the end of the next step to the deadline of the next token."""
        request, targets = self.request, self.request.targets
        due: list[int] = []
        if targets.tbt_p99_ns is not None:
            due.append(self.last_ns + targets.tbt_p99_ns)
        if targets.tpot_ns is not None:
            due.append(request.first_token_ns + self.tokens * targets.tpot_ns)
        return min(due) - now_ns - step_ns


class Pauses:
    """The level below which requests are paused.

    The *slack* of an urgent request is the time by which its next token will be early. While an
    urgent request has less than 10 ms of slack, each step pauses one more of the levels below it,
    the lowest first. When all urgent requests have at least 20 ms of slack, each step resumes one
    level. Between these two values nothing changes; otherwise requests would be paused and resumed
    in alternate steps.
    Requests without a TPOT or TBT target cause no pauses.

    Args:
        ageing_ns: duration of a pause after which a level counts as one level higher, as if its
            requests had waited.
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
        """True if a step was observed that has not yet affected the threshold."""

    def observe(self, outcome: StepOutcome, now_ns: int) -> None:
        """Update the urgent requests after a committed step."""
        for progress in outcome.progress:
            request = progress.request
            timed = request.targets.tpot_ns is not None or request.targets.tbt_p99_ns is not None
            level = PriorityLevel.of(request)
            if timed and level >= PriorityLevel.HIGH and request.rid not in self._urgent:
                self._urgent[request.rid] = _UrgentRequest(
                    request, level, request.output_tokens, now_ns
                )
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

    def update_threshold(self, now_ns: int) -> int:
        """Update and return the level below which requests are paused; 0 for no pause."""
        ended = [rid for rid, u in self._urgent.items() if u.request.state in _ENDED]
        for rid in ended:
            del self._urgent[rid]
        decoding = [u for u in self._urgent.values() if u.request.state in _DECODES]
        # A pause ends with the urgent requests that caused it.
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
        """True if requests of this level are not paused."""
        if level >= self._threshold:
            return True
        return level + (now_ns - self._since[level]) // self._ageing_ns >= self._threshold

    def _set(self, threshold: int, now_ns: int) -> None:
        self._threshold = threshold
        del self._since[threshold:]
        self._since += [now_ns] * (threshold - len(self._since))
