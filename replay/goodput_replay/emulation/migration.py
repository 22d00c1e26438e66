"""Live migration in virtual time: requests move to another replica while they decode.

A move copies all full blocks while decoding continues, then the blocks filled in the meantime, and
so on. Each of these copies is a stage. The destination reserves the blocks of a stage before the
stage begins. When few blocks are left, the request stops, the rest is copied, and decoding resumes
on the destination. A move is aborted if the request ended, was evicted or was cancelled, if the
destination has too few free blocks, or if too many stages would be needed.

Source: Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model Serving", OSDI 2024,
section 4.2. A replica takes part in one move at a time, so each link carries one transfer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.scheduler.request_table import RequestState
from goodput_replay.emulation.replica import ReplicaRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.device.profile import DeviceProfile
    from goodput_engine.scheduler.request_table import ScheduledRequest
    from goodput_replay.emulation.fleet import VirtualFleet
    from goodput_replay.emulation.replica import VirtualReplica
    from goodput_replay.emulation.settings import MigrationSpec

__all__ = ["Migration", "Occupancy", "pair_up", "shrinks_gap"]

_STOP_BELOW_BLOCKS: Final = 16
"""The request stops when at most this many blocks are left to copy."""
_MAX_STAGES: Final = 3
"""Maximum number of stages during decoding; a move that needs more is aborted."""
_DECODES: Final = (RequestState.DECODING, RequestState.READY)


class _Move:
    """A migration in progress.

    Args:
        source: the request on the source replica.
        target: the request on the destination.
        request: the request in the source's scheduler.
    """

    __slots__ = (
        "complete",
        "copied",
        "due_ns",
        "preemptions",
        "request",
        "source",
        "stages",
        "target",
    )

    def __init__(
        self, source: ReplicaRequest, target: ReplicaRequest, request: ScheduledRequest
    ) -> None:
        self.source: Final = source
        self.target: Final = target
        self.request: Final = request
        self.preemptions: Final = request.preemptions
        self.copied = 0
        """Blocks copied by `due_ns`."""
        self.stages = 0
        self.complete = False
        """True if the request has stopped and all blocks are copied by `due_ns`."""
        self.due_ns = 0
        """End of the current copy, or of the source's next step."""

    @property
    def lost(self) -> bool:
        """True if the request ended, was evicted or was cancelled."""
        request = self.request
        removed = self.source.replica.find(request.rid) is not self.source
        evicted = request.preemptions != self.preemptions
        return removed or evicted or request.state is RequestState.FINISHING


