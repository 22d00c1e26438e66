"""The one scheduler: every policy runs on it, in real and in virtual time.

One notion only: a request's computed tokens catch up with its total. `plan` decides the next
step, `commit` takes in what a step gave; between them up to `depth` further plans may wait, so
that a device never waits for the host. Tokens in flight count as computed. What follows:

- a request that stops by itself may still be in later plans: their surplus is discarded;
- blocks are let go when the last plan that uses them commits, never earlier;
- a cancellation frees what it holds within depth + 1 commits.

Cost: members of the cohort (see `cohort`) are not visited, so a step in which everybody just
decodes costs the same for ten requests as for a thousand, but for the list of who advanced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.errors import InternalError
from goodput_core.spec.choices import Preemption
from goodput_engine.kv.host import HostPool
from goodput_engine.scheduler.door import Door
from goodput_engine.scheduler.floor import Floor
from goodput_engine.scheduler.fold import Folder
from goodput_engine.scheduler.handover import HandOver
from goodput_engine.scheduler.plan import Progress, StepOutcome
from goodput_engine.scheduler.planner import Planner
from goodput_engine.scheduler.pressure import host_is_full
from goodput_engine.scheduler.request import RequestState
from goodput_engine.scheduler.stats import SchedulerStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from goodput_engine.kv.blocks import BlockPool
    from goodput_engine.scheduler.door import Refusal
    from goodput_engine.scheduler.fold import SteadyDecoding
    from goodput_engine.scheduler.pacing import Pacer
    from goodput_engine.scheduler.plan import StepPlan, StepResult
    from goodput_engine.scheduler.policy import SchedulerLimits, SchedulingPolicy
    from goodput_engine.scheduler.prediction import PredictionError
    from goodput_engine.scheduler.queue import WaitingQueue
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["Scheduler"]

_WAITING = RequestState.WAITING
_FINISHING = RequestState.FINISHING
_PREEMPTING = RequestState.PREEMPTING
_LEAVING = RequestState.LEAVING
_RETURNING = RequestState.RETURNING
_DEPARTING = RequestState.DEPARTING
_KEPT = RequestState.KEPT
_FINISHED = RequestState.FINISHED
_CANCELLED = RequestState.CANCELLED
_RELEASED_LATER = (_FINISHING, _PREEMPTING, _DEPARTING)
"""Some record's releases hold it already."""


