"""`slo` against every other policy, on many loads and fleets, by one rule.

The cells are a pairwise design over the mix of requests, the load (0.5 to 4 times the knee), the
arrival process, the number of replicas, the preemption mode, known or hidden output lengths, the
size of the KV pool, and the bandwidth to host memory. Every policy serves the same seeds.

The rule: the mean difference of the kept promises of `slo` to each other policy, over paired seeds,
has a lower 95 % bound of at least −1 % of the requests; and on no seed does `slo` keep less than
95 % of the best policy. Levels of `priority` are strict: a policy that keeps less than `slo` at a
level is not compared at the levels below. Of a cell with few requests, each seed is several
independent loads, so that chance decides less. If a mean difference is at least −1 % but its bound
is not, the seeds were too few: the two policies then serve twice as many new seeds, and these
decide.

Admitted requests are judged one by one. A scheduler can ensure an end-to-end target if an idle
engine meets it even with the longest output of the request, and it can ensure all other targets:
99 % of these requests must be in time. The chances that `slo` predicted for the other requests must
be right within two points, over all cells of a mix with at least 500 of them.

Two further checks serve cells of their own. *Plateau*: at any load up to four times the knee, `slo`
keeps at least 97 % of the most that it kept at a lower load. *Hybrid*: with no policy, the
preemption mode `hybrid` keeps over 1 % less than the better of `swap` and `recompute`.

    python -m benchmarks.policies_everywhere
    python -m benchmarks.policies_everywhere --azure azure.parquet --mooncake mooncake.parquet
    python -m benchmarks.policies_everywhere --cells textbook,chat/1.2x --seeds 5 --json
    python -m benchmarks.policies_everywhere --checks plateau --wide --seeds 12
    python -m benchmarks.policies_everywhere --quick  # in a minute, as in CI

With the few seeds of `--quick`, the rule is that no mean difference is below −2 %.

The exit code is 1 if the rule or one of the checks is broken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.bound.step_bounds import capacity_of
from benchmarks.bounds import clairvoyant_bound, demands_of
from benchmarks.comparison.arguments import names_of, positive_count
from benchmarks.comparison.cells import Kept, run_cell
from benchmarks.comparison.design import FACTORS, cell_of, read_knees, settings, textbook_cells
from benchmarks.comparison.loads import MIXES, offered
from benchmarks.comparison.plateau import curves, plateau_series
from benchmarks.comparison.policies_view import (
    draw,
    show_cells,
    show_chances,
    show_curves,
    show_modes,
)
from benchmarks.comparison.preemption_modes import MODE_POLICIES, compare_modes, mode_cells
from benchmarks.comparison.rule import chances_by_mix, compare, judge_cell
from rich.console import Console
from rich.progress import track

from goodput_core.spec.choices import Policy
from goodput_core.spec.workloads import TokenBudgetSpec
from goodput_engine.scheduler.policies.registry import POLICIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Executor

    from benchmarks.comparison.cells import Cell
    from benchmarks.comparison.plateau import Curve
    from benchmarks.comparison.preemption_modes import ModeResult
    from benchmarks.comparison.rule import CellResult

__all__ = ["design", "main", "quick_cells", "serve"]

HOPELESS: Final = {2: 0.15, 4: 0.05, 8: 0.02}
"""A policy leaves a cell if it kept this much less than `slo` on each of so many first seeds."""
LEAST_REQUESTS: Final = 160
"""A seed is several loads until it has about so many requests."""
MOST_LOADS: Final = 4
MORE_SEEDS: Final = 2
"""Number of new seeds that decide an open difference, in multiples of the seeds."""
SEEDS_APART: Final = 1_000_000
"""Distance between the seeds of these loads."""
_FIRST_SEED: Final = 101
PLATEAU_ONLY: Final = "chat-8b"
"""A mix whose runs have too many requests for the whole design."""
CHECKS: Final = ("rule", "hybrid", "plateau")
QUICK_SEEDS: Final = 3
QUICK_FACTORS: Final = (0.8, 1.2, 4.0)
QUICK_POLICIES: Final = (Policy.SLO, Policy.SJF, Policy.SARATHI, Policy.PRIORITY, Policy.VLLM)


def design(paths: Mapping[str, str]) -> list[Cell]:
    """Return all cells.

    Args:
        paths: Parquet files of the traces, by name; cells of other traces are left out.
    """
    knees = read_knees()
    mixes = [*(name for name in MIXES if name != PLATEAU_ONLY), *paths]
    return [*textbook_cells(), *(cell_of(setting, knees, paths) for setting in settings(mixes))]


def small_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with little memory and one replica, for the comparison of modes."""
    return [
        replace(cell, name=f"modes/{cell.name}")
        for cell in cells
        if cell.fleet.replicas == 1 and "/small/" in cell.name
    ]


