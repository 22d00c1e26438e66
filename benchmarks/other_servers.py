"""The replica law of another server than Goodput's engine, under loads that step, in virtual time.

The law sees no step times: only arrivals, requests in flight, missed targets and the server's queue
(`goodput_core.control.observed`). The service is that of `tests/core/control`: replicas that batch
continuously, start slowly and report late. The cases and their seeds were written down before the
law was changed for them, and were run before and after only.

For each level of the load, the table has the fewest fixed replicas that hold the objective of 95 %,
the replicas in the last 15 minutes, and the requests that met their targets: in the first minutes
after the step (15, and two start-ups), and in the rest.

    python -m benchmarks.other_servers
    python -m benchmarks.other_servers --quick    # one case with one seed, in seconds
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table
from tests.core.control.conftest import LENGTHS, Plant

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CASES", "DOCUMENTS", "SHORT", "Case", "LevelResult", "main", "serve"]

_SEEDS: Final = (101, 102, 103, 104, 105, 106)
SHORT: Final = ((300, 30), (150, 60))
DOCUMENTS: Final = (*((400, 60),) * 7, (6000, 100))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One load.

    Args:
        lengths: prompt and output tokens, each pair equally likely.
        startup_s: start-up time of a replica.
        levels: end in seconds, requests per second, and the fewest fixed replicas that hold the
            objective on three other seeds.
    """

    lengths: tuple[tuple[int, int], ...]
    startup_s: int
    levels: tuple[tuple[int, float, int], ...]


def _mixed(startup_s: int, *levels: tuple[int, float, int]) -> Case:
    """Return a case of mixed lengths, with loads in multiples of 1.1 requests per second."""
    scaled = tuple((end_s, 1.1 * rate, fewest) for end_s, rate, fewest in levels)
    return Case(lengths=LENGTHS, startup_s=startup_s, levels=scaled)


CASES: Final = {
    "a large step up and down": _mixed(150, (600, 0.6, 1), (5400, 4.5, 5), (12600, 0.6, 1)),
    "half of the load goes": _mixed(150, (600, 0.6, 1), (5400, 2.6, 3), (12600, 1.3, 2)),
    "slow starts": _mixed(240, (600, 0.9, 2), (5400, 3.4, 4), (12600, 0.9, 2)),
    "two steps down": _mixed(60, (600, 0.6, 1), (4200, 3.4, 4), (9600, 1.7, 2), (15000, 0.5, 1)),
    "up after an hour": _mixed(150, (3600, 0.6, 1), (9000, 3.0, 4)),
    "short requests": Case(
        lengths=SHORT, startup_s=20, levels=((600, 1.5, 1), (4200, 6.0, 2), (9600, 1.5, 1))
    ),
    "some documents": Case(
        lengths=DOCUMENTS, startup_s=150, levels=((600, 0.5, 2), (5400, 2.0, 4), (12600, 0.5, 2))
    ),
    "a stair": _mixed(
        20, (2400, 1, 2), (4800, 2, 3), (7200, 3, 4), (9600, 2, 3), (12000, 1, 2)
    ),
    "steady": _mixed(150, (10800, 2.0, 3)),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult:
    """One level of a load in one run.

    Args:
        replicas: median of the replicas in the last 15 minutes.
        early, late: shares of the requests that met their targets after the step and in the rest.
    """

    replicas: float
    early: float
    late: float


def serve(case: Case, seed: int) -> tuple[list[LevelResult], float]:
    """Return the results of all levels, and the hours of all replicas."""
    levels = case.levels

    def rate(at_s: float) -> float:
        return next((per_s for end_s, per_s, _ in levels if at_s < end_s), levels[-1][1])

    service = Plant(
        rate=rate, lengths=case.lengths, startup_s=case.startup_s, seed=seed, foreign=True
    )
    service.device = None
    results: list[LevelResult] = []
    begin_s = 0
    for end_s, _, _ in levels:
        early_s = min(900 + 2 * case.startup_s, (end_s - begin_s) // 2)
        early = _attained(service, early_s)
        late = _attained(service, end_s - begin_s - early_s)
        replicas = median(service.desired[-90:])
        results.append(LevelResult(replicas=replicas, early=early, late=late))
        begin_s = end_s
    return results, sum(service.desired) / 360


def _attained(service: Plant, seconds: float) -> float:
    service.judged = service.good = 0
    service.run(seconds)
    return service.good / max(1, service.judged)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one case with one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=_SEEDS, metavar="N")
    args = parser.parse_args(argv)
    seeds = args.seeds[:1] if args.quick else args.seeds
    columns = (
        "case",
        "requests/s",
        "fewest",
        "replicas",
        "met early",
        "met later",
        "replica hours",
    )
    table = Table(*columns)
    for name in ["short requests"] if args.quick else CASES:
        runs = [serve(CASES[name], seed) for seed in seeds]
        hours = sum(h for _, h in runs) / len(runs)
        for number, (_, per_s, fewest) in enumerate(CASES[name].levels):
            level = [results[number] for results, _ in runs]
            table.add_row(
                "" if number else name,
                f"{per_s:.2f}",
                f"{fewest}",
                " ".join(f"{r.replicas:g}" for r in level),
                _percents([r.early for r in level]),
                _percents([r.late for r in level]),
                "" if number else f"{hours:.1f}",
            )
    Console().print(table)
    return 0


def _percents(shares: Sequence[float]) -> str:
    return f"{100 * sum(shares) / len(shares):.0f} % (least {100 * min(shares):.1f})"


if __name__ == "__main__":
    sys.exit(main())
