"""How often the bounds of one run's attainment hold, on simulated runs whose truth is known.

Each scenario draws many runs of one service, sends them through the same code as a real run
(`gather`, then `decide`) and counts how often the true attainment lies above the lower and
below the upper bound. The objective is set to the truth itself, the hardest place for a
verdict: every PASS and every FAIL is then an error, and each should be rare.

    python benchmarks/interval_coverage.py            # about eight minutes
    python benchmarks/interval_coverage.py --runs 100 --json
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import SLOClass
from goodput_core.slo.verdict import VerdictKind, decide
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.statistics.evidence import gather

if TYPE_CHECKING:
    from numpy.typing import NDArray

TTFT_MS, TPOT_MS = 500, 50
EPISODE_MISS, QUIET_MISS = 0.8, 0.002


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A service and a window.

    With `episode_s` > 0, overloads begin at random, one every `every_s` on average, last
    `episode_s` on average, and miss 80 % of their requests; otherwise each request misses by
    itself with the chance `miss`. In a `queue` the overload shows as first tokens that come when
    it ends; otherwise as slow decoding, which leaves no backlog behind. With `drift_s` the
    chance of a miss wanders and forgets its past over that time.
    """

    name: str
    window_s: int = 300
    per_s: float = 5
    miss: float = 0.0
    every_s: float = 0.0
    episode_s: float = 0.0
    queue: bool = False
    drift_s: float = 0.0

    @property
    def truth(self) -> float:
        """The attainment of an endless run."""
        if self.drift_s:
            normal = np.random.default_rng(0).normal(size=1_000_000)
            return 1 - float(np.mean(_drifting_miss(normal)))
        if not self.episode_s:
            return 1 - self.miss
        overloaded = 1 - math.exp(-self.episode_s / self.every_s)
        return 1 - overloaded * EPISODE_MISS - (1 - overloaded) * QUIET_MISS


SCENARIOS = (
    Scenario(name="independent, 99 %", miss=0.01),
    Scenario(name="independent, 97 %", miss=0.03),
    Scenario(name="independent, 90 %", miss=0.1),
    Scenario(name="queues, 15 a window", every_s=20, episode_s=2, queue=True),
    Scenario(name="slow decoding, 15 a window", every_s=20, episode_s=2),
    Scenario(name="queues, 10 a window, 50/s", per_s=50, every_s=30, episode_s=2, queue=True),
    Scenario(name="slow decoding, 10 a window", every_s=30, episode_s=4),
    Scenario(name="queues, 15 in 15 min", window_s=900, every_s=60, episode_s=4, queue=True),
    Scenario(name="slow decoding, 60 in 1 h", window_s=3600, per_s=2, every_s=60, episode_s=4),
    Scenario(name="drift over 5 s, 10 min", window_s=600, drift_s=5),
    Scenario(name="queues, 5 a window", every_s=60, episode_s=3, queue=True),
    Scenario(name="drift over 20 s, 10 min", window_s=600, drift_s=20),
)


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """What was counted over the runs of one scenario."""

    scenario: str
    truth: float
    runs: int
    lower_holds: float
    upper_holds: float
    wrong_pass: float
    wrong_fail: float
    backlog_bars: float
    mean_half_width: float


def measure(scenario: Scenario, runs: int, seed: int = 1) -> Coverage:
    """Draw runs of a scenario and count how often its bounds hold."""
    rng = np.random.default_rng(seed)
    truth = scenario.truth
    promise = SLOClass(
        name="chat",
        ttft_ms=TTFT_MS,
        tpot_ms=TPOT_MS,
        objective=Fraction(truth).limit_denominator(10_000),
    )
    lower = upper = passed = failed = barred = 0
    width = 0.0
    for _ in range(runs):
        evidence = gather(
            simulated_run(scenario, rng),
            classes=[promise],
            window_ns=scenario.window_s * NS_PER_S,
            seed=int(rng.integers(2**32)),
        )
        chat = evidence.classes[0]
        interval = chat.interval
        if interval is None:
            raise RuntimeError("a simulated run without requests")
        verdict = decide(evidence.classes, evidence.validity)
        lower += interval.lower <= truth
        upper += interval.upper >= truth
        passed += verdict.kind is VerdictKind.PASS
        failed += verdict.kind is VerdictKind.FAIL
        barred += chat.backlog_ns * 20 > chat.window_ns
        width += chat.attainment.good / chat.attainment.total - interval.lower
    return Coverage(
        scenario=scenario.name,
        truth=truth,
        runs=runs,
        lower_holds=lower / runs,
        upper_holds=upper / runs,
        wrong_pass=passed / runs,
        wrong_fail=failed / runs,
        backlog_bars=barred / runs,
        mean_half_width=width / runs,
    )


