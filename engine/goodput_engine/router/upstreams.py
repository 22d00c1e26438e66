"""The list of upstreams, the replicas behind a router: from options, and from a watched file.

The supervisor of the replicas rewrites the file; the router never writes it. If its content is
invalid, the last valid list remains in use. In a cluster, EndpointSlices replace the file.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from yarl import URL

from goodput_core.errors import InputError, UsageError
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = [
    "MAX_UPSTREAMS",
    "Upstream",
    "UpstreamSource",
    "UpstreamsFile",
    "merge",
    "parse_upstream",
    "parse_upstreams",
]

MAX_UPSTREAMS: Final = 1_000
"""Maximum number of replicas behind a router."""
_MAX_FILE_BYTES: Final = 1 << 20
_INTERVAL_NS: Final = NS_PER_S // 2
_log: Final = logging.getLogger(__name__)


class Upstream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One replica.

    Args:
        name: unique name, a label of metrics.
        url: URL of the serving port, without a path.
        admin_url: URL of the admin port; None if the load is not probed.
    """

    name: str
    url: str
    admin_url: str | None = None


class UpstreamSource(Protocol):
    """A source of replicas that may change while the router runs."""

    async def first(self) -> Sequence[Upstream]:
        """Wait for the first list and return it; the router opens its ports afterwards.

        Raises:
            InputError: the source is invalid.
        """
        ...

    async def follow(self, apply: Callable[[Sequence[Upstream]], None]) -> None:
        """Call `apply` with every new list, until cancelled."""
        ...


_DECODER: Final = msgspec.json.Decoder(list[Upstream])


def parse_upstreams(data: bytes, *, source: str) -> tuple[Upstream, ...]:
    """Return the replicas of a file, a JSON list of `{"name", "url", "admin_url"}`.

    Raises:
        InputError: the content is invalid.
    """
    if len(data) > _MAX_FILE_BYTES:
        raise InputError(
            f"{source}: larger than {_MAX_FILE_BYTES >> 20} MiB; is this a list of replicas?"
        )
    try:
        upstreams = _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise InputError(
            f"{source}: {error}; write "
            '[{"name": "r0", "url": "http://127.0.0.1:8101", "admin_url": "http://127.0.0.1:9101"}]'
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: not UTF-8; write a JSON list of replicas") from error
    return _validate(upstreams, source)


def parse_upstream(text: str) -> Upstream:
    """Return the replica that an option `NAME=URL[,ADMIN_URL]` describes.

    Raises:
        ValueError: the text has another form.
    """
    name, equals, urls = text.partition("=")
    url, _, admin_url = urls.partition(",")
    if not name or not equals or not url:
        raise ValueError(f"{text!r} is not NAME=URL or NAME=URL,ADMIN_URL")
    try:
        return _validate([Upstream(name, url, admin_url or None)], "--upstream")[0]
    except InputError as error:
        raise ValueError(str(error)) from error


class UpstreamsFile:
    """A file of replicas, read again after each change.

    Args:
        path: the file.
        interval_ns: interval between two checks.
    """

    def __init__(self, path: Path, *, interval_ns: int = _INTERVAL_NS) -> None:
        self._path = path
        self._interval_ns = interval_ns
        self._last_stamp: tuple[int, int, int] | None = None
        self._problem = ""

    def read(self) -> tuple[Upstream, ...]:
        """Return the replicas in the file.

        Raises:
            InputError: the file is unreadable or invalid.
        """
        try:
            self._last_stamp = self._stamp()
            with self._path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise InputError(
                f"{self._path}: {error.strerror}; name a file that lists the replicas"
            ) from error
        return parse_upstreams(data, source=str(self._path))

    async def first(self) -> Sequence[Upstream]:
        """Return the replicas in the file; raises the errors of `read`."""
        return self.read()

    async def follow(self, apply: Callable[[Sequence[Upstream]], None]) -> None:
        """Call `apply` with every new list, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_ns / NS_PER_S)
            self.poll(apply)

    def poll(self, apply: Callable[[Sequence[Upstream]], None]) -> None:
        """Call `apply` with the list if the file changed and is valid."""
        try:
            if self._stamp() == self._last_stamp:
                return
            apply(self.read())
            self._problem = ""
        except (InputError, UsageError, OSError) as error:
            if isinstance(error, OSError):
                self._last_stamp = None
            if self._problem != str(error):
                self._problem = str(error)
                _log.warning("upstreams file not applied", extra={"detail": self._problem})

    def _stamp(self) -> tuple[int, int, int]:
        stat = self._path.stat()
        return stat.st_mtime_ns, stat.st_ino, stat.st_size


def merge(listed: Sequence[Upstream], options: Sequence[Upstream]) -> tuple[Upstream, ...]:
    """Return the replicas from a source and those from options.

    Args:
        listed: replicas from the file or from EndpointSlices.
        options: replicas from `--upstream`.

    Raises:
        UsageError: two replicas have the same name.
    """
    names = {u.name for u in listed}
    for upstream in options:
        if upstream.name in names:
            raise UsageError(f"--upstream {upstream.name}: the name is taken; choose another")
        names.add(upstream.name)
    return (*listed, *options)


def _validate(upstreams: Sequence[Upstream], source: str) -> tuple[Upstream, ...]:
    if len(upstreams) > MAX_UPSTREAMS:
        raise InputError(
            f"{source}: {len(upstreams)} replicas; at most {MAX_UPSTREAMS} are allowed"
        )
    names: set[str] = set()
    for index, upstream in enumerate(upstreams):
        at = f"{source}: [{index}]" if source != "--upstream" else source
        if not 0 < len(upstream.name) <= 253:
            raise InputError(f"{at}.name must have 1 to 253 characters")
        if upstream.name in names:
            raise InputError(f"{at}.name: {upstream.name!r} occurs twice; names are unique")
        names.add(upstream.name)
        _check_url(upstream.url, f"{at}.url")
        if upstream.admin_url is not None:
            _check_url(upstream.admin_url, f"{at}.admin_url")
    return tuple(upstreams)


def _check_url(text: str, at: str) -> None:
    problem = f"{at}: {text[:200]!r} is not http://HOST:PORT"
    try:
        url = URL(text)
    except ValueError as error:
        raise InputError(problem) from error
    is_origin = url.path in {"", "/"} and not url.query_string and not url.fragment
    if url.scheme not in {"http", "https"} or not url.host or not is_origin:
        raise InputError(problem)
