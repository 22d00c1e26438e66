"""`goodput router`: from arguments and manifest to a running router.

The only module of the router that reads the clock, the arguments or the environment.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from goodput_core.cli import CommandParser, argument_type, parse_port, require_two_ports
from goodput_core.errors import UsageError
from goodput_core.placement import PLACEMENTS
from goodput_core.signals import Shutdown
from goodput_core.spec.choices import RouterPolicy
from goodput_core.units import NS_PER_S, parse_duration, parse_some_duration
from goodput_engine.http_server import (
    add_connection_arguments,
    announce,
    connection_limits,
    require_running,
)
from goodput_engine.logs import configure_logging
from goodput_engine.manifest_file import read_manifest
from goodput_engine.router.endpoints import EndpointsWatch, in_cluster, parse_service
from goodput_engine.router.service import RouterService
from goodput_engine.router.settings import RouterSettings, Timeouts
from goodput_engine.router.upstreams import (
    Upstream,
    UpstreamsFile,
    UpstreamSource,
    parse_upstream,
)

if TYPE_CHECKING:
    import argparse

    from goodput_core.spec.llmservice import LLMService
    from goodput_engine.http_server import ConnectionLimits

__all__ = ["main", "make_parser"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The parsed command line."""

    settings: RouterSettings
    upstreams: Sequence[Upstream]
    source: UpstreamSource | None
    host: str
    port: int
    admin_port: int
    grace_ns: int
    json: bool
    exit_with_parent: bool


def main(argv: list[str]) -> int:
    """Run a router until SIGTERM, Ctrl-C or, with an option, the end of stdin.

    Raises:
        UsageError: an invalid argument, or a port in use.
        InputError: an invalid manifest or file of upstreams.
    """
    options = _parse(argv)
    configure_logging()
    return uvloop.run(_serve(options))


async def _serve(options: _Options) -> int:
    """Serve until a signal; drain after the first, stop at once after a second or a closed stdin.

    Returns:
        0 after a drain; 130 after Ctrl-C or a stop without a drain.
    """
    shutdown = Shutdown(exit_with_parent=options.exit_with_parent)
    service = RouterService(
        options.settings,
        clock=time.monotonic_ns,
        upstreams=options.upstreams,
        source=options.source,
        host=options.host,
        port=options.port,
        admin_port=options.admin_port,
    )
    async with AsyncExitStack() as stack:
        starting = asyncio.ensure_future(stack.enter_async_context(service))
        stopped = asyncio.ensure_future(shutdown.requested.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not starting.done():  # its replicas are not known yet
            starting.cancel()
            await asyncio.wait({starting})
            return shutdown.exit_code
        starting.result()
        # Later collections skip the objects that live as long as the process.
        gc.collect()
        gc.freeze()
        announce(service.url, service.admin_url, as_json=options.json)
        await shutdown.wait(*service.vital)
        await service.drain(options.grace_ns, hurry=shutdown.immediate)
        require_running(*service.vital)
    return shutdown.exit_code


def make_parser() -> CommandParser:
    """Build the parser of `goodput router`."""
    parser = CommandParser(
        "goodput router",
        summary="Run the router in front of replicas: place and forward requests, count outcomes.",
        examples=(
            "goodput router -f examples/chat.yaml --upstream r0=http://127.0.0.1:8001",
            "goodput router -f examples/chat.yaml --upstreams replicas.json --port 8080",
            "goodput router -f examples/chat.yaml --endpoints default/chat-engines",
        ),
    )
    timeout = argument_type(parse_some_duration, "duration")
    policies = [policy.value for policy in PLACEMENTS]
    parser.add_argument(
        "-f", "--file", type=Path, required=True, help="the LLMService manifest", dest="manifest"
    )
    parser.add_argument(
        "--upstreams",
        type=Path,
        metavar="FILE",
        help='JSON list of {"name", "url", "admin_url"}, read again after each change',
    )
    parser.add_argument(
        "--endpoints",
        type=argument_type(parse_service, "service"),
        metavar="NAMESPACE/SERVICE",
        help="in a pod: watch the replicas behind this headless Service",
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
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of both ports; `::` is every address (%(default)s)",
    )
    port = argument_type(parse_port, "port")
    parser.add_argument(
        "--port", type=port, default=8000, help="serving port; 0: any free one (%(default)s)"
    )
    parser.add_argument(
        "--admin-port", type=port, default=0, metavar="PORT",
        help="port for metrics and state (%(default)s: any free one)",
    )  # fmt: skip
    defaults = Timeouts()
    parser.add_argument(
        "--connect-timeout",
        type=timeout,
        default=defaults.connect_ns,
        metavar="DURATION",
        help="time limit for connecting to a replica (2s)",
    )
    parser.add_argument(
        "--first-byte-timeout",
        type=timeout,
        default=defaults.first_byte_ns,
        metavar="DURATION",
        help="time limit for the first token, or for a complete response if not streamed (10m)",
    )
    parser.add_argument(
        "--idle-timeout",
        type=timeout,
        default=defaults.idle_ns,
        metavar="DURATION",
        help="time limit between two chunks of a response (2m)",
    )
    parser.add_argument(
        "--grace",
        type=argument_type(parse_duration, "duration"),
        default=30 * NS_PER_S,
        metavar="DURATION",
        help="time for running requests to finish after SIGTERM (30s)",
    )
    add_connection_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON on stdout when ready"
    )
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="stop at once when stdin is closed"
    )
    return parser


def _parse(argv: list[str]) -> _Options:
    parser = make_parser()
    args = parser.parse_args(argv)
    require_two_ports(args, parser)
    if args.upstreams is not None and args.endpoints is not None:
        raise UsageError("goodput router: --upstreams and --endpoints exclude each other")
    if args.upstreams is None and args.endpoints is None and not args.upstream:
        raise UsageError(
            "goodput router: name replicas with --upstreams FILE, --upstream or --endpoints"
        )
    policy = None if args.policy is None else RouterPolicy(args.policy)
    return _Options(
        settings=_settings(
            read_manifest(args.manifest, placement=policy),
            Timeouts(
                connect_ns=args.connect_timeout,
                first_byte_ns=args.first_byte_timeout,
                idle_ns=args.idle_timeout,
            ),
            connection_limits(args),
        ),
        upstreams=args.upstream,
        source=_source(args),
        host=args.host,
        port=args.port,
        admin_port=args.admin_port,
        grace_ns=args.grace,
        json=args.json,
        exit_with_parent=args.exit_with_parent,
    )


def _source(args: argparse.Namespace) -> UpstreamSource | None:
    if args.upstreams is not None:
        return UpstreamsFile(args.upstreams)
    if args.endpoints is None:
        return None
    namespace, service = args.endpoints
    return EndpointsWatch(
        in_cluster(os.environ),
        namespace=namespace,
        service=service,
        rng=random.Random(),
        clock=time.monotonic_ns,
    )


def _settings(
    service: LLMService, timeouts: Timeouts, connections: ConnectionLimits
) -> RouterSettings:
    return RouterSettings(
        llmservice=service.metadata.name,
        policy=service.spec.router.policy,
        classes=service.spec.slo.by_name(),
        default_class=service.spec.slo.default_class,
        timeouts=timeouts,
        connections=connections,
    )
