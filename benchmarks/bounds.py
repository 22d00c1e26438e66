"""Upper bounds on the requests that any schedule serves in time, and a schedule beside them.

    python -m benchmarks.bounds
    python -m benchmarks.bounds --rates 30,40 --generator-seeds 7
    python -m benchmarks.bounds --trace azure.parquet --window 10m..20m --rate-scale 1,3
    python -m benchmarks.bounds --mix kv-bound --kv-blocks 400 --rates 20 --generator-seeds ""

A linear programme relaxes the scheduling problem. Time is cut into intervals, and a request may be
served in part: its prompt between arrival and TTFT deadline, its decodes until the deadline of its
last token. Steps take at least the time of the linear lower bounds of the device
(`bound.step_bounds`), a step reads at most the KV tokens of the pool, a request decodes once a
step, and R replicas are one device that takes R times as many steps. Copies of KV blocks and prefix
hits are free. Nothing that a real schedule does is excluded, so no schedule serves more, whatever
it knows. The bound is computed from prices of device time (`bound.prices`), which need not be
optimal for it to hold.

The informed bound is the same for policies that know only the distribution of the lengths of a
type: class and prompt bin. It bounds the expected result if lengths are drawn independently.

The schedule knows everything, serves only what a replica can, and is found by local search
(`benchmarks.bound.schedule_search`). The optimum lies between the schedule and the bound.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from benchmarks.bound.box_step import improve
from benchmarks.bound.clairvoyant import Limits
from benchmarks.bound.prices import Prices, bound_at, edges_of, reduce, solve
from benchmarks.bound.schedule_search import best_schedule
from benchmarks.bound.stages import Demand, Resources, Stages, hidden_stages, known_stages
from benchmarks.bound.step_bounds import capacity_of
from benchmarks.comparison.cells import Fleet
from benchmarks.comparison.design import textbook_cells
from benchmarks.comparison.loads import MIXES, Arrivals, Load, OfferedRequest, offered
from benchmarks.goodput_of_policies import CLASSES, TraceLoad, plan_of

from goodput_core.errors import GoodputError
from goodput_core.units import NS_PER_S
from goodput_traces.transforms import parse_window

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.bound.step_bounds import Capacity

__all__ = ["Bound", "clairvoyant_bound", "demands_of", "informed_bound"]

# Time is cut at every arrival and deadline if these are not more; else into equal intervals.
_MOST_CUTS = 400
_INTERVALS = 160
# Stages in intervals of the linear programme, above which it is solved for a sample.
_PAIRS = 20_000
_ROUNDS = 10
_GAP = 0.003
# The token-budget law may raise the budget of a step to this.
_LARGEST_BUDGET = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An upper bound on the weighted number of requests in time.

    Args:
        certificate: the bound.
        value: optimum of the linear programme that gave the first prices; near the certificate,
            or above it where that excludes requests which the programme serves in part. It bounds
            nothing if it comes from a sample.
        sampled: True if the linear programme held a sample of the requests.
        surplus: weight of each request less the cost of its cheapest service; 0 if that is not
            positive.
    """

    certificate: float
    value: float
    sampled: bool
    surplus: tuple[float, ...]


def clairvoyant_bound(
    demands: Sequence[Demand],
    capacity: Capacity,
    *,
    replicas: int = 1,
    intervals: int | None = None,
    pairs: int = _PAIRS,
) -> Bound:
    """Bound the weighted number of requests that any schedule serves in time.

    Args:
        demands: the requests.
        capacity: one replica.
        replicas: number of replicas.
        intervals: number of intervals of time; None to cut time at every arrival and deadline
            unless these are too many.
        pairs: size of the linear programme, in stages in intervals. With more, it is solved for a
            sample of the requests, and its prices are improved for all requests.
    """
    resources = Resources(capacity, replicas)
    stages = known_stages(demands, resources) if demands else None
    coarse = known_stages(demands, resources, most_runs=2) if demands else None
    return _bound(stages, coarse, resources, intervals, pairs)


def informed_bound(
    demands: Sequence[Demand],
    capacity: Capacity,
    *,
    replicas: int = 1,
    lengths: Mapping[str, Sequence[int]] | None = None,
    intervals: int | None = None,
    pairs: int = _PAIRS,
) -> Bound:
    """Bound the expected weighted number in time of a policy that does not know output lengths.

    The policy knows the arrivals, the prompts and the distribution of lengths of each kind. A
    result may exceed the bound by chance: lengths of a run are one draw.

    Args:
        demands: the requests.
        capacity: one replica.
        replicas: number of replicas.
        lengths: output lengths of each kind; None for those of the requests themselves.
        intervals, pairs: see `clairvoyant_bound`.
    """
    if lengths is None:
        found = defaultdict(list)
        for demand in demands:
            found[demand.kind].append(demand.output_tokens)
        lengths = found
    resources = Resources(capacity, replicas)
    stages = hidden_stages(demands, resources, lengths) if demands else None
    return _bound(stages, stages, resources, intervals, pairs)


