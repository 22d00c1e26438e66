"""Admission of requests to the queue, and removal of requests that were admitted.

A request is rejected if the engine cannot serve its length, if the queue or host memory is full, or
if the policy rejects it. A full queue rejects the least important request, new or waiting. Every
request in the queue could run alone, so the scheduler cannot deadlock.

An admitted request is removed if a new request displaces it from the queue, or if it is late and
late requests are dropped. It is reported like a rejected one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

from goodput_core.spec.choices import LateRequests, Preemption
from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.overdue import DROPPABLE, OverdueRequests
from goodput_engine.scheduler.request_table import RequestState, ScheduledRequest
from goodput_engine.scheduler.unstarted import UnstartedRequests

if TYPE_CHECKING:
    from goodput_core.slo.importance import Importance
    from goodput_engine.scheduler.policy import SchedulerView, SchedulingPolicy
    from goodput_engine.scheduler.request_table import RequestTable

__all__ = [
    "Admission",
    "Rejection",
    "Removal",
    "describe_long_output",
    "describe_long_prompt",
    "host_memory_is_full",
]

_REMEMBERED_STARTS: Final = 64
"""Latest starts from which the wait of a rejected request is predicted."""
_MAX_RETRY_S: Final = 60
_ENDS_ELSEWHERE: Final = (
    RequestState.FINISHED,
    RequestState.CANCELLED,
    RequestState.HELD,
    RequestState.DETACHING,
    RequestState.RECEIVING,
)
"""States in which an output has ended, or goes on at another replica."""
_FULL_DIVISOR: Final = 10
"""Host memory is full if less than a tenth of it is free, as in FastServe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """The rejection of a request.

    Args:
        reason: "too_long", "invalid", "queue_full", "memory_full", or a policy's "unattainable".
            For an admitted request, "displaced" or "late".
        detail: one sentence for the client.
        retry_after_s: seconds after which to retry; 0 if a retry cannot help.
    """

    reason: str
    detail: str
    retry_after_s: int = 0

    @property
    def overload(self) -> bool:
        """True if the request is rejected because of load and may be served later."""
        return self.retry_after_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """An admitted request to reject after all.

    Args:
        request: a waiting or running request.
        rejection: the rejection to report, with a time after which to retry.
    """

    request: ScheduledRequest
    rejection: Rejection


def describe_long_prompt(context_tokens: int) -> str:
    """Describe the rejection of a prompt that fills the context, without its length.

    The server rejects most of these prompts before it has counted their tokens.

    Args:
        context_tokens: limit of prompt and output together.
    """
    return (
        f"the prompt is too long; this model's context of {context_tokens} must hold the prompt "
        "and at least one output token"
    )


def describe_long_output(
    output_tokens: int, *, input_tokens: int, context_tokens: int, field: str = "max_tokens"
) -> str:
    """Describe the rejection of an output that does not fit after its prompt.

    Args:
        output_tokens: the requested length of the output.
        input_tokens: length of the prompt.
        context_tokens: limit of prompt and output together.
        field: the field that requests the length.
    """
    return (
        f"{field} is {output_tokens}, but after a prompt of {input_tokens} tokens this model's "
        f"context of {context_tokens} leaves {context_tokens - input_tokens}"
    )


def host_memory_is_full(*, free_blocks: int, total_blocks: int, mean_blocks: int) -> bool:
    """Return True if host memory is too full for a request to wait for KV memory.

    Args:
        free_blocks: free blocks of host memory.
        total_blocks: all blocks of host memory.
        mean_blocks: mean number of blocks of a running request, the expected size of the next
            copy.
    """
    scarce = free_blocks * _FULL_DIVISOR < total_blocks or free_blocks < mean_blocks
    return scarce and free_blocks < total_blocks


