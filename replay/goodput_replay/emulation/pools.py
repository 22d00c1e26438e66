"""A fleet with separate prefill and decode replicas.

A request is placed on a prefill replica, which computes its first token and keeps its blocks. The
decode replicas pull requests in order: a replica with enough free blocks reserves them, and the
keys and values are copied over the links of both replicas. A replica takes part in one transfer at
a time. After the transfer, the prefill replica releases the blocks and decoding continues. While no
decode replica has enough free blocks, requests stay on the prefill replicas, which stop admitting
requests when their memory is full.

Source: Zhong et al., "DistServe", OSDI 2024, section 4.3; Patel et al., "Splitwise", ISCA 2024.
Unlike Splitwise, a transfer does not overlap with the prompt's own computation.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from goodput_core.units import NS_PER_S
from goodput_engine.messages import ExecutorInput, Rejected
from goodput_replay.emulation.fleet import VirtualFleet
from goodput_replay.emulation.replica import VirtualReplica, Visit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from goodput_core.slo.record import RequestRecord
    from goodput_engine.messages import Submit
    from goodput_replay.emulation.fleet import Actor
    from goodput_replay.emulation.settings import DecodePool, FleetOutcome, FleetSettings
    from goodput_replay.plan import PlannedRequest

__all__ = ["DisaggregatedFleet"]


class _Journey:
    """A request that moves from a prefill to a decode replica.

    Args:
        visit: the request on the prefill replica.
        first_token_ns: time of the first token.
        cached_tokens: prompt tokens found in the prefix cache.
    """

    __slots__ = ("cached_tokens", "first_token_ns", "target", "visit")

    def __init__(self, visit: Visit, first_token_ns: int, cached_tokens: int) -> None:
        self.visit: Final = visit
        self.first_token_ns: Final = first_token_ns
        self.cached_tokens: Final = cached_tokens
        self.target: Visit | None = None
        """The request on the decode replica during the transfer."""


class DisaggregatedFleet(VirtualFleet):
    """A fleet of two pools; `replicas` are the prefill replicas.

    Args:
        settings: fleet configuration.
        pool: decode replicas.
        on_record: called with each completed request and its record.
    """

    def __init__(
        self,
        settings: FleetSettings,
        pool: DecodePool,
        on_record: Callable[[PlannedRequest, RequestRecord], None],
    ) -> None:
        self._pool = pool
        self._submits: dict[int, Submit] = {}
        self._journeys: dict[int, _Journey] = {}
        self._queue: deque[_Journey] = deque()
        self._transfers: list[tuple[int, int]] = []
        self._link_free_ns: dict[str, int] = {}
        self._freed: dict[str, VirtualReplica] = {}
        super().__init__(settings, on_record)
        self._decoders = [
            self._build(f"{settings.service}-decode-{i}", pool.configure, 0, 0, self._finished)
            for i in range(pool.replicas)
        ]

    def _all_replicas(self) -> list[VirtualReplica]:
        return [*self.replicas, *self._decoders]

    def _add(self, created_ns: int, ready_ns: int) -> VirtualReplica:
        settings = self.settings
        name = f"{settings.service}-prefill-{self._created}"
        replica = self._build(name, settings.configure, created_ns, ready_ns, self._prefilled)
        self._created += 1
        self.replicas.append(replica)
        return replica

    # --- events ----------------------------------------------------------------------------
    def _next_event_ns(self, upcoming: PlannedRequest | None, actors: Iterable[Actor]) -> int:
        """Include ends of transfers and prefill steps, and of decode steps if requests wait."""
        times_ns = [super()._next_event_ns(upcoming, actors)]
        if self._transfers:
            times_ns.append(self._transfers[0][0])
        watched = self._all_replicas() if self._queue else self.replicas
        times_ns += [replica.due_ns for replica in watched if replica.due_ns is not None]
        return min(times_ns)

    def _settle(self, affected: dict[str, VirtualReplica], now_ns: int) -> None:
        while self._transfers and self._transfers[0][0] <= now_ns:
            _, rid = heapq.heappop(self._transfers)
            if rid in self._journeys:
                self._arrive_at_decoder(self._journeys.pop(rid), affected)
        super()._settle(affected, now_ns)
        self._pull(now_ns)
        if self._freed:
            freed, self._freed = self._freed, {}
            super()._settle(freed, now_ns)

    # --- prefill ---------------------------------------------------------------------------
    def _submit_to(
        self, replica: VirtualReplica, visit: Visit, submit: Submit, now_ns: int
    ) -> Rejected | None:
        """Submit only the prompt; the output is computed on a decode replica."""
        longest = self._decoders[0].core.scheduler.max_total_tokens
        asked = submit.max_output_tokens
        if asked is not None and submit.input_tokens + asked > longest:
            detail = (
                f"{submit.input_tokens} prompt tokens and {asked} output tokens are more than the "
                f"{longest} that prompt and output may have together"
            )
            return Rejected(rid=submit.rid, reason="too_long", detail=detail)
        prompt = msgspec.structs.replace(
            submit, max_output_tokens=1, executor=ExecutorInput(output_tokens=1)
        )
        rejected = replica.submit(visit, prompt, now_ns, holds_blocks=True)
        if rejected is None:
            self._submits[submit.rid] = submit
        return rejected

    def _prefilled(self, visit: Visit, times: NDArray[np.int64], cached_tokens: int) -> None:
        """Queue a request for decoding after its prompt was computed."""
        replica, rid = visit.replica, visit.rid
        submit = self._submits[rid]
        if submit.executor.output_tokens == 1 or submit.max_output_tokens == 1:
            replica.core.release_held(rid)
            self._freed[replica.name] = replica
            self._finished(visit, times, cached_tokens)
            return
        replica.hold(visit)
        journey = _Journey(visit, int(times[0]), cached_tokens)
        self._journeys[rid] = journey
        self._queue.append(journey)

    # --- KV transfer -----------------------------------------------------------------------
    def _pull(self, now_ns: int) -> None:
        """Start the transfers that fit, in queue order."""
        while self._queue:
            journey = self._queue[0]
            if journey.visit.rid in self._journeys:
                target = self._reserve(journey, now_ns)
                if target is None:
                    return
                self._start_transfer(journey, target, now_ns)
            self._queue.popleft()

    def _reserve(self, journey: _Journey, now_ns: int) -> Visit | None:
        """Reserve blocks on the decode replica with the fewest requests; None if none has enough.

        Ties go to the replica whose link has been free longest.
        """
        visit, free_ns = journey.visit, self._link_free_ns
        for replica in sorted(self._decoders, key=lambda r: (r.in_flight, free_ns.get(r.name, 0))):
            target = Visit(visit.planned, visit.rid, replica, earlier=(journey.first_token_ns,))
            submit = self._submits[visit.rid]
            if replica.take_over(target, submit, now_ns, first_token_ns=journey.first_token_ns):
                return target
        return None

    def _start_transfer(self, journey: _Journey, target: Visit, now_ns: int) -> None:
        journey.target = target
        tokens = journey.visit.planned.prompt.input_tokens
        size = tokens * self.settings.profile.kv_bytes_per_token
        ends = (journey.visit.replica.name, target.replica.name)
        start_ns = max(now_ns, *(self._link_free_ns.get(name, 0) for name in ends))
        end_ns = start_ns + max(1, -(-size * NS_PER_S // self._pool.link_bytes_per_s))
        self._link_free_ns.update(dict.fromkeys(ends, end_ns))
        heapq.heappush(self._transfers, (end_ns, target.rid))

    def _arrive_at_decoder(self, journey: _Journey, affected: dict[str, VirtualReplica]) -> None:
        source, target = journey.visit.replica, journey.target
        assert target is not None
        source.release(journey.visit)
        target.replica.core.finish_transfer(target.rid)
        target.cached_tokens = journey.cached_tokens
        self._live[target.rid] = target
        for replica in (source, target.replica):
            affected[replica.name] = replica

    # --- the end ---------------------------------------------------------------------------
    def _cancel(self, visit: Visit) -> tuple[NDArray[np.int64], list[VirtualReplica]]:
        journey = self._journeys.pop(visit.rid, None)
        times, left = super()._cancel(visit)
        if journey is not None and journey.target is not None:
            journey.target.replica.cancel(journey.target)
            left.append(journey.target.replica)
        return times, left

    def _end(self, rid: int, planned: PlannedRequest, record: RequestRecord) -> None:
        self._submits.pop(rid, None)
        super()._end(rid, planned, record)

    def run(self, requests: Iterator[PlannedRequest], actors: Sequence[Actor]) -> FleetOutcome:
        """See `emulate`; actors are not supported.

        Raises:
            ValueError: there are actors.
        """
        if actors:
            raise ValueError("a fleet of two pools does not support actors")
        return super().run(requests, actors)
