"""Requests that `slo` admits before, during and after an unannounced slow-down of the device.

One replica serves Poisson arrivals for 90 s. After 30 s, every step of the device takes 1.5 or 2
times as long, and nothing announces it: the engine learns it from its own steps. The admitted
requests are counted apart by their arrival:

- *ended*: they ended before the slow-down;
- *in flight*: they arrived before it and had not ended;
- *first 10 s* after it, and the *next 20 s*, in which the policy adapts;
- *later*.

No policy can meet the targets of requests in flight that a device of the old speed would just have
kept, so the aim of 99 % holds for the requests that ended before and for those that arrive later.
The loads are multiples of the knee of the fast device. Output lengths are hidden, except those of
`deadline`, because no policy can ensure an end-to-end target of a request with an unknown length.

    python -m benchmarks.slow_down
    python -m benchmarks.slow_down --mixes uniform --slower 3 --seeds 5 --json
    python -m benchmarks.slow_down --quick  # one mix, in seconds

The exit code is 1 if an aim is missed, over all mixes of a load and a slow-down.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from benchmarks.comparison.arguments import names_of, positive_count, positive_numbers
from benchmarks.comparison.design import poisson_cell, read_knees
from benchmarks.comparison.fates import Fate, serve_each
from benchmarks.comparison.loads import MIXES, offered

from goodput_core.slo.judging import MissReason
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goodput_core.steptime import DeviceForm, StepShape
    from goodput_replay.emulation.fleet import VirtualFleet

__all__ = ["Part", "PartResult", "SlowDown", "SlowingForm", "main", "measure"]

AIM: Final = 0.99
_HORIZON_S: Final = 90
_SLOW_FROM_S: Final = 30
_ADAPTING_S: Final = 10
_SETTLED_S: Final = 30
_FIRST_SEED: Final = 9501
_NEVER_NS: Final = 2**62
_E2E_MIX: Final = "deadline"
_MIXES: Final = ("chat", "uniform", "bimodal", "kv-bound", "long-prompt", _E2E_MIX)


class Part(StrEnum):
    """Part of a run to which a request belongs."""

    ENDED = "ended"
    IN_FLIGHT = "in flight"
    ADAPTING = f"first {_ADAPTING_S} s"
    SETTLING = f"next {_SETTLED_S - _ADAPTING_S} s"
    LATER = "later"


JUDGED: Final = (Part.ENDED, Part.LATER)
"""The parts for which the aim holds."""


class SlowingForm:
    """The step times of a device that becomes slower during a run.

    Args:
        form: step times of the device at its original speed.

    Attributes:
        slower: factor by which each step takes longer now.
    """

    def __init__(self, form: DeviceForm) -> None:
        self.slower = 1.0
        self._form = form

    def step_ns(self, shape: StepShape) -> int:
        """Return the device time of a step."""
        return round(self.slower * self._form.step_ns(shape))

    def chunk_within(self, beside: StepShape, start: int, limit_ns: float) -> float:
        """Return the longest chunk with which a step stays within a time."""
        return self._form.chunk_within(beside, start, limit_ns / self.slower)

    def decode_times(self, num_decodes: int, contexts: Sequence[int]) -> list[int]:
        """Return the times of steps that only decode."""
        times_ns = self._form.decode_times(num_decodes, contexts)
        return [round(self.slower * step_ns) for step_ns in times_ns]


class SlowDown:
    """Makes the device of a fleet slower at a moment; the step that runs then is not affected.

    Args:
        form: step times of the device.
        at_ns: the moment.
        slower: factor by which each step then takes longer.
    """

    def __init__(self, form: SlowingForm, *, at_ns: int, slower: float) -> None:
        self._form = form
        self._next_ns = at_ns
        self._slower = slower

    def next_ns(self) -> int:
        """Return the moment, or a time after every run if it has passed."""
        return self._next_ns

    def act(self, fleet: VirtualFleet, now_ns: int) -> None:  # noqa: ARG002 - an Actor
        """Make the device slower."""
        self._form.slower = self._slower
        self._next_ns = _NEVER_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """The requests of a part of a run, over all seeds.

    Args:
        part: the part.
        kept, refused, late: numbers of requests by fate.
        late_first, late_pace: numbers of late requests that missed the target of the first token,
            and one of the tokens after it.
    """

    part: Part
    kept: int
    refused: int
    late: int
    late_first: int
    late_pace: int

    @property
    def share(self) -> float:
        """Kept share of the admitted requests; 1 if none was admitted."""
        admitted = self.kept + self.late
        return self.kept / admitted if admitted else 1.0

    @property
    def missed(self) -> bool:
        """True if the aim holds for this part and is missed."""
        return self.part in JUDGED and self.share < AIM


def measure(
    mix: str, factor: float, slower: float, knees: Mapping[str, float], seeds: Sequence[int]
) -> Counter[tuple[Part, Fate | MissReason]]:
    """Return the numbers of requests by part and fate, and of late ones by missed target.

    Args:
        mix: name of the mix.
        factor: rate in multiples of the knee.
        slower: factor by which each step takes longer from 30 s on.
        knees: rate of the knee of one replica, by `knee_key`.
        seeds: seeds of the loads.
    """
    cell = poisson_cell(mix, factor, knees, known_lengths=mix == _E2E_MIX)
    load = replace(cell.load, horizon_s=_HORIZON_S)
    profile = cell.fleet.profile()
    at_ns = _SLOW_FROM_S * NS_PER_S
    counts: Counter[tuple[Part, Fate | MissReason]] = Counter()
    for seed in seeds:
        requests = offered(load, seed)
        form = SlowingForm(profile.form)
        served = serve_each(
            cell,
            requests,
            seed,
            profile=replace(profile, form=form),
            actors=[SlowDown(form, at_ns=at_ns, slower=slower)],
        )
        for request, one in zip(requests, served, strict=True):
            after_ns = request.arrival_ns - at_ns
            if after_ns < 0:
                part = Part.ENDED if one.end_ns < at_ns else Part.IN_FLIGHT
            elif after_ns < _SETTLED_S * NS_PER_S:
                part = Part.ADAPTING if after_ns < _ADAPTING_S * NS_PER_S else Part.SETTLING
            else:
                part = Part.LATER
            counts[part, one.fate] += 1
            if one.fate is Fate.LATE:
                counts.update((part, reason) for reason in one.reasons)
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return 1 if an aim is missed."""
    args = _parser().parse_args(argv)
    if args.quick:
        args.mixes, args.factors, args.slower, args.seeds = ["uniform"], [1.2], [1.5], 1
    knees = read_knees()
    seeds = list(range(args.first_seed, args.first_seed + args.seeds))
    loads = [(factor, slower) for slower in args.slower for factor in args.factors]
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        futures = {
            (load, mix): pool.submit(measure, mix, *load, knees, seeds)
            for load in loads
            for mix in args.mixes
        }
        counts = {key: future.result() for key, future in futures.items()}
    by_mix = {key: _results(one) for key, one in counts.items()}
    totals: dict[tuple[float, float], list[PartResult]] = {}
    for load in loads:
        total: Counter[tuple[Part, Fate | MissReason]] = Counter()
        for mix in args.mixes:
            total += counts[load, mix]
        totals[load] = _results(total)
    missed = sum(one.missed for results in totals.values() for one in results)
    if args.json:
        rows = [
            {"mix": mix, "factor": factor, "slower": slower, "share": one.share} | asdict(one)
            for ((factor, slower), mix), results in by_mix.items()
            for one in results
        ]
        print(json.dumps({"rows": rows, "missed": missed}))
        return int(bool(missed))
    print(f"{'slower':>6} {'load':>5}  {'mix':12}" + "".join(f"  {part:>26}" for part in Part))
    for load in loads:
        for mix in args.mixes:
            _show(load, mix, by_mix[load, mix])
        _show(load, "all", totals[load])
    print(
        "kept of the admitted (refused of the offered), and late requests: those that missed the "
        "target of the first token + one of the later tokens"
    )
    cpu_s = time.process_time() + sum(os.times()[2:4])
    print(f"{missed} aims missed. {cpu_s / 60:.1f} CPU-minutes")
    return int(bool(missed))


