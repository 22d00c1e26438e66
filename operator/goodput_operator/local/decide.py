"""The state of the local fleet, and the decision about it.

`decide` is a pure function from a snapshot of the processes to actions, like the operator's
decision about pods. The decision is level-triggered: it depends only on the current state. The
control laws set the replicas in `Desired`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from goodput_core.errors import ExitCode
from goodput_core.units import NS_PER_S
from goodput_operator.backoff import BackOff

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "Abort",
    "Action",
    "Address",
    "Announce",
    "Desired",
    "FleetDecision",
    "FleetSnapshot",
    "Kill",
    "ProcessPhase",
    "ProcessView",
    "Publish",
    "Remove",
    "Role",
    "RoutedReplica",
    "Start",
    "Stop",
    "Terminate",
    "decide",
]

_EXIT_MARGIN_NS: Final = 2 * NS_PER_S
"""Time for a process to exit after its drain, in addition to the grace period."""


class Role(StrEnum):
    """Role of a process."""

    REPLICA = "replica"
    ROUTER = "router"


class ProcessPhase(StrEnum):
    """Phase of the latest start of a process."""

    STARTING = "starting"  # its address is not known yet
    LISTENING = "listening"  # a router without all replicas
    READY = "ready"
    EXITED = "exited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Addresses of a process.

    Args:
        url: base URL of the serving port.
        admin_url: base URL of the admin port.
    """

    url: str
    admin_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedReplica:
    """A ready replica, as listed in the router's file of upstreams."""

    name: str
    url: str
    admin_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """One process, over all its restarts.

    Args:
        name: `chat-0`, or `chat-router`.
        role: replica or router.
        phase: phase of the latest start.
        started_ns: time of the latest start.
        ready_ns: time at which that start became ready; None if it has not.
        exited_ns: time at which the process ended; None while it runs.
        exit_code: exit code of the latest start that has ended, as in `subprocess` (−9 for
            SIGKILL); None if none has ended.
        failures: consecutive failed starts; a stable run resets the count.
        ever_ready: True if any start became ready.
        terminated_ns: time at which SIGTERM was sent; None if it was not sent.
        killed: True if SIGKILL was sent.
        unresponsive_ns: time since which liveness checks have failed; None if they pass.
        address: addresses of the process; None until it listens.
        error: last message after `error:` on stderr; None if there is none.
        last_line: last line that any start logged; None if there is none.
    """

    name: str
    role: Role
    phase: ProcessPhase
    started_ns: int
    ready_ns: int | None = None
    exited_ns: int | None = None
    exit_code: int | None = None
    failures: int = 0
    ever_ready: bool = False
    terminated_ns: int | None = None
    killed: bool = False
    unresponsive_ns: int | None = None
    address: Address | None = None
    error: str | None = None
    last_line: str | None = None

    @property
    def alive(self) -> bool:
        """True if the process runs."""
        return self.phase is not ProcessPhase.EXITED

    @property
    def serving(self) -> bool:
        """True if the process is ready and has received no SIGTERM."""
        return self.phase is ProcessPhase.READY and self.terminated_ns is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A request to end the whole fleet.

    Args:
        reason: reason in the log and in the `stopping` event.
        at_once: True to kill all processes without waiting for running requests.
    """

    reason: str
    at_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """State of the fleet at one time.

    Args:
        start_ns: start of the fleet.
        processes: all processes that were started and not removed.
        published: replicas in the router's file of upstreams.
        announced: True if readiness was reported.
        stop: the stop request; None if there is none.
    """

    start_ns: int
    processes: tuple[ProcessView, ...] = ()
    published: tuple[RoutedReplica, ...] = ()
    announced: bool = False
    stop: Stop | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """The desired fleet.

    Args:
        service: name of the service, a prefix of the processes' names.
        replicas: desired replicas.
        ready_timeout_ns: time limit of a start.
        liveness_timeout_ns: time of failed liveness checks after which a process is killed.
        grace_ns: time for running requests to finish after SIGTERM.
        back_off: delays restarts.
    """

    service: str
    replicas: int
    ready_timeout_ns: int = 60 * NS_PER_S
    liveness_timeout_ns: int = 30 * NS_PER_S
    grace_ns: int = 30 * NS_PER_S
    back_off: BackOff = field(default_factory=BackOff)

    @property
    def router(self) -> str:
        """Name of the router's process."""
        return f"{self.service}-router"

    @property
    def processes(self) -> dict[str, Role]:
        """Roles of the desired processes by name, replicas first."""
        replicas = {f"{self.service}-{i}": Role.REPLICA for i in range(self.replicas)}
        return replicas | {self.router: Role.ROUTER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a process that does not run."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """Send SIGTERM, on which a process drains."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Send SIGKILL to a process and its children."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Remove a process that has ended and is not desired."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Write the router's file of upstreams."""

    upstreams: tuple[RoutedReplica, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Report that the service is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop the fleet, which cannot become ready."""

    sentence: str
    exit_code: ExitCode


Action = Start | Terminate | Kill | Remove | Publish | Announce | Abort


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDecision:
    """Actions, and the time of the next decision.

    Args:
        actions: actions in the order of execution.
        wake_at_ns: latest time of the next decision; None to wait for a change.
        finished: True once a stop was requested and no process runs.
    """

    actions: tuple[Action, ...] = ()
    wake_at_ns: int | None = None
    finished: bool = False


def decide(snapshot: FleetSnapshot, desired: Desired, now_ns: int) -> FleetDecision:
    """Return the next actions for a snapshot of the fleet.

    Args:
        snapshot: the observed fleet.
        desired: the desired fleet.
        now_ns: current time on the clock of the snapshot.
    """
    if snapshot.stop is not None:
        # Before readiness was reported there are no requests to finish.
        grace_ns = desired.grace_ns if snapshot.announced else 0
        return _shut_down(snapshot.processes, snapshot.stop, grace_ns, now_ns)
    abort = _abort(snapshot, desired, now_ns)
    if abort is not None:
        return FleetDecision(actions=(abort,))

    by_name = {process.name: process for process in snapshot.processes}
    desired_roles = desired.processes
    actions: list[Action] = []
    wakes: list[int] = []
    if not snapshot.announced:
        wakes.append(snapshot.start_ns + desired.ready_timeout_ns)
    for name, role in desired_roles.items():
        process = by_name.get(name)
        if process is None:
            actions.append(Start(name=name, role=role))
        elif process.exited_ns is not None:
            terminated = process.terminated_ns is not None
            delay_ns = 0 if terminated else desired.back_off.delay_ns(name, process.failures)
            start_ns = process.exited_ns + delay_ns
            if now_ns >= start_ns:
                actions.append(Start(name=name, role=role))
            else:
                wakes.append(start_ns)
        elif process.terminated_ns is not None:
            continue
        elif (deadline := _deadline(process, desired, announced=snapshot.announced)) is not None:
            kill_ns, reason = deadline
            if now_ns >= kill_ns:
                actions.append(Kill(name=name, reason=reason))
            else:
                wakes.append(kill_ns)

    surplus = [process for process in snapshot.processes if process.name not in desired_roles]
    actions += [Remove(name=process.name) for process in surplus if not process.alive]
    # A draining replica that is desired again restarts after it has ended.
    surplus += [
        p for p in snapshot.processes if p.name in desired_roles and p.terminated_ns is not None
    ]
    ending = _terminate(tuple(surplus), Stop(reason="fewer replicas"), desired.grace_ns, now_ns)
    actions += ending.actions
    if ending.wake_at_ns is not None:
        wakes.append(ending.wake_at_ns)

    upstreams = _upstreams(by_name, desired_roles)
    if upstreams != snapshot.published:
        # Publish first, so that the router sends no requests to a replica that is about to drain.
        actions.insert(0, Publish(upstreams=upstreams))
    if not snapshot.announced and _all_ready(by_name, desired_roles):
        actions.append(Announce())
    return FleetDecision(actions=tuple(actions), wake_at_ns=min(wakes, default=None))


def _deadline(process: ProcessView, desired: Desired, *, announced: bool) -> tuple[int, str] | None:
    """Return the time at which to kill a running process, and the reason; None if it is healthy."""
    if process.killed:
        return None
    if process.phase is ProcessPhase.STARTING and announced:
        timeout_ns = desired.ready_timeout_ns
        return process.started_ns + timeout_ns, f"it did not start within {_seconds(timeout_ns)}"
    if process.unresponsive_ns is not None:
        timeout_ns = desired.liveness_timeout_ns
        reason = f"it failed its liveness checks for {_seconds(timeout_ns)}"
        return process.unresponsive_ns + timeout_ns, reason
    return None


def _shut_down(
    processes: tuple[ProcessView, ...], stop: Stop, grace_ns: int, now_ns: int
) -> FleetDecision:
    """Stop the router first, and the replicas once it has ended, within one grace period.

    A draining router needs the replicas: it finishes running requests, and serves open and new
    connections for a few more seconds.
    """
    routers = tuple(p for p in processes if p.role is Role.ROUTER and p.alive)
    if routers and not stop.at_once:
        return _terminate(routers, stop, grace_ns, now_ns)
    terminated_ns = (p.terminated_ns for p in processes if p.role is Role.ROUTER)
    start_ns = next((at_ns for at_ns in terminated_ns if at_ns is not None), None)
    return _terminate(processes, stop, grace_ns, now_ns, start_ns=start_ns)


def _terminate(
    processes: tuple[ProcessView, ...],
    stop: Stop,
    grace_ns: int,
    now_ns: int,
    *,
    start_ns: int | None = None,
) -> FleetDecision:
    """Send SIGTERM, and SIGKILL after the grace period.

    Args:
        processes: processes to end.
        stop: the stop request.
        grace_ns: grace period, from `start_ns` if given, otherwise from SIGTERM.
        now_ns: current time.
        start_ns: start of a shutdown that has ended other processes first.
    """
    timeout_ns = grace_ns + _EXIT_MARGIN_NS
    actions: list[Action] = []
    wakes: list[int] = []
    alive = [process for process in processes if process.alive]
    for process in alive:
        if process.killed:
            continue
        if stop.at_once:
            actions.append(Kill(name=process.name, reason=stop.reason))
            continue
        if process.terminated_ns is None:
            actions.append(Terminate(name=process.name))
        sent_ns = now_ns if process.terminated_ns is None else process.terminated_ns
        kill_ns = sent_ns + timeout_ns
        if start_ns is not None:
            kill_ns = max(start_ns + timeout_ns, sent_ns + _EXIT_MARGIN_NS)
        if now_ns >= kill_ns:
            reason = f"it did not end within {_seconds(kill_ns - sent_ns)} of SIGTERM"
            actions.append(Kill(name=process.name, reason=reason))
        else:
            wakes.append(kill_ns)
    return FleetDecision(
        actions=tuple(actions), wake_at_ns=min(wakes, default=None), finished=not alive
    )


def _abort(snapshot: FleetSnapshot, desired: Desired, now_ns: int) -> Abort | None:
    """Return an abort if a process rejects its arguments or is not ready in time."""
    if snapshot.announced:
        return None
    for process in snapshot.processes:
        if process.exit_code == ExitCode.USAGE and not process.ever_ready:
            # The manifest or an option is invalid, so a restart would fail, too.
            sentence = (
                process.error or f"{process.name} rejected its arguments{_log_excerpt(process)}"
            )
            return Abort(sentence=sentence, exit_code=ExitCode.USAGE)
    if now_ns < snapshot.start_ns + desired.ready_timeout_ns:
        return None
    by_name = {process.name: process for process in snapshot.processes}
    for name in desired.processes:
        late = by_name.get(name)
        if late is None or late.phase is not ProcessPhase.READY:
            sentence = f"{name} was not ready within {_seconds(desired.ready_timeout_ns)}"
            if late is not None and late.exit_code is not None:
                sentence += f", it ended with code {late.exit_code}"
            if late is not None:
                sentence += _log_excerpt(late)
            sentence += "; see its log, or extend the time with --ready-timeout"
            return Abort(sentence=sentence, exit_code=ExitCode.INTERNAL)
    return None


def _log_excerpt(process: ProcessView) -> str:
    line = process.error or process.last_line
    return f", its last log line was {line!r}" if line else ", and it logged nothing"


def _upstreams(
    by_name: dict[str, ProcessView], desired_roles: dict[str, Role]
) -> tuple[RoutedReplica, ...]:
    """Return the replicas to which the router sends requests."""
    return tuple(
        RoutedReplica(name=name, url=process.address.url, admin_url=process.address.admin_url)
        for name, role in desired_roles.items()
        if role is Role.REPLICA
        and (process := by_name.get(name)) is not None
        and process.serving
        and process.address is not None
    )


def _all_ready(by_name: dict[str, ProcessView], names: Iterable[str]) -> bool:
    return all(name in by_name and by_name[name].phase is ProcessPhase.READY for name in names)


def _seconds(ns: int) -> str:
    return f"{ns / NS_PER_S:g} s"
