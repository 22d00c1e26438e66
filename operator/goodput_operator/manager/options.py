"""Options of `goodput operator`, parsed without loading the operator (`--help`, completion)."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from goodput_core.cli import CommandParser, argument_type, parse_port, parse_whole
from goodput_core.errors import UsageError
from goodput_operator.render.image_names import parse_registry
from goodput_operator.render.pods import Installation

__all__ = ["Options", "make_parser", "parse_options"]

_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_IMAGES: Final = (
    "--engine-image goodput-engine:0.1.0 --router-image goodput-router:0.1.0 "
    "--replay-image goodput-replay:0.1.0"
)
_EXAMPLES: Final = (
    "head -c 32 /dev/urandom > key",
    f"goodput operator --key-file key {_IMAGES}",
    f"goodput operator --key-file key {_IMAGES} --namespace team-a --namespace team-b --verbose",
)
_PULL_POLICIES: Final = ("Always", "IfNotPresent", "Never")
_MAX_GROUP: Final = 999_999_999
_MAX_IDENTITY: Final = 128
"""Maximum length of an Event's reporting instance that the API server accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of the operator process.

    Args:
        namespaces: watched namespaces; empty for all.
        installation: settings that apply to all services.
        registries: base URL of the API of each registry whose tags are resolved, by its name.
        key_file: file with the key from which engines' tokens are derived.
        kubeconfig: file with credentials. None selects the pod's service account, or kubectl's
            configuration outside a pod.
        lease_name, lease_namespace: name and namespace of the Lease.
        identity: holder of the Lease, unique among running operators.
        probe_host: address of the port for probes and metrics.
        probe_port: port for probes and metrics; 0 for any free port.
        workers: number of concurrent reconciliations.
        verbose: True to log the phases of every reconciliation.
    """

    namespaces: tuple[str, ...]
    installation: Installation
    registries: Mapping[str, str]
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
        summary="Run the LLMServices and TraceReplays of a cluster.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="watch this namespace only; may be repeated (default: all namespaces)",
    )
    parser.add_argument(
        "--engine-image",
        required=True,
        metavar="IMAGE",
        help="image of engines without spec.engine.image",
    )
    parser.add_argument(
        "--router-image",
        required=True,
        metavar="IMAGE",
        help="image of routers without spec.router.image",
    )
    parser.add_argument(
        "--replay-image",
        metavar="IMAGE",
        help="image of TraceReplays without spec.image (default: such replays are rejected)",
    )
    parser.add_argument(
        "--image-pull-policy",
        choices=_PULL_POLICIES,
        help="pull policy of these images (default: Kubernetes' default)",
    )
    parser.add_argument(
        "--fs-group",
        type=argument_type(lambda text: parse_whole(text, 0, _MAX_GROUP, "a group"), "group"),
        metavar="GID",
        help="group that owns the volumes of engines (default: not set)",
    )
    parser.add_argument(
        "--prometheus-allow",
        action="append",
        default=[],
        metavar="URL",
        help="allowed value of spec.control.prometheus.url, compared as text; may be repeated "
        "(default: none)",
    )
    parser.add_argument(
        "--pin-images",
        action="append",
        default=[],
        metavar="REGISTRY",
        type=argument_type(parse_registry, "registry"),
        help="replace tags of images of this registry by digests when a revision of engines is "
        "created, such as `ghcr.io`, or `http://HOST:PORT` for one without TLS; may be repeated "
        "(default: none)",
    )
    parser.add_argument(
        "--key-file",
        type=Path,
        default=Path("/etc/goodput-operator/key"),
        metavar="FILE",
        help="key from which the tokens of engines are derived (default: %(default)s)",
    )
    parser.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="credentials (default: the pod's service account, else kubectl's configuration)",
    )
    parser.add_argument(
        "--lease-name",
        default="goodput-operator",
        metavar="NAME",
        help="name of the Lease for leader election (default: %(default)s)",
    )
    parser.add_argument(
        "--lease-namespace",
        metavar="NAME",
        help="namespace of the Lease (default: the pod's, else `default`)",
    )
    parser.add_argument(
        "--identity",
        metavar="NAME",
        help="holder of the Lease, unique among running operators; a process with the identity of "
        "an earlier one acquires the Lease at once, so the earlier process must have ended "
        "(default: the host's name and random digits)",
    )
    parser.add_argument(
        "--probe-host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address of the port for probes and metrics; `::` for all (default: %(default)s)",
    )
    parser.add_argument(
        "--probe-port",
        type=argument_type(parse_port, "port"),
        default=8080,
        metavar="PORT",
        help="port for probes and metrics; 0 for any free one (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=argument_type(lambda text: parse_whole(text, 1, 64, "a number of workers"), "count"),
        default=8,
        metavar="N",
        help="services reconciled at the same time (default: %(default)s)",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="log the phases of every reconciliation"
    )
    return parser


def parse_options(argv: list[str], environment: Mapping[str, str] = os.environ) -> Options:
    """Parse the command line.

    Raises:
        UsageError: an option is invalid.
    """
    args = make_parser().parse_args(argv)
    if any(not name for name in args.namespace):
        raise UsageError(
            "goodput operator: --namespace is empty; give a name, or omit the option for all"
        )
    identity = args.identity
    if identity is None:
        host = environment.get("HOSTNAME") or socket.gethostname()
        identity = f"{host}-{secrets.token_hex(4)}"
    elif not 0 < len(identity) <= _MAX_IDENTITY:
        raise UsageError(
            f"goodput operator: --identity has {len(identity)} characters; "
            f"give it 1 to {_MAX_IDENTITY}"
        )
    registries = dict(args.pin_images)
    return Options(
        namespaces=tuple(dict.fromkeys(args.namespace)),
        installation=Installation(
            engine_image=args.engine_image,
            router_image=args.router_image,
            replay_image=args.replay_image,
            image_pull_policy=args.image_pull_policy,
            fs_group=args.fs_group,
            prometheus_urls=frozenset(args.prometheus_allow),
            pinned_registries=frozenset(registries),
        ),
        registries=registries,
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
