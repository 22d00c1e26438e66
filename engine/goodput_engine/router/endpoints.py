"""Replicas from the EndpointSlices of a headless Service: a list, then a watch, as plain HTTP.

Without the API server, the router keeps the last known replicas, and its probes detect failed ones.
After each failure the list is retried, with increasing pauses.

Pods of engines that are not ready are included, because a probe detects their readiness sooner than
the API server. Terminating pods are excluded, and so are other servers that are not ready.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import ssl
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from goodput_core.contract import PORT_NAME_ADMIN, PORT_NAME_SERVING
from goodput_core.errors import GoodputError, UsageError
from goodput_core.units import NS_PER_S
from goodput_engine.router.upstreams import MAX_UPSTREAMS, Upstream

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence

__all__ = [
    "APIServer",
    "APIServerError",
    "EndpointSlice",
    "EndpointsWatch",
    "WatchIntervals",
    "in_cluster",
    "parse_service",
    "upstreams_of",
]

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MAX_TOKEN_BYTES: Final = 64 << 10
_MAX_RESPONSE_BYTES: Final = 16 << 20
_MAX_SHOWN: Final = 300
_PAGE: Final = 500
_MAX_SLICES: Final = 1_000
_NAME: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SERVICE: Final = re.compile(rf"({_NAME})/({_NAME})")
_log: Final = logging.getLogger(__name__)


class APIServerError(GoodputError):
    """The API server sent no usable response.

    Args:
        message: one sentence.
        expired: the resource version expired (410), so a new list is needed.
    """

    def __init__(self, message: str, *, expired: bool = False) -> None:
        self.expired = expired
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class APIServer:
    """Address and credentials of the API server; responses are bounded in size and time.

    Args:
        url: base URL of the API server.
        token_file: file with the bearer token, read for each request because the token changes.
        ca_file: file with the certificate authorities; None for the system's authorities.
    """

    url: str
    token_file: Path
    ca_file: Path | None

    def session(self) -> aiohttp.ClientSession:
        """Return a new pool of connections with the current certificates.

        Raises:
            APIServerError: the certificates cannot be read.
        """
        secure: ssl.SSLContext | bool = True
        if self.ca_file is not None:
            try:
                secure = ssl.create_default_context(cafile=str(self.ca_file))
            except OSError as error:
                raise APIServerError(f"{self.ca_file}: cannot be read: {error}") from error
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=secure))

    async def get(
        self,
        session: aiohttp.ClientSession,
        path: str,
        query: Mapping[str, str],
        *,
        timeout_s: float,
    ) -> bytes:
        """Return the body of one response.

        Raises:
            APIServerError: no response, an error status, or a body that exceeds the limit.
        """
        limits = aiohttp.ClientTimeout(total=timeout_s)
        async with self._response(session, path, query, limits) as response:
            return await _read_body(response)

    async def lines(
        self,
        session: aiohttp.ClientSession,
        path: str,
        query: Mapping[str, str],
        *,
        timeout_s: float,
        silence_s: float,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a watch until the server ends it.

        Args:
            session: a pool of connections, made by `session`.
            path: path of the request.
            query: query of the request.
            timeout_s: time limit of the complete response.
            silence_s: maximum time without data.

        Raises:
            APIServerError: the watch failed, or a line exceeds the limit.
        """
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_read=silence_s)
        async with self._response(session, path, query, limits) as response:
            buffer = bytearray()
            while piece := await response.content.readany():
                buffer += piece
                *complete, buffer = buffer.split(b"\n")
                for line in complete:
                    yield bytes(line)
                if len(buffer) > _MAX_RESPONSE_BYTES:
                    limit_mib = _MAX_RESPONSE_BYTES >> 20
                    raise APIServerError(f"{path}: a line is longer than {limit_mib} MiB")

    @asynccontextmanager
    async def _response(
        self,
        session: aiohttp.ClientSession,
        path: str,
        query: Mapping[str, str],
        limits: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a response with status 200; raise APIServerError for any failure until it closes."""
        try:
            async with session.get(
                self.url + path, params=query, headers=self._headers(), timeout=limits
            ) as response:
                if response.status != 200:
                    raise _status_error(response, await _read_body(response))
                yield response
        except (aiohttp.ClientError, OSError) as error:  # a time-out is an OSError
            detail = str(error)[:_MAX_SHOWN] or type(error).__name__
            raise APIServerError(f"{path}: {detail}") from error

    def _headers(self) -> dict[str, str]:
        try:
            with self.token_file.open("rb") as file:
                token = file.read(_MAX_TOKEN_BYTES).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise APIServerError(f"{self.token_file}: cannot be read: {error}") from error
        return {"Authorization": f"Bearer {token}", "Accept": "application/json"}


def in_cluster(environment: Mapping[str, str]) -> APIServer:
    """Return the API server of the cluster that this pod runs in.

    Raises:
        UsageError: this process does not run in a pod.
    """
    host = environment.get("KUBERNETES_SERVICE_HOST")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise UsageError(
            "--endpoints: KUBERNETES_SERVICE_HOST is not set, so this is not a pod; outside a pod, "
            "name replicas with --upstreams FILE or --upstream"
        )
    url_host = f"[{host}]" if ":" in host else host
    url = f"https://{url_host}:{port}"
    return APIServer(url=url, token_file=_ACCOUNT / "token", ca_file=_ACCOUNT / "ca.crt")


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    while piece := await response.content.readany():
        body += piece
        if len(body) > _MAX_RESPONSE_BYTES:
            limit_mib = _MAX_RESPONSE_BYTES >> 20
            raise APIServerError(f"{response.url.path}: the body is larger than {limit_mib} MiB")
    return bytes(body)


class _Status(msgspec.Struct, frozen=True):
    """A `Status` object, which the API server sends in place of a result."""

    code: int = 0
    message: str = ""


_STATUS: Final = msgspec.json.Decoder(_Status)


def _status_error(response: aiohttp.ClientResponse, body: bytes) -> APIServerError:
    try:
        detail = _STATUS.decode(body).message
    except (msgspec.MsgspecError, ValueError, RecursionError):
        detail = body.decode(errors="replace")
    message = f"{response.url.path}: {response.status} {' '.join(detail.split())[:_MAX_SHOWN]}"
    return APIServerError(message, expired=response.status == 410)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchIntervals:
    """Time limits of lists and watches, in nanoseconds.

    Args:
        request_ns: time limit of one page of a list.
        watch_ns: time after which the API server ends a watch; the next watch continues at the last
            version of this watch.
        silence_ns: maximum time without an event in a watch. The API server sends a bookmark
            about once a minute, so a longer silence means a dead connection.
        resync_ns: time after which a new list replaces the watched state.
        retry_ns: pause after the first failure; the pause doubles after each further failure.
        max_retry_ns: maximum pause.
    """

    request_ns: int = 15 * NS_PER_S
    watch_ns: int = 240 * NS_PER_S
    silence_ns: int = 90 * NS_PER_S
    resync_ns: int = 900 * NS_PER_S
    retry_ns: int = NS_PER_S // 2
    max_retry_ns: int = 30 * NS_PER_S


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None
    terminating: bool | None = None


class _TargetRef(msgspec.Struct, frozen=True):
    name: str = ""


class _SliceEndpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: tuple[str, ...] = ()
    conditions: _Conditions = _Conditions()
    target_ref: _TargetRef | None = None


class _Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of an EndpointSlice that this module uses."""

    metadata: _Metadata = _Metadata()
    address_type: str = ""
    endpoints: tuple[_SliceEndpoint, ...] | None = None
    ports: tuple[_Port, ...] | None = None


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    next_page: str = msgspec.field(default="", name="continue")


class _SliceList(msgspec.Struct, frozen=True):
    metadata: _ListMeta = _ListMeta()
    items: list[EndpointSlice] | None = None


class _WatchEvent(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


_LIST: Final = msgspec.json.Decoder(_SliceList)
_EVENT: Final = msgspec.json.Decoder(_WatchEvent)
_SLICE: Final = msgspec.json.Decoder(EndpointSlice)
# msgspec raises UnicodeDecodeError for invalid UTF-8 and RecursionError for deep nesting.
_FAILURES: Final = (APIServerError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class EndpointsWatch:
    """Watches the replicas behind one Service.

    Args:
        api: the API server.
        namespace, service: namespace and name of the headless Service.
        rng: source of the random jitter that spreads the retries of many routers.
        clock: returns monotonic nanoseconds.
        intervals: time limits.
    """

    def __init__(
        self,
        api: APIServer,
        *,
        namespace: str,
        service: str,
        rng: random.Random,
        clock: Callable[[], int],
        intervals: WatchIntervals = WatchIntervals(),
    ) -> None:
        self._api = api
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._query = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._rng = rng
        self._clock = clock
        self._intervals = intervals
        self._slices: dict[str, EndpointSlice] = {}  # by name
        self._version = ""  # resource version at which a watch continues; empty to list first
        self._listed_ns = 0
        self._failures = 0
        self._problem = ""

    async def first(self) -> Sequence[Upstream]:
        """Return the replicas of the first list that succeeds; retry until then."""
        while not self._version:
            try:
                async with self._api.session() as session:
                    await self._list(session)
            except _FAILURES as error:
                await self._recover(error)
        return upstreams_of(self._slices.values())

    async def follow(self, apply: Callable[[Sequence[Upstream]], None]) -> None:
        """Call `apply` with the replicas after every change, until cancelled."""
        published = upstreams_of(self._slices.values())

        def publish() -> None:
            nonlocal published
            current = upstreams_of(self._slices.values())
            if current != published:
                published = current
                apply(current)

        while True:
            try:
                async with self._api.session() as session:
                    if not self._version:
                        await self._list(session)
                        publish()
                    while self._clock() - self._listed_ns < self._intervals.resync_ns:
                        await self._watch(session, publish)
                self._version = ""
            except _FAILURES as error:
                self._version = ""
                await self._recover(error)

    async def _recover(self, error: Exception) -> None:
        if isinstance(error, APIServerError) and error.expired:
            # An expired version is not a failure; a new list follows.
            await asyncio.sleep(self._intervals.retry_ns * self._rng.random() / NS_PER_S)
            return
        if self._problem != str(error):
            self._problem = str(error)
            _log.warning("endpoints not updated", extra={"detail": self._problem})
        pause_ns = min(
            self._intervals.max_retry_ns, self._intervals.retry_ns << min(self._failures, 16)
        )
        self._failures += 1
        await asyncio.sleep(pause_ns * self._rng.uniform(0.5, 1.0) / NS_PER_S)

    async def _list(self, session: aiohttp.ClientSession) -> None:
        slices: dict[str, EndpointSlice] = {}
        page = ""
        while True:
            query = {**self._query, "limit": str(_PAGE), **({"continue": page} if page else {})}
            body = await self._api.get(
                session, self._path, query, timeout_s=self._intervals.request_ns / NS_PER_S
            )
            listed = _LIST.decode(body)
            slices |= {slice_.metadata.name: slice_ for slice_ in listed.items or ()}
            if len(slices) > _MAX_SLICES:
                raise APIServerError(f"{self._path}: more than {_MAX_SLICES} slices")
            page = listed.metadata.next_page
            if not page:
                break
        if not listed.metadata.resource_version:
            raise APIServerError(f"{self._path}: the list has no resourceVersion")
        self._slices = slices
        self._version = listed.metadata.resource_version
        self._listed_ns = self._clock()
        self._failures = 0
        self._problem = ""

    async def _watch(self, session: aiohttp.ClientSession, publish: Callable[[], None]) -> None:
        """Run one watch from the last known version to its regular end."""
        intervals = self._intervals
        began_ns = self._clock()
        query = {
            **self._query,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(max(1, intervals.watch_ns // NS_PER_S)),
        }
        lines = self._api.lines(
            session,
            self._path,
            query,
            timeout_s=(intervals.watch_ns + intervals.request_ns) / NS_PER_S,
            silence_s=intervals.silence_ns / NS_PER_S,
        )
        async with aclosing(lines):
            async for line in lines:
                if line.strip() and self._take(_EVENT.decode(line)):
                    publish()
        # Pause, because a server may end each watch immediately.
        left_ns = began_ns + intervals.retry_ns - self._clock()
        await asyncio.sleep(max(0, left_ns) / NS_PER_S)

    def _take(self, event: _WatchEvent) -> bool:
        """Apply one event; return True if it changed a slice."""
        if event.type == "ERROR":
            status = _STATUS.decode(event.object)
            message = f"{self._path}: {status.message[:200]}"
            raise APIServerError(message, expired=status.code == 410)
        changed = _SLICE.decode(event.object)
        self._version = changed.metadata.resource_version or self._version
        name = changed.metadata.name
        if event.type in {"ADDED", "MODIFIED"}:
            if name not in self._slices and len(self._slices) >= _MAX_SLICES:
                raise APIServerError(f"{self._path}: more than {_MAX_SLICES} slices")
            self._slices[name] = changed
            return True
        return event.type == "DELETED" and self._slices.pop(name, None) is not None


def parse_service(text: str) -> tuple[str, str]:
    """Return the namespace and the name of `NAMESPACE/SERVICE`.

    Raises:
        ValueError: the text has another form.
    """
    match = _SERVICE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:200]!r} is not NAMESPACE/SERVICE")
    namespace, _, service = text.partition("/")
    return namespace, service


def upstreams_of(slices: Iterable[EndpointSlice]) -> tuple[Upstream, ...]:
    """Return a Service's replicas in order of name, at most `MAX_UPSTREAMS`; prefer IPv4."""
    upstreams: dict[str, Upstream] = {}
    for family in ("IPv6", "IPv4"):
        for slice_ in slices:
            if slice_.address_type == family:
                upstreams |= _upstreams_in(slice_)
    return tuple(upstreams[name] for name in sorted(upstreams)[:MAX_UPSTREAMS])


def _upstreams_in(slice_: EndpointSlice) -> dict[str, Upstream]:
    ports = {port.name: port.port for port in slice_.ports or ()}
    serving, admin = ports.get(PORT_NAME_SERVING), ports.get(PORT_NAME_ADMIN)
    upstreams: dict[str, Upstream] = {}
    for endpoint in (slice_.endpoints or ()) if serving is not None else ():
        # Only the kubelet knows the health path of another server, which has no admin port.
        unready = admin is None and endpoint.conditions.ready is False
        if endpoint.conditions.terminating or unready or not endpoint.addresses:
            continue
        address = _host(endpoint.addresses[0])
        if address is None:
            continue
        name = (endpoint.target_ref.name if endpoint.target_ref else "") or address
        upstreams[name] = Upstream(
            name=name,
            url=f"http://{address}:{serving}",
            admin_url=None if admin is None else f"http://{address}:{admin}",
        )
    return upstreams


def _host(address: str) -> str | None:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    return f"[{parsed}]" if parsed.version == 6 else str(parsed)
