"""The record of one request, on which judging, reports and intervals are based."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from goodput_core.slo.targets import Targets

__all__ = ["Outcome", "RequestRecord"]

_NOT_THE_CLIENTS: Final = frozenset({408, 429})  # a time-out and a refusal for load


class Outcome(StrEnum):
    """How a request ended; whether it met its targets is judged separately."""

    OK = "ok"
    SHED = "shed"
    """Rejected for load: 429 or 503 before the first token."""
    ERROR = "error"
    """Rejected, malformed or closed early for any other reason."""
    TIMEOUT = "timeout"
    """The answer did not end within the client's time limit."""
    CANCELLED = "cancelled"
    """The trace or the client cancelled it."""
    UNSENT = "unsent"
    """A row of the window that was never sent: the client's own failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. Times are nanoseconds since the run's zero, on one monotonic clock.

    Args:
        request_id: of the trace; pairs two runs of one trace.
        slo_class: its class; empty when the run has no classes.
        scheduled_ns: its arrival according to the trace. Latencies start here, so a slow client
            cannot hide queueing.
        sent_ns: when its bytes were passed to the socket; None if never sent.
        first_token_ns: when the first non-empty token came.
        last_token_ns: when the last non-empty token came.
        end_ns: when the answer ended, or failed.
        gaps_us: microseconds between consecutive tokens, `output_tokens - 1` of them when every
            chunk carried one token; empty where gaps were not kept.
        tbt_p99_us: nearest-rank p99 of the gaps, microseconds, if the gaps themselves were not
            kept; None if not known or if `gaps_us` has them.
        input_tokens: tokens of the prompt, as sent.
        output_tokens: tokens of the answer; reasoning tokens are tokens.
        pinned_output_tokens: tokens that the answer must have; fewer is a miss. None if the length
            is not pinned.
        outcome: how it ended.
        targets: the row's own targets; each overrides the one of the class.
        cancel_after_ns: when the trace cancels it, from `scheduled_ns` on; None if it does not.
        status: the HTTP status; None without a response.
        detail: the problem in one short sentence, without prompt text.
        replica: name of the replica that served it, if the answer has it.
        revision: of that replica, if the answer has it.
        cached_tokens: prompt tokens found in the server's prefix cache; None if not reported.
    """

    request_id: str
    slo_class: str
    scheduled_ns: int
    outcome: Outcome
    sent_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    end_ns: int | None = None
    gaps_us: Sequence[int] = ()
    tbt_p99_us: int | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    pinned_output_tokens: int | None = None
    targets: Targets = field(default_factory=Targets)
    cancel_after_ns: int | None = None
    status: int | None = None
    detail: str = ""
    replica: str = ""
    revision: str = ""
    cached_tokens: int | None = None

    @property
    def ttft_ns(self) -> int | None:
        """Time to first token from the scheduled arrival; None without a token."""
        return None if self.first_token_ns is None else self.first_token_ns - self.scheduled_ns

    @property
    def ttft_from_send_ns(self) -> int | None:
        """Time to first token from the actual send; None without a token or a send."""
        if self.first_token_ns is None or self.sent_ns is None:
            return None
        return self.first_token_ns - self.sent_ns

    @property
    def tpot_ns(self) -> float | None:
        """(last − first token) / (n − 1); None for fewer than two tokens."""
        if self.first_token_ns is None or self.last_token_ns is None or self.output_tokens < 2:
            return None
        return (self.last_token_ns - self.first_token_ns) / (self.output_tokens - 1)

    @property
    def e2e_ns(self) -> int | None:
        """Time to the end of the answer from the scheduled arrival; None if it never completed."""
        if self.outcome is not Outcome.OK or self.end_ns is None:
            return None
        return self.end_ns - self.scheduled_ns

    @property
    def lag_ns(self) -> int | None:
        """Actual minus scheduled send; None if it was never sent."""
        return None if self.sent_ns is None else self.sent_ns - self.scheduled_ns

    @property
    def client_error(self) -> bool:
        """True if the server rejected the request as wrong: 4xx other than 408 and 429."""
        return (
            self.outcome is Outcome.ERROR
            and self.status is not None
            and 400 <= self.status < 500
            and self.status not in _NOT_THE_CLIENTS
        )
