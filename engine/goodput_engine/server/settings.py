"""All that a replica's front is told when it starts, read once from arguments and environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from goodput_engine.messages import Configure, SetLimits
from goodput_engine.server.following import Followed

__all__ = ["ClientLimits", "EngineSettings", "Names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What this replica is called.

    Args:
        llmservice: the service; also the model's name in OpenAI's API.
        replica: this process.
        revision: the rollout it belongs to.
    """

    llmservice: str
    replica: str
    revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What a client may take of this process.

    Args:
        body_bytes: a longer body is refused with 413.
        all_bodies_bytes: what would add to as much, held of all bodies together while they are
            read, is refused with 429.
        body_s: a body that takes longer is refused with 408.
        inline_bytes: a longer body is read in a thread, so that it delays nobody else's tokens.
        stall_s: a stream whose client takes nothing for so long is ended.
        event_tokens: a client that fell behind gets at most so many tokens in one event.
    """

    body_bytes: int = 32 * 1024 * 1024
    all_bodies_bytes: int = 256 * 1024 * 1024
    body_s: float = 30.0
    inline_bytes: int = 48 * 1024
    stall_s: float = 60.0
    event_tokens: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """A replica.

    Args:
        names: what it is called.
        followed: what may change while it runs, as it is at the start.
        manifest: the file in which it changes.
        configure: what its core runs.
        device: of its device, for `GET /control/state`: name, form and coefficients, start-up.
        host: where both ports listen.
        port, admin_port: 0 for any free one.
        grace_s: how long running answers may go on after SIGTERM.
        exit_with_parent: end when stdin is closed.
        json: print one line of JSON on stdout when ready.
        control_token: bearer token of `PATCH /control/limits`; None: nobody may change them.
        clients: what a client may take.
        limits: in force from the start, in place of the manifest's; None: the manifest's.
    """

    names: Names
    followed: Followed
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
    limits: SetLimits | None = None
