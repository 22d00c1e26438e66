"""`slo` against every other policy, on many loads and fleets, by one rule.

The cells are a pairwise design over the mix of requests, the load (0.5 to 4 times the knee), the
arrival process, the number of replicas, the preemption mode, known or hidden output lengths, the
size of the KV pool, and the bandwidth to host memory. Every policy serves the same seeds.

The rule: the mean difference of the kept promises of `slo` to each other policy, over paired seeds,
has a lower 95 % bound of at least −1 % of the requests; and on no seed does `slo` keep less than
95 % of the best policy. Levels of `priority` are strict: a policy that keeps less than `slo` at a
level is not compared at the levels below.

Two further checks serve cells of their own. *Plateau*: at any load up to four times the knee, `slo`
keeps at least 97 % of the most that it kept at a lower load. *Hybrid*: with no policy, the
preemption mode `hybrid` keeps over 1 % less than the better of `swap` and `recompute`.

    python -m benchmarks.policies_everywhere
    python -m benchmarks.policies_everywhere --azure azure.parquet --mooncake mooncake.parquet
    python -m benchmarks.policies_everywhere --cells textbook,chat/1.2x --seeds 5 --json
    python -m benchmarks.policies_everywhere --quick  # in a minute, as in CI

The exit code is 1 if the rule or one of the checks is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.cells import run_cell
from benchmarks.design import cell_of, read_knees, settings, textbook_cells
from benchmarks.loads import MIXES
from benchmarks.plateau import curves, plateau_mixes
from benchmarks.preemption_modes import MODE_POLICIES, compare_modes, mode_cells

from goodput_core.spec.choices import Policy
from goodput_engine.scheduler.policies.registry import POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Executor

    from benchmarks.cells import Cell, Kept
    from benchmarks.plateau import Curve
    from benchmarks.preemption_modes import ModeResult

__all__ = ["CellResult", "Difference", "compare", "design", "judge_cell", "main"]

TOLERANCE: Final = 0.01
SEED_SHARE: Final = 0.95
HOPELESS_AFTER: Final = 5
"""Seeds after which a policy is dropped that was far below `slo` on each of them."""
HOPELESS_BY: Final = 0.05
_FIRST_SEED: Final = 101
QUICK_SEEDS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`slo` minus another policy, in shares of the offered weight, on paired seeds.

    Args:
        policy: the other policy.
        level: lowest priority level that is counted.
        seeds: number of seeds.
        mean: mean difference.
        low: one-sided lower 95 % bound of the mean difference, from Student's t distribution.
    """

    policy: str
    level: int
    seeds: int
    mean: float
    low: float

    @property
    def broken(self) -> bool:
        """True if the rule is broken."""
        return self.low < -TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """A cell judged by the rule.

    Args:
        cell: name of the cell.
        shares: mean kept share of the offered weight, by policy.
        admitted_kept: kept share of the requests that `slo` admitted, over all seeds.
        differences: differences to the other policies.
        worst_seed: lowest share of `slo` in the best policy of the same seed.
        worst_seed_number: seed of that share.
        cpu_s: CPU time of all runs.
    """

    cell: str
    shares: Mapping[str, float]
    admitted_kept: float
    differences: tuple[Difference, ...]
    worst_seed: float
    worst_seed_number: int
    cpu_s: float

    @property
    def mean_broken(self) -> bool:
        """True if the mean difference to a policy breaks the rule."""
        return any(difference.broken for difference in self.differences)

    @property
    def seed_broken(self) -> bool:
        """True if a single seed breaks the rule."""
        return self.worst_seed < SEED_SHARE

    @property
    def broken(self) -> bool:
        """True if the rule is broken."""
        return self.mean_broken or self.seed_broken


