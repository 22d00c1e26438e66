"""Starts the engine core and restarts it after its death, until it dies too often.

The restarted core gets the configuration and the limits that are in force, so changes by the
operator survive. Requests of the dead core are lost: their KV blocks were in its memory. The HTTP
process, its ports and connections continue.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec import structs

from goodput_core.errors import GoodputError, InternalError
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.core_client import CoreClient
from goodput_engine.server.state import ServerPhase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from goodput_engine.messages import Ready
    from goodput_engine.server.followers import Followers
    from goodput_engine.server.metrics import EngineMetrics
    from goodput_engine.server.state import ServerState

__all__ = ["CoreSupervisor", "RestartPolicy"]

_log = logging.getLogger(__name__)

# A restarted core may take this many times as long as the first one before it is killed.
_SLOW_STARTS: Final = 5
_MIN_START_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Number and delays of the restarts of the engine core.

    Args:
        restarts: maximum number of restarts within `within_ns`.
        within_ns: time after which a death no longer counts.
        first_delay_ns: delay of the first restart; each further one doubles it.
        max_delay_ns: maximum delay.
    """

    restarts: int = 5
    within_ns: int = 600 * NS_PER_S
    first_delay_ns: int = 500 * NS_PER_MS
    max_delay_ns: int = 30 * NS_PER_S

    def delay_ns(self, deaths_ns: Sequence[int]) -> int | None:
        """Return the delay of the next restart; None if the core died too often.

        Args:
            deaths_ns: times of the deaths, in order; the last one is the present.
        """
        since_ns = deaths_ns[-1] - self.within_ns
        recent = sum(at_ns > since_ns for at_ns in deaths_ns)
        if recent > self.restarts:
            return None
        # The exponent is bounded so that many failures do not make a giant integer.
        return min(self.max_delay_ns, self.first_delay_ns << min(recent - 1, 32))


class CoreSupervisor:
    """The owner of the core's process.

    Args:
        state: state of the HTTP process.
        policy: number and delays of restarts.
        metrics: metrics of the replica.
        followers: the further HTTP processes.
        clock: returns monotonic nanoseconds.
    """

    def __init__(
        self,
        state: ServerState,
        policy: RestartPolicy,
        metrics: EngineMetrics,
        followers: Followers,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._state = state
        self._policy = policy
        self._metrics = metrics
        self._followers = followers
        self._clock = clock
        self._core: CoreClient | None = None
        self._launching: asyncio.Future[None] | None = None
        self._launched_ns = 0
        self._start_s = 0.0
        self._deaths_ns: deque[int] = deque(maxlen=policy.restarts + 1)

    @property
    def core(self) -> CoreClient:
        """The core that was launched last."""
        assert self._core is not None, "the core was launched"
        return self._core

    async def launch(self) -> None:
        """Start a process, which becomes ready later."""
        self._launched_ns = self._clock()
        self._core = await CoreClient.start(
            self._state.configure, on_step=self._metrics.observe, processes=self._followers.count
        )

    async def await_ready(self) -> Ready:
        """Wait until the core is ready, and the further HTTP processes serve it.

        Raises:
            GoodputError: the core cannot start, or died; or another process ended.
        """
        ready = await self.core.await_ready()
        await self._followers.serve(self.core.take_other_sockets(), ready, self._state.epoch)
        self._start_s = (self._clock() - self._launched_ns) / NS_PER_S
        return ready

    async def restart(self) -> None:
        """Replace a dead core, and admit requests again. Cancel it to stop.

        Raises:
            GoodputError: the core died too often.
        """
        state = self._state
        state.suspend()
        if state.configure.step_log is not None:
            # The log of the dead core is kept, and a log does not replace another.
            state.configure = structs.replace(state.configure, step_log=None)
        error = await self.core.failure()
        while True:
            self._deaths_ns.append(self._clock())
            delay_ns = self._policy.delay_ns(self._deaths_ns)
            if delay_ns is None:
                state.phase = ServerPhase.FAILED
                raise self._too_often(error)
            delay_s = delay_ns / NS_PER_S
            state.retry_after_s = math.ceil(delay_s + self._start_s)
            self._followers.suspend(state.retry_after_s)
            _log.error("core died", extra={"detail": f"{error}", "restart_in_seconds": delay_s})
            await self.core.close()
            await asyncio.sleep(delay_s)
            try:
                ready = await self._start_again()
            except GoodputError as again:
                error = again
                continue
            state.serve(self.core, ready)
            self._metrics.core_restarts.inc()
            start_s = round(self._start_s, 3)
            _log.info("core restarted", extra={"restarts": state.restarts, "seconds": start_s})
            return

    async def close(self) -> None:
        """End the core's process, if there is one."""
        if self._launching is not None:
            await asyncio.wait([self._launching])
        if self._core is not None:
            await self._core.close()

    async def _start_again(self) -> Ready:
        limit_s = max(_MIN_START_S, _SLOW_STARTS * self._start_s)
        try:
            # Shielded, so that a stop during the launch leaves no process without an owner.
            self._launching = asyncio.ensure_future(self.launch())
            await asyncio.shield(self._launching)
            async with asyncio.timeout(limit_s):
                return await self.await_ready()
        except TimeoutError as error:
            raise InternalError(f"the engine core was not ready after {limit_s:.0f} s") from error
        except OSError as error:
            raise InternalError(f"the engine core cannot be started: {error}") from error

    def _too_often(self, error: GoodputError) -> GoodputError:
        deaths = len(self._deaths_ns)
        if deaths == 1:
            return error
        minutes = self._policy.within_ns / (60 * NS_PER_S)
        return InternalError(
            f"the engine core died {deaths} times within {minutes:g} minutes, so it is not "
            f"restarted; the last time: {error}"
        )
