"""Prepare the follow-ups of sessions, whose scheduled times depend on responses.

Requests that start at their times in the trace are prepared as for independent arrivals. A
follow-up is scheduled when its predecessor ends. A second thread reads it from disk and renders its
body before it is due: while the predecessor is in flight if the think time is short, else shortly
before the scheduled time.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from goodput_replay.sending.lookahead import AHEAD_NS, MAX_BYTES, Lookahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from goodput_replay.plan import PlannedRequest
    from goodput_replay.sending.body import PreparedRequest
    from goodput_replay.sending.pacer import Pacer
    from goodput_replay.sessions import FollowUps

__all__ = ["SessionLookahead"]


class _PendingRequest:
    """A follow-up whose predecessor was sent.

    Attributes:
        due_ns: scheduled time since the run's time zero; None while the predecessor is in flight.
        preparing: True once the thread has been asked to prepare it.
        request: the prepared request; None until it is prepared.
    """

    __slots__ = ("due_ns", "preparing", "request")

    def __init__(self) -> None:
        self.due_ns: int | None = None
        self.preparing = False
        self.request: PreparedRequest | None = None


class SessionLookahead(Lookahead):
    """A queue of starts and follow-ups, emptied by the event loop at their scheduled times.

    A follow-up is prepared while its predecessor is in flight if the think time is at most
    `ahead_ns` and the prepared follow-ups have less than `max_bytes`, else `ahead_ns` before it is
    due.

    Args:
        starts: requests to send at their times in the trace, in order.
        follow_ups: follow-ups of the plan; those that follow `starts` are sent.
        render: prepares one request; runs in two threads.
        pacer: clock and timer.
        ahead_ns: see above; also for `starts`, see `Lookahead`.
        max_bytes: see above; also for `starts`.
    """

    def __init__(
        self,
        starts: Iterable[PlannedRequest],
        follow_ups: FollowUps,
        render: Callable[[PlannedRequest], PreparedRequest],
        pacer: Pacer,
        *,
        ahead_ns: int = AHEAD_NS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(starts, render, ahead_ns=ahead_ns, max_bytes=max_bytes)
        self._follow_ups = follow_ups
        self._pacer = pacer
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="follow-ups")
        self._zero_ns = 0
        self._start: PreparedRequest | None = None
        # Follow-ups whose predecessor was sent, and which are not sent, by position in the plan.
        self._following: dict[int, _PendingRequest] = {}
        # Times at which follow-ups are due, or are to be prepared, and their positions in the plan.
        self._events: list[tuple[int, int]] = []
        self._changed = asyncio.Event()
        self._prepared_bytes = 0
        self._follow_up_failure: BaseException | None = None

    async def fill(self) -> None:
        """Start the thread, and return once the queue of starts is full."""
        await super().fill()
        self._start = await super().take()

    def begin(self, zero_ns: int) -> None:
        """Set time zero of the run, on the pacer's clock, before the first `take`."""
        self._zero_ns = zero_ns

    async def take(self) -> PreparedRequest | None:
        """Wait until the next request is due, and return it; None after the last one.

        Raises:
            GoodputError: a row could not be read or rendered.
        """
        while True:
            if self._follow_up_failure is not None:
                raise self._follow_up_failure
            start, events = self._start, self._events
            at_ns = None if start is None else start.planned.scheduled_ns
            is_follow_up = bool(events) and (at_ns is None or events[0][0] < at_ns)
            if is_follow_up:
                at_ns = events[0][0]
            if at_ns is None:
                if not self._following:
                    return None
                self._changed.clear()
                await self._changed.wait()
            elif self._zero_ns + at_ns > self._pacer.now_ns():
                await self._pacer.wait_until(self._zero_ns + at_ns)
            elif not is_follow_up:
                assert start is not None
                self._start = await super().take()
                self._expect_follow_ups(start.planned)
                return start
            elif (pending := self._take_follow_up(heappop(events)[1])) is not None:
                return pending

    def ended(self, planned: PlannedRequest, end_ns: int) -> None:
        """Schedule the follow-ups that follow a request.

        Args:
            planned: the request.
            end_ns: its end, nanoseconds since the run's time zero.
        """
        for number, think_ns in self._follow_ups.after(planned.number):
            pending = self._following[number]
            pending.due_ns = end_ns + think_ns
            if pending.request is not None:
                self._wake_at(pending.due_ns, number)
            elif not pending.preparing:
                self._wake_at(pending.due_ns - self._ahead_ns, number)

    def close(self) -> None:
        """Stop both threads after the requests that they are preparing."""
        self._worker.shutdown(cancel_futures=True)
        super().close()

    def _take_follow_up(self, number: int) -> PreparedRequest | None:
        """Return a follow-up that is due; if it is not prepared, start to prepare it."""
        pending = self._following[number]
        if pending.request is None or pending.due_ns is None:
            self._prepare(number)
            return None
        del self._following[number]
        self._prepared_bytes -= len(pending.request.body)
        self._expect_follow_ups(pending.request.planned)
        planned = replace(pending.request.planned, scheduled_ns=pending.due_ns)
        return replace(pending.request, planned=planned)

    def _expect_follow_ups(self, planned: PlannedRequest) -> None:
        """Note the follow-ups that follow a request, which is sent now."""
        for number, think_ns in self._follow_ups.after(planned.number):
            self._following[number] = _PendingRequest()
            if think_ns <= self._ahead_ns and self._prepared_bytes < self._max_bytes:
                self._prepare(number)

    def _prepare(self, number: int) -> None:
        """Prepare a follow-up in the thread."""
        pending = self._following[number]
        pending.preparing = True

        def prepared(done: asyncio.Future[PreparedRequest]) -> None:
            if done.cancelled():
                return
            if (failure := done.exception()) is not None:
                self._follow_up_failure = failure
                self._wake()
                return
            pending.request = done.result()
            self._prepared_bytes += len(pending.request.body)
            if pending.due_ns is not None:
                self._wake_at(pending.due_ns, number)

        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._worker, self._load, number).add_done_callback(prepared)

    def _load(self, number: int) -> PreparedRequest:
        return self._render(self._follow_ups.load(number))

    def _wake_at(self, at_ns: int, number: int) -> None:
        """Add an event; `take` looks again if it is the first one."""
        heappush(self._events, (at_ns, number))
        if self._events[0] == (at_ns, number):
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._pacer.interrupt()
