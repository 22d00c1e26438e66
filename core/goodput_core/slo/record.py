"""The record of one request, the input of judging, reports and intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from goodput_core.slo.conformance import Deviation
from goodput_core.slo.targets import Targets

__all__ = ["Outcome", "RequestRecord"]

# 4xx by which a server states a problem of its own: time-out, conflict, locked, failed dependency
# (text-generation-inference reports failed generations so), too early, too many requests, and a
# request closed by a proxy.
_SERVER_4XX: Final = frozenset({408, 409, 423, 424, 425, 429, 499})


class Outcome(StrEnum):
    """Outcome of a request, without regard to its targets."""

    OK = "ok"
    SHED = "shed"
    """Rejected for load: 429 or 503 before the first token, or dropped after it as late."""
    ERROR = "error"
    """Rejected, malformed or closed early for any other reason."""
    TIMEOUT = "timeout"
    """The response did not end within the time limit of the client."""
    CANCELLED = "cancelled"
    """The trace or the client cancelled the request."""
    UNSENT = "unsent"
    """The client never sent this row of the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The record of one request.

    Times are nanoseconds since the start of the run, on one monotonic clock.

    Args:
        request_id: identifier from the trace, which is the same in every run of that trace.
        slo_class: SLO class; empty if the run has no classes.
        scheduled_ns: arrival time according to the trace. Latencies start here, so a slow client
            cannot hide queueing.
        sent_ns: time at which the request was written to the socket, less the time that opening a
            connection for it took; None if never sent.
        first_token_ns: arrival time of the first non-empty token; None without a token.
        last_token_ns: arrival time of the last token; None without a token.
        end_ns: time at which the response ended or failed; None if never sent.
        gaps_us: microseconds between consecutive tokens, `output_tokens - 1` values if every
            chunk carried one token; empty if gaps were not recorded.
        tbt_p99_us: nearest-rank p99 of the gaps, in microseconds, if the gaps themselves were not
            recorded; None if unknown or if `gaps_us` has the gaps.
        input_tokens: prompt tokens, as sent.
        output_tokens: output tokens, reasoning tokens included; the fewest possible if the number
            is uncertain.
        most_output_tokens: the largest possible number of output tokens if the number is uncertain;
            None if it is certain.
        pinned_output_tokens: required number of output tokens; an output with fewer is a miss. None
            if the length is not pinned.
        outcome: outcome of the request.
        targets: the row's own targets; each overrides the target of the class.
        cancel_after_ns: time from `scheduled_ns` at which the trace cancels the request; None if
            the trace does not cancel it.
        status: HTTP status, or the status 4xx that a response with status 200 reported before its
            first token; None without a response.
        detail: the problem in one short sentence, without any text of the prompt.
        replica: name of the replica that served the request; empty if the response lacks it.
        revision: revision of that replica; empty if the response lacks it.
        reported_input_tokens: prompt tokens that the server counted; None if not reported.
        cached_tokens: prompt tokens found in the server's prefix cache; None if not reported.
        retries: how often the request was sent again after a failure.
        deviations: ways in which the response does not conform to the API or to the request.
        sender: number of the process that sent the request; 0 if one process sent all of them.
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
    most_output_tokens: int | None = None
    pinned_output_tokens: int | None = None
    targets: Targets = field(default_factory=Targets)
    cancel_after_ns: int | None = None
    status: int | None = None
    detail: str = ""
    replica: str = ""
    revision: str = ""
    reported_input_tokens: int | None = None
    cached_tokens: int | None = None
    retries: int = 0
    deviations: tuple[Deviation, ...] = ()
    sender: int = 0

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
        """Time from the scheduled arrival to the end of the response; None if it is incomplete."""
        if self.outcome is not Outcome.OK or self.end_ns is None:
            return None
        return self.end_ns - self.scheduled_ns

    @property
    def lag_ns(self) -> int | None:
        """Send lag: actual minus scheduled send time; None if the request was never sent."""
        return None if self.sent_ns is None else self.sent_ns - self.scheduled_ns

    @property
    def client_error(self) -> bool:
        """True if the server rejected the request as invalid, or redirected it to another address.

        These are the statuses 3xx, and 4xx that blame the request: not 408, 409, 423, 424, 425, 429
        and 499, by which the server states a problem of its own.
        """
        return (
            self.outcome is Outcome.ERROR
            and self.status is not None
            and 300 <= self.status < 500
            and self.status not in _SERVER_4XX
        )

    @property
    def never_connected(self) -> bool:
        """True if no connection for the request was opened before it failed or its time ended."""
        failed = self.outcome is Outcome.ERROR or self.outcome is Outcome.TIMEOUT
        return failed and self.sent_ns is None and self.status is None

    @property
    def failed_without_response(self) -> bool:
        """True if the request failed without an HTTP response, because its connection failed."""
        return self.outcome is Outcome.ERROR and self.status is None
