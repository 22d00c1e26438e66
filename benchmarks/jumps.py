"""Requests that `slo` and other policies keep when the load jumps.

One replica serves Poisson arrivals at a part of its knee for ten seconds, and then at more than it
can serve, for twice the longest slack of a request (1.5 to 6 s). At the jump, few requests run, so
each prompt that is computed makes the later steps longer, and the load of the last 20 s is low. For
each jump, the command prints the kept share of all requests, and how many of the admitted requests
of `slo` are late, of those whose targets can be ensured.

    python -m benchmarks.jumps
    python -m benchmarks.jumps --mixes equal,kv-bound --seeds 10 --policies slo,sjf --json
    python -m benchmarks.jumps --quick  # one mix and one seed

The exit code is 1 if over 1 % of the admitted requests of a mix are late.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import product
from typing import TYPE_CHECKING, Final

from benchmarks.comparison.admitted import Admitted
from benchmarks.comparison.arguments import names_of, positive_count
from benchmarks.comparison.cells import Cell, Fleet, Kept, run_cell
from benchmarks.comparison.design import fleet_of, knee_key, read_knees
from benchmarks.comparison.loads import MIXES, Kind, Load, Mix, Range, offered
from benchmarks.comparison.rule import SURE_SHARE

from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.policies.registry import POLICIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.comparison.loads import OfferedRequest

__all__ = ["JUMPS", "Jump", "JumpResult", "jump_requests", "main"]

JUMPS: Final = ((0.25, 1.3), (0.5, 1.0), (0.25, 2.5), (0.8, 1.5))
"""Load before and after, in multiples of the knee."""
_BEFORE_S: Final = 10.0
_LEAST_S, _MOST_S = 1.5, 6.0
_FIRST_SEED: Final = 40_001
_SEEDS_APART: Final = 500_000
_EQUAL: Final = Mix(
    name="equal",
    kinds=(Kind(share=1, prompt=Range(300, 599), output=Range(100, 100), ttft_ms=500, tpot_ms=50),),
)
"""Requests of nearly one size on a fast device, of which over a hundred run at a time."""
_EQUAL_KNEE: Final = 77.0
"""Requests per second; an estimate, as 100 per second are 1.3 times what the device sustains."""
_NAMES: Final = (_EQUAL.name, *MIXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A jump of the load.

    Args:
        mix: name of the mix.
        before, after: load in multiples of the knee.
        known_lengths: True if the engine knows the output lengths.
    """

    mix: str
    before: float
    after: float
    known_lengths: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JumpResult:
    """The requests that the policies kept of a jump.

    Args:
        jump: the jump.
        shares: mean kept share of the offered weight, by policy.
        admitted, late: admitted requests of `slo` whose targets can be ensured, and those of them
            that were late.
    """

    jump: Jump
    shares: dict[str, float]
    admitted: int
    late: int


def jump_requests(jump: Jump, seed: int) -> list[OfferedRequest]:
    """Return the requests of a jump, by arrival."""
    mix = jump.mix
    knee = _EQUAL_KNEE if mix == _EQUAL.name else read_knees()[knee_key(mix, small_kv=False)]
    after_s = min(max(_LEAST_S, 2 * MIXES[mix].longest_slack_s), _MOST_S)
    before, after = (
        offered(
            Load(
                mix=mix,
                rate_per_s=knee * factor,
                horizon_s=horizon_s,
                known_lengths=jump.known_lengths,
            ),
            number,
        )
        for factor, horizon_s, number in (
            (jump.before, _BEFORE_S, seed),
            (jump.after, after_s, seed + _SEEDS_APART),
        )
    )
    jumps_ns = round(_BEFORE_S * NS_PER_S)
    return before + [
        replace(request, arrival_ns=request.arrival_ns + jumps_ns) for request in after
    ]


def _serve(jump: Jump, policy: str, seed: int) -> Kept:
    MIXES.setdefault(_EQUAL.name, _EQUAL)
    fleet = Fleet() if jump.mix == _EQUAL.name else fleet_of(jump.mix, small_kv=False)
    cell = Cell(name=jump.mix, load=Load(mix=jump.mix, rate_per_s=1), fleet=fleet)
    return run_cell(cell, policy, seed, requests=jump_requests(jump, seed))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve all jumps and print how many requests are kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mixes", type=names_of(_NAMES), default=",".join(_NAMES))
    parser.add_argument(
        "--policies",
        type=names_of(POLICIES),
        default="slo,sjf",
        help="comma-separated; `slo` is always served (%(default)s)",
    )
    parser.add_argument("--seeds", type=positive_count, default=2, help="per jump (%(default)s)")
    parser.add_argument("--jobs", type=positive_count, default=2, help="processes (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="a short form: one mix and one seed")
    options = parser.parse_args(argv)
    if options.quick:
        options.mixes, options.seeds = (_EQUAL.name,), 1
    policies = [*dict.fromkeys([Policy.SLO.value, *options.policies])]
    jumps = [
        Jump(mix=mix, before=before, after=after, known_lengths=known)
        for mix, (before, after), known in product(options.mixes, JUMPS, (True, False))
    ]
    seeds = range(_FIRST_SEED, _FIRST_SEED + options.seeds)
    results = []
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = {
            (jump, policy): [pool.submit(_serve, jump, policy, seed) for seed in seeds]
            for jump in jumps
            for policy in policies
        }
        for jump in jumps:
            kept = {policy: [run.result() for run in runs[jump, policy]] for policy in policies}
            ours = reduce(Admitted.plus, (run.admitted_parts for run in kept[Policy.SLO]))
            shares = {policy: statistics.fmean(r.share for r in kept[policy]) for policy in kept}
            result = JumpResult(
                jump=jump, shares=shares, admitted=ours.sure, late=ours.sure - ours.sure_kept
            )
            results.append(result)
            if not options.json:
                _show(result)
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    return 1 if _late_mixes(results, quiet=options.json) else 0


def _show(result: JumpResult) -> None:
    jump = result.jump
    print(
        f"{jump.mix:16} {jump.before:4g} → {jump.after:<4g}"
        f" {'known ' if jump.known_lengths else 'hidden'}"
        + "".join(f"  {policy} {share:6.1%}" for policy, share in result.shares.items())
        + f"  late {result.late:3} of {result.admitted:5}",
        flush=True,
    )


def _late_mixes(results: Sequence[JumpResult], *, quiet: bool) -> list[str]:
    """Return the mixes of whose admitted requests too many are late, and print the sums."""
    late = []
    for mix in dict.fromkeys(result.jump.mix for result in results):
        admitted, missed = (
            sum(getattr(result, name) for result in results if result.jump.mix == mix)
            for name in ("admitted", "late")
        )
        if missed > (1 - SURE_SHARE) * admitted:
            late.append(mix)
        if not quiet:
            in_time = 1 - missed / max(1, admitted)
            print(f"{mix}: {in_time:.2%} of {admitted} admitted requests are in time")
    return late


if __name__ == "__main__":
    sys.exit(main())
