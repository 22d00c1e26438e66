"""False refusals of `slo`, and the effect of `Retry-After`.

*False refusals.* Several mixes are served at 0.8 to 4 times the knee on one replica, with known and
with hidden output lengths. Of the refused requests, 200 are drawn evenly over these cells. Each one
is forced in: its cell is served again, with this request admitted in spite of the refusal. The
refusal was false in the strict sense if the request meets its targets and no other request loses
them. It was false in the net sense if the weight that all others keep does not fall at any level of
priority. The aim is at most 5 % false refusals in the strict sense.

*Retries.* Clients obey `Retry-After`: a refused request is sent again after that time, and its
targets count from its new arrival. The aim, below 1.5 times the knee, is that at least 80 % of the
clients are admitted at their first retry, and that retries do not lower the number of clients that
are served in time by more than 1 %.

    python -m benchmarks.refusals
    python -m benchmarks.refusals --checks forced --mixes chat,kv-bound --factors 1.2 --requests 50
    python -m benchmarks.refusals --checks retries --max-retries 1 --json
    python -m benchmarks.refusals --quick  # in seconds, as in CI

The exit code is 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, TypeVar

from benchmarks.comparison import forced, retries
from benchmarks.comparison.arguments import names_of, positive_count, positive_numbers
from benchmarks.comparison.design import read_knees
from benchmarks.comparison.forced import draw, refusal_cells, serve_forced, serve_watched
from benchmarks.comparison.loads import MIXES
from benchmarks.comparison.retries import retry_cells, serve_clients
from rich.console import Console
from rich.progress import track

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Executor, Future

    from benchmarks.comparison.cells import Cell
    from benchmarks.comparison.forced import ForcedResult
    from benchmarks.comparison.retries import RetryResult

__all__ = ["main", "misses_aim"]

CHECKS: Final = ("forced", "retries")
MOST_FALSE: Final = 0.05
LEAST_ENTERED: Final = 0.8
LEAST_KEPT: Final = 0.99
"""Least number of clients served in time, as a share of that without retries."""
JUDGED_BELOW: Final = 1.5
"""Multiple of the knee below which the aim of retries is judged."""
_FIRST_SEED: Final = 101
_QUICK_MIXES: Final = ("chat", "three-classes")
_QUICK_FACTORS: Final = (1.2,)
_QUICK_REQUESTS: Final = 8

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return 1 if an aim is missed."""
    args = _parser().parse_args(argv)
    mixes, factors = args.mixes, args.factors
    if args.quick:
        mixes, factors = mixes or _QUICK_MIXES, factors or _QUICK_FACTORS
        args.seeds, args.requests = 1, min(args.requests, _QUICK_REQUESTS)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    knees = read_knees()
    document: dict[str, Any] = {}
    missed = 0
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        if "forced" in args.checks:
            cells = refusal_cells(knees, mixes=mixes, factors=factors or forced.FACTORS)
            refused, results = force(pool, cells, seeds, args.requests)
            false = sum(one.false_strict for one in results)
            missed += false > MOST_FALSE * len(results)
            document["forced"] = [
                asdict(one) | {"false_strict": one.false_strict, "false_net": one.false_net}
                for one in results
            ]
            document["refused"] = refused
            if not args.json:
                show_forced(refused, results)
        if "retries" in args.checks:
            cells = retry_cells(knees, mixes=mixes, factors=factors or retries.FACTORS)
            tasks = [(cell, seed) for cell in cells for seed in seeds]
            clients = _all(
                "obedient clients",
                [
                    pool.submit(serve_clients, cell, seed, most_retries=args.max_retries)
                    for cell, seed in tasks
                ],
            )
            missed += sum(misses_aim(rows) for _, rows in _by_factor(clients))
            document["retries"] = [asdict(one) for one in clients]
            if not args.json:
                show_retries(clients, args.max_retries)
    if args.json:
        print(json.dumps(document | {"missed": missed}))
    else:
        print(f"\n{missed} aims missed")
    return int(bool(missed))


