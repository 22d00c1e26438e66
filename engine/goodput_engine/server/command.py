"""`goodput engine`: from arguments, manifest and environment to a running replica."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop

from goodput_core.cli import CommandParser, argument_type, parse_whole, require_two_ports
from goodput_core.contract import ENV_CONTROL_TOKEN, ENV_REPLICA, ENV_REVISION
from goodput_core.errors import UsageError
from goodput_core.units import NS_PER_S
from goodput_engine.core.build import configuration
from goodput_engine.device.choice import choose_device, device_facts, model_facts, require_memory
from goodput_engine.logs import configure_logging
from goodput_engine.manifest_file import read_manifest
from goodput_engine.server.lifecycle import serve
from goodput_engine.server.limits import read_last_limits
from goodput_engine.server.manifest_watch import followed_fields
from goodput_engine.server.model_options import add_model_arguments, choose_model
from goodput_engine.server.settings import ClientLimits, EngineSettings, ReplicaIdentity
from goodput_engine.server_options import add_server_arguments, connection_limits

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

__all__ = ["main", "make_parser"]

_log = logging.getLogger(__name__)

# Name of a replica, and of its revision, if none is configured.
_LOCAL: Final = "local"
_HEADER_TEXT: Final = re.compile(r"[!-~]{1,253}")


def main(argv: list[str]) -> int:
    """Run one replica until it is stopped.

    Returns:
        0 after a drain; 130 after Ctrl-C, a closed terminal, or a stop without a drain.

    Raises:
        GoodputError: the manifest is invalid, a port is in use, or the core could not start or
            died too often.
    """
    args = _parse(argv)
    configure_logging()
    settings = _make_settings(args, os.environ)
    if settings.device["illustrative"]:
        _log.warning(
            "illustrative device",
            extra={
                "device": settings.device["name"],
                "meaning": "its figures describe no real device; do not plan capacity with them",
            },
        )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(settings))


def make_parser() -> CommandParser:
    """Build the parser of `goodput engine`."""
    parser = CommandParser(
        prog="goodput engine",
        summary="Run one serving replica: OpenAI's API on one port, metrics and control on "
        "another.",
        examples=(
            "goodput engine -f examples/chat.yaml",
            "goodput engine -f examples/chat.yaml --device llama-3-8b-h100 --port 0 --json",
            "goodput engine fetch -f examples/smollm2.yaml",
            "goodput engine bench -f examples/smollm2.yaml",
        ),
    )
    parser.add_argument(
        "-f", "--file", required=True, type=Path, metavar="FILE", dest="manifest",
        help="manifest of the LLMService",
    )  # fmt: skip
    parser.add_argument(
        "--device", metavar="PROFILE",
        help="emulate this device instead of spec.model.source; see `goodput device list`",
    )  # fmt: skip
    parser.add_argument(
        "--step-log", type=Path, metavar="FILE",
        help="write the shape and the duration of each step, for `goodput device fit`",
    )  # fmt: skip
    parser.add_argument(
        "--limits", type=Path, metavar="FILE",
        help="start with the limits in this file, if it exists: JSON with revision, "
        "token_budget, max_num_seqs, safety_percent",
    )  # fmt: skip
    parser.add_argument(
        "--core-restarts", type=argument_type(_parse_restarts, "number"), default=5, metavar="N",
        help="restart a core process that died, up to N times within ten minutes (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--http-processes", type=argument_type(_parse_processes, "number"), metavar="N",
        help="number of HTTP processes that serve the port, for more streams than one core of the "
        "machine can write, instead of spec.engine.httpProcesses",
    )  # fmt: skip
    parser.add_argument("--name", help=f"this replica's name (${ENV_REPLICA}, else {_LOCAL})")
    add_server_arguments(parser, port=8001, admin_port="port for metrics and control")
    add_model_arguments(parser, serves=True)
    return parser


def _parse_restarts(text: str) -> int:
    return parse_whole(text, 0, 100, "a number of restarts")


def _parse_processes(text: str) -> int:
    return parse_whole(text, 1, 64, "a number of processes")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    require_two_ports(args, parser)
    return args


def _make_settings(args: argparse.Namespace, environment: Mapping[str, str]) -> EngineSettings:
    service = read_manifest(args.manifest)
    engine = service.spec.engine
    source = str(args.manifest)
    processes = args.http_processes or engine.http_processes
    model = choose_model(args, service.spec, source=source, http_processes=processes)
    if model is None:
        device, profile = choose_device(service.spec, device=args.device, source=source)
        require_memory(engine, name=device, profile=profile)
        facts = device_facts(profile)
    else:
        device, facts = model.path, model_facts(model.name)
    configure = configuration(
        engine,
        mode=service.spec.control.mode,
        device=device,
        model=model,
        step_log=None if args.step_log is None else str(args.step_log.absolute()),
    )
    # The HTTP processes share the limits.
    clients, connections = ClientLimits(), connection_limits(args)
    return EngineSettings(
        identity=ReplicaIdentity(
            llmservice=service.metadata.name,
            replica=_require_header_text("--name", args.name)
            or _require_header_text(ENV_REPLICA, environment.get(ENV_REPLICA))
            or _LOCAL,
            revision=_require_header_text(ENV_REVISION, environment.get(ENV_REVISION)) or _LOCAL,
        ),
        followed=followed_fields(service),
        manifest=args.manifest,
        configure=configure,
        limits=None
        if args.limits is None
        else read_last_limits(args.limits, configure, unix_ns=time.time_ns()),
        core_restarts=args.core_restarts,
        http_processes=processes,
        clients=replace(
            clients,
            all_bodies_bytes=max(clients.body_bytes, clients.all_bodies_bytes // processes),
        ),
        connections=replace(connections, connections=-(-connections.connections // processes)),
        api_key_file=args.api_key_file,
        device=facts,
        host=args.host,
        port=args.port,
        admin_port=args.admin_port,
        grace_s=args.grace / NS_PER_S,
        exit_with_parent=args.exit_with_parent,
        json=args.json,
        control_token=environment.get(ENV_CONTROL_TOKEN) or None,
    )


def _require_header_text(source: str, name: str | None) -> str | None:
    """Return a name for response headers; None if there is none.

    Args:
        source: the option or the environment variable, for the error message.
        name: its value.

    Raises:
        UsageError: the name is not a valid header value.
    """
    if name and not _HEADER_TEXT.fullmatch(name):
        raise UsageError(f"{source} must be 1 to 253 visible ASCII characters, not {name[:60]!r}")
    return name
