"""From a snapshot of the local fleet to what is to be done now: pure, level-triggered.

The operator decides over pods in the same shape; the control law chooses replicas by changing
`Desired`. No clock, no process, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from goodput_core.errors import ExitCode
from goodput_core.units import NS_PER_S
from goodput_operator.local.snapshot import (
    Desired,
    Phase,
    ProcessView,
    Role,
    Snapshot,
    Stop,
    Upstream,
)

__all__ = [
    "Action",
    "Announce",
    "Decision",
    "Forget",
    "GiveUp",
    "Kill",
    "Publish",
    "Start",
    "Terminate",
    "decide",
]

# Children bound their own drain by the same grace period, and then need a moment to say so.
_LAST_WORDS_NS: Final = 2 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a process that does not run."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """Ask a process to end: SIGTERM, it drains."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End a process and everything it started: SIGKILL to its group."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Drop a process that has ended and is not wanted any more."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Write the router's file of upstreams."""

    upstreams: tuple[Upstream, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Tell people and parents that traffic may start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The fleet cannot become ready: stop everything and say why."""

    sentence: str
    exit_code: ExitCode


Action = Start | Terminate | Kill | Forget | Publish | Announce | GiveUp


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be done.

    Args:
        actions: in this order.
        wake_at_ns: decide again at the latest then; None: only when something has changed.
        finished: a stop was asked for and nothing runs any more.
    """

    actions: tuple[Action, ...] = ()
    wake_at_ns: int | None = None
    finished: bool = False


def decide(snapshot: Snapshot, desired: Desired, now_ns: int) -> Decision:
    """One round of the fleet's law.

    Args:
        snapshot: what is.
        desired: what should be.
        now_ns: on the clock of the snapshot's times.
    """
    if snapshot.stop is not None:
        # Before it was announced nobody can be in the middle of a request.
        grace_ns = desired.grace_ns if snapshot.announced else 0
        return _stop(snapshot.processes, snapshot.stop, grace_ns, now_ns)
    give_up = _hopeless(snapshot, desired, now_ns)
    if give_up is not None:
        return Decision(actions=(give_up,))

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
        elif (doom := _doom(process, desired, announced=snapshot.announced)) is not None:
            if now_ns >= doom.at_ns:
                actions.append(Kill(name=name, reason=doom.reason))
            else:
                wakes.append(doom.at_ns)

    surplus = [process for process in snapshot.processes if process.name not in wanted]
    actions += [Forget(name=process.name) for process in surplus if not process.alive]
    # One that is wanted again while it drains starts anew when it has ended.
    surplus += [p for p in snapshot.processes if p.name in wanted and p.terminated_ns is not None]
    ending = _stop(tuple(surplus), Stop(reason="fewer replicas"), desired.grace_ns, now_ns)
    actions += ending.actions
    if ending.wake_at_ns is not None:
        wakes.append(ending.wake_at_ns)

    upstreams = _upstreams(known, wanted)
    if upstreams != snapshot.published:
        # Before anything is stopped: the router must not send a request to what is ending.
        actions.insert(0, Publish(upstreams=upstreams))
    if not snapshot.announced and _all_ready(known, wanted):
        actions.append(Announce())
    return Decision(actions=tuple(actions), wake_at_ns=min(wakes, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Doom:
    """When a process that runs is to be killed, and why."""

    at_ns: int
    reason: str


def _doom(process: ProcessView, desired: Desired, *, announced: bool) -> _Doom | None:
    if process.killed:
        return None
    if process.phase is Phase.STARTING and announced:
        timeout_ns = desired.ready_timeout_ns
        reason = f"it did not start within {_seconds(timeout_ns)}"
        return _Doom(at_ns=process.started_ns + timeout_ns, reason=reason)
    if process.silent_ns is not None:
        timeout_ns = desired.liveness_timeout_ns
        reason = f"it answered nothing for {_seconds(timeout_ns)}"
        return _Doom(at_ns=process.silent_ns + timeout_ns, reason=reason)
    return None


def _stop(processes: tuple[ProcessView, ...], stop: Stop, grace_ns: int, now_ns: int) -> Decision:
    patience_ns = grace_ns + _LAST_WORDS_NS
    actions: list[Action] = []
    wakes: list[int] = []
    alive = [process for process in processes if process.alive]
    for process in alive:
        if process.killed:
            continue
        if stop.at_once:
            actions.append(Kill(name=process.name, reason=stop.reason))
        elif process.terminated_ns is None:
            actions.append(Terminate(name=process.name))
            wakes.append(now_ns + patience_ns)
        elif now_ns >= process.terminated_ns + patience_ns:
            reason = f"it did not end within {_seconds(patience_ns)} of SIGTERM"
            actions.append(Kill(name=process.name, reason=reason))
        else:
            wakes.append(process.terminated_ns + patience_ns)
    return Decision(actions=tuple(actions), wake_at_ns=min(wakes, default=None), finished=not alive)


def _hopeless(snapshot: Snapshot, desired: Desired, now_ns: int) -> GiveUp | None:
    if snapshot.announced:
        return None
    for process in snapshot.processes:
        if process.exit_code == ExitCode.USAGE and not process.ever_ready:
            # What the user asked for cannot be: starting it again would give the same answer.
            sentence = process.error or f"{process.name} refused its arguments{_last(process)}"
            return GiveUp(sentence=sentence, exit_code=ExitCode.USAGE)
    if now_ns < snapshot.began_ns + desired.ready_timeout_ns:
        return None
    known = {process.name: process for process in snapshot.processes}
    for name in desired.processes:
        late = known.get(name)
        if late is None or late.phase is not Phase.READY:
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


def _upstreams(known: dict[str, ProcessView], wanted: dict[str, Role]) -> tuple[Upstream, ...]:
    return tuple(
        Upstream(name=name, url=process.address.url, admin_url=process.address.admin_url)
        for name, role in wanted.items()
        if role is Role.REPLICA
        and (process := known.get(name)) is not None
        and process.serving
        and process.address is not None
    )


def _all_ready(known: dict[str, ProcessView], wanted: dict[str, Role]) -> bool:
    return all(name in known and known[name].phase is Phase.READY for name in wanted)


def _seconds(ns: int) -> str:
    return f"{ns / NS_PER_S:g} s"
