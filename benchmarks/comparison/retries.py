"""Clients that obey `Retry-After`, and the share of them that is admitted at the first retry.

A refused client sends the same request again after the time that the refusal states. Its targets
count from the new arrival, because a client that retries measures from then on.
"""

from __future__ import annotations

import heapq
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from benchmarks.comparison.cells import fleet_settings, planned_requests, slo_classes
from benchmarks.comparison.forced import WatchedSloPolicy, refusal_cells
from benchmarks.comparison.loads import offered

from goodput_core.slo.judging import JudgementKind, judge
from goodput_core.slo.record import Outcome
from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_S
from goodput_replay.emulation.emulate import emulate
from goodput_replay.plan import PlannedRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.comparison.cells import Cell

    from goodput_core.slo.record import RequestRecord
    from goodput_engine.scheduler.admission import Rejection

__all__ = [
    "FACTORS",
    "HORIZON_S",
    "Client",
    "Clients",
    "RetryResult",
    "retry_cells",
    "serve_clients",
]

FACTORS: Final = (0.8, 1.0, 1.2, 1.5)
HORIZON_S: Final = 60.0
"""Duration of the arrivals, several times as long as the wait before a retry."""


@dataclass(slots=True, kw_only=True)
class Client:
    """One client.

    Attributes:
        attempts: requests sent so far.
        waits_s: waits stated by its refusals.
        admitted: True if its last request was not refused.
        kept: True if its last request met its targets.
    """

    planned: PlannedRequest
    attempts: int = 0
    waits_s: list[int] = field(default_factory=list)
    admitted: bool = False
    kept: bool = False


class Clients:
    """Sends requests in virtual time, and sends refused ones again.

    The fleet takes one request ahead. If there is no arrival for longer than a client waits, which
    is at least a second, the client therefore retries with the next arrival. No client retries
    after the last arrival, where the load ends.

    Args:
        requests: first request of each client, by arrival.
        rejections: receives the rejections of a `WatchedSloPolicy`, by rid.
        most_retries: number of retries after which a client gives up.
    """

    def __init__(
        self,
        requests: Sequence[PlannedRequest],
        rejections: Mapping[int, Rejection],
        *,
        most_retries: int,
    ) -> None:
        self.clients: Final = [Client(planned=planned) for planned in requests]
        self._rejections = rejections
        self._most_retries = most_retries
        self._sent: list[int] = []
        """Client of each request sent, in the order of their rids, which start from 1."""
        self._rids: dict[str, int] = {}
        self._retries: list[tuple[int, int]] = []
        """Time and client of each retry to send."""
        self._last_ns = 0
        """Time of the last request sent."""

    def requests(self) -> Iterator[PlannedRequest]:
        """Yield all requests in the order of their arrival."""
        for number, client in enumerate(self.clients):
            at_ns = client.planned.scheduled_ns
            yield from self._due(at_ns)
            yield self._send(number, at_ns)

    def _due(self, now_ns: int) -> Iterator[PlannedRequest]:
        while self._retries and self._retries[0][0] <= now_ns:
            at_ns, number = heapq.heappop(self._retries)
            yield self._send(number, at_ns)

    def _send(self, number: int, at_ns: int) -> PlannedRequest:
        client = self.clients[number]
        client.attempts += 1
        at_ns = self._last_ns = max(at_ns, self._last_ns)
        self._sent.append(number)
        first = client.planned
        name = f"{first.request_id}-{client.attempts}"
        self._rids[name] = len(self._sent)
        left_ns = first.cancel_after_ns
        if left_ns is not None:
            left_ns -= at_ns - first.scheduled_ns
        return replace(first, request_id=name, scheduled_ns=at_ns, cancel_after_ns=left_ns)

    def on_record(self, planned: PlannedRequest, record: RequestRecord) -> None:
        """Note the end of a request, and plan a retry of a refused one."""
        rid = self._rids.pop(planned.request_id)
        number = self._sent[rid - 1]
        client = self.clients[number]
        client.kept = judge(record, planned.targets).kind is JudgementKind.ATTAINED
        client.admitted = record.outcome is not Outcome.SHED
        if client.admitted:
            return
        assert record.end_ns is not None
        wait_s = self._rejections[rid].retry_after_s
        client.waits_s.append(wait_s)
        if client.attempts <= self._most_retries:
            heapq.heappush(self._retries, (record.end_ns + wait_s * NS_PER_S, number))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryResult:
    """Clients of one load, with and without retries.

    Args:
        cell: name of the cell.
        mix: name of the mix.
        factor: rate of new clients in multiples of the knee.
        duration_s: duration of the arrivals.
        clients: number of clients.
        refused: clients whose first request was refused.
        impossible: those of them whose request misses its targets even on an idle replica. They
            are not counted in the next two numbers.
        retried: refused clients that retried while the load lasted.
        entered: clients that were admitted at their first retry.
        mean_wait_s: mean wait stated by the first refusals; 0 without any.
        kept: clients one of whose requests met its targets.
        kept_without: clients whose requests met their targets in a run without retries.
    """

    cell: str
    mix: str
    factor: float
    duration_s: float
    clients: int
    refused: int
    impossible: int
    retried: int
    entered: int
    mean_wait_s: float
    kept: int
    kept_without: int


