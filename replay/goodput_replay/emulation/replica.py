"""One replica of a fleet in virtual time: an engine core and its requests.

The fleet advances a replica up to a time, and receives each request that ends. The cost of
recording a step does not depend on the number of decoding requests: a step with decodes is an
*epoch*, and its end time is recorded once for all of them. A request stores the spans of epochs in
which it was in the decode batch. Its token times are looked up when it ends.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from goodput_core.placement import ReplicaLoad, is_saturated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from goodput_engine.core.engine_core import EngineCore
    from goodput_engine.messages import Rejected, Submit
    from goodput_engine.scheduler.fast_forward import SkippedSteps
    from goodput_engine.scheduler.plan import StepOutcome, StepPlan
    from goodput_replay.plan import PlannedRequest

__all__ = ["RemovedRequest", "ReplicaRequest", "VirtualReplica"]


class ReplicaRequest:
    """A request on a replica.

    Args:
        planned: the request of the trace.
        submit: submission of the request to an engine.
        replica: replica that serves the request.
        earlier: times of the tokens emitted by earlier replicas.
        cached_tokens: prompt tokens found in the prefix cache of the first replica; None if
            `replica` is the first one.
        retried: True if another replica rejected the request before.

    Attributes:
        rid: request id in the engines.
        earlier: as above; updated until a transfer to this replica is complete.
        spans: token times on this replica.
    """

    __slots__ = (
        "cached_tokens",
        "earlier",
        "planned",
        "replica",
        "retried",
        "rid",
        "spans",
        "submit",
    )

    def __init__(
        self,
        planned: PlannedRequest,
        submit: Submit,
        replica: VirtualReplica,
        *,
        earlier: Sequence[int] = (),
        cached_tokens: int | None = None,
        retried: bool = False,
    ) -> None:
        self.earlier = earlier
        self.planned: Final = planned
        self.submit: Final = submit
        self.replica: Final = replica
        self.cached_tokens: Final = cached_tokens
        self.retried: Final = retried
        self.rid: Final = submit.rid
        self.spans: Final = TokenSpans()


class RemovedRequest(NamedTuple):
    """A request that the engine rejected after its admission.

    Args:
        request: the request.
        rejected: the engine's message.
        times: times of the tokens that it had emitted, shape `[num_tokens]`.
        at_ns: time of the rejection.
    """

    request: ReplicaRequest
    rejected: Rejected
    times: NDArray[np.int64]
    at_ns: int


class VirtualReplica:
    """One replica.

    Args:
        name: name, unique within the fleet during the run.
        core: engine core, owned by the replica.
        created_ns: creation time.
        ready_ns: time from which the replica accepts requests.
        fast_forward: True to compute predictable steps at once; affects speed only.
        ended: called with each completed request, its token times and the number of prompt
            tokens found in the prefix cache.

    Attributes:
        events: number of engine calls for steps.
        due_ns: time of the next engine event; None if there is none.
        changed: True if the engine must plan before its next event; cleared by `settle`.
        draining: True if the replica admits no new requests.
        removed: requests that the engine removed and the fleet has not recorded yet.
    """

    def __init__(
        self,
        name: str,
        core: EngineCore,
        *,
        created_ns: int,
        ready_ns: int,
        fast_forward: bool,
        ended: Callable[[ReplicaRequest, NDArray[np.int64], int], None],
    ) -> None:
        self.name: Final = name
        self.core: Final = core
        self.created_ns: Final = created_ns
        self.ready_ns: Final = ready_ns
        self.due_ns: int | None = None
        self.changed = False
        self.draining = False
        self.removed: list[RemovedRequest] = []
        # The engine's own list: usually empty, and read after each step.
        self._removals = core.scheduler.admission.removed
        self.events = 0
        self._fast_forward = fast_forward
        self._ended = ended
        self._requests: dict[int, ReplicaRequest] = {}
        self._epochs = EpochTimes()

    @property
    def in_flight(self) -> int:
        """Number of requests on the replica."""
        return len(self._requests)

    def load(self, now_ns: int) -> ReplicaLoad:
        """Return the exact current load, as placement reads it."""
        scheduler = self.core.scheduler
        waiting, limits = len(scheduler.waiting), scheduler.limits
        total_blocks = scheduler.total_blocks
        used_blocks = total_blocks - scheduler.free_blocks
        return ReplicaLoad(
            name=self.name,
            in_flight=len(self._requests),
            waiting=waiting,
            kv_used_blocks=used_blocks,
            kv_total_blocks=total_blocks,
            ready=self.ready_ns <= now_ns,
            saturated=is_saturated(
                running=scheduler.num_requests - waiting,
                max_num_seqs=limits.max_num_seqs,
                waiting=waiting,
                max_waiting=limits.max_waiting,
                kv_used_blocks=used_blocks,
                kv_total_blocks=total_blocks,
            ),
            draining=self.draining,
            displaceable=scheduler.admission.displaceable(),
        )

    # --- requests: call `settle` after these methods, before time advances --------------------
    def submit(
        self, request: ReplicaRequest, submit: Submit, now_ns: int, *, holds_blocks: bool = False
    ) -> Rejected | None:
        """Submit a request.

        Args:
            request: the request.
            submit: submission of the request, or of its prompt alone.
            now_ns: the current time.
            holds_blocks: True to hold the request's blocks after its end, until `release`.
        """
        rejected = self.core.submit(submit, now_ns, holds_blocks=holds_blocks)
        if rejected is None:
            self._requests[request.rid] = request
            self.changed = True
            if self._removals:
                self._note_removed(now_ns)
        return rejected

    def hold(self, request: ReplicaRequest) -> None:
        """Count an ended request, which holds its blocks, as in flight until `release`."""
        self._requests[request.rid] = request

    def release(self, rid: int) -> None:
        """Free the blocks of an ended or detached request."""
        self.core.release_held(rid)
        self._requests.pop(rid, None)
        self.changed = True

    def reserve(self, request: ReplicaRequest, now_ns: int, *, first_token_ns: int) -> bool:
        """Reserve blocks for a request from another replica; False if too few blocks are free."""
        reserved = self.core.reserve_transfer(
            request.submit, now_ns, emitted=len(request.earlier), first_token_ns=first_token_ns
        )
        if reserved:
            self._requests[request.rid] = request
        return reserved

    def finish_transfer(self, rid: int) -> None:
        """Start decoding a request whose reserved blocks are filled."""
        self.core.finish_transfer(rid)
        self.changed = True

    def cancel(self, request: ReplicaRequest) -> NDArray[np.int64]:
        """Cancel a request and return its token times."""
        self.core.cancel(request.rid)
        del self._requests[request.rid]
        self.changed = True
        return self.times(request)

    def end_input(self) -> None:
        """Stop waiting for larger batches, as no more requests will arrive."""
        self.core.scheduler.end_input()
        self.changed = True

    def find(self, rid: int) -> ReplicaRequest | None:
        """Return a request that is on this replica, or has a reservation; None if there is none."""
        return self._requests.get(rid)

    def times(self, request: ReplicaRequest, output_tokens: int | None = None) -> NDArray[np.int64]:
        """Return all token times of a request, also from earlier replicas; shape `[num_tokens]`.

        Args:
            request: the request.
            output_tokens: number of tokens of the request, as steps can compute more after its
                end; None for all tokens so far.
        """
        earlier = request.earlier
        if not len(earlier):
            return self._epochs.tokens(request.spans, output_tokens)
        here = None if output_tokens is None else output_tokens - len(earlier)
        times = self._epochs.tokens(request.spans, here)
        return np.concatenate((np.array(earlier, dtype=np.int64), times))

    # --- steps -------------------------------------------------------------------------------
    def run(self, until_ns: int) -> None:
        """Run every step that ends before `until_ns`."""
        core = self.core
        while self.due_ns is not None and self.due_ns < until_ns:
            skipped = core.fast_forward(until_ns) if self._fast_forward else None
            if skipped is not None:
                self._record_skipped(skipped)
            else:
                outcome = core.advance(self.due_ns)
                if outcome is not None:
                    self._record(outcome)
                if self._removals:
                    self._note_removed(self.due_ns)
            self.events += 1
            self.due_ns = core.next_event_ns()

    def settle(self, now_ns: int) -> None:
        """Complete every step that ends now, and plan the next steps."""
        core = self.core
        self.changed = False
        while True:
            outcome = core.advance(now_ns)
            if outcome is not None:
                self._record(outcome)
            if self._removals:
                self._note_removed(now_ns)
            self.events += 1
            self.due_ns = core.next_event_ns()
            if self.due_ns is None or self.due_ns > now_ns:
                return

    def _note_removed(self, at_ns: int) -> None:
        """Forget the requests that the engine has removed."""
        for rejected in self.core.take_rejected():
            request = self._requests.pop(rejected.rid)
            removed = RemovedRequest(request, rejected, self.times(request), at_ns)
            self.removed.append(removed)

    def _record_skipped(self, skipped: SkippedSteps) -> None:
        for plan in skipped.plans:
            self._update_spans(plan)
        self._epochs.extend(skipped.ends_ns)
        self._trim()

    def _record(self, outcome: StepOutcome) -> None:
        """Record the token times of a step, and report the requests that it completed."""
        plan, at_ns = outcome.plan, outcome.result.at_ns
        requests = self._requests
        if plan.left or plan.joined:
            self._update_spans(plan)
        if plan.decode_epoch:
            self._epochs.append(at_ns)
            self._trim()
        for chunk in plan.chunks:
            if chunk.samples and chunk.rid in requests:
                requests[chunk.rid].spans.single(at_ns)
        for progress in outcome.progress:
            if progress.finish_reason is None:
                continue
            scheduled = progress.request
            request = requests.pop(scheduled.rid)
            cached_tokens = request.cached_tokens
            if cached_tokens is None:
                cached_tokens = scheduled.cached_tokens
            self._ended(request, self.times(request, scheduled.output_tokens), cached_tokens)

    def _update_spans(self, plan: StepPlan) -> None:
        """Update the spans of requests that join or leave the decode batch with a plan."""
        requests = self._requests
        last = plan.decode_epoch - 1 if plan.decode_epoch else self._epochs.last
        for rid in plan.left:
            if rid in requests:
                requests[rid].spans.leave(last)
        for join in plan.joined:
            if join.rid in requests:
                requests[join.rid].spans.join(plan.decode_epoch)

    def _trim(self) -> None:
        if self._epochs.trim_due:
            self._epochs.trim(request.spans for request in self._requests.values())


_OPEN: Final = 1 << 62
_TRIM_AFTER: Final = 1024


class TokenSpans:
    """Tokens of one request, in order: single tokens, and spans of epochs with one token each."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        # (time, -1) is a single token; (first epoch, last epoch) is a span.
        self.parts: list[tuple[int, int]] = []

    def single(self, at_ns: int) -> None:
        """Add the token that the last chunk of a prompt emits."""
        self.parts.append((at_ns, -1))

    def join(self, epoch: int) -> None:
        """Start a span at this epoch; the span stays open until `leave`."""
        self.parts.append((epoch, _OPEN))

    def leave(self, epoch: int) -> None:
        """End the open span with this epoch; do nothing if no span is open."""
        if not self.parts:
            return
        first, last = self.parts[-1]
        if last == _OPEN:
            self.parts[-1] = (first, epoch)

    @property
    def first_epoch(self) -> int:
        """First epoch whose time is needed; a very large number if there are no spans."""
        return min((first for first, last in self.parts if last >= 0), default=_OPEN)


