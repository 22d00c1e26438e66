"""Search the knee of every mix of the comparison of policies, and record it in `knees.json`.

    python -m benchmarks.design --azure azure.parquet --mooncake mooncake.parquet

The recorded knees determine the loads of the comparison (`comparison.design`).
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from benchmarks.comparison.cells import Cell, run_cell
from benchmarks.comparison.design import (
    TRACES,
    fleet_of,
    knee_key,
    load_of,
    read_knees,
    write_knees,
)
from benchmarks.comparison.loads import MIXES, Arrivals

from goodput_core.spec.choices import Policy, Preemption
from goodput_engine.scheduler.policies.registry import POLICIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["find_knee", "main"]

_SHARE: Final = 0.95
_REQUESTS: Final = 400
"""Smallest number of requests, over several seeds, from which a share is computed."""
_STATIC_BATCHING: Final = (Policy.STATIC, Policy.REQUEST, Policy.DYNAMIC)
_POLICIES: Final = (
    Policy.SLO,
    *(p for p in POLICIES if p not in {Policy.SLO, *_STATIC_BATCHING}),
)
"""All policies but the baselines of static batching, which would only cost time."""
_STEP: Final = 1.03


def find_knee(mix: str, *, small_kv: bool, paths: Mapping[str, str]) -> float:
    """Return the rate at which one replica is at its knee.

    It is the largest rate at which the best policy keeps 95 % of the share that it keeps at a rate
    far below. Some requests have targets that even an idle device misses. Arrivals are Poisson, and
    lengths are known. The rate is found by bisection within 3 %, first with one policy; each other
    policy then continues from there if it keeps the share at a rate 3 % higher.
    """
    fleet = fleet_of(mix, small_kv=small_kv)
    unscaled = load_of(mix, paths, arrivals=Arrivals.POISSON, rate_per_s=1, known_lengths=True)

    def share(policy: str, rate: float, least: float) -> float:
        cell = Cell(name="knee", load=replace(unscaled, rate_per_s=rate), fleet=fleet)
        best = 0.0
        for mode in (Preemption.RECOMPUTE, Preemption.HYBRID):
            kept = total = preemptions = 0
            for seed in itertools.count(1):
                run = run_cell(cell, policy, seed, mode)
                kept, total = kept + run.kept, total + run.offered
                preemptions += run.preemptions
                enough = _REQUESTS / 4 if kept < 0.9 * least * total else _REQUESTS
                if total >= enough:
                    break
            best = max(best, kept / total)
            if best >= least or not preemptions:
                break
        return best

    knee = 10 / unscaled.horizon_s
    least = _SHARE * share(_POLICIES[0], knee, 0)
    left = list(_POLICIES)
    while left:
        policy = left.pop(0)
        if share(policy, _STEP * knee, least) < least:
            continue
        low, high = _STEP * knee, 2 * knee
        while share(policy, high, least) >= least:
            low, high = high, 2 * high
        while high > _STEP * low:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if share(policy, middle, least) >= least else (low, middle)
        knee = low
    return float(f"{knee:.3g}")


def _search(task: tuple[str, bool, Mapping[str, str]]) -> tuple[str, float]:
    mix, small_kv, paths = task
    return knee_key(mix, small_kv=small_kv), find_knee(mix, small_kv=small_kv, paths=paths)


def main(argv: Sequence[str] | None = None) -> None:
    """Search the knees and record them."""
    parser = argparse.ArgumentParser(description="Search and record the knee of every mix.")
    parser.add_argument("--azure", help="Parquet file of the Azure trace")
    parser.add_argument("--mooncake", help="Parquet file of the Mooncake trace")
    parser.add_argument("--mixes", help="comma-separated; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="processes (%(default)s)")
    args = parser.parse_args(argv)
    paths = {name: path for name in TRACES if (path := getattr(args, name))}
    mixes = args.mixes.split(",") if args.mixes else [*MIXES, *paths]
    knees = read_knees()
    tasks = [(mix, small, paths) for mix in mixes for small in (False, True)]
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        for name, rate in pool.map(_search, tasks):
            print(f"{name}: {rate:g}/s", flush=True)
            knees[name] = rate
            write_knees(knees)


if __name__ == "__main__":
    main()
