"""Loads on which earlier versions of `slo`, or of `priority`, lost requests, each with its aim.

- *plateau*: prompts of 1,024 and outputs of 60 tokens on one `llama-3-8b-h100` (500 ms TTFT, 50 ms
  TPOT) at 25 to 90 requests per second, for 30 s. Kept per second is the number of kept requests
  over the 30 s of the arrivals. The last of them end up to 3.5 s later, so the figure may be above
  what the device sustains.
- *azure*: minutes 10 to 20 of the Azure conversation trace on one `llama-3-8b-h100` at 3, 4, 6 and
  9 times its rate, all requests with 500 ms TTFT and 50 ms TPOT. Only with `--azure`.
- *generator*: 80 requests with end-to-end targets on a device with steps of 1 ms, in every
  preemption mode, beside `sjf`, the upper bound and the schedule of `benchmarks.bounds`.
- *memory*: long answers without urgency, which need more KV memory than there is, beside short
  requests with tight targets. `slo` and `priority` without labels are compared with `priority`, to
  which the short requests are labelled as more important.
- *levels*: two classes at twice the knee, with labels, under `priority` and a queue of 64 requests.
  Requests of the lower level are to be refused first.

    python -m benchmarks.earlier_losses --azure azure.parquet
    python -m benchmarks.earlier_losses --checks generator --json
    python -m benchmarks.earlier_losses --quick  # one check, in seconds

The exit code is 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from benchmarks.bounds import measure, trace_window
from benchmarks.comparison.arguments import names_of, positive_count
from benchmarks.comparison.cells import Cell, Fleet
from benchmarks.comparison.design import poisson_cell, read_knees, textbook_cells
from benchmarks.comparison.fates import Fate, serve_each
from benchmarks.comparison.loads import Kind, Load, Range, arrival_times, offered

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Policy, Preemption
from goodput_core.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from benchmarks.comparison.loads import OfferedRequest

__all__ = ["GENERATOR_AIM", "MEMORY", "LossRow", "main", "memory_load", "run"]

CHECKS: Final = ("plateau", "azure", "generator", "memory", "levels")
SURE_SHARE: Final = 0.99
PLATEAU_SHARE: Final = 0.97
GENERATOR_AIM: Final = 70
"""Requests of seed 7 that are to be kept in every preemption mode."""
_FIRST_SEED: Final = 9551
_RATES: Final = (25, 30, 40, 60, 90)
_SCALES: Final = (3, 4, 6, 9)
_GENERATOR_SEEDS: Final = (7, 1, 2, 3, 4, 5)
_SECONDS: Final = 30
_CHAT_TARGETS: Final = Targets(ttft_ns=500 * NS_PER_MS, tpot_ns=50 * NS_PER_MS)
_SHORT: Final = Kind(
    share=1, prompt=Range(32, 256), output=Range(8, 48), slo_class="short", ttft_ms=500, tpot_ms=50
)
_LONG: Final = Kind(
    share=1,
    prompt=Range(128, 512),
    output=Range(600, 1200),
    slo_class="long",
    ttft_ms=60_000,
    tpot_ms=300,
)
_SHORT_PER_S, _LONG_PER_S = 18.8, 5.0
MEMORY: Final = Cell(
    name="memory",
    load=Load(rate_per_s=_SHORT_PER_S + _LONG_PER_S),
    fleet=Fleet(kv_blocks=2048),
    timeout_s=600,
)
"""Less memory than the long answers of `memory_load` need."""
_FACTOR: Final = 2.0
_QUEUE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """The outcome of one run.

    Args:
        check: the check.
        load: the load.
        policy: the policy.
        fates: numbers of requests by class and fate.
        note: further figures.
        missed: True if an aim is missed.
    """

    check: str
    load: str
    policy: str
    fates: dict[str, dict[str, int]]
    note: str = ""
    missed: bool = False

    def count(self, fate: Fate) -> int:
        """Return the number of requests of all classes with this fate."""
        return sum(counts.get(fate, 0) for counts in self.fates.values())

    @property
    def admitted_share(self) -> float:
        """Kept share of the admitted requests; 1 if none was admitted."""
        kept, late = self.count(Fate.KEPT), self.count(Fate.LATE)
        return kept / (kept + late) if kept + late else 1.0


def run(
    check: str,
    load: str,
    cell: Cell,
    requests: Sequence[OfferedRequest],
    seed: int,
    *,
    policy: str = Policy.SLO,
) -> LossRow:
    """Serve requests on the fleet of a cell."""
    fates: dict[str, Counter[str]] = {request.slo_class: Counter() for request in requests}
    served = serve_each(cell, requests, seed, policy=policy)
    for request, one in zip(requests, served, strict=True):
        fates[request.slo_class][one.fate] += 1
    counts = {name: dict(fates[name]) for name in sorted(fates)}
    return LossRow(check=check, load=load, policy=policy, fates=counts)


def plateau(pool: Executor, seed: int) -> list[LossRow]:
    """Serve the `chat` mix on a small model at rising rates."""
    loads = [Load(mix="chat-8b", rate_per_s=rate, horizon_s=_SECONDS) for rate in _RATES]
    futures = [
        pool.submit(
            run,
            "plateau",
            f"{load.rate_per_s:g}/s",
            Cell(name="plateau", load=load, fleet=Fleet()),
            offered(load, seed),
            seed,
        )
        for load in loads
    ]
    rows: list[LossRow] = []
    most = 0
    for future in futures:
        row = future.result()
        kept = row.count(Fate.KEPT)
        missed = kept < PLATEAU_SHARE * most or row.admitted_share < SURE_SHARE
        most = max(most, kept)
        rows.append(replace(row, note=f"{kept / _SECONDS:.1f} kept/s", missed=missed))
    return rows


def azure(pool: Executor, path: str, seed: int) -> list[LossRow]:
    """Serve a window of the Azure trace at multiples of its rate."""
    futures = [pool.submit(_azure, path, scale, seed) for scale in _SCALES]
    rows = [future.result() for future in futures]
    return [replace(row, missed=row.admitted_share < SURE_SHARE) for row in rows]


def _azure(path: str, scale: int, seed: int) -> LossRow:
    requests = [
        replace(request, slo_class="interactive", targets=_CHAT_TARGETS)
        for request in trace_window(path, "10m..20m", Fraction(scale))
    ]
    cell = Cell(name="azure", load=Load(rate_per_s=scale), fleet=Fleet())
    return run("azure", f"{scale} × the rate", cell, requests, seed)


def generator(pool: Executor) -> list[LossRow]:
    """Serve the generator of 80 requests in every mode, and compute its bound and schedule."""
    cells = {cell.preemption: cell for cell in textbook_cells()}
    one = next(iter(cells.values()))
    limits = {
        seed: pool.submit(measure, "generator", offered(one.load, seed), one.fleet, None)
        for seed in _GENERATOR_SEEDS
    }
    rows = []
    for seed in _GENERATOR_SEEDS:
        limit = limits[seed].result()
        note = f"bound {limit.certificate:.1f}, schedule {limit.schedule:.0f}"
        for policy in (Policy.SLO, Policy.SJF):
            for mode in Preemption:
                requests = offered(one.load, seed)
                row = run(
                    "generator", f"seed {seed}, {mode}", cells[mode], requests, seed, policy=policy
                )
                missed = policy == Policy.SLO and seed == 7 and row.count(Fate.KEPT) < GENERATOR_AIM
                rows.append(replace(row, note=note, missed=missed))
    return rows


def memory_load(seed: int) -> list[OfferedRequest]:
    """Return long answers that need more KV memory than there is, and short requests, for 30 s.

    Lengths are hidden: the limit of each request is far above its length.
    """
    rng = random.Random(seed)
    requests = [
        replace(kind.draw(rng, at_ns), max_tokens=4096)
        for kind, rate in ((_SHORT, _SHORT_PER_S), (_LONG, _LONG_PER_S))
        for at_ns in arrival_times(Load(rate_per_s=rate, horizon_s=_SECONDS), rng)
    ]
    return sorted(requests, key=lambda request: request.arrival_ns)


def memory(pool: Executor, seed: int) -> list[LossRow]:
    """Serve long answers beside short requests, without labels and with them."""
    plain = memory_load(seed)
    labelled = [
        replace(request, priority=int(request.slo_class == _SHORT.slo_class)) for request in plain
    ]
    futures = [
        pool.submit(run, "memory", load, MEMORY, requests, seed, policy=policy)
        for load, requests, policy in (
            ("with labels", labelled, Policy.PRIORITY),
            ("without labels", plain, Policy.SLO),
            ("without labels", plain, Policy.PRIORITY),
            ("without labels", plain, Policy.SJF),
        )
    ]
    best, *others = [future.result() for future in futures]
    least = {name: counts.get(Fate.KEPT, 0) for name, counts in best.fates.items()}
    return [
        best,
        *(
            replace(
                row,
                missed=row.policy == Policy.SLO
                and any(row.fates[name].get(Fate.KEPT, 0) < least[name] for name in least),
            )
            for row in others
        ),
    ]


def levels(pool: Executor, seed: int) -> list[LossRow]:
    """Serve two priority levels at twice the knee with a short queue."""
    cell = poisson_cell("two-classes", _FACTOR, read_knees(), known_lengths=True)
    cell = replace(cell, fleet=replace(cell.fleet, max_waiting=_QUEUE))
    requests = offered(replace(cell.load, horizon_s=_SECONDS), seed)
    futures = [
        pool.submit(run, "levels", f"{_FACTOR:g} × the knee", cell, requests, seed, policy=policy)
        for policy in (Policy.PRIORITY, Policy.SLO)
    ]
    rows = [future.result() for future in futures]
    return [replace(row, missed=_refuses_out_of_order(row)) for row in rows]


def _refuses_out_of_order(row: LossRow) -> bool:
    """Return True if more than 1 % of the interactive requests were refused."""
    counts = row.fates["interactive"]
    return counts.get(Fate.REFUSED, 0) > (1 - SURE_SHARE) * sum(counts.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return 1 if an aim is missed."""
    args = _parser().parse_args(argv)
    if args.quick:
        args.checks = ["levels"]
    rows: list[LossRow] = []
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        for check in args.checks:
            if check == "plateau":
                rows += plateau(pool, args.seed)
            elif check == "azure" and args.azure:
                rows += azure(pool, args.azure, args.seed)
            elif check == "generator":
                rows += generator(pool)
            elif check == "memory":
                rows += memory(pool, args.seed)
            elif check == "levels":
                rows += levels(pool, args.seed)
    missed = sum(row.missed for row in rows)
    if args.json:
        print(json.dumps([asdict(row) | {"admitted_share": row.admitted_share} for row in rows]))
        return int(bool(missed))
    for row in rows:
        fates = "; ".join(
            f"{name}: " + ", ".join(f"{counts.get(fate, 0)} {fate}" for fate in Fate)
            for name, counts in row.fates.items()
        )
        print(
            f"{row.check:10} {row.load:20} {row.policy:9} {row.admitted_share:7.2%}  {fates}  "
            f"{row.note}{'  missed' * row.missed}"
        )
    cpu_s = time.process_time() + sum(os.times()[2:4])
    print(f"{missed} aims missed. {cpu_s / 60:.1f} CPU-minutes")
    return int(bool(missed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checks", type=names_of(CHECKS), default=list(CHECKS), help=f"of {', '.join(CHECKS)}"
    )
    parser.add_argument("--azure", help="Parquet file of the Azure trace")
    parser.add_argument(
        "--seed", type=int, default=_FIRST_SEED, help="seed of all but the generator (%(default)s)"
    )
    parser.add_argument("--jobs", type=positive_count, default=2, help="processes (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one check, in seconds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
