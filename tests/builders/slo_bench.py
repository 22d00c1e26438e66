"""A scheduler with the policy `slo` on a device whose step times it knows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import LateRequests, Preemption
from goodput_core.steptime import RooflineForm, StepShape
from goodput_core.units import NS_PER_MS
from goodput_engine.kv.blocks import BlockPool, HostPool
from goodput_engine.scheduler.plan import StepPlan, StepResult
from goodput_engine.scheduler.policies.slo.policy import SloPolicy
from goodput_engine.scheduler.policy import SchedulerLimits
from goodput_engine.scheduler.prediction import PredictionError
from goodput_engine.scheduler.request_table import ScheduledRequest
from goodput_engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_engine.scheduler.admission import Rejection

__all__ = ["STEP_TIME", "ExactModel", "FixedLengths", "SloBench"]

# A step takes 5 ms, or 0.05 ms per token: it bends at 100 tokens.
STEP_TIME = RooflineForm(
    c0_ns=5_000_000, c1_ns_per_token=50_000, c2_ns_per_context_token=0, c4_ns_per_request=0
)


class ExactModel:
    """Knows the device."""

    error = 0.0
    steps = 1

    def __init__(self, form: RooflineForm = STEP_TIME) -> None:
        self.step_ns = form.step_ns
        self.chunk_within = form.chunk_within

    def observe(self, shape: StepShape, step_ns: int) -> None:
        pass


class FixedLengths:
    """Every answer is expected to have as many more tokens."""

    revision = 0
    error = PredictionError()

    def __init__(self, left: int, learned: float = math.inf) -> None:
        self._left = left
        self._learned = learned

    def output_tokens(self, request: ScheduledRequest) -> int:
        return request.sampled_tokens + self._left

    def quantile(self, request: ScheduledRequest, share: float) -> int:
        return self.output_tokens(request)

    def chance_within(self, request: ScheduledRequest, tokens: int) -> float:
        return float(self.output_tokens(request) <= tokens)

    def num_learned(self, request: ScheduledRequest) -> float:
        return self._learned

    def expect(self, request: ScheduledRequest, tokens: int) -> None:
        pass

    def learn(self, request: ScheduledRequest, running: Iterable[ScheduledRequest]) -> None:
        pass

    def censor(self, request: ScheduledRequest) -> None:
        pass


class SloBench:
    """A scheduler on the device above, stepped in its time."""

    def __init__(
        self,
        *,
        blocks: int = 1000,
        seqs: int = 64,
        budget: int = 2000,
        depth: int = 0,
        left: int = 20,
        ns_per_copied_block: int | None = None,
        late_requests: LateRequests = LateRequests.FINISH,
        preemption: Preemption = Preemption.HYBRID,
        step_time: RooflineForm = STEP_TIME,
        chunk: int | None = None,
    ) -> None:
        self._step_time = step_time
        self.now_ns = 0
        self.refusals: list[Rejection | None] = []
        self.removed: dict[int, int] = {}
        """Times at which waiting requests were rejected before a step, by rid."""
        self.policy = SloPolicy(model=ExactModel(step_time), predictor=FixedLengths(left))
        self.scheduler = Scheduler(
            policy=self.policy,
            kv=BlockPool(total_blocks=blocks, block_size=16),
            limits=SchedulerLimits(token_budget=budget, max_num_seqs=seqs, max_waiting=1000),
            max_model_tokens=100_000,
            depth=depth,
            host=HostPool(
                total_blocks=0 if ns_per_copied_block is None else 100,
                ns_per_block=ns_per_copied_block or 1,
            ),
            preemption=preemption,
            late_requests=late_requests,
            prefill_chunk_tokens=chunk,
        )

    def add(
        self,
        rid: int,
        tokens: int,
        *,
        outputs: int = 1000,
        ttft_ms: int | None = None,
        tpot_ms: int | None = None,
        tbt_ms: int | None = None,
        e2e_ms: int | None = None,
        priority: int = 0,
        weight: int = 1,
        slo_class: str = "",
        block_hashes: Sequence[int] = (),
    ) -> ScheduledRequest:
        request = ScheduledRequest(
            rid=rid,
            arrival_ns=self.now_ns,
            input_tokens=tokens,
            block_hashes=block_hashes,
            max_output_tokens=outputs,
            priority=priority,
            weight=weight,
            slo_class=slo_class,
            targets=Targets(
                ttft_ns=None if ttft_ms is None else ttft_ms * NS_PER_MS,
                tpot_ns=None if tpot_ms is None else tpot_ms * NS_PER_MS,
                tbt_p99_ns=None if tbt_ms is None else tbt_ms * NS_PER_MS,
                e2e_ns=None if e2e_ms is None else e2e_ms * NS_PER_MS,
            ),
        )
        self.refusals.append(self.scheduler.add(request, self.now_ns))
        return request

    def is_admitted(self, rid: int) -> bool:
        """Return True if the request added last was neither refused nor waits for a decision."""
        return self.refusals[-1] is None and rid not in self.policy._undecided.by_rid

    def step(self, *, stops: Sequence[int] = (), slower: float = 1.0) -> StepPlan:
        """Compute a step that takes a multiple of its time; the requests of `stops` end with it."""
        plan = self.scheduler.plan(self.now_ns)
        for removal in self.scheduler.admission.take_removed():
            self.removed[removal.request.rid] = self.now_ns
        assert plan is not None
        step_ns = round(self._step_time.step_ns(plan.shape) * slower)
        self.now_ns += step_ns
        result = StepResult(
            plan_id=plan.plan_id,
            at_ns=self.now_ns,
            step_ns=step_ns,
            stopped=dict.fromkeys(stops, "stop"),
        )
        self.scheduler.commit(plan, result, self.now_ns)
        self.scheduler.check_integrity()
        return plan

    def pass_time(self, ms: int) -> None:
        self.now_ns += ms * NS_PER_MS
