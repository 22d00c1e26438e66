"""Admission to the queue: an admitted request is expected to meet its targets.

A new request is tested against the work of all requests, late ones included (`demand`), and against
the work that is offered by requests that are worth more (`offers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from goodput_core.steptime import StepShape
from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.policies.slo.demand import (
    Held,
    PoolDemand,
    PoolQueue,
    Stay,
    late_prompts,
)
from goodput_engine.scheduler.policies.slo.offers import OfferedWork
from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.scheduler.policies.slo.forecast import Forecast, Prompt
    from goodput_engine.scheduler.policies.slo.policy import LearningStepTime
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["SLOAdmission"]

_BUFFER_STEP: Final = 0.01
"""Buffers move so that one in a hundred admitted requests misses its target."""
_POOL_STEP: Final = 0.05
"""Share of the KV pool by which the free share grows after a miss that evictions explain."""
_MAX_FREE: Final = 0.5
_RESERVED: Final = 0.7
"""Share of the device time asked for by better requests that is held back for them."""
_MAX_CLASSES: Final = 64
_COUNTED_IN_A_STEP: Final = 64
"""Mean number of running requests whose stays are counted in a step."""
_SAMPLE_DECODES: Final = 16
"""The cost of a decode is that of so many more, because steps are rounded."""
_RETRY_BINS: Final = 4
"""A retry at the stated time counts as worth four times as much: two doublings of two bins."""
_LEAST_BACKLOG_NS: Final = NS_PER_S // 2
_MAX_LOAD: Final = 0.99
_PROMPT_STATES: Final = (RequestState.WAITING, RequestState.PREFILLING)


class _Claim(NamedTuple):
    """The demand of a new request.

    Args:
        prompt: its prompt.
        stay: the time for which it holds blocks and a place.
        tokens_left: predicted output tokens.
        work_ns: its use of the scarcest resource, as time of the whole resource.
        rank: its rank by value per use of the scarcest resource.
        memory_rank: its rank by value per use of KV memory.
    """

    prompt: Prompt
    stay: Stay
    tokens_left: int
    work_ns: float
    rank: tuple[int, int]
    memory_rank: tuple[int, int]


class SLOAdmission:
    """Decides which new requests are admitted, and which waiting ones they displace.

    Args:
        view: the scheduler.
        model: predicts step times.

    Attributes:
        wait_ns: predicted time until a request like the last refused one would be admitted.
    """

    def __init__(self, view: SchedulerView, model: LearningStepTime) -> None:
        self.wait_ns = 0
        self._view = view
        self._model = model
        self._offered = OfferedWork(reserved=_RESERVED)
        self._offered_memory = OfferedWork(view.total_blocks)
        self._buffers_ns: dict[str, float] = {}
        """Time by class that must be left before a new prompt is due, besides one step."""
        self._free_share = 0.0
        """Share of the KV pool that must be left free by predicted demand."""
        self._step_ns = 0.0
        """Time of a step with prompts at the last arrival."""
        self._asked: Forecast | None = None
        """The forecast of the last arrival."""
        self._forecast: Forecast | None = None
        """The last forecast for which the next attributes were used."""
        self._waiting: dict[int, Stay] = {}
        """Stays of waiting requests in this forecast by rid, from when the stays were counted."""
        self._steps_left = 0
        """Steps until they are made again; until then, requests that end count as running."""
        self._counted_ns = 0
        self._held: list[tuple[int, Stay, Held]] = []
        """Priority, stay and blocks of the running requests."""
        self._not_held: list[tuple[ScheduledRequest, Stay]] = []
        """Requests that waited when the stays were counted, or arrived later."""
        self._pools: dict[int, tuple[PoolDemand, PoolQueue]] = {}
        """By priority: demand and queue of the requests with this priority or a higher one."""
        self._blocks = 0
        """Blocks that all requests need together at their longest."""
        self._requests = 0

    def displaced_for(
        self, request: ScheduledRequest, forecast: Forecast, *, retry: bool = False
    ) -> list[ScheduledRequest] | None:
        """Return the waiting requests to reject for a new one; None to reject the new one.

        A request that is admitted is added to the prompts of the forecast.

        Args:
            request: the new request.
            forecast: the state before the next step.
            retry: True if the request was refused before and is sent again at the stated time.
        """
        forecast.prompts = prompts = _prompts_left(forecast, again=forecast is self._asked)
        self._asked = forecast
        self._step_ns = forecast.step_ns
        claim, now_ns = self._claim(request, forecast), forecast.begins_ns
        if retry:
            claim = claim._replace(
                rank=_preferred(claim.rank), memory_rank=_preferred(claim.memory_rank)
            )
        displaced = self._displaced(claim, prompts, forecast)
        offered, memory = self._offered, self._offered_memory
        window_ns = claim.prompt.due_ns - claim.prompt.work_ns - now_ns
        offered.add(claim.rank, claim.work_ns, window_ns=window_ns, now_ns=now_ns)
        block_ns = claim.stay.blocks * claim.stay.length_ns
        memory.add(claim.memory_rank, block_ns, window_ns=window_ns, now_ns=now_ns)
        if displaced is None or offered.outbids(claim.rank, now_ns):
            offered.refuse(claim.rank, claim.work_ns)
            # A backlog shrinks by the capacity that is not asked for.
            backlog_ns = max(_LEAST_BACKLOG_NS, sum(prompt.work_ns for prompt in prompts))
            spare = 1 - min(_MAX_LOAD, offered.load(claim.rank, now_ns))
            self.wait_ns = int(backlog_ns / spare)
            return None
        if displaced:
            self._steps_left = -1  # the stays contain none of the requests that go or come
        elif self._forecast is forecast:
            self._count(request, claim.tokens_left)
            stay = claim.stay.later(self._passed_ns(now_ns))
            self._not_held.append((request, stay))
            for priority, (demand, _) in self._pools.items():
                if request.priority >= priority:
                    demand.add(stay)
        forecast.prompts = sorted([*prompts, claim.prompt])
        return displaced

    def longest_step_ns(self, now_ns: int) -> float:
        """Return the longest step for which a request that arrives in it can wait."""
        return self._offered.shortest_window_ns(now_ns) / 2

    def calibrate(self, request: ScheduledRequest, ended_ns: int) -> None:
        """Widen the buffer of a class after a missed target, narrow it after a met one.

        Steps are planned so that TPOT targets are met, so a missed one shows that the request did
        not keep its blocks. It widens the share of the pool that is left free instead.
        """
        targets, arrival_ns, name = request.targets, request.arrival_ns, request.slo_class
        if targets.ttft_ns is None and targets.e2e_ns is None:
            return
        if targets.tpot_ns is not None:
            tokens_ns = ended_ns - request.first_token_ns
            slow = tokens_ns > targets.tpot_ns * (request.output_tokens - 1)
            free_share = self._free_share + _POOL_STEP * (slow - _BUFFER_STEP)
            self._free_share = min(max(0.0, free_share), _MAX_FREE)
        if name not in self._buffers_ns and len(self._buffers_ns) >= _MAX_CLASSES:
            return
        missed = (
            targets.ttft_ns is not None and request.first_token_ns - arrival_ns > targets.ttft_ns
        )
        if targets.e2e_ns is not None and ended_ns - arrival_ns > targets.e2e_ns:
            # A buffer is no remedy for an output that may be too long even for an idle engine.
            one = StepShape.of(decodes=1, decode_context_tokens=request.input_tokens)
            longest_ns = request.output_limit * self._model.step_ns(one)
            missed = missed or longest_ns <= targets.e2e_ns
        buffer_ns = self._buffers_ns.get(name, 0.0) + self._step_ns * (missed - _BUFFER_STEP)
        self._buffers_ns[name] = max(0.0, buffer_ns)

    def _claim(self, request: ScheduledRequest, forecast: Forecast) -> _Claim:
        """Predict what a new request uses of the device, of KV memory and of places."""
        view, model = self._view, self._model
        prompt, left = forecast.prompt(request), forecast.tokens_left(request)
        # Prefix hits count here: they may be gone, and the account must not be too small.
        tokens, decodes = request.input_tokens, forecast.all_decodes
        half = max(1, view.limits.token_budget // 2)
        one_ns, two_ns = (model.step_ns(decodes.with_chunk(0, n * half)) for n in (1, 2))
        count, context = decodes.num_decodes, decodes.decode_context_tokens
        more = StepShape.of(
            decodes=count + _SAMPLE_DECODES,
            decode_context_tokens=context + _SAMPLE_DECODES * (tokens + left // 2),
        )
        decode_ns = max(0, model.step_ns(more) - model.step_ns(decodes)) / _SAMPLE_DECODES
        stay = self._stay(prompt, left, forecast)
        # Not at the pace beside prompts, which may be refused.
        length_ns = prompt.work_ns + left * forecast.token_ns
        work_ns = max(
            tokens * (two_ns - one_ns) / half + left * decode_ns,
            length_ns * stay.blocks / view.total_blocks,
            length_ns / view.limits.max_num_seqs,
        )
        value = request.weight * forecast.chance(request)
        return _Claim(
            prompt=prompt,
            stay=stay,
            tokens_left=left,
            work_ns=work_ns,
            rank=OfferedWork.rank(request.priority, value, work_ns),
            memory_rank=OfferedWork.rank(request.priority, value, stay.blocks * stay.length_ns),
        )

    def _displaced(
        self, claim: _Claim, prompts: list[Prompt], forecast: Forecast
    ) -> list[ScheduledRequest] | None:
        """Return the waiting requests to reject for a new one; None if it cannot be in time."""
        late = self._made_late(claim, prompts, forecast)
        if late is not None:
            return [request for request in late if not request.admitted_tokens]
        request = claim.prompt.request
        less = sorted(
            (prompt for prompt in prompts if _is_displaceable(prompt.request, request)),
            key=lambda p: (p.request.priority, p.request.weight / max(1.0, p.work_ns), -p.due_ns),
        )
        # The test passes without the first n of them: find the smallest n.
        low, high = 0, len(less) + 1
        while high - low > 1:
            middle = (low + high) // 2
            found = self._made_late(claim, prompts, forecast, without=less[:middle])
            if found is None:
                low = middle
            else:
                high, late = middle, found
        if late is None:
            return None
        gone = [prompt.request for prompt in less[:high]]
        lost = sum(other.weight for other in gone if other.priority == request.priority)
        if lost >= request.weight:
            return None
        return gone + [other for other in late if not other.admitted_tokens]

    def _made_late(
        self,
        claim: _Claim,
        prompts: list[Prompt],
        forecast: Forecast,
        *,
        without: Sequence[Prompt] = (),
    ) -> list[ScheduledRequest] | None:
        """Return the less important requests that become late; None if the new one is refused."""
        new, begins_ns = claim.prompt, forecast.begins_ns
        if not self._model.steps:
            return []  # nothing is known about the device
        if without:
            gone = {prompt.rid for prompt in without}
            prompts = [prompt for prompt in prompts if prompt.rid not in gone]
        buffer_ns = self._buffers_ns.get(new.request.slo_class, 0.0)
        buffer_ns = min(buffer_ns, (new.due_ns - begins_ns) / 2)
        # No step takes longer than one with all the prompts that are there.
        work_ns = new.work_ns + sum(prompt.work_ns for prompt in prompts)
        step_ns = min(forecast.step_ns, forecast.token_ns + work_ns)
        late = late_prompts(
            prompts,
            new,
            begins_ns=begins_ns,
            margin_ns=step_ns + buffer_ns,
            share=1 - self._offered.held_back(claim.rank, begins_ns),
        )
        if late is None:
            return None
        stay = claim.stay._replace(latest_ns=max(0.0, claim.stay.latest_ns - buffer_ns))
        claim = claim._replace(stay=stay)
        return late if self._memory_suffices(claim, prompts, forecast, whole=not without) else None

    def _memory_suffices(
        self, claim: _Claim, prompts: list[Prompt], forecast: Forecast, *, whole: bool
    ) -> bool:
        """Return True if blocks and places suffice for the new request and all others.

        Args:
            claim: the new request.
            prompts: prompts of the other requests.
            forecast: the state before the next step.
            whole: True if these are all prompts of the forecast.
        """
        view, begins_ns = self._view, forecast.begins_ns
        if forecast is not self._forecast:
            self._steps_left -= 1
            self._forecast = forecast
            self._waiting.clear()
        if not whole or self._steps_left < 0:
            self._count_stays(prompts, forecast)
            self._steps_left = view.num_running // _COUNTED_IN_A_STEP if whole else -1
        new, places = claim.prompt.request, view.limits.max_num_seqs
        blocks = self._blocks - (-(new.total_tokens + claim.tokens_left) // view.block_size)
        if blocks <= view.total_blocks and self._requests < places:
            return True
        passed_ns = self._passed_ns(begins_ns)
        rank, offered = claim.memory_rank, self._offered_memory
        expected = offered.expected_above(rank, begins_ns)
        demand, _ = self._pool(new.priority)
        return demand.fits(
            claim.stay.later(passed_ns),
            blocks=view.total_blocks
            * (1 - max(self._free_share, offered.held_back(rank, begins_ns))),
            places=places,
            reserved=lambda at_ns: expected(at_ns - passed_ns),
        ) and self._all_start(claim, prompts, forecast)

    def _all_start(self, claim: _Claim, prompts: list[Prompt], forecast: Forecast) -> bool:
        """Return True if the new request finds room in time, and makes no other start late."""
        least = claim.prompt.request.priority
        _, queue = self._pool(least)
        passed_ns = self._passed_ns(forecast.begins_ns)
        started = [
            stay for request, stay in self._not_held if request.blocks and request.priority >= least
        ]
        waiting: list[tuple[int, Stay]] = []
        at = 0
        for prompt in prompts:
            if not prompt.request.blocks:
                stay = self._waiting.get(prompt.rid)
                if stay is None:
                    left = forecast.tokens_left(prompt.request)
                    stay = self._stay(prompt, left, forecast).later(passed_ns)
                    self._waiting[prompt.rid] = stay
                waiting.append((prompt.rid, stay))
                at += prompt < claim.prompt
        new = (claim.prompt.rid, claim.stay.later(passed_ns))
        late = queue.late([*waiting[:at], new, *waiting[at:]], started=started, begins_ns=passed_ns)
        if claim.prompt.rid in late:
            return False
        return not late or late <= queue.late(waiting, started=started, begins_ns=passed_ns)

    def _passed_ns(self, begins_ns: int) -> int:
        """Return the time since the stays were counted; steps may end earlier than predicted."""
        return max(0, begins_ns - self._counted_ns)

    def _count_stays(self, prompts: list[Prompt], forecast: Forecast) -> None:
        """Add up the blocks and places of running and waiting requests."""
        view = self._view
        self._counted_ns = forecast.begins_ns
        self._blocks = self._requests = 0
        self._held, self._not_held = [], []
        self._pools.clear()
        self._waiting.clear()
        for request in view.running():
            is_favoured = request is forecast.favoured
            if is_favoured or request.rid not in forecast.lost:
                left = forecast.tokens_left(request)
                length_ns = left * forecast.pace_ns
                blocks = (request.total_tokens + left / 2) / view.block_size + 0.5
                slack_ns = 0.0 if is_favoured else max(0.0, forecast.slack_ns(request))
                stay = Stay(slack_ns, length_ns, blocks)
                work_ns = 0.0 if request.sampled_tokens else forecast.work_ns(request)
                held = Held(work_ns + length_ns, blocks, slack_ns - forecast.resume_ns(request))
                self._held.append((request.priority, stay, held))
                self._count(request, left)
        for prompt in prompts:
            if not prompt.request.blocks:
                left = forecast.tokens_left(prompt.request)
                self._not_held.append((prompt.request, self._stay(prompt, left, forecast)))
                self._count(prompt.request, left)

    def _pool(self, priority: int) -> tuple[PoolDemand, PoolQueue]:
        """Return demand and queue of requests with a priority or a higher one, made at first use.

        Running requests of lower levels are evicted for an urgent prompt, so they take no room.
        """
        pool = self._pools.get(priority)
        if pool is None:
            view = self._view
            running = [(stay, held) for level, stay, held in self._held if level >= priority]
            waiting = [stay for other, stay in self._not_held if other.priority >= priority]
            demand = PoolDemand([*(stay for stay, _ in running), *waiting])
            queue = PoolQueue(
                [held for _, held in running],
                blocks=view.total_blocks * (1 - self._free_share),
                places=view.limits.max_num_seqs,
            )
            pool = self._pools[priority] = demand, queue
        return pool

    def _stay(self, prompt: Prompt, left: int, forecast: Forecast) -> Stay:
        """Return the stay of a request that waits; with half a block that is not full."""
        return Stay(
            latest_ns=max(0.0, prompt.due_ns - prompt.work_ns - forecast.begins_ns),
            length_ns=prompt.work_ns + left * forecast.pace_ns,
            blocks=(prompt.request.total_tokens + left / 2) / self._view.block_size + 0.5,
        )

    def _count(self, request: ScheduledRequest, left: int) -> None:
        self._blocks -= -(request.total_tokens + left) // self._view.block_size
        self._requests += 1


def _prompts_left(forecast: Forecast, *, again: bool) -> list[Prompt]:
    """Return the prompts of the forecast that are still to be computed, with the work left.

    Args:
        forecast: the forecast.
        again: True if it was done before, so that the work is that which is left.
    """
    left = [prompt for prompt in forecast.prompts if prompt.request.state in _PROMPT_STATES]
    if again:
        return left
    return [prompt._replace(work_ns=forecast.work_ns(prompt.request)) for prompt in left]


def _preferred(rank: tuple[int, int]) -> tuple[int, int]:
    """Return the rank of a retry."""
    priority, density = rank
    return priority, density + _RETRY_BINS


def _is_displaceable(waiting: ScheduledRequest, new: ScheduledRequest) -> bool:
    """Return True if a waiting request has never started and is less important than a new one."""
    if waiting.admitted_tokens or waiting.state is not RequestState.WAITING:
        return False
    return (waiting.priority, waiting.weight) < (new.priority, new.weight)
