"""Retries of refused requests, which are recognised by their prompts.

A refusal states a time after which to retry. A client that obeys it offers a request that has
waited before, so this request is preferred to new ones. Otherwise the same kind of request would be
refused again and again while the load lasts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["RefusedPrompts"]

_MAX_PROMPTS: Final = 4096
"""Prompts that are remembered; the oldest are forgotten first."""


class RefusedPrompts:
    """The prompts that were refused last, each with the time from which a retry was invited.

    A prompt is known by the hash of its last full block, which covers all blocks before it. Prompts
    without a full block are not recognised.
    """

    __slots__ = ("_due_ns",)

    def __init__(self) -> None:
        self._due_ns: dict[int, int] = {}

    def add(self, request: ScheduledRequest, due_ns: int) -> None:
        """Note a refusal that states a time for a retry."""
        hashes = request.block_hashes
        if not len(hashes):
            return
        self._due_ns.pop(hashes[-1], None)
        self._due_ns[hashes[-1]] = due_ns
        if len(self._due_ns) > _MAX_PROMPTS:
            del self._due_ns[next(iter(self._due_ns))]

    def invited(self, request: ScheduledRequest) -> bool:
        """Return True if a new request is a retry, not sent before the stated time."""
        hashes = request.block_hashes
        if not len(hashes):
            return False
        due_ns = self._due_ns.get(hashes[-1])
        return due_ns is not None and request.arrival_ns >= due_ns
