"""The operator's HTTP port: liveness, readiness, metrics and the list of services.

While the process runs, a watch may end unnoticed, or a reconciliation may hang. Liveness therefore
checks three things: watches are renewed, no reconciliation takes too long, and reconciliations end
while services are due.

The ages of the last event and of the last reconciliation are reported but not checked, since an
idle cluster has neither events nor reconciliations. A long queue that moves is not a failure,
either: if many pods do not respond, reconciliations take seconds, and a new process would have the
same queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from goodput_core.contract import PATH_LIVE, PATH_METRICS, PATH_READY, PATH_SERVICES
from goodput_core.errors import UsageError
from goodput_core.units import NS_PER_S
from goodput_operator.kube.watch import WATCH_S
from goodput_operator.reconcile.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from goodput_operator.kube.fence import ClockSource, Fence
    from goodput_operator.reconcile.metrics import OperatorMetrics
    from goodput_operator.reconcile.work_queue import Workers

__all__ = ["Health", "ProbeServer"]

_MAX_WATCH_AGE_NS: Final = 2 * WATCH_S * NS_PER_S
_MAX_STUCK_NS: Final = 120 * NS_PER_S
_MAX_RECONCILIATION_NS: Final = 300 * NS_PER_S


class Health:
    """Health of the operator, from the times of watches, events and reconciliations.

    Args:
        clock: source of monotonic time.
        paths: watched API paths.
        fence: fence of writes, which is open while this operator leads.
        workers: workers that reconcile services.
    """

    def __init__(
        self, *, clock: ClockSource, paths: Iterable[str], fence: Fence, workers: Workers[Any]
    ) -> None:
        self._clock = clock
        self._started_ns = clock.now_ns()
        self._watched_ns: dict[str, int | None] = dict.fromkeys(paths)
        self._event_ns: int | None = None
        self._fence = fence
        self._workers = workers

    def note_watch(self, path: str) -> None:
        """Note that the API server accepted a list or watch of a path."""
        if path in self._watched_ns:
            self._watched_ns[path] = self._clock.now_ns()

    def note_event(self) -> None:
        """Note a watch event."""
        self._event_ns = self._clock.now_ns()

    @property
    def ready(self) -> bool:
        """True if all paths are being watched."""
        return None not in self._watched_ns.values()

    def problems(self) -> list[str]:
        """Return the reasons to restart the process, one sentence each."""
        now_ns = self._clock.now_ns()
        problems = []
        for path, watched_ns in self._watched_ns.items():
            age_ns = now_ns - (self._started_ns if watched_ns is None else watched_ns)
            if age_ns > _MAX_WATCH_AGE_NS:
                problems.append(f"no watch of {path} has started for {age_ns // NS_PER_S} s")
        if self._fence.open:
            stuck_ns = self._stuck_ns(now_ns)
            if stuck_ns > _MAX_STUCK_NS:
                problems.append(
                    "a service is due, and no reconciliation has ended for "
                    f"{stuck_ns // NS_PER_S} s"
                )
            running_ns = self._workers.queue.oldest_running_ns(now_ns)
            if running_ns > _MAX_RECONCILIATION_NS:
                problems.append(f"a reconciliation has taken {running_ns // NS_PER_S} s")
        return problems

    def _stuck_ns(self, now_ns: int) -> int:
        """Return how long a service has been due while no reconciliation ended."""
        overdue_ns = self._workers.queue.overdue_ns(now_ns)
        finished_ns = self._workers.finished_ns
        return overdue_ns if finished_ns is None else min(overdue_ns, now_ns - finished_ns)

    def report(self) -> dict[str, Any]:
        """Return the probes' JSON; ages are in seconds, None before the first such event."""
        now_ns = self._clock.now_ns()

        def age(at_ns: int | None) -> float | None:
            return None if at_ns is None else round((now_ns - at_ns) / NS_PER_S, 3)

        return {
            "problems": self.problems(),
            "ready": self.ready,
            "leading": self._fence.open,
            "event_age_seconds": age(self._event_ns),
            "reconciliation_age_seconds": age(self._workers.finished_ns),
            "watch_age_seconds": {path: age(at) for path, at in self._watched_ns.items()},
            "waiting": self._workers.queue.waiting(),
            "overdue_seconds": self._workers.queue.overdue_ns(now_ns) / NS_PER_S,
        }


class ProbeServer:
    """Serves the probes, the metrics and the list of services.

    Args:
        health: health of the operator.
        metrics: metrics of the operator.
        services: returns the list of services.
    """

    def __init__(
        self, health: Health, metrics: OperatorMetrics, services: Callable[[], dict[str, Any]]
    ) -> None:
        self._health = health
        self._metrics = metrics
        self._services = services
        app = web.Application()
        app.router.add_get(PATH_LIVE, self._live)
        app.router.add_get(PATH_READY, self._ready)
        app.router.add_get(PATH_METRICS, self._expose)
        app.router.add_get(PATH_SERVICES, self._list_services)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, host: str, port: int) -> int:
        """Listen on a port.

        Args:
            host: an address; `::` for all addresses, IPv4 included.
            port: 0 for any free port, which may then differ between IPv4 and IPv6.

        Returns:
            The bound port.

        Raises:
            UsageError: the port is in use.
        """
        await self._runner.setup()
        # asyncio binds IPv4 and IPv6 for None, but only IPv6 for `::`.
        site = web.TCPSite(self._runner, None if host == "::" else host, port)
        try:
            await site.start()
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be used: {error.strerror}; choose another with --probe-port"
            ) from error
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()

    async def _live(self, _: web.Request) -> web.Response:
        report = self._health.report()
        return web.json_response(report, status=503 if report["problems"] else 200)

    async def _ready(self, _: web.Request) -> web.Response:
        return web.json_response(self._health.report(), status=200 if self._health.ready else 503)

    async def _list_services(self, _: web.Request) -> web.Response:
        return web.json_response(self._services())

    async def _expose(self, _: web.Request) -> web.Response:
        report = self._health.report()
        body = self._metrics.expose(
            leading=report["leading"],
            waiting=report["waiting"],
            overdue_s=report["overdue_seconds"],
        )
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