def _results(counts: Counter[tuple[Part, Fate | MissReason]]) -> list[PartResult]:
    return [
        PartResult(
            part=part,
            kept=counts[part, Fate.KEPT],
            refused=counts[part, Fate.REFUSED],
            late=counts[part, Fate.LATE],
            late_first=counts[part, MissReason.TTFT],
            late_pace=counts[part, MissReason.TPOT] + counts[part, MissReason.E2E],
        )
        for part in Part
    ]


def _show(load: tuple[float, float], name: str, results: Sequence[PartResult]) -> None:
    factor, slower = load
    columns = []
    for one in results:
        admitted = one.kept + one.late
        refused = one.refused / max(1, admitted + one.refused)
        late = f" {one.late_first}+{one.late_pace}" if one.late else ""
        columns.append(f"{one.kept}/{admitted} {one.share:.1%} ({refused:.0%}){late}")
    print(f"{slower:5g}× {factor:4g}x  {name:12}" + "".join(f"  {text:>26}" for text in columns))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mixes",
        type=names_of(MIXES),
        default=list(_MIXES),
        help=f"comma-separated (default: {','.join(_MIXES)})",
    )
    parser.add_argument(
        "--factors",
        type=positive_numbers,
        default=[0.5, 0.8, 1.2, 2.0],
        help="loads in multiples of the knee (0.5,0.8,1.2,2)",
    )
    parser.add_argument(
        "--slower",
        type=positive_numbers,
        default=[1.0, 1.5, 2.0],
        help="factors of the step times (1,1.5,2)",
    )
    parser.add_argument(
        "--seeds", type=positive_count, default=2, help="seeds per cell (%(default)s)"
    )
    parser.add_argument("--first-seed", type=int, default=_FIRST_SEED, help="(%(default)s)")
    parser.add_argument("--jobs", type=positive_count, default=2, help="processes (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one mix, in seconds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
