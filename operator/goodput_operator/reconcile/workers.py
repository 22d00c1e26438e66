"""Gives each service its turn: a bounded number of workers over one schedule.

The tasks are supervised: a worker that ends, ends the operator. What a turn does comes as a
function.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from goodput_operator.kube.fence import Clock
    from goodput_operator.reconcile.work_queue import Schedule

__all__ = ["Turn", "Workers"]

_log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """How a turn ended.

    Args:
        failed: have another one after the schedule's back-off.
        again_at_ns: have another one then at the latest; None: when something happens.
        gone: there is no such key any more.
    """

    failed: bool = False
    again_at_ns: int | None = None
    gone: bool = False


class Workers(Generic[K]):
    """A queue of keys, and those who work it off.

    Args:
        schedule: whose turn it is; nobody else changes it.
        turn: what a turn does. An exception is logged and counts as a failure.
        clock: monotonic time.
        count: turns at once at most.
    """

    def __init__(
        self,
        *,
        schedule: Schedule[K],
        turn: Callable[[K], Awaitable[Turn]],
        clock: Clock,
        count: int,
    ) -> None:
        self._schedule = schedule
        self._turn = turn
        self._clock = clock
        self._count = count
        self._changed = asyncio.Event()
        self.finished_ns: int | None = None
        """When the last turn ended."""

    def add(self, key: K) -> None:
        """Ask for a turn now."""
        self._schedule.add(key, self._clock.now_ns())
        self._changed.set()

    @property
    def schedule(self) -> Schedule[K]:
        """To be looked at only."""
        return self._schedule

    async def run(self) -> None:
        """Work until cancelled; turns that run then are cancelled too."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._count):
                tasks.create_task(self._work(), name=f"worker {number}")

    async def _work(self) -> None:
        while True:
            key = await self._next()
            ended = Turn(failed=True)
            try:
                ended = await self._turn(key)
            except Exception:  # noqa: BLE001 - one service's bad turn must not end the others'
                _log.exception("turn failed", extra={"key": str(key)})
            now_ns = self._clock.now_ns()
            self._schedule.finish(key, now_ns, failed=ended.failed, again_at_ns=ended.again_at_ns)
            if ended.gone:
                self._schedule.forget(key)
            self.finished_ns = now_ns
            self._changed.set()

    async def _next(self) -> K:
        while True:
            # Whoever clears it looks at the schedule before it waits: no wish goes unseen.
            self._changed.clear()
            now_ns = self._clock.now_ns()
            key = self._schedule.take(now_ns)
            if key is not None:
                # Another may be due as well, for another worker.
                self._changed.set()
                return key
            next_ns = self._schedule.next_ns()
            wait_s = None if next_ns is None else max(0, next_ns - now_ns) / NS_PER_S
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