def serve(
    pool: Executor,
    cells: Sequence[Cell],
    policies: Sequence[str],
    seeds: Sequence[int],
    *,
    whole: bool,
    most_loads: int = MOST_LOADS,
) -> dict[str, dict[str, dict[int, Kept]]]:
    """Serve all cells with all policies; return the runs by cell, policy and seed.

    Args:
        pool: runs the cells.
        cells: the cells.
        policies: the policies; `slo` is one of them.
        seeds: the seeds.
        whole: True to serve every seed with every policy; False to drop a policy from a cell that
            is far below `slo` there; see `HOPELESS`.
        most_loads: number of loads that a seed of a cell with few requests may have.
    """
    runs: dict[str, dict[str, dict[int, Kept]]] = {
        cell.name: {policy: {} for policy in policies} for cell in cells
    }

    console = Console(stderr=True)
    tasks = [(cell, policy) for cell in cells for policy in policies]
    stages = [0, *(() if whole else HOPELESS), len(seeds)]
    for start, end in itertools.pairwise(stages):
        numbers = list(seeds[start:end])
        if not numbers:
            break
        futures = [
            (cell, policy, pool.submit(_serve, cell, policy, numbers, most_loads))
            for cell, policy in tasks
        ]
        served = f"seeds {numbers[0]} to {numbers[-1]}"
        for cell, policy, future in track(
            futures, served, console=console, transient=True, disable=not console.is_terminal
        ):
            runs[cell.name][policy] |= future.result()
        if end in HOPELESS:
            margin = HOPELESS[end]
            tasks = [
                (cell, policy)
                for cell, policy in tasks
                if not _hopeless(runs[cell.name], policy, margin)
            ]
    return runs


def settle(
    pool: Executor,
    cells: Sequence[Cell],
    results: Sequence[CellResult],
    seeds: range,
    *,
    most_loads: int = MOST_LOADS,
) -> list[CellResult]:
    """Judge the open differences by twice as many new seeds.

    Args:
        pool: runs the cells.
        cells: the cells.
        results: their results, in the same order.
        seeds: the seeds of these results; the new ones follow them.
        most_loads: see `serve`.
    """
    more = range(seeds.stop, seeds.stop + MORE_SEEDS * len(seeds))
    settled = []
    for cell, result in zip(cells, results, strict=True):
        policies = [Policy.SLO, *result.open_policies]
        if len(policies) == 1:
            settled.append(result)
            continue
        runs = serve(pool, [cell], policies, more, whole=True, most_loads=most_loads)
        settled.append(result.settled(judge_cell(cell.name, runs[cell.name])))
    return settled


def _serve(cell: Cell, policy: str, seeds: list[int], most_loads: int) -> dict[int, Kept]:
    return {
        seed: reduce(
            Kept.plus,
            (run_cell(cell, policy, number) for number in _loads(cell, seed, most_loads)),
        )
        for seed in seeds
    }


