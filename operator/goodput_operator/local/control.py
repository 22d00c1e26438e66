"""The control laws over processes: once per interval observe, decide, apply.

The same measures and the same round of control as over pods. Here they are asked of this
machine's processes, and what comes out goes to the fleet and, over HTTP, to the engines.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from goodput_core.control import Bounds, ReplicaPhase, ServiceState
from goodput_core.units import NS_PER_S
from goodput_operator.control.decided import Decided
from goodput_operator.control.rounds import control_round
from goodput_operator.limits_push import push_limits
from goodput_operator.local.snapshot import Phase, Role
from goodput_operator.measure.differencing import Baseline, measured
from goodput_operator.measure.gathering import Gatherer
from goodput_operator.measure.readings import Reading, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import aiohttp

    from goodput_core.control import ServiceParams
    from goodput_operator.control.measures import Measures
    from goodput_operator.control.rounds import ControlRound
    from goodput_operator.local.fleet import Fleet
    from goodput_operator.local.reporter import Reporter
    from goodput_operator.local.snapshot import ProcessView

__all__ = ["FleetControl"]


class FleetControl:
    """Looks after one fleet of processes.

    Args:
        params: the manifest's bounds.
        interval_ns: between two rounds.
        token: of the engines' admin ports.
        reporter: told of each round.
        clock: nanoseconds, monotonic.
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
        self._law = ServiceState()
        # Engines begin with the manifest's own limits, which have no revision.
        self._decided = Decided(
            limits_revision=0, bounds=Bounds.initial(params), replicas=params.initial_replicas
        )
        self._recommended: int | None = None
        self._baseline: Baseline | None = None

    async def run(self, session: aiohttp.ClientSession, fleet: Fleet) -> None:
        """Go on until cancelled.

        Args:
            session: of HTTP.
            fleet: to look after.
        """
        next_ns = self._clock()
        while True:
            round_ = await self._round(session, fleet)
            self._reporter.decided(round_)
            next_ns = max(next_ns + self._interval_ns, self._clock())
            await asyncio.sleep((next_ns - self._clock()) / NS_PER_S)

    async def _round(self, session: aiohttp.ClientSession, fleet: Fleet) -> ControlRound:
        processes = fleet.processes
        measures = await self._measure(Gatherer(session), processes)
        replicas = [p for p in processes if p.role is Role.REPLICA]
        round_ = control_round(
            measures,
            params=self._params,
            law=self._law,
            last=self._decided,
            told=self._decided.bounds,
            recommended=self._recommended,
            phases={process.name: _phase(process) for process in replicas},
            asked=fleet.replicas,
            startups_ns=tuple(
                p.ready_ns - p.started_ns for p in replicas if p.ready_ns is not None
            ),
            now_ns=self._clock(),
        )
        self._law, self._decided = round_.law, round_.decided
        self._recommended = round_.recommended
        await self._tell(session, processes, round_)
        fleet.scale(round_.decided.replicas)
        return round_

    async def _measure(self, gatherer: Gatherer, processes: Sequence[ProcessView]) -> Measures:
        at_ns = self._clock()
        routers, engines = await asyncio.gather(
            gatherer.routers(_sources(processes, Role.ROUTER)),
            gatherer.engines(_sources(processes, Role.REPLICA)),
        )
        self._baseline, measures = measured(
            self._baseline,
            Reading(at_ns=at_ns, routers=routers, engines=engines),
            classes=[one.name for one in self._params.classes],
            interval_ns=self._interval_ns,
        )
        return measures

    async def _tell(
        self,
        session: aiohttp.ClientSession,
        processes: Sequence[ProcessView],
        round_: ControlRound,
    ) -> None:
        urls = {p.name: p.address.admin_url for p in processes if p.address is not None}
        said = await asyncio.gather(
            *(
                push_limits(session, urls[push.name], token=self._token, limits=push.limits)
                for push in round_.pushes
            )
        )
        for push, words in zip(round_.pushes, said, strict=True):
            if words:
                self._reporter.say(f"{push.name}: {words}")


def _sources(processes: Sequence[ProcessView], role: Role) -> tuple[Source, ...]:
    return tuple(
        Source(
            name=process.name,
            uid=_uid(process),
            url=process.address.admin_url,
            ready=process.serving,
        )
        for process in processes
        if process.role is role and process.alive and process.address is not None
    )


def _uid(process: ProcessView) -> str:
    return f"{process.name}/{process.started_ns}"


def _phase(process: ProcessView) -> ReplicaPhase:
    if process.terminated_ns is not None:
        return ReplicaPhase.DRAINING
    return ReplicaPhase.READY if process.phase is Phase.READY else ReplicaPhase.STARTING
