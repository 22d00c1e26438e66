"""The importance of a request when a queue is full: the least important request is rejected.

Levels of priority are strict: no number of requests of a lower level outweighs one of a higher
level. Within a level, a request whose first token is overdue is worth nothing any more, and the
weights of the manifest order the others. Of requests with equal weights, the one with the shorter
target is less likely to be in time, because all of them wait in the same queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from goodput_core.slo.targets import Targets

__all__ = ["Importance"]

_NO_TARGET_NS: Final = (1 << 62) - 1


class Importance(NamedTuple):
    """The importance of a waiting or new request; compare as tuples, less is less important.

    Args:
        priority: level of priority.
        weight: weight within the level; 0 if the first token is overdue.
        target_ns: time from arrival within which the first token is due, at most 2⁶² − 1.
    """

    priority: int
    weight: int
    target_ns: int

    @classmethod
    def of(cls, targets: Targets, *, priority: int, weight: int, waited_ns: int = 0) -> Importance:
        """Return the importance of a request.

        Args:
            targets: targets of the request.
            priority: level of priority; larger is more important.
            weight: weight within the level, at least 1.
            waited_ns: time since the arrival.
        """
        target_ns = targets.first_token_ns
        if target_ns is None:
            return cls(priority, weight, _NO_TARGET_NS)
        return cls(priority, 0 if waited_ns > target_ns else weight, target_ns)
