"""Requests that policies keep of isolated bursts.

One replica serves two requests per second, and twice several hundred requests arrive within a
second. Its KV memory is little, so most of a burst must wait; nothing follows it for 40 s. For each
number of requests and TTFT target, the command prints the kept share of all requests, how many of
the admitted requests of `slo` are late, and its CPU time.

    python -m benchmarks.bursts
    python -m benchmarks.bursts --sizes 400 --ttft 10 --policies sjf,fastserve --json
    python -m benchmarks.bursts --quick  # one small burst

The exit code is 1 if over 1 % of the admitted requests are late.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Final

from benchmarks.comparison.arguments import names_of, positive_count
from benchmarks.comparison.cells import Cell, Fleet, Kept, run_cell
from benchmarks.comparison.loads import Kind, Load, Range
from benchmarks.comparison.rule import SURE_SHARE

from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_S
from goodput_engine.scheduler.policies.registry import POLICIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.comparison.loads import OfferedRequest

__all__ = ["Burst", "burst_requests", "main"]

_FLEET: Final = Fleet(kv_blocks=2500, max_waiting=4096)
_RATE_PER_S: Final = 2
_BURSTS_S: Final = (20, 60)
_END_S: Final = 100
_LONGEST_OUTPUT: Final = 780
_HIDDEN_LIMIT: Final = 1024
_TPOT_MS: Final = 100
_FIRST_SEED: Final = 61_001


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Bursts of one size.

    Args:
        size: requests of a burst.
        ttft_s: target for the first token.
        known_lengths: True if the engine knows the output lengths.
    """

    size: int
    ttft_s: int
    known_lengths: bool


def burst_requests(burst: Burst, seed: int) -> list[OfferedRequest]:
    """Return the requests of the bursts and beside them, by arrival."""
    rng = random.Random(seed)
    kind = Kind(
        share=1,
        prompt=Range(64, 960),
        output=Range(20, _LONGEST_OUTPUT),
        ttft_ms=1000 * burst.ttft_s,
        tpot_ms=_TPOT_MS,
    )
    arrivals_s = [rng.uniform(0, _END_S) for _ in range(_RATE_PER_S * _END_S)]
    arrivals_s += [begin + rng.random() for begin in _BURSTS_S for _ in range(burst.size)]
    requests = [kind.draw(rng, round(at_s * NS_PER_S)) for at_s in sorted(arrivals_s)]
    if burst.known_lengths:
        return requests
    return [replace(request, max_tokens=_HIDDEN_LIMIT) for request in requests]


def _serve(burst: Burst, policy: str, seed: int) -> Kept:
    cell = Cell(name="burst", load=Load(mix="burst", rate_per_s=_RATE_PER_S), fleet=_FLEET)
    return run_cell(cell, policy, seed, requests=burst_requests(burst, seed))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve all bursts and print how many requests are kept."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python -m benchmarks.bursts --sizes 400 --ttft 10 --json",
    )
    for name, default, text in (
        ("--sizes", [100, 400], "requests of a burst"),
        ("--ttft", [2, 10, 30], "TTFT target in seconds"),
    ):
        parser.add_argument(name, type=positive_count, nargs="+", default=default, help=text)
    parser.add_argument(
        "--policies",
        type=names_of(POLICIES),
        default="slo,sjf,fastserve",
        help="comma-separated; `slo` is always served (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=_FIRST_SEED, help="(default: %(default)s)")
    parser.add_argument("--jobs", type=positive_count, default=2, help="processes (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="a short form: one small burst")
    options = parser.parse_args(argv)
    if options.quick:
        options.sizes, options.ttft = [20], [2]
    policies = [*dict.fromkeys([Policy.SLO.value, *options.policies])]
    bursts = [
        Burst(size=size, ttft_s=ttft_s, known_lengths=known)
        for size, ttft_s, known in product(options.sizes, options.ttft, (True, False))
    ]
    results: list[dict[str, object]] = []
    admitted = late = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = {
            (burst, policy): pool.submit(_serve, burst, policy, options.seed)
            for burst in bursts
            for policy in policies
        }
        for burst in bursts:
            kept = {policy: runs[burst, policy].result() for policy in policies}
            ours = kept[Policy.SLO]
            admitted, late = admitted + ours.admitted, late + ours.admitted - ours.kept
            results.append({"burst": asdict(burst), **{p: asdict(one) for p, one in kept.items()}})
            if not options.json:
                _show(burst, kept)
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        print(f"{1 - late / max(1, admitted):.2%} of {admitted} admitted requests are in time")
    return int(late > (1 - SURE_SHARE) * admitted)


def _show(burst: Burst, kept: dict[str, Kept]) -> None:
    ours = kept[Policy.SLO]
    print(
        f"{burst.size:4} requests  TTFT {burst.ttft_s:3} s "
        f" {'known ' if burst.known_lengths else 'hidden'}"
        + "".join(f"  {policy} {one.share:6.1%}" for policy, one in kept.items())
        + f"  late {ours.admitted - ours.kept:3} of {ours.admitted:5}  CPU {ours.cpu_s:5.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
