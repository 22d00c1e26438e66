"""One replica of a fleet in virtual time: the engine core that serves, and who is on it.

It is stepped from outside, up to an instant or at one, and hands over each request that ends.
Nothing in it visits a request because of a token.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

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

__all__ = ["EpochTimes", "TokenSpans", "VirtualReplica", "Visit"]


class Visit:
    """A request on a replica.

    Args:
        planned: it.
        rid: its number in the engines.
        replica: where it is.
        earlier: when it got the tokens that it brought along from another replica.

    Attributes:
        earlier: grows until it is here for good.
        spans: when it gets those that it gets here.
        cached_tokens: of its prompt, found in a cache elsewhere.
    """

    __slots__ = ("cached_tokens", "earlier", "planned", "replica", "rid", "spans")

    def __init__(
        self,
        planned: PlannedRequest,
        rid: int,
        replica: VirtualReplica,
        earlier: Sequence[int] = (),
    ) -> None:
        self.earlier = earlier
        self.cached_tokens = 0
        self.planned: Final = planned
        self.rid: Final = rid
        self.replica: Final = replica
        self.spans: Final = TokenSpans()


class VirtualReplica:
    """One replica.

    Args:
        name: unique within the fleet, for ever.
        core: its engine; belongs to this replica from now on.
        created_ns: when it was asked for.
        ready_ns: when it takes its first request.
        fast_forward: whether steps that are known in advance are taken at once; only speed differs.
        ended: told of each request that ends by itself: it, the times of its tokens, and how
            many prompt tokens came from the cache.

    Attributes:
        events: how often the engine was called to take steps.
        due_ns: when it has something to do by itself; None: never.
        draining: whether it only finishes what it has.
    """

    def __init__(
        self,
        name: str,
        core: EngineCore,
        *,
        created_ns: int,
        ready_ns: int,
        fast_forward: bool,
        ended: Callable[[Visit, NDArray[np.int64], int], None],
    ) -> None:
        self.name: Final = name
        self.core: Final = core
        self.created_ns: Final = created_ns
        self.ready_ns: Final = ready_ns
        self.due_ns: int | None = None
        self.draining = False
        self.events = 0
        self._fast_forward = fast_forward
        self._ended = ended
        self._visits: dict[int, Visit] = {}
        self._epochs = EpochTimes()

    @property
    def in_flight(self) -> int:
        """Requests that are on it."""
        return len(self._visits)

    def load(self, now_ns: int) -> ReplicaLoad:
        """What placement may know of it; exact, as if each answer told it."""
        scheduler = self.core.scheduler
        waiting, limits = len(scheduler.waiting), scheduler.limits
        total_blocks = scheduler.total_blocks
        used_blocks = total_blocks - scheduler.free_blocks
        return ReplicaLoad(
            name=self.name,
            in_flight=len(self._visits),
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
        )

    def submit(
        self, visit: Visit, submit: Submit, now_ns: int, *, holds_blocks: bool = False
    ) -> Rejected | None:
        """A request comes; `settle` afterwards."""
        rejected = self.core.submit(submit, now_ns, holds_blocks=holds_blocks)
        if rejected is None:
            self._visits[visit.rid] = visit
        return rejected

    def hold(self, visit: Visit) -> None:
        """A request that ended here still takes up room, until it is let go."""
        self._visits[visit.rid] = visit

    def release(self, visit: Visit) -> None:
        """Its room is free; `settle` afterwards."""
        self.core.release_held(visit.rid)
        del self._visits[visit.rid]

    def take_over(self, visit: Visit, submit: Submit, now_ns: int, *, first_token_ns: int) -> bool:
        """Reserve room for a request that has got its first tokens, if there is any."""
        taken = self.core.reserve_transfer(
            submit, now_ns, emitted=len(visit.earlier), first_token_ns=first_token_ns
        )
        if taken:
            self._visits[visit.rid] = visit
        return taken

    def cancel(self, visit: Visit) -> NDArray[np.int64]:
        """Nobody waits for it any more; the times of the tokens it got. `settle` afterwards."""
        self.core.cancel(visit.rid)
        del self._visits[visit.rid]
        return self.times(visit)

    def visit(self, rid: int) -> Visit | None:
        """A request that is here, one for which room is reserved too."""
        return self._visits.get(rid)

    def times(self, visit: Visit, output_tokens: int | None = None) -> NDArray[np.int64]:
        """When a request that is or was here got its tokens, elsewhere too; shape `[num_tokens]`.

        Args:
            visit: it.
            output_tokens: how many it got: those computed beyond its end are not its.
        """
        earlier = visit.earlier
        if not len(earlier):
            return self._epochs.tokens(visit.spans, output_tokens)
        here = None if output_tokens is None else output_tokens - len(earlier)
        found = self._epochs.tokens(visit.spans, here)
        return np.concatenate((np.array(earlier, dtype=np.int64), found))

    def run(self, until_ns: int) -> None:
        """Every step that ends before an instant."""
        core = self.core
        while self.due_ns is not None and self.due_ns < until_ns:
            skipped = core.fast_forward(until_ns) if self._fast_forward else None
            if skipped is not None:
                self._take_skipped(skipped)
            elif (outcome := core.advance(self.due_ns)) is not None:
                self._take(outcome)
            self.events += 1
            self.due_ns = core.next_event_ns()

    def settle(self, now_ns: int) -> None:
        """Every step that ends now, and the plans that can be made now."""
        core = self.core
        while True:
            outcome = core.advance(now_ns)
            if outcome is not None:
                self._take(outcome)
            self.events += 1
            self.due_ns = core.next_event_ns()
            if self.due_ns is None or self.due_ns > now_ns:
                return

    def _take_skipped(self, skipped: SkippedSteps) -> None:
        for plan in skipped.plans:
            self._take_members(plan)
        self._epochs.extend(skipped.ends_ns)
        self._trim()

    def _take_members(self, plan: StepPlan) -> None:
        """Who joined and who left the cohort with a plan; its own epoch is not counted yet."""
        visits = self._visits
        last = plan.decode_epoch - 1 if plan.decode_epoch else self._epochs.last
        for rid in plan.left:
            if rid in visits:
                visits[rid].spans.leave(last)
        for join in plan.joined:
            if join.rid in visits:
                visits[join.rid].spans.join(plan.decode_epoch)

    def _trim(self) -> None:
        if self._epochs.trim_due:
            self._epochs.trim(visit.spans for visit in self._visits.values())

    def _take(self, outcome: StepOutcome) -> None:
        plan, at_ns = outcome.plan, outcome.result.at_ns
        visits, epochs = self._visits, self._epochs
        if plan.left or plan.joined:
            self._take_members(plan)
        if plan.decode_epoch:
            epochs.append(at_ns)
            self._trim()
        for chunk in plan.chunks:
            if chunk.samples and chunk.rid in visits:
                visits[chunk.rid].spans.single(at_ns)
        for progress in outcome.progress:
            if progress.finish_reason is None:
                continue
            request = progress.request
            visit = visits.pop(request.rid)
            cached_tokens = visit.cached_tokens if len(visit.earlier) else request.cached_tokens
            self._ended(visit, self.times(visit, request.output_tokens), cached_tokens)


_OPEN: Final = 1 << 62
_TRIM_AFTER: Final = 1024


class TokenSpans:
    """Where the tokens of one request are: single ones, and spans of epochs, in order."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        # (time, -1) is a token by itself; (first epoch, last epoch) a span.
        self.parts: list[tuple[int, int]] = []

    def single(self, at_ns: int) -> None:
        """A token that a prompt's last chunk gave."""
        self.parts.append((at_ns, -1))

    def join(self, epoch: int) -> None:
        """A token in this epoch and in all that follow."""
        self.parts.append((epoch, _OPEN))

    def leave(self, epoch: int) -> None:
        """No token after this epoch; one that has got none here left before it came back."""
        if not self.parts:
            return
        first, last = self.parts[-1]
        if last == _OPEN:
            self.parts[-1] = (first, epoch)

    @property
    def first_epoch(self) -> int:
        """The earliest epoch whose time is needed; far away when none is."""
        return min((first for first, last in self.parts if last >= 0), default=_OPEN)


