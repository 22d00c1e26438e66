"""Scheduling policies: the hooks that a policy implements, and the state that it may read.

The scheduler manages blocks, the token budget and plans in flight. Its invariants hold for any
decision of a policy. A policy reads lengths, classes and deadlines of requests, and the state of
the engine through `SchedulerView`. It has no access to true output lengths. A policy object belongs
to one scheduler and may have state.

The hooks form three groups:

- *order*: which request goes first, and which is evicted first;
- *admit*: which request may start, and with how many blocks;
- *size*: the work that one step may hold.

`policies/sarathi.py` implements every hook that a policy needs. The other hooks are optional, and
most of them are called only for a policy that overrides them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, Self

from goodput_core.spec.choices import LateRequests
from goodput_engine.scheduler.prediction import PredictionError
from goodput_engine.scheduler.request_table import FcfsQueue, ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from goodput_core.spec.choices import Policy, Preemption
    from goodput_engine.scheduler.admission import Rejection, Removal
    from goodput_engine.scheduler.plan import StepOutcome, StepPlan
    from goodput_engine.scheduler.request_table import RequestTable

__all__ = [
    "MIXED",
    "Phase",
    "PolicySettings",
    "SchedulerLimits",
    "SchedulerView",
    "SchedulingPolicy",
    "WaitingQueue",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Policy settings of a manifest.

    Args:
        batch_timeout_ns: longest wait of an incomplete batch of `static` or `dynamic`; None for
            their defaults.
        ageing_ns: waiting time that raises a request by one level of `priority`, and after which
            a request is overdue under `sjf`, at least 1; None for their defaults.
    """

    batch_timeout_ns: int | None = None
    ageing_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits that may change between any two plans.

    Args:
        token_budget: number of tokens that one step may compute, at least 1.
        max_num_seqs: number of requests that may run, at least 1. Lowering it preempts no request.
        max_waiting: number of requests that may wait for longer than the next step.
    """

    token_budget: int
    max_num_seqs: int
    max_waiting: int


class WaitingQueue(Protocol):
    """The waiting requests in the order of a policy."""

    def push(self, request: ScheduledRequest) -> None:
        """Add a new request."""
        ...

    def requeue(self, request: ScheduledRequest) -> None:
        """Add a preempted request, at the head or where the policy's order puts it."""
        ...

    def peek(self, now_ns: int) -> ScheduledRequest | None:
        """Return the next request to admit without removing it; None if there is none."""
        ...

    def remove(self, request: ScheduledRequest) -> None:
        """Remove an admitted or cancelled request."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ScheduledRequest]: ...


class SchedulerView:
    """The state of a scheduler that a policy may read; it is current in every hook.

    Args:
        table: requests and memory of the scheduler.
        limits: the limits in force.
        max_total_tokens: limit of prompt and output tokens together.
        preemption: preemption mode of the manifest.
        late_requests: treatment of requests that can no longer meet their targets.
        max_chunk_tokens: most prompt tokens of a request in a step.

    Attributes:
        now_ns: time of the current or last plan, commit or new request.
        waiting: the queue of waiting requests.
        input_open: True while more requests may arrive.
        total_blocks: number of KV blocks on the device.
        block_size: number of tokens per KV block.
    """

    def __init__(
        self,
        table: RequestTable,
        *,
        limits: SchedulerLimits,
        max_total_tokens: int,
        preemption: Preemption,
        late_requests: LateRequests = LateRequests.FINISH,
        max_chunk_tokens: int | None = None,
    ) -> None:
        self._table = table
        self.now_ns = 0
        self.limits = limits
        self.waiting: WaitingQueue = table.waiting
        self.input_open = True
        self.max_total_tokens = max_total_tokens
        self.preemption = preemption
        self.late_requests = late_requests
        self.max_chunk_tokens = max_chunk_tokens or max_total_tokens
        self.total_blocks = table.kv.total_blocks
        self.block_size = table.kv.block_size

    @property
    def num_running(self) -> int:
        """Number of admitted requests whose last token is not in flight."""
        return self._table.num_running

    @property
    def num_decoding(self) -> int:
        """Number of members of the decode batch."""
        return len(self._table.batch.members)

    @property
    def num_prefilling(self) -> int:
        """Number of requests in the state PREFILLING."""
        return len(self._table.prefilling)

    @property
    def free_blocks(self) -> int:
        """Number of KV blocks that can be allocated now."""
        return self._table.kv.free_blocks

    @property
    def host_blocks(self) -> tuple[int, int]:
        """Numbers of free and of all blocks of host memory."""
        return self._table.host.free_blocks, self._table.host.total_blocks

    @property
    def decode_epoch(self) -> int:
        """Number of steps with decodes that were planned since the start."""
        return self._table.batch.epoch

    @property
    def num_requests(self) -> int:
        """Number of requests that wait, run, or hold blocks until a step commits."""
        return len(self._table.requests)

    @property
    def rids(self) -> list[int]:
        """Identifiers of the requests that `num_requests` counts."""
        return list(self._table.requests)

    @property
    def num_in_flight(self) -> int:
        """Number of plans that are not committed."""
        return len(self._table.in_flight)

    @property
    def has_work(self) -> bool:
        """True while any request waits, runs, or holds blocks."""
        return bool(self._table.requests)

    @property
    def cached_blocks(self) -> int:
        """Number of free KV blocks that hold a reusable prefix."""
        return self._table.kv.cached_blocks

    def expect_hits(self, request: ScheduledRequest) -> None:
        """Set the prefix hits of a request that has not started to those that it has now."""
        kv = self._table.kv
        hits = kv.match(request.block_hashes, (request.input_tokens - 1) // kv.block_size)
        request.cached_tokens = len(hits) * kv.block_size
        request.shared_tokens = (len(hits) - kv.idle(hits)) * kv.block_size

    def is_cached(self, block_hash: int) -> bool:
        """Return True if the prefix cache has the block with this hash."""
        return self._table.kv.is_published(block_hash)

    def shared_blocks(self) -> int:
        """Return the number of used blocks whose first holder has ended: no request owns them."""
        kv = self._table.kv
        own = sum(
            len(request.blocks) - request.shared_tokens // kv.block_size
            for request in self._table.requests.values()
            if request.blocks
        )
        return kv.total_blocks - kv.free_blocks - own

    def pending_blocks(self) -> int:
        """Return the number of used blocks that will become free without a further eviction."""
        return self._table.pending_blocks()

    def copy_ns(self, blocks: int) -> int:
        """Return the time to copy blocks to host memory or back."""
        return blocks * self._table.host.ns_per_block

    def plans_in_flight(self) -> Iterator[StepPlan]:
        """Iterate over the plans that are not committed, oldest first."""
        return (record.plan for record in self._table.in_flight)

    def running(self) -> Iterator[ScheduledRequest]:
        """Iterate over the running requests: decoding, ready to decode, prefilling."""
        return self._table.running()

    def prefilling(self) -> Iterable[ScheduledRequest]:
        """Return the requests in the state PREFILLING, in order of admission."""
        return self._table.prefilling.values()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant holds; for tests, and while idle."""
        self._table.check_integrity()


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The kinds of work that one step may hold.

    They are scheduled in the order decodes, prefills, admissions.

    Args:
        decodes, prefills, admissions: True if the step may hold work of this kind.
        prompts_alone: True if decodes are scheduled last, and only if the step has no prompt
            tokens.
        token_budget: token limit of the step, within the limit in force; None for that limit.
        only: filter of running requests. A request for which it returns False keeps its blocks and
            is not scheduled in this step. None to schedule every request.
    """

    decodes: bool = True
    prefills: bool = True
    admissions: bool = True
    prompts_alone: bool = False
    token_budget: int | None = None
    only: Callable[[ScheduledRequest], bool] | None = None


MIXED: Final = Phase()
"""Decodes, prefills and admissions up to the token budget."""

_NO_PREDICTIONS: Final = PredictionError()


class SchedulingPolicy(ABC):
    """Base class of the policies.

    Attributes:
        name: its name in a manifest.
        uses_prefill_budget: True if `prefill_budget` may limit the prompt tokens of a step to
            protect the TPOT of running requests. False for a policy that does not split prompts,
            or that itself sizes steps by deadlines.
        preemption: preemption mode of this policy; None for the manifest's mode.
        view: the scheduler; set by `attach`.
    """

    name: ClassVar[Policy]
    uses_prefill_budget: ClassVar[bool] = False
    joins_running: ClassVar[bool] = True
    """True if requests start while others run."""
    preemption: ClassVar[Preemption | None] = None
    view: SchedulerView

    @classmethod
    def configured(cls, settings: PolicySettings) -> Self:  # noqa: ARG003 - most have no settings
        """Build the policy with the settings of a manifest."""
        return cls()

    def attach(self, view: SchedulerView) -> None:
        """Bind the policy to its scheduler."""
        self.view = view

    def overrides(self, *hooks: str) -> bool:
        """Return True if the policy overrides one of these optional hooks."""
        kind = type(self)
        return any(getattr(kind, hook) is not getattr(SchedulingPolicy, hook) for hook in hooks)

    # --- order -------------------------------------------------------------------------------
    def new_queue(self) -> WaitingQueue:
        """Return the queue for the waiting requests; called once, before `attach`."""
        return FcfsQueue()

    @abstractmethod
    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """Return the eviction key; the running request with the largest key is evicted first."""

    def prefill_order(self, prefilling: Iterable[ScheduledRequest]) -> Iterable[ScheduledRequest]:
        """Order the started prompts, given in order of admission, for the next step."""
        return prefilling

    def precedes(self, waiting: ScheduledRequest, prefilling: ScheduledRequest) -> bool:  # noqa: ARG002
        """Return True to admit the head of the queue before a started prompt continues."""
        return False

    def displaced_by(self, request: ScheduledRequest) -> Iterable[ScheduledRequest]:  # noqa: ARG002
        """Return running requests that may be evicted for a waiting one, in the order of eviction.

        No more requests are evicted than the waiting request needs, and none if all of them
        together would not suffice. Requests that are not `displaceable` are skipped.
        """
        return ()

    def is_worth(
        self,
        request: ScheduledRequest,  # noqa: ARG002
        victims: Sequence[ScheduledRequest],  # noqa: ARG002
        cost_ns: float,  # noqa: ARG002
    ) -> bool:
        """Return True if `hybrid` may evict running requests for a waiting one at this cost.

        Args:
            request: the waiting request.
            victims: the requests of `displaced_by` that would be evicted, at least one.
            cost_ns: predicted cost of these evictions (`eviction_cost`).
        """
        return True

    def preempt_ahead(self) -> Iterable[ScheduledRequest]:
        """Return running requests to evict before the next step even if blocks are free."""
        return ()

    # --- admit -------------------------------------------------------------------------------
    def priority_level(
        self,
        request: ScheduledRequest,
        now_ns: int,  # noqa: ARG002
    ) -> tuple[int, int | None]:
        """Return the level of a new or waiting request, by which a full queue rejects.

        Returns:
            The level, in the units of `ScheduledRequest.priority`, and the time at which the
            request rises to the next level; None if it never rises.
        """
        return request.priority, None

    def reject(self, request: ScheduledRequest) -> Rejection | None:  # noqa: ARG002
        """Return a rejection of a request that could be served later; None to accept it."""
        return None

    def displaced_waiting(self, request: ScheduledRequest) -> Iterable[Removal]:  # noqa: ARG002
        """Return waiting requests to reject in favour of a new request.

        The hook is called once for each new request, before it is enqueued and only if nothing else
        rejects it. A displaced request must never have started, and its rejection must state a time
        after which to retry. It leaves the queue at once.
        """
        return ()

    def requests_to_drop(self) -> Iterable[Removal]:
        """Return waiting and running requests to drop because they cannot meet their targets.

        The hook is called before each plan if the manifest's `lateRequests` is `drop`. Requests
        that have certainly missed a target are already removed then. A policy may add requests that
        will miss one according to its predictions.
        """
        return ()

    def waiting_to_reject(self) -> Iterable[Removal]:
        """Return waiting requests to reject because their decision was left open until now.

        The hook is called before each plan. Each request leaves the queue before the next one is
        taken from the iterable. It must never have started, and its rejection must state a time
        after which to retry.
        """
        return ()

    def may_admit(self, request: ScheduledRequest) -> bool:  # noqa: ARG002
        """Return True if the head of the queue may start; False ends the step's admissions."""
        return True

    @abstractmethod
    def reserved_tokens(self, request: ScheduledRequest) -> int:
        """Return the number of tokens for which blocks are allocated at admission.

        The scheduler allocates blocks for at least the tokens that the request has, so a started
        prompt can always be completed.
        """

    @abstractmethod
    def headroom_blocks(self) -> int:
        """Return the number of blocks that an admission must leave free for running requests."""

    def wake_ns(self) -> int | None:
        """Return the time to plan again while the engine is idle; None to wait for a request.

        A policy needs this hook if it delays requests that could start. The hook is called only
        while requests wait. A time that has passed is ignored, because the last plan has already
        started the requests that were due.
        """
        return None

    # --- size --------------------------------------------------------------------------------
    @abstractmethod
    def phase(self) -> Phase:
        """Return the kinds of work that the next step may hold, and its token budget."""

    @abstractmethod
    def chunk_tokens(self, request: ScheduledRequest, remaining: int, budget_left: int) -> int:
        """Return the number of tokens of a prompt to compute in the next step; 0 for none.

        Args:
            request: a started request, or the head of the queue.
            remaining: number of its tokens that are not computed, at least 1.
            budget_left: unused tokens of the step's budget, at least 1.
        """

    # --- after a step ------------------------------------------------------------------------
    def after_step(self, outcome: StepOutcome) -> None:  # noqa: B027 - optional
        """Learn from a committed step, for example its time and the requests that ended."""

    def before_cancel(self, request: ScheduledRequest) -> None:  # noqa: B027 - optional
        """Learn from a request with output that is about to be cancelled or dropped."""

    def can_fast_forward(self) -> bool:
        """Return True if steps that only decode may be taken without calling the policy.

        The hook is called after a plan in which every running request decoded and nothing else
        happened. If it returns True, every hook must return the same as in that plan, and
        `after_step` must have nothing to learn, until a request arrives, ends or is cancelled,
        blocks run short, or a limit changes. The results must not depend on time, on decoded
        tokens or on allocated blocks.

        The returned value covers only the hooks of the class that defines it, and of its bases. A
        subclass that overrides `preempt_ahead`, `phase` or `after_step` must override this hook
        too; otherwise it is never fast-forwarded. The same applies to the hooks of admission while
        requests wait.
        """
        return False

    @property
    def step_time_error(self) -> float:
        """Recent mean of |measured / predicted − 1| of step times; 0 without predictions."""
        return 0.0

    @property
    def prediction_error(self) -> PredictionError:
        """Error of the predicted output lengths; 0 without predictions."""
        return _NO_PREDICTIONS
