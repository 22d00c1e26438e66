"""HTTP to the admin ports of routers and engines: scraping their state and pushing limits.

Another server than Goodput's engine has no admin port; its metrics page is scraped instead.

Responses are bounded in size and time, and redirects are not followed. The number of concurrent
requests is bounded over all services. A process that does not respond occupies one request slot for
a few seconds.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Final, TypeVar

import aiohttp
import msgspec

from goodput_core.contract import (
    PATH_CONTROL_LIMITS,
    PATH_CONTROL_STATE,
    PATH_GATE_STATE,
    QUERY_SECONDS_SINCE,
)
from goodput_core.control import Signal
from goodput_core.errors import SpecError
from goodput_core.replay_job import ABState
from goodput_core.spec.codec import decode
from goodput_core.units import NS_PER_S
from goodput_operator.control.readings import Scrape, decode_engine, decode_router
from goodput_operator.control.server_pages import MAX_PAGE_BYTES, decode_server
from goodput_operator.untrusted import decode_untrusted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from goodput_operator.control.readings import EngineScrape, RouterScrape, ScrapeTarget

__all__ = [
    "ScrapeError",
    "Scraper",
    "fetch",
    "push_limits",
    "read_gate_state",
    "session_for_pods",
]

_CONNECT_S: Final = 1.0
_TOTAL_S: Final = 3.0
_MAX_CONCURRENT: Final = 64
_KEEP_ALIVE_S: Final = 60.0
"""Longer than most intervals, so that connections are reused. Shorter than the 75 seconds after
which engines and routers close idle connections."""
_MAX_STATE_BYTES: Final = 1 << 20
_MAX_GATE_BYTES: Final = 4096
_PUSH_NS: Final = 5 * NS_PER_S
_MAX_ERROR_BYTES: Final = 4096
_Counters = TypeVar("_Counters")


class _Error(msgspec.Struct, frozen=True):
    message: str


class _RejectionBody(msgspec.Struct, frozen=True):
    error: _Error


_REJECTION: Final = msgspec.json.Decoder(_RejectionBody)


class ScrapeError(Exception):
    """Error of a process that sent no usable response; the message is for users."""


def session_for_pods() -> aiohttp.ClientSession:
    """Return a session that keeps its connections between intervals."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=_KEEP_ALIVE_S))


async def read_gate_state(session: aiohttp.ClientSession, url: str) -> ABState | None:
    """Return the progress that the pod of a gate's Job serves; None without a valid response.

    Args:
        session: HTTP session for pods.
        url: URL of its admin port.
    """
    limits = aiohttp.ClientTimeout(total=_TOTAL_S, connect=_CONNECT_S)
    try:
        body = await fetch(
            session, url + PATH_GATE_STATE, time_limits=limits, max_bytes=_MAX_GATE_BYTES
        )
        return decode(ABState, json.loads(body), "")
    except (ScrapeError, ValueError, RecursionError, SpecError):
        return None


