"""The state of the local fleet, and the decision about it: pure and level-triggered.

`decide` maps a snapshot of the processes to actions. The operator decides about pods in the same
way. The control laws set the replicas in `Desired`. The module uses no clock, processes or I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from goodput_core.errors import ExitCode
from goodput_core.units import NS_PER_S
from goodput_operator.backoff import BackOff

__all__ = [
    "Action",
    "Address",
    "Announce",
    "Desired",
    "FleetDecision",
    "FleetSnapshot",
    "Forget",
    "GiveUp",
    "Kill",
    "ProcessPhase",
    "ProcessView",
    "Publish",
    "Role",
    "RoutedReplica",
    "Start",
    "Stop",
    "Terminate",
    "decide",
]

_EXIT_MARGIN_NS: Final = 2 * NS_PER_S
"""Time for a process to exit after its own drain, which the grace period bounds."""


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
        exit_code: code of the last end, as in `subprocess`: −9 for SIGKILL.
        failures: consecutive ends without a stable run between them.
        ever_ready: True if any start became ready.
        terminated_ns: time at which SIGTERM was sent; None if it was not.
        killed: True if SIGKILL was sent.
        silent_ns: time since which liveness checks have failed; None if they pass.
        address: addresses of the process; None until it listens.
        error: last sentence after `error:` on stderr; None if there is none.
        last_line: last line of the log of any start.
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
    silent_ns: int | None = None
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
        at_once: True to kill all processes instead of finishing running requests.
    """

    reason: str
    at_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """State of the fleet at one time.

    Args:
        began_ns: start of the fleet.
        processes: every process that was started and not forgotten.
        published: the replicas in the router's file.
        announced: True if readiness was reported.
        stop: the stop request; None if there is none.
    """

    began_ns: int
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
class Forget:
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
class GiveUp:
    """Stop because the fleet cannot become ready."""

    sentence: str
    exit_code: ExitCode


Action = Start | Terminate | Kill | Forget | Publish | Announce | GiveUp


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDecision:
    """Actions, and the time of the next decision.

    Args:
        actions: in this order.
        wake_at_ns: time of the next decision at the latest; None if only a change needs one.
        finished: True once a stop was requested and no process runs.
    """

    actions: tuple[Action, ...] = ()
    wake_at_ns: int | None = None
    finished: bool = False


