"""The arguments of `goodput up`, parsed without loading an HTTP library."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

from goodput_core.cli import (
    CommandParser,
    argument_type,
    parse_port,
    parse_whole,
    require_two_ports,
)
from goodput_core.units import parse_some_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_REPLICAS", "UpOptions", "make_parser", "parse_options"]

MAX_REPLICAS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Parsed arguments of `goodput up`; each field is the destination of an argument.

    Args:
        manifest: file of the manifest.
        device: device profile that replaces `spec.model.source`; None to use the source.
        model_path: path of a model that replaces `spec.model.source`; None to use the source.
        port: serving port of the router; 0 for any free port.
        admin_port: admin port of the router; 0 for any free port.
        replicas: number of replicas; None to use the manifest's.
        json: True to write events to stdout.
        ui: True to serve a live page of the service.
        exit_with_parent: True to stop when stdin closes.
        ready_timeout_ns: time limit for the service to become ready; None for the default.
        liveness_timeout_ns: time of failed liveness checks after which a process is killed.
        grace_ns: time for running requests to finish when the service stops.
        api_key_file: file of the keys that clients must send; None if no key is required.
        tenants: file of the tenants, whose keys the router requires; None without tenants.
        gate: manifest of the baseline of a gate; None to serve `manifest` without a gate.
    """

    manifest: Path
    device: str | None
    model_path: str | None
    port: int
    admin_port: int
    replicas: int | None
    json: bool
    ui: bool
    exit_with_parent: bool
    ready_timeout_ns: int | None
    liveness_timeout_ns: int
    grace_ns: int
    api_key_file: Path | None = None
    tenants: Path | None = None
    gate: Path | None = None


def make_parser() -> CommandParser:
    """Build the parser of `goodput up`."""
    parser = CommandParser(
        "goodput up",
        summary="Run an LLMService on this machine: its replicas, and a router in front of them.",
        examples=(
            "goodput up -f examples/chat.yaml",
            "goodput up -f examples/chat.yaml --replicas 4 --port 9000",
            "goodput up -f examples/chat.yaml --ui",
            "goodput up -f new.yaml --gate examples/chat.yaml",
            "goodput up -f examples/chat.yaml --json --port 0",
        ),
    )
    parser.add_argument(
        "-f", "--file", required=True, type=Path, metavar="FILE", dest="manifest",
        help="manifest of the LLMService",
    )  # fmt: skip
    parser.add_argument(
        "--gate", type=Path, metavar="OLD",
        help="first replay the trace of spec.rollout.gate on this manifest and on FILE in turn; "
        "serve FILE if it passes, otherwise this manifest (needs the extra `replay`)",
    )  # fmt: skip
    parser.add_argument(
        "--device", metavar="PROFILE", help="emulate this device instead of spec.model.source"
    )
    parser.add_argument(
        "--model-path", metavar="PATH",
        help="serve the model in this folder or GGUF file instead of spec.model.source",
    )  # fmt: skip
    port = argument_type(parse_port, "port")
    parser.add_argument(
        "--port",
        type=port,
        default=8000,
        help="the router's port, 0 for any free one (%(default)s)",
    )
    parser.add_argument(
        "--admin-port", type=port, default=0, metavar="PORT",
        help="the router's port for metrics and control, 0 for any free one (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--replicas", type=argument_type(_replicas, "replicas"), metavar="N",
        help="number of replicas, instead of the manifest's",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print events as JSON lines on stdout")
    parser.add_argument(
        "--ui", action="store_true",
        help="serve a live page of the service with `replay watch` (needs the extra `replay`)",
    )  # fmt: skip
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when stdin is closed")
    duration = argument_type(parse_some_duration, "duration")
    parser.add_argument(
        "--ready-timeout", type=duration, metavar="TIME", dest="ready_timeout_ns",
        help="stop with an error if the service is not ready within this time (60s, or 10m for a "
        "real model)",
    )  # fmt: skip
    parser.add_argument(
        "--liveness-timeout", type=duration, default="30s", metavar="TIME",
        dest="liveness_timeout_ns",
        help="restart a process that fails its liveness checks for this long (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--grace", type=duration, default="30s", metavar="TIME", dest="grace_ns",
        help="time for running requests to finish when the service stops (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE",
        help="require one of the keys in this file, one per line, as bearer token for OpenAI's API",
    )  # fmt: skip
    parser.add_argument(
        "--tenants", type=Path, metavar="FILE",
        help="require a key of one of these tenants, and divide overloaded replicas fairly",
    )  # fmt: skip
    return parser


def parse_options(argv: Sequence[str]) -> UpOptions:
    """Parse the arguments after `goodput up`.

    Raises:
        UsageError: an invalid argument.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    require_two_ports(args, parser)
    if args.device is not None and args.model_path is not None:
        parser.error("--device and --model-path exclude each other; give one")
    if args.api_key_file is not None and args.tenants is not None:
        parser.error("--api-key-file and --tenants exclude each other; give one")
    return UpOptions(**{field.name: getattr(args, field.name) for field in fields(UpOptions)})


def _replicas(text: str) -> int:
    return parse_whole(text, 1, MAX_REPLICAS, "a number of replicas")
