"""The path of a client request through the router: placement, attempts, response, one outcome.

`inference` handles every completion request, and only `inference` counts outcomes. So each request
has one outcome, even if a replica is lost or hangs, the client disconnects, or the router stops.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
from aiohttp import web

from goodput_core.contract import HEADER_LOAD, HEADER_SLO_CLASS
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_S
from goodput_engine.http_server import error_response
from goodput_engine.logs import EventCounter
from goodput_engine.openai.errors import APIError, bad_request, not_placed, unavailable
from goodput_engine.openai.headers import ServiceClasses, read_priority, read_targets
from goodput_engine.request_bodies import MemoryLimit, read_body
from goodput_engine.router.proxied_request import ProxiedRequest
from goodput_engine.router.replicas import read_report
from goodput_engine.router.response_stream import SATURATED, ResponseStream
from goodput_engine.router.retry import RetryBudget
from goodput_engine.router.tenants import read_workload
from goodput_engine.router.upstream_client import (
    Expired,
    FilesExhausted,
    ReplicaLost,
    Rerouted,
    RetryReason,
    Stopping,
    Watchdog,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from goodput_core.spec.workloads import SessionAffinitySpec
    from goodput_engine.api_keys import ApiKeys
    from goodput_engine.router.outcomes import OutcomeCounts
    from goodput_engine.router.replicas import Replica, ReplicaPool
    from goodput_engine.router.settings import RouterSettings
    from goodput_engine.router.tenants import Tenants
    from goodput_engine.router.upstream_client import UpstreamClient
    from goodput_engine.router.upstream_connection import UpstreamResponse

__all__ = ["Proxy"]

# Searching a larger body for its class would delay other requests by more than 30 ms.
_MAX_CLASS_BODY_BYTES: Final = 4 << 20
_log: Final = logging.getLogger(__name__)


class _ClassField(msgspec.Struct):
    slo_class: msgspec.Raw = msgspec.Raw(b"null")


_CLASS_FIELD: Final = msgspec.json.Decoder(_ClassField)
_CLASS: Final[msgspec.json.Decoder[str | None]] = msgspec.json.Decoder(str | None)


class Proxy:
    """Forwards client requests to replicas.

    Args:
        settings: classes, time-outs and limits.
        replicas: the replicas.
        upstream_client: sends requests to replicas.
        outcomes: counts requests and outcomes.
        clock: returns monotonic nanoseconds.
        api_keys: the keys of clients; None if no key is required.
        tenants: the tenants, whose keys are then required instead; None without tenants.

    Attributes:
        draining: True from the start of a drain; each response is then the last on its connection.
        rejecting: True if requests on connections opened after the start of the drain get 503.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        replicas: ReplicaPool,
        upstream_client: UpstreamClient,
        outcomes: OutcomeCounts,
        clock: Callable[[], int],
        api_keys: ApiKeys | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self._api_keys = api_keys
        self._tenants = tenants
        self._classes = ServiceClasses(classes=settings.classes, default=settings.default_class)
        self._default = self._classes.resolve(Targets(), header=None, body=None)
        self._session_affinity = settings.session_affinity
        self._max_num_seqs = settings.max_num_seqs
        self._processes = settings.processes
        self._timeouts = settings.timeouts
        self._limits = settings.limits
        self._report_valid_ns = settings.probe.report_valid_ns
        self._replicas = replicas
        self._upstream_client = upstream_client
        self._outcomes = outcomes
        self._clock = clock
        self._responses = ResponseStream(
            settings, clock, on_start=None if tenants is None else tenants.note_start
        )
        self._budget = RetryBudget(
            percent=settings.limits.retry_percent, burst=settings.limits.retry_burst
        )
        self._memory = MemoryLimit(settings.limits.all_bodies_bytes)
        self._running: set[Watchdog] = set()
        self._old_connections: frozenset[object] = frozenset()
        self._files_exhausted = EventCounter(_log, "open files exhausted")
        self.draining = False
        self.rejecting = False

    def begin_drain(self, connections: Iterable[object]) -> None:
        """Close each connection after its next response.

        Args:
            connections: the open connections, whose next request is still served.
        """
        self.draining = True
        self._old_connections = frozenset(connections)

    def stop_all(self) -> None:
        """End every running request at the end of the grace period."""
        for watchdog in tuple(self._running):
            watchdog.end(Stopping("the router is stopping"))

    async def inference(self, request: web.Request) -> web.StreamResponse:
        """Handle a completion and count it once."""
        state = self._new_request()
        self._outcomes.begin()
        try:
            return await self._completion(request, state)
        except APIError as rejection:
            if rejection.status in SATURATED:
                state.outcome = Outcome.SHED
            else:
                state.client_error = rejection.status
            return error_response(rejection)
        except (asyncio.CancelledError, ConnectionError):
            # Many clients disconnect after "[DONE]", when the response is complete.
            state.outcome = Outcome.OK if state.complete else Outcome.CANCELLED
            raise
        except Exception:  # noqa: BLE001 - a bug must also give one outcome and one response
            _log.exception("request failed")
            state.outcome = Outcome.ERROR
            error = APIError(500, "the router failed; see its log", code="internal_error")
            return await self._responses.abort(request, state, error)
        finally:
            state.drop_body()
            now_ns = self._clock()
            outcome = self._outcomes.settle(state, now_ns)
            if self._tenants is not None:
                self._tenants.settle(state, outcome, now_ns)

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Forward `GET` of `/v1/models` or of one model, which has no outcome."""
        try:
            # A server that resolves ".." would serve another of its paths.
            if ".." in request.match_info.get("name", "").split("/"):
                raise bad_request("the request's path cannot be forwarded")
            state = self._new_request()
            self._authenticate(request, state)
            return await self._forward(request, state)
        except APIError as error:
            return error_response(error)

    def _new_request(self) -> ProxiedRequest:
        return ProxiedRequest(self._clock(), self._default, self._memory.reserve())

    def _authenticate(self, request: web.Request, state: ProxiedRequest) -> None:
        """Require a valid key, if there are keys.

        Raises:
            APIError: 401 without a valid key.
        """
        if self._api_keys is not None:
            self._api_keys.require(request.headers)
        if self._tenants is not None:
            state.tenant = self._tenants.identify(request.headers)

    async def _completion(self, request: web.Request, state: ProxiedRequest) -> web.StreamResponse:
        self._authenticate(request, state)
        encodings = ", ".join(request.headers.getall("Content-Encoding", ())).lower()
        compressed = encodings not in {"", "identity"}
        if self._tenants is not None and compressed:
            self._tenants.refuse_compressed(encodings)
        body = await read_body(
            request,
            limit_bytes=self._limits.body_bytes,
            timeout_s=self._timeouts.body_ns / NS_PER_S,
            memory=state.memory,
        )
        state.receive(body, self._clock())
        header = request.headers.get(HEADER_SLO_CLASS)
        # Only the class is validated here; the engine reports other errors of the body.
        in_body = None if header is not None or compressed else _class_in(state.body)
        state.slo = self._classes.resolve(
            read_targets(request.headers),
            header=header,
            body=in_body,
            priority=read_priority(request.headers),
        )
        state.session = _session_of(request, self._session_affinity)
        if self._tenants is not None:
            now_ns = self._clock()
            self._tenants.admit(
                state,
                read_workload(state.body),
                self._replicas.capacity(
                    now_ns, max_num_seqs=self._max_num_seqs, processes=self._processes
                ),
                now_ns,
            )
        if not compressed:
            state.keys = self._replicas.prompt_keys_of(state.body)
        self._budget.earn()
        return await self._forward(request, state)

    async def _forward(self, request: web.Request, state: ProxiedRequest) -> web.StreamResponse:
        """Send a request to replicas until one responds or no attempt is left.

        Raises:
            APIError: 429 or 503 if no replica can take the request.
        """
        if self.rejecting and request.protocol not in self._old_connections:
            raise unavailable("the router is stopping; retry shortly", "draining")
        now_ns = self._clock()
        importance = state.importance(now_ns)
        replica, placement = self._replicas.place(
            now_ns, state.keys, importance=importance, session=state.session
        )
        if replica is None:
            raise not_placed(placement.reason)
        first_byte_deadline_ns = self._clock() + self._timeouts.first_byte_ns
        try:
            while True:
                left_ns = first_byte_deadline_ns - self._clock()
                watchdog = Watchdog(self._clock, limit_ns=left_ns)
                try:
                    result = await self._attempt(request, state, replica, watchdog)
                except Rerouted as rerouted:
                    result = rerouted.to
                if isinstance(result, web.StreamResponse):
                    return result
                replica = result
        except Expired:
            return await self._expire(request, state)
        except FilesExhausted as exhausted:
            self._files_exhausted.add("rejected_requests")
            raise unavailable(
                "the router reached its limit of open files; retry shortly", "open_files_exhausted"
            ) from exhausted
        except Stopping:
            error = unavailable("the router stopped before the response ended", "draining")
        except ReplicaLost as lost:
            error = APIError(502, f"{lost}; retry", code="replica_lost")
        state.outcome = Outcome.ERROR
        return await self._responses.abort(request, state, error)

    async def _attempt(
        self,
        request: web.Request,
        state: ProxiedRequest,
        replica: Replica,
        watchdog: Watchdog,
    ) -> web.StreamResponse | Replica:
        """Send a request to one replica.

        Returns:
            The response to the client, or the replica to send the request to instead.

        Raises:
            ReplicaLost: the replica is lost, and there is no other or no retry is allowed.
            Rerouted: the replica hangs, and another replica gets the request.
            Expired: no data arrived in time.
            FilesExhausted: no connection can be opened.
            Stopping: the router's grace period ended.
        """
        state.tried.add(replica.name)
        state.observer = None
        upstream: UpstreamResponse | None = None
        served = False
        replica.begin(watchdog, partial(self._reroute, state, watchdog))
        self._running.add(watchdog)
        try:
            with watchdog:
                state.sent_ns = self._clock()
                if self._tenants is not None:
                    self._tenants.note_sent(state, replica.name, state.sent_ns)
                upstream = await self._upstream_client.send(request, state, replica)
                reported = self._take_report(replica, upstream.headers.get(HEADER_LOAD))
                if upstream.status >= 500 or upstream.status in SATURATED:
                    reason = self._note_rejection(replica, upstream.status, reported=reported)
                    # No other replica could serve an overdue request in time.
                    dropped = upstream.status == 429 and state.is_overdue(self._clock())
                    other = None if dropped else self._retry_on(state, reason)
                    if other is not None:
                        return other
                else:
                    served = True
                return await self._responses.forward(request, state, upstream, watchdog)
        except ReplicaLost as lost:
            if lost.reason is RetryReason.CONNECT:
                replica.mark_not_ready(str(lost))
            # A broken connection does not prove that the replica failed, so probe it now.
            replica.wake.set()
            if state.response is None:
                other = self._retry_on(state, lost.reason)
                if other is not None:
                    return other
            raise
        finally:
            if upstream is not None:
                # Unless the response is complete, this closes the connection, and the engine
                # cancels the request.
                upstream.close()
            self._running.discard(watchdog)
            replica.end(watchdog, served=served)

    def _reroute(self, state: ProxiedRequest, watchdog: Watchdog) -> None:
        """Move a request from a hung replica to another if no part of its response has arrived.

        If there is no other replica or no retry left, the request stays, because the replica may
        recover.
        """
        if state.response is None:
            other = self._retry_on(state, RetryReason.HUNG)
            if other is not None:
                watchdog.end(Rerouted(other))

    def _retry_on(self, state: ProxiedRequest, reason: RetryReason) -> Replica | None:
        """Take a retry from the budget and return the replica for the second attempt.

        Return None if there is no other replica, or if no retry is allowed.
        """
        if state.retried:
            return None
        now_ns = self._clock()
        replica, _ = self._replicas.place(
            now_ns,
            state.keys,
            exclude=state.tried,
            importance=state.importance(now_ns),
            session=state.session,
        )
        if replica is None or not self._budget.spend():
            return None
        state.retried = True
        self._outcomes.count_retry(reason)
        return replica

    def _take_report(self, replica: Replica, text: str | None) -> bool:
        """Store the load report of a response's header; return False if there is no valid one."""
        report = None if text is None else read_report(text)
        if report is None:
            return False
        replica.take_report(report, self._clock(), valid_ns=self._report_valid_ns)
        return True

    def _note_rejection(self, replica: Replica, status: int, *, reported: bool) -> RetryReason:
        if status in SATURATED and not reported:
            # If the replica reports its load, the report shows whether it is saturated.
            replica.mark_saturated(self._clock())
        if status >= 500:
            replica.wake.set()
            return RetryReason.SATURATED if status == 503 else RetryReason.SERVER_ERROR
        return RetryReason.SATURATED

    async def _expire(self, request: web.Request, state: ProxiedRequest) -> web.StreamResponse:
        transport = request.transport
        if transport is None or transport.get_write_buffer_size():
            # The client does not read, so its buffers stay full.
            state.outcome = Outcome.CANCELLED
            if transport is not None:
                transport.abort()
            raise aiohttp.ClientConnectionResetError("the client stopped reading")
        state.outcome = Outcome.TIMEOUT
        error = APIError(504, "the replica did not respond in time", code="replica_timeout")
        return await self._responses.abort(request, state, error)


def _session_of(request: web.Request, affinity: SessionAffinitySpec | None) -> bytes | None:
    """Return a hash of the session that a request names; None if it names none."""
    if affinity is None:
        return None
    if affinity.header is not None:
        name = request.headers.get(affinity.header)
    else:
        name = request.cookies.get(affinity.cookie or "")
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape")).digest() if name else None


def _class_in(body: bytes) -> str | None:
    """Return the class in a body; None if the body has no class or is not a JSON object.

    Raises:
        APIError: 400 if the class is not a string, or the body is too large to search.
    """
    if b'"slo_class"' not in body:
        return None
    if len(body) > _MAX_CLASS_BODY_BYTES:
        raise bad_request(
            f"slo_class is not read from a body above {_MAX_CLASS_BODY_BYTES >> 20} MiB; send "
            f"the header {HEADER_SLO_CLASS}",
            "slo_class",
        )
    try:
        raw = _CLASS_FIELD.decode(body).slo_class
    except (ValueError, RecursionError):
        return None  # the engine reports the problem
    try:
        return _CLASS.decode(raw)
    except (ValueError, RecursionError) as error:
        raise bad_request(
            "slo_class must be a string that names a class", "slo_class", "invalid_slo_class"
        ) from error
