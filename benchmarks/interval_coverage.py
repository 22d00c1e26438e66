"""Coverage of the bounds of one run's attainment, on simulated runs with a known true attainment.

Each scenario draws many windows of one service and judges them with the product's interval and with
the former one, which exists here for comparison only. The objective is the true attainment, where
every PASS and every FAIL is an error; each should occur in at most 5 % of the windows at 95 %
confidence. The scenarios marked with * were chosen before the method was tried on them, and the
method was not adjusted afterwards.

    python -m benchmarks.interval_coverage                   # about three minutes
    python -m benchmarks.interval_coverage --runs 300 --json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from goodput_core.slo.attainment import SecondCounts
from goodput_core.slo.verdict import VerdictKind, class_evidence, decide

__all__ = ["SCENARIOS", "Coverage", "Scenario", "Window", "measure"]

TTFT_S: Final = 0.5
EPISODE_MISS: Final = 0.8
QUIET_MISS: Final = 0.002
_TRUTH_WINDOWS: Final = 400
_BLOCKS: Final = 30
_RESAMPLES: Final = 2_000
_LEAST_BLOCKS: Final = 20
_BACKLOG_SHARE: Final = 20
_Z: Final = NormalDist().inv_cdf(0.95)


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """The requests of one window.

    Args:
        arrival_s: float64 `[num_requests]`, sorted.
        missed: bool `[num_requests]`.
        until_s: times of first tokens, float64 `[num_requests]`; None if all were on time.
    """

    arrival_s: NDArray[np.float64]
    missed: NDArray[np.bool_]
    until_s: NDArray[np.float64] | None = None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A service and a window.

    Args:
        name: name of the table's row.
        draw: draws one window of a length in seconds.
        window_s: length of a window.
        truth: attainment of an infinite run; None to estimate it from many windows.
        tuned: False if the method was never adjusted to this scenario.
        outage_s: declared longest outage that a PASS must exclude.
    """

    name: str
    draw: Callable[[int, np.random.Generator], Window]
    window_s: int = 300
    truth: float | None = None
    tuned: bool = True
    outage_s: int = 0


def independent(miss: float, per_s: float = 5) -> Callable[[int, np.random.Generator], Window]:
    """Requests miss independently."""

    def draw(window_s: int, rng: np.random.Generator) -> Window:
        arrival_s = _poisson(window_s, per_s, rng)
        return Window(arrival_s=arrival_s, missed=rng.random(len(arrival_s)) < miss)

    return draw


def episodes(
    every_s: float, length_s: float, *, per_s: float = 5, queue: bool = False, tail: float = 0.0
) -> Callable[[int, np.random.Generator], Window]:
    """Overloads start at random times and miss 80 % of their requests.

    Args:
        every_s: mean time between two starts.
        length_s: mean length.
        per_s: requests per second.
        queue: True if first tokens are emitted at the end of the overload; otherwise decodes are
            slow.
        tail: exponent of a Pareto distribution of the lengths; 0 for an exponential distribution.
    """

    def draw(window_s: int, rng: np.random.Generator) -> Window:
        arrival_s = _poisson(window_s, per_s, rng)
        until_s = np.zeros(len(arrival_s))
        before_s = (200 if tail else 20) * length_s  # earlier overloads reach into the window
        count = rng.poisson((window_s + before_s) / every_s)
        for start in rng.uniform(-before_s, window_s, count):
            if tail:
                length = length_s * (tail - 1) / tail * (1 + rng.pareto(tail))
            else:
                length = rng.exponential(length_s)
            inside = (arrival_s >= start) & (arrival_s < start + length)
            until_s[inside] = np.maximum(until_s[inside], start + length)
        chance = np.where(until_s > arrival_s, EPISODE_MISS, QUIET_MISS)
        missed = rng.random(len(arrival_s)) < chance
        if not queue:
            return Window(arrival_s=arrival_s, missed=missed)
        late_s = np.maximum(until_s - arrival_s, TTFT_S) + 0.05
        first_s = arrival_s + np.where(missed, late_s, 0.15)
        return Window(arrival_s=arrival_s, missed=missed, until_s=first_s)

    return draw


def drifting(forget_s: float) -> Callable[[int, np.random.Generator], Window]:
    """The probability of a miss drifts, with a correlation time of `forget_s`."""

    def draw(window_s: int, rng: np.random.Generator) -> Window:
        arrival_s = _poisson(window_s, 5, rng)
        chance = 1 / (1 + np.exp(4 - 1.5 * _drift(window_s, forget_s, rng)))
        return Window(
            arrival_s=arrival_s, missed=rng.random(len(arrival_s)) < chance[arrival_s.astype(int)]
        )

    return draw