class Admission:
    """Admits or rejects the new requests of one scheduler.

    Args:
        policy: may reject requests, and gives the headroom of an admission.
        table: requests of the scheduler; admitted requests are added to its queue.
        view: state and limits of the scheduler.

    Attributes:
        starts_ns: times of the latest starts of requests, oldest first.
        shed: number of requests rejected or removed because of load.
        removed: removals that `take_removed` has not returned yet.
        overdue: watches the targets of admitted requests; None if late requests are not dropped.
    """

    __slots__ = (
        "_displaces",
        "_policy",
        "_table",
        "_unstarted",
        "_view",
        "overdue",
        "removed",
        "shed",
        "starts_ns",
    )

    def __init__(
        self, *, policy: SchedulingPolicy, table: RequestTable, view: SchedulerView
    ) -> None:
        self._policy = policy
        self._table = table
        self._view = view
        self.starts_ns: deque[int] = deque(maxlen=_REMEMBERED_STARTS)
        self.shed = 0
        self.removed: Final[list[Removal]] = []
        self.overdue: OverdueRequests | None = None
        if view.late_requests is LateRequests.DROP:
            self.overdue = OverdueRequests(table.requests)
        self._displaces = policy.overrides("displaced_waiting")
        self._unstarted = UnstartedRequests(view.waiting, policy.priority_level)

    def admit(self, request: ScheduledRequest) -> Rejection | None:
        """Enqueue a new request; return the rejection if it is rejected instead."""
        table, view = self._table, self._view
        # Requests that the next plan can start do not count as waiting.
        free_blocks = view.free_blocks - table.waiting_blocks
        if table.requests:
            free_blocks -= self._policy.headroom_blocks()
        needed = table.kv.blocks_for(request.input_tokens)
        starting = 0
        if needed <= free_blocks and self._is_full(0):
            starting = self._starting()
        rejection = self._check_length(request)
        victim: ScheduledRequest | None = None
        if rejection is None and self._is_full(starting):
            victim = self._less_important(request)
            if victim is None:
                rejection = self._queue_full(starting)
        if rejection is None:
            request.output_limit = self.output_limit(request)
            if needed > free_blocks and self._host_memory_is_full(request):
                rejection = Rejection(
                    reason="memory_full",
                    detail="too many requests are waiting for memory; try again later",
                    retry_after_s=self._retry_after_s(len(view.waiting) + 1),
                )
        if rejection is None:
            # The last check, because a policy counts the requests that it does not reject.
            rejection = self._policy.reject(request)
        if rejection is not None:
            self.shed += rejection.overload
            return rejection
        if self._displaces:
            for removal in list(self._policy.displaced_waiting(request)):
                waiting = removal.request
                assert waiting.state is RequestState.WAITING, waiting.state
                assert not waiting.admitted_tokens, "only an unstarted request is displaced"
                self.remove(removal)
        # The policy may have displaced enough requests.
        if victim is not None and victim.state is RequestState.WAITING and self._is_full(starting):
            self._displace(victim)
        table.enqueue(request)
        self._unstarted.add(request, waiting=len(view.waiting))
        self.watch(request)
        return None

    def displaceable(self) -> Importance | None:
        """Return the importance of the request that a full queue would reject first.

        A new request is admitted to a full queue if it is more important.

        Returns:
            None if no waiting request may be displaced, or if less than half of the queue is used:
            then the engine is not saturated (`goodput_core.placement.is_saturated`).
        """
        view, now_ns = self._view, self._view.now_ns
        if 2 * len(view.waiting) < view.limits.max_waiting:
            return None
        least = self._unstarted.least(now_ns)
        return None if least is None else self._unstarted.importance(least, now_ns)

    def watch(self, request: ScheduledRequest) -> None:
        """Watch the targets of an admitted request if late requests are dropped."""
        if self.overdue is not None:
            self.overdue.watch(request, self._view.now_ns)

    def remove(self, removal: Removal) -> None:
        """Cancel an admitted request and report its rejection."""
        request = removal.request
        assert request.state in DROPPABLE, request.state
        assert removal.rejection.overload, "a removed request may be retried"
        self.shed += 1
        self.removed.append(removal)
        self.cancel(request)

    def cancel(self, request: ScheduledRequest) -> bool:
        """Cancel a request; return True if it is removed now."""
        if request.output_tokens and request.state not in _ENDS_ELSEWHERE:
            self._policy.before_cancel(request)
        return self._table.cancel(request)

    def take_removed(self) -> list[Removal]:
        """Return the removals since the last call."""
        removed = list(self.removed)
        self.removed.clear()
        return removed

    def drop_late(self) -> None:
        """Remove requests that have missed a target, and those that the policy expects to."""
        assert self.overdue is not None, "late requests are not dropped"
        for request, missed in self.overdue.take(self._view.now_ns):
            rejection = Rejection(
                reason="late",
                detail=f"the request missed its target of the {missed} and was dropped; try again "
                "later",
                retry_after_s=self._retry_after_s(len(self._view.waiting)),
            )
            self.remove(Removal(request=request, rejection=rejection))
        for removal in list(self._policy.requests_to_drop()):
            self.remove(removal)

    def output_limit(self, request: ScheduledRequest) -> int:
        """Return the upper bound of a request's output tokens."""
        limit = request.max_output_tokens
        return self._view.max_total_tokens - request.input_tokens if limit is None else limit

    def _check_length(self, request: ScheduledRequest) -> Rejection | None:
        prompt, output = request.input_tokens, request.max_output_tokens
        bound = self._view.max_total_tokens
        if prompt < 1 or (output is not None and output < 1):
            return Rejection(
                reason="invalid",
                detail="a request needs at least one prompt token and one output token",
            )
        if prompt >= bound:
            return Rejection(reason="too_long", detail=describe_long_prompt(bound))
        if output is not None and prompt + output > bound:
            detail = describe_long_output(output, input_tokens=prompt, context_tokens=bound)
            return Rejection(reason="too_long", detail=detail)
        return None

    def _starting(self) -> int:
        """Return how many waiting requests the next plan can start, if their blocks are free."""
        view = self._view
        if view.num_running and not self._policy.joins_running:
            return 0
        left = view.limits.token_budget - view.num_decoding
        left -= sum(r.total_tokens - r.computed_tokens for r in view.prefilling())
        # A plan begins no prompt behind those that fill its budget.
        if self._table.waiting_blocks * view.block_size >= left:
            return 0
        return max(0, view.limits.max_num_seqs - view.num_running)

    def _is_full(self, starting: int) -> bool:
        """Return True if the queue has no place for one more request.

        Args:
            starting: waiting requests, the new one included, that the next plan can start.
        """
        return len(self._view.waiting) + 1 - starting > self._view.limits.max_waiting

    def _queue_full(self, starting: int) -> Rejection:
        waiting = len(self._view.waiting) + 1 - starting
        max_waiting = self._view.limits.max_waiting
        return Rejection(
            reason="queue_full",
            detail=f"{waiting - 1} requests are waiting, of at most {max_waiting}; try again later",
            retry_after_s=self._retry_after_s(waiting),
        )

    def _less_important(self, request: ScheduledRequest) -> ScheduledRequest | None:
        """Return the least important waiting request if the new one is more important."""
        index, now_ns = self._unstarted, self._view.now_ns
        least = index.least(now_ns)
        if least is None or index.importance(least, now_ns) >= index.importance(request, now_ns):
            return None
        return least

    def _displace(self, victim: ScheduledRequest) -> None:
        rejection = Rejection(
            reason="displaced",
            detail="the queue is full, and a more important request arrived; try again later",
            retry_after_s=self._retry_after_s(len(self._view.waiting)),
        )
        self.remove(Removal(request=victim, rejection=rejection))

    def _host_memory_is_full(self, request: ScheduledRequest) -> bool:
        """Return True if a request must not wait for memory (measure 3 of `preemption`)."""
        view = self._view
        if view.preemption is Preemption.HYBRID:
            return False  # it can recompute what finds no room there
        if any(r.priority < request.priority for r in chain(view.running(), view.waiting)):
            return False
        free, total = self._view.host_blocks
        used = self._view.total_blocks - self._view.free_blocks
        mean = used // max(1, self._view.num_running)
        full = host_memory_is_full(free_blocks=free, total_blocks=total, mean_blocks=mean)
        return full and not any(self._policy.displaced_by(request))

    def _retry_after_s(self, waiting: int) -> int:
        """Predict the wait, 1 to 60 seconds, in a queue of this length.

        The prediction is the length of the queue divided by the rate of the latest starts. The rate
        is measured up to now, so it falls while no request starts.
        """
        if not self.starts_ns:
            return 1
        elapsed_ns = max(1, self._view.now_ns - self.starts_ns[0])
        seconds = -(-waiting * elapsed_ns // (len(self.starts_ns) * NS_PER_S))
        return min(max(1, seconds), _MAX_RETRY_S)
