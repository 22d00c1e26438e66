"""The work queue: keys that need a reconciliation, and the workers that reconcile them.

A key is reconciled by one worker at a time. Any number of requests during a reconciliation lead to
a single further one. The queue itself has neither tasks nor a clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from goodput_operator.backoff import BackOff
    from goodput_operator.kube.fence import ClockSource

__all__ = ["DEFAULT_GAP_NS", "Result", "WorkQueue", "Workers"]

_log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
DEFAULT_GAP_NS: Final = 200 * NS_PER_MS
"""Default minimum time from the end of one reconciliation of a key to the start of the next."""


@dataclass(slots=True)
class _KeyState:
    """State of one key.

    Attributes:
        due_ns: requested time of the next reconciliation; None if none is requested.
        not_before_ns: earliest time of the next reconciliation.
        failures: consecutive failed reconciliations.
        started_ns: start of the current reconciliation; None if none runs.
        ticket: number of the key's current heap item; items with another number are stale.
    """

    due_ns: int | None = None
    not_before_ns: int = 0
    failures: int = 0
    started_ns: int | None = None
    ticket: int = 0


class WorkQueue(Generic[K]):
    """Keys in the order of their due times.

    Args:
        back_off: delays after failed reconciliations of a key.
        gap_ns: minimum time from the end of a reconciliation of a key to the start of the next, so
            that a burst of events leads to one reconciliation.
    """

    def __init__(self, back_off: BackOff, *, gap_ns: int = DEFAULT_GAP_NS) -> None:
        self._back_off = back_off
        self._gap_ns = gap_ns
        self._entries: dict[K, _KeyState] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._tickets = 0

    def add(self, key: K, at_ns: int) -> None:
        """Request a reconciliation of a key; the earliest requested time counts.

        A key that is being reconciled is reconciled again, since its snapshot may be out of date.
        """
        entry = self._entries.setdefault(key, _KeyState())
        if entry.due_ns is None or at_ns < entry.due_ns:
            entry.due_ns = at_ns
            self._push(key, entry)

    def take(self, now_ns: int) -> K | None:
        """Pop the next due key and mark it as running; None if no key is due."""
        next_ns = self.next_ns()
        if next_ns is None or next_ns > now_ns:
            return None
        _, _, key = heappop(self._heap)
        entry = self._entries[key]
        entry.due_ns = None
        entry.started_ns = now_ns
        return key

    def finish(self, key: K, now_ns: int, *, failed: bool, again_at_ns: int | None = None) -> None:
        """Mark a running key as finished.

        Args:
            key: a key that `take` returned.
            now_ns: the current time.
            failed: True to reconcile again after a delay that doubles with each consecutive
                failure; requests do not shorten the delay.
            again_at_ns: latest time of the next reconciliation; None to wait for a request.
        """
        entry = self._entries[key]
        assert entry.started_ns is not None, "only a running key finishes"
        entry.started_ns = None
        entry.failures = entry.failures + 1 if failed else 0
        if failed:
            delay_ns = self._back_off.delay_ns(key, entry.failures)
            entry.not_before_ns = now_ns + delay_ns
            self.add(key, entry.not_before_ns)
        else:
            entry.not_before_ns = now_ns + self._gap_ns
        if again_at_ns is not None:
            self.add(key, again_at_ns)
        if entry.due_ns is not None:
            self._push(key, entry)

    def forget(self, key: K) -> None:
        """Drop the state of a key that is neither requested nor running."""
        entry = self._entries.get(key)
        if entry is not None and entry.due_ns is None and entry.started_ns is None:
            del self._entries[key]

    def next_ns(self) -> int | None:
        """Return the time at which the next key is due; None if no key is requested."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def waiting(self) -> int:
        """Return the number of requested keys."""
        return sum(entry.due_ns is not None for entry in self._entries.values())

    def overdue_ns(self, now_ns: int) -> int:
        """Return how long the next key has been due."""
        next_ns = self.next_ns()
        return 0 if next_ns is None else max(0, now_ns - next_ns)

    def oldest_running_ns(self, now_ns: int) -> int:
        """Return how long the oldest reconciliation in progress has been running."""
        starts = [e.started_ns for e in self._entries.values() if e.started_ns is not None]
        return now_ns - min(starts) if starts else 0

    def _push(self, key: K, entry: _KeyState) -> None:
        assert entry.due_ns is not None, "only a requested key is queued"
        if entry.started_ns is None:
            # Keys that are due at the same time stay in the order of their requests.
            self._tickets += 1
            entry.ticket = self._tickets
            start_ns = max(entry.due_ns, entry.not_before_ns)
            heappush(self._heap, (start_ns, self._tickets, key))

    def _drop_stale(self) -> None:
        """Drop heap items that a newer one has replaced, or whose key is no longer requested."""
        while self._heap:
            _, ticket, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.ticket == ticket and entry.due_ns is not None:
                return
            heappop(self._heap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a reconciliation.

    Args:
        failed: True to reconcile again after a back-off delay.
        again_at_ns: latest time of the next reconciliation; None to wait for a request.
        deleted: True if the key no longer exists.
    """

    failed: bool = False
    again_at_ns: int | None = None
    deleted: bool = False


class Workers(Generic[K]):
    """A bounded number of tasks that reconcile the keys of one queue.

    Args:
        queue: the queue, which only these workers change.
        reconcile: reconciles a key; an exception is logged and counts as a failure.
        clock: source of monotonic time.
        count: number of concurrent reconciliations.
    """

    def __init__(
        self,
        *,
        queue: WorkQueue[K],
        reconcile: Callable[[K], Awaitable[Result]],
        clock: ClockSource,
        count: int,
    ) -> None:
        self._queue = queue
        self._reconcile = reconcile
        self._clock = clock
        self._count = count
        self._changed = asyncio.Event()
        self.finished_ns: int | None = None
        """End of the last reconciliation."""

    def add(self, key: K) -> None:
        """Request a reconciliation now."""
        self._queue.add(key, self._clock.now_ns())
        self._changed.set()

    @property
    def queue(self) -> WorkQueue[K]:
        """The queue, for reading only."""
        return self._queue

    async def run(self) -> None:
        """Work until cancelled, which also cancels running reconciliations."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._count):
                tasks.create_task(self._work(), name=f"worker {number}")

    async def _work(self) -> None:
        while True:
            key = await self._next()
            result = Result(failed=True)
            try:
                result = await self._reconcile(key)
            except Exception:  # noqa: BLE001 - one service's failure must not end the others
                _log.exception("reconciliation failed", extra={"key": str(key)})
            now_ns = self._clock.now_ns()
            self._queue.finish(key, now_ns, failed=result.failed, again_at_ns=result.again_at_ns)
            if result.deleted:
                self._queue.forget(key)
            self.finished_ns = now_ns
            self._changed.set()

    async def _next(self) -> K:
        while True:
            # Cleared before the queue is read, so that a later request is not missed.
            self._changed.clear()
            now_ns = self._clock.now_ns()
            key = self._queue.take(now_ns)
            if key is not None:
                # Wake another worker: another key may be due.
                self._changed.set()
                return key
            next_ns = self._queue.next_ns()
            wait_s = None if next_ns is None else max(0, next_ns - now_ns) / NS_PER_S
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