class Scraper:
    """Scrapes the state of routers and engines.

    Args:
        session: HTTP session; its connection limit must be at least `concurrent`.
        concurrent: maximum number of concurrent requests.
        total_s: time limit of a complete response.

    Attributes:
        session: the HTTP session.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        concurrent: int = _MAX_CONCURRENT,
        total_s: float = _TOTAL_S,
    ) -> None:
        self.session: Final = session
        self._slots = asyncio.Semaphore(concurrent)
        self._time_limits = aiohttp.ClientTimeout(total=total_s, connect=_CONNECT_S)

    async def routers(
        self, targets: Sequence[ScrapeTarget], since: Mapping[str, int] | None = None
    ) -> tuple[RouterScrape, ...]:
        """Scrape routers concurrently.

        Args:
            targets: the routers.
            since: first second of the requested per-second counts by uid, on each router's clock. A
                router without an entry returns all its seconds. None to request no per-second
                counts.
        """

        def query(uid: str) -> dict[str, str] | None:
            return None if since is None else {QUERY_SECONDS_SINCE: str(since.get(uid, 0))}

        scrapes = (self._scrape(target, decode_router, query(target.uid)) for target in targets)
        return tuple(await asyncio.gather(*scrapes))

    async def engines(self, targets: Sequence[ScrapeTarget]) -> tuple[EngineScrape, ...]:
        """Scrape engines concurrently."""
        scrapes = (
            self._scrape_server(target) if target.foreign else self._scrape(target, decode_engine)
            for target in targets
        )
        return tuple(await asyncio.gather(*scrapes))

    async def _scrape_server(self, target: ScrapeTarget) -> EngineScrape:
        """Scrape the metrics page of another server."""
        if not target.url:
            return Scrape(target=target, signal=Signal.MISSING)
        return await self._fetch(target, target.url, decode_server, max_bytes=MAX_PAGE_BYTES)

    async def _scrape(
        self,
        target: ScrapeTarget,
        decode: Callable[[bytes], _Counters],
        query: dict[str, str] | None = None,
    ) -> Scrape[_Counters]:
        url = target.url.rstrip("/") + PATH_CONTROL_STATE
        return await self._fetch(target, url, decode, max_bytes=_MAX_STATE_BYTES, query=query)

    async def _fetch(
        self,
        target: ScrapeTarget,
        url: str,
        decode: Callable[[bytes], _Counters],
        *,
        max_bytes: int,
        query: dict[str, str] | None = None,
    ) -> Scrape[_Counters]:
        try:
            async with self._slots:
                body = await fetch(
                    self.session,
                    url,
                    time_limits=self._time_limits,
                    max_bytes=max_bytes,
                    params=query,
                )
        except ScrapeError as error:
            return Scrape(target=target, signal=Signal.FAILED, detail=str(error))
        try:
            return Scrape(target=target, signal=Signal.FRESH, counters=decode(body))
        except ValueError as error:
            detail = f"{url}: {error}" if target.foreign else str(error)
            return Scrape(target=target, signal=Signal.MISSING, detail=detail)


async def fetch(
    session: aiohttp.ClientSession,
    url: str,
    *,
    time_limits: aiohttp.ClientTimeout,
    max_bytes: int,
    params: dict[str, str] | None = None,
) -> bytes:
    """Return the body of a response with status 200.

    Args:
        session: HTTP session.
        url: requested URL.
        time_limits: time limits of the connection attempt and the complete response.
        max_bytes: maximum length of the body.
        params: query parameters.

    Raises:
        ScrapeError: there was no response in time, its status was not 200, or its body was longer.
    """
    try:
        async with session.get(
            url, params=params, timeout=time_limits, allow_redirects=False
        ) as response:
            if response.status != 200:
                raise ScrapeError(f"{url} returned status {response.status}")
            body = bytearray()
            while piece := await response.content.readany():
                body += piece
                if len(body) > max_bytes:
                    raise ScrapeError(f"{url} returned more than {max_bytes} bytes")
    except TimeoutError as error:
        raise ScrapeError(f"{url} did not respond within {time_limits.total:g} s") from error
    except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError) as error:
        # These errors quote the response, which is not trusted and must not appear in conditions.
        raise ScrapeError(f"{url} sent an invalid HTTP response") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        detail = str(error)[:200] or type(error).__name__
        raise ScrapeError(f"{url} cannot be reached: {detail}") from error
    return bytes(body)


async def push_limits(
    session: aiohttp.ClientSession,
    url: str,
    *,
    token: str,
    limits: Mapping[str, int],
    within_ns: int = _PUSH_NS,
) -> str:
    """Patch the limits of one engine, within five seconds.

    Args:
        session: HTTP session.
        url: URL of the engine's admin port.
        token: bearer token of that port.
        limits: request body, including `revision`.
        within_ns: time limit, if it is shorter than five seconds.

    Returns:
        A message for users if the push failed; empty on success.
    """
    seconds = min(within_ns, _PUSH_NS) / NS_PER_S
    try:
        async with session.patch(
            url.rstrip("/") + PATH_CONTROL_LIMITS,
            json=dict(limits),
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=seconds),
            allow_redirects=False,
        ) as response:
            if response.status < 300:
                return ""
            body = await response.content.read(_MAX_ERROR_BYTES)
            status = response.status
    except TimeoutError:
        return f"limits not pushed: no response within {seconds:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return f"limits not pushed: {error}"
    try:
        message = decode_untrusted(_REJECTION, body).error.message
    except ValueError:
        message = f"HTTP status {status}"
    return f"limits rejected: {message}"
