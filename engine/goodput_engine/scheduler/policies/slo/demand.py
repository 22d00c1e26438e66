"""The demand of requests for KV memory and for places in the batch.

Both are held for a time, so the demand up to each time is compared with the capacity until then.
Room is left for requests that are worth more. This is a necessary condition: it assumes that
requests can be paused at any time without cost. A second test follows the queue until each waiting
request finds free blocks. A sufficient condition is that the blocks are free until the new request
ends.

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


__all__ = [
    "Held",
    "PoolDemand",
    "PoolQueue",
    "PromptDelay",
    "Stay",
    "TokensInMemory",
]

_MAX_TIMES: Final = 64


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
        return Stay(self.latest_ns + ns, self.length_ns, self.blocks)


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
        pause_ns: time for which it may pause, less that of its own resumption; 0 or less if it must
            not be paused.
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
    its latest start it may use blocks of running requests that can pause for its stay.

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
        backlog_ns: float = 0.0,
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
            backlog_ns: time of the prompts that are computed before a paused request goes on.
            kept_free: number of blocks that are left free.
            kept_places: number of places that are left free.
        """
        free, places = self._free_blocks - kept_free, self._free_places - kept_places
        now_ns, lent, lent_places = begins_ns, 0.0, 0
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
            missing, missing_places = max(0.0, blocks - max(0.0, free)), int(places < 1)
            can_lend = latest_ns >= max(now_ns, begins_ns + lends_ns)
            lendable, lenders = self._lendable(length_ns + backlog_ns, now_ns)
            if not can_lend or lendable - lent < missing or lenders - lent_places < missing_places:
                late.add(rid)
                continue
            # A lender takes its place back at the end, together with its blocks.
            own = max(0.0, blocks - missing)
            heappush(ends, (latest_ns + length_ns, own, 1 - missing_places))
            free, places = free - own, places - (1 - missing_places)
            lent, lent_places = lent + missing, lent_places + missing_places
        return late

    def _lendable(self, for_ns: float, now_ns: float) -> tuple[float, int]:
        """Return the blocks and places of those that run at a time and can pause for long enough.

        Args:
            for_ns: time for which they must be able to pause.
            now_ns: the time.
        """
        blocks, places = 0.0, 0
        for pause_ns, ends_ns, held in self._lenders:
            if pause_ns <= for_ns:
                break
            if ends_ns > now_ns:
                blocks, places = blocks + held, places + 1
        return blocks, places


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