def compare(one: Sequence[Kept], other: Sequence[Kept]) -> tuple[int, list[float]]:
    """Return the level at which two policies are compared, and the differences on each seed.

    The difference is in the kept weight of this level and all levels above, as a share of the
    offered weight of these levels. Levels are compared from the highest on. The comparison ends at
    the first level at which the policies differ, on average, by more than the tolerance.
    """
    levels = sorted({level for run in one for level in run.levels}, reverse=True)
    differences: list[float] = []
    for level in levels:
        differences = []
        for ours, theirs in zip(one, other, strict=True):
            whole = _offered(ours, level)
            gained = _kept(ours, level) - _kept(theirs, level)
            differences.append(gained / whole if whole else 0.0)
        if abs(statistics.fmean(differences)) > TOLERANCE:
            return level, differences
    return levels[-1], differences


def _offered(run: Kept, lowest: int) -> float:
    return sum(offered for level, (offered, _) in run.levels.items() if level >= lowest)


def _kept(run: Kept, lowest: int) -> float:
    return sum(kept for level, (_, kept) in run.levels.items() if level >= lowest)


def lower_bound(differences: Sequence[float]) -> float:
    """Return the one-sided lower 95 % bound of the mean of paired differences."""
    count = len(differences)
    if count < 2:
        return statistics.fmean(differences)
    error = statistics.stdev(differences) / count**0.5
    mean: float = statistics.fmean(differences)
    bound: float = mean - student_t95(count - 1) * error
    return bound


def student_t95(degrees: int) -> float:
    """Return the 95 % quantile of Student's t distribution.

    Source: the expansion 26.7.5 of Abramowitz and Stegun, "Handbook of Mathematical Functions",
    1964; within 1 % from 3 degrees of freedom on.
    """
    z, v = 1.6448536269514722, degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def judge_cell(name: str, runs: Mapping[str, Mapping[int, Kept]]) -> CellResult:
    """Judge a cell by the runs of each policy, by seed."""
    ours = runs[Policy.SLO]
    differences = []
    worst, worst_number = 1.0, 0
    for policy, by_seed in runs.items():
        if policy == Policy.SLO:
            continue
        one, other = [ours[seed] for seed in by_seed], list(by_seed.values())
        level, values = compare(one, other)
        differences.append(
            Difference(
                policy=policy,
                level=level,
                seeds=len(values),
                mean=statistics.fmean(values),
                low=lower_bound(values),
            )
        )
        for seed, run in by_seed.items():
            share = _seed_share(ours[seed], run)
            if share < worst:
                worst, worst_number = share, seed
    admitted = sum(run.admitted for run in ours.values())
    return CellResult(
        cell=name,
        shares={
            policy: statistics.fmean(run.share for run in by_seed.values())
            for policy, by_seed in runs.items()
        },
        admitted_kept=sum(run.kept for run in ours.values()) / admitted if admitted else 1.0,
        differences=tuple(sorted(differences, key=lambda one: one.low)),
        worst_seed=worst,
        worst_seed_number=worst_number,
        cpu_s=sum(run.wall_s for by_seed in runs.values() for run in by_seed.values()),
    )


def _seed_share(ours: Kept, theirs: Kept) -> float:
    """Return the share of one run in another, at the first level at which the runs differ."""
    for level in ours.levels:
        one, other = _kept(ours, level), _kept(theirs, level)
        if one != other:
            return one / other if other else 1.0
    return 1.0


def design(paths: Mapping[str, str]) -> list[Cell]:
    """Return all cells.

    Args:
        paths: Parquet files of the traces, by name; cells of other traces are left out.
    """
    knees = read_knees()
    mixes = [*MIXES, *paths]
    return [*textbook_cells(), *(cell_of(setting, knees, paths) for setting in settings(mixes))]


