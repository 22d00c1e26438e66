"""Retries of refused requests, which are recognised by their prompts.

A refusal states a time after which to retry. A client that obeys it offers a request that has
waited before, so this request is preferred to new ones. Otherwise the same kind of request would be
refused again and again while the load lasts.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["RefusedPrompts"]

_MAX_REFUSALS: Final = 4096
"""Refusals that are remembered; those of the oldest prompt are forgotten first."""


class RefusedPrompts:
    """The last refusals by prompt, each with the time from which a retry was invited.

    A prompt is known by its class, its length, and the hash of its last full block, which covers
    all blocks before it. Prompts without a full block are not recognised. Equal prompts of several
    clients, and questions of the same length after the same system prompt, cannot be distinguished,
    so each refusal invites one retry.
    """

    __slots__ = ("_due_ns", "_refusals")

    def __init__(self) -> None:
        self._due_ns: dict[tuple[str, int, int], deque[int]] = {}
        self._refusals = 0

    def add(self, request: ScheduledRequest, due_ns: int) -> None:
        """Note a refusal that states a time for a retry."""
        if not len(request.block_hashes):
            return
        self._due_ns.setdefault(_prompt(request), deque()).append(due_ns)
        self._refusals += 1
        if self._refusals > _MAX_REFUSALS:
            self._take(next(iter(self._due_ns)))

    def accepts_invitation(self, request: ScheduledRequest) -> bool:
        """Return True if a new request is a retry, not sent before the stated time.

        The invitation then no longer exists, also if the retry was too early: if this one is
        refused, too, its client waits for the time that the new refusal states.
        """
        if not len(request.block_hashes):
            return False
        due_ns = self._take(_prompt(request))
        return due_ns is not None and request.arrival_ns >= due_ns

    def _take(self, prompt: tuple[str, int, int]) -> int | None:
        """Remove the oldest refusal of a prompt, and return when its retry is due."""
        refused = self._due_ns.get(prompt)
        if refused is None:
            return None
        self._refusals -= 1
        due_ns = refused.popleft()
        if not refused:
            del self._due_ns[prompt]
        return due_ns


def _prompt(request: ScheduledRequest) -> tuple[str, int, int]:
    return request.slo_class, request.input_tokens, request.block_hashes[-1]
