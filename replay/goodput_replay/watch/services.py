"""The pages of all services of an operator, each as the page of one service.

The operator lists its services with the addresses of their pods. A service is read only while its
page is open, because routers keep the counts of the last hour themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from goodput_core.contract import PATH_SERVICES
from goodput_core.errors import SpecError
from goodput_core.slo.attainment import SecondCounts
from goodput_core.spec.codec import decode
from goodput_core.spec.llmservice import SLOSpec
from goodput_replay.live.page import LIVE_SCRIPTS
from goodput_replay.live.server import LiveServer, protect
from goodput_replay.report.page import PageData, policy, render_page
from goodput_replay.runs.slo import SLOClasses, slo_classes
from goodput_replay.watch.history import ObservedChange, ServiceHistory, make_sample
from goodput_replay.watch.page import WatchPage
from goodput_replay.watch.readings import (
    MAX_REPLICAS,
    EngineLoad,
    ReadError,
    ReplicaView,
    RouterView,
    StateReader,
    read_response,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["CombinedHistory", "ServicePages", "merge_routers"]

_EVERY_S: Final = 1.0
_LISTED_S: Final = 5.0
_UNSEEN_S: Final = 60.0
"""A service is read for this long after its page was last requested."""
_MAX_SERVICES: Final = 2_000
_MAX_PODS: Final = 2_000
_MAX_READ: Final = 256
"""Routers and engines of one service that are read."""
_MAX_BYTES: Final = 32 << 20

_Text = Annotated[str, msgspec.Meta(max_length=2048)]
_Addresses = Annotated[dict[_Text, _Text], msgspec.Meta(max_length=_MAX_PODS)]


class _ListedDecision(msgspec.Struct, frozen=True):
    at: _Text
    knob: _Text
    reason: _Text
    message: _Text
    applied: bool = True


class _ListedService(msgspec.Struct, frozen=True):
    namespace: _Text
    name: _Text
    uid: _Text = ""
    slo: Any = None
    summary: Annotated[dict[_Text, _Text], msgspec.Meta(max_length=16)] = {}
    decisions: Annotated[list[_ListedDecision], msgspec.Meta(max_length=64)] = []
    routers: _Addresses = {}
    engines: _Addresses = {}


class _Listing(msgspec.Struct, frozen=True):
    services: Annotated[list[_ListedService], msgspec.Meta(max_length=_MAX_SERVICES)]


_LISTING: Final = msgspec.json.Decoder(_Listing)


class CombinedHistory(ServiceHistory):
    """The readings of a service with several routers, whose clocks differ.

    The counts are added up by their distance from the latest reading, so that the sums are exact
    to the second or so between the readings of two routers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.routers: dict[str, ServiceHistory] = {}

    def next_second(self, router: str) -> int:
        """Return the first second of a router's clock that was not read yet."""
        history = self.routers.get(router)
        return 0 if history is None else history.next_s

    def add_readings(
        self, routers: Mapping[str, RouterView], engines: Mapping[str, EngineLoad], at_s: float
    ) -> RouterView:
        """Add the readings of all routers, and return their merged state.

        Args:
            routers: states of the routers by name, at least one. The counts of other routers are
                dropped.
            engines: load of the engines that were read, by name.
            at_s: Unix time of the readings.
        """
        self.routers = {name: self.routers.get(name) or ServiceHistory() for name in routers}
        for name, view in routers.items():
            self.routers[name].add_seconds(view)
        merged = merge_routers(list(routers.values()))
        self.samples.append(make_sample(merged, engines, at_s))
        return merged

    def counts(self) -> dict[str, SecondCounts]:
        """Return the judged requests of each class by second, up to the last readings."""
        found = [history.counts() for history in self.routers.values()]
        length = max((len(one.total) for counts in found for one in counts.values()), default=0)
        sums: dict[str, SecondCounts] = {}
        for name in dict.fromkeys(name for counts in found for name in counts):
            columns: list[list[int]] = []
            for field in ("good", "total"):
                column = [0] * length
                for counts in found:
                    values = getattr(counts[name], field) if name in counts else ()
                    for place, value in enumerate(values, start=length - len(values)):
                        column[place] += value
                columns.append(column)
            sums[name] = SecondCounts(good=columns[0], total=columns[1])
        return sums