def serve(
    pool: Executor,
    cells: Sequence[Cell],
    policies: Sequence[str],
    seeds: Sequence[int],
    *,
    whole: bool,
) -> dict[str, dict[str, dict[int, Kept]]]:
    """Serve all cells with all policies; return the runs by cell, policy and seed.

    Args:
        pool: runs the cells.
        cells: the cells.
        policies: the policies; `slo` is one of them.
        seeds: the seeds.
        whole: True to serve every seed with every policy; False to drop a policy from a cell if
            it kept at least 5 % of the requests less than `slo` on each of the first five seeds.
    """
    first, rest = list(seeds[:HOPELESS_AFTER]), list(seeds[HOPELESS_AFTER:])
    runs: dict[str, dict[str, dict[int, Kept]]] = {
        cell.name: {policy: {} for policy in policies} for cell in cells
    }

    def run(tasks: Iterable[tuple[Cell, str]], numbers: list[int]) -> None:
        futures = [
            (cell, policy, pool.submit(_serve, cell, policy, numbers)) for cell, policy in tasks
        ]
        for cell, policy, future in futures:
            runs[cell.name][policy] |= future.result()

    run([(cell, policy) for cell in cells for policy in policies], first)
    if rest:
        run(
            [
                (cell, policy)
                for cell in cells
                for policy in policies
                if whole or not _hopeless(runs[cell.name], policy)
            ],
            rest,
        )
    return runs


def _serve(cell: Cell, policy: str, seeds: list[int]) -> dict[int, Kept]:
    return {seed: run_cell(cell, policy, seed) for seed in seeds}


