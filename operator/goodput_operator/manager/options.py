"""The command line of `goodput operator`, as one frozen value."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from goodput_core.cli import CommandParser, argument_type, parse_port, parse_whole
from goodput_core.errors import UsageError
from goodput_operator.render.pods import Installation

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Options", "make_parser", "parse_options"]

_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_IMAGES: Final = "--engine-image goodput-engine:0.1.0 --router-image goodput-router:0.1.0"
_EXAMPLES: Final = (
    "head -c 32 /dev/urandom > key",
    f"goodput operator --key-file key {_IMAGES}",
    f"goodput operator --key-file key {_IMAGES} --namespace team-a --namespace team-b --verbose",
)
_PULL_POLICIES: Final = ("Always", "IfNotPresent", "Never")
_MOST_GROUP: Final = 999_999_999
_MOST_IDENTITY: Final = 128
"""What the API server takes as the instance that reports an Event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the operator runs.

    Args:
        namespaces: that it looks after; none: all.
        installation: what is the same for all services.
        key_file: from which engines' tokens are derived.
        kubeconfig: None: the pod's service account, else what kubectl reads.
        lease_name: of the Lease.
        lease_namespace: of the Lease.
        identity: signs the Lease; no other process has it while this one runs.
        probe_host: address of the port for probes and metrics.
        probe_port: 0: any free one.
        workers: services looked after at once.
        verbose: log the phases of every turn.
    """

    namespaces: tuple[str, ...]
    installation: Installation
    key_file: Path
    kubeconfig: Path | None
    lease_name: str
    lease_namespace: str
    identity: str
    probe_host: str
    probe_port: int
    workers: int
    verbose: bool


def make_parser() -> CommandParser:
    """Build the parser of `goodput operator`."""
    parser = CommandParser(
        "goodput operator",
        summary="Look after the LLMServices of a cluster.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="look after this namespace only; may be repeated (default: all namespaces)",
    )
    parser.add_argument(
        "--engine-image",
        required=True,
        metavar="IMAGE",
        help="image of engines whose LLMService names none",
    )
    parser.add_argument(
        "--router-image",
        required=True,
        metavar="IMAGE",
        help="image of routers whose LLMService names none",
    )
    parser.add_argument(
        "--image-pull-policy",
        choices=_PULL_POLICIES,
        help="of both images (default: Kubernetes' own choice)",
    )
    parser.add_argument(
        "--fs-group",
        type=argument_type(lambda text: parse_whole(text, 0, _MOST_GROUP, "a group"), "group"),
        metavar="GID",
        help="group that owns the volumes of engines (default: none is set)",
    )
    parser.add_argument(
        "--prometheus-allow",
        action="append",
        default=[],
        metavar="URL",
        help="a server that an LLMService may name in spec.control.prometheus.url, written as "
        "there; may be repeated (default: none)",
    )
    parser.add_argument(
        "--key-file",
        type=Path,
        default=Path("/etc/goodput-operator/key"),
        metavar="FILE",
        help="the key from which the tokens of engines are derived (default: %(default)s)",
    )
    parser.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="credentials (default: the pod's service account, else kubectl's own)",
    )
    parser.add_argument(
        "--lease-name",
        default="goodput-operator",
        metavar="NAME",
        help="the Lease by which one of several operators writes (default: %(default)s)",
    )
    parser.add_argument(
        "--lease-namespace",
        metavar="NAME",
        help="its namespace (default: the pod's own, else `default`)",
    )
    parser.add_argument(
        "--identity",
        metavar="NAME",
        help="who holds the Lease, unlike any other operator; one that starts again under its "
        "name goes on at once, so its predecessor must have ended (default: the host's name and "
        "random digits)",
    )
    parser.add_argument(
        "--probe-host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address of the port for probes and metrics; `::`: every one (default: %(default)s)",
    )
    parser.add_argument(
        "--probe-port",
        type=argument_type(parse_port, "port"),
        default=8080,
        metavar="PORT",
        help="that port; 0 takes any free one (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=argument_type(lambda text: parse_whole(text, 1, 64, "a number of workers"), "count"),
        default=8,
        metavar="N",
        help="services looked after at once (default: %(default)s)",
    )
    parser.add_argument("--verbose", action="store_true", help="log the phases of every turn")
    return parser


def parse_options(argv: list[str], environment: Mapping[str, str] = os.environ) -> Options:
    """Parse the command line.

    Raises:
        UsageError: it makes no sense.
    """
    args = make_parser().parse_args(argv)
    if any(not name for name in args.namespace):
        raise UsageError(
            "goodput operator: --namespace is empty; name one, or leave the option out for all"
        )
    identity = args.identity
    if identity is None:
        host = environment.get("HOSTNAME") or socket.gethostname()
        identity = f"{host}-{secrets.token_hex(4)}"
    elif not 0 < len(identity) <= _MOST_IDENTITY:
        raise UsageError(
            f"goodput operator: --identity has {len(identity)} characters; "
            f"give it 1 to {_MOST_IDENTITY}"
        )
    return Options(
        namespaces=tuple(dict.fromkeys(args.namespace)),
        installation=Installation(
            engine_image=args.engine_image,
            router_image=args.router_image,
            image_pull_policy=args.image_pull_policy,
            fs_group=args.fs_group,
            prometheus_urls=frozenset(args.prometheus_allow),
        ),
        key_file=args.key_file,
        kubeconfig=args.kubeconfig,
        lease_name=args.lease_name,
        lease_namespace=args.lease_namespace or _own_namespace(),
        identity=identity,
        probe_host=args.probe_host,
        probe_port=args.probe_port,
        workers=args.workers,
        verbose=args.verbose,
    )


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"
