"""What a scheduling policy decides, as hooks on the one scheduler.

The scheduler owns the mechanism (blocks, budget, plans in flight) and keeps its invariants
whatever a policy answers; a policy owns preferences. It sees requests through their lengths,
classes and deadlines, and the engine through `SchedulerView`; it never sees a true output length.
A policy object belongs to one scheduler and may keep what it learns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, Self

from goodput_engine.scheduler.queue import FcfsQueue, WaitingQueue
from goodput_engine.scheduler.request import ScheduledRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from goodput_core.spec.choices import Policy, Preemption
    from goodput_engine.scheduler.door import Refusal
    from goodput_engine.scheduler.plan import StepOutcome, StepPlan
    from goodput_engine.scheduler.prediction import PredictionError
    from goodput_engine.scheduler.settings import PolicySettings

__all__ = ["Phase", "SchedulerLimits", "SchedulerView", "SchedulingPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds that may change between any two plans.

    Args:
        token_budget: tokens that one step may compute, at least 1.
        max_num_seqs: requests that may run at once, at least 1; lowering it preempts nobody.
        max_waiting: requests that may wait for more than the next step.
    """

    token_budget: int
    max_num_seqs: int
    max_waiting: int


class SchedulerView(Protocol):
    """What a policy may look at; all of it is current when a hook is called."""

    @property
    def now_ns(self) -> int:
        """The time of this plan or commit."""
        ...

    @property
    def limits(self) -> SchedulerLimits:
        """The bounds in force."""
        ...

    @property
    def waiting(self) -> WaitingQueue:
        """Who waits."""
        ...

    @property
    def input_open(self) -> bool:
        """Whether more requests may come."""
        ...

    @property
    def num_running(self) -> int:
        """Admitted requests whose last token is not in flight."""
        ...

    @property
    def num_decoding(self) -> int:
        """Members of the cohort."""
        ...

    @property
    def decode_context_tokens(self) -> int:
        """Computed tokens of all members of the cohort."""
        ...

    @property
    def num_prefilling(self) -> int:
        """Admitted requests that are more than one step from their next token."""
        ...

    def plans_in_flight(self) -> Iterable[StepPlan]:
        """Those that have not been committed, oldest first."""
        ...

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be handed out at once."""
        ...

    @property
    def total_blocks(self) -> int:
        """KV blocks there are."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        ...

    @property
    def host_blocks(self) -> tuple[int, int]:
        """Blocks of host memory that are free, and all of them."""
        ...

    def promised_blocks(self) -> int:
        """KV blocks that are in use and will be free without anybody else being evicted."""
        ...

    @property
    def max_total_tokens(self) -> int:
        """The longest prompt and answer together that may be asked for."""
        ...

    @property
    def preemption(self) -> Preemption:
        """What the manifest wants to become of a victim's blocks."""
        ...

    def running(self) -> Iterator[ScheduledRequest]:
        """Every running request: decoding, ready to decode, prefilling."""
        ...

    def prefilling(self) -> Iterable[ScheduledRequest]:
        """Running requests that are more than one step from their next token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Which kinds of work one step may hold; decodes come first, then prefills, then new ones.

    Args:
        decodes, prefills, admissions: whether it may hold them.
        prompts_alone: decodes come last, and only into a step in which no prompt is computed.
        only: running requests for which this is false sit out with their blocks; None: nobody.
    """

    decodes: bool = True
    prefills: bool = True
    admissions: bool = True
    prompts_alone: bool = False
    only: Callable[[ScheduledRequest], bool] | None = None


_MIXED: Final = Phase()