def _hopeless(runs: Mapping[str, Mapping[int, Kept]], policy: str) -> bool:
    """Return True if a policy was far below `slo` on every seed so far."""
    if policy == Policy.SLO:
        return False
    ours, theirs = list(runs[Policy.SLO].values()), list(runs[policy].values())
    _, differences = compare(ours, theirs)
    return min(differences) > HOPELESS_BY


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return 1 if the rule or a check is broken."""
    args = _parser().parse_args(argv)
    paths = {
        name: path for name, path in (("azure", args.azure), ("mooncake", args.mooncake)) if path
    }
    knees = read_knees()
    cells, modes, mixes = design(paths), mode_cells(knees), plateau_mixes()
    if args.quick:
        cells, modes = quick_cells(cells), modes[::6]
        mixes = mixes[:1]
    if args.cells:
        parts = args.cells.split(",")
        cells, modes = (
            [cell for cell in some if any(part in cell.name for part in parts)]
            for some in (cells, modes)
        )
        mixes = [mix for mix in mixes if any(part in f"plateau/{mix}" for part in parts)]
    checks = args.checks.split(",")
    if args.list:
        print(
            "\n".join([*(cell.name for cell in (*cells, *modes)), *map("plateau/{}".format, mixes)])
        )
        return 0
    policies = args.policies.split(",")
    if Policy.SLO not in policies:
        policies.append(Policy.SLO)
    count = QUICK_SEEDS if args.quick else args.seeds
    seeds = range(args.first_seed, args.first_seed + count)
    few = seeds[: max(1, count // 4)]
    results: list[CellResult] = []
    differences: list[ModeResult] = []
    lines: list[Curve] = []
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        if "rule" in checks:
            runs = serve(pool, cells, policies, seeds, whole=args.whole)
            results = [judge_cell(cell.name, runs[cell.name]) for cell in cells]
        if "hybrid" in checks:
            some = [policy for policy in MODE_POLICIES if policy in policies]
            differences = compare_modes(pool, modes, seeds[: max(1, count // 2)], some)
        if "plateau" in checks:
            lines = curves(
                pool, knees, few, mixes=mixes, policies=policies if args.plot else (Policy.SLO,)
            )
    broken = (
        sum(result.broken for result in results)
        + sum(result.broken for result in differences)
        + sum(line.broken for line in _ours(lines))
    )
    if args.plot:
        draw(lines, args.plot)
    if args.json:
        print(
            json.dumps(
                {
                    "rule": [asdict(one) for one in results],
                    "hybrid": [asdict(one) for one in differences],
                    "plateau": [asdict(one) for one in lines],
                    "broken": broken,
                }
            )
        )
        return int(bool(broken))
    show(results, count)
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
    parser.add_argument("--checks", default="rule,hybrid,plateau", help="(default: %(default)s)")
    parser.add_argument("--policies", default=",".join(sorted(POLICIES)), help="comma-separated")
    parser.add_argument("--seeds", type=int, default=20, help="seeds per cell (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=_FIRST_SEED, help="(%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument("--whole", action="store_true", help="no policy is dropped early")
    parser.add_argument("--quick", action="store_true", help="a short form, in a minute")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plot", type=Path, help="PNG with the kept requests of every policy")
    return parser


def quick_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Return about twelve cells, spread over the design."""
    return list(cells[:: max(1, len(cells) // 12)])


def show(results: Sequence[CellResult], seeds: int) -> None:
    """Print the table of the rule, the worst cells first."""
    if not results:
        return
    width = max(len(result.cell) for result in results)
    print(
        f"{'cell':{width}}  {'slo':>6}  {'admitted':>8}  {'worst pair':18}"
        f"  {'difference':>10}  {'at least':>8}  {'worst seed':>10}"
    )
    for result in sorted(results, key=lambda one: one.differences[0].low):
        worst = result.differences[0]
        print(
            f"{result.cell:{width}}  {result.shares[Policy.SLO]:6.1%}  {result.admitted_kept:8.1%}"
            f"  {worst.policy:10} {result.shares[worst.policy]:7.1%}"
            f"  {worst.mean:+10.2%}  {worst.low:+8.2%}  {result.worst_seed:10.1%}"
            f"{'  broken' if result.broken else ''}"
        )
    cpu_s = sum(result.cpu_s for result in results)
    print(
        f"{len(results)} cells, {seeds} seeds, {cpu_s / 60:.1f} CPU-minutes. The rule is broken in "
        f"{sum(result.broken for result in results)} cells, in "
        f"{sum(result.mean_broken for result in results)} of them by the mean difference."
    )


def show_modes(results: Sequence[ModeResult]) -> None:
    """Print the differences of `hybrid` to the better of the other modes, the worst first."""
    if not results:
        return
    width = max(len(result.cell) for result in results)
    print(
        f"\n{'cell':{width}}  {'policy':10}  {'recompute':>9}  {'swap':>6}  {'hybrid':>6}"
        f"  {'difference':>10}"
    )
    for result in sorted(results, key=lambda one: one.difference):
        shares = result.shares
        print(
            f"{result.cell:{width}}  {result.policy:10}  {shares['recompute']:9.1%}"
            f"  {shares['swap']:6.1%}  {shares['hybrid']:6.1%}  {result.difference:+10.2%}"
            f"{'  broken' if result.broken else ''}"
        )


def show_curves(lines: Sequence[Curve]) -> None:
    """Print the kept requests of `slo` by load."""
    if not lines:
        return
    print("\noffered → kept per second (admitted in time), by multiples of the knee")
    for line in lines:
        points = "  ".join(
            f"{p.factor:g}x {p.offered_per_s:.1f}→{p.kept_per_s:.1f} ({p.admitted_kept:.0%})"
            for p in line.points
        )
        print(f"{line.mix:16} {points}  lowest {line.lowest:.1%}{'  broken' * line.broken}")


def draw(lines: Sequence[Curve], path: Path) -> None:
    """Draw kept against offered requests, a panel for each mix and a line for each policy."""
    from matplotlib.figure import Figure

    mixes = list(dict.fromkeys(line.mix for line in lines))
    rows = -(-len(mixes) // 3)
    figure = Figure(figsize=(12, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, 3, squeeze=False).flatten()
    for panel, mix in zip(panels, mixes, strict=False):
        for line in lines:
            if line.mix == mix:
                panel.plot(
                    [point.factor for point in line.points],
                    [point.kept_per_s for point in line.points],
                    marker=".",
                    label=line.policy,
                    linewidth=2.5 if line.policy == Policy.SLO else 1,
                )
        panel.set_title(mix)
        panel.set_xlabel("offered, multiples of the knee")
        panel.set_ylabel("kept requests/s")
        panel.grid(alpha=0.3)
    for panel in panels[len(mixes) :]:
        panel.set_visible(False)
    panels[0].legend(frameon=False, fontsize="x-small")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