def force(
    pool: Executor, cells: Sequence[Cell], seeds: Sequence[int], count: int
) -> tuple[dict[str, int], list[ForcedResult]]:
    """Force refused requests in, one by one.

    Args:
        pool: runs the cells.
        cells: the cells.
        seeds: seeds of the loads.
        count: number of requests.

    Returns:
        The number of refused requests by cell, and the effect of each forced one.
    """
    tasks = [(cell, seed) for cell in cells for seed in seeds]
    runs = _all("all refusals", [pool.submit(serve_watched, *task) for task in tasks])
    kept = {(cell.name, seed): run.kept for (cell, seed), run in zip(tasks, runs, strict=True)}
    refused = {
        cell.name: [one for run in some for one in run.refused]
        for cell, some in zip(cells, _chunks(runs, len(seeds)), strict=True)
    }
    drawn = draw(list(refused.values()), count)
    results = _all(
        "forced requests",
        [pool.submit(serve_forced, one, kept[one.cell.name, one.seed]) for one in drawn],
    )
    return {name: len(some) for name, some in refused.items()}, results


def show_forced(refused: Mapping[str, int], results: Sequence[ForcedResult]) -> None:
    """Print the effects of forced requests, by mix and factor, and by reason."""
    header = f"{'drawn':>6} {'in time':>8} {'strict':>7} {'net':>5} {'mean change':>12}"
    print(f"{'mix':16} {'load':>5} {'refused':>8} {header}")
    for (mix, factor), rows in _grouped(results, lambda one: (one.mix, one.factor)):
        count = sum(refused[name] for name in {one.cell for one in rows})
        print(f"{mix:16} {factor:4g}x {count:8,} {_counts(rows)}")
    for (factor,), rows in _grouped(results, lambda one: (one.factor,)):
        count = sum(refused[name] for name in {one.cell for one in rows})
        print(f"{'all':16} {factor:4g}x {count:8,} {_counts(rows)}")
    print(f"{'all':16} {'':5} {sum(refused.values()):8,} {_counts(results)}")
    print(f"\n{'reason':70} {header}")
    for (reason,), rows in _grouped(results, lambda one: (one.reason,)):
        print(f"{reason:.70} {'':{max(0, 70 - len(reason))}}{_counts(rows)}")
    if not results:
        return
    strict, net = (
        sum(getattr(one, name) for one in results) / len(results)
        for name in ("false_strict", "false_net")
    )
    print(
        f"\nFalse refusals: {strict:.1%} in the strict sense (aim: at most {MOST_FALSE:.0%}), "
        f"{net:.1%} in the net sense.\nWith each cell weighted by its refusals: "
        f"{_weighted(refused, results, 'false_strict'):.1%} and "
        f"{_weighted(refused, results, 'false_net'):.1%}."
    )


def _counts(rows: Sequence[ForcedResult]) -> str:
    change = sum(one.change for one in rows) / len(rows) if rows else 0.0
    return (
        f"{len(rows):6} {sum(one.kept for one in rows):8} "
        f"{sum(one.false_strict for one in rows):7} {sum(one.false_net for one in rows):5} "
        f"{change:+12.2f}"
    )


def _weighted(refused: Mapping[str, int], results: Sequence[ForcedResult], name: str) -> float:
    """Return the share of false refusals if each cell counts by the number of its refusals."""
    false = total = 0.0
    for (cell,), rows in _grouped(results, lambda one: (one.cell,)):
        false += refused[cell] * sum(getattr(one, name) for one in rows) / len(rows)
        total += refused[cell]
    return false / total if total else 0.0


