"""The operator's HTTP port: liveness, readiness, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from goodput_core.contract import PATH_LIVE, PATH_METRICS, PATH_READY
from goodput_core.errors import UsageError
from goodput_operator.reconcile.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from goodput_operator.manager.health import Health
    from goodput_operator.reconcile.metrics import OperatorMetrics

__all__ = ["Probes"]


class Probes:
    """Serves the probes.

    Args:
        health: what they tell.
        metrics: the rest.
    """

    def __init__(self, health: Health, metrics: OperatorMetrics) -> None:
        self._health = health
        self._metrics = metrics
        app = web.Application()
        app.router.add_get(PATH_LIVE, self._live)
        app.router.add_get(PATH_READY, self._ready)
        app.router.add_get(PATH_METRICS, self._text)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, host: str, port: int) -> int:
        """Listen.

        Args:
            host: an address; `::`: every one, of both families where the kernel has both.
            port: 0 takes any free one, another one for each address.

        Returns:
            The port, where 0 was asked for.

        Raises:
            UsageError: the port is taken.
        """
        await self._runner.setup()
        # asyncio binds each family that there is for None, and IPv6 alone for `::`.
        site = web.TCPSite(self._runner, None if host == "::" else host, port)
        try:
            await site.start()
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be listened on: {error.strerror}; "
                "choose another with --probe-port"
            ) from error
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Listen no more."""
        await self._runner.cleanup()

    async def _live(self, _: web.Request) -> web.Response:
        report = self._health.report()
        return web.json_response(report, status=503 if report["problems"] else 200)

    async def _ready(self, _: web.Request) -> web.Response:
        return web.json_response(self._health.report(), status=200 if self._health.ready else 503)

    async def _text(self, _: web.Request) -> web.Response:
        report = self._health.report()
        body = self._metrics.text(leading=report["leading"], waiting=report["waiting"])
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
