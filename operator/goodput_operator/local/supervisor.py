"""The supervisor of the local fleet: observe, decide, apply, until every process has ended.

The supervisor owns the tasks of the processes, so no process outlives it. `decide` makes the
decisions, and `ChildProcess` starts and stops processes.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from goodput_core.errors import ExitCode, GoodputError, InputError, InternalError, root_of
from goodput_core.units import NS_PER_S
from goodput_operator.local.decide import (
    Abort,
    Action,
    Announce,
    Desired,
    FleetSnapshot,
    Kill,
    ProcessPhase,
    ProcessView,
    Publish,
    Remove,
    Role,
    RoutedReplica,
    Start,
    Stop,
    Terminate,
    decide,
)
from goodput_operator.local.process import ChildProcess, port_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import aiohttp

    from goodput_operator.local.commands import Command, Commands
    from goodput_operator.local.reporter import Reporter

__all__ = ["Supervisor"]


class Supervisor:
    """Supervises a service's replicas and router. Create it inside a running event loop.

    Args:
        desired: the initial desired fleet.
        commands: command lines and files of the processes.
        port: serving port of the router, 0 for any free port; a restarted router uses the same
            port.
        admin_port: admin port of the router, in the same way.
        session: HTTP session for checks of the processes.
        reporter: reports to users and to a parent process.
        clock: monotonic clock in nanoseconds.
        control: the control loop, started when the service is ready; None in mode Manual.
    """

    def __init__(
        self,
        *,
        desired: Desired,
        commands: Commands,
        port: int,
        admin_port: int,
        session: aiohttp.ClientSession,
        reporter: Reporter,
        clock: Callable[[], int],
        control: Callable[[Supervisor], Coroutine[None, None, None]] | None = None,
    ) -> None:
        self._desired = desired
        self._control = control
        self._control_task: asyncio.Task[None] | None = None
        self._commands = commands
        self._ports = (port, admin_port)
        self._session = session
        self._reporter = reporter
        self._clock = clock
        self._children: dict[str, ChildProcess] = {}
        self._unreported: list[ProcessView] = []
        self._published: tuple[RoutedReplica, ...] = ()
        self._announced = False
        self._stop: Stop | None = None
        self._failure: GoodputError | None = None
        self._start_ns = clock()
        self._woken = asyncio.Event()

    @property
    def replicas(self) -> int:
        """Desired replicas."""
        return self._desired.replicas

    @property
    def processes(self) -> tuple[ProcessView, ...]:
        """All processes that were started and not removed."""
        return tuple(child.view for child in self._children.values())

    def scale(self, replicas: int) -> None:
        """Set the desired number of replicas."""
        if replicas != self._desired.replicas:
            self._desired = replace(self._desired, replicas=replicas)
            self._woken.set()

    def stop(self, reason: str) -> None:
        """Start the shutdown, for which processes have the grace period; do nothing if repeated."""
        if self._stop is None:
            self._stop = Stop(reason=reason)
            if self._control_task is not None:
                self._control_task.cancel()
            self._reporter.report_stop(reason, self._desired.grace_ns if self._announced else None)
            self._woken.set()

    def interrupt(self, reason: str) -> None:
        """Start the shutdown, or kill all processes if the shutdown has started."""
        if self._stop is None:
            self.stop(reason)
        else:
            self._stop = Stop(reason=f"{reason} while stopping", at_once=True)
            self._woken.set()

    async def run(self) -> None:
        """Run until a shutdown has ended every process.

        Raises:
            InputError: a process rejected the manifest or its arguments.
            InternalError: the fleet did not become ready in time.
        """
        try:
            async with asyncio.TaskGroup() as group:
                await self._loop(group)
        except BaseExceptionGroup as errors:
            raise root_of(errors) from errors
        if self._failure is not None:
            raise self._failure

    async def _loop(self, group: asyncio.TaskGroup) -> None:
        while True:
            now_ns = self._clock()
            decision = decide(self._observe(), self._desired, now_ns)
            if decision.finished:
                return
            for action in decision.actions:
                self._apply(action, group)
            self._report_changes()
            if decision.actions:
                await asyncio.sleep(0)  # the actions may require further ones
            else:
                await self._wait(decision.wake_at_ns)

    def _observe(self) -> FleetSnapshot:
        return FleetSnapshot(
            start_ns=self._start_ns,
            processes=self.processes,
            published=self._published,
            announced=self._announced,
            stop=self._stop,
        )

    async def _wait(self, wake_at_ns: int | None) -> None:
        delay_s = None
        if wake_at_ns is not None:
            delay_s = max(0, wake_at_ns - self._clock()) / NS_PER_S
        try:
            async with asyncio.timeout(delay_s):
                await self._woken.wait()
        except TimeoutError:
            pass
        self._woken.clear()

    def _apply(self, action: Action, group: asyncio.TaskGroup) -> None:
        match action:
            case Start(name=name, role=role):
                self._start(name, role, group)
            case Terminate(name=name):
                self._children[name].terminate()
            case Kill(name=name, reason=reason):
                self._reporter.report_kill(name, reason)
                self._children[name].kill()
            case Remove(name=name):
                self._reporter.report_removal(self._children.pop(name).view)
            case Publish(upstreams=upstreams):
                self._commands.workspace.publish(upstreams)
                self._published = upstreams
            case Announce():
                self._announce()
                if self._control is not None:
                    self._control_task = group.create_task(self._control(self), name="control")
            case Abort(sentence=sentence, exit_code=code):
                error = InputError if code is ExitCode.USAGE else InternalError
                self._failure = error(sentence)
                self.stop("the service cannot start")

    def _start(self, name: str, role: Role, group: asyncio.TaskGroup) -> None:
        child = self._children.get(name)
        # After SIGTERM, a process starts without the state of earlier starts.
        earlier = child.view if child and child.view.terminated_ns is None else None
        child = ChildProcess(
            name,
            role,
            earlier=earlier,
            back_off=self._desired.back_off,
            clock=self._clock,
            session=self._session,
            routed=self._routed,
            log=self._reporter.log,
            changed=self._changed,
            unresponsive=self._woken.set,
        )
        self._children[name] = child
        group.create_task(child.run(self._command(name, role, earlier)), name=name)

    def _routed(self) -> int:
        """Return the number of replicas that a ready router must have.

        Before the service is ready, all desired replicas count. Afterwards, the replicas in the
        router's file count.
        """
        return len(self._published) if self._announced else self._desired.replicas

    def _command(self, name: str, role: Role, earlier: ProcessView | None) -> Command:
        if role is Role.REPLICA:
            return self._commands.replica(name)
        if earlier is not None and earlier.address is not None:
            # Clients use the router's port, so it restarts on the same ports.
            self._ports = (port_of(earlier.address.url), port_of(earlier.address.admin_url))
        port, admin_port = self._ports
        return self._commands.router(name, port=port, admin_port=admin_port)

    def _changed(self, process: ProcessView) -> None:
        if process.failures or self._announced:
            self._unreported.append(process)
        self._woken.set()

    def _report_changes(self) -> None:
        """Report ends and restarts, after the router's file has been written."""
        for process in self._unreported:
            if self._stop is not None:
                break
            if process.phase is ProcessPhase.READY:
                self._reporter.report_start(process, again=process.failures > 0)
            elif process.terminated_ns is None:
                delay_ns = self._desired.back_off.delay_ns(process.name, process.failures)
                self._reporter.report_exit(process, delay_ns)
        self._unreported.clear()

    def _announce(self) -> None:
        address = self._children[self._desired.router].view.address
        assert address is not None
        self._announced = True
        self._reporter.report_ready(self._desired.service, address, self._published)
