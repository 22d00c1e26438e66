"""Simulated services with a known long-run attainment.

A process draws many windows of one service at once, as counts of requests and misses per second.
The chance of a miss varies over time; given that chance and the arrivals, requests are independent.
The true share of misses of every process in this module is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import special

__all__ = [
    "Arrivals",
    "Chance",
    "Constant",
    "CorrelatedLatency",
    "Counts",
    "Floats",
    "Lengths",
    "LoadBursts",
    "Outages",
    "PartOfWindow",
    "Process",
    "Ramp",
    "Service",
    "Windows",
    "episodes",
]

Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """The counts of many windows.

    Args:
        total: requests, int64 `[windows, seconds]`.
        missed: requests that missed their targets, int64 `[windows, seconds]`.
    """

    total: Counts
    missed: Counts


class Process(Protocol):
    """A service and its load."""

    @property
    def miss(self) -> float:
        """Long-run share of requests that miss their targets."""

    def draw(self, windows: int, seconds: int, rng: np.random.Generator) -> Windows:
        """Draw windows from the stationary process."""


class Chance(Protocol):
    """The chance of a miss over time."""

    @property
    def miss(self) -> float:
        """Mean over all windows and seconds."""

    def draw(self, windows: int, seconds: int, rng: np.random.Generator) -> Floats:
        """Draw the mean chance in each second, float64 `[windows, seconds]`."""


# --- arrivals ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Arrivals that do not depend on the service.

    Args:
        per_s: mean rate.
        regular: True for the same number of arrivals in every window, evenly spread; False for
            Poisson arrivals.
        batch: number of requests that arrive in the same instant and miss together.
        swing: amplitude of one period of a sine over the window, as a share of the mean rate.
    """

    per_s: float
    regular: bool = False
    batch: int = 1
    swing: float = 0.0

    def draw(self, windows: int, seconds: int, rng: np.random.Generator) -> Counts:
        """Draw the number of batches in each second, int64 `[windows, seconds]`."""
        at_s = np.arange(seconds + 1)
        phase = 2 * math.pi * at_s / seconds
        expected = self.per_s / self.batch * at_s
        expected += (
            self.per_s / self.batch * self.swing * seconds / (2 * math.pi) * (1 - np.cos(phase))
        )
        if self.regular:
            counts = np.diff(np.floor(expected + 0.5).astype(np.int64))
            return np.broadcast_to(counts, (windows, seconds))
        return rng.poisson(np.diff(expected), (windows, seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Arrivals, each of which misses with the chance of its second."""

    arrivals: Arrivals
    chance: Chance

    @property
    def miss(self) -> float:
        """Long-run share of requests that miss their targets."""
        return self.chance.miss

    def draw(self, windows: int, seconds: int, rng: np.random.Generator) -> Windows:
        """Draw windows from the stationary process."""
        chance = self.chance.draw(windows, seconds, rng)
        batches = self.arrivals.draw(windows, seconds, rng)
        missed = rng.binomial(batches, chance)
        return Windows(total=batches * self.arrivals.batch, missed=missed * self.arrivals.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOfWindow:
    """A load that is sent in a part of the window only.

    Args:
        process: the service, and its load in that part.
        busy_s: length of the part, which begins after a third of the rest.
    """

    process: Process
    busy_s: int

    @property
    def miss(self) -> float:
        """Long-run share of requests that miss their targets."""
        return self.process.miss

    def draw(self, windows: int, seconds: int, rng: np.random.Generator) -> Windows:
        """Draw windows from the stationary process."""
        idle_s = seconds - self.busy_s
        around = ((0, 0), (idle_s // 3, idle_s - idle_s // 3))
        drawn = self.process.draw(windows, self.busy_s, rng)
        return Windows(total=np.pad(drawn.total, around), missed=np.pad(drawn.missed, around))


# --- the chance of a miss ------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Independent requests."""

    miss: float

    def draw(self, windows: int, seconds: int, rng: np.random.Generator) -> Floats:  # noqa: ARG002
        """Draw the mean chance in each second."""
        return np.full((windows, seconds), self.miss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """Independent requests whose chance of a miss changes during every window.

    Args:
        first: chance in the first second.
        last: chance in the last second.
        sudden: True for one change half-way, False for a straight line.
    """

    first: float
    last: float
    sudden: bool

    @property
    def miss(self) -> float:
        """Mean over all windows and seconds."""
        return (self.first + self.last) / 2

    def draw(self, windows: int, seconds: int, rng: np.random.Generator) -> Floats:  # noqa: ARG002
        """Draw the mean chance in each second."""
        share = (np.arange(seconds) + 0.5) / seconds
        if self.sudden:
            share = np.clip((share - 0.5) * seconds + 0.5, 0, 1)
        return np.broadcast_to(self.first + (self.last - self.first) * share, (windows, seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Distribution of the lengths of outages, in seconds.

    Args:
        kind: fixed, uniform (half to one and a half of the mean), exponential, or pareto.
        mean_s: mean of the other kinds; shortest length of pareto.
        exponent: tail exponent of pareto.
        longest_s: bound of pareto.
    """

    kind: str
    mean_s: float
    exponent: float = 1.5
    longest_s: float = 1e6

    @property
    def expected_s(self) -> float:
        """Mean length."""
        if self.kind != "pareto":
            return self.mean_s
        a, bound = self.exponent, math.log(self.longest_s / self.mean_s)
        within = math.expm1((1 - a) * bound) / math.expm1(-a * bound)
        return self.mean_s * a / (a - 1) * within

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
        """Draw lengths."""
        if self.kind == "fixed":
            return np.full(shape, self.mean_s)
        if self.kind == "uniform":
            return rng.uniform(0.5 * self.mean_s, 1.5 * self.mean_s, shape)
        if self.kind == "exponential":
            return rng.exponential(self.mean_s, shape)
        return self._pareto(self.exponent, shape, rng)

    def draw_residual(self, size: int, rng: np.random.Generator) -> Floats:
        """Draw the rest of outages that a random instant falls into."""
        length: Floats = np.full(size, self.mean_s)
        if self.kind == "uniform":
            length = self.mean_s * np.sqrt(rng.uniform(0.25, 2.25, size))
        elif self.kind == "exponential":
            length = rng.gamma(2, self.mean_s, size)
        elif self.kind == "pareto":
            length = self._pareto(self.exponent - 1, (size,), rng)
        return length * rng.uniform(0, 1, size)

    def _pareto(self, exponent: float, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
        tail = (self.mean_s / self.longest_s) ** exponent
        share: Floats = rng.uniform(tail, 1, shape)
        return self.mean_s * share ** (-1 / exponent)


def episodes(
    windows: int, seconds: int, off_s: Lengths, on_s: Lengths, rng: np.random.Generator
) -> Floats:
    """Draw a stationary two-state process.

    Args:
        windows: number of windows.
        seconds: length of each window.
        off_s: lengths of the periods between episodes.
        on_s: lengths of the episodes.
        rng: source of random numbers.

    Returns:
        The share of each second that lies within an episode, float64 `[windows, seconds]`.
    """
    cycle_s = off_s.expected_s + on_s.expected_s
    step = int(seconds / cycle_s * 1.2) + 4
    begins_on = rng.uniform(0, 1, windows) < on_s.expected_s / cycle_s
    first_on = np.where(begins_on, on_s.draw_residual(windows, rng), 0.0)
    until = first_on + np.where(
        begins_on, off_s.draw((windows,), rng), off_s.draw_residual(windows, rng)
    )
    starts, ends = [np.zeros((windows, 1))], [first_on[:, None]]
    while until.min() < seconds:
        on = on_s.draw((windows, step), rng)
        after = np.cumsum(on + off_s.draw((windows, step), rng), axis=1)
        begin = until[:, None] + np.concatenate((np.zeros((windows, 1)), after[:, :-1]), axis=1)
        starts.append(begin)
        ends.append(begin + on)
        until = until + after[:, -1]
    start = np.minimum(np.concatenate(starts, axis=1), seconds)
    end = np.minimum(np.concatenate(ends, axis=1), seconds)
    return _elapsed(start, seconds) - _elapsed(end, seconds)


def _elapsed(at_s: Floats, seconds: int) -> Floats:
    """Return the time of each second after the given instants, summed over the instants."""
    windows = len(at_s)
    second = at_s.astype(np.int64)
    index = (second + np.arange(windows)[:, None] * (seconds + 1)).ravel()
    size = windows * (seconds + 1)
    count = np.bincount(index, minlength=size).reshape(windows, -1)[:, :-1]
    part = np.bincount(index, (second + 1 - at_s).ravel(), minlength=size).reshape(windows, -1)
    return (np.cumsum(count, axis=1) - count + part[:, :-1]).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outages:
    """Outages of a part of the service, at random times.

    Args:
        miss: mean chance of a miss, from which the frequency of the outages follows.
        lengths: lengths of the outages.
        lost: chance of a miss during an outage.
        base: chance of a miss otherwise.
        gaps: distribution of the times between outages; `pareto` for storms of outages.
    """

    miss: float
    lengths: Lengths
    lost: float = 1.0
    base: float = 0.0
    gaps: str = "exponential"

    @property
    def gap_s(self) -> float:
        """Mean time between two outages."""
        share = (self.miss - self.base) / (self.lost - self.base)
        return self.lengths.expected_s * (1 - share) / share

    def draw(self, windows: int, seconds: int, rng: np.random.Generator) -> Floats:
        """Draw the mean chance in each second."""
        gaps = Lengths(kind=self.gaps, mean_s=self.gap_s)
        if self.gaps == "pareto":
            # The shortest gap follows from the mean; the longest is 100 times the shortest.
            unit = Lengths(kind="pareto", mean_s=1.0, exponent=1.2, longest_s=100.0)
            least = self.gap_s / unit.expected_s
            gaps = Lengths(kind="pareto", mean_s=least, exponent=1.2, longest_s=100 * least)
        out = episodes(windows, seconds, gaps, self.lengths, rng)
        return self.base + (self.lost - self.base) * np.clip(out, 0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrelatedLatency:
    """Log-normal latency that crosses its target.

    A part of the variance of the logarithm is common to all requests of a second and follows a
    first-order autoregression; the rest is independent.

    Args:
        miss: chance of a miss, from which the target follows.
        memory_s: correlation time.
        common: share of the variance that is common.
    """

    miss: float
    memory_s: float
    common: float

    def draw(self, windows: int, seconds: int, rng: np.random.Generator) -> Floats:
        """Draw the mean chance in each second."""
        keep = math.exp(-1 / self.memory_s)
        fresh = math.sqrt(1 - keep**2)
        level = np.empty((seconds, windows))
        level[0] = rng.standard_normal(windows)
        for second in range(1, seconds):
            level[second] = keep * level[second - 1] + fresh * rng.standard_normal(windows)
        target = special.ndtri(1 - self.miss)
        excess = math.sqrt(self.common) * level.T - target
        chance: Floats = special.ndtr(excess / math.sqrt(1 - self.common))
        return chance


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBursts:
    """Poisson arrivals whose rate and chance of a miss rise together, for random periods.

    Args:
        per_s: rate between bursts.
        burst_per_s: rate in a burst.
        every_s: mean time between bursts.
        lengths: lengths of the bursts.
        base: chance of a miss between bursts.
        lost: chance of a miss in a burst.
    """

    per_s: float
    burst_per_s: float
    every_s: float
    lengths: Lengths
    base: float
    lost: float

    @property
    def miss(self) -> float:
        """Long-run share of requests that miss their targets."""
        burst, quiet = self.burst_per_s * self.lengths.expected_s, self.per_s * self.every_s
        return (burst * self.lost + quiet * self.base) / (burst + quiet)

    def draw(self, windows: int, seconds: int, rng: np.random.Generator) -> Windows:
        """Draw windows from the stationary process."""
        gaps = Lengths(kind="exponential", mean_s=self.every_s)
        burst = np.clip(episodes(windows, seconds, gaps, self.lengths, rng), 0, 1)
        quiet = 1 - burst
        missed = rng.poisson(self.burst_per_s * self.lost * burst + self.per_s * self.base * quiet)
        good = rng.poisson(
            self.burst_per_s * (1 - self.lost) * burst + self.per_s * (1 - self.base) * quiet
        )
        return Windows(total=good + missed, missed=missed)