def merge_routers(views: Sequence[RouterView]) -> RouterView:
    """Return the state of all routers as that of one.

    A replica is ready if all routers send it requests. At most `MAX_REPLICAS` are returned.

    Args:
        views: states of the routers, at least one.
    """
    replicas: dict[str, list[ReplicaView]] = {}
    for view in views:
        for one in view.replicas:
            replicas.setdefault(one.name, []).append(one)
    merged = [
        msgspec.structs.replace(
            seen[0],
            ready=all(one.ready for one in seen),
            in_flight=sum(one.in_flight for one in seen),
        )
        for seen in islice(replicas.values(), MAX_REPLICAS)
    ]
    return msgspec.structs.replace(
        views[0],
        replicas=merged,
        in_flight=sum(view.in_flight for view in views),
        draining=all(view.draining for view in views),
    )


class _WatchedService:
    """The page of one service, which is read while it is open."""

    def __init__(self, listed: _ListedService) -> None:
        self.uid = listed.uid
        self.history = CombinedHistory()
        self.page = WatchPage(self.history, _slo(listed))
        self.server = LiveServer(LIVE_SCRIPTS)
        self.server.begin(self.page)
        self.seen_s = 0.0
        self.starting = asyncio.Lock()
        self.task: asyncio.Task[None] | None = None

    async def read(self, session: aiohttp.ClientSession, listed: _ListedService) -> None:
        """Read all routers and engines once."""
        if listed.uid != self.uid:  # deleted, and created again
            self.uid, self.history = listed.uid, CombinedHistory()
            self.page.restart(self.history)
        self.page.set_slo(_slo(listed))
        self.history.changes = deque(_changes(listed.decisions))
        routers = dict(list(listed.routers.items())[:_MAX_READ])
        states = await asyncio.gather(
            *(self._read_router(session, name, url) for name, url in routers.items())
        )
        views = {
            name: state
            for name, state in zip(routers, states, strict=True)
            if isinstance(state, RouterView)
        }
        problems = [str(state) for state in states if isinstance(state, ReadError)]
        if not routers:
            problems = ["no router of the service is ready"]
        self.page.problem = "; ".join(problems)[:2_000]
        if not views:
            return
        engines = await self._read_engines(session, listed)
        self.page.router = self.history.add_readings(views, engines, time.time())
        self.page.engines = engines

    async def _read_router(
        self, session: aiohttp.ClientSession, name: str, url: str
    ) -> RouterView | ReadError:
        try:
            return await StateReader(session, URL(url)).router(self.history.next_second(name))
        except (ReadError, ValueError) as error:
            return error if isinstance(error, ReadError) else ReadError(f"{name}: {error}")

    async def _read_engines(
        self, session: aiohttp.ClientSession, listed: _ListedService
    ) -> dict[str, EngineLoad]:
        engines = list(listed.engines.items())[:_MAX_READ]
        loads = await asyncio.gather(
            *(
                StateReader(session, URL(url)).engine(ReplicaView(name=name, admin_url=url))
                for name, url in engines
            )
        )
        return {
            name: load for (name, _), load in zip(engines, loads, strict=True) if load is not None
        }


