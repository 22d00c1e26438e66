"""Live migration in virtual time: requests move to another replica while they decode.

All full blocks are copied while decoding goes on, then those that it filled meanwhile, and so on;
when few are left the request stops, the rest is copied, and it goes on where it went. The
destination reserves room before each stage. A move is given up when the request has ended, was
evicted or was cancelled, when the destination has no room, and when it does not converge.

Source: Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model Serving", OSDI 2024,
section 4.2. A replica takes part in one move at a time, so a link has one transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.request_table import RequestState
from goodput_replay.emulation.replica import VirtualReplica, Visit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.scheduler.request_table import ScheduledRequest
    from goodput_replay.emulation.fleet import VirtualFleet
    from goodput_replay.emulation.settings import MigrationRules

__all__ = ["Migration", "Occupancy", "pair_up", "shrinks_gap"]

_STOP_BELOW_BLOCKS: Final = 16
"""With at most so many left to copy, the request stops."""
_MAX_STAGES: Final = 3
"""Stages in which decoding goes on; a move that needs more is given up."""
_DECODES: Final = (RequestState.DECODING, RequestState.READY)


class _Move:
    """A request on its way.

    Args:
        visit: on the replica that it leaves.
        target: on the one that it goes to.
        request: as the scheduler that it leaves knows it.
    """

    __slots__ = (
        "complete",
        "copied",
        "due_ns",
        "preemptions",
        "request",
        "stages",
        "target",
        "visit",
    )

    def __init__(self, visit: Visit, target: Visit, request: ScheduledRequest) -> None:
        self.visit: Final = visit
        self.target: Final = target
        self.request: Final = request
        self.preemptions: Final = request.preemptions
        self.copied = 0
        """Blocks that are there, or will be at `due_ns`."""
        self.stages = 0
        self.complete = False
        """Whether that is everything, the request having stopped."""
        self.due_ns = 0
        """When what travels is there, or the next step of the replica that it leaves is done."""

    @property
    def lost(self) -> bool:
        """Whether there is nothing to move any more."""
        request = self.request
        gone = self.visit.replica.visit(request.rid) is not self.visit
        evicted = request.preemptions != self.preemptions
        return gone or evicted or request.state is RequestState.FINISHING


class Migration:
    """An actor that moves requests between the replicas of a fleet.

    Args:
        rules: when and over what.
        block_bytes: keys and values of one block.

    Attributes:
        completed, aborted: moves that came to their end, and that were given up.
        copied_blocks: of both.
    """

    def __init__(self, rules: MigrationRules, *, block_bytes: int) -> None:
        self.completed = 0
        self.aborted = 0
        self.copied_blocks = 0
        self._rules = rules
        self._ns_per_block = max(1, -(-block_bytes * NS_PER_S // rules.link_bytes_per_s))
        self._moves: list[_Move] = []
        self._poll_ns = rules.poll_ns

    def next_ns(self) -> int:
        """The next poll, or the next thing to do for a move."""
        return min([self._poll_ns, *(move.due_ns for move in self._moves)])

    def act(self, fleet: VirtualFleet, now_ns: int) -> None:
        """Bring the moves forward, and begin new ones when it is time."""
        for move in list(self._moves):
            self._advance(move, fleet, now_ns)
        if now_ns >= self._poll_ns:
            self._poll_ns = now_ns + self._rules.poll_ns
            self._begin(fleet, now_ns)

    def close(self) -> None:
        """No request is left: what was reserved for those that ended on their way is free."""
        for move in list(self._moves):
            self._abort(move)

    # --- who -------------------------------------------------------------------------------
    def _begin(self, fleet: VirtualFleet, now_ns: int) -> None:
        busy = {visit.replica.name for m in self._moves for visit in (m.visit, m.target)}
        free = {
            replica.name: replica
            for replica in fleet.replicas
            if replica.ready_ns <= now_ns and not replica.draining and replica.name not in busy
        }
        occupancies = [_occupancy(replica, now_ns) for replica in free.values()]
        for source, target in pair_up(occupancies, below_blocks=self._rules.below_blocks):
            request = _chosen(free[source.name], source, target)
            if request is not None:
                self._reserve(fleet, free[source.name], free[target.name], request, now_ns)

    def _reserve(
        self,
        fleet: VirtualFleet,
        source: VirtualReplica,
        target: VirtualReplica,
        request: ScheduledRequest,
        now_ns: int,
    ) -> None:
        visit = source.visit(request.rid)
        assert visit is not None, request.rid
        earlier = source.times(visit, request.output_tokens).tolist()
        there = Visit(visit.planned, visit.rid, target, earlier)
        first_token_ns = request.first_token_ns
        submit = fleet.make_submit(visit)
        if not target.take_over(there, submit, now_ns, first_token_ns=first_token_ns):
            return
        there.cached_tokens = visit.cached_tokens if len(visit.earlier) else request.cached_tokens
        move = _Move(visit, there, request)
        self._moves.append(move)
        self._next_stage(move, now_ns)

    # --- stages ----------------------------------------------------------------------------
    def _advance(self, move: _Move, fleet: VirtualFleet, now_ns: int) -> None:
        if move.lost:
            self._abort(move)
        elif move.due_ns > now_ns:
            return
        elif move.complete:
            self._arrive(move, fleet, now_ns)
        elif move.request.state in _DECODES:
            self._next_stage(move, now_ns)
        else:
            self._copy_rest(move, now_ns)

    def _next_stage(self, move: _Move, now_ns: int) -> None:
        """Copy what is full and not there yet; when that is little, stop."""
        request, scheduler = move.request, move.visit.replica.core.scheduler
        tokens = request.input_tokens + request.output_tokens - 1
        size = scheduler.block_size
        stops = -(-tokens // size) - move.copied <= _STOP_BELOW_BLOCKS
        # Steps in flight may still give it a token each after it has stopped.
        coming = scheduler.num_in_flight if stops else 0
        emitted = min(request.output_tokens + coming, request.output_limit)
        if not move.target.replica.core.grow_transfer(request.rid, emitted=emitted):
            self._abort(move)
        elif stops:
            move.visit.replica.core.detach(request.rid)
            self._copy_rest(move, now_ns)
        elif move.stages == _MAX_STAGES:
            self._abort(move)
        else:
            move.stages += 1
            self._copy(move, tokens // size, now_ns)

    def _copy_rest(self, move: _Move, now_ns: int) -> None:
        """Once the last step that computes for it is done, everything else travels."""
        core = move.visit.replica.core
        if move.request.state is RequestState.HELD:
            move.complete = True
            tokens = move.request.computed_tokens
            self._copy(move, -(-tokens // core.scheduler.block_size), now_ns)
        else:
            step_ns = core.next_event_ns()
            assert step_ns is not None, "it waits for a step"
            move.due_ns = step_ns

    def _copy(self, move: _Move, blocks: int, now_ns: int) -> None:
        """Everything up to so many blocks travels."""
        rest = blocks - move.copied
        move.copied = blocks
        self.copied_blocks += rest
        move.due_ns = now_ns + max(1, rest * self._ns_per_block)

    def _arrive(self, move: _Move, fleet: VirtualFleet, now_ns: int) -> None:
        request, visit, target = move.request, move.visit, move.target
        target.earlier = visit.replica.times(visit, request.output_tokens).tolist()
        core = target.replica.core
        core.grow_transfer(request.rid, emitted=request.output_tokens)
        core.finish_transfer(request.rid)
        fleet.complete_move(visit, target, now_ns)
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


def _chosen(
    replica: VirtualReplica, source: Occupancy, target: Occupancy
) -> ScheduledRequest | None:
    """The least urgent and shortest that decodes and whose move is worth it, if any."""
    size = replica.core.scheduler.block_size
    found = [
        (request.priority, -(-request.total_tokens // size), request.rid, request)
        for request in replica.core.scheduler.running()
        if request.state in _DECODES and request.output_tokens
    ]
    for _, blocks, _, request in sorted(found, key=lambda candidate: candidate[:3]):
        if shrinks_gap(source, target, blocks):
            return request
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """How full a replica is.

    Args:
        name: of the replica.
        free_blocks: KV blocks that can be handed out at once.
        demanded_blocks: what the head of the queue waits for.
        requests: that run, and the head of the queue.
    """

    name: str
    free_blocks: int
    demanded_blocks: int
    requests: int

    @property
    def freeness(self) -> float:
        """Blocks per request; negative where the queue cannot move on."""
        return (self.free_blocks - self.demanded_blocks) / max(1, self.requests)


def pair_up(
    replicas: Sequence[Occupancy], *, below_blocks: int
) -> list[tuple[Occupancy, Occupancy]]:
    """The least free with the most free, the second least with the second most, and so on.

    Args:
        replicas: those that may give or take.
        below_blocks: a replica gives only while its freeness is less than this.
    """
    ranked = sorted(replicas, key=lambda r: (r.freeness, r.name))
    half = len(ranked) // 2
    pairs = zip(ranked[:half], reversed(ranked), strict=False)
    return [pair for pair in pairs if pair[0].freeness < below_blocks]


def shrinks_gap(source: Occupancy, target: Occupancy, blocks: int) -> bool:
    """Whether a request of so many blocks, moved, brings the two closer.

    Then it is not moved back: that would take them apart again.
    """
    given = Occupancy(
        name=source.name,
        free_blocks=source.free_blocks + blocks,
        demanded_blocks=source.demanded_blocks,
        requests=source.requests - 1,
    )
    taken = Occupancy(
        name=target.name,
        free_blocks=target.free_blocks - blocks,
        demanded_blocks=target.demanded_blocks,
        requests=target.requests + 1,
    )
    return abs(taken.freeness - given.freeness) < target.freeness - source.freeness
