"""One client request on its way through the router, and the record by which it is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from aiohttp import web

from goodput_core.slo.importance import Importance
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import Targets
from goodput_core.tenants.admission import TenantRequest
from goodput_core.units import NS_PER_US, ms_to_ns
from goodput_engine.openai.headers import RequestSLO
from goodput_engine.openai.sse import TokenObserver
from goodput_engine.request_bodies import MemoryReservation

__all__ = ["ProxiedRequest", "TenantWorkload", "Timings", "read_timings"]


_MAX_TOKENS: Final = 1 << 30
"""Bound of a replica's report of tokens, so that one response cannot spoil a counter."""


class Timings(msgspec.Struct, frozen=True):
    """An engine's timings of a non-streamed response, in milliseconds.

    Args:
        ttft_ms: time from the arrival at the engine to the first token.
        tpot_ms: mean time per token after the first.
        tbt_p99_ms: 99th percentile of the times between tokens; the Goodput engine does not send
            it.
        prompt_tokens, output_tokens: numbers of tokens.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tbt_p99_ms: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0


_TIMINGS: Final = msgspec.json.Decoder(Timings)


def read_timings(text: str | None) -> Timings | None:
    """Return the timings of a response header; None if absent or invalid."""
    if text is None:
        return None
    try:
        timings = _TIMINGS.decode(text)
    except (ValueError, RecursionError):
        return None
    values = (
        timings.ttft_ms,
        timings.tpot_ms,
        timings.tbt_p99_ms,
        timings.prompt_tokens,
        timings.output_tokens,
    )
    return None if any(v is not None and not 0 <= v < 1e9 for v in values) else timings


class TenantWorkload(msgspec.Struct, frozen=True):
    """The expected work of a request.

    Args:
        prompt_tokens: length of the prompt; that of a text is estimated from its bytes.
        max_output_tokens: maximum length of all outputs; None if the request has none.
        streamed: True if the request asks for a stream.
    """

    prompt_tokens: int
    max_output_tokens: int | None = None
    streamed: bool = False


@dataclass(slots=True, eq=False)
class ProxiedRequest:
    """The mutable state of one client request; only its handler writes it.

    Args:
        received_ns: arrival time; `receive` replaces it with the end of the upload.
        slo: class and targets; those of the default class until the request's own are known.
        memory: reservation of the body's bytes.
        uploaded: True if the complete request was received.
        body: bytes of the request; empty once they cannot be sent again.
        keys: hashes of the prompt's leading blocks, for placement; empty once the request cannot be
            placed again.
        session: identifies the session of the request, for placement; None if it has none.
        sent_ns: time of the last attempt; None before the first.
        tried: names of the replicas that got the request.
        retried: True if the single retry is used.
        resent: True if the request was sent again because a pooled connection was closed.
        response: the response to the client; None before it begins.
        observer: observer of the stream; None for a response that is not streamed.
        timings: the engine's timings of a non-streamed response; None if it has none.
        outcome: the outcome so far.
        client_error: HTTP status of a response to a client error; None otherwise.
        tenant: the tenant that sent the request; None without tenants, or if it has no valid key.
        tenant_request: use of the service by an admitted request of a tenant; None before its
            admission.
        reads_slowly: True if the client reads its stream more slowly than the replica sends it.
    """

    received_ns: int
    slo: RequestSLO
    memory: MemoryReservation
    uploaded: bool = False
    body: bytes = b""
    keys: Sequence[int] = ()
    session: bytes | None = None
    sent_ns: int | None = None
    tried: set[str] = field(default_factory=set)
    retried: bool = False
    resent: bool = False
    response: web.StreamResponse | None = None
    observer: TokenObserver | None = None
    timings: Timings | None = None
    outcome: Outcome = Outcome.ERROR
    client_error: int | None = None
    tenant: str | None = None
    tenant_request: TenantRequest | None = None
    reads_slowly: bool = False

    def receive(self, body: bytes, now_ns: int) -> None:
        """Store the body of a completely received request.

        TTFT and E2E are measured from this time, so that a client's slow upload does not count
        against the service.
        """
        self.body = body
        self.uploaded = True
        self.received_ns = now_ns

    def drop_body(self) -> None:
        """Free the body, which will not be sent again."""
        self.body = b""
        self.keys = ()
        self.memory.release()

    def importance(self, now_ns: int) -> Importance:
        """Return the importance of the request for a saturated replica."""
        return Importance.of(
            self.slo.targets,
            priority=self.slo.priority,
            weight=self.slo.weight,
            waited_ns=now_ns - self.received_ns,
        )

    def is_overdue(self, now_ns: int) -> bool:
        """True if the target of the first token has passed."""
        due_ns = self.slo.targets.first_token_ns
        return due_ns is not None and now_ns - self.received_ns > due_ns

    def watch_tokens(self) -> TokenObserver:
        """Return a new observer for a stream."""
        keep_gaps = self.slo.targets.tbt_p99_ns is not None
        self.observer = TokenObserver(keep_gaps=keep_gaps)
        return self.observer

    @property
    def complete(self) -> bool:
        """True if the stream reported its end and contained no error."""
        observer = self.observer
        return observer is not None and observer.finished and not observer.error

    def record(self, end_ns: int) -> RequestRecord:
        """Return the record that is judged."""
        first_ns: int | None = None
        last_ns: int | None = None
        tokens = 0
        gaps_us: list[int] = []
        tbt_p99_us: int | None = None
        if self.observer is not None:
            first_ns, last_ns = self.observer.first_ns, self.observer.last_ns
            tokens, gaps_us = self.observer.tokens, self.observer.gaps_us
        elif self.timings is not None and self.timings.ttft_ms is not None:
            # The engine's times start when the engine receives the request.
            first_ns = (self.sent_ns or self.received_ns) + ms_to_ns(self.timings.ttft_ms)
            # Only the mean is known, so represent the response by two tokens one mean apart.
            tokens = 1 if self.timings.tpot_ms is None else 2
            last_ns = first_ns + ms_to_ns(self.timings.tpot_ms or 0)
            if self.timings.tbt_p99_ms is not None:
                tbt_p99_us = ms_to_ns(self.timings.tbt_p99_ms) // NS_PER_US
        return RequestRecord(
            request_id="",
            slo_class=self.slo.slo_class,
            scheduled_ns=self.received_ns,
            sent_ns=self.sent_ns,
            first_token_ns=first_ns,
            last_token_ns=last_ns,
            end_ns=end_ns,
            gaps_us=gaps_us,
            tbt_p99_us=tbt_p99_us,
            output_tokens=tokens,
            outcome=self.outcome,
        )

    @property
    def tpot_ns(self) -> float | None:
        """Mean time per token after the first; None without two tokens."""
        observer = self.observer
        if observer is None:
            timings = self.timings
            return None if timings is None or timings.tpot_ms is None else timings.tpot_ms * 1e6
        if observer.tokens < 2 or observer.first_ns is None or observer.last_ns is None:
            return None
        return (observer.last_ns - observer.first_ns) / (observer.tokens - 1)

    @property
    def reported_tokens(self) -> tuple[int, int]:
        """Prompt and output tokens, as far as the replica reported plausible numbers."""
        prompt, output = 0, 0
        if self.observer is not None:
            prompt, output = self.observer.prompt_tokens, self.observer.tokens
        elif self.timings is not None:
            prompt, output = self.timings.prompt_tokens, self.timings.output_tokens
        return max(0, min(prompt, _MAX_TOKENS)), max(0, min(output, _MAX_TOKENS))

    @property
    def measurable_targets(self) -> Targets:
        """The targets that can be judged: only E2E for a non-streamed response without timings."""
        targets = self.slo.targets
        no_tokens_seen = self.observer is None and (
            self.timings is None or self.timings.ttft_ms is None
        )
        if self.outcome is Outcome.OK and no_tokens_seen:
            return Targets(e2e_ns=targets.e2e_ns)
        return targets
