"""Batching: a batch is collected before it starts, and ends before the next one starts.

`static` and `dynamic` share this class. They differ in how long an incomplete batch waits.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

from goodput_engine.scheduler.policy import Phase, SchedulingPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.scheduler.policy import PolicySettings
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["BatchingPolicy"]

_NO_BATCH: frozenset[int] = frozenset()


class BatchingPolicy(SchedulingPolicy):
    """One batch after the other, first come, first served.

    A batch is full when it has `max_num_seqs` requests, or when the KV blocks do not suffice for
    another one. A full batch starts immediately, and so does an incomplete one when no more
    requests can arrive. If the prompts of a batch exceed the token budget, they are computed over
    several steps, and no other request joins the batch. The slot of a request that ends early stays
    empty. Each request gets blocks for its longest output, so none is ever evicted.

    Args:
        timeout_ns: longest wait of an incomplete batch; None for `DEFAULT_TIMEOUT_NS`.
    """

    DEFAULT_TIMEOUT_NS: ClassVar[int]
    joins_running = False

    def __init__(self, *, timeout_ns: int | None = None) -> None:
        self.timeout_ns = self.DEFAULT_TIMEOUT_NS if timeout_ns is None else timeout_ns
        self._batch = _NO_BATCH

    @classmethod
    def configured(cls, settings: PolicySettings) -> Self:
        """Build the policy with the timeout of a manifest."""
        return cls(timeout_ns=settings.batch_timeout_ns)

    @abstractmethod
    def start_ns(self, batch: Sequence[ScheduledRequest]) -> int:
        """Return the time at which an incomplete batch starts.

        Args:
            batch: requests of the batch in order of arrival, at least one.
        """

    def eviction_key(self, request: ScheduledRequest) -> tuple[int, ...]:
        """The newest first. Only a batch wider than the token budget needs the key."""
        return (request.arrival_ns, request.rid)

    def may_admit(self, request: ScheduledRequest) -> bool:
        """True for the requests of the current batch."""
        return request.rid in self._batch

    def reserved_tokens(self, request: ScheduledRequest) -> int:
        """The prompt and the longest output, whose last token needs no block."""
        return request.input_tokens + request.output_limit - 1

    def headroom_blocks(self) -> int:
        """Zero: a running request already has all its blocks."""
        return 0

    def wake_ns(self) -> int | None:
        """The time at which an incomplete batch starts."""
        return self.start_ns(self._collect()[0])

    def phase(self) -> Phase:
        """Admissions only while requests of a batch have not started."""
        view = self.view
        head = view.waiting.peek(view.now_ns)
        if head is not None and head.rid not in self._batch:
            # The last batch has started completely. It has ended when all blocks are free.
            drained = view.free_blocks == view.total_blocks
            self._batch = self._next_batch() if drained else _NO_BATCH
        return Phase(admissions=bool(self._batch))

    def chunk_tokens(self, request: ScheduledRequest, remaining: int, budget_left: int) -> int:  # noqa: ARG002
        """The rest of the prompt within the budget."""
        return min(remaining, budget_left)

    def can_fast_forward(self) -> bool:
        """True: no request joins a batch that decodes."""
        return True

    def _next_batch(self) -> frozenset[int]:
        batch, full = self._collect()
        view = self.view
        if full or not view.input_open or view.now_ns >= self.start_ns(batch):
            return frozenset(request.rid for request in batch)
        return _NO_BATCH

    def _collect(self) -> tuple[list[ScheduledRequest], bool]:
        """Return the requests of the next batch, and True if it is full."""
        view = self.view
        batch: list[ScheduledRequest] = []
        width, left = view.limits.max_num_seqs, view.total_blocks
        for request in view.waiting:
            left -= -(-self.reserved_tokens(request) // view.block_size)
            if left < 0:
                return batch, True
            batch.append(request)
            if len(batch) == width:
                return batch, True
        return batch, False
