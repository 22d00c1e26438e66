"""The predicted chances of admitted requests, against the share that was in time.

With unknown output lengths and end-to-end (E2E) targets, not even an idle engine can ensure that a
request is in time. `slo` then admits by the chance to meet the target. Mixes with E2E targets are
served on one replica, with a full and with a small KV pool. The mean of the chances at admission is
compared with the share of the admitted requests that met their targets. The aim is a difference of
at most two points in each mix.

    python -m benchmarks.calibration
    python -m benchmarks.calibration --mixes deadline --factors 0.5,1 --seeds 20 --json
    python -m benchmarks.calibration --quick  # in seconds, as in CI

The exit code is 1 if the aim is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from benchmarks.comparison.admitted import PredictingSloPolicy
from benchmarks.comparison.arguments import names_of, positive_count, positive_numbers
from benchmarks.comparison.cells import fleet_settings, planned_requests, slo_classes
from benchmarks.comparison.design import poisson_cell, read_knees
from benchmarks.comparison.loads import offered

from goodput_core.slo.judging import JudgementKind, judge
from goodput_core.spec.choices import Policy
from goodput_replay.emulation.emulate import emulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.comparison.cells import Cell

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.plan import PlannedRequest

__all__ = ["Calibration", "main", "serve_predicted"]

MIXES: Final = ("deadline", "tight-deadlines")
"""The mixes with end-to-end targets."""
FACTORS: Final = (0.8, 1.2, 2.0, 4.0)
TOLERANCE: Final = 0.02
_FIRST_SEED: Final = 101


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The admitted requests of a cell, over all seeds.

    Args:
        cell: name of the cell.
        mix: name of the mix.
        admitted: number of admitted requests.
        predicted: sum of their chances at admission.
        in_time: number of those that met their targets.
    """

    cell: str
    mix: str
    admitted: int
    predicted: float
    in_time: int


def serve_predicted(cell: Cell, seeds: Sequence[int]) -> Calibration:
    """Serve a cell with `slo` and add up the predictions and the requests in time."""
    runs = [_serve(cell, seed) for seed in seeds]
    return Calibration(
        cell=cell.name,
        mix=cell.load.mix,
        admitted=sum(len(chances) for chances, _ in runs),
        predicted=math.fsum(chance for chances, _ in runs for chance in chances),
        in_time=sum(in_time for _, in_time in runs),
    )


def _serve(cell: Cell, seed: int) -> tuple[list[float], int]:
    """Return the chances of the admitted requests, and the number of requests in time."""
    requests = offered(cell.load, seed)
    chances: dict[int, float] = {}
    judgements: Counter[JudgementKind] = Counter()
    settings = replace(
        fleet_settings(cell, Policy.SLO, seed, cell.preemption, slo=slo_classes(requests)),
        build_policy=partial(PredictingSloPolicy, chances),
    )

    def on_record(planned: PlannedRequest, record: RequestRecord) -> None:
        judgements[judge(record, planned.targets).kind] += 1

    by_id = {str(number): request for number, request in enumerate(requests)}
    emulate(iter(planned_requests(by_id)), settings, on_record)
    return list(chances.values()), judgements[JudgementKind.ATTAINED]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if the aim is missed."""
    args = _parser().parse_args(argv)
    if args.quick:
        args.factors, args.seeds = [2.0], 2
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    knees = read_knees()
    cells = [
        poisson_cell(mix, factor, knees, known_lengths=False, small_kv=small)
        for mix in args.mixes
        for small in (False, True)
        for factor in args.factors
    ]
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        futures = [pool.submit(serve_predicted, cell, list(seeds)) for cell in cells]
        results = [future.result() for future in futures]
    mixes = [_total([one for one in results if one.mix == mix]) for mix in args.mixes]
    missed = [one.mix for one in mixes if abs(_difference(one)) > TOLERANCE]
    if args.json:
        rows = [asdict(one) | {"difference": _difference(one)} for one in results]
        print(json.dumps({"cells": rows, "missed": missed}))
    else:
        width = max(len(one.cell) for one in results)
        print(f"{'cell':{width}}  admitted  predicted  in time  difference")
        for one in [*results, *mixes]:
            count = max(1, one.admitted)
            print(
                f"{one.cell:{width}}  {one.admitted:8}  {one.predicted / count:9.1%}"
                f"  {one.in_time / count:7.1%}  {_difference(one):+10.1%}"
            )
        print(f"\nmissed: {', '.join(missed) or 'nothing'}")
    return int(bool(missed))


def _total(results: Sequence[Calibration]) -> Calibration:
    """Add up the cells of a mix."""
    return Calibration(
        cell=f"{results[0].mix}, all",
        mix=results[0].mix,
        admitted=sum(one.admitted for one in results),
        predicted=math.fsum(one.predicted for one in results),
        in_time=sum(one.in_time for one in results),
    )


def _difference(one: Calibration) -> float:
    """Return the share in time less the predicted share."""
    return (one.in_time - one.predicted) / max(1, one.admitted)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mixes", type=names_of(MIXES), default=list(MIXES), help=f"of {', '.join(MIXES)}"
    )
    parser.add_argument(
        "--factors",
        type=positive_numbers,
        default=list(FACTORS),
        help="rates in multiples of the knee (0.8,1.2,2,4)",
    )
    parser.add_argument(
        "--seeds", type=positive_count, default=5, help="seeds per cell (%(default)s)"
    )
    parser.add_argument("--first-seed", type=int, default=_FIRST_SEED, help="(%(default)s)")
    parser.add_argument("--jobs", type=positive_count, default=2, help="processes (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a short form, in seconds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
