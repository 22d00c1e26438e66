"""`replay watch URL`: serve a live page of a running service."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from goodput_core.cli import CommandParser, argument_type, parse_port
from goodput_core.contract import EVENT_READY
from goodput_core.errors import ExitCode, Interrupted, UnreachableError, UsageError
from goodput_core.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_replay.watch.history import ServiceHistory
    from goodput_replay.watch.page import WatchPage

__all__ = ["main", "make_parser", "poll"]

_EVERY_S: Final = 1.0
_FIRST_S: Final = 10.0
_MAX_LINE: Final = 1 << 20
_MAX_TEXT: Final = 500


def main(argv: Sequence[str]) -> int:
    """Serve the page until Ctrl-C, or until stdin closes with `--events`.

    Args:
        argv: the arguments after `replay watch`.

    Raises:
        UsageError: an argument is invalid, or the port is in use.
        InputError: the SLO file cannot be read.
        UnreachableError: no router answered at the URL within 10 seconds.
    """
    given = make_parser().parse_args(argv)
    if (given.url is not None) + given.events + (given.services is not None) != 1:
        raise UsageError(
            "replay watch: give one of these: the URL of a router's admin port, --events, "
            "--services"
        )
    if given.services is None and (given.listen is not None or given.host_name):
        raise UsageError("replay watch: --listen and --host-name need --services")
    with suppress(asyncio.CancelledError):
        try:
            asyncio.run(_watch(given) if given.services is None else _watch_services(given))
        except KeyboardInterrupt:
            raise Interrupted("stopped watching; the service is not affected") from None
    return ExitCode.PASS


def make_parser() -> CommandParser:
    """Build the parser of `replay watch`."""
    parser = CommandParser(
        "replay watch",
        summary="Serve a live page of a running service on this machine: attainment of each class "
        "with its bounds, requests, replicas, token budget and decisions.",
        examples=(
            "replay watch http://127.0.0.1:41273 -f examples/chat.yaml",
            "goodput up -f examples/chat.yaml --ui",
            "replay watch --services http://goodput-metrics.goodput-system:8080 --listen ::",
        ),
    )
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        type=argument_type(_parse_url, "URL"),
        help="admin port of the service's router, as `goodput up` prints it",
    )
    parser.add_argument(
        "-f",
        "--file",
        "--slo",
        dest="slo",
        metavar="FILE",
        type=Path,
        help="manifest or SLO file, for targets and objectives",
    )
    parser.add_argument(
        "--port",
        metavar="N",
        type=argument_type(parse_port, "PORT"),
        default=0,
        help="port of the page (default: any free one)",
    )
    parser.add_argument(
        "--events",
        action="store_true",
        help="read the events of `goodput up --json` from stdin, which also names the URL and the "
        "decisions; end when stdin closes",
    )
    parser.add_argument(
        "--services",
        metavar="URL",
        type=argument_type(_parse_url, "URL"),
        help="port of an operator in a cluster: list its services, with a live page for each",
    )
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="address of the pages with --services, such as :: for all (default: 127.0.0.1); they "
        "are read-only, and anyone who reaches the address sees them",
    )
    parser.add_argument(
        "--host-name",
        metavar="NAME",
        action="append",
        default=[],
        help="accept requests under this host name, such as that of an Ingress; repeatable "
        "(default: names of this machine only)",
    )
    return parser


def _parse_url(text: str) -> str:
    from urllib.parse import urlsplit  # noqa: PLC0415

    parts = urlsplit(text)
    _ = parts.port  # raises a ValueError if it is out of range
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username:
        raise ValueError(f"{text[:80]!r} is not a URL such as http://127.0.0.1:9080")
    return text


async def _watch(given: Any) -> None:
    from goodput_replay.live.page import LIVE_SCRIPTS  # noqa: PLC0415 - heavy
    from goodput_replay.live.server import HOST, LiveServer, open_site  # noqa: PLC0415
    from goodput_replay.runs.slo import SLOClasses, read_slo  # noqa: PLC0415
    from goodput_replay.watch.history import ServiceHistory  # noqa: PLC0415
    from goodput_replay.watch.page import WatchPage  # noqa: PLC0415

    slo = SLOClasses() if given.slo is None else read_slo(given.slo)
    history = ServiceHistory()
    page = WatchPage(history, slo)
    server = LiveServer(LIVE_SCRIPTS)
    server.begin(page)
    runner, port = await open_site(server.app, given.port, "--port")
    sys.stderr.write(f"live page: http://{HOST}:{port}/\n")
    sys.stderr.flush()
    try:
        if not given.events:
            await poll(given.url, page, history, first_s=_FIRST_S)
            return
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        reading = asyncio.ensure_future(_read_events(history, url))
        polling = asyncio.ensure_future(_poll_once_known(url, page, history))
        await reading
        polling.cancel()
    finally:
        await runner.cleanup()


async def _watch_services(given: Any) -> None:
    import aiohttp  # noqa: PLC0415 - heavy
    from yarl import URL  # noqa: PLC0415

    from goodput_replay.live.server import HOST, open_site  # noqa: PLC0415
    from goodput_replay.watch.services import ServicePages  # noqa: PLC0415

    host = HOST if given.listen is None else given.listen
    async with aiohttp.ClientSession() as session:
        pages = ServicePages(session, URL(given.services), given.host_name)
        # asyncio binds IPv4 and IPv6 for an empty address, but only IPv6 for `::`.
        address = "" if host == "::" else host
        runner, port = await open_site(pages.app, given.port, "--port", host=address)
        shown = f"[{host}]" if ":" in host else host
        sys.stderr.write(f"live pages: http://{shown}:{port}/\n")
        sys.stderr.flush()
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()
            await pages.close()


async def _poll_once_known(
    url: asyncio.Future[str], page: WatchPage, history: ServiceHistory
) -> None:
    # `goodput up` reports what happens to its service.
    await poll(await url, page, history, first_s=None)


async def poll(
    address: str,
    page: WatchPage,
    history: ServiceHistory,
    *,
    first_s: float | None,
    every_s: float = _EVERY_S,
) -> None:
    """Read the router and its engines until cancelled.

    Args:
        address: URL of the router's admin port.
        page: page that shows the readings.
        history: history that keeps them.
        first_s: time limit of the first reading; None to wait for it, and to print nothing if the
            service is lost later.
        every_s: time between readings.

    Raises:
        UnreachableError: there was no reading within the time limit.
    """
    import aiohttp  # noqa: PLC0415 - heavy
    from yarl import URL  # noqa: PLC0415

    from goodput_replay.watch.readings import ReadError, StateReader  # noqa: PLC0415

    page.url = address
    is_lost = is_waiting = False
    now = asyncio.get_running_loop().time
    started = now()
    async with aiohttp.ClientSession() as session:
        reader = StateReader(session, URL(address))
        while True:
            try:
                router = await reader.router(history.next_s)
                loads = await asyncio.gather(*(reader.engine(one) for one in router.replicas))
                engines = {
                    one.name: load
                    for one, load in zip(router.replicas, loads, strict=True)
                    if load is not None
                }
                history.add(router, engines, time.time())
                page.router, page.engines, page.problem = router, engines, ""
                if is_lost:
                    _print("reading the service again")
                is_lost = False
            except ReadError as error:
                page.problem = str(error)
                if first_s is not None and page.router is None:
                    if now() - started >= first_s:
                        raise UnreachableError(
                            f"{error}; give the admin URL of a router that runs, as `goodput up` "
                            "prints it"
                        ) from error
                    if not is_waiting:
                        _print(f"{error}; it is tried again for {first_s:g} s")
                    is_waiting = True
                if first_s is not None and page.router is not None and not is_lost:
                    _print(f"lost the service, which is tried again every second: {error}")
                    is_lost = True
            await asyncio.sleep(every_s)


def _print(message: str) -> None:
    sys.stderr.write(f"{printable(message)}\n")
    sys.stderr.flush()


async def _read_events(history: ServiceHistory, url: asyncio.Future[str]) -> None:
    """Read events until stdin closes; other lines are ignored."""
    from goodput_replay.watch.history import ObservedChange  # noqa: PLC0415 - heavy

    pipe = asyncio.StreamReader(limit=_MAX_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe), sys.stdin)
    while True:
        try:
            line = await pipe.readline()
        except ValueError:
            continue  # a line that is longer than the limit was dropped
        if not line:
            return
        try:
            event = json.loads(line)
            kind = event["event"]
            if kind == EVENT_READY and not url.done():
                url.set_result(_parse_url(event["admin_url"]))
            elif kind == "change":
                history.changes.appendleft(
                    ObservedChange(
                        at_s=time.time(),
                        knob=str(event["knob"])[:_MAX_TEXT],
                        reason=str(event["reason"])[:_MAX_TEXT],
                        message=str(event["message"])[:_MAX_TEXT],
                        applied=bool(event["applied"]),
                    )
                )
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
