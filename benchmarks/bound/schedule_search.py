"""Local search for a schedule that knows all arrivals and lengths.

The schedule stands beside the upper bounds of `benchmarks.bounds`: the optimum lies between them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from benchmarks.bound.clairvoyant import NEVER_NS, ClairvoyantJob, Limits, job_of, serve

from goodput_engine.device.profile import DeviceProfile

if TYPE_CHECKING:
    from benchmarks.bound.stages import Demand


__all__ = ["Schedule", "best_schedule"]

# Regions of arrivals in which the search judges changes apart.
_REGIONS: Final = 40
_STEP_TOKENS: Final = (256, 512, 1024, 2048, 8192)
_ADVANCES: Final = (0, 0.3, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The best schedule found.

    Args:
        value: weighted number of requests in time.
        served: indices of these requests.
        step_tokens: tokens per step that the schedule uses.
    """

    value: float
    served: frozenset[int]
    step_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """A search problem.

    Args:
        jobs: requests that may be served, by arrival.
        worth: worth of each request, by index.
        profile: the device of each replica.
        limits: limits of each replica.
        replicas: number of replicas.
    """

    jobs: Sequence[ClairvoyantJob]
    worth: Sequence[float]
    profile: DeviceProfile
    limits: Limits
    replicas: int

    def run(self, jobs: Sequence[ClairvoyantJob], step_tokens: int) -> set[int]:
        """Return the requests in time."""
        return serve(jobs, self.profile, self.limits, self.replicas, step_tokens)

    def value(self, served: set[int]) -> float:
        """Return the weight of served requests."""
        return math.fsum(job.weight for job in self.jobs if job.index in served)

    def advances(self) -> list[float]:
        """Return times by which a unit of worth advances a request in the order of service.

        They are multiples of the median time to the first deadline, over the mean worth.
        """
        windows = sorted(job.first_due_ns - job.arrival_ns for job in self.jobs)
        total = math.fsum(self.worth[job.index] for job in self.jobs)
        median_ns = windows[len(windows) // 2]
        if not total or median_ns > NEVER_NS // 2:
            return [0]
        return [factor * median_ns * len(windows) / total for factor in _ADVANCES]


def best_schedule(
    demands: Sequence[Demand],
    profile: DeviceProfile,
    *,
    limits: Limits | None = None,
    replicas: int = 1,
    surplus: Sequence[float] | None = None,
    start: Collection[int] = (),
    seed: int = 1,
    rounds: int | None = None,
) -> Schedule:
    """Search a schedule.

    The search begins with all requests, with those that are worth their price, and with those of
    `start`, in orders between that of latest start and that of worth. It then adds requests at
    random to those in time, and removes some of little worth, everywhere at once. Where arrivals of
    a period gain by the change, the change is kept.

    Args:
        demands: the requests.
        profile: the device of each replica.
        limits: limits of each replica.
        replicas: number of replicas.
        surplus: value of each request less its price, from the upper bound; None if unknown.
        start: indices of requests that can probably be served together; empty for none.
        seed: seed of the changes.
        rounds: number of changes; None for a number that falls with the number of requests.
    """
    limits = limits or Limits()
    pool_tokens = profile.kv_blocks * profile.block_size
    jobs = [
        job_of(index, demand, profile)
        for index, demand in enumerate(demands)
        if demand.weight > 0 and demand.prompt_tokens + demand.output_tokens - 1 <= pool_tokens
    ]
    if not jobs:
        return Schedule(value=0, served=frozenset(), step_tokens=0)
    problem = _Problem(
        jobs=sorted(jobs, key=lambda job: job.arrival_ns),
        worth=surplus if surplus is not None else [d.weight for d in demands],
        profile=profile,
        limits=limits,
        replicas=replicas,
    )
    if rounds is None:
        rounds = min(400, max(20, 60_000 // len(jobs)))
    # A short search from each start, then a long one from the best result.
    found = [
        (one, _search(one.problem, one.step_tokens, one.served, seed, rounds // 6))
        for one in _starts(problem, set(start))
    ]
    best, served = max(found, key=lambda one: problem.value(one[1]))
    served = _search(best.problem, best.step_tokens, served, seed + 1, rounds - rounds // 2)
    return Schedule(
        value=problem.value(served), served=frozenset(served), step_tokens=best.step_tokens
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """A simple schedule.

    Args:
        problem: the search problem, with requests in the order of this schedule.
        step_tokens: tokens of a step with prompts.
        served: requests in time.
    """

    problem: _Problem
    step_tokens: int
    served: set[int]


def _starts(problem: _Problem, start: Collection[int]) -> Iterator[_Start]:
    """Yield the best simple schedule of each order of service."""
    sizes = sorted({int(min(size, problem.limits.max_step_tokens)) for size in _STEP_TOKENS})
    for advance_ns in problem.advances():
        moved = [
            replace(job, key=job.key - round(advance_ns * problem.worth[job.index]))
            for job in problem.jobs
        ]
        chosen = [job for job in moved if problem.worth[job.index] > 0]
        sets = [chosen, moved] if len(chosen) < len(moved) else [moved]
        if start:
            sets.append([job for job in moved if job.index in start])
        tried = [(problem.run(some, size), size) for size in sizes for some in sets]
        served, size = max(tried, key=lambda one: problem.value(one[0]))
        yield _Start(problem=replace(problem, jobs=moved), step_tokens=size, served=served)


def _search(
    problem: _Problem, step_tokens: int, best: set[int], seed: int, rounds: int
) -> set[int]:
    """Return the best set found by changes of a set of requests in time."""
    rng = random.Random(seed)
    jobs = problem.jobs
    first, last = jobs[0].arrival_ns, jobs[-1].arrival_ns + 1
    region = {job.index: (job.arrival_ns - first) * _REGIONS // (last - first) for job in jobs}
    weight = {job.index: job.weight for job in jobs}
    order = sorted(jobs, key=lambda job: problem.worth[job.index])
    rank = {job.index: (place + 1) / len(order) for place, job in enumerate(order)}
    base, share = best, 0.2
    for _ in range(rounds):
        left = [job.index for job in jobs if job.index not in base]
        if not left:
            break
        added = {index for index in left if rng.random() < share * rank[index]}
        added = added or {rng.choice(left)}
        removed = {index for index in sorted(base) if rng.random() < share / 4 * (1 - rank[index])}
        tried = (base - removed) | added
        served = problem.run([job for job in jobs if job.index in tried], step_tokens)
        gained = [0.0] * _REGIONS
        for index in served:
            gained[region[index]] += weight[index]
        for index in base:
            gained[region[index]] -= weight[index]
        mixed = {index for index in base if gained[region[index]] <= 0}
        mixed |= {index for index in served if gained[region[index]] > 0}
        candidates = [served]
        if mixed not in (served, base):
            candidates.append(problem.run([j for j in jobs if j.index in mixed], step_tokens))
        found = max(candidates, key=problem.value)
        # Equal sets are taken too, so that the search moves on.
        if problem.value(found) >= problem.value(base):
            base = found
            share = min(0.5, share * 1.2)
        else:
            share = max(1 / len(left), share * 0.8)
        if problem.value(base) > problem.value(best):
            best = base
    return best
