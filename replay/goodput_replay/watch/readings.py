"""Decode the state of a router and of engines, which is not trusted: bounded, and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import aiohttp
import msgspec
from yarl import URL

from goodput_core.contract import PATH_CONTROL_STATE, QUERY_SECONDS_SINCE

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EngineLoad", "ReadError", "ReplicaView", "RouterView", "StateReader"]

_MAX_BYTES: Final = 4 << 20
_TOTAL_S: Final = 3.0
_MAX_REPLICAS: Final = 256
_MAX_CLASSES: Final = 64
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
    classes: Annotated[dict[_Name, CountedSeconds], msgspec.Meta(max_length=_MAX_CLASSES)]


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
    replicas: Annotated[list[ReplicaView], msgspec.Meta(max_length=_MAX_REPLICAS)] = []
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
            raise ReadError(f"{self._url}: not the admin port of a router; see `goodput up`")
        if any(
            len(one.good) != len(one.total) or any(map(int.__gt__, one.good, one.total))
            for one in view.seconds.classes.values()
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
        try:
            async with self._session.get(
                url.joinpath(PATH_CONTROL_STATE.lstrip("/")).with_query(query),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=_TOTAL_S),
            ) as response:
                if response.status != 200:
                    raise ReadError(f"{url}: responded with status {response.status}")
                body = await response.content.read(_MAX_BYTES + 1)
                while len(body) <= _MAX_BYTES and (more := await response.content.readany()):
                    body += more
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            why = "no response in time" if isinstance(error, TimeoutError) else "not reachable"
            raise ReadError(f"{url}: {why}") from error
        if len(body) > _MAX_BYTES:
            raise ReadError(f"{url}: its state is larger than {_MAX_BYTES >> 20} MiB")
        return body


def _decode(decoder: msgspec.json.Decoder[_Content], body: bytes, url: URL) -> _Content:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise ReadError(f"{url}: not the state of a Goodput process") from error
