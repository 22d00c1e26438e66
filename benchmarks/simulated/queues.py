"""Simulated queues: requests that wait too long for one of several servers miss their targets.

The share of misses of Poisson arrivals with exponential service is exact (Erlang C). Otherwise it
was estimated from a long simulation, whose standard error is stated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from benchmarks.simulated.processes import Floats, Lengths, Windows, episodes

__all__ = ["Bursts", "Queue", "estimate_miss"]

_WARM_UP: Final = 400
"""Mean service times before a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """Periods of a higher arrival rate.

    Args:
        busy: utilisation in a burst; above 1, the queue grows.
        every_s: mean time between bursts.
        mean_s: mean length of a burst.
    """

    busy: float
    every_s: float
    mean_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A first-come, first-served queue; a request misses if it waits for more than `limit_s`.

    Args:
        servers: number of servers.
        service_s: mean service time.
        busy: utilisation between bursts.
        limit_s: longest wait that is no miss.
        service: distribution of service times: fixed, exponential or lognormal (with a coefficient
            of variation of 2).
        bursts: bursts of arrivals, which make the arrivals a Markov-modulated Poisson process.
        miss: long-run share of misses.
        miss_error: standard error of `miss`; 0 if exact.
    """

    servers: int
    service_s: float
    busy: float
    limit_s: float
    service: str = "exponential"
    bursts: Bursts | None = None
    miss: float
    miss_error: float = 0.0

    @classmethod
    def erlang(cls, *, servers: int, service_s: float, busy: float, miss: float) -> Queue:
        """Return the queue with exponential service whose share of misses is `miss`."""
        offered = servers * busy
        last = offered**servers / math.factorial(servers) / (1 - busy)
        waits = last / (sum(offered**k / math.factorial(k) for k in range(servers)) + last)
        limit_s = math.log(waits / miss) * service_s / (servers * (1 - busy))
        return cls(servers=servers, service_s=service_s, busy=busy, limit_s=limit_s, miss=miss)

    def draw(self, windows: int, seconds: int, rng: np.random.Generator) -> Windows:
        """Draw windows from the stationary process."""
        warm_s = math.ceil(_WARM_UP * self.service_s)
        arrival_s = self._arrivals(windows, warm_s + seconds, rng)
        late = self._waits(arrival_s, rng) > self.limit_s
        second = np.floor(arrival_s).astype(np.int64) - warm_s
        inside = (second >= 0) & (second < seconds)
        index = (second + np.arange(windows)[:, None] * seconds)[inside]
        size = windows * seconds
        shape = (windows, seconds)
        return Windows(
            total=np.bincount(index, minlength=size).reshape(shape),
            missed=np.bincount(index[late[inside]], minlength=size).reshape(shape),
        )

    def _arrivals(self, windows: int, seconds: int, rng: np.random.Generator) -> Floats:
        """Draw arrival times, float64 `[windows, requests]`, the last of each after the end."""
        rate = self.servers / self.service_s
        unit = np.full((windows, 1), rate * self.busy) * np.arange(seconds + 1)
        if self.bursts is not None:
            quiet = Lengths(kind="exponential", mean_s=self.bursts.every_s)
            burst = Lengths(kind="exponential", mean_s=self.bursts.mean_s)
            share = episodes(windows, seconds, quiet, burst, rng)
            per_s = rate * (self.busy + (self.bursts.busy - self.busy) * share)
            unit = np.concatenate((np.zeros((windows, 1)), np.cumsum(per_s, axis=1)), axis=1)
        most = unit[:, -1].max()
        count = int(most + 8 * math.sqrt(most) + 10)
        marks = np.cumsum(rng.standard_exponential((windows, count)), axis=1)
        at_s = np.linspace(0, seconds, unit.shape[1])
        return np.stack(
            [
                np.interp(mark, area, at_s, right=seconds + 1.0)
                for mark, area in zip(marks, unit, strict=True)
            ]
        )

    def _waits(self, arrival_s: Floats, rng: np.random.Generator) -> Floats:
        """Return the wait of each request, by the recursion of Kiefer and Wolfowitz."""
        windows, requests = arrival_s.shape
        gaps_s = np.diff(arrival_s, axis=1, prepend=0.0)
        waits = np.empty((requests, windows))
        work_s = np.zeros((windows, self.servers))
        for number in range(requests):
            work_s -= gaps_s[:, number, None]
            np.maximum(work_s, 0, out=work_s)
            waits[number] = work_s[:, 0]
            work_s[:, 0] += self._services(windows, rng)
            if self.servers > 1:
                work_s.sort(axis=1)
        return waits.T

    def _services(self, size: int, rng: np.random.Generator) -> Floats:
        if self.service == "fixed":
            return np.full(size, self.service_s)
        if self.service == "exponential":
            return rng.exponential(self.service_s, size)
        spread = math.sqrt(math.log(5.0))
        return rng.lognormal(math.log(self.service_s) - spread**2 / 2, spread, size)


def estimate_miss(queue: Queue, *, windows: int, seconds: int, seed: int) -> Queue:
    """Return the queue with the share of misses of a long simulation, and its standard error."""
    drawn = queue.draw(windows, seconds, np.random.default_rng(seed))
    missed, total = drawn.missed.sum(axis=1), drawn.total.sum(axis=1)
    miss = missed.sum() / total.sum()
    error = math.sqrt(np.sum((missed - miss * total) ** 2)) / total.sum()
    return replace(queue, miss=float(miss), miss_error=float(error))
