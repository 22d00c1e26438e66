"""Levels of a multi-level feedback queue: who is at which, and how long it has run there.

Level p has a quantum of 10 ms × 2^p. A request joins at the first level whose quantum its prompt
is expected to need; where it has run for longer than the quantum it goes down by one; where it
has waited for 3 s it goes to the top. So short requests pass long ones although nobody knows how
long an answer will be.

A member of the cohort is not charged step by step: what all steps that decoded took is summed up,
and a member's share is the difference since it joined (see `cohort`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.scheduler.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from goodput_engine.scheduler.plan import StepOutcome
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["FeedbackQueue"]

_QUANTUM_NS: Final = 10 * NS_PER_MS
_LOWEST: Final = 15
"""Its quantum is more than five minutes: longer than answers take."""
_IDLE_NS: Final = 3 * NS_PER_S
_SWEEP_STEPS: Final = 1000
_GONE: Final = (RequestState.FINISHED, RequestState.CANCELLED)


class _Job:
    """A request, its level, and its account there."""

    __slots__ = (
        "expires_ns",
        "joined_ns",
        "key",
        "level",
        "ran_ns",
        "request",
        "since_ns",
        "used_ns",
    )

    def __init__(self, request: ScheduledRequest, level: int) -> None:
        self.request = request
        self.level = level
        self.used_ns = 0
        """Of the level's quantum, but for what a member has decoded since `joined_ns`."""
        self.joined_ns: int | None = None
        """What decoding steps had taken when it joined the cohort; None: not a member."""
        self.expires_ns = 0
        """What decoding steps will have taken when a member's quantum is over."""
        self.key: tuple[int, int, int] | None = None
        """Its place in the queue; None: it does not wait."""
        self.since_ns = request.arrival_ns
        """Since when it has waited."""
        self.ran_ns = 0
        """How long it had run when it last began to wait."""


class FeedbackQueue:
    """Who waits, by level and arrival; and the level of everybody.

    Args:
        prefill_ns: how long a prompt is expected to take.

    Attributes:
        copies_only: only who has a copy in host memory has a turn.
    """

    __slots__ = (
        "_clock_ns",
        "_expiries",
        "_idle",
        "_jobs",
        "_order",
        "_prefill_ns",
        "_steps",
        "copies_only",
    )

    def __init__(self, prefill_ns: Callable[[ScheduledRequest], int]) -> None:
        self._prefill_ns = prefill_ns
        self._jobs: dict[int, _Job] = {}
        self._order: list[tuple[int, int, int]] = []
        self._idle: list[tuple[int, int]] = []
        """Those below the top that wait, by the time at which they began to."""
        self._clock_ns = 0
        """What all steps that decoded took."""
        self._expiries: list[tuple[int, int]] = []
        self._steps = 0
        self.copies_only = False

    # --- the queue -------------------------------------------------------------------------
    def push(self, request: ScheduledRequest) -> None:
        """A new request joins at the level of its prompt."""
        job = self._jobs[request.rid] = _Job(request, self.level(request))
        self._file(job)

    def push_back(self, request: ScheduledRequest) -> None:
        """A preempted request waits at the level that it has come to."""
        job = self._jobs.get(request.rid)
        if job is None or job.request is not request:  # it was taken over from another replica
            job = self._jobs[request.rid] = _Job(request, self.level(request))
        job.since_ns = request.admitted_ns + request.ran_ns - job.ran_ns
        job.ran_ns = request.ran_ns
        self._file(job)

    def peek(self, now_ns: int) -> ScheduledRequest | None:
        """The oldest of the highest level, after lifting those that have waited too long."""
        while self._idle and now_ns - self._idle[0][0] >= _IDLE_NS:
            self._move(self._jobs[self._idle[0][1]], 0)
        for _, _, rid in self._order:
            request = self._jobs[rid].request
            if request.host_blocks or not self.copies_only:
                return request
        return None

    def remove(self, request: ScheduledRequest) -> None:
        """Admitted or cancelled: it waits no more."""
        self._unfile(self._jobs[request.rid])

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (self._jobs[rid].request for _, _, rid in self._order)

    # --- levels ----------------------------------------------------------------------------
    def level(self, request: ScheduledRequest) -> int:
        """The level of a request, 0 the highest; of a new one, where it would join."""
        job = self._jobs.get(request.rid)
        if job is not None:
            return job.level
        needed, level = self._prefill_ns(request), 0
        while level < _LOWEST and _QUANTUM_NS << level < needed:
            level += 1
        return level

    def charge(self, outcome: StepOutcome) -> None:
        """A step has committed: who took part has run for its time."""
        plan, step_ns = outcome.plan, outcome.result.step_ns
        for rid in plan.left:
            job = self._jobs.get(rid)
            if job is not None and job.joined_ns is not None:
                job.used_ns += self._clock_ns - job.joined_ns
                job.joined_ns = None
        for join in plan.joined:
            job = self._jobs.get(join.rid)
            if job is not None:
                self._begin(job)
        if plan.num_decodes:
            self._clock_ns += step_ns
        for chunk in plan.chunks:
            job = self._jobs.get(chunk.rid)
            if job is not None:
                job.used_ns += step_ns
                if job.used_ns > _QUANTUM_NS << job.level:
                    self._move(job, job.level + 1)
        while self._expiries and self._expiries[0][0] < self._clock_ns:
            expires_ns, rid = heapq.heappop(self._expiries)
            job = self._jobs.get(rid)
            if job is not None and job.joined_ns is not None and job.expires_ns == expires_ns:
                self._move(job, job.level + 1)
                self._begin(job)
        for rid in outcome.released:
            self._jobs.pop(rid, None)
        self._steps += 1
        if self._steps % _SWEEP_STEPS == 0:  # of those cancelled while they waited nobody tells
            self._jobs = {r: job for r, job in self._jobs.items() if job.request.state not in _GONE}

    def _begin(self, job: _Job) -> None:
        """A member's time at its level counts from now on."""
        job.joined_ns = self._clock_ns
        job.expires_ns = self._clock_ns + (_QUANTUM_NS << job.level) - job.used_ns
        heapq.heappush(self._expiries, (job.expires_ns, job.request.rid))

    def _move(self, job: _Job, level: int) -> None:
        waits = job.key is not None
        if waits:
            self._unfile(job)
        job.level = min(level, _LOWEST)
        job.used_ns = 0
        if waits:
            self._file(job)

    def _file(self, job: _Job) -> None:
        request = job.request
        job.key = (job.level, request.arrival_ns, request.rid)
        insort(self._order, job.key)
        if job.level:
            insort(self._idle, (job.since_ns, request.rid))

    def _unfile(self, job: _Job) -> None:
        assert job.key is not None
        del self._order[bisect_left(self._order, job.key)]
        if job.level:
            del self._idle[bisect_left(self._idle, (job.since_ns, job.request.rid))]
        job.key = None
