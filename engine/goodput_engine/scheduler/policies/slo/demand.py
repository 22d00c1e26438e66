"""Tests whether a new request can be served in time beside those that were admitted before it.

Two resources are tested. The device computes prompts one after the other, in the order of their
due times. KV memory and places in the batch are held for a time, so the demand up to each time is
compared with the capacity until then. Both tests leave room for requests that are worth more.

The demand for memory is a necessary condition: it assumes that requests can be paused at any time
without cost. A third test follows the queue until each waiting request finds free blocks. A
sufficient condition is that the blocks are free until the new request ends.

Source: the processor-demand test of Baruah, Rosier and Howell, "Algorithms and complexity
concerning the preemptive scheduling of periodic, real-time tasks on one processor", Real-Time
Systems 1990.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from heapq import heappop, heappush
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from goodput_engine.scheduler.policies.slo.prompts import Prompt
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = [
    "Held",
    "PoolDemand",
    "PoolQueue",
    "PromptDelay",
    "PromptSteps",
    "Stay",
    "TokensInMemory",
    "late_prompts",
]

_MAX_TIMES: Final = 64
_EARLY: Final = 0.95
_PAUSES: Final = 2
"""A request lends its blocks for a stay only if it can pause for so many of them. Of the requests
that relied on shorter pauses, one in ten was late."""


class PromptSteps(NamedTuple):
    """Steps that compute prompts beside decodes.

    A full step is as long as the decodes allow. A step in which a prompt is due is cut, and the
    decodes of the next one make the prompts behind it later. Each prompt adds a decode to the steps
    after it, and outputs that end take theirs away.

    Args:
        step_ns: time of a full step.
        base_ns: time of its decodes.
        decode_ns: time of one more decode.
        ends: tokens until the end of each running request, in order, from an earlier step on.
        after: steps since then.
    """

    step_ns: float
    base_ns: float
    decode_ns: float
    ends: Sequence[float]
    after: int

    def slower(self, started: int, at_ns: float) -> float:
        """Return the factor by which prompts take longer after a time, when so many have started.

        Fewer decodes than now are no reason to count on more time.
        """
        ended = bisect_right(self.ends, self.after + at_ns / self.step_ns)
        ended -= bisect_right(self.ends, self.after)
        more_ns = self.decode_ns * max(0, started - ended)
        return self.step_ns / max(self.step_ns - more_ns, self.step_ns / 4)


class _Walk:
    """The steps that compute some prompts one after the other.

    Args:
        steps: the steps.
    """

    __slots__ = ("_begins_ns", "_ends_ns", "_fits_ns", "_started", "_steps", "_used_ns", "_rate")

    def __init__(self, steps: PromptSteps) -> None:
        self._steps = steps
        self._rate = 1 - steps.base_ns / steps.step_ns
        self._begins_ns = 0.0
        self._ends_ns = self._fits_ns = steps.step_ns
        self._used_ns = 0.0
        self._started = 0

    def copy(self) -> _Walk:
        other = _Walk(self._steps)
        other._begins_ns, other._ends_ns = self._begins_ns, self._ends_ns
        other._fits_ns, other._used_ns = self._fits_ns, self._used_ns
        other._started = self._started
        return other

    @property
    def now_ns(self) -> float:
        """Time at which the next prompt begins."""
        return self._begins_ns + self._used_ns

    def add(self, share_ns: float, left_ns: float) -> float:
        """Add a prompt, and return the time of its end.

        Args:
            share_ns: its time in full steps.
            left_ns: time until it is due.
        """
        steps = self._steps
        step_ns = steps.step_ns
        used_ns = self._used_ns + share_ns * steps.slower(self._started, self._begins_ns)
        self._started += 1
        if used_ns > self._fits_ns:
            full, used_ns = divmod(used_ns - self._fits_ns, step_ns)
            self._begins_ns = self._ends_ns + full * step_ns
            self._ends_ns = self._begins_ns + step_ns
            self._fits_ns = step_ns
        self._used_ns = used_ns
        end_ns = self._begins_ns + steps.base_ns + used_ns * self._rate
        cut_ns = self._begins_ns + _EARLY * (left_ns - self._begins_ns)
        if cut_ns < self._ends_ns:
            self._ends_ns = max(end_ns, cut_ns)
            if self._rate > 0:
                fits_ns = (self._ends_ns - self._begins_ns - steps.base_ns) / self._rate
                self._fits_ns = min(self._fits_ns, fits_ns)
        return end_ns


def late_prompts(
    prompts: Sequence[Prompt],
    new: Prompt,
    *,
    begins_ns: int,
    margin_ns: float,
    share: float,
    steps: PromptSteps,
    is_next: bool = False,
    reorders: bool = False,
) -> list[ScheduledRequest] | None:
    """Return the less important requests that a new prompt would make late.

    Args:
        prompts: the prompts to compute, in order.
        new: the new prompt.
        begins_ns: start of the first prompt.
        margin_ns: time that must be left before the new prompt is due.
        share: share of the time until the new prompt's latest start that the prompts before it may
            take, above 0, at most 1. The rest is kept for requests that are worth more.
        steps: the steps that compute them.
        is_next: True if the next step computes the new prompt in time.
        reorders: True if all prompts are in time without the new one, in another order.

    Returns:
        Those requests. None if the new prompt would be late, or would make a prompt late that is at
        least as important.
    """
    late: list[ScheduledRequest] = []
    walk = _Walk(steps)
    alone: _Walk | None = None
    """The steps without the new prompt, after it."""
    for prompt in prompts:
        if alone is None and new < prompt:
            alone = walk.copy()
            if not is_next and not _in_time(new, walk, begins_ns, margin_ns, share):
                return None
            if is_next:
                walk.add(new.share_ns, new.due_ns - begins_ns)
        left_ns = prompt.due_ns - begins_ns
        end_ns = walk.add(prompt.share_ns, left_ns)
        # A prompt that would be late without the new one as well is no reason to refuse it.
        made_late = reorders
        if alone is not None:
            alone_ns = alone.add(prompt.share_ns, left_ns)
            made_late = reorders or max(alone_ns, prompt.work_ns) <= left_ns
        if made_late and left_ns < end_ns:
            if prompt.request.priority >= new.request.priority:
                return None
            late.append(prompt.request)
    if alone is None and not is_next and not _in_time(new, walk, begins_ns, margin_ns, share):
        return None
    return late


def _in_time(new: Prompt, walk: _Walk, begins_ns: int, margin_ns: float, share: float) -> bool:
    """Add the new prompt to the steps, and return True if it is in time."""
    left_ns, ahead_ns = new.due_ns - begins_ns, walk.now_ns
    end_ns = max(walk.add(new.share_ns, left_ns), new.work_ns)
    return end_ns + margin_ns <= left_ns and ahead_ns <= share * (left_ns - new.work_ns)


class Stay(NamedTuple):
    """The time for which a request holds KV blocks and a place in the batch.

    Args:
        latest_ns: its latest start, from now.
        length_ns: predicted time until its end.
        blocks: mean number of blocks that it holds.
    """

    latest_ns: float
    length_ns: float
    blocks: float

    def later(self, ns: float) -> Stay:
        """Return the stay with its times counted from an earlier moment."""
        return self._replace(latest_ns=self.latest_ns + ns)


class PoolDemand:
    """The demand of a set of requests for KV blocks and for places in the batch, over time.

    Every request is assumed to start as late as it may. The demand up to a time, in blocks times
    time and in places times time, must not be more than there is until then. It is compared at the
    times at which requests start and end, or, of many requests, at an even choice of these times.

    Args:
        stays: the requests.
    """

    __slots__ = ("_block_ns", "_place_ns", "_times_ns")

    def __init__(self, stays: Iterable[Stay]) -> None:
        events: list[tuple[float, int, float]] = []
        for latest_ns, length_ns, blocks in stays:
            events.append((latest_ns, 1, blocks))
            events.append((latest_ns + length_ns, -1, -blocks))
        events.sort()
        every = -(-len(events) // _MAX_TIMES) or 1
        at_ns = used_blocks = block_ns = place_ns = 0.0
        used_places = 0
        self._times_ns, self._block_ns, self._place_ns = [0.0], [0.0], [0.0]
        for number, (when_ns, places, blocks) in enumerate(events, start=1):
            passed_ns = when_ns - at_ns
            at_ns = when_ns
            block_ns += used_blocks * passed_ns
            place_ns += used_places * passed_ns
            used_blocks += blocks
            used_places += places
            if number % every == 0 or number == len(events):
                self._times_ns.append(at_ns)
                self._block_ns.append(block_ns)
                self._place_ns.append(place_ns)

    def fits(
        self,
        new: Stay,
        *,
        blocks: float,
        places: float,
        reserved: Callable[[float], float],
        reserved_places: Callable[[float], float],
    ) -> bool:
        """Return True if a new request fits beside the others.

        Args:
            new: the new request.
            blocks: blocks of the pool that all of them may use.
            places: number of requests that may run.
            reserved: returns the demand, in blocks times ns, that is kept for others until a time.
            reserved_places: returns the same in places times ns.
        """
        latest_ns, length_ns, held = new
        # Every arrival while memory is short takes this loop: few calls.
        for at_ns, block_ns, place_ns in zip(
            self._times_ns, self._block_ns, self._place_ns, strict=True
        ):
            if at_ns > latest_ns:
                used_ns = min(at_ns - latest_ns, length_ns)
                block_ns, place_ns = block_ns + held * used_ns, place_ns + used_ns  # noqa: PLW2901
            if (
                place_ns + reserved_places(at_ns) > places * at_ns
                or block_ns + reserved(at_ns) > blocks * at_ns
            ):
                return False
        for at_ns in (latest_ns, latest_ns + length_ns):
            block_ns, place_ns = _plus(new, at_ns, *self._at(at_ns))
            if (
                place_ns + reserved_places(at_ns) > places * at_ns
                or block_ns + reserved(at_ns) > blocks * at_ns
            ):
                return False
        return True

    def add(self, new: Stay) -> None:
        """Add a request."""
        for at_ns in (new.latest_ns, new.latest_ns + new.length_ns):
            i = bisect_right(self._times_ns, at_ns)
            if self._times_ns[i - 1] != at_ns and (i == len(self._times_ns) or self._has_room()):
                block_ns, place_ns = self._at(at_ns)
                self._times_ns.insert(i, at_ns)
                self._block_ns.insert(i, block_ns)
                self._place_ns.insert(i, place_ns)
        latest_ns, length_ns, held = new
        for i in range(bisect_right(self._times_ns, latest_ns), len(self._times_ns)):
            used_ns = min(self._times_ns[i] - latest_ns, length_ns)
            self._block_ns[i] += held * used_ns
            self._place_ns[i] += used_ns

    def _has_room(self) -> bool:
        """Return True if fewer times are stored than may be."""
        return len(self._times_ns) < 2 * _MAX_TIMES

    def _at(self, at_ns: float) -> tuple[float, float]:
        """Return the demand up to a time, linear between the times that are stored."""
        times_ns = self._times_ns
        i = bisect_right(times_ns, at_ns)
        if i == len(times_ns):
            return self._block_ns[-1], self._place_ns[-1]
        passed_ns, length_ns = at_ns - times_ns[i - 1], times_ns[i] - times_ns[i - 1]
        low_ns, high_ns = self._block_ns[i - 1 : i + 1]
        low_places, high_places = self._place_ns[i - 1 : i + 1]
        # The rates of integers are exact.
        return (
            low_ns + passed_ns * ((high_ns - low_ns) / length_ns),
            low_places + passed_ns * ((high_places - low_places) / length_ns),
        )


class Held(NamedTuple):
    """The KV blocks and the place of a running request.

    Args:
        ends_ns: predicted time until its end.
        blocks: mean number of blocks that it holds until then.
        pause_ns: time for which another request may use its blocks; 0 if it must not be paused.
    """

    ends_ns: float
    blocks: float
    pause_ns: float


class PromptDelay(NamedTuple):
    """The delay of running requests by the prompts that are to be computed beside them.

    Args:
        most_ns: the time by which all these prompts delay a request that runs until their end.
        slowest: longest time of a step with prompts over the pace of the predicted ends.
    """

    most_ns: float
    slowest: float

    def delayed(self, end_ns: float, begins_ns: float) -> float:
        """Return a predicted end with the delay by prompts from a time on."""
        return end_ns + min(self.most_ns, max(0.0, end_ns - begins_ns) * (self.slowest - 1))


NO_DELAY: Final = PromptDelay(0.0, 1.0)


class PoolQueue:
    """The starts of waiting requests, which wait for blocks and places of others.

    Each starts as soon as a place and its blocks are free, and not before those that are ahead. At
    its latest start it may use blocks of running requests that can pause for twice its stay.

    Args:
        held: the running requests.
        blocks: number of blocks of the pool.
        places: number of requests that may run.
    """

    __slots__ = ("_ends", "_free_blocks", "_free_places", "_lenders")

    def __init__(self, held: Sequence[Held], *, blocks: float, places: int) -> None:
        self._ends = sorted((one.ends_ns, one.blocks) for one in held)
        self._free_blocks = blocks - sum(one.blocks for one in held)
        self._free_places = places - len(held)
        lenders = [(one.pause_ns, one.ends_ns, one.blocks) for one in held if one.pause_ns > 0]
        self._lenders = sorted(lenders, reverse=True)

    def late(
        self,
        waiting: Iterable[tuple[int, Stay]],
        *,
        started: Iterable[Stay] = (),
        begins_ns: float = 0.0,
        prompts: PromptDelay = NO_DELAY,
        lends_ns: float = 0.0,
        kept_free: float = 0.0,
        kept_places: int = 0,
    ) -> set[int]:
        """Return the rids of the requests that cannot start in time.

        Args:
            waiting: rids and stays of the waiting requests, in their order.
            started: stays of requests that run now, but did not when the object was made.
            begins_ns: earliest start. All times count from when the object was made.
            prompts: delay of the running requests by the prompts beside them.
            lends_ns: time from the decision to evict a request until its blocks are free.
            kept_free: number of blocks that are left free.
            kept_places: number of places that are left free.
        """
        free, places = self._free_blocks - kept_free, self._free_places - kept_places
        now_ns, lent = begins_ns, 0.0
        # (end, blocks, places) of the requests that start now, and the next end of the others.
        ends: list[tuple[float, float, int]] = []
        for stay in started:
            heappush(ends, (prompts.delayed(stay.length_ns, begins_ns), stay.blocks, 1))
            free, places = free - stay.blocks, places - 1
        held, late = 0, set()
        for rid, (latest_ns, length_ns, blocks) in waiting:
            while free < blocks or places < 1:
                held_ns = math.inf
                if held < len(self._ends):
                    held_ns = prompts.delayed(self._ends[held][0], begins_ns)
                end_ns = min(held_ns, ends[0][0] if ends else held_ns)
                if end_ns > latest_ns:
                    break
                if end_ns == held_ns:
                    free, places, held = free + self._ends[held][1], places + 1, held + 1
                else:
                    _, ended, place = heappop(ends)
                    free, places = free + ended, places + place
                now_ns = max(now_ns, end_ns)
            if free >= blocks and places > 0 and now_ns <= latest_ns:
                heappush(ends, (now_ns + length_ns, blocks, 1))
                free, places = free - blocks, places - 1
                continue
            # A lender gives its place, and at least one block with it.
            missing = max(blocks - max(0.0, free), 0.0 if places > 0 else 1.0)
            can_lend = latest_ns >= max(now_ns, begins_ns + lends_ns)
            if not can_lend or self._lendable(length_ns, now_ns) - lent < missing:
                late.add(rid)
                continue
            # It takes its place back at the end, together with its blocks.
            own = max(0.0, blocks - missing)
            heappush(ends, (latest_ns + length_ns, own, 0))
            free, lent = free - own, lent + missing
        return late

    def _lendable(self, length_ns: float, now_ns: float) -> float:
        """Return the blocks of requests that still run at a time and can pause for another."""
        blocks = 0.0
        for pause_ns, ends_ns, held in self._lenders:
            if pause_ns <= _PAUSES * length_ns:
                break
            if ends_ns > now_ns:
                blocks += held
        return blocks


class TokensInMemory:
    """The tokens of requests in memory, each of which gains one per step until its end.

    Args:
        requests: (tokens in memory, predicted remaining tokens) of each request.

    Source: Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS
    2025, equation 3: the peak is at the end of some request, when only requests with more
    remaining tokens are still in memory.
    """

    __slots__ = ("_ends", "_peaks", "_tokens")

    def __init__(self, requests: Iterable[tuple[float, float]]) -> None:
        ordered = sorted((left, tokens) for tokens, left in requests)
        self._ends = [left for left, _ in ordered]
        held = [*accumulate((tokens for _, tokens in reversed(ordered)), initial=0.0)]
        self._tokens = held[::-1]
        """Tokens of the requests that end with each one or later; 0 after the last."""
        count = len(ordered)
        # The new request is one more that grows.
        at_ends = (self._tokens[at] + (count - at + 1) * left for at, left in enumerate(self._ends))
        self._peaks = [*accumulate(at_ends, max)]

    def __len__(self) -> int:
        return len(self._ends)

    def peak_beside(self, new: float, *, after: float, steps: float) -> float:
        """Return the largest number of tokens during the stay of a new request.

        Args:
            new: tokens of the new request at its start.
            after: steps that have passed since the object was made.
            steps: steps until its end.
        """
        last = after + steps
        at = bisect_right(self._ends, last)
        peak = self._tokens[at] + (len(self._ends) - at + 1) * last
        if at:
            peak = max(peak, self._peaks[at - 1])
        return peak + new - after


def _plus(new: Stay, at_ns: float, block_ns: float, place_ns: float) -> tuple[float, float]:
    """Add the demand of a request up to a time."""
    used_ns = min(max(0.0, at_ns - new.latest_ns), new.length_ns)
    return block_ns + new.blocks * used_ns, place_ns + used_ns
