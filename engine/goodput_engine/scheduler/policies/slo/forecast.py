"""Due times, predicted work and lost targets of all requests before a step.

A forecast is made once per step. It is valid for every decision about that step, and for new
requests until the next one.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from goodput_core.spec.choices import Preemption
from goodput_core.steptime import StepShape, largest_prefill
from goodput_engine.scheduler.policies.slo.prompts import (
    Prompt,
    PromptOrder,
    best_order,
    exceeds_pace,
    is_ensurable,
    latest_starts,
)
from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from collections.abc import Container

    from goodput_core.slo.targets import Targets
    from goodput_core.steptime import StepTimeForm
    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.prediction import LengthPredictor
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["NEVER_NS", "SAFETY", "TRICKLE_TOKENS", "Forecast"]

NEVER_NS: Final = 1 << 62
"""The due time of a request without a target."""
TRICKLE_TOKENS: Final = 64
"""Prompt tokens that a step computes even without slack, so that prompts progress."""
SAFETY: Final = 0.95
"""Share of the slack that a step is planned to take, because predictions have errors."""
_LIKELY: Final = 0.9
"""An end-to-end target is planned for an output as long as this quantile."""
_SURE: Final = 0.99
"""This quantile takes its place if even the longest output would meet the target now."""
_UNLIKELY: Final = 0.05
"""An end-to-end target is lost if not even an output as short as this quantile would meet it."""
_LEAST_STEP: Final = 2
"""A step with prompts may take as long as this many steps without, so that prompts progress."""
_MOST_SLOWER: Final = 2.0
"""The decodes of a new request are planned to take at most this many times the time that they take
without prompts beside them. Prompts may take more, but need not: steps are cut for decodes."""
_LATE_WORK: Final = 1.07
"""Prompts take this much longer while late requests get a sixteenth of the steps' time."""
_FAVOUR: Final = 16
"""The favoured request gets a sixteenth of the token budget while others can be in time."""
_CAUGHT_UP: Final = 0.5
"""Share of the time that a request can regain until its end by which a pause may be longer."""
_QUANTILES: Final = 16
"""Quantiles are rounded to so many, because each one is computed once and kept."""