def retry_cells(
    knees: Mapping[str, float], *, mixes: Sequence[str] = (), factors: Sequence[float] = FACTORS
) -> list[Cell]:
    """Return the cells: Poisson arrivals on one replica, with known lengths.

    For the arguments, see `forced.refusal_cells`.
    """
    return [
        replace(cell, load=replace(cell.load, horizon_s=HORIZON_S))
        for cell in refusal_cells(knees, mixes=mixes, factors=factors)
        if cell.load.known_lengths
    ]


def serve_clients(cell: Cell, seed: int, *, most_retries: int) -> RetryResult:
    """Serve a cell twice, with and without retries.

    Args:
        cell: the cell.
        seed: seed of the load and of the router.
        most_retries: number of retries after which a client gives up.
    """
    assert cell.factor is not None
    clients = _serve(cell, seed, most_retries=most_retries)
    refused = [client for client in clients if client.waits_s]
    possible = _kept_when_idle(cell, seed, [client.planned for client in refused])
    retried = [
        client
        for client in refused
        if client.attempts > 1 and client.planned.request_id in possible
    ]
    without = _serve(cell, seed, most_retries=0)
    return RetryResult(
        cell=cell.name,
        mix=cell.load.mix,
        factor=cell.factor,
        duration_s=cell.load.horizon_s,
        clients=len(clients),
        refused=len(refused),
        impossible=len(refused) - len(possible),
        retried=len(retried),
        entered=sum(client.admitted and client.attempts == 2 for client in retried),
        mean_wait_s=statistics.fmean(c.waits_s[0] for c in refused) if refused else 0.0,
        kept=sum(client.kept for client in clients),
        kept_without=sum(client.kept for client in without),
    )


def _serve(cell: Cell, seed: int, *, most_retries: int) -> list[Client]:
    """Serve a cell and return its clients."""
    requests = offered(cell.load, seed)
    end_ns = requests[-1].arrival_ns + max(request.slack_ns or 0 for request in requests) + 1
    planned = [
        replace(one, cancel_after_ns=end_ns - one.scheduled_ns)
        for one in planned_requests({str(n): request for n, request in enumerate(requests)})
    ]
    rejections: dict[int, Rejection] = {}
    clients = Clients(planned, rejections, most_retries=most_retries)
    settings = replace(
        fleet_settings(cell, Policy.SLO, seed, cell.preemption, slo=slo_classes(requests)),
        build_policy=lambda: WatchedSloPolicy(rejections),
    )
    emulate(clients.requests(), settings, clients.on_record)
    return clients.clients


def _kept_when_idle(cell: Cell, seed: int, requests: Sequence[PlannedRequest]) -> set[str]:
    """Return the ids of the requests that meet their targets if they are served one by one."""
    classes = slo_classes(offered(cell.load, seed))
    settings = fleet_settings(cell, Policy.SLO, seed, cell.preemption, slo=classes)
    every_ns = settings.timeout_ns + 1
    spaced = (
        replace(one, scheduled_ns=number * every_ns, cancel_after_ns=None)
        for number, one in enumerate(requests)
    )
    kept: set[str] = set()

    def on_record(planned: PlannedRequest, record: RequestRecord) -> None:
        if judge(record, planned.targets).kind is JudgementKind.ATTAINED:
            kept.add(planned.request_id)

    emulate(spaced, settings, on_record)
    return kept