class Scheduler:
    """Requests in, plans out.

    Args:
        policy: its preferences; belongs to this scheduler from now on.
        kv: the pool of blocks; belongs to this scheduler from now on.
        host: the pool of their copies in host memory, likewise; None: there is none.
        preemption: what becomes of the blocks of preempted requests.
        limits: the bounds to start with.
        max_model_tokens: prompt and answer together.
        depth: plans that may wait uncommitted beside the one that runs, 0 to 2.
        pacer: sizes the prompts' share of each step; None: the token budget alone does.
    """

    def __init__(
        self,
        *,
        policy: SchedulingPolicy,
        kv: BlockPool,
        limits: SchedulerLimits,
        max_model_tokens: int,
        depth: int = 0,
        host: HostPool | None = None,
        preemption: Preemption = Preemption.RECOMPUTE,
        pacer: Pacer | None = None,
    ) -> None:
        assert 0 <= depth <= 2, depth
        self.now_ns = 0
        self.limits = limits
        self.depth = depth
        self.stats = SchedulerStats()
        self.input_open = True
        self.preemption = preemption
        self.waiting: WaitingQueue = policy.new_queue()
        self.policy = policy
        self.pacer = pacer
        self._kv = kv
        self._door = Door(
            max_total_tokens=min(max_model_tokens, kv.total_blocks * kv.block_size + 1)
        )
        self._host = HostPool(total_blocks=0, ns_per_block=1) if host is None else host
        self._floor = Floor(kv, self._host, self.waiting)
        self._planner = Planner(
            policy=policy,
            floor=self._floor,
            door=self._door,
            stats=self.stats,
            view=self,
            depth=depth,
            pacer=pacer,
        )
        self.handover = HandOver(policy=policy, floor=self._floor, door=self._door, view=self)
        self._folder = Folder(
            policy=policy,
            floor=self._floor,
            planner=self._planner,
            stats=self.stats,
            view=self,
            depth=depth,
        )

    # --- what policies and the engine core may look at -------------------------------------
    @property
    def num_running(self) -> int:
        """Admitted requests whose last token is not in flight."""
        return self._floor.num_running

    @property
    def num_decoding(self) -> int:
        """Members of the cohort."""
        return len(self._floor.cohort.members)

    @property
    def decode_context_tokens(self) -> int:
        """Computed tokens of all members of the cohort."""
        return self._floor.cohort.total_context

    @property
    def num_prefilling(self) -> int:
        """Admitted requests that are more than one step from their next token."""
        return len(self._floor.prefilling)

    @property
    def num_requests(self) -> int:
        """Requests that wait, run, or hold blocks until a step commits."""
        return len(self._floor.requests)

    @property
    def num_in_flight(self) -> int:
        """Plans that have not been committed."""
        return len(self._floor.in_flight)

    @property
    def has_work(self) -> bool:
        """Whether any request is not gone for good."""
        return bool(self._floor.requests)

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be handed out at once."""
        return self._kv.free_blocks

    @property
    def cached_blocks(self) -> int:
        """Free KV blocks that hold a reusable prefix."""
        return self._kv.cached_blocks

    @property
    def total_blocks(self) -> int:
        """KV blocks there are."""
        return self._kv.total_blocks

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self._kv.block_size

    @property
    def host_blocks(self) -> tuple[int, int]:
        """Blocks of host memory that are free, and all of them."""
        return self._host.free_blocks, self._host.total_blocks

    def promised_blocks(self) -> int:
        """KV blocks that are in use and will be free without anybody else being evicted."""
        return self._floor.promised_blocks()

    @property
    def max_total_tokens(self) -> int:
        """The longest prompt and answer together that may be asked for."""
        return self._door.max_total_tokens

    def plans_in_flight(self) -> Iterator[StepPlan]:
        """Those that have not been committed, oldest first."""
        return (record.plan for record in self._floor.in_flight)

    def running(self) -> Iterator[ScheduledRequest]:
        """Every running request: decoding, ready to decode, prefilling."""
        return self._floor.running()

    def prefilling(self) -> Iterable[ScheduledRequest]:
        """Running requests that are more than one step from their next token."""
        return self._floor.prefilling.values()

    @property
    def prediction_error(self) -> PredictionError | None:
        """How wrong the policy's predictions of answers' lengths were; None: it makes none."""
        return self.policy.prediction_error

    # --- requests --------------------------------------------------------------------------
    def add(self, request: ScheduledRequest, now_ns: int) -> Refusal | None:
        """A new request waits from now on, unless it is refused."""
        assert request.rid not in self._floor.requests, request.rid
        self.now_ns = now_ns
        needed = self._kv.blocks_for(request.input_tokens)
        # Who starts with the next plan does not count as waiting.
        starting = 0
        blocks = self.free_blocks - self._floor.waiting_blocks
        if self._floor.requests:
            blocks -= self.policy.headroom_blocks(self)
        if needed <= blocks:
            starting = max(0, self.limits.max_num_seqs - self.num_running)
        refusal = self._door.check(
            request,
            waiting=len(self.waiting) + 1 - starting,
            max_waiting=self.limits.max_waiting,
            now_ns=now_ns,
        )
        if refusal is None:
            request.output_limit = self._door.output_limit(request)
            refusal = self.policy.refuse(request, self)
        if refusal is None and needed > blocks and self._host_is_full(request):
            refusal = self._door.memory_full(len(self.waiting) + 1, now_ns)
        if refusal is not None:
            self.stats.shed += refusal.overload
            return refusal
        self._floor.enter(request)
        return None

    def _host_is_full(self, request: ScheduledRequest) -> bool:
        """Whether a request would wait for memory although too many do already."""
        free, total = self.host_blocks
        used = self.total_blocks - self.free_blocks
        full = host_is_full(
            free_blocks=free,
            total_blocks=total,
            typical_blocks=used // max(1, self.num_running),
        )
        return full and not any(self.policy.displaced_by(request, self))

    def cancel(self, rid: int) -> bool:
        """Nobody wants this request any more; unknown and finished ones are no error.

        Returns:
            Whether it is gone at once; else a later outcome's `released` names it, or none does
            because it was gone before.
        """
        request = self._floor.requests.get(rid)
        if request is None:
            return False
        state = request.state
        if state is _FINISHED or state is _CANCELLED:
            return False
        gone = False
        if state is _WAITING:
            self._floor.leave_queue(request)
            self._floor.free(request)
            gone = True
        elif state not in _RELEASED_LATER:
            # Else the commit that would have moved it on lets it go.
            self._floor.withdraw(request)
            gone = self._floor.let_go(request)
        request.state = _CANCELLED
        return gone

    def end_input(self) -> None:
        """No request will come any more: whoever waits for company starts with the next plan."""
        self.input_open = False
        self._floor.settled = False

    def set_limits(self, limits: SchedulerLimits) -> None:
        """New bounds, in force from the next plan on."""
        self.limits = limits
        self._floor.settled = False

    def pace(self, pacer: Pacer | None) -> None:
        """What sizes the prompts' share of each step, from the next plan on."""
        self.pacer = self._planner.pacer = pacer
        self._floor.settled = False

    # --- steps -----------------------------------------------------------------------------
    def plan(self, now_ns: int) -> StepPlan | None:
        """Decide the next step; None: nothing to compute, or enough plans wait already."""
        if len(self._floor.in_flight) > self.depth:
            return None
        self.now_ns = now_ns
        return self._planner.plan()

    def wake_ns(self) -> int | None:
        """When to plan again although nothing is in flight and nothing came; None: never."""
        if self._floor.in_flight or not len(self.waiting):
            return None
        wake_ns = self.policy.wake_ns(self)
        return wake_ns if wake_ns is not None and wake_ns > self.now_ns else None

    def commit(self, plan: StepPlan, result: StepResult, now_ns: int) -> StepOutcome:
        """Take in what the oldest plan in flight gave.

        Raises:
            InternalError: plans come back in another order than they were made.
        """
        floor = self._floor
        record = floor.in_flight.popleft()
        if record.plan is not plan or result.plan_id != plan.plan_id:
            raise InternalError(
                f"plan {record.plan.plan_id} is the oldest in flight, not {result.plan_id}"
            )
        self.now_ns = now_ns
        cohort, epoch, stopped = floor.cohort, plan.decode_epoch, result.stopped
        if epoch:
            cohort.committed_epoch = epoch
        progress: list[Progress] = []
        released: list[int] = []
        for chunk, request in zip(plan.chunks, record.requests, strict=True):
            floor.publish(request, chunk.start + chunk.num_tokens)
            if chunk.samples:
                self._gain(request, stopped.get(chunk.rid), progress, released)
        for request in record.leavers:
            self._gain(request, stopped.get(request.rid), progress, released)
        for rid, reason in stopped.items():
            member = cohort.members.get(rid)
            if member is not None and member.joined_epoch < epoch:
                self._finish(member, released)
                progress.append(Progress(request=member, finish_reason=reason))
        for request in record.releases:
            if request.state is _PREEMPTING:
                floor.vacate(request)
            elif request.keeps_blocks and request.state in (_FINISHED, _DEPARTING):
                request.state = _KEPT
            else:
                floor.free(request)
                released.append(request.rid)
        for request in record.copied:
            if request.state is _LEAVING or request.state is _RETURNING:
                floor.copied(request)
        outcome = StepOutcome(
            plan=plan,
            result=result,
            advanced=cohort.decoded_in(epoch) if epoch else [],
            progress=progress,
            released=released,
        )
        if plan.shape.num_tokens:
            self._learn(outcome)
        return outcome

    def _learn(self, outcome: StepOutcome) -> None:
        """Count a step that computed, and let those learn from it who decide by it."""
        plan, step_ns = outcome.plan, outcome.result.step_ns
        self.stats.count(plan, step_ns, len(outcome.advanced) + len(outcome.progress))
        if self.pacer is not None:
            self.pacer.observe(plan, step_ns)
        self.policy.after_step(outcome, self)

    def steady(self) -> SteadyDecoding | None:
        """Where steps can be folded from, until anything else is asked of this scheduler.

        None: the next step has to be committed and planned one by one.
        """
        return self._folder.steady()

    def _gain(
        self,
        request: ScheduledRequest,
        stopped: str | None,
        progress: list[Progress],
        released: list[int],
    ) -> None:
        """One more token for a request that is not, or was not, counted by the cohort."""
        if request.state is _FINISHED or request.state is _CANCELLED:
            return  # surplus
        request.base_emitted += 1
        if request.base_emitted == 1:
            request.first_token_ns = self.now_ns
        if stopped is None and request.output_tokens >= request.output_limit:
            stopped = "length"
        if stopped is not None:
            self._finish(request, released)
        progress.append(Progress(request=request, finish_reason=stopped))

    def _finish(self, request: ScheduledRequest, released: list[int]) -> None:
        if request.state is _DEPARTING:
            request.keeps_blocks = False
        if request.state not in _RELEASED_LATER:
            self._floor.withdraw(request)
            if self._floor.let_go(request):
                released.append(request.rid)
        request.state = _FINISHED

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant holds; for tests and when idle."""
        self._floor.check_integrity()