class ServicePages:
    """Serves a list of services, and a page for each.

    Args:
        session: HTTP session.
        operator: URL of the operator's port.
        hosts: names of this server besides those of the loopback address.

    Attributes:
        app: the application.
    """

    def __init__(
        self, session: aiohttp.ClientSession, operator: URL, hosts: Iterable[str] = ()
    ) -> None:
        self._session = session
        self._url = operator.with_path(PATH_SERVICES)
        self._listing: dict[tuple[str, str], _ListedService] = {}
        self._listed_s = float("-inf")
        self._listing_lock = asyncio.Lock()
        self._watched: dict[tuple[str, str], _WatchedService] = {}
        self._policy = f"{policy((), live=True)}; frame-ancestors 'none'"
        self.app = web.Application(middlewares=[protect(frozenset(hosts))])
        self.app.add_routes(
            [
                web.get("/", self._get_list),
                web.get("/{namespace}/{name}/", self._get_page),
                web.get("/{namespace}/{name}/events", self._get_events),
            ]
        )

    async def read_listing(self) -> None:
        """Read the list of services again if it is not recent.

        Raises:
            ReadError: the operator does not respond with a list.
        """
        async with self._listing_lock:
            now_s = time.monotonic()
            if now_s - self._listed_s < _LISTED_S:
                return
            try:
                _, body = await read_response(self._session, self._url, max_bytes=_MAX_BYTES)
                listing = _LISTING.decode(body)
            except ReadError as error:
                raise ReadError(f"{self._url}: {error}") from error
            except (ValueError, RecursionError) as error:
                raise ReadError(f"{self._url}: not the services of an operator") from error
            self._listing = {(one.namespace, one.name): one for one in listing.services}
            self._listed_s = now_s

    async def close(self) -> None:
        """Stop reading."""
        tasks = [one.task for one in self._watched.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _get_list(self, _: web.Request) -> web.Response:
        problem = ""
        try:
            await self.read_listing()
        except ReadError as error:
            problem = str(error)
        context: dict[str, object] = {
            "services": list(self._listing.values()),
            "problem": problem,
        }
        html = render_page(
            "services.html.j2",
            title="services",
            data=PageData(groups=[], figures=[]),
            context=context,
            scripts=(),
            live=True,
        )
        return web.Response(
            text=html, content_type="text/html", headers={"Content-Security-Policy": self._policy}
        )

    async def _get_page(self, request: web.Request) -> web.Response:
        return await (await self._watch(request)).server.get_page(request)

    async def _get_events(self, request: web.Request) -> web.StreamResponse:
        return await (await self._watch(request)).server.get_events(request)

    async def _watch(self, request: web.Request) -> _WatchedService:
        """Return the service of a request, whose reading has begun."""
        key = (request.match_info["namespace"], request.match_info["name"])
        # An outage of the operator leaves the addresses that are known.
        with suppress(ReadError):
            await self.read_listing()
        listed = self._listing.get(key)
        if listed is None:
            raise web.HTTPNotFound(text="the operator has no service of this name\n")
        watched = self._watched.get(key)
        if watched is None:
            watched = self._watched[key] = _WatchedService(listed)
        watched.seen_s = time.monotonic()
        async with watched.starting:
            if watched.task is None or watched.task.done():
                await watched.read(self._session, listed)
                watched.task = asyncio.create_task(self._read_while_open(key, watched))
        return watched

    async def _read_while_open(self, key: tuple[str, str], watched: _WatchedService) -> None:
        while watched.server.clients or time.monotonic() - watched.seen_s < _UNSEEN_S:
            await asyncio.sleep(_EVERY_S)
            with suppress(ReadError):
                await self.read_listing()
            listed = self._listing.get(key)
            if listed is None:
                watched.page.problem = "the operator does not list the service any more"
            else:
                await watched.read(self._session, listed)
        self._watched.pop(key, None)


def _slo(listed: _ListedService) -> SLOClasses:
    """Return the classes of a service; none if its spec is invalid."""
    try:
        return slo_classes(decode(SLOSpec, listed.slo, "spec.slo"))
    except SpecError:
        return SLOClasses()


def _changes(decisions: Iterable[_ListedDecision]) -> list[ObservedChange]:
    changes = []
    for one in decisions:
        with suppress(ValueError):
            changes.append(
                ObservedChange(
                    at_s=datetime.fromisoformat(one.at).timestamp(),
                    knob=one.knob,
                    reason=one.reason,
                    message=one.message,
                    applied=one.applied,
                )
            )
    return changes