class Forecast:
    """The state before the next step.

    Args:
        view: the scheduler.
        model: predicts step times.
        predictor: predicts output lengths.
        begins_ns: start of the next step, after those in flight.
        step_factor: factor by which steps may take longer than predicted, at least 1.
        favoured: a late request that gets a share of each step; None for none.
        prompts_ns: mean time by which prompts make a step with decodes longer.
        longest_ns: longest step for which a request that arrives in it can wait.
        undecided: rids of waiting requests that are not admitted yet; they do not count.

    Attributes:
        favoured, step_factor: as above; longest_ns: as above, but long enough to compute prompts.
        token_ns: time of a step with all decodes and no prompts, at least that of one decode.
        pace_ns: mean time between two tokens of a running request, beside the prompts of others.
        step_ns: time of a step with the decodes in time and as many prompt tokens as their TPOT
            targets and `longest_ns` allow.
        prompt_ns: time per prompt token in such steps.
        all_decodes, kept_decodes: decodes of all running requests, and of those that can still
            meet their targets, with the favoured one.
        within_ns: time until the earliest due token of a running request.
        tightest_ns: shortest time between two tokens of a running request that its targets allow.
        lost: requests that cannot meet their targets any more, by rid.
        order: the order of the prompts.
        prompts: prompts that can be in time if they start now, in order.
        late: the other waiting requests, oldest first.
    """

    __slots__ = (
        "_chunk_ns",
        "_ensures",
        "_model",
        "_predictor",
        "_slower",
        "_starts_ns",
        "_starts_of",
        "_view",
        "all_decodes",
        "begins_ns",
        "favoured",
        "kept_decodes",
        "late",
        "longest_ns",
        "lost",
        "order",
        "pace_ns",
        "prompt_ns",
        "prompts",
        "step_factor",
        "step_ns",
        "tightest_ns",
        "token_ns",
        "within_ns",
    )

    def __init__(
        self,
        view: SchedulerView,
        *,
        model: StepTimeForm,
        predictor: LengthPredictor,
        begins_ns: int,
        step_factor: float = 1.0,
        favoured: ScheduledRequest | None = None,
        prompts_ns: float = 0.0,
        longest_ns: float = NEVER_NS,
        undecided: Container[int] = (),
    ) -> None:
        self._view = view
        self._predictor = predictor
        self._model = model
        self.step_factor = step_factor
        self._ensures: bool | None = None
        self.favoured = favoured
        self.begins_ns = begins_ns
        self.lost: dict[int, ScheduledRequest] = {}
        self.within_ns = self.tightest_ns = NEVER_NS
        self._look_at_running(view, model)
        self.pace_ns = self.token_ns + prompts_ns
        is_busy = self.all_decodes.num_decodes > 0
        self._slower = min(self.pace_ns / self.token_ns, _MOST_SLOWER) if is_busy else 1.0
        beside, favoured_tokens = self.beside_favoured(self.kept_decodes)
        most = max(1, view.limits.token_budget - self.all_decodes.num_decodes - favoured_tokens)
        self.longest_ns = max(longest_ns, _LEAST_STEP * self.token_ns)
        target_ns = int(min(self.tightest_ns * SAFETY, self.longest_ns))
        tokens = largest_prefill(model, beside=beside, target_ns=target_ns, most_tokens=most)
        tokens = max(TRICKLE_TOKENS, tokens)
        self.step_ns = model.step_ns(beside.with_chunk(0, tokens)) * step_factor
        self.prompt_ns = self.step_ns / tokens
        # Another chunk in the same step delays one whose size is limited.
        self._chunk_ns = model.step_ns(beside.with_chunk(0, min(most, 2 * view.max_chunk_tokens)))
        if self.lost or favoured is not None:
            self.prompt_ns *= _LATE_WORK
        self.order = PromptOrder()
        self.prompts: list[Prompt] = []
        self._starts_of: list[Prompt] | None = None
        self._starts_ns: dict[int, float] = {}
        self.late: list[ScheduledRequest] = []
        self._look_at_prompts(view, undecided)

    @property
    def favoured_share(self) -> int:
        """Prompt tokens of the favoured request in a step, while others can be in time."""
        return max(TRICKLE_TOKENS, self._view.limits.token_budget // _FAVOUR)

    def beside_favoured(self, decodes: StepShape) -> tuple[StepShape, int]:
        """Return a step with the favoured request's share of a prompt, and the tokens of it."""
        favoured = self.favoured
        if favoured is None or favoured.state is not RequestState.PREFILLING:
            return decodes, 0
        tokens = min(self.prompt_tokens(favoured), self.favoured_share)
        return decodes.with_chunk(favoured.base_computed, tokens), tokens

    # --- of one request ----------------------------------------------------------------------
    def tokens_left(self, request: ScheduledRequest) -> int:
        """Return the mean number of output tokens that a request still has, at least 1."""
        return self._predictor.output_tokens(request) - request.sampled_tokens

    def least_tokens(self, request: ScheduledRequest) -> int:
        """Return the tokens of a short output."""
        return self._predictor.quantile(request, _UNLIKELY)

    def ends(self) -> list[tuple[int, int, ScheduledRequest]]:
        """Return the kept running requests in the order of their ends.

        Each comes after the tokens until its end and their mean. The i-th of n ends is the quantile
        i / (n + 1) of this request's length. At the means, many requests of unknown length would
        end together and late, but the first of them ends early.
        """
        lost, favoured, predictor = self.lost, self.favoured, self._predictor
        kept = [
            (predictor.output_tokens(request) - sampled, request.rid, sampled, request)
            for request in self._view.running()
            if request.rid not in lost or request is favoured
            for sampled in (request.sampled_tokens,)
        ]
        kept.sort()
        ends: list[tuple[int, int, ScheduledRequest]] = []
        for number, (mean, _, sampled, request) in enumerate(kept, start=1):
            left = mean
            if sampled:
                # Neither 0 nor 1: the longest possible output is no prediction.
                part = round(_QUANTILES * number / (len(kept) + 1))
                share = min(max(1, part), _QUANTILES - 1) / _QUANTILES
                left = max(1, predictor.quantile(request, share) - sampled)
            ends.append((left, mean, request))
        ends.sort(key=lambda end: (end[0], end[2].rid))
        return ends

    def num_learned(self, request: ScheduledRequest) -> float:
        """Return the number of outputs of a request's class that were seen."""
        return self._predictor.num_learned(request)

    def ensures(self, request: ScheduledRequest) -> bool:
        """Return True if the end-to-end target of a request can be ensured."""
        return is_ensurable(request, self._model)

    def chance_within(self, request: ScheduledRequest, tokens: int) -> float:
        """Return the chance that an output has at most so many tokens."""
        return self._predictor.chance_within(request, tokens)

    def tokens_in_time(self, request: ScheduledRequest) -> int | None:
        """Return the output tokens for which the end-to-end target leaves time, started now.

        None if there is no such target.
        """
        e2e_ns = request.targets.e2e_ns
        if e2e_ns is None:
            return None
        left_ns = request.arrival_ns + e2e_ns - self.begins_ns - self.work_ns(request)
        return int(left_ns / self.token_ns) + 1

    def prompt_tokens(self, request: ScheduledRequest) -> int:
        """Return the prompt tokens that are still to be computed; those of a copy included."""
        tokens = request.input_tokens + request.base_sampled - request.base_computed
        return tokens if request.admitted_tokens else tokens - request.expected_hits

    def work_ns(self, request: ScheduledRequest) -> float:
        """Return the time until the next token of a prompt without any wait."""
        return self.times_ns(request)[0]

    def times_ns(self, request: ScheduledRequest) -> tuple[float, float]:
        """Return the time of a prompt without others, and that by which it delays others.

        Without others, each chunk takes at least a step.
        """
        tokens, view = self.prompt_tokens(request), self._view
        share_ns = tokens * self.prompt_ns
        if request.host_blocks:
            share_ns = max(share_ns, view.copy_ns(len(request.host_blocks)))
            return share_ns, share_ns
        chunks = -(-tokens // view.max_chunk_tokens)
        return max(share_ns, self.token_ns if chunks <= 1 else chunks * self._chunk_ns), share_ns

    def resume_ns(self, request: ScheduledRequest) -> float:
        """Return the time from the eviction of a running request to its next token.

        It is the time of its recomputation, or of the copies to host memory and back, which end
        with a step.
        """
        view = self._view
        computed_ns = max(request.own_tokens * self.prompt_ns, 2 * self.token_ns)
        if view.preemption is Preemption.RECOMPUTE:
            return computed_ns
        blocks = len(request.blocks) or -(-request.total_tokens // view.block_size)
        copied_ns = 2 * max(self.token_ns, view.copy_ns(blocks))
        return copied_ns if view.preemption is Preemption.SWAP else min(computed_ns, copied_ns)

    def prompt(self, request: ScheduledRequest) -> Prompt:
        """Return the prompt of a waiting or started request, with the due time of its token."""
        work_ns, share_ns = self.times_ns(request)
        targets, sampled = request.targets, request.base_sampled
        due_ns = NEVER_NS
        if not sampled and targets.ttft_ns is not None:
            due_ns = request.arrival_ns + targets.ttft_ns
        elif sampled and targets.tpot_ns is not None:
            due_ns = request.first_token_ns + self._pacing_ns(request, sampled)
        if targets.e2e_ns is not None:
            end_ns = request.arrival_ns + targets.e2e_ns
            rest_ns = self._rest_ns(request, self._likely(request))
            # A long output would miss the target. If a short one would not, try at once.
            soon_ns = min(
                end_ns - int(self._rest_ns(request, _UNLIKELY)),
                int(self.begins_ns + work_ns + 2 * self.step_ns),
            )
            last_ns = min(due_ns, max(end_ns - int(rest_ns), soon_ns))
            slower = 1.0 if sampled else self._slower
            due_ns = min(due_ns, max(end_ns - int(rest_ns * slower), soon_ns))
        else:
            last_ns = due_ns
        level = self.order.level(request, due_ns)
        return Prompt(level, due_ns, request.rid, work_ns, share_ns, last_ns, request)

    def latest_start_ns(self, prompt: Prompt) -> float:
        """Return the time at which a prompt must start, so that it and those behind are in time."""
        if self._starts_of is not self.prompts:
            self._starts_of, self._starts_ns = self.prompts, latest_starts(self.prompts)
        return self._starts_ns.get(prompt.rid, prompt.due_ns - prompt.work_ns)

    def slack_ns(self, request: ScheduledRequest) -> float:
        """Return the time for which a running request may pause and still meet its targets."""
        targets, slack_ns = request.targets, self.paced_ns(request)
        if targets.e2e_ns is not None:
            left_ns = request.arrival_ns + targets.e2e_ns - self.begins_ns
            rest_ns = self.token_ns + self._rest_ns(request, self._likely(request))
            slack_ns = min(slack_ns, left_ns - max(self.token_ns, rest_ns))
        return slack_ns

    def paced_ns(self, request: ScheduledRequest) -> float:
        """Return the slack of a running request by its targets for TTFT and TPOT."""
        targets, sampled, begins_ns = request.targets, request.sampled_tokens, self.begins_ns
        if not sampled and targets.ttft_ns is not None:
            return request.arrival_ns + targets.ttft_ns - begins_ns
        if sampled and targets.tpot_ns is not None:
            due_ns = (request.first_token_ns or begins_ns) + self._pacing_ns(request, sampled)
            return due_ns - begins_ns - self.token_ns
        return NEVER_NS

    def _pacing_ns(self, request: ScheduledRequest, sampled: int) -> int:
        """Return the time from the first token by which a paused request must have its next one."""
        tpot_ns = request.targets.tpot_ns or 0
        # It may catch up until its end, which may come soon, beside the prompts of others.
        tokens = self._predictor.quantile(request, _UNLIKELY) - sampled
        regained_ns = _CAUGHT_UP * tokens * (tpot_ns - self.pace_ns)
        return sampled * tpot_ns + max(0, int(regained_ns))

    def _likely(self, request: ScheduledRequest) -> float:
        """Return the quantile of the length for which an end-to-end target is planned."""
        e2e_ns = request.targets.e2e_ns
        is_sure = e2e_ns is not None and request.output_limit * self.token_ns <= e2e_ns
        return _SURE if is_sure else _LIKELY

    def _rest_ns(self, request: ScheduledRequest, share: float) -> float:
        """Return the time from the next token of a request to its end, by a quantile."""
        tokens = self._predictor.quantile(request, share) - request.sampled_tokens
        return (tokens - 1) * self.token_ns

    def _has_missed(self, request: ScheduledRequest, sampled: int) -> bool:
        """Return True if a TTFT target has passed, or one between tokens cannot be reached."""
        targets, first_ns, begins_ns = request.targets, request.first_token_ns, self.begins_ns
        ttft_ns, tpot_ns = targets.ttft_ns, targets.tpot_ns
        if targets.tbt_p99_ns is not None and exceeds_pace(request, self._model):
            return True
        if ttft_ns is not None and (first_ns or begins_ns) - request.arrival_ns > ttft_ns:
            return bool(first_ns) or not sampled
        if not first_ns or tpot_ns is None:
            return False
        behind_ns = begins_ns - first_ns - sampled * tpot_ns
        return behind_ns > 0 and behind_ns > self.tokens_left(request) * (tpot_ns - self.token_ns)

    def breaks_pace(self, request: ScheduledRequest) -> bool:
        """Return True if the decodes of one more request break the tightest TPOT target."""
        tpot_ns = request.targets.tpot_ns
        tightest_ns = min(self.tightest_ns, NEVER_NS if tpot_ns is None else tpot_ns)
        if tightest_ns == NEVER_NS:
            return False
        kept = self.kept_decodes
        # All running requests will decode, except late ones.
        decodes = kept.num_decodes + self._view.num_running - self.all_decodes.num_decodes
        context = kept.decode_context_tokens
        now_ns, then_ns = (
            self._model.step_ns(StepShape.of(decodes=n, decode_context_tokens=c))
            for n, c in ((decodes, context), (decodes + 1, context + request.total_tokens))
        )
        # A target that is missed without this request as well is no reason to delay it.
        return now_ns <= tightest_ns * SAFETY < then_ns

    @property
    def ensures_targets(self) -> bool:
        """True if the targets of a running request or of a prompt in time can be ensured."""
        if self._ensures is None:
            others = chain(self._view.running(), (prompt.request for prompt in self.prompts))
            self._ensures = any(map(self.ensures, others))
        return self._ensures

    # --- of all ------------------------------------------------------------------------------
    def _look_at_running(self, view: SchedulerView, model: StepTimeForm) -> None:
        """Find the running requests that are lost, and the due times of the others."""
        # Every step with prompts visits all running requests: few calls, few attributes.
        begins_ns, within_ns, tightest_ns = self.begins_ns, NEVER_NS, NEVER_NS
        decodes = context = 0
        others: list[tuple[ScheduledRequest, int, bool, int]] = []
        for request in view.running():
            sampled, computed = request.base_sampled, request.base_computed
            batch = request.batch
            if batch is not None:
                since = batch.epoch - request.joined_epoch
                sampled += since
                computed += since
            decoding = sampled > 0 and request.input_tokens + sampled - computed == 1
            if decoding:
                decodes += 1
                context += computed + 1
                targets, first_ns = request.targets, request.first_token_ns
                tpot_ns, ttft_ns = targets.tpot_ns, targets.ttft_ns
                if (
                    first_ns
                    and tpot_ns is not None
                    and targets.e2e_ns is None
                    and targets.tbt_p99_ns is None
                    and (ttft_ns is None or first_ns - request.arrival_ns <= ttft_ns)
                ):
                    left_ns = first_ns + sampled * tpot_ns - begins_ns
                    if left_ns >= 0:
                        if left_ns < within_ns:
                            within_ns = min(within_ns, max(left_ns, tpot_ns // 2))
                        tightest_ns = min(tightest_ns, tpot_ns)
                        continue
            others.append((request, sampled, decoding, computed))
        self.all_decodes = StepShape.of(decodes=decodes, decode_context_tokens=context)
        self.token_ns = model.step_ns(
            self.all_decodes if decodes else StepShape.of(decodes=1, decode_context_tokens=1)
        )
        for request, sampled, decoding, computed in others:
            if self._is_lost(request, sampled):
                self.lost[request.rid] = request
                if decoding and request is not self.favoured:
                    decodes -= 1
                    context -= computed + 1
            elif decoding:
                step_ns, gap_ns = self._limits(request.targets, request, sampled)
                within_ns, tightest_ns = min(within_ns, step_ns), min(tightest_ns, gap_ns)
        self.kept_decodes = StepShape.of(decodes=decodes, decode_context_tokens=context)
        self.within_ns, self.tightest_ns = within_ns, tightest_ns

    def _is_lost(self, request: ScheduledRequest, sampled: int) -> bool:
        """Return True if a running request cannot meet its targets any more."""
        e2e_ns = request.targets.e2e_ns
        if e2e_ns is not None:
            left_ns = request.arrival_ns + e2e_ns - self.begins_ns
            tokens = max(1, self._predictor.quantile(request, _UNLIKELY) - sampled)
            if left_ns < tokens * self.token_ns:
                return True
        return self._has_missed(request, sampled)

    def _limits(self, targets: Targets, request: ScheduledRequest, sampled: int) -> tuple[int, int]:
        """Return the longest next step and the longest mean step of a decoding request."""
        step_ns = gap_ns = NEVER_NS
        if targets.tpot_ns is not None:
            due_ns = (request.first_token_ns or self.begins_ns) + sampled * targets.tpot_ns
            left_ns = due_ns - self.begins_ns
            if left_ns >= 0:
                step_ns, gap_ns = max(left_ns, targets.tpot_ns // 2), targets.tpot_ns
            else:
                # A request that is behind catches up until its end, not at once.
                tokens = max(1, self._predictor.quantile(request, _UNLIKELY) - sampled)
                pace_ns = targets.tpot_ns + left_ns // tokens
                step_ns = gap_ns = max(targets.tpot_ns // 2, pace_ns)
        if targets.e2e_ns is not None:
            left_ns = request.arrival_ns + targets.e2e_ns - self.begins_ns
            tokens = max(1, self._predictor.quantile(request, self._likely(request)) - sampled)
            pace_ns = max(left_ns // tokens, int(self.token_ns * 1.1))
            step_ns, gap_ns = min(step_ns, pace_ns), min(gap_ns, pace_ns)
        if targets.tbt_p99_ns is not None:
            step_ns, gap_ns = min(step_ns, targets.tbt_p99_ns), min(gap_ns, targets.tbt_p99_ns)
        return step_ns, gap_ns

    def order_with(self, new: ScheduledRequest | None) -> None:
        """Order the prompts, as they must be if a new request is added; None for none."""
        priority = self.prompts[0].request.priority if self.prompts else 0
        others = chain((prompt.request for prompt in self.prompts), (new,) if new else ())
        if self.order.by_level and all(other.priority == priority for other in others):
            return
        prompts = [*self.prompts, self.prompt(new)] if new else self.prompts
        self.order = best_order(
            prompts, self._view, begins_ns=self.begins_ns, token_ns=self.token_ns
        )
        self.prompts = sorted(map(self.order.placed, self.prompts))

    def _look_at_prompts(self, view: SchedulerView, undecided: Container[int]) -> None:
        """Order the prompts that can be in time, and find the late ones."""
        begins_ns, prompts, late, favoured = self.begins_ns, self.prompts, self.late, self.favoured
        for request in view.prefilling():
            if request is favoured or request.rid in self.lost:
                continue
            prompt = self.prompt(request)
            if begins_ns + prompt.work_ns > prompt.last_ns:
                self.lost[request.rid] = request
            else:
                prompts.append(prompt)
        for request in view.waiting:
            if request.rid in undecided:
                continue
            prompt = self.prompt(request)
            if (
                request is favoured
                or self._has_missed(request, request.base_sampled)
                or begins_ns + prompt.work_ns > prompt.last_ns
            ):
                self.lost[request.rid] = request
                late.append(request)
            else:
                prompts.append(prompt)
        prompts.sort()
        self.order_with(None)
        late.sort(key=lambda request: (request.arrival_ns, request.rid))
