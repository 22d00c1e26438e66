"""Sending: in an open loop at the times of the trace, or in a closed loop of clients.

In an open loop, each request is sent at its scheduled time, independent of responses, and the
number of requests in flight is not limited. HTTP, files and the display are handled by the
callables that a sender receives.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.sending.body import PreparedRequest
    from goodput_replay.sending.lookahead import Lookahead
    from goodput_replay.sending.pacer import Pacer

__all__ = ["ClosedLoopSender", "OpenLoopSender"]


class OpenLoopSender:
    """Sends a plan and waits for every response.

    Args:
        send: sends a request and returns its record; its arguments are the request and the run's
            time zero, as passed to `run`.
        pacer: clock and timer.
        on_record: called in the event loop with each request and its record; an exception ends
            the run and is raised by `run`.
    """

    def __init__(
        self,
        send: Callable[[PreparedRequest, int], Coroutine[None, None, RequestRecord]],
        pacer: Pacer,
        on_record: Callable[[PreparedRequest, RequestRecord], None],
    ) -> None:
        self._send = send
        self._pacer = pacer
        self._on_record = on_record
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None
        self.sent = 0
        self.in_flight = 0
        """Number of requests that were sent and have not ended."""
        self.peak_in_flight = 0

    async def run(self, lookahead: Lookahead, zero_ns: int) -> None:
        """Send each request at `zero_ns` plus its scheduled time, and wait for the last response.

        Cancellation stops sending and cancels the requests in flight, which are still passed to
        `on_record`.

        Args:
            lookahead: prepared requests, in order.
            zero_ns: time zero of the run, on the pacer's clock.
        """
        self._failed = asyncio.get_running_loop().create_future()
        sending = asyncio.ensure_future(self._send_all(lookahead, zero_ns))
        try:
            await asyncio.wait({sending, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            sending.result()
        finally:
            sending.cancel()
            self._failed.cancel()
            for task in self._tasks:
                task.cancel()
            while self._tasks:
                await asyncio.wait(self._tasks)

    async def _send_all(self, lookahead: Lookahead, zero_ns: int) -> None:
        loop = asyncio.get_running_loop()
        while (request := await lookahead.take()) is not None:
            request = await self._wait_to_send(request, zero_ns)
            self.sent += 1
            self.in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
            work = self._send_one(request, zero_ns)
            if sys.version_info >= (3, 12):
                # An eager task sends its bytes without waiting for another loop iteration.
                task = asyncio.Task(work, loop=loop, eager_start=True)
            else:
                task = loop.create_task(work)
            if not task.done():
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _wait_to_send(self, request: PreparedRequest, zero_ns: int) -> PreparedRequest:
        """Wait until the request is due, and return it."""
        await self._pacer.wait_until(zero_ns + request.planned.scheduled_ns)
        return request

    async def _send_one(self, request: PreparedRequest, zero_ns: int) -> None:
        try:
            record = await self._send(request, zero_ns)
            self._on_record(request, record)
        except Exception as error:  # noqa: BLE001 - raised again in `run`
            if self._failed is not None and not self._failed.done():
                self._failed.set_exception(error)
        finally:
            self.in_flight -= 1


class ClosedLoopSender(OpenLoopSender):
    """Sends a plan with a fixed number of clients, each of which waits for its response.

    The times of the trace are not used. A request is scheduled at the time at which a client is
    free to send it.

    Args:
        send: see `OpenLoopSender`.
        pacer: clock.
        on_record: see `OpenLoopSender`.
        clients: maximum number of requests in flight, at least 1.

    Attributes:
        first_judged_ns: time of the first request that is not a warm-up request, since the run's
            time zero; None before that request.
    """

    def __init__(
        self,
        send: Callable[[PreparedRequest, int], Coroutine[None, None, RequestRecord]],
        pacer: Pacer,
        on_record: Callable[[PreparedRequest, RequestRecord], None],
        *,
        clients: int,
    ) -> None:
        super().__init__(send, pacer, on_record)
        self._free = asyncio.Semaphore(clients)
        self.first_judged_ns: int | None = None

    async def _wait_to_send(self, request: PreparedRequest, zero_ns: int) -> PreparedRequest:
        await self._pacer.wait_until(zero_ns)
        await self._free.acquire()
        scheduled_ns = self._pacer.now_ns() - zero_ns
        if not request.planned.warmup and self.first_judged_ns is None:
            self.first_judged_ns = scheduled_ns
        return replace(request, planned=replace(request.planned, scheduled_ns=scheduled_ns))

    async def _send_one(self, request: PreparedRequest, zero_ns: int) -> None:
        try:
            await super()._send_one(request, zero_ns)
        finally:
            self._free.release()
