"""Prepare requests in a thread ahead of their scheduled time.

The thread is at most a bounded schedule time and a bounded number of bytes ahead of the last
request taken. If it is too slow, the send lag increases.
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

__all__ = ["Lookahead"]

_AHEAD_NS: Final = 5 * NS_PER_S
_MAX_BYTES: Final = 256 << 20
# A full queue is refilled once 1/50 of it was taken. Waking the thread for every request would
# switch threads at every send.
_REFILL_SHARE: Final = 50


class Lookahead:
    """A queue that one thread fills and the event loop empties.

    Args:
        planned: requests in schedule order.
        render: prepares one request; runs in the thread.
        ahead_ns: maximum schedule time ahead of the last request taken.
        max_bytes: maximum size of all prepared bodies.
    """

    def __init__(
        self,
        planned: Iterable[PlannedRequest],
        render: Callable[[PlannedRequest], PreparedRequest],
        *,
        ahead_ns: int = _AHEAD_NS,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self._planned = planned
        self._render = render
        self._ahead_ns = ahead_ns
        self._max_bytes = max_bytes
        # Written by one side and read by the other: the thread appends, sets `_ended` last;
        # the loop pops. Each single operation is atomic, so no lock is held on the hot path.
        self._ready: deque[PreparedRequest] = deque()
        self._put_bytes = 0
        self._taken_bytes = 0
        self._taken_ns = 0
        self._ended = False
        self._closed = False
        self._starved = False
        self._refill_ns: float = math.inf
        self._refill_bytes: float = math.inf
        self._failure: BaseException | None = None
        self._space = threading.Event()
        self._prepared = asyncio.Event()
        self._filled = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="lookahead", daemon=True)

    async def fill(self) -> None:
        """Start the thread, and return once the queue is full."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self._filled.wait()

    async def take(self) -> PreparedRequest | None:
        """Return the next request; None after the last one.

        Raises:
            GoodputError: a row could not be read or rendered; all earlier requests were taken.
        """
        while True:
            ended = self._ended  # read before the queue, as the thread sets it after the last row
            if self._ready:
                request = self._ready.popleft()
                self._taken_bytes += len(request.body)
                self._taken_ns = request.planned.scheduled_ns
                if not self._ready or self._needs_refill():
                    self._space.set()
                return request
            if ended:
                if self._failure is not None:
                    raise self._failure
                return None
            self._prepared.clear()
            self._starved = True
            if not self._ready and not self._ended:
                await self._prepared.wait()
            self._starved = False

    def close(self) -> None:
        """Stop the thread after the row it is preparing."""
        self._closed = True
        self._space.set()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        try:
            for planned in self._planned:
                if not self._wait_for_space(planned.scheduled_ns):
                    return
                request = self._render(planned)
                self._put_bytes += len(request.body)
                self._ready.append(request)
                if self._starved:
                    self._set(self._prepared)
        except BaseException as error:  # noqa: BLE001 - raised again where rows are taken
            self._failure = error
        finally:
            self._ended = True
            self._set(self._prepared)
            self._set(self._filled)

    def _wait_for_space(self, scheduled_ns: int) -> bool:
        """Wait until a request at `scheduled_ns` fits; False if closed."""
        while not self._closed:
            self._space.clear()
            early_ns = scheduled_ns - self._taken_ns - self._ahead_ns
            heavy = self._put_bytes - self._taken_bytes - self._max_bytes
            if not self._ready or (early_ns <= 0 and heavy < 0):
                self._refill_ns = self._refill_bytes = math.inf
                return True
            if early_ns > 0:
                self._refill_ns = scheduled_ns - self._ahead_ns + self._ahead_ns // _REFILL_SHARE
            if heavy >= 0:
                share = self._max_bytes // _REFILL_SHARE
                self._refill_bytes = self._put_bytes - self._max_bytes + share
            self._set(self._filled)
            # A change since the event was cleared is either visible here or sets the event again.
            if self._ready and not self._needs_refill() and not self._closed:
                self._space.wait()
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