def _bound(
    stages: Stages | None,
    coarse: Stages | None,
    resources: Resources,
    intervals: int | None,
    pairs: int,
) -> Bound:
    """Return the bound of stages; a sample, if one is needed, has the coarse ones."""
    if stages is None or coarse is None or not stages.gain.any():
        none = 0 if stages is None else len(stages.count)
        return Bound(certificate=0, value=0, sampled=False, surplus=(0.0,) * none)
    most, count = (_MOST_CUTS, _INTERVALS) if intervals is None else (intervals, intervals)
    edges = edges_of(stages, most, count)
    sampled = False
    sample, group = reduce(stages, pairs, edges)
    if len(sample.count) < (group >= 0).sum():
        sample, group = reduce(coarse, pairs, edges)
        sampled = True
    solution = solve(sample, resources, edges)
    prices = Prices(
        edges=edges,
        resources=solution.prices.resources,
        steps=np.where(group >= 0, solution.prices.steps[group], 0),
    )
    if sampled:
        _, response = improve(
            stages, resources, prices, blocks=np.maximum(group, 0), rounds=_ROUNDS, gap=_GAP
        )
    else:
        response = bound_at(stages, resources, prices)
    return Bound(
        certificate=response.bound,
        value=solution.value,
        sampled=sampled,
        surplus=tuple(response.surplus.tolist()),
    )


def demands_of(requests: Sequence[OfferedRequest]) -> list[Demand]:
    """Return the demands of a load, in its order.

    Prefix blocks that any other request of the load has too count as reusable. The kind of a
    request is its class and its prompt length by factors of the square root of two.
    """
    chains = Counter(chain for request in requests for chain in _chains(request))
    demands = []
    for request in requests:
        shared = sum(chains[chain] > 1 for chain in _chains(request)) * request.block_size
        targets = request.targets
        ttft, tpot, e2e = (
            math.inf if ns is None else ns / NS_PER_S
            for ns in (targets.ttft_ns, targets.tpot_ns, targets.e2e_ns)
        )
        size = int(2 * math.log2(request.prompt_tokens))
        demands.append(
            Demand(
                arrival_s=request.arrival_ns / NS_PER_S,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                ttft_s=ttft,
                tpot_s=tpot,
                e2e_s=e2e,
                weight=request.weight,
                reusable_tokens=min(shared, request.prompt_tokens - 1),
                kind=f"{request.slo_class}/{size}",
            )
        )
    return demands