class EpochTimes:
    """End times of the epochs of one replica, numbered from 1.

    Attributes:
        last: number of the latest epoch.
    """

    __slots__ = ("_discarded", "_times", "_trim_at", "last")

    def __init__(self) -> None:
        self.last = 0
        self._discarded = 0
        """Number of discarded epochs."""
        self._times = array("q")
        self._trim_at = _TRIM_AFTER

    def append(self, at_ns: int) -> None:
        """Append the end time of the next epoch."""
        self.last += 1
        self._times.append(at_ns)

    def extend(self, ends_ns: array[int]) -> None:
        """Append the end times of the next epochs."""
        self.last += len(ends_ns)
        self._times.extend(ends_ns)

    @property
    def trim_due(self) -> bool:
        """True if `trim` is worth its cost."""
        return len(self._times) >= self._trim_at

    def trim(self, live: Iterable[TokenSpans]) -> None:
        """Discard the epochs before the first span of any live request."""
        keep_from = min((spans.first_epoch for spans in live), default=_OPEN)
        obsolete = min(keep_from - 1, self.last) - self._discarded
        if obsolete > 0:
            del self._times[:obsolete]
            self._discarded += obsolete
        # Trim again only after the size has doubled, which amortises the cost.
        self._trim_at = 2 * len(self._times) + _TRIM_AFTER

    def tokens(self, spans: TokenSpans, limit: int | None = None) -> NDArray[np.int64]:
        """Return the token times of a request so far, shape `[num_tokens]`.

        Args:
            spans: spans of the request.
            limit: maximum number of tokens, as steps can compute more after the end of the
                request; None for all tokens.
        """
        pieces = array("q")
        for first, last in spans.parts:
            if last < 0:
                pieces.append(first)
            else:
                start = first - 1 - self._discarded
                pieces += self._times[start : min(last, self.last) - self._discarded]
        times: NDArray[np.int64] = np.frombuffer(pieces, dtype=np.int64)
        return times if limit is None else times[:limit]
