"""The promises that `slo` keeps, against upper bounds and against a schedule that knows everything.

One replica serves each mix at 0.5 to 4 times the knee, with Poisson arrivals, and the same requests
with known and with hidden output lengths. `benchmarks.bounds` gives the clairvoyant bound, the
clairvoyant schedule and the informed bound of these requests. The distribution for the informed
bound is taken from further draws of the load. Of mixes with several priority levels, only the
highest one is compared: a bound of the sum says nothing about strict levels.

*Reference.* With known lengths it is the clairvoyant bound. Where the best known schedule is more
than 5 % below the bound, it is that schedule: of `benchmarks.bounds`, or a run of `slo` with known
lengths that is offered all requests or only some of them. With hidden lengths it is the informed
bound, and at most the reference of known lengths. *Aim*: 95 % of the reference up to 1.2 times the
knee, and 90 % above.

For each cell that misses the aim, the second table follows the loss from the bound to `slo`:

- from the bound to the schedule: requests that the bound serves in part, blocks that it shares
  among requests as if these could pause at any time for nothing, and what the search did not find;
- from the schedule to `slo` that is offered only the requests of the schedule: margins, order and
  evictions (*execution*);
- from there to `slo` that is offered all requests: the wrong requests were admitted, because later
  arrivals are unknown (*choice*);
- from there to `slo` with hidden lengths.

The column *one class* is the most that `slo` keeps with known lengths if only one of the classes is
offered. Where it is more than with all classes, the requests of the others cost more than they are
worth.

    python -m benchmarks.against_bounds
    python -m benchmarks.against_bounds --mixes kv-bound --factors 4 --seeds 5 --json
    python -m benchmarks.against_bounds --quick  # one cell, in seconds

The exit code is 1 if a cell misses the aim.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Final

from benchmarks.bound.clairvoyant import Limits
from benchmarks.bound.schedule_search import best_schedule
from benchmarks.bound.step_bounds import capacity_of
from benchmarks.bounds import clairvoyant_bound, demands_of, informed_bound
from benchmarks.comparison.arguments import names_of, positive_count, positive_numbers
from benchmarks.comparison.design import FACTORS, poisson_cell, read_knees
from benchmarks.comparison.fates import Fate, serve_each
from benchmarks.comparison.loads import MIXES, offered

from goodput_core.spec.workloads import TokenBudgetSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.comparison.cells import Cell
    from benchmarks.comparison.loads import OfferedRequest

__all__ = ["Shares", "main", "measure"]

LOOSE: Final = 0.05
"""If the best schedule is below the bound by more than this share of it, it is the reference."""
NEAR_FACTOR: Final = 1.2
"""Largest load, in multiples of the knee, at which the higher aim holds."""
NEAR_AIM, FAR_AIM = 0.95, 0.90
_FIRST_SEED: Final = 9401
_DRAWS: Final = 20
"""Further draws of a load from which the distribution of output lengths is taken."""
_DRAWS_APART: Final = 1_000_000


_COLUMNS: Final = (
    "offered",
    "schedule",
    *(f"{lengths} {fate}" for lengths in ("known", "hidden") for fate in Fate),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The requests of a cell, at its highest priority level, over all seeds; sums of weights.

    Args:
        mix: name of the mix.
        factor: rate in multiples of the knee.
        offered: weight of all requests.
        bound, schedule, informed: clairvoyant bound, schedule, and informed bound.
        chosen: kept with known lengths if only the requests of the schedule are offered.
        known, hidden: kept with known and with hidden lengths.
        alone: kept with known lengths if only one class is offered, by class.
        groups: numbers of requests by class and third of the arrivals, and by `_COLUMNS`.
    """

    mix: str
    factor: float
    offered: float
    bound: float
    schedule: float
    informed: float
    chosen: float
    known: float
    hidden: float
    alone: Mapping[str, float]
    groups: Mapping[str, Mapping[str, int]]

    @property
    def aim(self) -> float:
        """Share of the reference that `slo` is to keep."""
        return NEAR_AIM if self.factor <= NEAR_FACTOR else FAR_AIM

    @property
    def best(self) -> float:
        """The most that any schedule of these requests is known to keep.

        A run of `slo` with some of the requests is a schedule too.
        """
        return max(self.schedule, self.chosen, self.known, *self.alone.values())

    @property
    def reference(self) -> float:
        """The weight against which known lengths count."""
        return self.best if self.best < (1 - LOOSE) * self.bound else self.bound

    @property
    def hidden_reference(self) -> float:
        """The weight against which hidden lengths count."""
        return min(self.informed, self.reference)

    @property
    def known_share(self) -> float:
        """Kept share of the reference with known lengths; 1 without any request in time."""
        return self.known / self.reference if self.reference else 1.0

    @property
    def hidden_share(self) -> float:
        """Kept share of the reference with hidden lengths; 1 without any request in time."""
        return self.hidden / self.hidden_reference if self.hidden_reference else 1.0

    @property
    def missed(self) -> bool:
        """True if a share is below the aim."""
        return min(self.known_share, self.hidden_share) < self.aim

    def plus(self, other: Shares) -> Shares:
        """Add the requests of another seed."""
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in ("offered", "bound", "schedule", "informed", "chosen", "known", "hidden")
        }
        alone = {
            name: self.alone.get(name, 0) + other.alone.get(name, 0)
            for name in {**self.alone, **other.alone}
        }
        groups = {
            name: dict(Counter(self.groups.get(name)) + Counter(other.groups.get(name)))
            for name in {**self.groups, **other.groups}
        }
        return replace(self, **sums, alone=alone, groups=groups)


