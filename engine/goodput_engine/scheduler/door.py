"""Who may come in at all: lengths that can never be served, and a queue that is full.

Refusing here is what keeps the scheduler free of deadlock: whatever waits can run when it is
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from goodput_engine.scheduler.stats import AdmissionRate

if TYPE_CHECKING:
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["Door", "Refusal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A request that never waits.

    Args:
        reason: "too_long", "invalid", "queue_full", "memory_full", or a policy's "unattainable".
        detail: one sentence for the client.
        retry_after_s: when to try again; 0 where trying again cannot help.
    """

    reason: str
    detail: str
    retry_after_s: int = 0

    @property
    def overload(self) -> bool:
        """Whether the same request may be served at another time: it was shed."""
        return self.retry_after_s > 0


class Door:
    """Checks requests before they wait.

    Args:
        max_total_tokens: of prompt and answer together: the model's bound, or what the KV pool
            holds plus the last token, which is never stored.
    """

    __slots__ = ("max_total_tokens", "rate")

    def __init__(self, *, max_total_tokens: int) -> None:
        self.max_total_tokens = max_total_tokens
        self.rate = AdmissionRate()

    def check(
        self,
        request: ScheduledRequest,
        *,
        waiting: int,
        max_waiting: int,
        now_ns: int,
    ) -> Refusal | None:
        """Why this request may not wait, or None.

        Args:
            request: it.
            waiting: requests that would wait for more than the next plan, it included.
            max_waiting: how many may.
            now_ns: the time.
        """
        prompt, asked, bound = (
            request.input_tokens,
            request.max_output_tokens,
            self.max_total_tokens,
        )
        if prompt < 1 or (asked is not None and asked < 1):
            return Refusal(
                reason="invalid",
                detail="a request needs at least one prompt token and one output token",
            )
        if prompt >= bound:
            return Refusal(
                reason="too_long",
                detail=f"the prompt has {prompt} tokens; prompt and answer together have at most "
                f"{bound} here",
            )
        if asked is not None and prompt + asked > bound:
            return Refusal(
                reason="too_long",
                detail=f"{prompt} prompt tokens and {asked} output tokens are more than the "
                f"{bound} that prompt and answer have together here; ask for at most "
                f"{bound - prompt}",
            )
        if waiting > max_waiting:
            return Refusal(
                reason="queue_full",
                detail=f"{waiting - 1} requests wait already, and {max_waiting} may; "
                "try again later",
                retry_after_s=self.rate.retry_after_s(waiting, now_ns),
            )
        return None

    def memory_full(self, waiting: int, now_ns: int) -> Refusal:
        """Why a request may not wait for memory of which there is too little already.

        Args:
            waiting: requests that would wait, it included.
            now_ns: the time.
        """
        return Refusal(
            reason="memory_full",
            detail="too many requests wait for memory already; try again later",
            retry_after_s=self.rate.retry_after_s(waiting, now_ns),
        )

    def output_limit(self, request: ScheduledRequest) -> int:
        """Output tokens at most, for a request that passed."""
        room = self.max_total_tokens - request.input_tokens
        return room if request.max_output_tokens is None else request.max_output_tokens
