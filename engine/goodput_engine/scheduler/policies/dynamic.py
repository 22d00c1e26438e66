"""Dynamic batching: batches with a maximum size and a timeout."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_MS
from goodput_engine.scheduler.policies.batching import BatchingPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["DynamicPolicy"]


class DynamicPolicy(BatchingPolicy):
    """A batch starts when it is full or its oldest request has waited for the timeout.

    The batch runs to its end. By then the requests of the next batch have usually waited for longer
    than the timeout (by default 100 ms), and start immediately.

    Source: Crankshaw et al., "Clipper", NSDI 2017, section 4.3 (delayed batching); as in Triton
    Inference Server's dynamic batcher: max_batch_size and max_queue_delay_microseconds.
    """

    name: ClassVar[Policy] = Policy.DYNAMIC
    DEFAULT_TIMEOUT_NS: ClassVar[int] = 100 * NS_PER_MS

    def start_ns(self, batch: Sequence[ScheduledRequest]) -> int:
        """The timeout after the arrival of the oldest request."""
        return batch[0].arrival_ns + self.timeout_ns
