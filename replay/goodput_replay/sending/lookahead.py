"""Requests prepared ahead of their instant, in a thread, so that nothing heavy runs at a send.

The thread stays a bounded time and a bounded number of bytes ahead of what was last taken.
Distance is measured on the schedule itself, so no clock is needed. It starves only when it
cannot keep up, and then the send lag says so.
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
# A full queue is refilled once this share of it is gone: waking the thread for every single
# request would pass the interpreter back and forth at every send.
_REFILL_SHARE: Final = 50


class Lookahead:
    """A queue that one thread fills and the event loop empties.

    Args:
        planned: requests in the order of their schedule.
        render: makes one ready; runs in the thread.
        ahead_ns: how far the schedule is prepared ahead of what was last taken.
        max_bytes: how many bytes of bodies may wait.
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
        self._hungry = False
        self._refill_ns: float = math.inf
        self._refill_bytes: float = math.inf
        self._failure: BaseException | None = None
        self._room = threading.Event()
        self._arrived = asyncio.Event()
        self._filled = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="lookahead", daemon=True)

    async def fill(self) -> None:
        """Start, and return once as much is prepared as may be."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self._filled.wait()

    async def take(self) -> PreparedRequest | None:
        """The next request; None after the last one.

        Raises:
            GoodputError: a row that could not be read or rendered, after all before it.
        """
        while True:
            ended = self._ended  # before looking at the queue: the last row comes before it
            if self._ready:
                request = self._ready.popleft()
                self._taken_bytes += len(request.body)
                self._taken_ns = request.planned.scheduled_ns
                if not self._ready or self._due():
                    self._room.set()
                return request
            if ended:
                if self._failure is not None:
                    raise self._failure
                return None
            self._arrived.clear()
            self._hungry = True
            if not self._ready and not self._ended:
                await self._arrived.wait()
            self._hungry = False

    def close(self) -> None:
        """End the thread; it may be in the middle of a row."""
        self._closed = True
        self._room.set()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        try:
            for planned in self._planned:
                if not self._wait_for_room(planned.scheduled_ns):
                    return
                request = self._render(planned)
                self._put_bytes += len(request.body)
                self._ready.append(request)
                if self._hungry:
                    self._tell(self._arrived)
        except BaseException as error:  # noqa: BLE001 - raised again where rows are taken
            self._failure = error
        finally:
            self._ended = True
            self._tell(self._arrived)
            self._tell(self._filled)

    def _wait_for_room(self, scheduled_ns: int) -> bool:
        """Wait until this instant may be prepared; False when closed."""
        while not self._closed:
            self._room.clear()
            early_ns = scheduled_ns - self._taken_ns - self._ahead_ns
            heavy = self._put_bytes - self._taken_bytes - self._max_bytes
            if not self._ready or (early_ns <= 0 and heavy < 0):
                self._refill_ns = self._refill_bytes = math.inf
                return True
            if early_ns > 0:
                self._refill_ns = scheduled_ns - self._ahead_ns + self._ahead_ns // _REFILL_SHARE
            if heavy >= 0:
                room = self._max_bytes // _REFILL_SHARE
                self._refill_bytes = self._put_bytes - self._max_bytes + room
            self._tell(self._filled)
            # Whatever the loop did since the event was cleared is seen here, or sets it again.
            if self._ready and not self._due() and not self._closed:
                self._room.wait()
        return False

    def _due(self) -> bool:
        """Whether enough was taken for the thread to go on."""
        return self._taken_ns >= self._refill_ns or self._taken_bytes >= self._refill_bytes

    def _tell(self, event: asyncio.Event) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(event.set)
        except RuntimeError:  # the loop has closed: nobody waits any more
            self._closed = True
