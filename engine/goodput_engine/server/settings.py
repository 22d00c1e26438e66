"""The configuration of a replica's HTTP process, read once from arguments and environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from goodput_engine.http_server import CLIENT_CONNECTIONS, ConnectionLimits
from goodput_engine.messages import Configure, SetLimits
from goodput_engine.server.manifest_watch import FollowedFields

__all__ = ["ClientLimits", "EngineSettings", "ReplicaIdentity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaIdentity:
    """The names of a replica.

    Args:
        llmservice: the service; also the model's name in OpenAI's API.
        replica: this process.
        revision: the rollout that it belongs to.
    """

    llmservice: str
    replica: str
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Limits on the use by clients.

    Args:
        body_bytes: a larger body gets 413.
        body_base_bytes, body_token_bytes: so does a body above the base and this much for each
            token of the model's context.
        all_bodies_bytes: of all bodies that are being read; a body beyond gets 429.
        body_s: for a body to arrive; then 408.
        inline_bytes: a larger body is parsed in a thread, so that it does not delay streams.
        stall_s: a stream ends whose client reads nothing for this time.
        event_tokens: the most tokens in one event, for a client that fell behind.
    """

    body_bytes: int = 32 << 20
    body_base_bytes: int = 1 << 20
    body_token_bytes: int = 64
    all_bodies_bytes: int = 256 << 20
    body_s: float = 30.0
    inline_bytes: int = 48 << 10
    stall_s: float = 60.0
    event_tokens: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """A replica.

    Args:
        identity: its names.
        followed: the manifest fields that may change while it runs, as at the start.
        manifest: the file in which they change.
        configure: the core's configuration.
        device: for `GET /control/state`: the device's name, form, coefficients and start-up time.
        host: address of both ports.
        port, admin_port: 0 for any free one.
        grace_s: for running requests to finish after SIGTERM.
        exit_with_parent: stop when stdin is closed.
        json: print one line of JSON on stdout when ready.
        control_token: bearer token of `PATCH /control/limits`; None disables it.
        clients: limits on the use by clients.
        connections: limits of the serving port's connections.
        limits: in force from the start, instead of the manifest's; None for the manifest's.
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
    connections: ConnectionLimits = CLIENT_CONNECTIONS
    limits: SetLimits | None = None
