"""Dynamic batching: a largest batch size and a timeout."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_MS
from goodput_engine.scheduler.policies.gathered import GatheredPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["DynamicPolicy"]


class DynamicPolicy(GatheredPolicy):
    """A batch starts when it is full or its oldest request has waited for the timeout.

    The batch is drained to its end. Who came meanwhile has waited already, so the next one starts
    as soon as the device is free, unless all of it is younger than the timeout, 100 ms unless
    told.

    Source: Crankshaw et al., "Clipper", NSDI 2017, section 4.3 (delayed batching); as in Triton
    Inference Server's dynamic batcher: max_batch_size and max_queue_delay_microseconds.
    """

    name: ClassVar[Policy] = Policy.DYNAMIC
    DEFAULT_TIMEOUT_NS: ClassVar[int] = 100 * NS_PER_MS

    def start_ns(self, gathered: Sequence[ScheduledRequest]) -> int:
        """When the oldest has waited for the timeout."""
        return gathered[0].arrival_ns + self.timeout_ns
