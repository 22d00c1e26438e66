"""The configuration of a replica's HTTP process, read once from arguments and environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from goodput_engine.messages import Configure, SetLimits
from goodput_engine.server.manifest_watch import FollowedFields
from goodput_engine.server_options import CLIENT_CONNECTIONS, ConnectionLimits

__all__ = ["ClientLimits", "EngineSettings", "ReplicaIdentity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaIdentity:
    """Names that identify a replica.

    Args:
        llmservice: name of the service, and of the model in OpenAI's API.
        replica: name of this process.
        revision: name of the rollout that the replica belongs to.
    """

    llmservice: str
    replica: str
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Limits on client requests.

    Args:
        body_bytes: maximum size of a body; a larger body gets 413.
        body_base_bytes: constant part of a second limit, which depends on the model's context; a
            larger body gets 413 too.
        body_token_bytes: bytes that each token of the model's context adds to this second limit.
        all_bodies_bytes: maximum total size of the bodies being read; a body above it gets 429.
        body_s: time limit for receiving a body; after it the client gets 408.
        inline_bytes: maximum size of a body that is parsed on the event loop; a larger body is
            parsed in a thread, so that it does not delay streams.
        chat_wait_s: time after which a chat that still waits for the chat template gets 429.
        stall_s: time after which a client that reads nothing is disconnected.
        event_tokens: maximum number of tokens in one event for a client that reads slowly.
    """

    body_bytes: int = 32 << 20
    body_base_bytes: int = 1 << 20
    body_token_bytes: int = 64
    all_bodies_bytes: int = 256 << 20
    body_s: float = 30.0
    inline_bytes: int = 48 << 10
    chat_wait_s: float = 10.0
    stall_s: float = 60.0
    event_tokens: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of a replica.

    Args:
        identity: the replica's names.
        followed: initial values of the manifest fields that may change while the replica runs.
        manifest: path of the manifest, which is watched for changes of these fields.
        configure: the core's configuration.
        device: device facts in `GET /control/state`, such as name and step-time coefficients.
        host: address of both ports.
        port, admin_port: port numbers; 0 takes any free port.
        grace_s: time for running requests to finish after SIGTERM.
        exit_with_parent: True to stop when stdin is closed.
        json: True to print one line of JSON on stdout when ready.
        control_token: bearer token of `PATCH /control/limits`; None disables the endpoint.
        clients: limits on the client requests of one of the HTTP processes.
        core_restarts: maximum number of restarts of a dead core within ten minutes.
        http_processes: number of HTTP processes that serve the port.
        connections: limits of the connections of one of these processes.
        api_key_file: file of the keys that clients must send; None if no key is required.
        limits: initial limits, in place of the manifest's; None to start with the manifest's.
    """

    identity: ReplicaIdentity
    followed: FollowedFields
    manifest: Path
    configure: Configure
    device: Mapping[str, Any]
    host: str
    port: int
    admin_port: int
    grace_s: float
    exit_with_parent: bool
    json: bool
    control_token: str | None = field(repr=False)
    clients: ClientLimits = ClientLimits()
    core_restarts: int = 5
    http_processes: int = 1
    connections: ConnectionLimits = CLIENT_CONNECTIONS
    api_key_file: Path | None = None
    limits: SetLimits | None = None