class EpochTimes:
    """When the epochs of one replica were committed, numbered from 1.

    Attributes:
        last: the number of the latest.
    """

    __slots__ = ("_before", "_times", "_trim_at", "last")

    def __init__(self) -> None:
        self.last = 0
        self._before = 0
        """Epochs that were let go."""
        self._times = array("q")
        self._trim_at = _TRIM_AFTER

    def append(self, at_ns: int) -> None:
        """The next epoch."""
        self.last += 1
        self._times.append(at_ns)

    def extend(self, ends_ns: array[int]) -> None:
        """The next epochs."""
        self.last += len(ends_ns)
        self._times.extend(ends_ns)

    @property
    def trim_due(self) -> bool:
        """Whether it is worth looking for epochs that nobody needs."""
        return len(self._times) >= self._trim_at

    def trim(self, live: Iterable[TokenSpans]) -> None:
        """Let go of what lies before the spans of everyone who is still there."""
        keep_from = min((spans.first_epoch for spans in live), default=_OPEN)
        gone = min(keep_from - 1, self.last) - self._before
        if gone > 0:
            del self._times[:gone]
            self._before += gone
        # Looked for again only when it has doubled: the search is paid for by what came since.
        self._trim_at = 2 * len(self._times) + _TRIM_AFTER

    def tokens(self, spans: TokenSpans, limit: int | None = None) -> NDArray[np.int64]:
        """The times of a request's tokens up to now, shape `[num_tokens]`.

        Args:
            spans: of it.
            limit: tokens at most: those computed beyond its end are not its.
        """
        pieces = array("q")
        for first, last in spans.parts:
            if last < 0:
                pieces.append(first)
            else:
                start = first - 1 - self._before
                pieces += self._times[start : min(last, self.last) - self._before]
        found: NDArray[np.int64] = np.frombuffer(pieces, dtype=np.int64)
        return found if limit is None else found[:limit]
