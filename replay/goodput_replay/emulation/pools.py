"""A fleet with separate prefill and decode replicas.

A request is placed on a prefill replica, which computes its first token and keeps its blocks. The
decode replicas pull requests in the order in which their prompts were computed: a replica with
enough free blocks for the prompt reserves those blocks, and the keys and values are copied over the
links of both replicas. A replica takes part in one transfer at a time. After the transfer, the
prefill replica releases its blocks, and decoding continues on the decode replica. While no decode
replica has enough free blocks, requests stay on the prefill replicas, which stop admitting requests
when their memory is full.

Source: Zhong et al., "DistServe", OSDI 2024, section 4.3; Patel et al., "Splitwise", ISCA 2024.
Unlike in Splitwise, the blocks of a prompt are copied only after the whole prompt is computed.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from goodput_core.units import NS_PER_S
from goodput_engine.messages import ExecutorInput, Rejected
from goodput_engine.scheduler.admission import describe_long_output
from goodput_replay.emulation.fleet import VirtualFleet
from goodput_replay.emulation.replica import ReplicaRequest, VirtualReplica

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.emulation.fleet import Actor
    from goodput_replay.emulation.settings import DecodePool, FleetSettings
    from goodput_replay.plan import PlannedRequest

__all__ = ["DisaggregatedFleet"]


class _Transfer:
    """A transfer of a request from a prefill to a decode replica, waiting or in progress.

    Args:
        source: the request on the prefill replica.
        first_token_ns: time of the first token.
        cached_tokens: prompt tokens found in the prefix cache.
    """

    __slots__ = ("cached_tokens", "first_token_ns", "source", "target")

    def __init__(self, source: ReplicaRequest, first_token_ns: int, cached_tokens: int) -> None:
        self.source: Final = source
        self.first_token_ns: Final = first_token_ns
        self.cached_tokens: Final = cached_tokens
        self.target: ReplicaRequest | None = None
        """The request on the decode replica; None while the transfer waits for free blocks."""


class DisaggregatedFleet(VirtualFleet):
    """A fleet of two pools; `replicas` are the prefill replicas.

    Args:
        settings: fleet configuration.
        pool: decode replicas.
        on_record: called when a request has ended, with the request and its record.
    """

    def __init__(
        self,
        settings: FleetSettings,
        pool: DecodePool,
        on_record: Callable[[PlannedRequest, RequestRecord], None],
    ) -> None:
        self._transfers: dict[int, _Transfer] = {}
        # `_waiting` and `_ends` can hold cancelled transfers, which `_transfers` no longer has.
        self._waiting: deque[_Transfer] = deque()
        self._ends: list[tuple[int, int]] = []
        self._link_free_ns: dict[str, int] = {}
        self._decoders: list[VirtualReplica] = []
        super().__init__(settings, on_record)
        self._decoders += [
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
    def _next_event_ns(self, actors: Iterable[Actor]) -> int:
        """Include ends of transfers and prefill steps; while requests wait, also decode steps."""
        times_ns = [super()._next_event_ns(actors)]
        if self._ends:
            times_ns.append(self._ends[0][0])
        watched = self._all_replicas() if self._waiting else self.replicas
        times_ns += [replica.due_ns for replica in watched if replica.due_ns is not None]
        return min(times_ns)

    def _settle(self, now_ns: int) -> None:
        while self._ends and self._ends[0][0] <= now_ns:
            _, rid = heapq.heappop(self._ends)
            if rid in self._transfers:
                self._finish_transfer(self._transfers.pop(rid))
        super()._settle(now_ns)
        self._start_transfers(now_ns)
        super()._settle(now_ns)  # plan again where requests that ended released their blocks

    # --- prefill ---------------------------------------------------------------------------
    def _submit_to_engine(self, request: ReplicaRequest, now_ns: int) -> Rejected | None:
        """Submit the prompt with one output token; a decode replica computes the other tokens."""
        submit = request.submit
        limit = self._decoders[0].core.scheduler.max_total_tokens
        output_tokens = submit.max_output_tokens
        if output_tokens is not None and submit.input_tokens + output_tokens > limit:
            detail = describe_long_output(
                output_tokens, input_tokens=submit.input_tokens, context_tokens=limit
            )
            return Rejected(rid=submit.rid, reason="too_long", detail=detail)
        prompt = msgspec.structs.replace(
            submit, max_output_tokens=1, executor=ExecutorInput(output_tokens=1)
        )
        return request.replica.submit(request, prompt, now_ns, holds_blocks=True)

    def _prefilled(
        self, request: ReplicaRequest, times: NDArray[np.int64], cached_tokens: int
    ) -> None:
        """Queue a request for decoding after its prompt was computed."""
        replica, submit = request.replica, request.submit
        if submit.executor.output_tokens == 1 or submit.max_output_tokens == 1:
            replica.release(request.rid)
            self._finished(request, times, cached_tokens)
            return
        replica.hold(request)
        transfer = _Transfer(request, int(times[0]), cached_tokens)
        self._transfers[request.rid] = transfer
        self._waiting.append(transfer)

    # --- KV transfer -----------------------------------------------------------------------
    def _start_transfers(self, now_ns: int) -> None:
        """Start transfers in queue order, until a transfer finds too few free blocks."""
        while self._waiting:
            transfer = self._waiting[0]
            if transfer.source.rid in self._transfers:
                transfer.target = self._reserve(transfer, now_ns)
                if transfer.target is None:
                    return
                self._copy(transfer.source, transfer.target, now_ns)
            self._waiting.popleft()

    def _reserve(self, transfer: _Transfer, now_ns: int) -> ReplicaRequest | None:
        """Reserve blocks on a decode replica; None if no decode replica has enough free blocks.

        Of the replicas with enough, choose the one with the fewest requests, and of these the one
        whose link becomes free first.
        """
        source, free_ns = transfer.source, self._link_free_ns
        for replica in sorted(self._decoders, key=lambda r: (r.in_flight, free_ns.get(r.name, 0))):
            target = ReplicaRequest(
                source.planned,
                source.submit,
                replica,
                earlier=(transfer.first_token_ns,),
                cached_tokens=transfer.cached_tokens,
            )
            if replica.reserve(target, now_ns, first_token_ns=transfer.first_token_ns):
                return target
        return None

    def _copy(self, source: ReplicaRequest, target: ReplicaRequest, now_ns: int) -> None:
        """Occupy the links of both replicas until the keys and values are copied."""
        profile = self.settings.profile
        size = source.submit.input_tokens * profile.kv_bytes_per_token
        ends = (source.replica.name, target.replica.name)
        start_ns = max(now_ns, *(self._link_free_ns.get(name, 0) for name in ends))
        end_ns = start_ns + max(1, -(-size * NS_PER_S // profile.link_bytes_per_s))
        self._link_free_ns.update(dict.fromkeys(ends, end_ns))
        heapq.heappush(self._ends, (end_ns, target.rid))

    def _finish_transfer(self, transfer: _Transfer) -> None:
        source, target = transfer.source, transfer.target
        assert target is not None
        source.replica.release(source.rid)
        target.replica.finish_transfer(target.rid)
        self._live[target.rid] = target

    def _cancel(self, request: ReplicaRequest) -> NDArray[np.int64]:
        transfer = self._transfers.pop(request.rid, None)
        if transfer is not None and transfer.target is not None:
            transfer.target.replica.cancel(transfer.target)
        return super()._cancel(request)
