"""One client request, from its arrival to the record that it is judged by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import Targets
from goodput_core.units import NS_PER_US, ms_to_ns
from goodput_engine.router.sse import TokenObserver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from goodput_engine.router.intake import Promise
    from goodput_engine.router.room import Room

__all__ = ["RequestState", "Timings", "read_timings"]


class Timings(msgspec.Struct, frozen=True):
    """What an engine says of an answer that it did not stream, in milliseconds from its arrival."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tbt_p99_ms: float | None = None


_TIMINGS: Final = msgspec.json.Decoder(Timings)


def read_timings(text: str | None) -> Timings | None:
    """The timings of an answer's header; None where it has none, or no sensible ones."""
    if text is None:
        return None
    try:
        timings = _TIMINGS.decode(text)
    except msgspec.MsgspecError:
        return None
    values = (timings.ttft_ms, timings.tpot_ms, timings.tbt_p99_ms)
    return None if any(v is not None and not 0 <= v < 1e9 for v in values) else timings


class RequestState:
    """The mutable state of one client request; its handler is the only writer.

    Args:
        received_ns: when it came; "scheduled", for the router.
        promise: what it is held to; the default class's promise until its own is known.
        room: where its body is counted.

    Attributes:
        body: the request's bytes, for as long as they may have to be sent again.
        keys: its prompt's, for as long as it may have to be placed again.
        sent_ns: when it was last sent to a replica.
        tried: the replicas that were asked.
        retried: whether its one retry is spent.
        met_stale: whether it was sent again because a pooled connection was closed.
        response: what the client is being sent, once it has begun.
        observer: looks at the stream; None for an answer that is not streamed.
        timings: what the engine said of an answer that was not streamed.
        outcome: how it ended.
        client_fault: the HTTP status of an answer that blames the client, else None.
    """

    __slots__ = (
        "_room",
        "_taken_bytes",
        "body",
        "client_fault",
        "keys",
        "met_stale",
        "observer",
        "outcome",
        "promise",
        "received_ns",
        "response",
        "retried",
        "sent_ns",
        "timings",
        "tried",
    )

    def __init__(self, received_ns: int, promise: Promise, room: Room) -> None:
        self._room = room
        self._taken_bytes = 0
        self.received_ns = received_ns
        self.promise = promise
        self.body = b""
        self.keys: Sequence[int] = ()
        self.sent_ns: int | None = None
        self.tried: set[str] = set()
        self.retried = False
        self.met_stale = False
        self.response: web.StreamResponse | None = None
        self.observer: TokenObserver | None = None
        self.timings: Timings | None = None
        self.outcome = Outcome.ERROR
        self.client_fault: int | None = None

    def make_room(self, count: int) -> None:
        """Count that many bytes more of its body as held.

        Raises:
            Crowded: the router holds too many already.
        """
        self._room.take(count)
        self._taken_bytes += count

    def drop_body(self) -> None:
        """Its body will not be sent again."""
        self.body = b""
        self.keys = ()
        self._room.give(self._taken_bytes)
        self._taken_bytes = 0

    def watch_tokens(self) -> TokenObserver:
        """Begin to look at a stream."""
        keep_gaps = self.promise.targets.tbt_p99_ns is not None
        self.observer = TokenObserver(keep_gaps=keep_gaps)
        return self.observer

    @property
    def said_all(self) -> bool:
        """Whether the answer said that it is complete, and no error in it."""
        observer = self.observer
        return observer is not None and observer.finished and not observer.error

    def record(self, end_ns: int) -> RequestRecord:
        """What happened, in the shape that everything is judged in."""
        first_ns: int | None = None
        last_ns: int | None = None
        tokens = 0
        gaps_us: list[int] = []
        tbt_p99_us: int | None = None
        if self.observer is not None:
            first_ns, last_ns = self.observer.first_ns, self.observer.last_ns
            tokens, gaps_us = self.observer.tokens, self.observer.gaps_us
        elif self.timings is not None and self.timings.ttft_ms is not None:
            # The engine's clock starts when it gets the request, ours when the client's came.
            first_ns = (self.sent_ns or self.received_ns) + ms_to_ns(self.timings.ttft_ms)
            # A mean is all it says, so two tokens one mean apart stand for the answer.
            tokens = 1 if self.timings.tpot_ms is None else 2
            last_ns = first_ns + ms_to_ns(self.timings.tpot_ms or 0)
            if self.timings.tbt_p99_ms is not None:
                tbt_p99_us = ms_to_ns(self.timings.tbt_p99_ms) // NS_PER_US
        return RequestRecord(
            request_id="",
            slo_class=self.promise.slo_class,
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
    def measurable(self) -> Targets:
        """The targets that can be judged: all, unless a whole answer came without timings."""
        targets = self.promise.targets
        blind = self.observer is None and (self.timings is None or self.timings.ttft_ms is None)
        if self.outcome is Outcome.OK and blind:
            return Targets(e2e_ns=targets.e2e_ns)
        return targets