def _loads(cell: Cell, seed: int, most_loads: int) -> list[int]:
    """Return the seeds of the loads that stand for one seed of a cell."""
    requests = len(offered(cell.load, seed))
    count = min(most_loads, -(-LEAST_REQUESTS // max(1, requests)))
    return [seed + number * SEEDS_APART for number in range(count)]


def bounds_of(
    pool: Executor, cells: Sequence[Cell], seeds: Sequence[int], *, most_loads: int = MOST_LOADS
) -> dict[str, dict[int, float]]:
    """Return the largest weight that any policy can keep, by cell and seed."""
    futures = {
        (cell.name, seed): pool.submit(_bound, cell, seed, most_loads)
        for cell in cells
        for seed in seeds
    }
    return {
        cell.name: {seed: futures[cell.name, seed].result() for seed in seeds} for cell in cells
    }


def _bound(cell: Cell, seed: int, most_loads: int) -> float:
    fleet = cell.fleet
    budget = TokenBudgetSpec(initial=fleet.token_budget)
    capacity = capacity_of(
        fleet.profile(), max_num_seqs=fleet.max_num_seqs, max_step_tokens=budget.max
    )
    loads = [demands_of(offered(cell.load, number)) for number in _loads(cell, seed, most_loads)]
    return math.fsum(
        clairvoyant_bound(demands, capacity, replicas=fleet.replicas).certificate
        for demands in loads
    )


def _hopeless(runs: Mapping[str, Mapping[int, Kept]], policy: str, margin: float) -> bool:
    """Return True if a policy was below `slo` by more than the margin on every seed so far."""
    if policy == Policy.SLO:
        return False
    ours, theirs = list(runs[Policy.SLO].values()), list(runs[policy].values())
    _, differences = compare(ours, theirs)
    return min(differences) > margin


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return 1 if the rule or a check is broken."""
    parser = _parser()
    args = parser.parse_args(argv)
    paths = {
        name: path for name, path in (("azure", args.azure), ("mooncake", args.mooncake)) if path
    }
    for name, path in paths.items():
        if not Path(path).is_file():
            parser.error(f"--{name}: {path} is no file; make it with goodput trace import")
    knees = read_knees()
    cells = design(paths)
    modes = [*mode_cells(knees), *(small_cells(cells) if args.wide else ())]
    series = plateau_series(paths, wide=args.wide)
    if args.quick:
        cells, modes, series = quick_cells(cells), modes[::6], series[:1]
    if args.cells:
        parts = args.cells.split(",")
        cells, modes = (
            [cell for cell in some if any(part in cell.name for part in parts)]
            for some in (cells, modes)
        )
        series = [one for one in series if any(part in f"plateau/{one.name}" for part in parts)]
    if args.list:
        names = [*(cell.name for cell in (*cells, *modes)), *(f"plateau/{s.name}" for s in series)]
        print("\n".join(names))
        return 0
    policies = list(QUICK_POLICIES) if args.quick else args.policies
    if Policy.SLO not in policies:
        policies.append(Policy.SLO)
    if len(policies) == 1:
        parser.error("--policies: name a policy with which slo is compared")
    if not (cells or modes or series):
        parser.error(f"--cells: no cell has a name with {args.cells!r}; --list prints all names")
    count = QUICK_SEEDS if args.quick else args.seeds
    seeds = range(args.first_seed, args.first_seed + count)
    few = seeds[: max(2, count // 4)]
    results: list[CellResult] = []
    differences: list[ModeResult] = []
    lines: list[Curve] = []
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        if "rule" in args.checks:
            most_loads = 1 if args.quick else MOST_LOADS
            runs = serve(pool, cells, policies, seeds, whole=args.whole, most_loads=most_loads)
            limits = bounds_of(pool, cells, few, most_loads=most_loads) if args.bound else {}
            results = [
                judge_cell(
                    cell.name, runs[cell.name], short=args.quick, bounds=limits.get(cell.name)
                )
                for cell in cells
            ]
            results = settle(pool, cells, results, seeds, most_loads=most_loads)
        if "hybrid" in args.checks:
            preempting = QUICK_POLICIES[:2] if args.quick else MODE_POLICIES
            some = [policy for policy in preempting if policy in policies]
            differences = compare_modes(pool, modes, few, some, short=args.quick)
        if "plateau" in args.checks:
            lines = curves(
                pool,
                knees,
                few,
                series=series,
                paths=paths,
                factors=QUICK_FACTORS if args.quick else FACTORS,
                policies=policies if args.plot else (Policy.SLO,),
            )
    chances = chances_by_mix(results)
    broken = (
        sum(result.broken for result in results)
        + sum(one.broken for one in chances)
        + sum(result.broken for result in differences)
        + sum(line.broken for line in _ours(lines))
    )
    if args.plot:
        draw(lines, args.plot)
    if args.json:
        print(
            json.dumps(
                {
                    "rule": [asdict(one) | {"broken": one.broken} for one in results],
                    "chances": [asdict(one) | {"broken": one.broken} for one in chances],
                    "hybrid": [asdict(one) | {"broken": one.broken} for one in differences],
                    "plateau": [asdict(one) | {"broken": one.broken} for one in lines],
                    "broken": broken,
                }
            )
        )
        return int(bool(broken))
    show_cells(results, count)
    show_chances(chances)
    show_modes(differences)
    show_curves(_ours(lines))
    cpu_s = time.process_time() + sum(os.times()[2:4])
    print(f"\n{cpu_s / 60:.1f} CPU-minutes, {broken} results break the rule or a check")
    return int(bool(broken))


def _ours(lines: Sequence[Curve]) -> list[Curve]:
    return [line for line in lines if line.policy == Policy.SLO]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--azure", help="Parquet file of the Azure trace; without it no such cells")
    parser.add_argument("--mooncake", help="Parquet file of the Mooncake trace")
    parser.add_argument("--cells", help="comma-separated parts of the names of cells")
    parser.add_argument("--list", action="store_true", help="print the names of the cells")
    parser.add_argument(
        "--checks", type=names_of(CHECKS), default=",".join(CHECKS), help="(default: %(default)s)"
    )
    policies = sorted(POLICIES)
    parser.add_argument(
        "--policies", type=names_of(policies), default=",".join(policies), help="comma-separated"
    )
    parser.add_argument(
        "--seeds", type=positive_count, default=20, help="seeds per cell (%(default)s)"
    )
    parser.add_argument("--first-seed", type=int, default=_FIRST_SEED, help="(%(default)s)")
    parser.add_argument("--jobs", type=positive_count, default=2, help="processes (%(default)s)")
    parser.add_argument(
        "--bound", action="store_true", help="compare with the clairvoyant bound too, on few seeds"
    )
    parser.add_argument(
        "--wide",
        action="store_true",
        help="plateau: hidden lengths, other arrivals, two and four replicas and the traces too; "
        "hybrid: the cells of the rule with little memory and one replica too",
    )
    parser.add_argument("--whole", action="store_true", help="no policy is dropped early")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a short form, in a minute: fewer cells, policies and seeds",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plot", type=Path, help="PNG with the kept requests of every policy")
    return parser


def quick_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Return about a dozen cells of one replica, with an overload of each mix."""
    by_mix: dict[str, Cell] = {}
    for cell in cells:
        if cell.fleet.replicas == 1 and (cell.factor is None or 1 <= cell.factor <= 2):
            by_mix.setdefault(cell.name.partition("/")[0], cell)
    return list(by_mix.values())


if __name__ == "__main__":
    sys.exit(main())
