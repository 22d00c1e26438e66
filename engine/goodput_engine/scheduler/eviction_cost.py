"""Costs of an eviction, predicted in device time, by which `hybrid` selects the preemption mode.

Either mode costs the evicted request some time of its own, and all requests some time of the
device. `EvictionCosts` learns what it needs from committed steps. It neither evicts nor copies.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from goodput_core.steptime import OnlineStepTime, StepShape
from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_engine.scheduler.plan import Copy, StepOutcome
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.request_table import RequestTable, ScheduledRequest

__all__ = ["NOMINAL_STEP_NS", "EvictionCosts"]

NOMINAL_STEP_NS: Final = 10 * NS_PER_MS
"""Step time assumed before the first step that only decodes."""
_COPY_BOUND_PERCENT: Final = 90
"""If copies take this share of a step or more, they may have determined the time of the step."""
_COPY_MARGIN: Final = 2
"""A copy must cost this many times less than a recomputation. The prediction does not include that
requests start later because a copy waits for blocks, nor the later evictions."""
_SHARES_NS: Final = 5 * NS_PER_S
"""Time after which the weight of earlier steps in the shares of time falls to 1/e."""
_REMEMBERED_ENDS: Final = 1024
"""After this many ended requests, the weight of the earlier ones is halved."""


class EvictionCosts:
    """Predicts the costs of copying and of recomputing an evicted request.

    - *Recomputation* takes device time: the time by which it makes steps longer, or the share of
      the token budget that other prompts lack meanwhile, if that is more. Prompts lack it only
      while the budget is used, so it counts in proportion to the used share of the budget.
    - *A copy* takes no device time, but its blocks are idle meanwhile. While memory limits the
      number of running requests, a share of idle blocks loses the same share of the time of each
      step, except the time of its prompts: this depends on their tokens, not on the batch width.

    Costs are in nanoseconds. Each nanosecond of lost device time delays every request that waits or
    runs. The evicted request is delayed by its own recomputation, or by both of its copies. If
    running requests wait for the blocks, these are delayed by the copy to host memory, half of it
    on average.

    A copy also delays the copies that begin during it. Their expected number is the share of time
    in which the link is busy, so a copy counts 1 + this share times. A copy to host memory waits
    for the current ones in addition.

    Args:
        table: requests and memory of the scheduler.
        view: gives the token budget, the time, and the number of requests.

    Attributes:
        decode_step_ns: device time of the last step that only decoded, without the time of its
            copies; ten milliseconds before the first one.
        decodes: decoded tokens since the start; halved together with the ended requests.
        prompts_alone: True if prompts are computed in steps without decodes.
    """

    __slots__ = (
        "_budget_ns",
        "_ended",
        "_link_ns",
        "_model",
        "_prompts_ns",
        "_seen_ns",
        "_table",
        "_total_ns",
        "_view",
        "decode_step_ns",
        "decodes",
        "prompts_alone",
    )

    def __init__(self, *, table: RequestTable, view: SchedulerView) -> None:
        self._table = table
        self._view = view
        self._model = OnlineStepTime()
        self.decode_step_ns = NOMINAL_STEP_NS
        self.decodes = 0
        self.prompts_alone = False
        self._ended = 0
        # Decaying sums over time: time of the link, time by which prompts made steps longer, time
        # of the used share of the token budget, and all time. `_seen_ns` is the time of the latest
        # step in them.
        self._link_ns = self._prompts_ns = self._budget_ns = self._total_ns = 0.0
        self._seen_ns = 0

    # --- learning ----------------------------------------------------------------------------
    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a committed step that computed.

        Steps without prompts and copies change only values that fast-forward changes equally.
        """
        plan, step_ns = outcome.plan, outcome.result.step_ns
        copy_ns = self._copy_ns(plan.copies)
        copy_bound = 100 * copy_ns >= _COPY_BOUND_PERCENT * step_ns
        if plan.chunks:
            if not copy_bound:
                self._model.observe(plan.shape, step_ns)
        elif copy_bound:
            # Computation took no longer than the copies. The next copies are shorter, to find out.
            self.decode_step_ns = max(1, copy_ns * _COPY_BOUND_PERCENT // 100)
        else:
            self.decode_step_ns = step_ns
        if plan.chunks or plan.copies:
            now_ns = self._view.now_ns
            passed_ns = max(step_ns, now_ns - self._seen_ns)
            kept = math.exp(-passed_ns / _SHARES_NS)
            longer_ns = max(0, step_ns - self.decode_step_ns) if plan.chunks else 0
            self._total_ns = self._total_ns * kept + passed_ns
            self._link_ns = self._link_ns * kept + copy_ns
            self._prompts_ns = self._prompts_ns * kept + longer_ns
            used_ns = step_ns * plan.shape.prefill_tokens / self._view.limits.token_budget
            self._budget_ns = self._budget_ns * kept + used_ns
            self._seen_ns = now_ns
        self.decodes += plan.num_decodes
        self._ended += sum(one.finish_reason is not None for one in outcome.progress)
        if self._ended >= _REMEMBERED_ENDS:
            self._ended //= 2
            self.decodes //= 2

    def _copy_ns(self, copies: Sequence[Copy]) -> int:
        """Return the predicted time of copies; the two directions run in parallel."""
        to_host = sum(len(copy.host_blocks) for copy in copies if copy.to_host)
        to_device = sum(len(copy.host_blocks) for copy in copies) - to_host
        return max(to_host, to_device) * self._table.host.ns_per_block

    # --- prediction --------------------------------------------------------------------------
    def compute_ns(self, shape: StepShape) -> int:
        """Return the predicted time of the computation of a step."""
        if shape.num_tokens == shape.num_decodes:
            return self.decode_step_ns
        return max(self.decode_step_ns, self._model.step_ns(shape))

    def steps_until_end(self) -> int | None:
        """Return the steps after which a decoding request is expected to end; None if unknown."""
        ends = len(self._table.batch.members) * self._ended
        return max(1, self.decodes // ends) if ends else None

    def steps_of_copies(self, blocks: int) -> int:
        """Return the number of decoding steps that a copy to host memory and back takes."""
        swapping_out = self._table.swapping_out.values()
        to_host_ns = self._queue_ns(swapping_out) + self._priced_ns(blocks)
        return -(-(to_host_ns + self._priced_ns(blocks)) // self.decode_step_ns)

    def copy_is_cheaper(
        self, victim: ScheduledRequest, blocks: int, *, waited_for: bool = False
    ) -> bool:
        """Return True if copying a request costs less than half of recomputing it.

        Args:
            victim: a running request.
            blocks: number of its blocks that would be copied, at least 1.
            waited_for: True if running requests wait for its blocks.
        """
        copy_ns = self._copy_cost_ns(victim, blocks, waited_for=waited_for)
        return _COPY_MARGIN * copy_ns < self._recompute_cost_ns(victim, blocks)

    def cost_ns(self, victim: ScheduledRequest, *, copied: int) -> float:
        """Return the cost of evicting a running request.

        Args:
            victim: the request.
            copied: number of its blocks that would be copied; 0 if it would be recomputed.
        """
        if copied:
            return self._copy_cost_ns(victim, copied, waited_for=False)
        blocks = self._table.kv.blocks_for(victim.computed_tokens)
        return self._recompute_cost_ns(victim, blocks) if blocks else 0.0

    def _copy_cost_ns(self, victim: ScheduledRequest, blocks: int, *, waited_for: bool) -> float:
        """Return the cost of copying a request to host memory and back."""
        table, kv, step_ns = self._table, self._table.kv, self.decode_step_ns
        exclusive = kv.exclusive(victim.blocks)
        shared = self._shared_blocks(victim, blocks)
        # A copy ends with a step, however short it is.
        to_host_ns = self._queue_ns(table.swapping_out.values()) + self._priced_ns(blocks)
        to_host_ns = max(step_ns, to_host_ns)
        to_device_ns = max(step_ns, self._priced_ns(blocks - shared))
        idle = to_host_ns * exclusive + to_device_ns * (blocks - shared)
        lost_ns = self._width_share() * idle / kv.total_blocks
        delay_ns = to_host_ns + to_device_ns
        if waited_for:
            waiting = table.batch.members_needing_blocks(-(-to_host_ns // step_ns))
            delay_ns += to_host_ns * len(waiting) // 2
        return delay_ns + self._view.num_requests * lost_ns

    def _recompute_cost_ns(self, victim: ScheduledRequest, blocks: int) -> float:
        """Return the cost of recomputing the computed tokens of a request."""
        start = self._shared_blocks(victim, blocks) * self._table.kv.block_size
        own_ns, longer_ns = self._recompute_ns(start, victim.computed_tokens - start)
        return own_ns + self._view.num_requests * longer_ns

    def _shared_blocks(self, victim: ScheduledRequest, blocks: int) -> int:
        """Return the number of leading blocks that other requests hold.

        They stay on the device: they are neither freed, nor copied back, nor recomputed.
        """
        return min(blocks - 1, len(victim.blocks) - self._table.kv.exclusive(victim.blocks))

    def _queue_ns(self, requests: Iterable[ScheduledRequest]) -> int:
        """Return the time of the blocks of current copies that are in no plan yet."""
        blocks = sum(len(r.host_blocks) - r.copied_blocks for r in requests)
        return blocks * self._table.host.ns_per_block

    def _priced_ns(self, blocks: int) -> int:
        """Return the time of a copy, and the time by which it delays other copies."""
        busy = min(1.0, self._link_ns / self._total_ns) if self._total_ns else 0.0
        return round(blocks * self._table.host.ns_per_block * (1 + busy))

    def _width_share(self) -> float:
        """Return the share of time that does not depend on prompts."""
        return max(0.0, 1 - self._prompts_ns / self._total_ns) if self._total_ns else 1.0

    def _budget_share(self) -> float:
        """Return the used share of the token budget."""
        return min(1.0, self._budget_ns / self._total_ns) if self._total_ns else 1.0

    def _recompute_ns(self, start: int, tokens: int) -> tuple[int, float]:
        """Predict the time of recomputing tokens, and the device time that it takes from others.

        Args:
            start: number of tokens of the request before these.
            tokens: number of tokens to recompute, at least 1.
        """
        batch = self._table.batch
        decodes = 0 if self.prompts_alone else len(batch.members)
        beside = StepShape.of(
            decodes=decodes, decode_context_tokens=batch.total_context if decodes else 0
        )
        step_ns = self._model.step_ns(beside.with_chunk(start, tokens))
        longer_ns = step_ns - self.decode_step_ns if decodes else step_ns
        budget_ns = self._budget_share() * step_ns * tokens / self._view.limits.token_budget
        return max(step_ns, self.decode_step_ns), max(longer_ns, budget_ns)
