"""Decode the state of a router and of engines, which is not trusted: bounded, and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import aiohttp
import msgspec
from yarl import URL

from goodput_core.contract import PATH_CONTROL_STATE, QUERY_SECONDS_SINCE

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MAX_CLASSES",
    "MAX_REPLICAS",
    "EngineLoad",
    "ReadError",
    "ReplicaView",
    "RouterView",
    "StateReader",
    "read_response",
]

_MAX_BYTES: Final = 4 << 20
_TOTAL_S: Final = 3.0
MAX_REPLICAS: Final = 2_000
"""Largest number of replicas: twice the maximum of a service, since some of them may drain."""
MAX_CLASSES: Final = 64
"""Largest number of classes that are shown."""
_MAX_SECONDS: Final = 3700
_MAX_NAME: Final = 256

_Content = TypeVar("_Content")
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Name = Annotated[str, msgspec.Meta(max_length=_MAX_NAME)]
_Counts = Annotated[list[_Count], msgspec.Meta(max_length=_MAX_SECONDS)]


class ReadError(Exception):
    """A process that sent no usable state; the message is a sentence for users."""


class CountedSeconds(msgspec.Struct, frozen=True):
    """Judged requests of a class by second."""

    good: _Counts
    total: _Counts


class RouterSeconds(msgspec.Struct, frozen=True):
    """Judged requests from `first_s` up to, but excluding, `end_s` of the router's clock."""

    first_s: int
    end_s: int
    classes: Annotated[dict[_Name, CountedSeconds], msgspec.Meta(max_length=MAX_CLASSES)]


class ReplicaView(msgspec.Struct, frozen=True):
    """A replica as the router sees it; a load is null until it was reported."""

    name: _Name
    admin_url: Annotated[str, msgspec.Meta(max_length=2048)] | None = None
    ready: bool = False
    draining: bool = False
    saturated: bool = False
    detail: Annotated[str, msgspec.Meta(max_length=2048)] = ""
    in_flight: _Count = 0
    running: _Count | None = None
    waiting: _Count | None = None
    kv_free_blocks: _Count | None = None
    kv_total_blocks: _Count | None = None


class RouterView(msgspec.Struct, frozen=True):
    """The state of a router."""

    role: str
    epoch: _Name
    llmservice: _Name = ""
    policy: _Name = ""
    draining: bool = False
    in_flight: _Count = 0
    replicas: Annotated[list[ReplicaView], msgspec.Meta(max_length=MAX_REPLICAS)] = []
    seconds: RouterSeconds | None = None


class EngineLoad(msgspec.Struct, frozen=True):
    """The limits and the load of an engine."""

    token_budget: _Count = 0
    safety_percent: _Count = 0
    max_num_seqs: _Count = 0
    preemptions: _Count = 0


_router: Final = msgspec.json.Decoder(RouterView)
_engine: Final = msgspec.json.Decoder(EngineLoad)


class StateReader:
    """Reads states over HTTP.

    Args:
        session: HTTP session.
        url: URL of the router's admin port.
    """

    def __init__(self, session: aiohttp.ClientSession, url: URL) -> None:
        self._session = session
        self._url = url

    async def router(self, since_s: int) -> RouterView:
        """Return the state of the router, with its seconds from `since_s` on.

        Raises:
            ReadError: no response, or not that of a router.
        """
        body = await self._read(self._url, {QUERY_SECONDS_SINCE: str(since_s)})
        view = _decode(_router, body, self._url)
        if view.role != "router" or view.seconds is None:
            raise ReadError(f"{self._url}: not the admin port of a router")
        seconds = view.seconds
        if any(
            not seconds.end_s - seconds.first_s == len(one.good) == len(one.total)
            or any(map(int.__gt__, one.good, one.total))
            for one in seconds.classes.values()
        ):
            raise ReadError(f"{self._url}: the counts of its seconds are not consistent")
        return view

    async def engine(self, replica: ReplicaView) -> EngineLoad | None:
        """Return the load of an engine; None if it cannot be read.

        Only an engine on the router's host is read, because the response of a router must not
        direct requests to other hosts.
        """
        try:
            url = URL(replica.admin_url or "")
            if url.scheme != "http" or url.host != self._url.host:
                return None
            return _decode(_engine, await self._read(url, {}), url)
        except (ReadError, ValueError):
            return None

    async def _read(self, url: URL, query: Mapping[str, str]) -> bytes:
        path = url.joinpath(PATH_CONTROL_STATE.lstrip("/"))
        try:
            _, body = await read_response(self._session, path.with_query(query))
        except ReadError as error:
            raise ReadError(f"{url}: {error}") from error
        return body


async def read_response(
    session: aiohttp.ClientSession,
    url: URL,
    *,
    headers: Mapping[str, str] | None = None,
    total_s: float = _TOTAL_S,
    max_bytes: int = _MAX_BYTES,
) -> tuple[str, bytes]:
    """Return the content type and the body of a response with status 200.

    Args:
        session: HTTP session.
        url: requested URL; redirects are not followed.
        headers: headers of the request.
        total_s: time limit of the complete response.
        max_bytes: maximum length of the body, which is not read any further.

    Raises:
        ReadError: there was no such response; the message is a clause without the URL.
    """
    try:
        async with session.get(
            url,
            headers=headers,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=total_s),
        ) as response:
            if response.status != 200:
                raise ReadError(f"responded with status {response.status}")
            body = bytearray()
            while len(body) <= max_bytes and (more := await response.content.readany()):
                body += more
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise ReadError(_describe(error, total_s)) from error
    if len(body) > max_bytes:
        raise ReadError(f"its response is larger than {max_bytes >> 20} MiB")
    return response.content_type, bytes(body)


def _describe(error: Exception, total_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no response within {total_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not trusted"
    return "not reachable"


def _decode(decoder: msgspec.json.Decoder[_Content], body: bytes, url: URL) -> _Content:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise ReadError(f"{url}: not the state of a Goodput process") from error
