"""The driver of the control loop over local processes.

In each interval, the driver measures the processes as the operator measures pods, runs a control
step, and applies the decision: it sends limits to the engines over HTTP, and the number of replicas
to the supervisor.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from goodput_core.control import (
    MAX_STARTUPS,
    ControlInput,
    ControlState,
    ControlStep,
    ReplicaPhase,
    Setpoint,
    control_step,
)
from goodput_core.units import NS_PER_S
from goodput_operator.control.admin_ports import Scraper, push_limits
from goodput_operator.control.measures import LastReading, measure_interval
from goodput_operator.control.readings import ScrapeTarget, ServiceReading
from goodput_operator.local.decide import ProcessPhase, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import aiohttp

    from goodput_core.control import ServiceParams
    from goodput_operator.control.measures import Measures
    from goodput_operator.local.decide import ProcessView
    from goodput_operator.local.reporter import Reporter
    from goodput_operator.local.supervisor import Supervisor

__all__ = ["FleetControl"]


class FleetControl:
    """The control loop of one fleet of processes.

    Args:
        params: parameters from the manifest.
        interval_ns: time between two steps.
        token: bearer token of the engines' admin ports.
        reporter: reports each step.
        clock: monotonic clock in nanoseconds.
    """

    def __init__(
        self,
        *,
        params: ServiceParams,
        interval_ns: int,
        token: str,
        reporter: Reporter,
        clock: Callable[[], int],
    ) -> None:
        self._params = params
        self._interval_ns = interval_ns
        self._token = token
        self._reporter = reporter
        self._clock = clock
        self._state = ControlState(setpoint=Setpoint.initial(params))
        self._last: LastReading | None = None

    async def run(self, session: aiohttp.ClientSession, supervisor: Supervisor) -> None:
        """Control the fleet until cancelled.

        Args:
            session: HTTP session.
            supervisor: supervisor of the processes.
        """
        next_ns = self._clock()
        while True:
            self._reporter.report_step(await self._step(session, supervisor))
            next_ns = max(next_ns + self._interval_ns, self._clock())
            await asyncio.sleep((next_ns - self._clock()) / NS_PER_S)

    async def _step(self, session: aiohttp.ClientSession, supervisor: Supervisor) -> ControlStep:
        processes = supervisor.processes
        measures = await self._measure(Scraper(session), processes)
        replicas = [p for p in processes if p.role is Role.REPLICA]
        step = control_step(
            ControlInput(
                state=self._state,
                params=self._params,
                interval_ns=measures.interval_ns,
                traffic=measures.traffic,
                classes=measures.classes,
                outcomes=measures.outcomes,
                engines=measures.engines,
                phases={process.name: _phase(process) for process in replicas},
                desired_replicas=supervisor.replicas,
                startups_ns=tuple(
                    p.ready_ns - p.started_ns for p in replicas if p.ready_ns is not None
                )[-MAX_STARTUPS:],
                now_ns=self._clock(),
            )
        )
        self._state = step.state
        await self.push(session, processes, step)
        supervisor.scale(step.state.setpoint.replicas)
        return step

    async def _measure(self, scraper: Scraper, processes: Sequence[ProcessView]) -> Measures:
        at_ns = self._clock()
        routers, engines = await asyncio.gather(
            scraper.routers(_targets(processes, Role.ROUTER)),
            scraper.engines(_targets(processes, Role.REPLICA)),
        )
        self._last, measures = measure_interval(
            self._last,
            ServiceReading(at_ns=at_ns, routers=routers, engines=engines),
            classes=[slo_class.name for slo_class in self._params.classes],
            interval_ns=self._interval_ns,
        )
        return measures

    async def push(
        self, session: aiohttp.ClientSession, processes: Sequence[ProcessView], step: ControlStep
    ) -> None:
        """Push the limits of a step to the engines that do not have them, and report failures."""
        urls = {p.name: p.address.admin_url for p in processes if p.address is not None}
        problems = await asyncio.gather(
            *(
                push_limits(session, urls[push.name], token=self._token, limits=push.limits)
                for push in step.pushes
            )
        )
        for push, problem in zip(step.pushes, problems, strict=True):
            if problem:
                self._reporter.log_message(f"{push.name}: {problem}")


def _targets(processes: Sequence[ProcessView], role: Role) -> tuple[ScrapeTarget, ...]:
    return tuple(
        ScrapeTarget(
            name=process.name,
            uid=f"{process.name}/{process.started_ns}",
            url=process.address.admin_url,
            ready=process.serving,
        )
        for process in processes
        if process.role is role and process.alive and process.address is not None
    )


def _phase(process: ProcessView) -> ReplicaPhase:
    if process.terminated_ns is not None:
        return ReplicaPhase.DRAINING
    return ReplicaPhase.READY if process.phase is ProcessPhase.READY else ReplicaPhase.STARTING