def _fates(cell: Cell, requests: Sequence[OfferedRequest], seed: int) -> list[Fate]:
    return [one.fate for one in serve_each(cell, requests, seed)]


def _kept(requests: Sequence[OfferedRequest], fates: Sequence[Fate], level: int) -> float:
    """Return the weight that was kept at this priority level or above."""
    return sum(
        request.weight
        for request, fate in zip(requests, fates, strict=True)
        if fate is Fate.KEPT and request.priority >= level
    )


def measure(
    mix: str, factor: float, knees: Mapping[str, float], seed: int, rounds: int | None = None
) -> Shares:
    """Return the shares of one seed of a mix.

    Args:
        mix: name of the mix.
        factor: rate in multiples of the knee.
        knees: rate of the knee of one replica, by `knee_key`.
        seed: seed of the load.
        rounds: number of changes in the search for a schedule; None for the default.
    """
    cell = poisson_cell(mix, factor, knees, known_lengths=True)
    blind = poisson_cell(mix, factor, knees, known_lengths=False)
    requests = offered(cell.load, seed)
    level = max(request.priority for request in requests)
    top = [number for number, request in enumerate(requests) if request.priority == level]
    profile = cell.fleet.profile()
    limits = Limits(
        max_num_seqs=cell.fleet.max_num_seqs,
        max_step_tokens=TokenBudgetSpec(initial=cell.fleet.token_budget).max,
    )
    capacity = capacity_of(
        profile, max_num_seqs=limits.max_num_seqs, max_step_tokens=limits.max_step_tokens
    )
    demands = demands_of([requests[number] for number in top])
    known = _fates(cell, requests, seed)
    hidden = _fates(blind, offered(blind.load, seed), seed)
    bound = clairvoyant_bound(demands, capacity)
    schedule = best_schedule(
        demands,
        profile,
        limits=limits,
        surplus=bound.surplus,
        start=[place for place, number in enumerate(top) if known[number] is Fate.KEPT],
        rounds=rounds,
    )
    lengths = defaultdict(list)
    for draw in range(_DRAWS + 1):
        for demand in demands_of(offered(cell.load, seed + draw * _DRAWS_APART)):
            lengths[demand.kind].append(demand.output_tokens)
    informed = informed_bound(demands, capacity, lengths=lengths)
    served = [requests[top[place]] for place in sorted(schedule.served)]
    groups: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for place, number in enumerate(top):
        third = min(2, int(3 * demands[place].arrival_s / cell.load.horizon_s))
        counts = groups[f"{requests[number].slo_class}, third {third + 1}"]
        counts["offered"] += 1
        counts["schedule"] += place in schedule.served
        counts[f"known {known[number]}"] += 1
        counts[f"hidden {hidden[number]}"] += 1

    classes: defaultdict[str, list[OfferedRequest]] = defaultdict(list)
    for number in top:
        classes[requests[number].slo_class].append(requests[number])
    return Shares(
        mix=mix,
        factor=factor,
        offered=sum(requests[number].weight for number in top),
        bound=bound.certificate,
        schedule=schedule.value,
        informed=min(informed.certificate, bound.certificate),
        chosen=_kept(served, _fates(cell, served, seed), level),
        known=_kept(requests, known, level),
        hidden=_kept(requests, hidden, level),
        alone={
            name: _kept(some, _fates(cell, some, seed), level) for name, some in classes.items()
        },
        groups={name: dict(groups[name]) for name in sorted(groups)},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return 1 if a cell misses the aim."""
    args = _parser().parse_args(argv)
    if args.quick:
        args.mixes, args.factors, args.seeds, args.rounds = ["uniform"], [1.2], 1, 20
    knees = read_knees()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        futures = {
            (mix, factor): [
                pool.submit(measure, mix, factor, knees, seed, args.rounds) for seed in seeds
            ]
            for mix in args.mixes
            for factor in args.factors
        }
        results = [
            reduce(Shares.plus, (future.result() for future in cell)) for cell in futures.values()
        ]
    missed = sum(result.missed for result in results)
    if args.json:
        print(json.dumps([_row(result) for result in results]))
        return int(bool(missed))
    _show(results)
    _show_losses([result for result in results if result.missed])
    cpu_s = time.process_time() + sum(os.times()[2:4])
    print(f"\n{missed} of {len(results)} cells miss the aim. {cpu_s / 60:.1f} CPU-minutes")
    return int(bool(missed))


def _row(result: Shares) -> dict[str, object]:
    return asdict(result) | {
        name: getattr(result, name)
        for name in ("aim", "reference", "known_share", "hidden_reference", "hidden_share")
    }


def _show(results: Sequence[Shares]) -> None:
    print(
        f"{'mix':16} {'load':>5} {'offered':>7}  {'bound':>7} {'schedule':>8} {'informed':>8}  "
        f"{'aim':>4}  {'known':>6} {'of ref.':>7}  {'hidden':>6} {'of ref.':>7}"
    )
    for one in results:
        marks = [
            f"{share:7.1%}{'*' if share < one.aim else ' '}"
            for share in (one.known_share, one.hidden_share)
        ]
        print(
            f"{one.mix:16} {one.factor:4g}x {one.offered:7.0f}  {one.bound:7.1f} "
            f"{one.schedule:8.0f} {one.informed:8.1f}  {one.aim:4.0%}  "
            f"{one.known:6.0f} {marks[0]} {one.hidden:6.0f} {marks[1]}"
        )
    print("* below the aim")


def _show_losses(results: Sequence[Shares]) -> None:
    """Print where the weight is lost, in shares of the bound, and the fates of the requests."""
    if not results:
        return
    print(
        f"\n{'mix':16} {'load':>5}  {'to the schedule':>15}  {'execution':>9}  {'choice':>7}  "
        f"{'hidden lengths':>14}  {'kept':>5}  one class"
    )
    for one in results:
        steps = (one.bound, one.schedule, one.chosen, one.known, one.hidden)
        parts = [(high - low) / one.bound for high, low in itertools.pairwise(steps)]
        print(
            f"{one.mix:16} {one.factor:4g}x  {parts[0]:15.1%}  {parts[1]:9.1%}  {parts[2]:7.1%}  "
            f"{parts[3]:14.1%}  {one.known:5.0f}  {_most_alone(one)}"
        )
    width = max(len(name) for one in results for name in one.groups)
    print(f"\n{'mix':16} {'load':>5}  {'class, arrivals':{width}}  {'  '.join(_COLUMNS)}")
    for one in results:
        for name, counts in one.groups.items():
            columns = "  ".join(f"{counts.get(what, 0):{len(what)}}" for what in _COLUMNS)
            print(f"{one.mix:16} {one.factor:4g}x  {name:{width}}  {columns}")


def _most_alone(one: Shares) -> str:
    """Return the most that is kept of one class alone; empty for a single class."""
    if len(one.alone) < 2:
        return ""
    name = max(one.alone, key=one.alone.__getitem__)
    return f"{one.alone[name]:.0f} ({name})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mixes",
        type=names_of(MIXES),
        default=[name for name in MIXES if name != "chat-8b"],
        help="comma-separated; all but chat-8b by default",
    )
    parser.add_argument(
        "--factors",
        type=positive_numbers,
        default=list(FACTORS),
        help="multiples of the knee (0.5,0.8,1,1.2,2,4)",
    )
    parser.add_argument(
        "--seeds", type=positive_count, default=2, help="seeds per cell (%(default)s)"
    )
    parser.add_argument("--first-seed", type=int, default=_FIRST_SEED, help="(%(default)s)")
    parser.add_argument(
        "--rounds", type=positive_count, help="of the search for a schedule (by size)"
    )
    parser.add_argument("--jobs", type=positive_count, default=2, help="processes (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one cell, in seconds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
