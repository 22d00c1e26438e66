"""A running router: its parts, its ports, and its drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, Self

from prometheus_client import CollectorRegistry

from goodput_core.process import raise_open_files
from goodput_engine.http_server import ADMIN_CONNECTIONS, listen
from goodput_engine.router.app import admin_app, serving_app
from goodput_engine.router.errors import RetryReason
from goodput_engine.router.outcomes import OutcomeCounts
from goodput_engine.router.probing import Prober
from goodput_engine.router.proxy import Proxy
from goodput_engine.router.replicas import ReplicaPool
from goodput_engine.router.upstream_client import UpstreamClient
from goodput_engine.router.upstreams import merge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from aiohttp import web

    from goodput_engine.router.settings import RouterSettings
    from goodput_engine.router.upstreams import Upstream, UpstreamSource

__all__ = ["RouterService"]

# Time to write the last error events after the grace period.
_LAST_EVENTS_S: Final = 1.0
_POLL_S: Final = 0.05
_log: Final = logging.getLogger(__name__)


class RouterService:
    """A router that serves while its context is open.

    Args:
        settings: classes, policy, time-outs and limits.
        upstreams: replicas that never change.
        source: source of the replicas that may change; None if there are none.
        host: address of both ports.
        port, admin_port: port numbers; 0 takes any free port.
        clock: returns monotonic nanoseconds.

    Attributes:
        vital: tasks that must not end while the router serves.

    Raises:
        UsageError: a port cannot be opened, or two replicas have the same name.
        InputError: the source's replicas cannot be used.
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
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._options = upstreams
        self._source = source
        self._address = (host, port, admin_port)
        self._stack = AsyncExitStack()
        self.replicas: Final = ReplicaPool(settings.policy)
        self._registry = CollectorRegistry()
        self.outcomes: Final = OutcomeCounts(
            self._registry,
            llmservice=settings.llmservice,
            classes=settings.classes,
            began_ns=clock(),
        )
        self.vital: tuple[asyncio.Task[None], ...] = ()
        self.url = ""
        self.admin_url = ""
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

    async def drain(self, grace_ns: int, *, hurry: asyncio.Event | None = None) -> None:
        """Reject new requests, let running ones finish, and end the rest.

        A client with an open connection may already be sending a request. So each connection is
        served one more response, which announces the close. An unused connection is closed after
        `parting_ns`.

        Args:
            grace_ns: the grace period.
            hurry: event that ends the grace period early.
        """
        hurry = hurry or asyncio.Event()
        server, parting_ns = self._server, self._settings.timeouts.parting_ns
        self._proxy.begin_drain(server.connections)
        _log.info("draining", extra={"in_flight": self.outcomes.in_flight})
        began_ns = quiet_ns = now_ns = self._clock()
        while now_ns < began_ns + grace_ns and not hurry.is_set():
            self._proxy.refusing = now_ns >= began_ns + parting_ns
            if self.outcomes.in_flight:
                quiet_ns = now_ns
            elif not server.connections or now_ns >= quiet_ns + parting_ns:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await hurry.wait()
            now_ns = self._clock()
        self._proxy.begin_drain(())
        self._proxy.refusing = True
        cut_short = self.outcomes.in_flight
        if cut_short:
            self._proxy.stop_all()
            try:
                async with asyncio.timeout(_LAST_EVENTS_S):
                    await self.outcomes.idle.wait()
            except TimeoutError:
                pass
        _log.info("stopped", extra={"cut_short": cut_short})

    async def _start(self) -> None:
        settings = self._settings
        listed = await self._source.first() if self._source is not None else ()
        upstreams = merge(listed, self._options)
        upstream_client = UpstreamClient(
            settings.timeouts, lambda: self.outcomes.retry(RetryReason.STALE_CONNECTION)
        )
        self._stack.push_async_callback(upstream_client.close)
        self._prober = Prober(upstream_client.session, settings.probe, self._clock)
        self._stack.push_async_callback(self._prober.close)
        self._proxy = Proxy(
            settings,
            replicas=self.replicas,
            upstream_client=upstream_client,
            outcomes=self.outcomes,
            clock=self._clock,
        )
        host, port, admin_port = self._address
        # Forward bodies as they are, and cancel the request of a client that disconnects.
        self.url, self._server = await listen(
            self._stack,
            serving_app(self._proxy, self.replicas),
            (host, port),
            # One file for the client's connection, one for the replica's.
            limits=settings.connections.within(raise_open_files(), files_each=2),
            handler_cancellation=True,
            auto_decompress=False,
        )
        self.admin_url, _ = await listen(
            self._stack,
            admin_app(
                self._registry,
                llmservice=settings.llmservice,
                proxy=self._proxy,
                replicas=self.replicas,
                outcomes=self.outcomes,
                clock=self._clock,
            ),
            (host, admin_port),
            limits=ADMIN_CONNECTIONS,
        )
        self._apply(upstreams)
        if self._source is not None:
            following = asyncio.create_task(
                self._source.follow(lambda found: self._apply(merge(found, self._options)))
            )
            self._stack.push_async_callback(_cancel, following)
            self.vital = (following,)

    def _apply(self, upstreams: Sequence[Upstream]) -> None:
        added, left = self.replicas.set_upstreams(upstreams)
        self._prober.follow(added, left)
        _log.info(
            "upstreams",
            extra={"replicas": len(self.replicas), "added": len(added), "left": len(left)},
        )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