def queueing(busy: float, swing: float = 0.0) -> Callable[[int, np.random.Generator], Window]:
    """One server with 0.1 s of work per request; a request misses if it waits for over 0.5 s.

    Args:
        busy: mean utilisation.
        swing: amplitude of the load, which follows a daily curve and drifts over 20 s.
    """

    def draw(window_s: int, rng: np.random.Generator) -> Window:
        warm_s = 60
        rate = np.full(warm_s + window_s, busy / 0.1)
        if swing:
            day = np.sin(np.linspace(0, math.pi, warm_s + window_s)) - 2 / math.pi
            rate = rate * np.exp(swing * (day + _drift(warm_s + window_s, 20, rng)))
        counts = rng.poisson(rate)
        arrival_s = np.sort(np.repeat(np.arange(len(rate)), counts) + rng.random(counts.sum()))
        work_s = rng.exponential(0.1, len(arrival_s))
        # Lindley's recursion: queued work at an arrival, minus the time since the previous one.
        ahead = np.concatenate(([0.0], np.cumsum(work_s)[:-1])) - arrival_s
        wait_s = ahead - np.minimum.accumulate(ahead)
        measured = arrival_s >= warm_s
        arrival_s, wait_s = arrival_s[measured] - warm_s, wait_s[measured]
        return Window(arrival_s=arrival_s, missed=wait_s > TTFT_S, until_s=arrival_s + wait_s)

    return draw


def _analytic(every_s: float, length_s: float) -> float:
    overloaded = 1 - math.exp(-length_s / every_s)
    return 1 - overloaded * EPISODE_MISS - (1 - overloaded) * QUIET_MISS


