"""Static batching: the batch is full, or nobody came for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.policies.gathered import GatheredPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["StaticPolicy"]


class StaticPolicy(GatheredPolicy):
    """A full batch starts and is drained to its end; then the next full one.

    The last, partial batch is flushed when no more requests can come, or when nobody has come for
    the timeout, a second unless told: a server never knows that its input has ended.

    Source: Yu et al., "Orca", OSDI 2022, section 2 (request-level batches of a fixed size, as
    FasterTransformer runs them).
    """

    name: ClassVar[Policy] = Policy.STATIC
    DEFAULT_TIMEOUT_NS: ClassVar[int] = NS_PER_S

    def start_ns(self, gathered: Sequence[ScheduledRequest]) -> int:
        """When the newest has been alone for the timeout: it looks like the last one."""
        return gathered[-1].arrival_ns + self.timeout_ns
