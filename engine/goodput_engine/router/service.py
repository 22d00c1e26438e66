"""A running router: its parts, its two ports, and its drain.

Clients must not reach the metrics or the control endpoints of the router or of a replica. Therefore
the serving port forwards only a fixed list of paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, Self

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from goodput_core.contract import (
    LABEL_LLMSERVICE,
    LABEL_REPLICA,
    METRIC_ROUTER_REPLICA_UP,
    PATH_CHAT_COMPLETIONS,
    PATH_COMPLETIONS,
    PATH_CONTROL_STATE,
    PATH_LIVE,
    PATH_METRICS,
    PATH_MODELS,
    PATH_READY,
    QUERY_SECONDS_SINCE,
    ROLE_ROUTER,
)
from goodput_core.process import raise_open_files
from goodput_core.units import NS_PER_S
from goodput_engine.api_keys import ApiKeys
from goodput_engine.http_server import error_response, listen, no_such_path
from goodput_engine.openai.errors import APIError
from goodput_engine.process_metrics import register_process_metrics
from goodput_engine.router.outcomes import OutcomeCounts
from goodput_engine.router.probing import Prober
from goodput_engine.router.proxy import Proxy
from goodput_engine.router.replicas import ReplicaPool
from goodput_engine.router.tenants import Tenants
from goodput_engine.router.upstream_client import RetryReason, UpstreamClient
from goodput_engine.router.upstreams import merge
from goodput_engine.server_options import ADMIN_CONNECTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from goodput_engine.router.replicas import Replica
    from goodput_engine.router.settings import RouterSettings
    from goodput_engine.router.upstreams import Upstream, UpstreamSource

__all__ = ["RouterService"]

# Time to write the last error events after the grace period.
_LAST_EVENTS_S: Final = 1.0
_POLL_S: Final = 0.05
_SECOND: Final = re.compile(r"[0-9]{1,12}")
_log: Final = logging.getLogger(__name__)


class RouterService:
    """A router that serves while its context is open.

    Args:
        settings: classes, policy, time-outs and limits.
        upstreams: fixed upstreams.
        source: source of a changing list of upstreams; None if all are fixed.
        host: address of both ports.
        port, admin_port: port numbers; 0 takes any free port.
        processes: number of processes that share the serving port. If there are several, the admin
            port is reachable on this machine only.
        clock: returns monotonic nanoseconds.

    Attributes:
        replicas: the replicas and their state.
        outcomes: the counts of requests and outcomes.
        vital: tasks that must not end while the router serves.
        url, admin_url: URLs of both ports.

    Raises:
        UsageError: a port cannot be opened, or two replicas have the same name.
        InputError: the source or the file of API keys or of tenants is invalid.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        clock: Callable[[], int],
        upstreams: Sequence[Upstream] = (),
        source: UpstreamSource | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        admin_port: int = 0,
        processes: int = 1,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._fixed_upstreams = upstreams
        self._source = source
        self._address = (host, port, admin_port)
        self._shared = processes > 1
        self._stack = AsyncExitStack()
        self.replicas: Final = ReplicaPool(settings.policy, settings.health_path)
        self._registry = CollectorRegistry()
        self.outcomes: Final = OutcomeCounts(
            self._registry,
            llmservice=settings.llmservice,
            classes=settings.classes,
            began_ns=clock(),
        )
        self._replica_up = Gauge(
            METRIC_ROUTER_REPLICA_UP,
            "1 if the replica is ready and not draining.",
            (LABEL_LLMSERVICE, LABEL_REPLICA),
            registry=self._registry,
        )
        register_process_metrics(self._registry, llmservice=settings.llmservice, role=ROLE_ROUTER)
        self.vital: tuple[asyncio.Task[None], ...] = ()
        self.url = ""
        self.admin_url = ""
        self._epoch = secrets.token_hex(8)
        self._started_ns = 0
        self._tenants: Tenants | None = None
        self._proxy: Proxy
        self._prober: Prober
        self._server: web.Server

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def drain(self, grace_ns: int, *, immediate: asyncio.Event | None = None) -> None:
        """Let running requests finish, and end those that remain after the grace period.

        A client with an open connection may already be sending a request. So each connection that
        is open now is served one more response, which announces the close. The drain ends once no
        connection is open, or no request has run for `timeouts.idle_drain_ns`. Requests on newer
        connections are rejected after the same time.

        Args:
            grace_ns: the grace period.
            immediate: event that ends the grace period early.
        """
        immediate = immediate or asyncio.Event()
        server, idle_drain_ns = self._server, self._settings.timeouts.idle_drain_ns
        self._proxy.begin_drain(server.connections)
        _log.info("draining", extra={"in_flight": self.outcomes.in_flight})
        began_ns = busy_until_ns = now_ns = self._clock()
        while now_ns < began_ns + grace_ns and not immediate.is_set():
            self._proxy.rejecting = now_ns >= began_ns + idle_drain_ns
            if self.outcomes.in_flight:
                busy_until_ns = now_ns
            elif not server.connections or now_ns >= busy_until_ns + idle_drain_ns:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await immediate.wait()
            now_ns = self._clock()
        self._proxy.begin_drain(())
        self._proxy.rejecting = True
        cut_short = self.outcomes.in_flight
        if cut_short:
            self._proxy.stop_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_EVENTS_S):
                    await self.outcomes.idle.wait()
        _log.info("stopped", extra={"cut_short": cut_short})

    async def _start(self) -> None:
        settings = self._settings
        listed = await self._source.first() if self._source is not None else ()
        upstreams = merge(listed, self._fixed_upstreams)
        upstream_client = UpstreamClient(
            settings.timeouts, lambda: self.outcomes.count_retry(RetryReason.STALE_CONNECTION)
        )
        self._stack.push_async_callback(upstream_client.close)
        self._prober = Prober(upstream_client.session, settings.probe, self._clock)
        self._stack.push_async_callback(self._prober.close)
        key_file, tenants_file = settings.api_key_file, settings.tenants_file
        if tenants_file is not None:
            self._tenants = Tenants(
                tenants_file,
                classes=settings.classes,
                registry=self._registry,
                llmservice=settings.llmservice,
                clock=self._clock,
            )
        self._proxy = Proxy(
            settings,
            replicas=self.replicas,
            upstream_client=upstream_client,
            outcomes=self.outcomes,
            clock=self._clock,
            api_keys=None if key_file is None else ApiKeys(key_file, self._clock),
            tenants=self._tenants,
        )
        host, port, admin_port = self._address
        # Forward bodies as they are, and cancel the request of a client that disconnects.
        self.url, self._server = await listen(
            self._stack,
            self._serving_app(),
            (host, port),
            shared=self._shared,
            # One file descriptor for the client's connection, one for the replica's.
            limits=settings.connections.within(raise_open_files(), files_each=2),
            handler_cancellation=True,
            auto_decompress=False,
        )
        self._started_ns = self._clock()
        self.admin_url, _ = await listen(
            self._stack,
            self._admin_app(),
            ("127.0.0.1" if self._shared else host, admin_port),
            limits=ADMIN_CONNECTIONS,
        )
        self._apply(upstreams)
        if self._source is not None:
            watch_task = asyncio.create_task(
                self._source.follow(
                    lambda upstreams: self._apply(merge(upstreams, self._fixed_upstreams))
                )
            )
            self._stack.push_async_callback(_cancel, watch_task)
            self.vital = (watch_task,)

    def _apply(self, upstreams: Sequence[Upstream]) -> None:
        added, removed = self.replicas.set_upstreams(upstreams)
        self._prober.follow(added, removed)
        _log.info(
            "upstreams",
            extra={"replicas": len(self.replicas), "added": len(added), "removed": len(removed)},
        )

    def _serving_app(self) -> web.Application:
        app = web.Application()
        app.on_response_prepare.append(self._close_when_draining)
        app.router.add_post(PATH_COMPLETIONS, self._proxy.inference)
        app.router.add_post(PATH_CHAT_COMPLETIONS, self._proxy.inference)
        app.router.add_get(PATH_MODELS, self._proxy.models)
        app.router.add_get(PATH_MODELS + "/{name:.+}", self._proxy.models)
        app.router.add_get(PATH_LIVE, _live)
        app.router.add_get(PATH_READY, self._ready)
        app.router.add_route("*", "/{path:.*}", no_such_path)
        return app

    def _admin_app(self) -> web.Application:
        app = web.Application()
        app.router.add_get(PATH_METRICS, self._metrics)
        app.router.add_get(PATH_CONTROL_STATE, self._control_state)
        app.router.add_route("*", "/{path:.*}", no_such_path)
        return app

    async def _close_when_draining(self, _: web.Request, response: web.StreamResponse) -> None:
        if self._proxy.draining:
            response.force_close()
            response.headers["Connection"] = "close"

    async def _ready(self, _: web.Request) -> web.Response:
        if self._proxy.draining:
            return _not_ready("draining")
        count = sum(replica.ready for replica in self.replicas)
        if not count:
            return _not_ready("no replica is ready")
        return web.json_response({"status": "ready", "ready_replicas": count})

    async def _metrics(self, _: web.Request) -> web.Response:
        self._replica_up.clear()
        for replica in self.replicas:
            self._replica_up.labels(self._settings.llmservice, replica.name).set(replica.ready)
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _control_state(self, request: web.Request) -> web.Response:
        since = request.query.get(QUERY_SECONDS_SINCE)
        if since is not None and not _SECOND.fullmatch(since):
            message = f"{QUERY_SECONDS_SINCE} must be a whole number of seconds"
            return error_response(APIError(400, message, code="invalid_query"))
        now_ns, outcomes = self._clock(), self.outcomes
        body: dict[str, object] = {
            "role": ROLE_ROUTER,
            "epoch": self._epoch,
            "uptime_seconds": (now_ns - self._started_ns) / NS_PER_S,
            "llmservice": self._settings.llmservice,
            "policy": self.replicas.policy.value,
            "draining": self._proxy.draining,
            "arrivals": outcomes.arrivals,
            "in_flight": outcomes.in_flight,
            "replicas": [_replica_state(replica) for replica in self.replicas],
            "outcomes": outcomes.by_class(),
            "promises": outcomes.target_counts(),
            "client_errors": outcomes.client_errors,
            "judged_on_e2e_only": outcomes.e2e_only,
            "retries": outcomes.retries,
            "tenants_problem": "" if self._tenants is None else self._tenants.refresh(),
        }
        if since is not None:
            body["seconds"] = outcomes.seconds(int(since), now_ns)
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _replica_state(replica: Replica) -> dict[str, object]:
    report = replica.report
    return {
        "name": replica.name,
        "url": replica.upstream.url,
        "admin_url": replica.upstream.admin_url,
        "ready": replica.ready,
        "detail": replica.detail,
        "draining": report.draining,
        "saturated": replica.saturated,
        "in_flight": replica.in_flight,
        "running": report.running,
        "waiting": report.waiting,
        "kv_free_blocks": report.kv_free_blocks,
        "kv_total_blocks": report.kv_total_blocks,
    }


async def _live(_: web.Request) -> web.Response:
    return web.json_response({"status": "live"})


def _not_ready(reason: str) -> web.Response:
    return web.json_response({"status": "not ready", "reason": reason}, status=503)
