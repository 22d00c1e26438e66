"""A running router: its parts put together, its sockets, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, Self

from aiohttp import web
from prometheus_client import CollectorRegistry

from goodput_engine.listening import listen
from goodput_engine.router.apps import admin_app, serving_app
from goodput_engine.router.errors import RetryReason
from goodput_engine.router.fleet import Fleet
from goodput_engine.router.ledger import Ledger
from goodput_engine.router.probing import Prober
from goodput_engine.router.relay import Relay
from goodput_engine.router.sending import Sender
from goodput_engine.router.upstreams import merge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from goodput_engine.router.settings import RouterSettings
    from goodput_engine.router.upstreams import Upstream, UpstreamSource

__all__ = ["RouterService"]

# After the grace period, for the last error events to be written.
_LAST_WORDS_S: Final = 1.0
_LOOK_S: Final = 0.05
_log: Final = logging.getLogger(__name__)


class RouterService:
    """A router that listens for as long as the context lasts.

    Args:
        settings: classes, policy, time-outs and bounds.
        upstreams: replicas that were named once and for all.
        source: of replicas that are followed while it runs.
        host: address of both ports.
        port, admin_port: 0 takes a free one.
        clock: nanoseconds, monotonic.

    Attributes:
        vital: tasks that go on for as long as it listens; without one it is out of date.

    Raises:
        UsageError: a port cannot be listened on, or a name is given twice.
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
        self.fleet: Final = Fleet(settings.policy)
        self._registry = CollectorRegistry()
        self.ledger: Final = Ledger(
            self._registry, llmservice=settings.llmservice, classes=settings.classes
        )
        self.vital: tuple[asyncio.Task[None], ...] = ()
        self.url = ""
        self.admin_url = ""
        self._relay: Relay
        self._prober: Prober
        self._serving: web.AppRunner

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
        """Take leave of clients, take nothing new, let what runs finish, and end what is left.

        A client that keeps a connection may be sending just now, or about to once its answer has
        ended: each connection is good for one answer more, which says that it is the last. One
        that nobody uses for `parting_ns` is closed just so.

        Args:
            grace_ns: how long it may take.
            hurry: ends the grace period when it is set.
        """
        hurry = hurry or asyncio.Event()
        server, parting_ns = self._serving.server, self._settings.timeouts.parting_ns
        assert server is not None, "it listens for as long as the context lasts"
        self._relay.take_leave(server.connections)
        _log.info("draining", extra={"in_flight": self.ledger.in_flight})
        began_ns = quiet_ns = now_ns = self._clock()
        while now_ns < began_ns + grace_ns and not hurry.is_set():
            self._relay.refusing = now_ns >= began_ns + parting_ns
            if self.ledger.in_flight:
                quiet_ns = now_ns
            elif not server.connections or now_ns >= quiet_ns + parting_ns:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await hurry.wait()
            now_ns = self._clock()
        self._relay.take_leave(())
        self._relay.refusing = True
        cut_short = self.ledger.in_flight
        if cut_short:
            self._relay.stop_all()
            try:
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self.ledger.idle.wait()
            except TimeoutError:
                pass
        _log.info("stopped", extra={"cut_short": cut_short})

    async def _start(self) -> None:
        settings = self._settings
        listed = await self._source.first() if self._source is not None else ()
        upstreams = merge(listed, self._options)
        sender = Sender(settings.timeouts, lambda: self.ledger.retry(RetryReason.STALE_CONNECTION))
        self._stack.push_async_callback(sender.close)
        self._prober = Prober(sender.session, settings.probe, self._clock)
        self._stack.push_async_callback(self._prober.close)
        self._relay = Relay(
            settings, fleet=self.fleet, sender=sender, ledger=self.ledger, clock=self._clock
        )
        host, port, admin_port = self._address
        # Bodies pass as they are, and a client that leaves ends its request at once.
        self._serving = web.AppRunner(
            serving_app(self._relay, self.fleet),
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,
            shutdown_timeout=1.0,
        )
        self.url = await listen(self._stack, self._serving, host, port)
        self.admin_url = await listen(
            self._stack,
            web.AppRunner(
                admin_app(
                    self._registry,
                    llmservice=settings.llmservice,
                    relay=self._relay,
                    fleet=self.fleet,
                    ledger=self.ledger,
                    clock=self._clock,
                ),
                access_log=None,
                shutdown_timeout=1.0,
            ),
            host,
            admin_port,
        )
        self._apply(upstreams)
        if self._source is not None:
            following = asyncio.create_task(
                self._source.follow(lambda found: self._apply(merge(found, self._options)))
            )
            self._stack.push_async_callback(_cancel, following)
            self.vital = (following,)

    def _apply(self, upstreams: Sequence[Upstream]) -> None:
        added, left = self.fleet.set_upstreams(upstreams)
        self._prober.follow(added, left)
        _log.info(
            "upstreams",
            extra={"replicas": len(self.fleet), "added": len(added), "left": len(left)},
        )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