def simulated_run(scenario: Scenario, rng: np.random.Generator) -> list[RequestRecord]:
    """One run: Poisson arrivals, and who misses as the scenario says."""
    count = max(1, rng.poisson(scenario.per_s * scenario.window_s))
    arrival = np.sort(rng.uniform(0, scenario.window_s, count))
    until = np.zeros(count)
    if scenario.drift_s:
        miss = _drifting_miss(_wander(scenario, rng))[arrival.astype(int)]
    elif scenario.episode_s:
        until = _overloaded_until(arrival, scenario, rng)
        miss = np.where(until > arrival, EPISODE_MISS, QUIET_MISS)
    else:
        miss = np.full(count, scenario.miss)
    missed = rng.random(count) < miss
    late = missed & scenario.queue
    ttft = np.where(late, np.maximum(until - arrival, TTFT_MS / 1000) + 0.05, 0.15)
    tpot_ns = np.where(missed & ~late, 2 * TPOT_MS, TPOT_MS // 2) * NS_PER_MS
    return [
        _record(number, round(a * NS_PER_S), round(t * NS_PER_S), int(p))
        for number, (a, t, p) in enumerate(zip(arrival, ttft, tpot_ns, strict=True))
    ]


def _record(number: int, scheduled_ns: int, ttft_ns: int, tpot_ns: int) -> RequestRecord:
    first_ns = scheduled_ns + ttft_ns
    last_ns = first_ns + tpot_ns * 9
    return RequestRecord(
        request_id=str(number),
        slo_class="chat",
        scheduled_ns=scheduled_ns,
        sent_ns=scheduled_ns,
        first_token_ns=first_ns,
        last_token_ns=last_ns,
        end_ns=last_ns,
        output_tokens=10,
        outcome=Outcome.OK,
    )


def _overloaded_until(
    arrival: NDArray[np.float64], scenario: Scenario, rng: np.random.Generator
) -> NDArray[np.float64]:
    """The end of the overload that each request arrived in; 0 outside of one."""
    before_s = 20 * scenario.episode_s  # overloads that began before the window reach into it
    count = rng.poisson((scenario.window_s + before_s) / scenario.every_s)
    until = np.zeros(len(arrival))
    for start in rng.uniform(-before_s, scenario.window_s, count):
        end = start + rng.exponential(scenario.episode_s)
        inside = (arrival >= start) & (arrival < end)
        until[inside] = np.maximum(until[inside], end)
    return until


def _wander(scenario: Scenario, rng: np.random.Generator) -> NDArray[np.float64]:
    """A standard normal for each second that forgets over `drift_s`."""
    keep = math.exp(-1 / scenario.drift_s)
    steps = rng.normal(size=scenario.window_s)
    values = np.empty(scenario.window_s)
    values[0] = steps[0]
    for second in range(1, scenario.window_s):
        values[second] = keep * values[second - 1] + math.sqrt(1 - keep**2) * steps[second]
    return values


def _drifting_miss(normal: NDArray[np.float64]) -> NDArray[np.float64]:
    miss: NDArray[np.float64] = 1 / (1 + np.exp(4 - 1.5 * normal))
    return miss


def main() -> None:
    """Measure every scenario and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=1000, help="runs of each scenario")
    parser.add_argument("--quick", action="store_true", help="twenty runs of each: does it work?")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    runs = 20 if options.quick else options.runs
    found = [measure(scenario, runs) for scenario in SCENARIOS]
    if options.json:
        print(json.dumps([asdict(coverage) for coverage in found], indent=2))
        return
    print(
        f"{'scenario':<28} {'truth':>7} {'lower':>7} {'upper':>7} "
        f"{'wrong PASS':>10} {'wrong FAIL':>10} {'barred':>7} {'± below':>8}"
    )
    for c in found:
        print(
            f"{c.scenario:<28} {c.truth:7.2%} {c.lower_holds:7.1%} {c.upper_holds:7.1%} "
            f"{c.wrong_pass:10.1%} {c.wrong_fail:10.1%} {c.backlog_bars:7.1%} "
            f"{c.mean_half_width:8.2%}"
        )


if __name__ == "__main__":
    main()
