"""The open loop: each request leaves at its own instant, whatever the answers do.

Nothing here waits for an answer before sending: there is no limit on what is in flight, and the
instants are the plan's alone. It does not know HTTP, files or displays; it calls what it is
given and keeps count.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.sending.body import PreparedRequest
    from goodput_replay.sending.lookahead import Lookahead
    from goodput_replay.sending.pacer import Pacer

__all__ = ["OpenLoopSender"]


class OpenLoopSender:
    """Sends a plan and follows every answer.

    Args:
        exchange: sends one request at once and returns its record; told the run's zero.
        pacer: the clock, and the wait for an instant of it.
        on_record: called in the loop with each request and its record; what it raises ends
            the run and comes out of `run`.
    """

    def __init__(
        self,
        exchange: Callable[[PreparedRequest, int], Coroutine[None, None, RequestRecord]],
        pacer: Pacer,
        on_record: Callable[[PreparedRequest, RequestRecord], None],
    ) -> None:
        self._exchange = exchange
        self._pacer = pacer
        self._on_record = on_record
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None
        self.sent = 0
        self.peak_in_flight = 0

    @property
    def in_flight(self) -> int:
        """Requests that were started and have not ended."""
        return len(self._tasks)

    async def run(self, lookahead: Lookahead, zero_ns: int) -> None:
        """Send everything at `zero_ns` plus its schedule, and wait for the last answer.

        Cancelling this stops sending and cancels what is in flight; those requests are still
        handed to `on_record`.

        Args:
            lookahead: the prepared requests, in order.
            zero_ns: the run's zero on the pacer's clock.
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
            await self._pacer.wait_until(zero_ns + request.planned.scheduled_ns)
            work = self._follow(request, zero_ns)
            if sys.version_info >= (3, 12):
                # Runs up to its first wait at once: the bytes leave without another turn.
                task = asyncio.Task(work, loop=loop, eager_start=True)
            else:
                task = loop.create_task(work)
            self.sent += 1
            if not task.done():
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            self.peak_in_flight = max(self.peak_in_flight, len(self._tasks))
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _follow(self, request: PreparedRequest, zero_ns: int) -> None:
        try:
            record = await self._exchange(request, zero_ns)
            self._on_record(request, record)
        except Exception as error:  # noqa: BLE001 - raised again in `run`
            if self._failed is not None and not self._failed.done():
                self._failed.set_exception(error)
