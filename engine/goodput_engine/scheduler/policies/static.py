"""Static batching: a batch starts when it is full, or when no request has arrived for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.policies.batching import BatchingPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["StaticPolicy"]


class StaticPolicy(BatchingPolicy):
    """A full batch starts and runs to its end; then the next full batch starts.

    A server cannot know that its input has ended, so an incomplete batch starts when no request has
    arrived for the timeout (by default one second).

    Source: Yu et al., "Orca", OSDI 2022, section 2 (request-level batches of a fixed size, as
    FasterTransformer runs them).
    """

    name: ClassVar[Policy] = Policy.STATIC
    DEFAULT_TIMEOUT_NS: ClassVar[int] = NS_PER_S

    def start_ns(self, batch: Sequence[ScheduledRequest]) -> int:
        """The timeout after the arrival of the newest request."""
        return batch[-1].arrival_ns + self.timeout_ns
