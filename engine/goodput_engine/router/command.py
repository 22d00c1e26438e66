"""`goodput router`: arguments and manifest in, a running router until it is told to stop.

The only module of the router that reads the clock, the arguments or a signal.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop

from goodput_core.cli import CommandParser, argument_type
from goodput_core.contract import EVENT_LISTENING
from goodput_core.errors import ExitCode, UsageError
from goodput_core.placement import PLACEMENTS
from goodput_core.spec.llmservice import RouterPolicy
from goodput_core.units import NS_PER_S, parse_duration
from goodput_engine.logs import configure_logging
from goodput_engine.manifest_file import read_manifest
from goodput_engine.router.service import RouterService
from goodput_engine.router.settings import RouterSettings, Timeouts
from goodput_engine.router.upstreams import Upstream, UpstreamsFile, parse_upstream

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_core.spec.llmservice import LLMService

__all__ = ["main"]

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What a person typed."""

    settings: RouterSettings
    upstreams: Sequence[Upstream]
    file: UpstreamsFile | None
    host: str
    port: int
    admin_port: int
    grace_ns: int
    json: bool
    exit_with_parent: bool


def main(argv: list[str]) -> int:
    """Run a router until SIGTERM, Ctrl-C or, when asked to, the end of stdin.

    Raises:
        UsageError: an argument that cannot be, or a port that is taken.
        InputError: a manifest or a file of upstreams that cannot be used.
    """
    options = _parse(argv)
    configure_logging()
    return uvloop.run(_serve(options))


async def _serve(options: _Options) -> int:
    """Serve; a first signal drains, a second one or a closed stdin does not wait.

    Returns:
        0 for a stop in order, 130 for one that was told not to wait.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    def on_parent_gone() -> None:
        stop.set()
        hurry.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    service = RouterService(
        options.settings,
        clock=time.monotonic_ns,
        upstreams=options.upstreams,
        file=options.file,
        host=options.host,
        port=options.port,
        admin_port=options.admin_port,
    )
    async with service:
        if options.exit_with_parent:
            _watch_stdin(loop, on_parent_gone)
        # What was made so far lives as long as the process: the collector need not look at it.
        gc.collect()
        gc.freeze()
        _announce(service, as_json=options.json)
        await stop.wait()
        await service.drain(options.grace_ns, hurry=hurry)
    return ExitCode.INTERRUPTED if hurry.is_set() else ExitCode.PASS


def _announce(service: RouterService, *, as_json: bool) -> None:
    _log.info("listening", extra={"url": service.url, "admin_url": service.admin_url})
    if as_json:
        event = {
            "event": EVENT_LISTENING,
            "url": service.url,
            "admin_url": service.admin_url,
            "pid": os.getpid(),
        }
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


def _watch_stdin(loop: asyncio.AbstractEventLoop, gone: Callable[[], None]) -> None:
    """Call `gone` on the loop when stdin ends; a thread, because stdin may be a plain file."""

    def read() -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError:
            pass
        try:
            loop.call_soon_threadsafe(gone)
        except RuntimeError:
            pass  # the loop ended first

    threading.Thread(target=read, name="stdin", daemon=True).start()


def _parse(argv: list[str]) -> _Options:
    parser = CommandParser(
        "goodput router",
        summary="Run the router in front of replicas: place, pass on, count one outcome each.",
        examples=(
            "goodput router -f examples/chat.yaml --upstream r0=http://127.0.0.1:8001",
            "goodput router -f examples/chat.yaml --upstreams replicas.json --port 8080",
        ),
    )
    duration = argument_type(parse_duration, "duration")
    policies = [policy.value for policy in PLACEMENTS]
    parser.add_argument(
        "-f", "--file", type=Path, required=True, help="the LLMService manifest", dest="manifest"
    )
    parser.add_argument(
        "--upstreams",
        type=Path,
        metavar="FILE",
        help='JSON list of {"name", "url", "admin_url"}; read again when it changes',
    )
    parser.add_argument(
        "--upstream",
        type=argument_type(parse_upstream, "upstream"),
        action="append",
        default=[],
        metavar="NAME=URL[,ADMIN_URL]",
        help="one replica; repeatable",
    )
    parser.add_argument(
        "--policy", choices=policies, help="placement, in place of spec.router.policy"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address of both ports (%(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="0: any free one (%(default)s)")
    parser.add_argument(
        "--admin-port", type=_port, default=0, help="metrics and state (0: any free one)"
    )
    defaults = Timeouts()
    parser.add_argument(
        "--connect-timeout",
        type=duration,
        default=defaults.connect_ns,
        metavar="DURATION",
        help="for a connection to a replica (2s)",
    )
    parser.add_argument(
        "--first-byte-timeout",
        type=duration,
        default=defaults.first_byte_ns,
        metavar="DURATION",
        help="until an answer begins; one that is not streamed begins at its end (10m)",
    )
    parser.add_argument(
        "--idle-timeout",
        type=duration,
        default=defaults.idle_ns,
        metavar="DURATION",
        help="between two chunks of an answer (2m)",
    )
    parser.add_argument(
        "--grace",
        type=duration,
        default=30 * NS_PER_S,
        metavar="DURATION",
        help="for running answers to finish after SIGTERM (30s)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON line when it listens")
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="stop at once when stdin is closed"
    )
    args = parser.parse_args(argv)
    if args.upstreams is None and not args.upstream:
        raise UsageError("goodput router: name replicas with --upstreams FILE or --upstream")
    policy = None if args.policy is None else RouterPolicy(args.policy)
    return _Options(
        settings=_settings(
            read_manifest(args.manifest, placement=policy),
            Timeouts(
                connect_ns=args.connect_timeout,
                first_byte_ns=args.first_byte_timeout,
                idle_ns=args.idle_timeout,
            ),
        ),
        upstreams=args.upstream,
        file=None if args.upstreams is None else UpstreamsFile(args.upstreams),
        host=args.host,
        port=args.port,
        admin_port=args.admin_port,
        grace_ns=args.grace,
        json=args.json,
        exit_with_parent=args.exit_with_parent,
    )


def _settings(service: LLMService, timeouts: Timeouts) -> RouterSettings:
    return RouterSettings(
        llmservice=service.metadata.name,
        policy=service.spec.router.policy,
        classes=service.spec.slo.by_name(),
        default_class=service.spec.slo.default_class,
        timeouts=timeouts,
    )


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65_535:
        raise ValueError(text)
    return port
