"""`goodput router`: from arguments and manifest to a running router.

This is the only module of the router that reads the clock, the arguments or the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import uvloop

from goodput_core.cli import CommandParser, argument_type, parse_whole, require_two_ports
from goodput_core.errors import UsageError
from goodput_core.placement import PLACEMENTS
from goodput_core.signals import Shutdown
from goodput_core.spec.choices import RouterPolicy
from goodput_core.units import parse_some_duration
from goodput_engine.http_server import announce, require_running
from goodput_engine.logs import configure_logging
from goodput_engine.manifest_file import read_manifest
from goodput_engine.router.endpoints import EndpointsWatch, in_cluster, parse_service
from goodput_engine.router.processes import serve_processes
from goodput_engine.router.service import RouterService
from goodput_engine.router.settings import RouterLimits, RouterSettings, Timeouts
from goodput_engine.router.upstreams import (
    UpstreamsFile,
    UpstreamSource,
    parse_upstream,
)
from goodput_engine.server_options import add_server_arguments, connection_limits

__all__ = ["main", "make_parser"]


def main(argv: list[str]) -> int:
    """Run a router until SIGTERM, Ctrl-C or, with `--exit-with-parent`, the end of stdin.

    Raises:
        UsageError: an invalid argument, or a port in use.
        InputError: an invalid manifest, or an invalid file of replicas.
    """
    args = _parse(argv)
    settings, source = _make_settings(args), _make_source(args)
    configure_logging()
    if args.processes > 1 and args.one_of is None:
        return uvloop.run(serve_processes(args, argv))
    return uvloop.run(_serve(args, settings, source))


async def _serve(
    args: argparse.Namespace, settings: RouterSettings, source: UpstreamSource | None
) -> int:
    """Serve until a signal, then drain; a second signal or a closed stdin ends the router directly.

    Returns:
        0 after a drain; 130 after Ctrl-C or a stop without a drain.
    """
    shutdown = Shutdown(exit_with_parent=args.exit_with_parent)
    service = RouterService(
        settings,
        clock=time.monotonic_ns,
        upstreams=args.upstream,
        source=source,
        host=args.host,
        port=args.port,
        admin_port=args.admin_port,
        processes=args.one_of or 1,
    )
    async with AsyncExitStack() as stack:
        starting = asyncio.ensure_future(stack.enter_async_context(service))
        stopped = asyncio.ensure_future(shutdown.requested.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not starting.done():  # the source has not returned the first replicas yet
            starting.cancel()
            await asyncio.wait({starting})
            return shutdown.exit_code
        starting.result()
        # Exclude the objects that live as long as the process from later garbage collections.
        gc.collect()
        gc.freeze()
        announce(service.url, service.admin_url, as_json=args.json)
        await shutdown.wait(*service.vital)
        await service.drain(args.grace, immediate=shutdown.immediate)
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
    defaults = Timeouts()
    for option, default_ns, text in (
        ("--connect-timeout", defaults.connect_ns, "time limit for connecting to a replica (2s)"),
        (
            "--first-byte-timeout",
            defaults.first_byte_ns,
            "time limit for the first token, or for a complete response if not streamed (10m)",
        ),
        (
            "--idle-timeout",
            defaults.idle_ns,
            "time limit between two reads from a replica after the first token (2m)",
        ),
    ):
        parser.add_argument(option, type=timeout, default=default_ns, metavar="DURATION", help=text)
    parser.add_argument(
        "--processes",
        type=argument_type(_parse_processes, "number"),
        default=1,
        metavar="N",
        help="number of processes that serve the port, for more streams than one core can forward "
        "(%(default)s)",
    )
    # Set by the process that starts the others.
    parser.add_argument("--one-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--tenants",
        type=Path,
        metavar="FILE",
        help="require a key of one of these tenants, and divide overloaded replicas fairly among "
        "them; read again after each change",
    )
    add_server_arguments(parser, port=8000, admin_port="port for metrics and state")
    return parser


def _parse_processes(text: str) -> int:
    return parse_whole(text, 1, 64, "a number of processes")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    require_two_ports(args, parser)
    if args.upstreams is not None and args.endpoints is not None:
        raise UsageError("goodput router: --upstreams and --endpoints exclude each other")
    if args.api_key_file is not None and args.tenants is not None:
        raise UsageError("goodput router: --api-key-file and --tenants exclude each other")
    if args.upstreams is None and args.endpoints is None and not args.upstream:
        raise UsageError(
            "goodput router: name replicas with --upstreams FILE, --upstream or --endpoints"
        )
    return args


def _make_source(args: argparse.Namespace) -> UpstreamSource | None:
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


def _make_settings(args: argparse.Namespace) -> RouterSettings:
    policy = None if args.policy is None else RouterPolicy(args.policy)
    service = read_manifest(args.manifest, placement=policy)
    # The processes of one router share its limits.
    share = args.one_of or 1
    connections, limits = connection_limits(args), RouterLimits()
    return RouterSettings(
        llmservice=service.metadata.name,
        policy=service.spec.router.policy,
        processes=share,
        health_path=service.spec.engine.runtime.health_path,
        max_num_seqs=service.spec.engine.max_num_seqs,
        session_affinity=service.spec.router.session_affinity,
        classes=service.spec.slo.by_name(),
        default_class=service.spec.slo.default_class,
        timeouts=Timeouts(
            connect_ns=args.connect_timeout,
            first_byte_ns=args.first_byte_timeout,
            idle_ns=args.idle_timeout,
        ),
        limits=replace(
            limits,
            all_bodies_bytes=max(limits.body_bytes, limits.all_bodies_bytes // share),
        ),
        connections=replace(connections, connections=-(-connections.connections // share)),
        api_key_file=args.api_key_file,
        tenants_file=args.tenants,
    )
