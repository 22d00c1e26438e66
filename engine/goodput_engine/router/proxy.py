"""A client request's way through the router: placed, sent, passed on, counted.

Whatever happens to it (a lost replica, a hanging one, a client that leaves, the router's own
stop) ends in `inference`, the one place that counts.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import aiohttp
from aiohttp import web

from goodput_core.contract import HEADER_LOAD
from goodput_core.placement import PlacementReason
from goodput_core.slo.record import Outcome
from goodput_engine.router.errors import (
    ClientFault,
    Crowded,
    Diverted,
    Expired,
    ReplicaLost,
    RetryReason,
    Stopping,
)
from goodput_engine.router.intake import Promise, promise_of, read_body
from goodput_engine.router.replicas import read_report
from goodput_engine.router.replies import error_response
from goodput_engine.router.request_state import RequestState
from goodput_engine.router.response_stream import SATURATED, ResponseStream
from goodput_engine.router.retry import RetryBudget
from goodput_engine.router.room import Room
from goodput_engine.router.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from goodput_engine.router.outcomes import OutcomeCounts
    from goodput_engine.router.replicas import Replica, ReplicaPool
    from goodput_engine.router.settings import RouterSettings
    from goodput_engine.router.upstream_client import UpstreamClient

__all__ = ["Proxy"]

_log: Final = logging.getLogger(__name__)


class Proxy:
    """Answers client requests.

    Args:
        settings: classes, time-outs and limits.
        replicas: the replicas.
        upstream_client: sends to them.
        outcomes: counts.
        clock: nanoseconds, monotonic.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        replicas: ReplicaPool,
        upstream_client: UpstreamClient,
        outcomes: OutcomeCounts,
        clock: Callable[[], int],
    ) -> None:
        self._classes = settings.classes
        self._default = Promise(
            settings.default_class, settings.classes[settings.default_class].targets
        )
        self._timeouts = settings.timeouts
        self._limits = settings.limits
        self._report_valid_ns = settings.probe.report_valid_ns
        self._replicas = replicas
        self._upstream_client = upstream_client
        self._outcomes = outcomes
        self._clock = clock
        self._responses = ResponseStream(settings, clock)
        self._budget = RetryBudget(
            percent=settings.limits.retry_percent, burst=settings.limits.retry_burst
        )
        self._room = Room(settings.limits.all_bodies_bytes)
        self._live: set[Watchdog] = set()
        self._known: frozenset[object] = frozenset()
        self.draining = False
        """Whether it is to stop: nobody shall come back."""
        self.refusing = False
        """Whether who comes only now is sent away."""

    def take_leave(self, connections: Iterable[object]) -> None:
        """From now on an answer is the last on its connection.

        Args:
            connections: of the clients that are here.
        """
        self.draining = True
        self._known = frozenset(connections)

    def stop_all(self) -> None:
        """End every request that is under way: the time to drain is over."""
        for watchdog in tuple(self._live):
            watchdog.end(Stopping("the router is stopping"))

    async def inference(self, request: web.Request) -> web.StreamResponse:
        """Handle a completion: counted, once, whatever becomes of it."""
        state = RequestState(self._clock(), self._default, self._room)
        self._outcomes.begin()
        try:
            return await self._judged(request, state)
        except ClientFault as fault:
            state.client_fault = fault.status
            return error_response(fault.status, str(fault), fault.code)
        except Crowded as crowded:
            return _refused(state, 429, str(crowded), "rate_limit_exceeded")
        except (asyncio.CancelledError, aiohttp.ClientConnectionResetError):
            # Many clients hang up on reading "[DONE]": they have what they came for.
            state.outcome = Outcome.OK if state.said_all else Outcome.CANCELLED
            raise
        except Exception:  # noqa: BLE001 - a bug too is one outcome and one answer
            _log.exception("request failed")
            state.outcome = Outcome.ERROR
            return await self._responses.abort(
                request, state, 500, "the router failed", "internal_error"
            )
        finally:
            state.drop_body()
            self._outcomes.settle(state, self._clock())

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Pass on a question about the models: no promise, not counted."""
        return await self._answer(request, RequestState(self._clock(), self._default, self._room))

    async def _judged(self, request: web.Request, state: RequestState) -> web.StreamResponse:
        state.body = await read_body(
            request,
            limit_bytes=self._limits.body_bytes,
            timeout_ns=self._timeouts.body_ns,
            make_room=state.make_room,
        )
        state.promise = promise_of(
            request.headers,
            state.body,
            classes=self._classes,
            default_class=self._default.slo_class,
        )
        if "Content-Encoding" not in request.headers:
            state.keys = self._replicas.keys_of(state.body)
        self._budget.earn()
        return await self._answer(request, state)

    async def _answer(self, request: web.Request, state: RequestState) -> web.StreamResponse:
        if self.refusing and request.protocol not in self._known:
            return _refused(state, 503, "the router is stopping", "draining")
        replica, placement = self._replicas.place(self._clock(), state.keys)
        if replica is None:
            if placement.reason is PlacementReason.ALL_SATURATED:
                return _refused(state, 429, "every replica is full", "rate_limit_exceeded")
            return _refused(state, 503, "no replica is ready", "no_replica_ready")
        first_byte_by_ns = self._clock() + self._timeouts.first_byte_ns
        try:
            while True:
                watchdog = Watchdog(self._clock, limit_ns=first_byte_by_ns - self._clock())
                try:
                    result = await self._attempt(request, state, replica, watchdog)
                except Diverted as diverted:
                    result = diverted.to
                if isinstance(result, web.StreamResponse):
                    return result
                replica = result
        except Expired:
            return await self._expired(request, state)
        except Stopping:
            state.outcome = Outcome.ERROR
            return await self._responses.abort(
                request, state, 503, "the router stopped before the answer ended", "draining"
            )
        except ReplicaLost as lost:
            state.outcome = Outcome.ERROR
            return await self._responses.abort(
                request, state, 502, f"{lost}; try again", "replica_lost"
            )

    async def _attempt(
        self,
        request: web.Request,
        state: RequestState,
        replica: Replica,
        watchdog: Watchdog,
    ) -> web.StreamResponse | Replica:
        """Ask one replica.

        Returns:
            What the client was sent, or the replica to ask instead.

        Raises:
            ReplicaLost: it is gone, and there is no other or it is too late for another.
            Diverted: it hangs, and there is another.
            Expired: nothing came in time.
            Stopping: the router's time to drain is over.
        """
        state.tried.add(replica.name)
        state.observer = None
        upstream: aiohttp.ClientResponse | None = None
        served = False
        replica.begin(watchdog, partial(self._leave, state, watchdog))
        self._live.add(watchdog)
        try:
            with watchdog:
                state.sent_ns = self._clock()
                upstream = await self._upstream_client.send(request, state, replica)
                told = self._hear(replica, upstream.headers.get(HEADER_LOAD))
                if upstream.status >= 500 or upstream.status in SATURATED:
                    reason = self._refused_by(replica, upstream.status, told=told)
                    other = self._elsewhere(state, reason)
                    if other is not None:
                        return other
                else:
                    served = True
                return await self._responses.forward(request, state, upstream, watchdog)
        except ReplicaLost as lost:
            _lost(replica, lost)
            if state.response is None:
                other = self._elsewhere(state, lost.reason)
                if other is not None:
                    return other
            raise
        finally:
            if upstream is not None:
                # After a whole answer this does nothing; otherwise it closes the connection,
                # which is how an engine learns that nobody listens any more.
                upstream.close()
            self._live.discard(watchdog)
            replica.end(watchdog, served=served)

    def _leave(self, state: RequestState, watchdog: Watchdog) -> None:
        """Take a request away from a replica that hangs, if nothing of its answer has come.

        Without another replica or a retry to spend it stays: the replica may wake up.
        """
        if state.response is None:
            other = self._elsewhere(state, RetryReason.HUNG)
            if other is not None:
                watchdog.end(Diverted(other))

    def _elsewhere(self, state: RequestState, reason: RetryReason) -> Replica | None:
        """The replica to ask instead, already paid for; None: the client hears of the failure."""
        if state.retried:
            return None
        replica, _ = self._replicas.place(self._clock(), state.keys, but=state.tried)
        if replica is None or not self._budget.spend():
            return None
        state.retried = True
        self._outcomes.retry(reason)
        return replica

    def _hear(self, replica: Replica, account: str | None) -> bool:
        """Take over what an answer's header says of the replica's load, if it says anything."""
        report = None if account is None else read_report(account)
        if report is None:
            return False
        replica.take_report(report, self._clock(), valid_ns=self._report_valid_ns)
        return True

    def _refused_by(self, replica: Replica, status: int, *, told: bool) -> RetryReason:
        if status in SATURATED and not told:
            # One that told its load may have refused this request alone.
            replica.mark_saturated(self._clock())
        if status >= 500:
            replica.wake.set()
            return RetryReason.SATURATED if status == 503 else RetryReason.SERVER_ERROR
        return RetryReason.SATURATED

    async def _expired(self, request: web.Request, state: RequestState) -> web.StreamResponse:
        transport = request.transport
        if transport is None or transport.get_write_buffer_size():
            # It is the client that does not move: its buffers are full and stay so.
            state.outcome = Outcome.CANCELLED
            if transport is not None:
                transport.abort()
            raise aiohttp.ClientConnectionResetError("the client stopped reading")
        state.outcome = Outcome.TIMEOUT
        return await self._responses.abort(
            request, state, 504, "the replica did not answer in time", "replica_timeout"
        )


def _lost(replica: Replica, lost: ReplicaLost) -> None:
    """What a failed request teaches about the replica, before any probe does."""
    if lost.reason is RetryReason.CONNECT:
        replica.mark_gone(str(lost))
    # A single broken connection proves little: ask.
    replica.wake.set()


def _refused(state: RequestState, status: int, message: str, code: str) -> web.Response:
    state.outcome = Outcome.SHED
    return error_response(status, f"{message}; try again shortly", code, retry_after_s=1)
