"""Serve a set of requests with known arrivals and lengths in virtual time.

Requests are served in a given order, with the step times of the device profile. A request that can
no longer be in time is dropped, and one that can wait is evicted for one that cannot. The result is
feasible by construction. `benchmarks.bound.schedule_search` searches the set and the order.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from goodput_core.steptime.forms import StepShape
from goodput_core.units import NS_PER_S
from goodput_engine.device.profile import Overlap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.bound.stages import Demand

    from goodput_engine.device.profile import DeviceProfile

__all__ = ["NEVER_NS", "ClairvoyantJob", "Limits", "job_of", "serve"]

NEVER_NS = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a replica.

    Args:
        max_num_seqs: requests in one step.
        max_step_tokens: tokens in one step.
    """

    max_num_seqs: float = math.inf
    max_step_tokens: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ClairvoyantJob:
    """A request in nanoseconds.

    Args:
        index: index of the request.
        arrival_ns: arrival.
        prompt, decodes: tokens of the prompt, and steps after the first token.
        first_due_ns, last_due_ns: deadlines.
        prompt_ns, decode_ns: shortest time of the prompt, and of a decode.
        key: order of service, lower first; at first the latest start.
        weight: value of serving the request in time.
    """

    index: int
    arrival_ns: int
    prompt: int
    decodes: int
    first_due_ns: int
    last_due_ns: int
    prompt_ns: int
    decode_ns: int
    key: int
    weight: float


# Request, tokens that it has yet to emit, tokens computed before the step, tokens in the step.
_Chunk: TypeAlias = tuple[ClairvoyantJob, int, int, int]


@dataclass(slots=True)
class _Replica:
    """The state of a replica.

    Args:
        number: index of the replica.
        epoch: number of steps so far.
        context: tokens in the KV cache of the decoding requests.
        kv_tokens: tokens of all requests on the replica at their ends, in whole blocks.
        decoding: request and final epoch of each decoding request.
        ends: final epochs of decoding requests, with entries of dropped requests.
        hopeless: latest values of time less steps, with entries of dropped requests.
        slack: negated values of `hopeless`, so that the first has the latest start.
        prompts: request, tokens it has yet to emit, and computed tokens of each prompt, or of
            prompt and output after an eviction, that is begun.
    """

    number: int
    epoch: int = 0
    context: int = 0
    kv_tokens: int = 0
    decoding: dict[int, tuple[ClairvoyantJob, int]] = field(default_factory=dict)
    ends: list[tuple[int, int]] = field(default_factory=list)
    hopeless: list[tuple[int, int]] = field(default_factory=list)
    slack: list[tuple[int, int]] = field(default_factory=list)
    prompts: list[tuple[ClairvoyantJob, int, int]] = field(default_factory=list)