def _chains(request: OfferedRequest) -> Iterator[int]:
    """Yield a key of each prefix of whole blocks."""
    key = 0
    for block in request.hashes:
        key = hash((key, block))
        yield key


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The bounds of one load.

    Args:
        load: name of the load.
        requests: number of requests.
        weight: sum of their weights.
        seconds: time from the first arrival to the last one.
        value, certificate: see `Bound`.
        schedule: weight that the schedule serves in time.
        informed: the smaller one of the informed bound and the certificate.
        bound_wall_s, schedule_wall_s, informed_wall_s: run times.
    """

    load: str
    requests: int
    weight: float
    seconds: float
    value: float
    certificate: float
    schedule: float
    informed: float
    bound_wall_s: float
    schedule_wall_s: float
    informed_wall_s: float


def measure(name: str, requests: Sequence[OfferedRequest], fleet: Fleet, rounds: int | None) -> Row:
    """Compute the bounds and the schedule of a load."""
    demands, profile = demands_of(requests), fleet.profile()
    limits = Limits(
        max_num_seqs=fleet.max_num_seqs,
        max_step_tokens=max(fleet.token_budget, _LARGEST_BUDGET),
    )
    capacity = capacity_of(
        profile, max_num_seqs=limits.max_num_seqs, max_step_tokens=limits.max_step_tokens
    )
    times = [time.perf_counter()]
    bound = clairvoyant_bound(demands, capacity, replicas=fleet.replicas)
    times.append(time.perf_counter())
    schedule = best_schedule(
        demands,
        profile,
        limits=limits,
        replicas=fleet.replicas,
        surplus=bound.surplus,
        rounds=rounds,
    )
    times.append(time.perf_counter())
    informed = informed_bound(demands, capacity, replicas=fleet.replicas)
    times.append(time.perf_counter())
    arrivals = [demand.arrival_s for demand in demands]
    return Row(
        load=name,
        requests=len(demands),
        weight=sum(demand.weight for demand in demands),
        seconds=max(arrivals) - min(arrivals) if demands else 0,
        value=bound.value,
        certificate=bound.certificate,
        schedule=schedule.value,
        informed=min(informed.certificate, bound.certificate),
        bound_wall_s=times[1] - times[0],
        schedule_wall_s=times[2] - times[1],
        informed_wall_s=times[3] - times[2],
    )


def trace_window(path: str, window: str | None, scale: Fraction) -> list[OfferedRequest]:
    """Return a window of a trace with the classes of `benchmarks.goodput_of_policies`."""
    load = TraceLoad(trace=path, window=window, scale=scale)
    targets = {one.name: one.targets for one in CLASSES}
    return [
        OfferedRequest(
            arrival_ns=planned.scheduled_ns,
            prompt_tokens=planned.prompt.input_tokens,
            output_tokens=max(1, planned.output_tokens),
            max_tokens=planned.max_output_tokens,
            slo_class=planned.slo_class,
            targets=targets[planned.slo_class],
            hashes=planned.prompt.hashes,
            block_size=planned.prompt.block_size,
        )
        for planned in plan_of(load).requests()
    ]


def loads(args: argparse.Namespace) -> Iterator[tuple[str, list[OfferedRequest], Fleet]]:
    """Yield name, requests and fleet of each requested load."""
    fleet = Fleet(device=args.device, kv_blocks=args.kv_blocks, replicas=args.replicas)
    for rate in args.rates:
        load = Load(
            mix=args.mix,
            arrivals=args.arrivals,
            rate_per_s=float(rate),
            horizon_s=args.seconds,
        )
        yield f"{args.mix} {float(rate):g}/s", offered(load, args.seed), fleet
    generator = textbook_cells()[0]
    for seed in args.generator_seeds:
        yield f"generator, seed {seed}", offered(generator.load, int(seed)), generator.fleet
    if args.trace is not None:
        for scale in args.rate_scale:
            label = f"{Path(args.trace).stem} × {float(scale):g}"
            yield label, trace_window(args.trace, args.window, scale), fleet


def numbers(text: str) -> list[Fraction]:
    """Parse positive numbers that are separated by commas."""
    try:
        values = [Fraction(part) for part in text.split(",") if part.strip()]
    except (ValueError, ZeroDivisionError):
        values = [Fraction(0)]
    if any(value <= 0 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers above 0, as in 30,40")
    return values


def window_text(text: str) -> str:
    """Check a window of a trace."""
    try:
        parse_window(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mix", default="chat", choices=sorted(MIXES), help="(%(default)s)")
    parser.add_argument(
        "--arrivals", default=Arrivals.POISSON, type=Arrivals, choices=list(Arrivals),
        help="arrival process of the mix (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--rates", type=numbers, help="requests/s of the mix, comma-separated")
    parser.add_argument("--seconds", type=positive, default=30, help="of a mix (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of a mix (%(default)s)")
    parser.add_argument("--generator-seeds", type=numbers, help="seeds of `textbook` loads")
    parser.add_argument(
        "--trace", help="a Parquet trace, or sample; then only the trace by default"
    )
    parser.add_argument("--window", type=window_text, help="part of it, for example 10m..20m")
    parser.add_argument(
        "--rate-scale", type=numbers, default=[Fraction(1)], help="factors of its rate (1)"
    )
    parser.add_argument("--device", default="llama-3-8b-h100", help="profile (%(default)s)")
    parser.add_argument("--kv-blocks", type=positive, help="in place of those of the profile")
    parser.add_argument("--replicas", type=positive, default=1, help="(%(default)s)")
    parser.add_argument("--rounds", type=positive, help="of the search for a schedule")
    parser.add_argument("--quick", action="store_true", help="two small loads")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    defaults = ("", "") if args.trace else ("25,30,40,60,90", "7,1,2,3,4,5")
    if args.quick:
        defaults, args.seconds = ("40", "7"), 5
    for name, text in zip(("rates", "generator_seeds"), defaults, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, numbers(text))
    rows = []
    if not args.json:
        print(
            "                       requests  per s  bound  of LP  schedule  below  informed  "
            "per s: schedule  bound  informed      wall s"
        )
    try:
        for name, requests, fleet in loads(args):
            row = measure(name, requests, fleet, args.rounds)
            rows.append(row)
            if not args.json:
                show(row)
    except GoodputError as error:
        raise SystemExit(str(error)) from error
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))


def show(row: Row) -> None:
    """Print a row of the table."""
    seconds = max(row.seconds, 1e-9)
    below = 1 - row.schedule / row.certificate if row.certificate else 0
    walls = (row.bound_wall_s, row.schedule_wall_s, row.informed_wall_s)
    print(
        f"{row.load:<22} {row.requests:>8,} {row.requests / seconds:>6.1f} "
        f"{row.certificate:>6.1f} {row.value:>6.1f} {row.schedule:>9.1f} {below:>6.1%} "
        f"{row.informed:>9.1f} {row.schedule / seconds:>16.2f} {row.certificate / seconds:>6.2f} "
        f"{row.informed / seconds:>9.2f}  " + " ".join(f"{wall:.1f}" for wall in walls),
        flush=True,
    )


if __name__ == "__main__":
    main()