class SchedulingPolicy:
    """First come, first served, everything mixed: what a policy changes, it overrides."""

    name: ClassVar[Policy]
    paced: ClassVar[bool] = False
    """Whether a step's share of prompts may be cut to keep running requests in time: not for one
    that keeps prompts whole, or that sizes steps by the promises itself."""

    @classmethod
    def configured(cls, settings: PolicySettings) -> Self:  # noqa: ARG003 - for those that have any
        """A policy with what a manifest says of it."""
        return cls()

    def refuse(self, request: ScheduledRequest, view: SchedulerView) -> Refusal | None:  # noqa: ARG002
        """Why a request that could be served is turned away at the door; None: it may wait."""
        return None

    def step_aside(self, view: SchedulerView) -> Iterable[ScheduledRequest]:  # noqa: ARG002
        """Running requests to evict before the next step, whoever needs their place."""
        return ()

    def new_queue(self) -> WaitingQueue:
        """Order the waiting: the queue that this scheduler uses from its start."""
        return FcfsQueue()

    def phase(self, view: SchedulerView) -> Phase:  # noqa: ARG002 - for those that switch
        """Which kinds of work the next step may hold."""
        return _MIXED

    def budget(self, view: SchedulerView) -> int:
        """Tokens of the next step; the scheduler keeps it within the limit in force."""
        return view.limits.token_budget

    def wake_ns(self, view: SchedulerView) -> int | None:  # noqa: ARG002 - for those that wait
        """When to decide again, while nothing runs and nothing comes; None: not by itself.

        For a policy that lets requests wait although they could start. A time that has passed is
        ignored: what is due is started by the decision that was asked for then.
        """
        return None

    def may_admit(
        self,
        request: ScheduledRequest,  # noqa: ARG002 - for those that choose
        view: SchedulerView,  # noqa: ARG002
    ) -> bool:
        """Whether the request whose turn it is may start now; no: nobody starts in this step."""
        return True

    def displaced_by(
        self,
        request: ScheduledRequest,  # noqa: ARG002 - for those that displace
        view: SchedulerView,  # noqa: ARG002
    ) -> Iterable[ScheduledRequest]:
        """Who may be evicted so that a waiting request can start: the first to go first.

        As many are taken as it needs, or nobody where all of them would not do. Those that are
        not `displaceable` are passed over.
        """
        return ()

    def prefill_order(
        self,
        prefilling: Iterable[ScheduledRequest],
        view: SchedulerView,  # noqa: ARG002
    ) -> Iterable[ScheduledRequest]:
        """Whose prompt goes on first, of those that have started; given in order of admission."""
        return prefilling

    def overtakes(
        self,
        newcomer: ScheduledRequest,  # noqa: ARG002 - for those that order by urgency
        prefilling: ScheduledRequest,  # noqa: ARG002
        view: SchedulerView,  # noqa: ARG002
    ) -> bool:
        """Whether the request whose turn it is starts before this prompt goes on."""
        return False

    def reserve_tokens(self, request: ScheduledRequest, view: SchedulerView) -> int:  # noqa: ARG002
        """Tokens for which a request must get blocks when it is admitted.

        At least its total is always reserved: a request that starts can finish its prompt.
        """
        return request.total_tokens

    def headroom_blocks(self, view: SchedulerView) -> int:
        """Blocks that an admission leaves free for those that run, when any run."""
        return view.total_blocks // 100

    def chunk_tokens(
        self,
        request: ScheduledRequest,  # noqa: ARG002 - for those that ramp
        remaining: int,
        budget_left: int,
        view: SchedulerView,  # noqa: ARG002
    ) -> int:
        """Tokens of a prefilling request to compute in the next step; 0: none now.

        Args:
            request: it.
            remaining: its tokens that are not computed, at least 1.
            budget_left: what the step has left, at least 1.
            view: the engine.
        """
        return min(remaining, budget_left)

    def rank(self, request: ScheduledRequest, view: SchedulerView) -> tuple[int, ...]:  # noqa: ARG002
        """Who yields when there is not enough for all that run: the largest rank first."""
        return (request.arrival_ns, request.rid)

    def victim(self, claimant: ScheduledRequest, view: SchedulerView) -> ScheduledRequest | None:  # noqa: ARG002
        """Whom to evict so that a running request gets its next block.

        It may be the claimant itself. None: nobody; the claimant waits in place with its blocks.
        """
        return max(view.running(), key=lambda r: self.rank(r, view), default=None)

    def evict_mode(self, victim: ScheduledRequest, view: SchedulerView) -> Preemption:  # noqa: ARG002
        """What becomes of a victim's blocks; without room in host memory they are recomputed."""
        return view.preemption

    @property
    def step_time_error(self) -> float:
        """Recent mean of |measured / predicted − 1| of step times; 0 without predictions."""
        return 0.0

    @property
    def prediction_error(self) -> PredictionError | None:
        """How wrong its predictions of answers' lengths were; None: it makes none."""
        return None

    def steady(self, view: SchedulerView) -> bool:  # noqa: ARG002
        """Whether steps in which everybody just decodes may be taken without asking this policy.

        Asked after a plan in which every running request decoded and nothing else was done. Yes
        means: no hook would decide otherwise in the plans that follow, and `after_step` has
        nothing to learn from them, until a request comes, ends, or is cancelled, blocks run
        short, or a limit changes. Time that passes, tokens that are gained and blocks that are
        taken from the free ones must not matter. The hooks are not called for such steps.

        A subclass is never folded if it overrides `step_aside`, `phase`, `budget` or
        `after_step`, and not while requests wait if it overrides a hook of admission, unless it
        overrides this one too, or inherits it from a class that is at least as specific.
        """
        return True

    def after_step(self, outcome: StepOutcome, view: SchedulerView) -> None:
        """A step has committed: learn from its time and from the requests that ended."""
