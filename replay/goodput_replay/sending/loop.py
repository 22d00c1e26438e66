"""One sender: an event loop that sends its share of a run and measures its own delays.

A run has one sender in the process of the command, or several in processes of their own. Both use
this module, so a request is sent in the same way, whatever the number of senders.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, Self

from yarl import URL

from goodput_core.slo.stalls import Stall
from goodput_core.spec.choices import Endpoint
from goodput_replay.plan import RequestPlan
from goodput_replay.runs.length_pinning import LengthPinning
from goodput_replay.runs.prompt_kind import PromptKind
from goodput_replay.sending.body import PreparedRequest, RequestRenderer
from goodput_replay.sending.client.request import RequestClient, SendingPolicy
from goodput_replay.sending.lookahead import Lookahead
from goodput_replay.sending.pacer import open_pacer
from goodput_replay.sending.preflight import ModelNames
from goodput_replay.sending.process import LoopWatch, gc_paused
from goodput_replay.sending.prompts import PromptRenderer, make_prompts
from goodput_replay.sending.sender import ClosedLoopSender, OpenLoopSender
from goodput_replay.sending.session_lookahead import SessionLookahead
from goodput_replay.shares import ALL, Share

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import ClientSession

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.sessions import FollowUps

__all__ = ["SenderPlan", "SenderProgress", "SenderUsage", "Senders", "SendingLoop"]

_AHEAD_BYTES: Final = 256 << 20
# Longer than any trace: in a closed loop, the times of the trace do not matter.
_ANY_TIME_NS: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderPlan:
    """Inputs of a sender, which may contain a key.

    Args:
        requests: requests of the run.
        share: the requests that this sender sends.
        urls: URLs of the endpoint at each target.
        endpoint: the API to call.
        headers: headers of every request.
        ca_file: certificates to trust, PEM; None for those of the system.
        policy: rules for all requests.
        pinning: how output lengths are pinned.
        uuids: True to send a UUID made from each request id.
        models: model names to send.
        prompt: form of the prompts.
        words: words of the tokenizer; None without one.
        overhead_tokens: tokens that the target adds to a text of these words.
        salt: salt of the prompts.
        concurrency: number of clients in a closed loop; None for an open loop.
        causal: True if requests of a session wait for the one before them.
        ahead_bytes: maximum total size of bodies that are prepared and not yet sent.
    """

    requests: RequestPlan
    share: Share = ALL
    urls: tuple[str, ...]
    endpoint: Endpoint
    headers: Mapping[str, str]
    ca_file: Path | None
    policy: SendingPolicy
    pinning: LengthPinning
    uuids: bool = False
    models: ModelNames
    prompt: PromptKind
    words: tuple[str, ...] | None = None
    overhead_tokens: int = 0
    salt: str
    concurrency: int | None
    causal: bool = False
    ahead_bytes: int = _AHEAD_BYTES

    def part(self, index: int, count: int) -> SenderPlan:
        """Return the plan of one of `count` senders that divide this share."""
        first = index % len(self.urls)
        return replace(
            self,
            share=self.share.part(index, count),
            # Otherwise every sender would start with the first target.
            urls=self.urls[first:] + self.urls[:first],
            policy=replace(self.policy, sender=index),
            ahead_bytes=self.ahead_bytes // count,
        )

    def make_prompts(self) -> PromptRenderer:
        """Return the renderer of the prompts."""
        return make_prompts(self.prompt, self.endpoint, self.salt, self.words, self.overhead_tokens)

    def make_renderer(self) -> RequestRenderer:
        """Return the renderer of the requests."""
        return RequestRenderer(
            endpoint=self.endpoint,
            prompts=self.make_prompts(),
            pinning=self.pinning,
            model_for=self.models,
            unnamed_class=self.requests.slo.other,
            uuids=self.uuids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderProgress:
    """Progress of one or more senders.

    Args:
        sent: requests sent.
        in_flight: requests that were sent and have not ended.
        loop_lag_p99_ns, loop_lag_max_ns: delay of the event loop, the largest of all senders.
    """

    sent: int = 0
    in_flight: int = 0
    loop_lag_p99_ns: int = 0
    loop_lag_max_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderUsage:
    """Resource usage of a sender, when all of its requests have ended.

    Args:
        sent: requests sent.
        cpu_ns: CPU time of its process from the start of the run.
        peak_in_flight: maximum number of its requests in flight.
        loop_lag_p99_ns, loop_lag_max_ns: delay of its event loop.
        stalls: stalls of its event loop, on the monotonic clock.
        first_judged_ns: in a closed loop, time of the first request that is not a warm-up request,
            since time zero; None if there is none, and in an open loop.
    """

    sent: int
    cpu_ns: int
    peak_in_flight: int
    loop_lag_p99_ns: int
    loop_lag_max_ns: int
    stalls: tuple[Stall, ...]
    first_judged_ns: int | None = None


class Senders(Protocol):
    """The senders of a run; an asynchronous context manager.

    On entry, the first requests are prepared.
    """

    async def __aenter__(self) -> Self:
        """Prepare the first requests."""
        ...

    async def __aexit__(self, *_: object) -> None:
        """Release everything."""
        ...

    async def run(self, zero_ns: int) -> None:
        """Send all requests and wait for the last response.

        Cancellation stops sending and cancels the requests in flight, which are still recorded.

        Args:
            zero_ns: time zero of the run, on the monotonic clock.
        """
        ...

    def progress(self) -> SenderProgress:
        """Return the current progress."""
        ...

    def usage(self) -> tuple[SenderUsage, ...]:
        """Return the usage of each sender by its number; empty before `run`."""
        ...


class SendingLoop:
    """Sends on the running event loop; see `Senders`.

    Args:
        plan: inputs of this sender.
        session: connection pool with the headers of every request.
        on_record: called in the event loop with each record, and True for a warm-up request; an
            exception ends the run and is raised by `run`.
        follow_ups: follow-ups of the plan's share; None if all arrivals are independent.
    """

    def __init__(
        self,
        plan: SenderPlan,
        session: ClientSession,
        on_record: Callable[[RequestRecord, bool], None],
        follow_ups: FollowUps | None = None,
    ) -> None:
        client = RequestClient(session, [URL(url) for url in plan.urls], plan.policy)
        requests = filter(plan.share.holds, plan.requests.requests())
        render = plan.make_renderer().render
        self._on_record = on_record
        self._pacer = open_pacer()
        self._watch = LoopWatch()
        self._stack = AsyncExitStack()
        self._usage: tuple[SenderUsage, ...] = ()
        self._first_judged_ns: Callable[[], int | None] = lambda: None
        self._lookahead: Lookahead
        self._sessions: SessionLookahead | None = None
        if follow_ups is not None:
            self._sender = OpenLoopSender(client.run, self._pacer, self._record)
            self._lookahead = self._sessions = SessionLookahead(
                follow_ups.starts(), follow_ups, render, self._pacer, max_bytes=plan.ahead_bytes
            )
        elif plan.concurrency is None:
            self._sender = OpenLoopSender(client.run, self._pacer, self._record)
            self._lookahead = Lookahead(requests, render, max_bytes=plan.ahead_bytes)
        else:
            clients = plan.concurrency
            closed = ClosedLoopSender(client.run, self._pacer, self._record, clients=clients)
            self._sender = closed
            self._first_judged_ns = lambda: closed.first_judged_ns
            self._lookahead = Lookahead(
                requests, render, ahead_ns=_ANY_TIME_NS, max_bytes=plan.ahead_bytes
            )

    async def __aenter__(self) -> Self:
        """Prepare the first requests, and pause garbage collection."""
        self._stack.callback(self._pacer.close)
        self._stack.callback(self._lookahead.close)
        try:
            await self._lookahead.fill()
        except BaseException:
            await self._stack.aclose()
            raise
        self._stack.enter_context(gc_paused())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop preparing requests, and resume garbage collection."""
        await self._stack.aclose()

    async def run(self, zero_ns: int) -> None:
        """Send all requests; see `Senders.run`."""
        spent_ns = -time.process_time_ns()
        if self._sessions is not None:
            self._sessions.begin(zero_ns)
        watching = asyncio.ensure_future(self._watch.run())
        try:
            await self._sender.run(self._lookahead, zero_ns)
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            spent_ns += time.process_time_ns()
            progress = self.progress()
            self._usage = (
                SenderUsage(
                    sent=progress.sent,
                    cpu_ns=spent_ns,
                    peak_in_flight=self._sender.peak_in_flight,
                    loop_lag_p99_ns=progress.loop_lag_p99_ns,
                    loop_lag_max_ns=progress.loop_lag_max_ns,
                    stalls=tuple(self._watch.stalls),
                    first_judged_ns=self._first_judged_ns(),
                ),
            )

    def progress(self) -> SenderProgress:
        """Return the current progress."""
        return SenderProgress(
            sent=self._sender.sent,
            in_flight=self._sender.in_flight,
            loop_lag_p99_ns=self._watch.lateness.quantile_ns(0.99),
            loop_lag_max_ns=self._watch.lateness.max_ns,
        )

    def usage(self) -> tuple[SenderUsage, ...]:
        """Return the usage of this sender; empty before `run`."""
        return self._usage

    def _record(self, request: PreparedRequest, record: RequestRecord) -> None:
        if self._sessions is not None:
            assert record.end_ns is not None
            self._sessions.ended(request.planned, record.end_ns)
        self._on_record(record, request.planned.warmup)