def decide(snapshot: FleetSnapshot, desired: Desired, now_ns: int) -> FleetDecision:
    """Decide the next actions.

    Args:
        snapshot: the observed fleet.
        desired: the desired fleet.
        now_ns: current time on the clock of the snapshot.
    """
    if snapshot.stop is not None:
        # Before readiness was reported there are no requests to finish.
        grace_ns = desired.grace_ns if snapshot.announced else 0
        return _shut_down(snapshot.processes, snapshot.stop, grace_ns, now_ns)
    give_up = _give_up(snapshot, desired, now_ns)
    if give_up is not None:
        return FleetDecision(actions=(give_up,))

    known = {process.name: process for process in snapshot.processes}
    wanted = desired.processes
    actions: list[Action] = []
    wakes: list[int] = []
    if not snapshot.announced:
        wakes.append(snapshot.began_ns + desired.ready_timeout_ns)
    for name, role in wanted.items():
        process = known.get(name)
        if process is None:
            actions.append(Start(name=name, role=role))
        elif process.exited_ns is not None:
            asked_to = process.terminated_ns is not None
            delay_ns = 0 if asked_to else desired.back_off.delay_ns(name, process.failures)
            if now_ns >= process.exited_ns + delay_ns:
                actions.append(Start(name=name, role=role))
            else:
                wakes.append(process.exited_ns + delay_ns)
        elif process.terminated_ns is not None:
            continue
        elif (deadline := _deadline(process, desired, announced=snapshot.announced)) is not None:
            if now_ns >= deadline.at_ns:
                actions.append(Kill(name=name, reason=deadline.reason))
            else:
                wakes.append(deadline.at_ns)

    surplus = [process for process in snapshot.processes if process.name not in wanted]
    actions += [Forget(name=process.name) for process in surplus if not process.alive]
    # A replica that is desired again while it drains restarts when it has ended.
    surplus += [p for p in snapshot.processes if p.name in wanted and p.terminated_ns is not None]
    ending = _terminate(tuple(surplus), Stop(reason="fewer replicas"), desired.grace_ns, now_ns)
    actions += ending.actions
    if ending.wake_at_ns is not None:
        wakes.append(ending.wake_at_ns)

    upstreams = _upstreams(known, wanted)
    if upstreams != snapshot.published:
        # Before anything is stopped: the router must not send requests to a draining replica.
        actions.insert(0, Publish(upstreams=upstreams))
    if not snapshot.announced and _all_ready(known, wanted):
        actions.append(Announce())
    return FleetDecision(actions=tuple(actions), wake_at_ns=min(wakes, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deadline:
    """Return the time and the reason to kill a running process."""

    at_ns: int
    reason: str


def _deadline(process: ProcessView, desired: Desired, *, announced: bool) -> _Deadline | None:
    if process.killed:
        return None
    if process.phase is ProcessPhase.STARTING and announced:
        timeout_ns = desired.ready_timeout_ns
        reason = f"it did not start within {_seconds(timeout_ns)}"
        return _Deadline(at_ns=process.started_ns + timeout_ns, reason=reason)
    if process.silent_ns is not None:
        timeout_ns = desired.liveness_timeout_ns
        reason = f"it failed its liveness checks for {_seconds(timeout_ns)}"
        return _Deadline(at_ns=process.silent_ns + timeout_ns, reason=reason)
    return None


def _shut_down(
    processes: tuple[ProcessView, ...], stop: Stop, grace_ns: int, now_ns: int
) -> FleetDecision:
    """Stop the router first, and the replicas once it has ended.

    A router that drains admits no request and finishes those that it has, for which it still
    needs replicas that admit them. All of it is bounded by one grace period.
    """
    routers = tuple(p for p in processes if p.role is Role.ROUTER and p.alive)
    if routers and not stop.at_once:
        return _terminate(routers, stop, grace_ns, now_ns)
    ended_ns = (p.terminated_ns for p in processes if p.role is Role.ROUTER)
    begun_ns = next((at_ns for at_ns in ended_ns if at_ns is not None), None)
    return _terminate(processes, stop, grace_ns, now_ns, begun_ns=begun_ns)


def _terminate(
    processes: tuple[ProcessView, ...],
    stop: Stop,
    grace_ns: int,
    now_ns: int,
    *,
    begun_ns: int | None = None,
) -> FleetDecision:
    """Send SIGTERM, and SIGKILL after the grace period.

    Args:
        processes: to end.
        stop: the request.
        grace_ns: from SIGTERM, or from `begun_ns`.
        now_ns: the time.
        begun_ns: start of the shutdown, if other processes were ended first.
    """
    patience_ns = grace_ns + _EXIT_MARGIN_NS
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
        kill_ns = sent_ns + patience_ns
        if begun_ns is not None:
            kill_ns = max(begun_ns + patience_ns, sent_ns + _EXIT_MARGIN_NS)
        if now_ns >= kill_ns:
            reason = f"it did not end within {_seconds(kill_ns - sent_ns)} of SIGTERM"
            actions.append(Kill(name=process.name, reason=reason))
        else:
            wakes.append(kill_ns)
    return FleetDecision(
        actions=tuple(actions), wake_at_ns=min(wakes, default=None), finished=not alive
    )


def _give_up(snapshot: FleetSnapshot, desired: Desired, now_ns: int) -> GiveUp | None:
    if snapshot.announced:
        return None
    for process in snapshot.processes:
        if process.exit_code == ExitCode.USAGE and not process.ever_ready:
            # An invalid manifest or option: a restart would end in the same way.
            sentence = process.error or f"{process.name} rejected its arguments{_last(process)}"
            return GiveUp(sentence=sentence, exit_code=ExitCode.USAGE)
    if now_ns < snapshot.began_ns + desired.ready_timeout_ns:
        return None
    known = {process.name: process for process in snapshot.processes}
    for name in desired.processes:
        late = known.get(name)
        if late is None or late.phase is not ProcessPhase.READY:
            waited = _seconds(desired.ready_timeout_ns)
            sentence = (
                f"{name} was not ready within {waited}{_how(late) if late else ''}; "
                "see its log, or give it longer with --ready-timeout"
            )
            return GiveUp(sentence=sentence, exit_code=ExitCode.INTERNAL)
    return None


def _how(process: ProcessView) -> str:
    ended = f", it ended with code {process.exit_code}" if process.exit_code is not None else ""
    return f"{ended}{_last(process)}"


def _last(process: ProcessView) -> str:
    line = process.error or process.last_line
    return f", its last log line was {line!r}" if line else ", and it logged nothing"


def _upstreams(known: dict[str, ProcessView], wanted: dict[str, Role]) -> tuple[RoutedReplica, ...]:
    return tuple(
        RoutedReplica(name=name, url=process.address.url, admin_url=process.address.admin_url)
        for name, role in wanted.items()
        if role is Role.REPLICA
        and (process := known.get(name)) is not None
        and process.serving
        and process.address is not None
    )


def _all_ready(known: dict[str, ProcessView], wanted: dict[str, Role]) -> bool:
    return all(name in known and known[name].phase is ProcessPhase.READY for name in wanted)


def _seconds(ns: int) -> str:
    return f"{ns / NS_PER_S:g} s"
