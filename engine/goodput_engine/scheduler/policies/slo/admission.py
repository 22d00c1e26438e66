"""Admission to the queue: an admitted request is expected to meet its targets.

A new request is tested against the work of all requests, late ones included (`device`, `memory`),
and against the work that is offered by requests that are worth more (`offers`). One that fails may
wait for a later decision, because other requests may end earlier than predicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from goodput_core.steptime import StepShape
from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.policies.slo.chances import Chances
from goodput_engine.scheduler.policies.slo.device import (
    SAMPLE_DECODES,
    WalkedPrompts,
    late_prompts,
    prompt_steps,
)
from goodput_engine.scheduler.policies.slo.forecast import NEVER_NS, SAFETY
from goodput_engine.scheduler.policies.slo.memory import Better, MemoryTest, NewStay
from goodput_engine.scheduler.policies.slo.offers import BINS_PER_DOUBLING, OfferedWork
from goodput_engine.scheduler.policies.slo.prompts import (
    Prompt,
    is_ensurable,
    is_hopeless,
    prompts_left,
)
from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_engine.scheduler.policies.slo.device import LearningStepTime
    from goodput_engine.scheduler.policies.slo.forecast import Forecast
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["Refusal", "SLOAdmission"]

_BUFFER_STEP: Final = 0.01
"""Buffers move so that one in a hundred admitted requests misses its target."""
_MARGIN: Final = 0.08
"""Part of the time until a new prompt is due that must be left, at least a step without prompts. If
a step fails to end a prompt by a little, those behind it wait for the decodes of one more step."""
_MAX_CLASSES: Final = 64
_RETRY_BINS: Final = 2 * BINS_PER_DOUBLING
"""A retry at the stated time counts as worth four times as much."""
_HIGHEST_BIN: Final = 1 << 30
"""No request is worth so much per work."""
_MOST_CONTESTED: Final = 0.2
"""A request may wait for a later decision if at most this share is held back for better ones. Under
a higher load that lasts, the decision would be made when they happen to be few, and take their
room."""
_LEAST_CHANCE: Final = 0.5
"""It may wait while its end-to-end target is likelier met than not."""
_LEAST_LEARNED: Final = 4
"""Outputs of a class that were seen before its requests wait under a young overload."""
_LEAST_BACKLOG_NS: Final = NS_PER_S // 2
_MAX_LOAD: Final = 0.99


class _Claim(NamedTuple):
    """The demand of a new request.

    Args:
        new: its prompt, and its stay in KV memory.
        work_ns: its use of the scarcest resource, as time of the whole resource.
        memory_work_ns, place_work_ns: its use of KV memory and of places, as time of all of them.
        rank: its rank by value per use of the scarcest resource.
        memory_rank, place_rank: its rank by value per use of KV memory and of places.
    """

    new: NewStay
    work_ns: float
    memory_work_ns: float
    place_work_ns: float
    rank: tuple[int, int]
    memory_rank: tuple[int, int]
    place_rank: tuple[int, int]


class Refusal(NamedTuple):
    """The refusal of a request.

    Args:
        wait_ns: predicted time until a request like it would be admitted.
        final: False if the same request may wait for a later decision.
        is_hopeless: True if even an idle engine would miss its targets.
    """

    wait_ns: int
    final: bool
    is_hopeless: bool = False


class SLOAdmission:
    """Decides which new requests are admitted, and which waiting ones they displace.

    Args:
        view: the scheduler.
        model: predicts step times.
    """

    def __init__(self, view: SchedulerView, model: LearningStepTime) -> None:
        self._view = view
        self._model = model
        self._offered = OfferedWork(reserves=True)
        self._offered_memory = OfferedWork()
        self._offered_places = OfferedWork(reserves=True)
        self._memory = MemoryTest(view)
        self._buffers_ns: dict[str, float] = {}
        """Time by class that must be left before a new prompt is due, besides a step of decodes."""
        self._step_ns = 0.0
        """Time of a step with prompts at the last arrival."""
        self._chances = Chances()
        self._reorders = False
        """True if the prompts are in another order because of the request that is decided on."""
        self._asked: Forecast | None = None
        """The forecast of the last arrival."""
        self._walked: WalkedPrompts | None = None

    def decide(
        self,
        request: ScheduledRequest,
        forecast: Forecast,
        *,
        retry: bool = False,
        again: bool = False,
        may_wait: bool = True,
    ) -> list[ScheduledRequest] | Refusal:
        """Return the waiting requests to reject for a new one, or the refusal of the new one.

        A request that is admitted is added to the prompts of the forecast.

        Args:
            request: the new request.
            forecast: the state before the next step.
            retry: True if the request was refused before and is sent again at the stated time.
            again: True if the request has waited for this decision.
            may_wait: False if no more requests may wait for a later decision.
        """
        # Chunks that were planned since the forecast was made shorten the work that is left.
        forecast.prompts = prompts_left(forecast, planned=not again and forecast is not self._asked)
        by_due = not forecast.order.by_level
        forecast.order_with(request)
        self._reorders = by_due and forecast.order.by_level
        prompts = forecast.prompts
        if not again:
            self._asked = forecast
        self._step_ns = forecast.step_ns
        self._memory.look(prompts, forecast)
        claim, now_ns = self._claim(request, forecast), forecast.begins_ns
        if retry:
            claim = claim._replace(
                rank=_preferred(claim.rank),
                memory_rank=_preferred(claim.memory_rank),
                place_rank=_preferred(claim.place_rank),
            )
        offered, memory, places = self._offered, self._offered_memory, self._offered_places
        window_ns = claim.new.window_ns(now_ns)
        if not again and self._is_hopeless(request, forecast):
            # Nothing is kept free for it.
            if window_ns >= 0 and self._is_idle(prompts):
                self._memory.forget()
                forecast.prompts = sorted([*prompts, claim.new.prompt])
                return []
            if self._reorders:
                forecast.order_with(None)
            return Refusal(_LEAST_BACKLOG_NS, final=True, is_hopeless=True)
        contested = max(
            offered.held_back(claim.rank, now_ns),
            memory.held_back(claim.memory_rank, now_ns),
            places.held_back(claim.place_rank, now_ns),
        )
        displaced: list[ScheduledRequest] | None = None
        is_idle = self._is_idle(prompts)
        is_alone = again and window_ns >= 0 and is_idle
        if is_alone:
            displaced = []  # nothing else would use the device
        elif not again:
            displaced = self._displaced(claim, prompts, forecast)
            stay_ns = claim.new.stay.length_ns
            for account, rank, work_ns in (
                (offered, claim.rank, claim.work_ns),
                (memory, claim.memory_rank, claim.memory_work_ns),
                (places, claim.place_rank, claim.place_work_ns),
            ):
                account.add(rank, work_ns, window_ns=window_ns, stay_ns=stay_ns, now_ns=now_ns)
        elif self._model.steps and (
            contested <= _MOST_CONTESTED or self._may_pass(claim.new, forecast)
        ):
            displaced = self._made_late(claim, prompts, forecast)
        is_outbid = offered.outbids(claim.rank, now_ns) and not is_idle
        if displaced is None or is_outbid:
            waits = may_wait and not is_outbid
            waits = waits and self._may_change(claim, prompts, forecast, contested)
            if not waits:
                offered.refuse(claim.rank, claim.work_ns)
            if self._reorders:
                forecast.order_with(None)
            # A backlog shrinks by the capacity that is not asked for.
            backlog_ns = max(_LEAST_BACKLOG_NS, sum(prompt.work_ns for prompt in prompts))
            spare = 1 - min(_MAX_LOAD, offered.load(claim.rank, now_ns))
            return Refusal(int(backlog_ns / spare), final=not waits)
        if displaced or is_alone:
            self._memory.forget()
        else:
            self._memory.add(claim.new, forecast)
        forecast.prompts = sorted([*prompts, claim.new.prompt])
        return displaced

    def chance(self, request: ScheduledRequest, forecast: Forecast) -> float:
        """Return the chance that a request meets its end-to-end target, if it starts now."""
        return self._chances.of(request, forecast)

    def forget_stays(self) -> None:
        """Count the stays of all requests again, because one has started without a decision."""
        self._memory.forget()

    def longest_step_ns(self, now_ns: int) -> float:
        """Return the longest step for which a request that arrives in it can wait."""
        return self._offered.shortest_window_ns(now_ns) / 2

    def learn_late(self, late: Iterable[ScheduledRequest]) -> None:
        """Learn from requests that can no longer meet their targets, before they end.

        A late request may wait for long, and the next ones must not repeat the error.
        """
        for request in late:
            if request.counted_late:
                continue
            request.counted_late = True
            self._chances.learn(request, kept=False)
            if is_ensurable(request, self._model):
                targets, first_ns = request.targets, request.first_token_ns
                ttft_ns = first_ns - request.arrival_ns if first_ns else NEVER_NS
                in_time = targets.ttft_ns is not None and ttft_ns <= targets.ttft_ns
                self._learn(request, missed=targets.e2e_ns is not None or not in_time, slow=True)

    def calibrate(self, request: ScheduledRequest, ended_ns: int) -> None:
        """Learn from the targets that a request has met or missed at its end."""
        targets, arrival_ns = request.targets, request.arrival_ns
        if targets.e2e_ns is not None:
            self._chances.learn(request, kept=ended_ns - arrival_ns <= targets.e2e_ns)
        ensurable = is_ensurable(request, self._model)
        if request.counted_late and ensurable:
            return
        slow = targets.tpot_ns is not None and (
            ended_ns - request.first_token_ns > targets.tpot_ns * (request.output_tokens - 1)
        )
        missed = (
            targets.ttft_ns is not None and request.first_token_ns - arrival_ns > targets.ttft_ns
        )
        if targets.e2e_ns is not None and ended_ns - arrival_ns > targets.e2e_ns:
            # A buffer is no remedy for an output that may be too long even for an idle engine.
            missed = missed or ensurable
        self._learn(request, missed=missed, slow=slow)

    def _learn(self, request: ScheduledRequest, *, missed: bool, slow: bool) -> None:
        """Widen the buffers after a missed promise, narrow them after a kept one.

        Args:
            request: the request.
            missed: True if it missed its TTFT or E2E target. This moves the buffer of its class.
            slow: True if it missed its TPOT target. Steps are planned so that this target is met,
                so it shows only that the request did not keep its blocks.
        """
        targets, name = request.targets, request.slo_class
        if targets.ttft_ns is None and targets.e2e_ns is None:
            return
        self._memory.learn(request, missed=missed or slow)
        if name not in self._buffers_ns and len(self._buffers_ns) >= _MAX_CLASSES:
            return
        buffer_ns = self._buffers_ns.get(name, 0.0) + self._step_ns * (missed - _BUFFER_STEP)
        self._buffers_ns[name] = max(0.0, buffer_ns)

    def _claim(self, request: ScheduledRequest, forecast: Forecast) -> _Claim:
        """Predict what a new request uses of the device, of KV memory and of places."""
        view, model = self._view, self._model
        prompt, left = forecast.prompt(request), forecast.tokens_left(request)
        tokens, decodes = request.input_tokens, forecast.all_decodes
        half = max(1, view.limits.token_budget // 2)
        one_ns, two_ns = (model.step_ns(decodes.with_chunk(0, n * half)) for n in (1, 2))
        count, context = decodes.num_decodes, decodes.decode_context_tokens
        more = StepShape.of(
            decodes=count + SAMPLE_DECODES,
            decode_context_tokens=context + SAMPLE_DECODES * (tokens + left // 2),
        )
        decode_ns = max(0, model.step_ns(more) - model.step_ns(decodes)) / SAMPLE_DECODES
        stay = self._memory.stay(prompt, left, forecast)
        # Not at the pace beside prompts, which may be refused.
        length_ns = prompt.work_ns + left * forecast.token_ns
        work_ns = max(
            forecast.prompt_tokens(request) * (two_ns - one_ns) / half + left * decode_ns,
            length_ns * stay.blocks / view.total_blocks,
            length_ns / view.limits.max_num_seqs,
        )
        memory_work_ns = stay.length_ns * stay.blocks / view.total_blocks
        place_work_ns = stay.length_ns / view.limits.max_num_seqs
        self._chances.note(request, forecast)
        value = request.weight * self._chances.of(request, forecast)
        most = self._memory.tokens_left(request, forecast)
        return _Claim(
            new=NewStay(prompt, self._memory.stay(prompt, most, forecast), most),
            memory_work_ns=memory_work_ns,
            place_work_ns=place_work_ns,
            work_ns=work_ns,
            rank=OfferedWork.rank(request.priority, value, work_ns),
            memory_rank=OfferedWork.rank(request.priority, value, memory_work_ns),
            place_rank=OfferedWork.rank(request.priority, value, place_work_ns),
        )

    def _displaced(
        self, claim: _Claim, prompts: list[Prompt], forecast: Forecast
    ) -> list[ScheduledRequest] | None:
        """Return the waiting requests to reject for a new one; None if it cannot be in time."""
        late = self._made_late(claim, prompts, forecast)
        if late is not None:
            return late
        request = claim.new.prompt.request
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
        return gone + late

    def _made_late(
        self,
        claim: _Claim,
        prompts: list[Prompt],
        forecast: Forecast,
        *,
        without: Sequence[Prompt] = (),
    ) -> list[ScheduledRequest] | None:
        """Return the less important unstarted requests that become late; None for a refusal."""
        if not self._model.steps:
            # Nothing is known about the device. The first request measures a step.
            return [] if self._is_idle(prompts) else None
        if without:
            gone = {prompt.rid for prompt in without}
            prompts = [prompt for prompt in prompts if prompt.rid not in gone]
        late = self._late_on_device(claim, prompts, forecast)
        if late is None:
            return None
        new, begins_ns = claim.new, forecast.begins_ns
        latest_ns = max(0.0, new.stay.latest_ns - self._buffer_ns(new.prompt, begins_ns))
        suffices = self._memory.suffices(
            new._replace(stay=new.stay._replace(latest_ns=latest_ns)),
            prompts,
            forecast,
            whole=not without,
            memory=_better(self._offered_memory, claim.memory_rank, begins_ns),
            places=_better(self._offered_places, claim.place_rank, begins_ns),
            levels=self._offered_places.expected_above(_best(claim.place_rank), begins_ns),
        )
        if not suffices:
            return None
        late = list(dict.fromkeys([*late, *self._memory.displaces(claim.new, prompts, forecast)]))
        return [request for request in late if not request.admitted_tokens]

    def _late_on_device(
        self, claim: _Claim, prompts: list[Prompt], forecast: Forecast
    ) -> list[ScheduledRequest] | None:
        """Return the less important prompts that become late; None if the new one may not."""
        new, begins_ns = claim.new.prompt, forecast.begins_ns
        is_next = self._is_next(new, prompts, forecast)
        margin_ns = max(forecast.token_ns, _MARGIN * (new.due_ns - begins_ns))
        steps = prompt_steps(forecast, self._model, *self._memory.ends())
        walked = self._walked
        if walked is None or (walked.steps, walked.begins_ns) != (steps, begins_ns):
            walked = self._walked = WalkedPrompts(steps, begins_ns)
        return late_prompts(
            prompts,
            new,
            walked=walked,
            margin_ns=0.0 if is_next else margin_ns + self._buffer_ns(new, begins_ns),
            is_next=is_next,
            share=1 - self._offered.held_back(claim.rank, begins_ns),
            reorders=self._reorders,
        )

    def _is_next(self, new: Prompt, prompts: Iterable[Prompt], forecast: Forecast) -> bool:
        """Return True if the next step computes a new prompt and all that precede it, in time."""
        begins_ns = forecast.begins_ns
        if new.request.host_blocks or new.request.awaited_tokens:
            return False
        within_ns = min(forecast.within_ns, new.due_ns - begins_ns) * SAFETY
        within_ns = min(within_ns, forecast.longest_ns)
        tokens, started = forecast.prompt_tokens(new.request), 0
        if tokens > self._view.max_chunk_tokens:
            return False
        for prompt in prompts:
            started += bool(prompt.request.blocks)
            if new < prompt:
                continue
            if prompt.request.host_blocks:
                return False
            left = forecast.prompt_tokens(prompt.request)
            tokens += left
            if tokens > self._view.limits.token_budget or left > self._view.max_chunk_tokens:
                return False
            within_ns = min(within_ns, (prompt.due_ns - begins_ns) * SAFETY)
        # Prompts of the step in flight will decode.
        before = forecast.all_decodes
        decodes = max(before.num_decodes, self._view.num_running - started)
        context = before.decode_context_tokens * decodes // max(1, before.num_decodes)
        beside = StepShape.of(decodes=decodes, decode_context_tokens=context)
        step_ns = self._model.step_ns(beside.with_chunk(0, tokens)) * forecast.step_factor
        return tokens <= self._view.limits.token_budget - decodes and step_ns <= within_ns

    def _buffer_ns(self, new: Prompt, begins_ns: int) -> float:
        """Return the buffer of a prompt's class, at most half of the time until it is due."""
        buffer_ns = self._buffers_ns.get(new.request.slo_class, 0.0)
        return min(buffer_ns, (new.due_ns - begins_ns) / 2)

    def _may_change(
        self, claim: _Claim, prompts: list[Prompt], forecast: Forecast, contested: float
    ) -> bool:
        """Return True if a later decision on a refused request may differ.

        The device test predicts well. The test for memory depends on when outputs end.
        """
        if claim.new.window_ns(forecast.begins_ns) < 0:
            return False
        return not self._model.steps or (
            (contested <= _MOST_CONTESTED or self._may_pass(claim.new, forecast))
            and self._chances.of(claim.new.prompt.request, forecast) >= _LEAST_CHANCE
            and self._late_on_device(claim, prompts, forecast) is not None
        )

    def _may_pass(self, new: NewStay, forecast: Forecast) -> bool:
        """Return True if the overload may pass in the time of a new request.

        It is then younger than the time of the request from its arrival to its latest start. While
        the outputs of a class are little known, repeated tests would select their errors.
        """
        request, now_ns = new.prompt.request, forecast.begins_ns
        if forecast.num_learned(request) < _LEAST_LEARNED:
            return False
        accounts = (self._offered, self._offered_memory, self._offered_places)
        overloaded_ns = max(account.overloaded_ns(now_ns) for account in accounts)
        return overloaded_ns < now_ns + new.window_ns(now_ns) - request.arrival_ns

    def _is_hopeless(self, request: ScheduledRequest, forecast: Forecast) -> bool:
        if not self._model.steps:
            return False
        has_end = request.targets.e2e_ns is not None  # only then does the length matter
        return is_hopeless(
            request,
            self._model,
            token_budget=self._view.limits.token_budget,
            output_tokens=forecast.least_tokens(request) if has_end else 1,
        )

    def _is_idle(self, prompts: list[Prompt]) -> bool:
        return not (prompts or self._view.num_running or self._view.num_in_flight)


def _better(account: OfferedWork, rank: tuple[int, int], now_ns: int) -> Better:
    """Return what requests above a rank ask for."""
    return Better(account.held_back(rank, now_ns), account.expected_above(rank, now_ns))


def _best(rank: tuple[int, int]) -> tuple[int, int]:
    """Return the highest rank of a level."""
    return rank[0], _HIGHEST_BIN


def _preferred(rank: tuple[int, int]) -> tuple[int, int]:
    """Return the rank of a retry."""
    priority, density = rank
    return priority, density + _RETRY_BINS


def _is_displaceable(waiting: ScheduledRequest, new: ScheduledRequest) -> bool:
    """Return True if a waiting request has never started and is less important than a new one."""
    if waiting.admitted_tokens or waiting.state is not RequestState.WAITING:
        return False
    return (waiting.priority, waiting.weight) < (new.priority, new.weight)
