"""The local fleet's loop: observe → decide → apply, until everything asked to stop has ended.

It owns the children's tasks, so that whatever happens in it, no process outlives it. What to
do is `decide`'s; how a process is started and stopped is `Child`'s.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from goodput_core.errors import ExitCode, GoodputError, InputError, InternalError, root_of
from goodput_core.units import NS_PER_S
from goodput_operator.local.child import Child
from goodput_operator.local.decide import (
    Action,
    Announce,
    Forget,
    GiveUp,
    Kill,
    Publish,
    Start,
    Terminate,
    decide,
)
from goodput_operator.local.listening import port_of
from goodput_operator.local.snapshot import (
    Address,
    Desired,
    Phase,
    ProcessView,
    Role,
    Snapshot,
    Stop,
    Upstream,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from goodput_operator.local.commands import Command, Commands
    from goodput_operator.local.reporter import Reporter

__all__ = ["Fleet"]


class Fleet:
    """A service's replicas and router on this machine. Created inside a running event loop.

    Args:
        desired: what should run.
        commands: how each process is started.
        port: the router's port, 0 for any free one; a restarted router keeps it.
        admin_port: the router's admin port, likewise.
        publish: writes the router's file of upstreams.
        routable: returns once the router at this address is ready.
        answers: whether the process at this address gives a sign of life.
        reporter: who tells people and parents.
        control: looks after the fleet from when traffic may start; None: nobody does.
        clock: nanoseconds, monotonic.
    """

    def __init__(
        self,
        *,
        desired: Desired,
        commands: Commands,
        port: int,
        admin_port: int,
        publish: Callable[[tuple[Upstream, ...]], None],
        routable: Callable[[Address], Awaitable[None]],
        answers: Callable[[Address], Awaitable[bool]],
        reporter: Reporter,
        clock: Callable[[], int],
        control: Callable[[Fleet], Coroutine[None, None, None]] | None = None,
    ) -> None:
        self._desired = desired
        self._control = control
        self._controlling: asyncio.Task[None] | None = None
        self._commands = commands
        self._ports = (port, admin_port)
        self._publish = publish
        self._routable = routable
        self._answers = answers
        self._reporter = reporter
        self._clock = clock
        self._children: dict[str, Child] = {}
        self._untold: list[ProcessView] = []
        self._published: tuple[Upstream, ...] = ()
        self._announced = False
        self._stop: Stop | None = None
        self._failure: GoodputError | None = None
        self._began_ns = clock()
        self._woken = asyncio.Event()

    @property
    def replicas(self) -> int:
        """How many replicas should serve."""
        return self._desired.replicas

    @property
    def routed(self) -> int:
        """How many replicas a ready router sees: all of them before traffic may start.

        From then on those that its file lists: it serves with what there is.
        """
        return len(self._published) if self._announced else self._desired.replicas

    @property
    def processes(self) -> tuple[ProcessView, ...]:
        """Every process that was started and is not forgotten."""
        return tuple(child.view() for child in self._children.values())

    def scale(self, replicas: int) -> None:
        """Have so many replicas from now on: the last ones drain, or further ones start."""
        if replicas != self._desired.replicas:
            self._desired = replace(self._desired, replicas=replicas)
            self._woken.set()

    def stop(self, reason: str) -> None:
        """Let running requests finish, then end the fleet; asked again, nothing changes."""
        if self._stop is None:
            self._stop = Stop(reason=reason)
            if self._controlling is not None:
                self._controlling.cancel()
            self._reporter.stopping(reason, self._desired.grace_ns if self._announced else None)
            self._woken.set()

    def interrupt(self, reason: str) -> None:
        """End the fleet as `stop` does; while it is stopping already, at once."""
        if self._stop is None:
            self.stop(reason)
        else:
            self._stop = Stop(reason=f"{reason} while stopping", at_once=True)
            self._woken.set()

    async def run(self) -> None:
        """Run until the fleet was stopped and every process has ended.

        Raises:
            InputError: a process refused what the user asked for.
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
            self._tell()
            if decision.actions:
                await asyncio.sleep(0)  # what was done may ask for more
            else:
                await self._wait(decision.wake_at_ns)

    def _observe(self) -> Snapshot:
        return Snapshot(
            began_ns=self._began_ns,
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
                self._reporter.killed(name, reason)
                self._children[name].kill()
            case Forget(name=name):
                self._reporter.left(self._children.pop(name).view())
            case Publish(upstreams=upstreams):
                self._publish(upstreams)
                self._published = upstreams
            case Announce():
                self._announce()
                if self._control is not None:
                    self._controlling = group.create_task(self._control(self), name="control")
            case GiveUp(sentence=sentence, exit_code=code):
                error = InputError if code is ExitCode.USAGE else InternalError
                self._failure = error(sentence)
                self.stop("the service cannot start")

    def _start(self, name: str, role: Role, group: asyncio.TaskGroup) -> None:
        old = self._children.get(name)
        # One that had been asked to end starts as if for the first time.
        earlier = old.view() if old and old.view().terminated_ns is None else None
        child = Child(
            name,
            role,
            earlier=earlier,
            back_off=self._desired.back_off,
            clock=self._clock,
            log=self._reporter.log,
            changed=self._changed,
            answers=self._answers,
            silent=self._woken.set,
            routable=self._routable if role is Role.ROUTER else None,
        )
        self._children[name] = child
        group.create_task(child.run(self._command(name, role, earlier)), name=name)

    def _command(self, name: str, role: Role, earlier: ProcessView | None) -> Command:
        if role is Role.REPLICA:
            return self._commands.replica(name)
        if earlier is not None and earlier.address is not None:
            # Clients know the router by its port: it comes back on the same one.
            self._ports = (port_of(earlier.address.url), port_of(earlier.address.admin_url))
        port, admin_port = self._ports
        return self._commands.router(name, port=port, admin_port=admin_port)

    def _changed(self, process: ProcessView) -> None:
        if process.failures or self._announced:
            self._untold.append(process)
        self._woken.set()

    def _tell(self) -> None:
        """Tell of ends and returns: after the router's file was written, and what was decided."""
        for process in self._untold:
            if self._stop is not None:
                break
            if process.phase is Phase.READY:
                self._reporter.serves(process, again=process.failures > 0)
            elif process.terminated_ns is None:
                delay_ns = self._desired.back_off.delay_ns(process.name, process.failures)
                self._reporter.exited(process, delay_ns)
        self._untold.clear()

    def _announce(self) -> None:
        address = self._children[self._desired.router].view().address
        assert address is not None
        self._announced = True
        self._reporter.ready(self._desired.service, address, self._published)
