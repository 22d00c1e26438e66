"""The prompts of one step: those that go on, and those that start in what is left of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_engine.scheduler.plan import Admitted
from goodput_engine.scheduler.policy import SchedulingPolicy
from goodput_engine.scheduler.pressure import room_to_widen
from goodput_engine.scheduler.request import RequestState

if TYPE_CHECKING:
    from goodput_engine.scheduler.door import Door
    from goodput_engine.scheduler.draft import Draft
    from goodput_engine.scheduler.evictor import Evictor
    from goodput_engine.scheduler.floor import Floor
    from goodput_engine.scheduler.policy import Phase, SchedulerView
    from goodput_engine.scheduler.request import ScheduledRequest
    from goodput_engine.scheduler.stats import SchedulerStats

__all__ = ["Prompts"]


class Prompts:
    """Drafts the prefills and the admissions of one scheduler's plans.

    Args:
        policy: its preferences.
        floor: its requests.
        evictor: makes room.
        door: knows the longest request and is told of admissions.
        stats: its counters.
        view: what the policy may look at.
    """

    __slots__ = (
        "_blocked",
        "_displaces",
        "_door",
        "_evictor",
        "_floor",
        "_policy",
        "_stats",
        "_view",
    )

    def __init__(
        self,
        *,
        policy: SchedulingPolicy,
        floor: Floor,
        evictor: Evictor,
        door: Door,
        stats: SchedulerStats,
        view: SchedulerView,
    ) -> None:
        self._policy = policy
        self._floor = floor
        self._evictor = evictor
        self._door = door
        self._stats = stats
        self._view = view
        # Who stood at the head of the queue, and the pool's generation, when there were too few
        # blocks: a long prompt's hashes are not looked up again until something has changed.
        self._blocked: tuple[int, int] | None = None
        # A policy that displaces may answer otherwise in a moment.
        self._displaces = type(policy).displaced_by is not SchedulingPolicy.displaced_by

    def draft(self, draft: Draft, phase: Phase) -> None:
        """Put prompts into what the plan has left."""
        floor, policy, view = self._floor, self._policy, self._view
        admits = phase.admissions and not draft.starved and len(floor.waiting) > 0
        if admits:
            draft.owed = floor.blocks_owed
        if phase.prefills and floor.prefilling:
            for request in list(policy.prefill_order(floor.prefilling.values(), view)):
                while admits and draft.left > 0:
                    head = floor.waiting.peek(view.now_ns)
                    if head is None or not policy.overtakes(head, request, view):
                        break
                    admits = self._admit(head, draft)
                if draft.left <= 0:
                    return
                if request.state is RequestState.PREFILLING and (
                    phase.only is None or phase.only(request)
                ):
                    self._continue(request, draft)
        while admits and draft.left > 0:
            head = floor.waiting.peek(view.now_ns)
            admits = head is not None and self._admit(head, draft)

    def _continue(self, request: ScheduledRequest, draft: Draft) -> None:
        remaining = request.input_tokens + request.base_sampled - request.base_planned
        tokens = self._policy.chunk_tokens(request, remaining, draft.left, self._view)
        if tokens > 0:
            self._compute(request, min(tokens, remaining, draft.left), draft)

    def _admit(self, request: ScheduledRequest, draft: Draft) -> bool:
        """Start the request whose turn it is; no: nobody else starts in this step."""
        policy, floor, kv, view = self._policy, self._floor, self._floor.kv, self._view
        blocked = (request.rid, kv.generation)
        if self._blocked == blocked or not policy.may_admit(request, view):
            return False
        swapped = bool(request.host_blocks)
        total = request.input_tokens + request.base_sampled
        # Of a prompt the last token is always computed: that is what samples the next one. Of a
        # copy the last block is always brought back: that is what makes it go on.
        most = len(request.host_blocks) - 1 if swapped else (total - 1) // kv.block_size
        hits = kv.match(request.block_hashes, most)
        cached = request.base_planned if swapped else len(hits) * kv.block_size
        tokens = 0
        if not swapped:
            tokens = policy.chunk_tokens(request, total - cached, draft.left, view)
            if tokens <= 0:
                return False
        reserved = min(policy.reserve_tokens(request, view), self._door.max_total_tokens - 1)
        needed = kv.blocks_for(max(total, reserved)) - len(hits)
        headroom = policy.headroom_blocks(view) if floor.num_running else 0
        headroom += draft.owed
        if not self._make_room(request, needed + kv.idle(hits) + headroom, draft):
            if needed + kv.idle(hits) + headroom > kv.free_blocks and not self._displaces:
                self._blocked = blocked
            return False
        floor.leave_queue(request)
        kv.share(hits)
        request.blocks = hits + kv.allocate(needed)
        request.published_blocks = len(hits)
        request.base_planned = cached
        request.admitted_tokens = total
        request.admitted_ns = view.now_ns
        if not request.first_scheduled_ns:
            request.first_scheduled_ns = view.now_ns
            request.cached_tokens = cached
        self._door.rate.admitted(view.now_ns)
        draft.admitted.append(
            Admitted(rid=request.rid, blocks=tuple(request.blocks), cached_tokens=cached)
        )
        if swapped:
            floor.bring_back(request, found=len(hits))
            return True
        self._stats.prefix_queried_tokens += total
        self._stats.prefix_hit_tokens += cached
        request.state = RequestState.PREFILLING
        floor.prefilling[request.rid] = request
        self._compute(request, min(tokens, total - cached, draft.left), draft)
        return True

    def _make_room(self, request: ScheduledRequest, blocks: int, draft: Draft) -> bool:
        """Whether it has a place and this many blocks; who may be displaced for them, is.

        Blocks that a commit will free are not there yet: it has to wait for them, and nobody
        else is displaced meanwhile. Who computes a chunk in this plan stays.
        """
        floor, kv = self._floor, self._floor.kv
        places = self._view.limits.max_num_seqs - floor.num_running - draft.ended
        missing = blocks - kv.free_blocks
        if floor.host.free_blocks < floor.host.total_blocks and not (
            room_to_widen(free_blocks=-missing, running=floor.num_running + draft.ended)
            or any(self._policy.displaced_by(request, self._view))
        ):
            return False
        if places > 0 and missing <= 0:
            return True
        if missing > 0:
            if draft.promised is None:
                draft.promised = floor.promised_blocks()
            missing -= draft.promised
        if places > 0 and missing <= 0:
            return False
        going: list[ScheduledRequest] = []
        for victim in self._policy.displaced_by(request, self._view):
            if victim.displaceable and victim.last_plan != draft.plan_id:
                going.append(victim)
                missing -= kv.exclusive(victim.blocks)
                if missing <= 0 and places + len(going) > 0:
                    break
        else:
            return False
        promised = sum(map(self._evictor.evict, going))
        draft.displaced = True
        if draft.decodes:
            decodes = len(floor.cohort.members)
            draft.left += draft.decodes - decodes
            draft.decodes = decodes
        if draft.promised is not None:
            draft.promised += promised
        return blocks <= kv.free_blocks

    def _compute(self, request: ScheduledRequest, tokens: int, draft: Draft) -> None:
        """Put a chunk of a prefilling request into the draft."""
        total = request.input_tokens + request.base_sampled
        if not draft.add(request, tokens, total):
            return
        del self._floor.prefilling[request.rid]
        request.base_sampled += 1
        if request.base_sampled < request.output_limit:
            self._floor.get_ready(request)
        else:
            request.state = RequestState.FINISHING
            draft.ended += 1
            draft.last.append(request)
