"""Batches that are gathered before they start, and drained before the next one starts.

What `static` and `dynamic` share: they differ in how long a batch that is not full is waited for.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

from goodput_engine.scheduler.policy import Phase, SchedulingPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.scheduler.policy import SchedulerView
    from goodput_engine.scheduler.request import ScheduledRequest
    from goodput_engine.scheduler.settings import PolicySettings

__all__ = ["GatheredPolicy"]

_NOBODY: frozenset[int] = frozenset()


class GatheredPolicy(SchedulingPolicy):
    """Whole batches, first come, first served; a place that falls free early stays empty.

    A batch is full with `max_num_seqs` requests, or when the KV blocks hold no further one. Each
    gets blocks for its longest answer, so nobody is ever evicted. A batch whose prompts exceed
    the token budget starts over several steps, and still nobody else joins it. A full batch never
    waits, nor does any once no more requests can come.

    Args:
        timeout_ns: how long a batch that is not full waits; None: `DEFAULT_TIMEOUT_NS`.
    """

    DEFAULT_TIMEOUT_NS: ClassVar[int]

    def __init__(self, *, timeout_ns: int | None = None) -> None:
        self.timeout_ns = self.DEFAULT_TIMEOUT_NS if timeout_ns is None else timeout_ns
        self._batch = _NOBODY

    @classmethod
    def configured(cls, settings: PolicySettings) -> Self:
        """With the manifest's timeout."""
        return cls(timeout_ns=settings.batch_timeout_ns)

    @abstractmethod
    def start_ns(self, gathered: Sequence[ScheduledRequest]) -> int:
        """When a batch that is not full starts.

        Args:
            gathered: who would be in it, in the order of their arrival, at least one.
        """

    def phase(self, view: SchedulerView) -> Phase:
        """New requests only while those of a batch have not all started."""
        head = view.waiting.peek(view.now_ns)
        if head is not None and head.rid not in self._batch:
            # All of the last batch have started. They have ended when their blocks are back.
            drained = view.free_blocks == view.total_blocks
            self._batch = self._next_batch(view) if drained else _NOBODY
        return Phase(admissions=bool(self._batch))

    def steady(self, view: SchedulerView) -> bool:  # noqa: ARG002
        """Nobody joins a batch while one that has started decodes."""
        return True

    def may_admit(self, request: ScheduledRequest, view: SchedulerView) -> bool:  # noqa: ARG002
        """Only who belongs to the batch."""
        return request.rid in self._batch

    def wake_ns(self, view: SchedulerView) -> int | None:
        """When a batch that is not full starts."""
        return self.start_ns(self._gather(view)[0])

    def reserve_tokens(self, request: ScheduledRequest, view: SchedulerView) -> int:  # noqa: ARG002
        """The prompt and the longest answer, whose last token is never read."""
        return request.input_tokens + request.output_limit - 1

    def headroom_blocks(self, view: SchedulerView) -> int:  # noqa: ARG002
        """None: those who run have all they can need."""
        return 0

    def _next_batch(self, view: SchedulerView) -> frozenset[int]:
        gathered, full = self._gather(view)
        if full or not view.input_open or view.now_ns >= self.start_ns(gathered):
            return frozenset(request.rid for request in gathered)
        return _NOBODY

    def _gather(self, view: SchedulerView) -> tuple[list[ScheduledRequest], bool]:
        """Who would be in the next batch, and whether nobody else could."""
        gathered: list[ScheduledRequest] = []
        width, left = view.limits.max_num_seqs, view.total_blocks
        for request in view.waiting:
            left -= -(-self.reserve_tokens(request, view) // view.block_size)
            if left < 0:
                return gathered, True
            gathered.append(request)
            if len(gathered) == width:
                return gathered, True
        return gathered, False
