"""What the local fleet knows of its processes at one instant, and what it wants of them.

Frozen values only: `decide` maps them to actions, tests build them by hand. Nothing here can
touch a process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from goodput_core.units import NS_PER_S
from goodput_operator.backoff import BackOff

__all__ = ["Address", "Desired", "Phase", "ProcessView", "Role", "Snapshot", "Stop", "Upstream"]


class Role(StrEnum):
    """What a process of the fleet is for."""

    REPLICA = "replica"
    ROUTER = "router"


class Phase(StrEnum):
    """How far a process has come."""

    STARTING = "starting"  # it has not said where it listens
    LISTENING = "listening"  # a router that does not see every replica yet
    READY = "ready"
    EXITED = "exited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a process listens.

    Args:
        url: base URL of the serving port.
        admin_url: base URL of the admin port.
    """

    url: str
    admin_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """One line of the router's file: a ready replica."""

    name: str
    url: str
    admin_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """One process, over all its restarts.

    Args:
        name: `chat-0`, or `chat-router`.
        role: what it is for.
        phase: of the latest start.
        started_ns: of the latest start.
        ready_ns: when that became ready; None: not yet.
        exited_ns: when it ended.
        exit_code: of its last end, as `subprocess` gives it: −9 for SIGKILL.
        failures: ends in a row without a stable run between them.
        ever_ready: whether any of its starts became ready.
        terminated_ns: when it was asked to end; None: it was not.
        killed: whether it was sent SIGKILL.
        silent_ns: since when it answers no liveness check; None: it answers.
        address: where it listens, once it has said so.
        error: the last sentence after `error:` on its stderr, if it wrote one.
        last_line: the last line it logged, in whichever start.
    """

    name: str
    role: Role
    phase: Phase
    started_ns: int
    ready_ns: int | None = None
    exited_ns: int | None = None
    exit_code: int | None = None
    failures: int = 0
    ever_ready: bool = False
    terminated_ns: int | None = None
    killed: bool = False
    silent_ns: int | None = None
    address: Address | None = None
    error: str | None = None
    last_line: str | None = None

    @property
    def alive(self) -> bool:
        """Whether there is a process to stop."""
        return self.phase is not Phase.EXITED

    @property
    def serving(self) -> bool:
        """Whether it is ready and to go on."""
        return self.phase is Phase.READY and self.terminated_ns is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A request to end the whole fleet.

    Args:
        reason: who asked, for people and for the `stopping` event.
        at_once: kill now instead of letting streams finish.
    """

    reason: str
    at_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The fleet at one instant.

    Args:
        began_ns: when the fleet began.
        processes: every process that was ever started and is not forgotten.
        published: the upstreams that the router's file holds.
        announced: whether people were told that the fleet is ready.
        stop: set once the fleet was asked to end.
    """

    began_ns: int
    processes: tuple[ProcessView, ...] = ()
    published: tuple[Upstream, ...] = ()
    announced: bool = False
    stop: Stop | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """What the fleet should be.

    Args:
        service: the service's name; processes are called after it.
        replicas: how many replicas should serve.
        ready_timeout_ns: how long a start may take.
        liveness_timeout_ns: how long a process that listens may answer nothing.
        grace_ns: how long running streams may take to finish after SIGTERM.
        back_off: when a process that ended is started again.
    """

    service: str
    replicas: int
    ready_timeout_ns: int = 60 * NS_PER_S
    liveness_timeout_ns: int = 30 * NS_PER_S
    grace_ns: int = 30 * NS_PER_S
    back_off: BackOff = field(default_factory=BackOff)

    @property
    def router(self) -> str:
        """The router's name."""
        return f"{self.service}-router"

    @property
    def processes(self) -> dict[str, Role]:
        """Every process that should run, by name, replicas first."""
        replicas = {f"{self.service}-{i}": Role.REPLICA for i in range(self.replicas)}
        return replicas | {self.router: Role.ROUTER}
