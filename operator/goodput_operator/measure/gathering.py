"""Asks many processes at once over HTTP, each for a short time, and trusts no answer.

Answers are bounded in size and time, redirects are not followed, and how many are asked at a time
is bounded over all services: one that hangs holds one place of many for seconds.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, TypeVar

import aiohttp

from goodput_core.contract import PATH_CONTROL_STATE
from goodput_core.control import Signal
from goodput_operator.measure.decoding import engine_counters, router_counters
from goodput_operator.measure.readings import EngineScrape, RouterScrape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from goodput_operator.measure.readings import Source

__all__ = ["Gatherer", "NoAnswerError", "fetch", "session_for_pods"]

_CONNECT_S: Final = 1.0
_TOTAL_S: Final = 3.0
_AT_ONCE: Final = 64
_KEPT_S: Final = 60.0
"""A connection outlasts an interval that takes longer than it should: a busy operator that had to
connect to every pod anew would be busier still. Shorter than the 75 seconds that engines and
routers wait."""
_MOST_BYTES: Final = 1 << 20
"""Of one process's state."""
_Counters = TypeVar("_Counters")


class NoAnswerError(Exception):
    """Nothing came that could be read; its text is for people."""


def session_for_pods() -> aiohttp.ClientSession:
    """A session whose connections are kept from one interval to the next."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=_KEPT_S))


class Gatherer:
    """Asks routers and engines for their state.

    Args:
        session: of HTTP; its own limit of connections must not be lower than `at_once`.
        at_once: how many are asked at a time.
        connect_s, total_s: for a connection, and for one answer as a whole.

    Attributes:
        session: of HTTP.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        at_once: int = _AT_ONCE,
        connect_s: float = _CONNECT_S,
        total_s: float = _TOTAL_S,
    ) -> None:
        self.session: Final = session
        self._places = asyncio.Semaphore(at_once)
        self._timeout = aiohttp.ClientTimeout(total=total_s, connect=connect_s)

    async def routers(self, sources: Sequence[Source]) -> tuple[RouterScrape, ...]:
        """Ask routers; none of them delays another."""
        told = await self._ask(sources, router_counters)
        return tuple(
            RouterScrape(source=source, signal=signal, counters=counters, detail=detail)
            for source, (signal, counters, detail) in zip(sources, told, strict=True)
        )

    async def engines(self, sources: Sequence[Source]) -> tuple[EngineScrape, ...]:
        """Ask engines; none of them delays another."""
        told = await self._ask(sources, engine_counters)
        return tuple(
            EngineScrape(source=source, signal=signal, counters=counters, detail=detail)
            for source, (signal, counters, detail) in zip(sources, told, strict=True)
        )

    async def _ask(
        self, sources: Sequence[Source], decode: Callable[[bytes], _Counters]
    ) -> list[tuple[Signal, _Counters | None, str]]:
        return await asyncio.gather(*(self._one(source, decode) for source in sources))

    async def _one(
        self, source: Source, decode: Callable[[bytes], _Counters]
    ) -> tuple[Signal, _Counters | None, str]:
        url = source.url.rstrip("/") + PATH_CONTROL_STATE
        try:
            async with self._places:
                body = await fetch(self.session, url, within=self._timeout, most_bytes=_MOST_BYTES)
        except NoAnswerError as error:
            return Signal.FAILED, None, str(error)
        try:
            return Signal.FRESH, decode(body), ""
        except ValueError as error:
            return Signal.MISSING, None, str(error)


async def fetch(
    session: aiohttp.ClientSession,
    url: str,
    *,
    within: aiohttp.ClientTimeout,
    most_bytes: int,
    params: dict[str, str] | None = None,
) -> bytes:
    """The body of one answer.

    Args:
        session: of HTTP.
        url: where.
        within: how long it may take.
        most_bytes: how long it may be.
        params: of the query.

    Raises:
        NoAnswerError: none came in time, none with status 200, or one that is too long.
    """
    try:
        async with session.get(
            url, params=params, timeout=within, allow_redirects=False
        ) as response:
            if response.status != 200:
                raise NoAnswerError(f"{url} answered {response.status}")
            body = bytearray()
            while piece := await response.content.readany():
                body += piece
                if len(body) > most_bytes:
                    raise NoAnswerError(f"{url} answered more than {most_bytes} bytes")
    except TimeoutError as error:
        raise NoAnswerError(f"{url} did not answer within {within.total:g} s") from error
    except (aiohttp.ClientResponseError, aiohttp.ClientPayloadError) as error:
        # Their words quote what came, which is not always meant for whoever reads a condition.
        raise NoAnswerError(f"{url} sent no answer of HTTP that can be read") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        detail = str(error)[:200] or type(error).__name__
        raise NoAnswerError(f"{url} cannot be asked: {detail}") from error
    return bytes(body)
