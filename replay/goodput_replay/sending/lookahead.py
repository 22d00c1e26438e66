"""Prepare requests in a thread ahead of their scheduled time.

The thread runs ahead of the last request taken by a limited span of the schedule and a limited
number of bytes. If the thread is too slow, the send lag increases.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from goodput_replay.plan import PlannedRequest
    from goodput_replay.sending.body import PreparedRequest

__all__ = ["AHEAD_NS", "MAX_BYTES", "Lookahead"]

AHEAD_NS: Final = 5 * NS_PER_S
"""Default time by which requests are prepared ahead."""
MAX_BYTES: Final = 256 << 20
"""Default total size of bodies that are prepared ahead."""
# A full queue is refilled once 1/50 of it has been taken. If the thread woke for every request,
# every send would switch threads.
_REFILL_SHARE: Final = 50


class Lookahead:
    """A queue that one thread fills and the event loop empties.

    Args:
        planned: requests in the order of their scheduled times.
        render: prepares one request; runs in the thread.
        ahead_ns: maximum time between the scheduled times of the last request taken and of the last
            request prepared.
        max_bytes: maximum total size of bodies that are prepared and not yet taken.
    """

    def __init__(
        self,
        planned: Iterable[PlannedRequest],
        render: Callable[[PlannedRequest], PreparedRequest],
        *,
        ahead_ns: int = AHEAD_NS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._planned = planned
        self._render = render
        self._ahead_ns = ahead_ns
        self._max_bytes = max_bytes
        # The thread appends to the queue and sets `_ended` after the last row; the event loop pops.
        # Each of these operations is atomic, so the hot path needs no lock.
        self._queue: deque[PreparedRequest] = deque()
        self._put_bytes = 0
        self._taken_bytes = 0
        self._taken_ns = 0
        self._ended = False
        self._closed = False
        self._starved = False
        self._refill_ns: float = math.inf
        self._refill_bytes: float = math.inf
        self._failure: BaseException | None = None
        self._not_full = threading.Event()
        self._not_empty = asyncio.Event()
        self._full = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="lookahead", daemon=True)

    async def fill(self) -> None:
        """Start the thread, and return once the queue is full."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self._full.wait()

    async def take(self) -> PreparedRequest | None:
        """Return the next request; None after the last one.

        Raises:
            GoodputError: a row could not be read or rendered; raised after all earlier requests
                were taken.
        """
        while True:
            ended = self._ended  # read before the queue, as the thread sets it after the last row
            if self._queue:
                request = self._queue.popleft()
                self._taken_bytes += len(request.body)
                self._taken_ns = request.planned.scheduled_ns
                if not self._queue or self._needs_refill():
                    self._not_full.set()
                return request
            if ended:
                if self._failure is not None:
                    raise self._failure
                return None
            self._not_empty.clear()
            self._starved = True
            if not self._queue and not self._ended:
                await self._not_empty.wait()
            self._starved = False

    def close(self) -> None:
        """Stop the thread after the row it is preparing."""
        self._closed = True
        self._not_full.set()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        try:
            for planned in self._planned:
                if not self._wait_for_space(planned.scheduled_ns):
                    return
                request = self._render(planned)
                self._put_bytes += len(request.body)
                self._queue.append(request)
                if self._starved:
                    self._set(self._not_empty)
        except BaseException as error:  # noqa: BLE001 - raised again in `take`
            self._failure = error
        finally:
            self._ended = True
            self._set(self._not_empty)
            self._set(self._full)

    def _wait_for_space(self, scheduled_ns: int) -> bool:
        """Wait until a request at `scheduled_ns` fits into the limits; False if closed."""
        while not self._closed:
            self._not_full.clear()
            excess_ns = scheduled_ns - self._taken_ns - self._ahead_ns
            excess_bytes = self._put_bytes - self._taken_bytes - self._max_bytes
            if not self._queue or (excess_ns <= 0 and excess_bytes < 0):
                self._refill_ns = self._refill_bytes = math.inf
                return True
            if excess_ns > 0:
                self._refill_ns = scheduled_ns - self._ahead_ns + self._ahead_ns // _REFILL_SHARE
            if excess_bytes >= 0:
                share = self._max_bytes // _REFILL_SHARE
                self._refill_bytes = self._put_bytes - self._max_bytes + share
            self._set(self._full)
            # If something changed after the event was cleared, either this check sees the change or
            # the change has set the event again.
            if self._queue and not self._needs_refill() and not self._closed:
                self._not_full.wait()
        return False

    def _needs_refill(self) -> bool:
        """True if enough was taken for the thread to continue."""
        return self._taken_ns >= self._refill_ns or self._taken_bytes >= self._refill_bytes

    def _set(self, event: asyncio.Event) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(event.set)
        except RuntimeError:  # the loop is closed
            self._closed = True