class _Fleet:
    """Replicas that serve a set of requests from one queue.

    Args:
        profile: the device of each replica.
        limits: limits of each replica.
        replicas: number of replicas.
        step_tokens: tokens that a step with prompts computes at most.
    """

    def __init__(
        self, profile: DeviceProfile, limits: Limits, replicas: int, step_tokens: int
    ) -> None:
        self._profile = profile
        self._budget = int(min(step_tokens, limits.max_step_tokens))
        self._slots = limits.max_num_seqs
        self._kv_tokens = profile.kv_blocks * profile.block_size
        self._replicas = [_Replica(number) for number in range(replicas)]
        self._shortest_ns = profile.form.step_ns(StepShape.of(decodes=1, decode_context_tokens=1))
        self._queue: list[tuple[int, int, ClairvoyantJob, int]] = []
        self.in_time: list[int] = []

    def run(self, jobs: Sequence[ClairvoyantJob]) -> None:
        """Serve requests, which are sorted by arrival."""
        upcoming = 0
        free = [(jobs[0].arrival_ns, replica.number) for replica in self._replicas] if jobs else []
        while free:
            now_ns, number = heapq.heappop(free)
            while upcoming < len(jobs) and jobs[upcoming].arrival_ns <= now_ns:
                job = jobs[upcoming]
                heapq.heappush(self._queue, (job.key, job.index, job, job.decodes + 1))
                upcoming += 1
            end_ns = self._step(self._replicas[number], now_ns)
            if end_ns is not None:
                heapq.heappush(free, (end_ns, number))
            elif upcoming < len(jobs):
                heapq.heappush(free, (max(now_ns + 1, jobs[upcoming].arrival_ns), number))

    def _step(self, replica: _Replica, now_ns: int) -> int | None:
        """Run one step; return its end, or None if the replica has no work."""
        self._drop_hopeless(replica, now_ns)
        chunks = self._fill(replica, now_ns)
        if replica.kv_tokens > self._kv_tokens:
            self._enforce_kv(replica, chunks)
        decodes = len(replica.decoding)
        if not decodes and not chunks:
            return None
        shape = StepShape.of(
            decodes=decodes,
            decode_context_tokens=replica.context + decodes,
            chunks=[(done, tokens) for _, _, done, tokens in chunks],
        )
        end_ns = now_ns + self._step_ns(shape)
        replica.epoch += 1
        replica.context += decodes
        while replica.ends and replica.ends[0][0] <= replica.epoch:
            end, index = heapq.heappop(replica.ends)
            if index in replica.decoding and replica.decoding[index][1] == end:
                job = replica.decoding[index][0]
                if end_ns <= job.last_due_ns:
                    self.in_time.append(index)
                self._leave(replica, index)
        for job, left, done, tokens in chunks:
            first = left > job.decodes
            if done + tokens < self._length(job, left):
                replica.prompts.append((job, left, done + tokens))
            elif left == 1 or (first and end_ns > job.first_due_ns):
                replica.kv_tokens -= self._peak(job)
                if end_ns <= (job.first_due_ns if first else job.last_due_ns):
                    self.in_time.append(job.index)
            else:
                self._join(replica, job, left - 1)
        return end_ns

    def _step_ns(self, shape: StepShape) -> int:
        device_ns = self._profile.form.step_ns(shape)
        host_ns = self._profile.host_ns(shape.num_requests)
        if self._profile.overlap is Overlap.MAX:
            return max(device_ns, host_ns)
        return device_ns + host_ns

    def _fill(self, replica: _Replica, now_ns: int) -> list[_Chunk]:
        """Return the chunks of the next step."""
        begun, replica.prompts = replica.prompts, []
        chunks: list[_Chunk] = []
        tokens_left = self._budget - len(replica.decoding)
        for job, left, done in begun:
            if left > job.decodes and now_ns + job.decode_ns > job.first_due_ns:
                replica.kv_tokens -= self._peak(job)
            elif tokens_left > 0 and len(replica.decoding) + len(chunks) < self._slots:
                tokens = min(tokens_left, self._length(job, left) - done)
                chunks.append((job, left, done, tokens))
                tokens_left -= tokens
            else:
                replica.prompts.append((job, left, done))
        while self._queue and tokens_left > 0 and not replica.prompts:
            key, _, job, left = self._queue[0]
            late = left > job.decodes and now_ns + job.prompt_ns > job.first_due_ns
            least_ns = job.prompt_ns + (left - 1) * job.decode_ns
            if late or now_ns + least_ns > job.last_due_ns:
                heapq.heappop(self._queue)
                continue
            heapq.heappop(self._queue)
            if not self._make_room(replica, chunks, job, left, key):
                heapq.heappush(self._queue, (key, job.index, job, left))
                break
            replica.kv_tokens += self._peak(job)
            tokens = min(tokens_left, self._length(job, left))
            chunks.append((job, left, 0, tokens))
            tokens_left -= tokens
        return chunks

    def _make_room(
        self, replica: _Replica, chunks: list[_Chunk], job: ClairvoyantJob, left: int, key: int
    ) -> bool:
        """Evict requests with a later start until a request fits; False if it does not."""
        while True:
            active = len(replica.decoding) + len(chunks)
            if active < self._slots and self._fits(replica, chunks, job, left):
                return True
            if not self._evict(replica, key):
                return False

    def _evict(self, replica: _Replica, key: int | None) -> bool:
        """Evict the decoding request with the latest start.

        Args:
            replica: the replica.
            key: a start after which the request must have time to recompute; None for any.

        Returns:
            True if a request was evicted.
        """
        spent = replica.epoch * self._shortest_ns
        while replica.slack:
            negated, index = replica.slack[0]
            if index not in replica.decoding or -negated != self._latest(replica, index):
                heapq.heappop(replica.slack)
                continue
            job, end = replica.decoding[index]
            if key is not None and spent - negated <= key + 2 * job.prompt_ns:
                return False
            left = end - replica.epoch
            self._leave(replica, index)
            entry = (spent - negated - job.prompt_ns, index, job, left)
            heapq.heappush(self._queue, entry)
            return True
        return False

    def _fits(
        self, replica: _Replica, chunks: list[_Chunk], job: ClairvoyantJob, left: int
    ) -> bool:
        """Return True if the KV cache holds all requests until their ends.

        Assumes that each prompt is computed in one step. The use of the cache grows with every
        step, and falls only when a request ends.
        """
        if replica.kv_tokens + self._peak(job) <= self._kv_tokens:
            return True
        size = self._profile.block_size
        remaining = [
            (end - replica.epoch, one.prompt + one.decodes - (end - replica.epoch))
            for one, end in replica.decoding.values()
        ]
        remaining += [(n, self._length(one, n) - 1) for one, n, _, _ in chunks]
        remaining.append((left, self._length(job, left) - 1))
        remaining.sort(reverse=True)
        for count, (steps, _) in enumerate(remaining, 1):
            used = sum(-(-(tokens + steps) // size) for _, tokens in remaining[:count])
            if used > self._profile.kv_blocks:
                return False
        return True

    def _enforce_kv(self, replica: _Replica, chunks: list[_Chunk]) -> None:
        """Evict requests, or leave out chunks, until the KV cache holds the step.

        A prompt that takes several steps ends later than `_fits` assumes.
        """
        size, blocks = self._profile.block_size, self._profile.kv_blocks

        def used() -> int:
            tokens = [
                one.prompt + one.decodes - (end - replica.epoch) + 1
                for one, end in replica.decoding.values()
            ]
            tokens += [done + more for _, _, done, more in chunks]
            tokens += [done for _, _, done in replica.prompts]
            return sum(-(-one // size) for one in tokens)

        while used() > blocks and self._evict(replica, None):
            pass
        while used() > blocks and (chunks or replica.prompts):
            job, left = chunks.pop()[:2] if chunks else replica.prompts.pop()[:2]
            replica.kv_tokens -= self._peak(job)
            heapq.heappush(self._queue, (job.key, job.index, job, left))

    def _length(self, job: ClairvoyantJob, left: int) -> int:
        """Return the tokens to compute before the next one of this many is emitted."""
        return job.prompt + job.decodes + 1 - left

    def _peak(self, job: ClairvoyantJob) -> int:
        """Return the KV tokens of a request at its end, in whole blocks."""
        size = self._profile.block_size
        return -(-(job.prompt + job.decodes) // size) * size

    def _latest(self, replica: _Replica, index: int) -> int:
        job, end = replica.decoding[index]
        return job.last_due_ns - end * self._shortest_ns

    def _join(self, replica: _Replica, job: ClairvoyantJob, left: int) -> None:
        """Let a request decode that has this many decodes left."""
        end = replica.epoch + left
        replica.decoding[job.index] = (job, end)
        replica.context += job.prompt + job.decodes - left
        heapq.heappush(replica.ends, (end, job.index))
        latest = job.last_due_ns - end * self._shortest_ns
        heapq.heappush(replica.hopeless, (latest, job.index))
        heapq.heappush(replica.slack, (-latest, job.index))

    def _leave(self, replica: _Replica, index: int) -> None:
        job, end = replica.decoding.pop(index)
        replica.context -= job.prompt + job.decodes - (end - replica.epoch)
        replica.kv_tokens -= self._peak(job)

    def _drop_hopeless(self, replica: _Replica, now_ns: int) -> None:
        """Drop decoding requests that are late even if all steps are as short as possible."""
        reached = now_ns - replica.epoch * self._shortest_ns
        while replica.hopeless and replica.hopeless[0][0] < reached:
            latest, index = heapq.heappop(replica.hopeless)
            if index in replica.decoding and latest == self._latest(replica, index):
                self._leave(replica, index)


def serve(
    jobs: Sequence[ClairvoyantJob],
    profile: DeviceProfile,
    limits: Limits,
    replicas: int,
    step_tokens: int,
) -> set[int]:
    """Return the indices of the requests in time if these requests are served."""
    fleet = _Fleet(profile, limits, replicas, step_tokens)
    fleet.run(jobs)
    return set(fleet.in_time)


def job_of(index: int, demand: Demand, profile: DeviceProfile) -> ClairvoyantJob:
    prompt, decodes = demand.prompt_tokens, demand.output_tokens - 1
    prompt_ns = profile.form.step_ns(StepShape.of(chunks=[(0, prompt)]))
    decode_ns = profile.form.step_ns(StepShape.of(decodes=1, decode_context_tokens=prompt + 1))
    first_due, last_due = _ns(demand.first_due_s), _ns(demand.last_due_s)
    least_ns = prompt_ns + decodes * decode_ns
    return ClairvoyantJob(
        index=index,
        arrival_ns=_ns(demand.arrival_s),
        prompt=prompt,
        decodes=decodes,
        first_due_ns=min(first_due, last_due),
        last_due_ns=last_due,
        prompt_ns=prompt_ns,
        decode_ns=decode_ns,
        key=min(first_due - prompt_ns, last_due - least_ns),
        weight=demand.weight,
    )


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S) if math.isfinite(seconds) else NEVER_NS
