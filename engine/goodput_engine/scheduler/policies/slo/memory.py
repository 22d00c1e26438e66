"""The test for KV memory and places: can a new request be served beside the others?

It keeps the predicted stays of all requests between arrivals, because to count them takes time.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from goodput_core.spec.choices import Preemption
from goodput_engine.scheduler.policies.slo.demand import (
    Held,
    PoolDemand,
    PoolQueue,
    PromptDelay,
    Stay,
    TokensInMemory,
)
from goodput_engine.scheduler.policies.slo.prompts import latest_starts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from goodput_engine.scheduler.policies.slo.forecast import Forecast
    from goodput_engine.scheduler.policies.slo.prompts import Prompt
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["Better", "MemoryTest", "NewStay", "copies_ns", "headroom_blocks"]

_COUNTED_IN_A_STEP: Final = 64
"""Mean number of running requests whose stays are counted in a step."""
_FIRST_FREE: Final = 0.05
"""Share of the KV pool that is left free before anything is learned."""
_POOL_STEP: Final = 0.05
"""Share of the KV pool by which the free share grows after a miss while the pool is short."""
_NARROWING: Final = 0.01
"""Part of this step by which it shrinks otherwise, so that one in a hundred may miss."""
_MAX_FREE: Final = 0.5
_UNSURE: Final = 0.5
"""Standard error of a mean length with one output, as a part of the mean."""
_LONGEST_WAIT: Final = 2
"""Factor by which the wait for blocks may be longer than predicted. Of the requests whose predicted
wait took over 60 % of the time until their latest start, up to one in eight was late."""


class NewStay(NamedTuple):
    """A new request, as the test sees it.

    Args:
        prompt: its prompt.
        stay: the time for which it holds blocks and a place.
        left: predicted output tokens.
    """

    prompt: Prompt
    stay: Stay
    left: int

    def window_ns(self, begins_ns: int) -> float:
        """Return the time until its latest start; negative if it would be late."""
        return self.prompt.due_ns - self.prompt.work_ns - begins_ns


class Better(NamedTuple):
    """The demand for a resource of requests that are worth more.

    Args:
        held_back: share of the resource that is held back for them.
        expected: returns the demand, in shares of the resource times ns, of those that are expected
            to start within a time.
    """

    held_back: float
    expected: Callable[[float], float]


class _Running(NamedTuple):
    """A running request that can meet its targets.

    Args:
        priority: its priority.
        stay: its stay from the time at which it must go on.
        held: the blocks that it holds until it ends.
        tokens: its tokens in memory, with half a block that is not full.
        left: mean number of output tokens that it still has.
    """

    priority: int
    stay: Stay
    held: Held
    tokens: float
    left: int


class _Pool(NamedTuple):
    """Three views of the KV pool: demand over time, starts of waiting requests, and peaks."""

    demand: PoolDemand
    queue: PoolQueue
    held: TokensInMemory


def copies_ns(
    request: ScheduledRequest, forecast: Forecast, view: SchedulerView, *, step_ns: float
) -> float:
    """Return the time until copies to host memory make room for a waiting request.

    0 if the requests that are evicted for it would be recomputed. Copied blocks are free one step
    after the copy, which is as long as the evicted request.

    Args:
        request: the waiting request.
        forecast: the state before the next step.
        view: the scheduler.
        step_ns: time of the steps meanwhile.
    """
    decodes = forecast.all_decodes
    if view.preemption is Preemption.RECOMPUTE:
        return 0.0
    mean = decodes.decode_context_tokens // max(1, decodes.num_decodes)
    tokens = max(request.own_tokens, mean)
    copy_ns = view.copy_ns(-(-tokens // view.block_size))
    if view.preemption is Preemption.SWAP or 2 * copy_ns < tokens * forecast.prompt_ns:
        return step_ns + max(step_ns, copy_ns)
    return 0.0


def headroom_blocks(view: SchedulerView) -> int:
    """Return the blocks that an admission to the batch leaves free, so that decodes can grow."""
    return view.total_blocks // 100


class MemoryTest:
    """Tests if KV memory and places suffice for a new request and all others.

    Args:
        view: the scheduler.
    """

    def __init__(self, view: SchedulerView) -> None:
        self._view = view
        self._free_shares = [_FIRST_FREE, 0.0]
        """Share of the KV pool that must be left free by predicted demand, for requests without and
        with an end-to-end target. The latter is planned for a long output already."""
        self._free_places = [0.0, 0.0]
        """The same share of the places in the batch."""
        self._is_short = self._lacks_places = False
        """True if the pool was too small at the last test for all requests together, and if there
        were too few places."""
        self._forecast: Forecast | None = None
        """The last forecast for which the next attributes were used."""
        self._waiting: dict[int, Stay] = {}
        """Stays of waiting requests in this forecast by rid, from when the stays were counted."""
        self._steps_left = 0
        """Steps until they are counted again; until then, requests that end count as running."""
        self._counted_ns = self._counted_epoch = 0
        self._ends: list[int] = []  # tokens until the ends of the running requests, in order
        self._held: list[_Running] = []
        """The running requests."""
        self._not_held: list[tuple[ScheduledRequest, Stay]] = []
        """Requests that waited when the stays were counted, or arrived later."""
        self._pools: dict[int, _Pool] = {}
        """By priority: the KV pool as requests with this priority or a higher one use it."""
        self._blocks = 0
        """Blocks that all requests need together at their longest, without shared ones."""
        self._total_blocks = 0
        """Blocks of the pool, without shared ones that are in the use of no single request."""
        self._requests = 0

    def stay(self, prompt: Prompt, left: int, forecast: Forecast) -> Stay:
        """Return the stay of a request that waits; with half a block that is not full."""
        return Stay(
            latest_ns=max(0.0, prompt.due_ns - prompt.work_ns - forecast.begins_ns),
            length_ns=prompt.work_ns + left * forecast.pace_ns,
            blocks=(prompt.request.own_tokens + left / 2) / self._view.block_size + 0.5,
        )

    def tokens_left(self, request: ScheduledRequest, forecast: Forecast) -> int:
        """Return the output tokens that a request still has, with the error of a young mean."""
        return self._cautious(request, forecast.tokens_left(request), forecast)

    def _cautious(self, request: ScheduledRequest, left: int, forecast: Forecast) -> int:
        """Return a predicted number of output tokens, with the error of a young mean.

        Where no target can be ensured, requests have only a chance, and no margin helps them.
        """
        if not (
            request.targets.e2e_ns is None or forecast.ensures(request) or forecast.ensures_targets
        ):
            return left
        longer = 1 + _UNSURE / math.sqrt(1 + forecast.num_learned(request))
        return min(math.ceil(left * longer), request.output_limit - request.sampled_tokens)

    def learn(self, request: ScheduledRequest, *, missed: bool) -> None:
        """Widen the share that is left free after a missed target, narrow it after a met one.

        The misses of requests that all fit into the pool together have other causes.
        """
        at = request.targets.e2e_ns is not None
        for is_short, shares in (
            (self._is_short, self._free_shares),
            (self._lacks_places, self._free_places),
        ):
            if is_short:
                free_share = shares[at] + _POOL_STEP * (missed - _NARROWING)
                shares[at] = min(max(0.0, free_share), _MAX_FREE)

    def add(self, new: NewStay, forecast: Forecast) -> None:
        """Add a request that was admitted."""
        if self._forecast is not forecast:
            return
        request, stay = new.prompt.request, new.stay.later(self._passed_ns(forecast.begins_ns))
        self._count(request, new.left)
        self._not_held.append((request, stay))
        for priority, pool in self._pools.items():
            if request.priority >= priority:
                pool.demand.add(stay)

    def forget(self) -> None:
        """Count all stays again at the next test, because waiting requests were displaced."""
        self._steps_left = -1

    def look(self, prompts: Sequence[Prompt], forecast: Forecast) -> None:
        """Count the stays of all requests in this forecast, if the last count is old."""
        if forecast is not self._forecast:
            self._steps_left -= 1
            self._forecast = forecast
            self._waiting.clear()
        if self._steps_left < 0:
            self._count_stays(prompts, forecast)
            self._steps_left = self._view.num_running // _COUNTED_IN_A_STEP

    def ends(self) -> tuple[list[int], int]:
        """Return the tokens until the ends of running requests, and the steps since the count."""
        return self._ends, self._view.decode_epoch - self._counted_epoch

    def suffices(
        self,
        new: NewStay,
        prompts: Sequence[Prompt],
        forecast: Forecast,
        *,
        whole: bool,
        memory: Better,
        places: Better,
        levels: Callable[[float], float],
    ) -> bool:
        """Return True if blocks and places suffice for the new request and all others.

        Args:
            new: the new request.
            prompts: prompts of the other requests.
            forecast: the state before the next step.
            whole: True if these are all prompts of the forecast.
            memory: what better requests ask for of the KV pool.
            places: what they ask for of the places in the batch.
            levels: as `places.expected`, for requests of higher levels alone.
        """
        view, begins_ns = self._view, forecast.begins_ns
        if whole:
            self.look(prompts, forecast)
        else:
            self._count_stays(prompts, forecast)
            self._steps_left = -1
        request, num_places = new.prompt.request, view.limits.max_num_seqs
        needed = self._blocks - (-(request.own_tokens + new.left) // view.block_size)
        self._is_short = needed > self._total_blocks
        expected = levels(new.stay.length_ns) * num_places / new.stay.length_ns
        self._lacks_places = self._requests + expected >= num_places
        if not (self._is_short or self._lacks_places):
            return True
        if not forecast.num_learned(request) and self._is_first(request, prompts):
            return True
        passed_ns = self._passed_ns(begins_ns)
        at = request.targets.e2e_ns is not None
        blocks = self._total_blocks * (1 - max(self._free_shares[at], memory.held_back))
        left = num_places * (1 - max(self._free_places[at], places.held_back))
        if self._has_room(new, prompts, forecast, blocks=blocks, places=left):
            return True
        return self._pool(request.priority).demand.fits(
            new.stay.later(passed_ns),
            blocks=blocks,
            places=left,
            reserved=lambda at_ns: memory.expected(at_ns - passed_ns) * self._total_blocks,
            reserved_places=lambda at_ns: places.expected(at_ns - passed_ns) * num_places,
        ) and self._all_start(new, prompts, forecast)

    def _is_first(self, request: ScheduledRequest, prompts: Sequence[Prompt]) -> bool:
        """Return True if a new request is the only one of its class and its blocks are free.

        A class whose outputs are unknown must be served to be learned.
        """
        view, size = self._view, self._view.block_size
        waiting = [prompt.request for prompt in prompts if not prompt.request.blocks]
        others = (*view.running(), *waiting)
        if any(other.slo_class == request.slo_class for other in others):
            return False
        needed = sum(-(-other.own_tokens // size) for other in (request, *waiting))
        free = view.free_blocks - headroom_blocks(view)
        return needed <= free and view.num_running + len(waiting) < view.limits.max_num_seqs

    def _has_room(
        self,
        new: NewStay,
        prompts: Sequence[Prompt],
        forecast: Forecast,
        *,
        blocks: float,
        places: float,
    ) -> bool:
        """Return True if the new request can start now and no other pauses until it ends.

        Args:
            new: the new request.
            prompts: prompts of the other requests.
            forecast: the state before the next step.
            blocks: blocks that may be used.
            places: places that may be used.
        """
        view, request, pace_ns = self._view, new.prompt.request, forecast.pace_ns
        held = self._pool(request.priority).held
        half, steps = view.block_size / 2, new.stay.length_ns / pace_ns
        # Requests that have started since the stays were counted, or have no room yet. Those that
        # could start after this stay may be too many to start then together.
        others = [
            other
            for other, _ in self._not_held
            if other.blocks and other.priority >= request.priority
        ]
        others += [prompt.request for prompt in prompts if not prompt.request.blocks]
        if len(held) + len(others) + 1 > places:
            return False
        tokens = request.own_tokens + half
        for other in others:
            tokens += other.own_tokens + half + min(steps, self.tokens_left(other, forecast))
        after = self._passed_ns(forecast.begins_ns) / pace_ns
        peak = held.peak_beside(tokens, after=after, steps=steps)
        return peak <= (blocks - headroom_blocks(view)) * view.block_size

    def _all_start(self, new: NewStay, prompts: Sequence[Prompt], forecast: Forecast) -> bool:
        """Return True if the new request finds room in time, and makes no equal start late."""
        request = new.prompt.request
        late = self._start_late(new, prompts, forecast, least=request.priority)
        less = {p.rid for p in prompts if late and p.request.priority < request.priority}
        return late <= less

    def displaces(
        self, new: NewStay, prompts: Sequence[Prompt], forecast: Forecast
    ) -> list[ScheduledRequest]:
        """Return the less important prompts without room that start late because of a new one."""
        if not (self._is_short or self._lacks_places):
            return []
        request = new.prompt.request
        less = {
            prompt.rid: prompt.request
            for prompt in prompts
            if not prompt.request.blocks and prompt.request.priority < request.priority
        }
        if not less:
            return []
        least = min(other.priority for other in less.values())
        late = self._start_late(new, prompts, forecast, least=least)
        return [less[rid] for rid in late if rid in less]

    def _start_late(
        self, new: NewStay, prompts: Sequence[Prompt], forecast: Forecast, *, least: int
    ) -> set[int]:
        """Return the rids of the requests that do not start in time because of a new one.

        Args:
            new: the new request. Its own rid is returned if it does not start in time.
            prompts: prompts of the other requests.
            forecast: the state before the next step.
            least: running requests of lower levels are taken to be evicted.
        """
        queue = self._pool(least).queue
        passed_ns = self._passed_ns(forecast.begins_ns)
        started = [
            stay for request, stay in self._not_held if request.blocks and request.priority >= least
        ]
        waiting: list[tuple[int, Stay]] = []
        order: list[tuple[int, Stay]] = []
        ordered = sorted([*prompts, new.prompt])
        starts_ns = latest_starts(ordered)
        for prompt in ordered:
            start_ns = starts_ns[prompt.rid]
            if prompt is new.prompt:
                latest_ns = min(new.stay.latest_ns, start_ns - forecast.begins_ns) / _LONGEST_WAIT
                stay = new.stay._replace(latest_ns=max(0.0, latest_ns))
                order.append((prompt.rid, stay.later(passed_ns)))
            elif not prompt.request.blocks:
                if prompt.rid not in self._waiting:
                    left = self.tokens_left(prompt.request, forecast)
                    found = self.stay(prompt, left, forecast).later(passed_ns)
                    self._waiting[prompt.rid] = found
                stay = self._waiting[prompt.rid]
                latest_ns = start_ns - forecast.begins_ns + passed_ns
                if latest_ns < stay.latest_ns:
                    stay = Stay(max(0.0, latest_ns), stay.length_ns, stay.blocks)
                waiting.append((prompt.rid, stay))
                order.append((prompt.rid, stay))
        # While prompts are computed, running requests decode at the pace of these steps. The new
        # prompt stands for those that arrive while it waits.
        slowest = max(1.0, forecast.step_ns / forecast.pace_ns)
        work_ns = sum((prompt.work_ns for prompt in prompts), new.prompt.work_ns)
        delay = PromptDelay(work_ns * (1 - 1 / slowest), slowest)
        request, size = new.prompt.request, self._view.block_size
        lends_ns = float(forecast.token_ns)
        starting = [request, *(p.request for p in ordered if p < new.prompt)]
        needed = sum(-(-one.own_tokens // size) for one in starting if not one.blocks)
        if needed > self._view.free_blocks:
            # Only copies make room. An evicted request leaves its place at once.
            copied_ns = copies_ns(request, forecast, self._view, step_ns=forecast.token_ns)
            lends_ns = max(lends_ns, copied_ns)
        at = request.targets.e2e_ns is not None
        late_of = partial(
            queue.late,
            started=started,
            begins_ns=passed_ns,
            prompts=delay,
            lends_ns=lends_ns,
            backlog_ns=sum((prompt.share_ns for prompt in prompts), new.prompt.share_ns),
            kept_free=self._free_shares[at] * self._total_blocks,
            kept_places=int(self._free_places[at] * self._view.limits.max_num_seqs),
        )
        late = late_of(order)
        return late - late_of(waiting) if late else late

    def _passed_ns(self, begins_ns: int) -> int:
        """Return the time since the stays were counted; steps may end earlier than predicted."""
        return max(0, begins_ns - self._counted_ns)

    def _count_stays(self, prompts: Sequence[Prompt], forecast: Forecast) -> None:
        """Add up the blocks and places of running and waiting requests."""
        view, self._counted_ns = self._view, forecast.begins_ns
        self._blocks = self._requests = 0
        self._total_blocks = view.total_blocks - view.shared_blocks()
        self._held, self._not_held = [], []
        self._pools.clear()
        self._waiting.clear()
        self._counted_epoch, ends = view.decode_epoch, forecast.ends()
        self._ends = [end for end, *_ in ends]
        for end, mean_left, request in ends:
            left = self._cautious(request, end, forecast)
            mean = self._cautious(request, mean_left, forecast)
            is_favoured = request is forecast.favoured
            length_ns, own = left * forecast.pace_ns, request.own_tokens
            blocks = (own + left / 2) / view.block_size + 0.5
            slack_ns = 0.0 if is_favoured else forecast.slack_ns(request)
            stay = Stay(max(0.0, slack_ns), length_ns, blocks)
            work_ns = may_pause_ns = 0.0
            if not request.sampled_tokens:
                work_ns = forecast.work_ns(request)
            elif not is_favoured:
                may_pause_ns = slack_ns - forecast.resume_ns(request)
            held = Held(work_ns + length_ns, blocks, may_pause_ns)
            tokens = own + view.block_size / 2
            self._held.append(_Running(request.priority, stay, held, tokens, mean))
            self._count(request, mean)
        for prompt in prompts:
            if not prompt.request.blocks:
                left = self.tokens_left(prompt.request, forecast)
                self._not_held.append((prompt.request, self.stay(prompt, left, forecast)))
                self._count(prompt.request, left)

    def _pool(self, priority: int) -> _Pool:
        """Return the pool as requests with a priority or a higher one use it, made at first use.

        Running requests of lower levels are evicted for an urgent prompt, so they take no room.
        """
        pool = self._pools.get(priority)
        if pool is None:
            view = self._view
            running = [one for one in self._held if one.priority >= priority]
            waiting = [stay for other, stay in self._not_held if other.priority >= priority]
            pool = self._pools[priority] = _Pool(
                PoolDemand([*(one.stay for one in running), *waiting]),
                PoolQueue(
                    [one.held for one in running],
                    blocks=self._total_blocks,
                    places=view.limits.max_num_seqs,
                ),
                TokensInMemory((one.tokens, one.left) for one in running),
            )
        return pool

    def _count(self, request: ScheduledRequest, left: int) -> None:
        self._blocks -= -(request.own_tokens + left) // self._view.block_size
        self._requests += 1