SCENARIOS: Final = (
    Scenario(name="independent, 99 %", draw=independent(0.01), truth=0.99),
    Scenario(name="independent, 97 %", draw=independent(0.03), truth=0.97),
    Scenario(name="independent, 90 %", draw=independent(0.1), truth=0.9),
    Scenario(name="queues, 15 a window", draw=episodes(20, 2, queue=True), truth=_analytic(20, 2)),
    Scenario(name="slow decoding, 15 a window", draw=episodes(20, 2), truth=_analytic(20, 2)),
    Scenario(
        name="queues, 10 a window, 50/s",
        draw=episodes(30, 2, per_s=50, queue=True),
        truth=_analytic(30, 2),
    ),
    Scenario(name="slow decoding, 10 a window", draw=episodes(30, 4), truth=_analytic(30, 4)),
    Scenario(
        name="queues, 15 in 15 min",
        window_s=900,
        draw=episodes(60, 4, queue=True),
        truth=_analytic(60, 4),
    ),
    Scenario(
        name="slow decoding, 60 in 1 h",
        window_s=3600,
        draw=episodes(60, 4, per_s=2),
        truth=_analytic(60, 4),
    ),
    Scenario(name="drift over 5 s, 10 min", window_s=600, draw=drifting(5)),
    Scenario(name="queues, 5 a window", draw=episodes(60, 3, queue=True), truth=_analytic(60, 3)),
    Scenario(name="drift over 20 s, 10 min", window_s=600, draw=drifting(20)),
    Scenario(
        name="heavy-tailed overloads, 10 min",
        window_s=600,
        draw=episodes(30, 2, queue=True, tail=1.5),
        tuned=False,
    ),
    Scenario(
        name="3 outages of 10 s in 30 min",
        window_s=1800,
        draw=episodes(600, 10),
        truth=_analytic(600, 10),
        tuned=False,
    ),
    Scenario(name="queue, 80 % busy", draw=queueing(0.8), tuned=False),
    Scenario(name="queue, 90 % busy, 15 min", window_s=900, draw=queueing(0.9), tuned=False),
    Scenario(
        name="queue, half a day's curve, 30 min",
        window_s=1800,
        draw=queueing(0.65, 0.25),
        tuned=False,
    ),
    Scenario(
        name="one outage of 2 s in 5 min",
        draw=episodes(300, 2),
        truth=_analytic(300, 2),
        tuned=False,
    ),
    Scenario(
        name="the same, 5 s declared",
        draw=episodes(300, 2),
        truth=_analytic(300, 2),
        tuned=False,
        outage_s=5,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Results of one interval on all runs of one scenario."""

    scenario: str
    interval: str
    truth: float
    runs: int
    lower_covers: float
    upper_covers: float
    wrong_pass: float
    wrong_fail: float
    mean_below: float


def measure(scenario: Scenario, runs: int, seed: int = 1) -> tuple[Coverage, Coverage]:
    """Draw runs of a scenario and return the coverage of the present and the former interval."""
    truth = scenario.truth
    if truth is None:
        drawn = [scenario.draw(scenario.window_s, _rng(seed, 1, k)) for k in range(_TRUTH_WINDOWS)]
        truth = 1 - sum(int(w.missed.sum()) for w in drawn) / sum(len(w.missed) for w in drawn)
    objective = Fraction(truth).limit_denominator(10_000)
    present, former = (_Counts(scenario.name, name, truth) for name in ("present", "former"))
    for number in range(runs):
        window = scenario.draw(scenario.window_s, _rng(seed, 0, number))
        second = window.arrival_s.astype(int)
        total = np.bincount(second, minlength=scenario.window_s)
        good = np.bincount(second[~window.missed], minlength=scenario.window_s)
        counts = SecondCounts(good=good.tolist(), total=total.tolist())
        evidence = class_evidence("chat", objective, counts, outage_s=scenario.outage_s)
        if evidence.interval is None:
            raise RuntimeError("a simulated window without requests")
        share = float(good.sum() / total.sum())
        kind = decide([evidence], None).kind
        present.add(share, evidence.interval.lower, evidence.interval.upper, kind)
        before = resampled_verdict(good, total, _overdue(window), objective, _rng(seed, 2, number))
        former.add(share, before.lower, before.upper, before.kind)
    return present.coverage(), former.coverage()


# --- the former interval ---------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class ResampledVerdict:
    """Bounds of 95 % confidence each by the former interval, and the verdict at an objective."""

    lower: float
    upper: float
    kind: VerdictKind


def resampled_verdict(
    good: NDArray[np.int64],
    total: NDArray[np.int64],
    waits_s: NDArray[np.float64],
    objective: Fraction,
    rng: np.random.Generator,
) -> ResampledVerdict:
    """Judge one class by the former interval.

    The window is divided into blocks of seconds, each a thirtieth of the window or longer than the
    longest backlog. The bounds are quantiles of 2,000 windows drawn from these blocks. They are
    never narrower than Wilson's bounds at the sample size divided by the design effect of the
    blocks. A backlog over a twentieth of the window rules out PASS.

    Args:
        good: requests that met their targets, int64 `[seconds]`.
        total: requests judged, int64 `[seconds]`.
        waits_s: overdue time and first-token time of each late request, seconds, float64
            `[num_late, 2]`.
        objective: share of requests that must attain.
        rng: source of the drawn blocks.
    """
    seconds = len(total)
    backlog_s = _longest_backlog_s(waits_s)
    length = -(-seconds // _BLOCKS)
    if backlog_s:
        length = max(length, math.ceil(backlog_s) + 1)
    pass_excluded = backlog_s * _BACKLOG_SHARE > seconds or seconds // length < _LEAST_BLOCKS
    length = min(length, seconds)
    effective = int(total.sum()) / _design_effect(good, total, length)
    lower, upper = _wilson(int(good.sum()), int(total.sum()), effective)
    shares = _resampled_shares(good, total, length, rng)
    low, high = np.quantile(shares, [0.05, 0.95], method="inverted_cdf")
    lower, upper = min(lower, float(low)), max(upper, float(high))
    needed = _Z**2 * float(objective / (1 - objective))
    kind = VerdictKind.INCONCLUSIVE
    if upper < objective:
        kind = VerdictKind.FAIL
    elif not pass_excluded and effective >= needed and lower >= objective:
        kind = VerdictKind.PASS
    return ResampledVerdict(lower=lower, upper=upper, kind=kind)


def _longest_backlog_s(waits_s: NDArray[np.float64]) -> float:
    """Return the longest period in which some request was overdue for its first token."""
    longest = start = reach = 0.0
    for begin, end in sorted(map(tuple, waits_s.tolist())):
        if begin > reach:
            start = begin
        reach = max(reach, end)
        longest = max(longest, reach - start)
    return longest


def _design_effect(good: NDArray[np.int64], total: NDArray[np.int64], length: int) -> float:
    sums, counts = int(good.sum()), int(total.sum())
    if sums in {0, counts} or 3 * length >= len(total):
        return 1.0
    surplus = _block_sums(good - sums / counts * total, length)
    blocks = len(total) / length
    variance = blocks * float(np.mean(surplus**2)) / (1 - 3 / blocks)
    variance += float(min(surplus.min(), 0.0)) ** 2
    return max(1.0, variance / (sums * (counts - sums) / counts))


def _resampled_shares(
    good: NDArray[np.int64], total: NDArray[np.int64], length: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    seconds = len(total)
    blocks, rest = divmod(seconds, length)
    starts = rng.integers(seconds, size=(_RESAMPLES, blocks))
    goods = _block_sums(good, length)[starts].sum(axis=1)
    totals = _block_sums(total, length)[starts].sum(axis=1)
    if rest:
        last = rng.integers(seconds, size=_RESAMPLES)
        goods += _block_sums(good, rest)[last]
        totals += _block_sums(total, rest)[last]
    filled = totals > 0
    shares: NDArray[np.float64] = goods[filled] / totals[filled]
    return shares


def _block_sums(
    values: NDArray[np.int64] | NDArray[np.float64], length: int
) -> NDArray[np.float64]:
    """Return the sum of the `length` values from every offset, wrapping around."""
    wrapped = np.concatenate((values, values[:length])).astype(np.float64)
    sums = np.concatenate(([0.0], np.cumsum(wrapped)))
    return sums[length : length + len(values)] - sums[: len(values)]


def _wilson(good: int, total: int, size: float) -> tuple[float, float]:
    share, square = good / total, _Z**2 / size
    spread = _Z * math.sqrt(share * (1 - share) / size + square / (4 * size))
    lower = (share + square / 2 - spread) / (1 + square)
    upper = (share + square / 2 + spread) / (1 + square)
    return max(0.0, min(lower, share)), min(1.0, max(upper, share))


# --- coverage ------------------------------------------------------------------------------------
class _Counts:
    """Counts of one interval over the runs of one scenario."""

    def __init__(self, scenario: str, interval: str, truth: float) -> None:
        self._scenario, self._interval, self._truth = scenario, interval, truth
        self._runs = self._lower = self._upper = self._pass = self._fail = 0
        self._below = 0.0

    def add(self, share: float, lower: float, upper: float, kind: VerdictKind) -> None:
        self._runs += 1
        self._lower += lower <= self._truth
        self._upper += upper >= self._truth
        self._pass += kind is VerdictKind.PASS
        self._fail += kind is VerdictKind.FAIL
        self._below += share - lower

    def coverage(self) -> Coverage:
        return Coverage(
            scenario=self._scenario,
            interval=self._interval,
            truth=self._truth,
            runs=self._runs,
            lower_covers=self._lower / self._runs,
            upper_covers=self._upper / self._runs,
            wrong_pass=self._pass / self._runs,
            wrong_fail=self._fail / self._runs,
            mean_below=self._below / self._runs,
        )


def _overdue(window: Window) -> NDArray[np.float64]:
    """Return the intervals in which requests were overdue, `[num_late, 2]`."""
    if window.until_s is None:
        return np.zeros((0, 2))
    overdue_s = window.arrival_s + TTFT_S
    late = window.until_s > overdue_s
    return np.stack((overdue_s[late], window.until_s[late]), axis=1)


def _poisson(window_s: int, per_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    return np.sort(rng.uniform(0, window_s, max(1, rng.poisson(per_s * window_s))))


def _drift(seconds: int, forget_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return one standard normal per second, with a correlation time of `forget_s`."""
    keep = math.exp(-1 / forget_s)
    steps = rng.normal(size=seconds)
    values = np.empty(seconds)
    values[0] = steps[0]
    for second in range(1, seconds):
        values[second] = keep * values[second - 1] + math.sqrt(1 - keep**2) * steps[second]
    return values


def _rng(*seeds: int) -> np.random.Generator:
    return np.random.default_rng(seeds)


def main() -> None:
    """Measure every scenario and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=1000, help="windows of each scenario")
    parser.add_argument("--quick", action="store_true", help="twenty windows of each scenario")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    runs = 20 if options.quick else options.runs
    found = [both for scenario in SCENARIOS for both in measure(scenario, runs)]
    if options.json:
        print(json.dumps([asdict(coverage) for coverage in found], indent=2))
        return
    print(
        f"{'scenario':<34} {'interval':<8} {'truth':>7} {'lower':>7} {'upper':>7} "
        f"{'wrong PASS':>10} {'wrong FAIL':>10} {'- below':>8}"
    )
    untuned = {s.name for s in SCENARIOS if not s.tuned}
    for c in found:
        print(
            f"{c.scenario + (' *' if c.scenario in untuned else ''):<34} {c.interval:<8} "
            f"{c.truth:7.2%} {c.lower_covers:7.1%} {c.upper_covers:7.1%} "
            f"{c.wrong_pass:10.1%} {c.wrong_fail:10.1%} {c.mean_below:8.2%}"
        )
    print("* not used to choose the method")


if __name__ == "__main__":
    main()
