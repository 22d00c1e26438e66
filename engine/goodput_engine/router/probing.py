"""Probes every replica about once a second for readiness and load.

Responses of replicas are untrusted: they are bounded in size and time, and an invalid load report
is ignored. Each replica has a task of its own, so a slow replica does not delay the other probes.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import aiohttp

from goodput_core.contract import PATH_CONTROL_STATE, PATH_MODELS
from goodput_core.units import NS_PER_S
from goodput_engine.router.replicas import read_report
from goodput_engine.router.upstream_client import out_of_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from goodput_engine.router.replicas import Replica
    from goodput_engine.router.settings import ProbeSettings

__all__ = ["Prober"]

_MAX_STATE_BYTES: Final = 1 << 20
_NO_HEALTH_PATH: Final = frozenset({401, 403, 404, 405, 501})
"""Statuses of a server that runs, but does not report its health at this path without a key."""
_log: Final = logging.getLogger(__name__)


class Prober:
    """Probes replicas and stores the results in them.

    Args:
        session: the router's pool of connections.
        settings: intervals and limits.
        clock: returns monotonic nanoseconds.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        settings: ProbeSettings,
        clock: Callable[[], int],
    ) -> None:
        self._session = session
        self._settings = settings
        self._clock = clock
        self._timeout = aiohttp.ClientTimeout(total=settings.timeout_ns / NS_PER_S)
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._tasks: dict[Replica, asyncio.Task[None]] = {}

    def follow(self, added: Iterable[Replica], removed: Iterable[Replica]) -> None:
        """Start the probes of added replicas and stop those of removed replicas."""
        for replica in removed:
            task = self._tasks.pop(replica, None)
            if task is not None:
                task.cancel()
        for replica in added:
            self._tasks[replica] = asyncio.create_task(self._watch(replica))

    async def close(self) -> None:
        """Stop every probe."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, replica: Replica) -> None:
        """Probe a replica until cancelled."""
        interval_ns, retry_ns = self._settings.interval_ns, self._settings.retry_ns
        unanswered = 0
        pause_ns = retry_ns
        while True:
            replica.wake.clear()
            was_ready = replica.ready
            try:
                async with self._slots:
                    await self._probe(replica)
                unanswered = 0
            except _NotReadyError as error:
                replica.mark_not_ready(str(error))
            except (aiohttp.ClientConnectorError, ConnectionRefusedError) as error:
                if out_of_files(error):
                    # This process failed, not the replica.
                    await asyncio.sleep(interval_ns / NS_PER_S)
                    continue
                replica.mark_not_ready(f"cannot connect: {_reason(error)}")
            except Exception as error:  # noqa: BLE001 - the probes of a replica must never end
                # A busy replica may miss the time limit of one probe.
                unanswered += 1
                if unanswered >= self._settings.hung_after_probes:
                    replica.mark_hung(f"does not respond: {_reason(error)}")
            if replica.ready != was_ready:
                _log.info(
                    "replica ready" if replica.ready else "replica gone",
                    extra={"replica": replica.name, "detail": replica.detail},
                )
            if replica.ready and not unanswered:
                pause_ns = retry_ns
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval_ns / NS_PER_S):
                        await replica.wake.wait()
            else:
                # Ignore `wake` here, because failing requests would make this a busy loop.
                await asyncio.sleep(pause_ns / NS_PER_S)
                pause_ns = min(2 * pause_ns, interval_ns)

    async def _probe(self, replica: Replica) -> None:
        paths = replica.health_paths
        async with self._session.get(
            replica.base + paths[0], timeout=self._timeout, allow_redirects=False
        ) as response:
            await _read_bounded(response)
            requires_key = _requires_key(response.status, paths[0])
            if response.status in _NO_HEALTH_PATH and len(paths) > 1 and not requires_key:
                replica.health_paths = paths[1:]
            elif response.status != 200 and not requires_key:
                location = response.headers.get("Location")
                redirect = ""
                if location is not None:
                    redirect = f" (a redirect to {location[:200]!r}, not followed)"
                raise _NotReadyError(f"readiness probe got {response.status}{redirect}")
        if replica.health_paths is not paths:
            await self._probe(replica)
            return
        admin_url = replica.upstream.admin_url
        if admin_url is not None:
            await self._probe_load(replica, admin_url)
        replica.mark_ready()

    async def _probe_load(self, replica: Replica, admin_url: str) -> None:
        """Store the replica's load report, if it sends one.

        The time of the report is the start of this request. So a report in the header of a response
        that arrives meanwhile counts as newer.
        """
        requested_ns = self._clock()
        try:
            async with self._session.get(
                admin_url.rstrip("/") + PATH_CONTROL_STATE,
                timeout=self._timeout,
                allow_redirects=False,
            ) as response:
                body = await _read_bounded(response)
                if response.status != 200:
                    return
        except (aiohttp.ClientError, OSError) as error:
            _log.debug("load unknown", extra={"replica": replica.name, "detail": _reason(error)})
            return
        report = read_report(body)
        if report is None:
            _log.debug("load unknown", extra={"replica": replica.name, "detail": "invalid payload"})
            return
        replica.take_report(report, requested_ns, valid_ns=self._settings.report_valid_ns)


def _requires_key(status: int, path: str) -> bool:
    """True if a server that runs requires an API key for this path."""
    return path == PATH_MODELS and status in {401, 403}


class _NotReadyError(Exception):
    """The replica responded that it is not ready."""


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of a response, truncated if it is too long."""
    body = bytearray()
    while len(body) < _MAX_STATE_BYTES and (piece := await response.content.readany()):
        body += piece
    return bytes(body)


def _reason(error: BaseException) -> str:
    return str(error)[:200] or type(error).__name__