class Migration:
    """An actor that moves requests between the replicas of a fleet.

    Args:
        spec: settings of live migration.
        profile: device profile of the replicas.

    Attributes:
        completed, aborted: number of completed and of aborted moves.
        copied_blocks: blocks copied by all moves.
    """

    def __init__(self, spec: MigrationSpec, profile: DeviceProfile) -> None:
        self.completed = 0
        self.aborted = 0
        self.copied_blocks = 0
        self._below_blocks = spec.below_blocks
        self._interval_ns = spec.poll_ms * NS_PER_MS
        block_bytes = profile.block_size * profile.kv_bytes_per_token
        self._ns_per_block = max(1, -(-block_bytes * NS_PER_S // profile.link_bytes_per_s))
        self._moves: list[_Move] = []
        self._poll_ns = self._interval_ns

    def next_ns(self) -> int:
        """Return the time of the next poll or of the next event of a move."""
        return min([self._poll_ns, *(move.due_ns for move in self._moves)])

    def act(self, fleet: VirtualFleet, now_ns: int) -> None:
        """Advance the moves; at each poll, start new moves."""
        for move in list(self._moves):
            self._advance(move, fleet, now_ns)
        if now_ns >= self._poll_ns:
            self._poll_ns = now_ns + self._interval_ns
            self._start_moves(fleet, now_ns)

    def close(self) -> None:
        """Abort the remaining moves to release their reservations; their requests have ended."""
        for move in list(self._moves):
            self._abort(move)

    # --- selection -------------------------------------------------------------------------
    def _start_moves(self, fleet: VirtualFleet, now_ns: int) -> None:
        """Start a move in each pair of replicas that are ready and take part in no move."""
        busy = {request.replica.name for m in self._moves for request in (m.source, m.target)}
        free = {
            replica.name: replica
            for replica in fleet.replicas
            if replica.ready_ns <= now_ns and not replica.draining and replica.name not in busy
        }
        occupancies = [_occupancy(replica, now_ns) for replica in free.values()]
        for source, target in pair_up(occupancies, below_blocks=self._below_blocks):
            request = _choose_request(free[source.name], source, target)
            if request is not None:
                self._start_move(request, free[source.name], free[target.name], now_ns)

    def _start_move(
        self,
        request: ScheduledRequest,
        replica: VirtualReplica,
        destination: VirtualReplica,
        now_ns: int,
    ) -> None:
        """Reserve blocks on the destination and start the first copy.

        Do nothing if the destination has too few free blocks.
        """
        source = replica.find(request.rid)
        assert source is not None, request.rid
        cached_tokens = source.cached_tokens
        target = ReplicaRequest(
            source.planned,
            source.submit,
            destination,
            earlier=replica.times(source, request.output_tokens).tolist(),
            cached_tokens=request.cached_tokens if cached_tokens is None else cached_tokens,
        )
        if destination.reserve(target, now_ns, first_token_ns=request.first_token_ns):
            move = _Move(source, target, request)
            self._moves.append(move)
            self._next_stage(move, now_ns)

    # --- stages ----------------------------------------------------------------------------
    def _advance(self, move: _Move, fleet: VirtualFleet, now_ns: int) -> None:
        if move.lost:
            self._abort(move)
        elif move.due_ns > now_ns:
            return
        elif move.complete:
            self._finish(move, fleet, now_ns)
        elif move.request.state in _DECODES:
            self._next_stage(move, now_ns)
        else:
            self._copy_rest(move, now_ns)

    def _next_stage(self, move: _Move, now_ns: int) -> None:
        """Copy the full blocks that are left; if few blocks are left, stop the request first."""
        request, scheduler = move.request, move.source.replica.core.scheduler
        tokens = request.input_tokens + request.output_tokens - 1
        size = scheduler.block_size
        stops = -(-tokens // size) - move.copied <= _STOP_BELOW_BLOCKS
        # Each step in flight may still emit a token after the request has stopped.
        in_flight = scheduler.num_in_flight if stops else 0
        emitted = min(request.output_tokens + in_flight, request.output_limit)
        if not move.target.replica.core.grow_transfer(request.rid, emitted=emitted):
            self._abort(move)
        elif stops:
            move.source.replica.core.detach(request.rid)
            self._copy_rest(move, now_ns)
        elif move.stages == _MAX_STAGES:
            self._abort(move)
        else:
            move.stages += 1
            self._copy(move, tokens // size, now_ns)

    def _copy_rest(self, move: _Move, now_ns: int) -> None:
        """Copy all remaining blocks once the request's last step has ended."""
        core = move.source.replica.core
        if move.request.state is RequestState.HELD:
            move.complete = True
            tokens = move.request.computed_tokens
            self._copy(move, -(-tokens // core.scheduler.block_size), now_ns)
        else:
            step_ns = core.next_event_ns()
            assert step_ns is not None, "a step is in flight"
            move.due_ns = step_ns

    def _copy(self, move: _Move, blocks: int, now_ns: int) -> None:
        """Copy further blocks, until this number of blocks is copied in total."""
        rest = blocks - move.copied
        move.copied = blocks
        self.copied_blocks += rest
        move.due_ns = now_ns + max(1, rest * self._ns_per_block)

    def _finish(self, move: _Move, fleet: VirtualFleet, now_ns: int) -> None:
        request, source, target = move.request, move.source, move.target
        target.earlier = source.replica.times(source, request.output_tokens).tolist()
        target.replica.core.grow_transfer(request.rid, emitted=request.output_tokens)
        target.replica.finish_transfer(request.rid)
        fleet.complete_move(source, target, now_ns)
        self._moves.remove(move)
        self.completed += 1

    def _abort(self, move: _Move) -> None:
        move.target.replica.cancel(move.target)
        self._moves.remove(move)
        self.aborted += 1


def _occupancy(replica: VirtualReplica, now_ns: int) -> Occupancy:
    scheduler = replica.core.scheduler
    head = scheduler.waiting.peek(now_ns) if len(scheduler.waiting) else None
    demanded = 0 if head is None else -(-head.total_tokens // scheduler.block_size)
    return Occupancy(
        name=replica.name,
        free_blocks=scheduler.free_blocks,
        demanded_blocks=demanded,
        requests=scheduler.num_running + (head is not None),
    )


def _choose_request(
    replica: VirtualReplica, source: Occupancy, target: Occupancy
) -> ScheduledRequest | None:
    """Return the decoding request to move; None if no move would shrink the gap in freeness.

    Of the requests that shrink the gap, return the least urgent, and of these the shortest.
    """
    size = replica.core.scheduler.block_size
    candidates = [
        (request.priority, -(-request.total_tokens // size), request.rid, request)
        for request in replica.core.scheduler.running()
        if request.state in _DECODES and request.output_tokens
    ]
    for _, blocks, _, request in sorted(candidates, key=lambda candidate: candidate[:3]):
        if shrinks_gap(source, target, blocks):
            return request
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Memory use of a replica, from which its freeness is computed.

    Args:
        name: replica name.
        free_blocks: free KV blocks.
        demanded_blocks: KV blocks that the first queued request needs; 0 without a queue.
        requests: number of running requests, plus 1 if a request is queued.
    """

    name: str
    free_blocks: int
    demanded_blocks: int
    requests: int

    @property
    def freeness(self) -> float:
        """Free blocks, less the demanded ones, per request; negative if too few are free."""
        return (self.free_blocks - self.demanded_blocks) / max(1, self.requests)


def pair_up(
    replicas: Sequence[Occupancy], *, below_blocks: int
) -> list[tuple[Occupancy, Occupancy]]:
    """Pair the replica with the lowest freeness with the one with the highest, and so on.

    Args:
        replicas: replicas that can be sources or destinations.
        below_blocks: a replica is a source only if its freeness is below this.
    """
    ranked = sorted(replicas, key=lambda r: (r.freeness, r.name))
    half = len(ranked) // 2
    pairs = zip(ranked[:half], reversed(ranked), strict=False)
    return [pair for pair in pairs if pair[0].freeness < below_blocks]


def shrinks_gap(source: Occupancy, target: Occupancy, blocks: int) -> bool:
    """True if moving a request of this size brings the two replicas closer in freeness.

    Such a request is not moved back, as that would widen the gap again.
    """
    source_after = replace(
        source, free_blocks=source.free_blocks + blocks, requests=source.requests - 1
    )
    target_after = replace(
        target, free_blocks=target.free_blocks - blocks, requests=target.requests + 1
    )
    gap = target.freeness - source.freeness
    return abs(target_after.freeness - source_after.freeness) < gap