def show_retries(results: Sequence[RetryResult], most_retries: int) -> None:
    """Print the clients that retry, by mix and factor."""
    print(
        f"\n{'mix':16} {'load':>5} {'clients':>8} {'refused':>8} {'impossible':>11} "
        f"{'retried':>8} {'entered':>8} "
        f"{'share':>6} {'wait s':>7} {'kept/s':>7} {'without':>8}"
    )
    for (mix, factor), rows in _grouped(results, lambda one: (one.mix, one.factor)):
        print(f"{mix:16} {factor:4g}x {_clients(rows)}")
    for (factor,), rows in _by_factor(results):
        print(f"{'all':16} {factor:4g}x {_clients(rows)}{_verdict(rows)}")
    print(
        f"A client retries at most {most_retries} times. Aim below {JUDGED_BELOW:g} times the "
        f"knee: at least {LEAST_ENTERED:.0%} enter at the first retry,\nand at least "
        f"{LEAST_KEPT:.0%} as many clients are served in time as without retries."
    )


def _clients(rows: Sequence[RetryResult]) -> str:
    refused, retried = sum(one.refused for one in rows), sum(one.retried for one in rows)
    entered = sum(one.entered for one in rows)
    wait_s = sum(one.refused * one.mean_wait_s for one in rows) / refused if refused else 0.0
    duration_s = sum(one.duration_s for one in rows)
    share = f"{entered / retried:6.1%}" if retried else f"{'–':>6}"
    return (
        f"{sum(one.clients for one in rows):8,} {refused:8,} "
        f"{sum(one.impossible for one in rows):11,} {retried:8,} {entered:8,} {share} "
        f"{wait_s:7.1f} {sum(one.kept for one in rows) / duration_s:7.2f} "
        f"{sum(one.kept_without for one in rows) / duration_s:8.2f}"
    )


def _verdict(rows: Sequence[RetryResult]) -> str:
    return "  missed" if misses_aim(rows) else ""


def misses_aim(rows: Sequence[RetryResult]) -> bool:
    """Return True if the clients of one factor miss the aim."""
    if rows[0].factor >= JUDGED_BELOW:
        return False
    entered, retried = sum(one.entered for one in rows), sum(one.retried for one in rows)
    kept, without = sum(one.kept for one in rows), sum(one.kept_without for one in rows)
    return entered < LEAST_ENTERED * retried or kept < LEAST_KEPT * without


def _by_factor(results: Sequence[RetryResult]) -> list[tuple[tuple[float], list[RetryResult]]]:
    return _grouped(results, lambda one: (one.factor,))


K = TypeVar("K", bound=tuple[Any, ...])


def _grouped(results: Sequence[T], key: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    return [(name, list(rows)) for name, rows in groupby(sorted(results, key=key), key)]


def _chunks(values: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (values[at : at + size] for at in range(0, len(values), size))


def _all(title: str, futures: Sequence[Future[T]]) -> list[T]:
    """Return the results in order, with a progress bar on a terminal."""
    console = Console(stderr=True)
    return [
        future.result()
        for future in track(
            futures, title, console=console, transient=True, disable=not console.is_terminal
        )
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checks", type=names_of(CHECKS), default=",".join(CHECKS), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--mixes",
        type=names_of(MIXES),
        default=[],
        help="comma-separated; all but chat-8b by default",
    )
    parser.add_argument(
        "--factors",
        type=positive_numbers,
        default=[],
        help="comma-separated multiples of the knee",
    )
    parser.add_argument(
        "--requests", type=positive_count, default=200, help="requests to force in (%(default)s)"
    )
    parser.add_argument(
        "--max-retries", type=positive_count, default=4, help="a client then gives up (%(default)s)"
    )
    parser.add_argument(
        "--seeds", type=positive_count, default=1, help="seeds per cell (%(default)s)"
    )
    parser.add_argument("--first-seed", type=int, default=_FIRST_SEED, help="(%(default)s)")
    parser.add_argument("--jobs", type=positive_count, default=2, help="processes (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a short form, in seconds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
