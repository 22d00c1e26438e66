"""FastServe: a skip-join multi-level feedback queue with proactive swapping."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from goodput_core.spec.choices import Policy, Preemption
from goodput_core.steptime import OnlineStepTime, StepShape
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.scheduler.policies.sarathi import SarathiPolicy
from goodput_engine.scheduler.policy import MIXED, Phase
from goodput_engine.scheduler.request_table import RequestState, ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from goodput_core.steptime import StepTimeForm
    from goodput_engine.scheduler.plan import StepOutcome

__all__ = ["FastServePolicy", "FeedbackQueue"]

_QUANTUM_NS: Final = 10 * NS_PER_MS
_LOWEST: Final = 15
"""The quantum of this level is more than five minutes: longer than requests run."""
_PROMOTE_NS: Final = 3 * NS_PER_S
_SWEEP_STEPS: Final = 1000
"""Number of steps after which the entries of requests cancelled while waiting are removed."""
_ENDED: Final = (RequestState.FINISHED, RequestState.CANCELLED)
_RESERVE_DIVISOR: Final = 10
"""A tenth of the pool bounds the reserve, and a tenth of host memory stays free for evictions."""


class FastServePolicy(SarathiPolicy):
    """`sarathi`, but requests that have run for a short time go first.

    So short requests finish first although output lengths are unknown. `FeedbackQueue` has the
    levels and moves requests between them. A waiting request that lacks a slot or blocks displaces
    running requests of lower levels. While host memory has room, evicted requests are swapped even
    if recomputation is cheaper: a request that is evicted after each quantum would otherwise be
    recomputed each time. Under `hybrid` the cheaper mode is used, and a request displaces others
    only if that costs less than the time for which it goes before them.

    Swapping is proactive. By swapping out the lowest levels, the policy keeps a reserve of free
    blocks: one for each request that may run, but at most a tenth of the pool. A swapped request
    resumes only if the reserve remains complete or a request of a lower level runs, which is then
    swapped out for the reserve. While less than a tenth of host memory is free, no
    new prompt starts, so that swapped requests resume first.

    In the paper, preempted requests stay on the device until their blocks are needed, and requests
    of the highest levels are copied back before they are scheduled. Here only running requests are
    on the device, and the copy back begins at admission.

    Args:
        model: predicts the prefill time of a prompt; None for a model that learns it.

    Source: Wu et al., "Fast Distributed Inference Serving for Large Language Models" (FastServe),
    NSDI 2026, sections 4.1 (skip-join MLFQ) and 4.2 (proactive swapping); parameters as in its
    published code.
    """

    name: ClassVar[Policy] = Policy.FASTSERVE
    preemption: ClassVar[Preemption | None] = Preemption.SWAP

    def __init__(self, *, model: StepTimeForm | None = None) -> None:
        self._learned = OnlineStepTime()
        self._model: StepTimeForm = self._learned if model is None else model
        self._queue = FeedbackQueue(
            lambda request: self._model.step_ns(StepShape.of(chunks=[(0, request.input_tokens)]))
        )

    def new_queue(self) -> FeedbackQueue:
        """Return the feedback queue."""
        return self._queue

    def preempt_ahead(self) -> Iterable[ScheduledRequest]:
        """Requests of the lowest levels if the reserve is incomplete; none of the highest level."""
        view = self.view
        host_free, _ = view.host_blocks
        missing = self._reserve_blocks() - view.free_blocks
        if not host_free or missing <= 0 or view.num_running < 2:
            return
        missing -= view.pending_blocks()
        running = sorted(view.running(), key=self.eviction_key)
        highest = self._queue.level(running[0]) if running else 0
        while missing > 0 and running and self._queue.level(running[-1]) > highest:
            victim = running.pop()
            missing -= len(victim.blocks)
            yield victim

    def phase(self) -> Phase:
        """Every kind of work; new prompts only while host memory has room for evictions."""
        view = self.view
        free, total = view.host_blocks
        self._queue.copies_only = free * _RESERVE_DIVISOR < total and view.num_running > 0
        return MIXED

    def may_admit(self, request: ScheduledRequest) -> bool:
        """False for a swapped request that would use blocks of the reserve and be evicted next."""
        view = self.view
        if not request.host_blocks or not view.num_running:
            return True
        needed = len(request.host_blocks) + 1
        if view.free_blocks - needed >= self._reserve_blocks():
            return True
        level = self._queue.level(request)
        return any(self._queue.level(running) > level for running in view.running())

    def headroom_blocks(self) -> int:
        """Zero: new requests may use the reserve."""
        return 0

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """The lowest level first; within a level, the newest request first."""
        return (self._queue.level(request), request.arrival_ns, request.rid)

    def displaced_by(self, request: ScheduledRequest) -> Iterable[ScheduledRequest]:
        """Requests of lower levels, the lowest and newest first."""
        level = self._queue.level(request)
        lower = [r for r in self.view.running() if self._queue.level(r) > level]
        return sorted(lower, key=self.eviction_key, reverse=True)

    def is_worth(
        self, request: ScheduledRequest, victims: Sequence[ScheduledRequest], cost_ns: float
    ) -> bool:
        """True if it costs less than the time for which the request goes before its victims.

        This is the time in which it moves down to the level of its victims: the sum of the quanta
        in between. For a request that moved up by waiting, the time since then is added, so the
        accepted cost grows while it waits.
        """
        highest = min(map(self._queue.level, victims))
        ahead_ns = (_QUANTUM_NS << highest) - (_QUANTUM_NS << self._queue.level(request))
        waited_ns = self._queue.waited_ns(request, self.view.now_ns)
        return cost_ns <= ahead_ns + max(0, waited_ns - _PROMOTE_NS)

    def prefill_order(self, prefilling: Iterable[ScheduledRequest]) -> Iterable[ScheduledRequest]:
        """The highest level first."""
        return sorted(prefilling, key=self.eviction_key)

    def precedes(self, waiting: ScheduledRequest, prefilling: ScheduledRequest) -> bool:
        """A higher level starts before a lower one continues."""
        return self._queue.level(waiting) < self._queue.level(prefilling)

    def after_step(self, outcome: StepOutcome) -> None:
        """Charge the time of the step to its requests, and learn the time of prompts."""
        self._queue.charge(outcome)
        if outcome.plan.chunks:
            self._learned.observe(outcome.plan.shape, outcome.result.step_ns)

    def can_fast_forward(self) -> bool:
        """False: the time of every step is charged to its requests."""
        return False

    def _reserve_blocks(self) -> int:
        """Return the number of blocks that swapping keeps free."""
        view = self.view
        return min(view.limits.max_num_seqs, view.total_blocks // _RESERVE_DIVISOR)


@dataclass(slots=True)
class _Entry:
    """A request, its level, and the used part of the level's quantum.

    Args:
        request: a request that waits or runs.
        level: its current level; 0 is the highest.
        waits_from_ns: time at which it last began to wait.
        used_ns: used part of the quantum, without the decoding steps since `joined_ns`.
        joined_ns: total time of decoding steps when it joined the decode batch; None if it is
            not a member.
        expires_ns: as a member: total time of decoding steps at which its quantum ends.
        key: its sort key in the queue; None if it does not wait.
        ran_ns: its running time when it last began to wait.
    """

    request: ScheduledRequest
    level: int
    waits_from_ns: int
    used_ns: int = 0
    joined_ns: int | None = None
    expires_ns: int = 0
    key: tuple[int, int, int] | None = None
    ran_ns: int = 0


class FeedbackQueue:
    """A multi-level feedback queue: levels of all requests, and the order of the waiting ones.

    Level p has a quantum of 10 ms × 2^p; level 0 is the highest. A request starts at the highest
    level whose quantum covers its expected prefill time. After it has run for more than the
    quantum, it moves down by one level. After it has waited for 3 s, it moves to level 0. Within a
    level the oldest request goes first.

    The time of a step is *charged* to a request when it counts as a part of the request's quantum.
    Members of the decode batch are not charged step by step. Instead, the times of all decoding
    steps are added up, and the increase since a member joined is charged to it.

    Args:
        prefill_ns: returns the expected prefill time of a request.

    Attributes:
        copies_only: True if only requests with a copy in host memory may start.
    """

    __slots__ = (
        "_below_top",
        "_clock_ns",
        "_entries",
        "_expiries",
        "_order",
        "_prefill_ns",
        "_steps",
        "copies_only",
    )

    def __init__(self, prefill_ns: Callable[[ScheduledRequest], int]) -> None:
        self._prefill_ns = prefill_ns
        self._entries: dict[int, _Entry] = {}
        self._order: list[tuple[int, int, int]] = []
        self._below_top: list[tuple[int, int]] = []
        """(time from which it waits, rid) of the waiting requests below level 0."""
        self._clock_ns = 0
        """Total time of decoding steps."""
        self._expiries: list[tuple[int, int]] = []
        """Heap of (end of the quantum, rid) of members of the decode batch."""
        self._steps = 0
        self.copies_only = False

    # --- the queue -------------------------------------------------------------------------
    def push(self, request: ScheduledRequest) -> None:
        """Add a new request at the level of its prompt."""
        self._file(self._new_entry(request))

    def requeue(self, request: ScheduledRequest) -> None:
        """Add a preempted request at its current level."""
        entry = self._entries.get(request.rid)
        if entry is None or entry.request is not request:  # transferred from another replica
            entry = self._new_entry(request)
        entry.waits_from_ns = request.admitted_ns + request.ran_ns - entry.ran_ns
        entry.ran_ns = request.ran_ns
        self._file(entry)

    def peek(self, now_ns: int) -> ScheduledRequest | None:
        """Move requests that waited too long to level 0, then return the first request."""
        while self._below_top and now_ns - self._below_top[0][0] >= _PROMOTE_NS:
            self._move(self._entries[self._below_top[0][1]], 0)
        for _, _, rid in self._order:
            request = self._entries[rid].request
            if request.host_blocks or not self.copies_only:
                return request
        return None

    def remove(self, request: ScheduledRequest) -> None:
        """Remove an admitted or cancelled request."""
        self._unfile(self._entries[request.rid])

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (self._entries[rid].request for _, _, rid in self._order)

    # --- levels ----------------------------------------------------------------------------
    def level(self, request: ScheduledRequest) -> int:
        """Return the level of a request; for an unknown one, the level at which it would start."""
        entry = self._entries.get(request.rid)
        if entry is not None:
            return entry.level
        needed, level = self._prefill_ns(request), 0
        while level < _LOWEST and _QUANTUM_NS << level < needed:
            level += 1
        return level

    def waited_ns(self, request: ScheduledRequest, now_ns: int) -> int:
        """Return the time since a waiting request last began to wait."""
        return now_ns - self._entries[request.rid].waits_from_ns

    def charge(self, outcome: StepOutcome) -> None:
        """Charge the time of a committed step to its requests."""
        plan, step_ns = outcome.plan, outcome.result.step_ns
        for rid in plan.left:
            entry = self._entries.get(rid)
            if entry is not None and entry.joined_ns is not None:
                entry.used_ns += self._clock_ns - entry.joined_ns
                entry.joined_ns = None
        for join in plan.joined:
            entry = self._entries.get(join.rid)
            if entry is not None:
                self._charge_from_now(entry)
        if plan.num_decodes:
            self._clock_ns += step_ns
        for chunk in plan.chunks:
            entry = self._entries.get(chunk.rid)
            if entry is not None:
                entry.used_ns += step_ns
                if entry.used_ns > _QUANTUM_NS << entry.level:
                    self._move(entry, entry.level + 1)
        while self._expiries and self._expiries[0][0] < self._clock_ns:
            expires_ns, rid = heapq.heappop(self._expiries)
            entry = self._entries.get(rid)
            if entry is not None and entry.joined_ns is not None and entry.expires_ns == expires_ns:
                self._move(entry, entry.level + 1)
                self._charge_from_now(entry)
        for rid in outcome.released:
            self._entries.pop(rid, None)
        self._steps += 1
        if self._steps % _SWEEP_STEPS == 0:  # outcomes omit requests cancelled while waiting
            self._entries = {
                r: entry for r, entry in self._entries.items() if entry.request.state not in _ENDED
            }

    def _new_entry(self, request: ScheduledRequest) -> _Entry:
        level = self.level(request)
        entry = _Entry(request=request, level=level, waits_from_ns=request.arrival_ns)
        self._entries[request.rid] = entry
        return entry

    def _charge_from_now(self, entry: _Entry) -> None:
        """Begin to charge decoding steps to a member."""
        entry.joined_ns = self._clock_ns
        entry.expires_ns = self._clock_ns + (_QUANTUM_NS << entry.level) - entry.used_ns
        heapq.heappush(self._expiries, (entry.expires_ns, entry.request.rid))

    def _move(self, entry: _Entry, level: int) -> None:
        waits = entry.key is not None
        if waits:
            self._unfile(entry)
        entry.level = min(level, _LOWEST)
        entry.used_ns = 0
        if waits:
            self._file(entry)

    def _file(self, entry: _Entry) -> None:
        request = entry.request
        entry.key = (entry.level, request.arrival_ns, request.rid)
        insort(self._order, entry.key)
        if entry.level:
            insort(self._below_top, (entry.waits_from_ns, request.rid))

    def _unfile(self, entry: _Entry) -> None:
        assert entry.key is not None
        del self._order[bisect_left(self._order, entry.key)]
        if entry.level:
            key = (entry.waits_from_ns, entry.request.rid)
            del self._below_top[bisect_left(self._below_top, key)]
        entry.key = None
