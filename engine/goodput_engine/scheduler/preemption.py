"""Preemption: eviction of running requests, and copies of their blocks.

The tokens of an evicted request are recomputed later, or its blocks are copied to host memory and
back. The policy or the manifest sets the mode. `hybrid` copies if that costs much less than a
recomputation (`eviction_cost`). It also evicts no running request for a waiting one if the policy
finds that this costs too much. If host memory has no room, the request is recomputed.

With host memory, three measures are taken before KV memory runs out:

1. *Offload ahead.* The next victim is swapped out while other requests can still grow. Its copy
   starts early enough to end before the blocks run out, so no request waits for it. `hybrid` looks
   ahead only until a running request is expected to end, because its blocks may suffice.
2. *Keep the batch width.* While host memory holds a copy, a request that would be evicted before
   all running ones starts only if each of these can still grow by one block. Otherwise it would be
   evicted shortly after its start. A request that would be evicted after another one may start, so
   a short request is not delayed by the copy of a long one. Under `hybrid` only a request with a
   copy is held back, until the others can grow for as long as its copies would take: starting a
   request without a copy costs the link nothing, and `recompute` would start it too.
3. *Reject.* When host memory is nearly full of copies, evicted requests would have to be
   recomputed. A new request that would wait for memory is then rejected (`admission`).

Without host memory none of these measures is taken. The pool may then run full, because freeing
blocks without a copy takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.spec.choices import Preemption
from goodput_engine.scheduler.eviction_cost import NOMINAL_STEP_NS, EvictionCosts
from goodput_engine.scheduler.plan import Copy
from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.steptime import StepShape
    from goodput_engine.scheduler.plan import StepBuilder
    from goodput_engine.scheduler.policy import SchedulerView, SchedulingPolicy
    from goodput_engine.scheduler.request_table import RequestTable, ScheduledRequest

__all__ = ["Evictor", "room_to_widen"]


def room_to_widen(*, free_blocks: int, running: int) -> bool:
    """Return True if a request may start while host memory holds copies of others.

    Args:
        free_blocks: blocks that would be free after the request has started.
        running: number of running requests before that.
    """
    return not running or free_blocks > running


class Evictor:
    """Evicts requests of one scheduler and copies their blocks.

    Args:
        policy: gives the eviction order, the displaced requests, and possibly the mode.
        table: requests and memory of the scheduler.
        view: gives the running requests, the time, and the mode of the manifest.
        depth: plans that may wait behind the running one.

    Attributes:
        key: eviction key of the policy; the request with the largest key is evicted first.
        costs: predicts the costs of evictions.
        preemptions, recomputed_tokens, swapped_tokens: as in `EngineStatistics`.
    """

    __slots__ = (
        "_depth",
        "_policy",
        "_table",
        "_view",
        "_weighs_displacements",
        "costs",
        "key",
        "preemptions",
        "recomputed_tokens",
        "swapped_tokens",
    )

    def __init__(
        self, *, policy: SchedulingPolicy, table: RequestTable, view: SchedulerView, depth: int
    ) -> None:
        self.key = policy.eviction_key
        self._policy = policy
        self._table = table
        self._view = view
        self._depth = depth
        # An optional hook is called only if the policy overrides it.
        self._weighs_displacements = policy.overrides("is_worth")
        self.costs = EvictionCosts(table=table, view=view)
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.swapped_tokens = 0

    # --- eviction ----------------------------------------------------------------------------
    def victim(self) -> ScheduledRequest | None:
        """Return the running request to evict next; None if no request runs."""
        return max(self._view.running(), key=self.key, default=None)

    def is_next_victim(self, request: ScheduledRequest) -> bool:
        """Return True if a waiting request, once started, would be the next victim."""
        key = self.key(request)
        return all(self.key(running) <= key for running in self._view.running())

    def holds_back(self, request: ScheduledRequest, *, free_blocks: int, running: int) -> bool:
        """Return True if a request must not start while host memory holds copies (measure 2).

        Args:
            request: the head of the queue.
            free_blocks: blocks that would be free after the request has started.
            running: number of running requests before that.
        """
        if self._view.preemption is not Preemption.HYBRID:
            has_room = room_to_widen(free_blocks=free_blocks, running=running)
        elif running and request.host_blocks:
            steps = self.costs.steps_of_copies(len(request.host_blocks))
            has_room = free_blocks * self._table.kv.block_size > running * steps
        else:
            has_room = True
        return (
            not has_room
            and self.is_next_victim(request)
            and not any(self._policy.displaced_by(request))
        )

    def evict_ahead(self, victim: ScheduledRequest) -> None:
        """Evict a running request before its blocks are needed.

        Under `hybrid`, a request that would be recomputed stays, because freeing its blocks takes
        no time.
        """
        if self._view.preemption is not Preemption.HYBRID or self.blocks_to_copy(victim):
            self.evict(victim)

    def evict(self, victim: ScheduledRequest, *, waited_for: bool = False) -> int:
        """Evict a running request; return the number of blocks that later commits will free.

        Args:
            victim: the request.
            waited_for: True if running requests wait for its blocks.
        """
        table = self._table
        num_copied = self.blocks_to_copy(victim, waited_for=waited_for)
        table.withdraw(victim, keep_tokens=True)
        victim.ran_ns += self._view.now_ns - victim.admitted_ns
        victim.gained_nothing = victim.total_tokens == victim.admitted_tokens
        victim.state = RequestState.PREEMPTING
        victim.preemptions += 1
        self.preemptions += 1
        if num_copied:
            victim.host_blocks = table.host.allocate(num_copied)
            self.swapped_tokens += victim.base_computed
        else:
            self.recomputed_tokens += victim.base_computed
        record = table.record_of(victim.last_plan)
        if record is not None:
            record.releases.append(victim)
        else:
            self.vacate(victim)
            if not num_copied:
                return 0
        return table.kv.exclusive(victim.blocks)

    def blocks_to_copy(self, victim: ScheduledRequest, *, waited_for: bool = False) -> int:
        """Return the number of blocks that an eviction would copy; 0 if it would recompute.

        Args:
            victim: a running request.
            waited_for: True if running requests wait for its blocks.
        """
        blocks = self._table.kv.blocks_for(victim.computed_tokens)
        if not 0 < blocks <= self._table.host.free_blocks:
            return 0
        if self._view.preemption is Preemption.HYBRID:
            copies = self.costs.copy_is_cheaper(victim, blocks, waited_for=waited_for)
        else:
            mode = self._policy.preemption or self._view.preemption
            copies = mode is Preemption.SWAP
        return blocks if copies else 0

    def vacate(self, request: ScheduledRequest) -> None:
        """Requeue an evicted request that no plan uses, or start its copy to host memory."""
        if request.host_blocks:
            request.state = RequestState.SWAPPING_OUT
            self._table.swapping_out[request.rid] = request
        else:
            request.base_computed = 0
            self._table.requeue(request)

    def swap_in(self, request: ScheduledRequest, *, found: int) -> None:
        """Start the copy of an admitted request from host memory to the device.

        Args:
            request: the request; its blocks are allocated.
            found: number of leading blocks found in the prefix cache, which are not copied.
        """
        request.state = RequestState.SWAPPING_IN
        request.copied_blocks = found
        self._table.swapping_in[request.rid] = request

    def finish_copy(self, request: ScheduledRequest) -> None:
        """Requeue a request that was swapped out, or resume one that was swapped in."""
        table = self._table
        request.copied_blocks = 0
        if request.state is RequestState.SWAPPING_OUT:
            del table.swapping_out[request.rid]
            table.requeue(request)
            return
        del table.swapping_in[request.rid]
        table.host.release(request.host_blocks)
        request.host_blocks = []
        table.publish(request, min(request.base_computed, request.input_tokens))
        if request.base_computed + 1 == request.total_tokens and request.base_sampled:
            table.set_ready(request)
        else:
            request.state = RequestState.PREFILLING
            table.prefilling[request.rid] = request

    # --- eviction for another request --------------------------------------------------------
    def claim_block(self, request: ScheduledRequest, step: StepBuilder) -> int | None:
        """Evict requests until a block is free for a running request.

        Returns:
            The allocated block. None if the request must wait for a later commit, was itself
            evicted, or if no request can be evicted.
        """
        kv = self._table.kv
        step.starved = True
        while (block := kv.allocate_one()) is None:
            if step.pending is None:
                step.pending = self._table.pending_blocks()
            if step.pending > 0:  # a later commit will free a block
                step.pending -= 1
                return None
            victim = self.victim()
            if victim is None:
                return None
            step.pending += self.evict(victim, waited_for=True)
            step.displaced = True
            if victim is request:
                return None
        return block

    def displace(
        self,
        request: ScheduledRequest,
        hits: list[int],
        blocks: int,
        places: int,
        step: StepBuilder,
    ) -> bool:
        """Evict running requests for a waiting one; return True if it can start in this plan.

        It cannot use blocks that a later commit will free. It waits for them, and displaces no
        other request meanwhile. Requests with a chunk in this plan are not displaced. Under
        `hybrid` the policy may refuse evictions that cost too much.

        Args:
            request: the waiting request.
            hits: blocks of its prefix that it will share.
            blocks: number of free blocks that it needs besides the hits.
            places: free places in the batch; negative after its width was lowered.
            step: the next plan.
        """
        table, kv = self._table, self._table.kv
        missing = blocks + kv.idle(hits) - kv.free_blocks
        if missing > 0:
            if step.pending is None:
                step.pending = table.pending_blocks()
            missing -= step.pending
        if places > 0 and missing <= 0:
            return False
        victims: list[ScheduledRequest] = []
        for victim in self._policy.displaced_by(request):
            if victim.displaceable and victim.last_plan != step.plan_id:
                victims.append(victim)
                # A hit that the eviction frees is shared again, so it makes no room.
                missing -= kv.exclusive(block for block in victim.blocks if block not in hits)
                if missing <= 0 and places + len(victims) > 0:
                    break
        else:
            return False
        if not self._is_worth(request, victims):
            return False
        pending = sum(map(self.evict, victims))
        step.displaced = True
        if step.decodes:
            decodes = len(table.batch.members)
            step.left += step.decodes - decodes
            step.decodes = decodes
        if step.pending is not None:
            step.pending += pending
        return blocks + kv.idle(hits) <= kv.free_blocks

    def _is_worth(self, request: ScheduledRequest, victims: Sequence[ScheduledRequest]) -> bool:
        """Return True unless `hybrid` finds that the evictions cost more than they are worth."""
        hybrid = self._view.preemption is Preemption.HYBRID and self._table.host.total_blocks
        if not (hybrid and self._weighs_displacements):
            return True
        cost_ns = sum(self.costs.cost_ns(v, copied=self.blocks_to_copy(v)) for v in victims)
        return self._policy.is_worth(request, victims, cost_ns)

    # --- offload ahead -----------------------------------------------------------------------
    def offload_ahead(self) -> None:
        """Swap out the next victim if its copy must begin now."""
        table, kv, batch = self._table, self._table.kv, self._table.batch
        if kv.free_blocks >= self.offload_margin():
            return
        due = batch.members_needing_blocks(self._max_offload_steps() + 1)
        left = kv.free_blocks + table.pending_blocks()
        if len(due) <= left:
            return
        victim = self.victim()
        if victim is None or not victim.displaceable:
            return
        blocks = self.blocks_to_copy(victim)
        steps = self._offload_steps(blocks)
        if self._view.preemption is Preemption.HYBRID:
            steps = min(steps, self.costs.steps_until_end() or steps)
        if blocks and len(batch.members_needing_blocks(steps + 1)) > left:
            self.evict(victim)

    def offload_margin(self) -> int:
        """Return the number of free blocks at and above which nothing is offloaded."""
        if not self._table.host.free_blocks:
            return 0
        return self._table.batch.max_blocks_needed(self._max_offload_steps() + 1)

    def _max_offload_steps(self) -> int:
        """Return `_offload_steps` of the longest copy that host memory has room for."""
        return self._offload_steps(min(self._table.host.free_blocks, self._table.kv.total_blocks))

    def _offload_steps(self, blocks: int) -> int:
        """Return the plans between an eviction and the first plan that may use the freed blocks.

        Up to `depth` plans in flight still use the blocks, and as many again are planned before
        these commit. Then the blocks are copied while the following steps compute.
        """
        copy_ns = blocks * self._table.host.ns_per_block
        # Steps are seldom shorter than the nominal time; if they are longer, a copy only ends
        # earlier than necessary. With a measured time, decisions would depend on noise.
        return 2 * self._depth + max(1, -(-copy_ns // NOMINAL_STEP_NS))

    # --- copies ------------------------------------------------------------------------------
    def take_copies(
        self, plan_id: int, shape: StepShape
    ) -> tuple[tuple[Copy, ...], list[ScheduledRequest]]:
        """Select the blocks that the next plan copies in each direction, oldest request first.

        A copy that takes no longer than its step costs no time. A plan therefore copies as many
        blocks as fit into the predicted time of its computation. A longer copy continues in the
        next plan.

        Args:
            plan_id: number of the next plan.
            shape: its shape.

        Returns:
            The copies, and the requests whose copy ends with this plan.
        """
        table = self._table
        max_blocks = max(1, self.costs.compute_ns(shape) // table.host.ns_per_block)
        copies: list[Copy] = []
        done: list[ScheduledRequest] = []
        for to_host, requests in ((True, table.swapping_out), (False, table.swapping_in)):
            left = max_blocks
            for request in requests.values():
                start, blocks = request.copied_blocks, len(request.host_blocks)
                end = min(blocks, start + left)
                if end == start:
                    continue  # its last blocks are in flight
                copies.append(
                    Copy(
                        rid=request.rid,
                        to_host=to_host,
                        device_blocks=tuple(request.blocks[start:end]),
                        host_blocks=tuple(request.host_blocks[start:end]),
                    )
                )
                request.copied_blocks = end
                request.last_plan = plan_id
                if end == blocks:
                    done.append(request)
                left -= end - start
                if left <= 0:
                    break
        return tuple(copies), done
