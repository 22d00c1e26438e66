"""The steps of a server, reconstructed from the times at which clients received tokens.

A server with continuous batching emits the tokens of a step together. The tokens of one request,
the *leader*, therefore mark the ends of steps, and when it ends, another request continues. Every
token belongs to the nearest end, which also tolerates the delays of a network. The first token of a
request marks the end of a step, too: servers that compute prompts in steps of their own show them
only so.

The times do not show in which step a prompt was computed, if there are several from its arrival to
its first token. They show which steps took longer than their decodes do. `allot_prompts` therefore
takes an estimate of the prompt tokens of each step, and distributes the prompts in the order of
their first tokens.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from goodput_core.steptime import StepShape
from goodput_core.steptime.fitting import StepSample
from goodput_replay.calibration.requests import ObservedRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


__all__ = ["Chunks", "ObservedStep", "ReplicaSteps", "allot_prompts"]

# Share of the usual step by which a token may be away from the end of its step.
_TOLERANCE: Final = 0.25
# Tokens, and share of the estimate, below which an estimate leaves no tokens for another prompt.
_MIN_CHUNK: Final = 16
_MIN_CHUNK_SHARE: Final = 0.15
_MAX_PARTS: Final = 8
# Steps of a section whose median is compared with those of others.
_MIN_SECTION: Final = 20
# Bounds of a step's time in units of the median time of its decodes.
_MIN_RATIO: Final = 0.75
_MAX_RATIO: Final = 1.5


class ObservedStep(NamedTuple):
    """A step of a replica.

    Args:
        sample: shape and time.
        end_ns: end of the step.
        certain: True if the shape does not depend on the assumed order of prompts.
        after_idle: True if the replica was idle, so that the time includes that of the way to it.
    """

    sample: StepSample
    end_ns: int
    certain: bool
    after_idle: bool


@dataclass(slots=True, kw_only=True, eq=False)
class _PlacedPrompt:
    """A prompt between its arrival and its first token.

    Args:
        earliest: index of the first step that can contain it.
        last: index of the step that emitted the first token.
        length: prompt tokens.
        cached: prompt tokens found in the prefix cache.
        computed: prompt tokens in the KV cache, including the cached ones.
    """

    earliest: int
    last: int
    length: int
    cached: int
    computed: int


class Chunks(NamedTuple):
    """The prompts of a replica, distributed over its steps.

    Args:
        parts: (start, tokens) of the chunks of each step.
        ambiguous: True for steps with a prompt of which another step may have computed a part.
    """

    parts: list[list[tuple[int, int]]]
    ambiguous: list[bool]


@dataclass(slots=True, kw_only=True, eq=False)
class ReplicaSteps:
    """The steps of one replica, without prompts.

    Args:
        requests: its requests, in the order of arrival.
        ends_ns: ends of the steps, ascending, `[num_steps]`.
        starts_ns: starts, `[num_steps]`.
        decodes: requests that decoded, `[num_steps]`.
        contexts: their context tokens, `[num_steps]`.
        unclear: True for steps in which a request has two tokens, `[num_steps]`.
        after_idle: True for steps before which the replica was idle, `[num_steps]`.
        first_steps: the step of each request's first token, `[num_requests]`.
    """

    requests: Sequence[ObservedRequest]
    ends_ns: NDArray[np.int64]
    starts_ns: NDArray[np.int64] = field(init=False)
    decodes: NDArray[np.int64] = field(init=False)
    contexts: NDArray[np.int64] = field(init=False)
    unclear: NDArray[np.bool_] = field(init=False)
    after_idle: NDArray[np.bool_] = field(init=False)
    first_steps: NDArray[np.int64] = field(init=False)

    @classmethod
    def of(cls, requests: Sequence[ObservedRequest]) -> ReplicaSteps:
        """Reconstruct the steps of a replica from its requests in the order of arrival."""
        steps = cls(requests=requests, ends_ns=_mean_ends(_find_ends(requests), requests))
        steps._count_tokens()
        steps._find_starts()
        steps._find_disturbed()
        return steps

    def without_prompts(self) -> NDArray[np.bool_]:
        """Return True for the steps during which no prompt was computed or waited."""
        size = len(self.ends_ns)
        prompts = np.zeros(size + 1, dtype=np.int64)
        np.add.at(prompts, self.arrival_steps(0), 1)
        np.add.at(prompts, self.first_steps + 1, -1)
        found: NDArray[np.bool_] = np.cumsum(prompts)[:size] == 0
        return found

    def decode_times_ns(self) -> NDArray[np.float64]:
        """Return the median time of steps without prompts and with as many decodes, or nearly."""
        decoding = self.without_prompts() & (self.decodes > 0)
        if not decoding.any():
            return np.zeros(len(self.ends_ns))
        times_ns = self.ends_ns - self.starts_ns
        counts = np.unique(self.decodes[decoding])
        medians = [np.median(times_ns[decoding & (self.decodes == count)]) for count in counts]
        found: NDArray[np.float64] = np.interp(self.decodes, counts, medians)
        found[self.decodes == 0] = 0
        return found

    def slowdown(self, section_of: Callable[[int], int]) -> float:
        """Return how many times as long the same decodes took in one section as in another one.

        It is 1 if fewer than two sections have enough steps without prompts.

        Args:
            section_of: returns the section of a run that has a time.
        """
        decoding = self.without_prompts() & (self.decodes > 0)
        ratios = (self.ends_ns - self.starts_ns)[decoding] / self.decode_times_ns()[decoding]
        sections = np.array([section_of(end_ns) for end_ns in self.ends_ns[decoding].tolist()])
        medians = [
            float(np.median(ratios[sections == one]))
            for one, count in zip(*np.unique(sections, return_counts=True), strict=True)
            if count >= _MIN_SECTION
        ]
        return max(medians, default=1.0) / min(medians, default=1.0)

    @property
    def peak_decodes(self) -> int:
        """The largest number of requests that decoded in a step."""
        return int(self.decodes.max(initial=0))

    @property
    def separates_prompts(self) -> bool:
        """True if most prompts were computed in steps of their own, although others decoded."""
        active = np.zeros(len(self.ends_ns) + 1, dtype=np.int64)
        lasts = np.array([one.times_ns[-1] for one in self.requests])
        np.add.at(active, self.first_steps + 1, 1)
        np.add.at(active, np.searchsorted(self.ends_ns, lasts, side="left"), -1)
        beside = np.cumsum(active)[self.first_steps] > 0
        alone = self.decodes[self.first_steps] == 0
        return bool(beside.sum() >= 10 and (alone & beside).sum() * 2 > beside.sum())

    def _find_disturbed(self) -> None:
        """Mark the steps that are much shorter or longer than their decodes allow.

        If the client or the network stalls, the tokens of several steps arrive together.
        """
        times_ns, expected_ns = self.ends_ns - self.starts_ns, self.decode_times_ns()
        self.unclear |= times_ns < expected_ns * _MIN_RATIO
        self.unclear |= self.without_prompts() & (times_ns > expected_ns * _MAX_RATIO)

    def arrival_steps(self, delay_ns: int) -> NDArray[np.int64]:
        """Return the index of the step during which each request arrived, `[num_requests]`."""
        arrivals = np.array([one.arrival_ns for one in self.requests], dtype=np.int64) + delay_ns
        found = np.searchsorted(self.ends_ns, arrivals, side="left")
        return np.minimum(found, self.first_steps)

    def observed(self, chunks: Chunks, budget: int | None) -> Iterator[ObservedStep]:
        """Yield the steps with their prompts, without those that are unclear.

        Args:
            chunks: the prompts.
            budget: token budget of a step; None if unknown.
        """
        for at, parts in enumerate(chunks.parts):
            time_ns = int(self.ends_ns[at] - self.starts_ns[at])
            decodes, tokens = int(self.decodes[at]), sum(size for _, size in parts)
            if self.unclear[at] or time_ns < 1 or not decodes + tokens:
                continue
            # Without decodes, only the last of several steps emits a token.
            steps = 1 if decodes or budget is None else max(1, -(-tokens // budget))
            shape = StepShape.of(
                decodes=decodes, decode_context_tokens=int(self.contexts[at]), chunks=parts
            )
            if steps > 1:
                shape = StepShape(
                    num_requests=max(1, round(shape.num_requests / steps)),
                    num_tokens=round(tokens / steps),
                    context_tokens=round(shape.context_tokens / steps),
                    max_chunk_tokens=max(1, round(shape.max_chunk_tokens / steps)),
                    num_decodes=0,
                    decode_context_tokens=0,
                    prefill_squares=round(shape.prefill_squares / steps),
                )
            one = ObservedStep(
                sample=StepSample(shape, max(1, time_ns // steps)),
                end_ns=int(self.ends_ns[at]),
                certain=not chunks.ambiguous[at],
                after_idle=bool(self.after_idle[at]),
            )
            for _ in range(steps):
                yield one

    def _count_tokens(self) -> None:
        """Assign the tokens to steps."""
        ends_ns, requests = self.ends_ns, self.requests
        middles = (ends_ns[:-1] + ends_ns[1:]) // 2
        size = len(ends_ns)
        self.decodes = np.zeros(size, dtype=np.int64)
        self.contexts = np.zeros(size, dtype=np.int64)
        self.unclear = np.zeros(size, dtype=np.bool_)
        self.first_steps = np.zeros(len(requests), dtype=np.int64)
        for number, one in enumerate(requests):
            steps = np.searchsorted(middles, one.times_ns)
            self.first_steps[number] = steps[0]
            same = np.diff(steps) == 0
            self.unclear[steps[1:][same]] = True
            np.add.at(self.decodes, steps[1:], 1)
            np.add.at(self.contexts, steps[1:], one.prompt_tokens + np.arange(1, len(one.times_ns)))

    def _find_starts(self) -> None:
        """Let each step begin at the end of the previous one, or at an arrival after idle time."""
        ends_ns, requests = self.ends_ns, self.requests
        arrivals = np.array([one.arrival_ns for one in requests], dtype=np.int64)
        previous = np.concatenate(([arrivals[0]], ends_ns[:-1]))
        # Requests in the replica at the end of each previous step: arrived, and with later tokens.
        lasts = np.sort(np.array([one.times_ns[-1] for one in requests], dtype=np.int64))
        tolerance = _tolerance_ns(requests)
        here = np.searchsorted(arrivals, previous, side="right") - np.searchsorted(
            lasts, previous + tolerance, side="right"
        )
        following = np.searchsorted(arrivals, previous, side="left")
        following_ns = arrivals[np.minimum(following, len(arrivals) - 1)]
        self.after_idle = (here <= 0) & (following_ns >= previous) & (following_ns < ends_ns)
        self.after_idle[0] = True
        self.starts_ns = np.where(self.after_idle, following_ns, previous)
        self.starts_ns[0] = arrivals[0]


def allot_prompts(steps: ReplicaSteps, estimates: Sequence[float], delay_ns: int) -> Chunks:
    """Distribute the prompts over the steps.

    A prompt ends in the step that emitted its first token. Earlier steps since its arrival computed
    a part of it, if their estimates leave tokens for it.

    Args:
        steps: the steps of a replica.
        estimates: prompt tokens that each step probably computed.
        delay_ns: time from a send to the server.
    """
    prompts = _prompts(steps, delay_ns)
    if steps.peak_decodes <= 1:
        # One request runs at a time, so a prompt does not begin before its own step.
        estimates = [0.0] * len(estimates)
    elif steps.separates_prompts:
        # A longer time of a step with decodes has another cause than prompts.
        estimates = np.where(steps.decodes > 0, 0.0, estimates).tolist()
    found = Chunks([[] for _ in estimates], [False] * len(estimates))
    ending: dict[int, list[_PlacedPrompt]] = {}
    for one in prompts:
        ending.setdefault(one.last, []).append(one)
    coming = deque(sorted(prompts, key=lambda one: one.earliest))
    # By the step of the first token, which is the order in which the server computed them.
    waiting: list[tuple[int, int, _PlacedPrompt]] = []
    numbers = count()
    at = -1
    while coming or waiting:
        # Steps without prompts are skipped.
        at = at + 1 if waiting else max(at + 1, coming[0].earliest)
        while coming and coming[0].earliest <= at:
            one = coming.popleft()
            heapq.heappush(waiting, (one.last, next(numbers), one))
        used = 0
        for one in ending.get(at, ()):
            used += one.length - one.computed
            found.parts[at].append((one.computed, one.length - one.computed))
            found.ambiguous[at] |= one.computed > one.cached
        while waiting and waiting[0][2].last <= at:
            heapq.heappop(waiting)
        room = int(estimates[at] - used)
        if room < max(_MIN_CHUNK, _MIN_CHUNK_SHARE * estimates[at]):
            continue
        for _, _, one in heapq.nsmallest(_MAX_PARTS, waiting):
            taken = min(one.length - one.computed - 1, room)
            if taken > 0:
                found.parts[at].append((one.computed, taken))
                found.ambiguous[at] = True
                one.computed += taken
                room -= taken
    return found


def _prompts(steps: ReplicaSteps, delay_ns: int) -> list[_PlacedPrompt]:
    """Return the prompts of a replica with the steps that can contain them."""
    arrived = steps.arrival_steps(delay_ns)
    # The step that runs at the arrival contains the prompt only if it began with it, or if it is
    # several steps without a token.
    earliest = np.where(steps.decodes[arrived] == 0, arrived, arrived + 1)
    return [
        _PlacedPrompt(
            earliest=int(min(first, last)),
            last=int(last),
            length=one.prompt_tokens,
            cached=one.cached_tokens,
            computed=one.cached_tokens,
        )
        for one, first, last in zip(steps.requests, earliest, steps.first_steps, strict=True)
    ]


def _find_ends(requests: Sequence[ObservedRequest]) -> NDArray[np.int64]:
    """Return the ends of the steps of a replica, ascending."""
    tolerance = _tolerance_ns(requests)
    by_first = sorted(requests, key=lambda one: int(one.times_ns[0]))
    firsts = deque(by_first)
    running: list[tuple[int, int, ObservedRequest]] = []
    numbers = count()
    parts: list[NDArray[np.int64]] = []
    now_ns = -1
    while firsts or running:
        while firsts and firsts[0].times_ns[0] <= now_ns + tolerance:
            one = firsts.popleft()
            heapq.heappush(running, (-int(one.times_ns[-1]), next(numbers), one))
        if running and -running[0][0] > now_ns + tolerance:
            leader = running[0][2]
            times = leader.times_ns[leader.times_ns > now_ns + tolerance]
            parts.append(times)
            now_ns = int(times[-1])
        else:
            running.clear()
            if firsts:
                now_ns = int(firsts[0].times_ns[0])
                parts.append(np.array([now_ns], dtype=np.int64))
    ends = np.concatenate(parts)
    starts = np.sort(np.array([one.times_ns[0] for one in requests], dtype=np.int64))
    # First tokens that are not near an end: those of steps that only compute prompts.
    at = np.searchsorted(ends, starts)
    before = starts - ends[np.maximum(at - 1, 0)]
    after = ends[np.minimum(at, len(ends) - 1)] - starts
    extra = starts[(before > tolerance) & (after > tolerance)]
    if len(extra):
        extra = extra[np.concatenate(([True], np.diff(extra) > tolerance))]
    return np.sort(np.concatenate((ends, extra)))


def _mean_ends(ends: NDArray[np.int64], requests: Sequence[ObservedRequest]) -> NDArray[np.int64]:
    """Return the mean time of the tokens of each step, in which delays of a network average out."""
    times = np.sort(np.concatenate([one.times_ns for one in requests]))
    bounds = np.searchsorted(times, (ends[:-1] + ends[1:]) // 2, side="right")
    starts = np.concatenate(([0], bounds))
    counts = np.diff(np.concatenate((starts, [len(times)])))
    # Sums of differences to the ends stay small.
    sums = np.add.reduceat(times - np.repeat(ends, counts), np.minimum(starts, len(times) - 1))
    return np.where(counts > 0, ends + sums // np.maximum(counts, 1), ends)


def _tolerance_ns(requests: Sequence[ObservedRequest]) -> int:
    """Return the largest distance of a token from the end of its step."""
    gaps = np.concatenate([np.diff(one.times_ns) for one in requests])
    return int(np.median(gaps) * _TOLERANCE) if len(gaps) else 0
