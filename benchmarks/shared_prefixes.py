"""Loads whose prompts share prefixes, under every policy.

- *system prompts*: one of a few system prompts of 2,000 tokens, then 300 tokens of the user.
- *sessions*: chats of two to six turns. Each prompt repeats the turns before it.
- *samples*: eight requests with the same prompt of 3,000 tokens arrive together.
- *cold burst*: 40 requests with the same prompt of 6,000 tokens arrive at an idle engine.

One replica of `llama-3-8b-h100` serves each load with a large and with a small KV pool. The targets
are 800 ms TTFT and 50 ms TPOT; `max_tokens` is the length of the output, or is not set with
`--hidden`. The exit code is 1 if another policy keeps over 1 % more requests than `slo`, or if less
than 99 % of the requests that `slo` admits are in time.

    python -m benchmarks.shared_prefixes
    python -m benchmarks.shared_prefixes --hidden --loads "samples 2/s" --policies slo,sjf --json
    python -m benchmarks.shared_prefixes --quick  # one load, in seconds
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
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.comparison.arguments import names_of, positive_count
from benchmarks.comparison.cells import Cell, Fleet
from benchmarks.comparison.fates import Fate, serve_each
from benchmarks.comparison.loads import Load, OfferedRequest

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["LOADS", "PrefixRow", "main", "measure", "requests_of"]

_BLOCK: Final = 16
_SECONDS: Final = 20
_TARGETS: Final = Targets(ttft_ns=800 * NS_PER_MS, tpot_ns=50 * NS_PER_MS)
_POOLS: Final = (8000, 1500)
"""KV blocks of the large and of the small pool."""
_SHARE: Final = 0.99
_FIRST_SEED: Final = 1
_POLICIES: Final = (Policy.SLO, Policy.SJF, Policy.SARATHI, Policy.FASTSERVE, Policy.VLLM)


def _arrivals(rng: random.Random, per_s: float) -> Iterator[int]:
    """Draw the arrivals of a Poisson process, in ns."""
    at_s = rng.expovariate(per_s)
    while at_s < _SECONDS:
        yield int(at_s * NS_PER_S)
        at_s += rng.expovariate(per_s)


def _hashes(*parts: tuple[str, int]) -> tuple[int, ...]:
    """Return the chained hashes of the full blocks of texts, given by name and tokens."""
    found: list[int] = []
    for name, tokens in parts:
        for position in range(tokens // _BLOCK):
            # Seeds of strings are the same in every process, unlike `hash`.
            chain = f"{found[-1] if found else 0} {name} {position}"
            found.append(random.Random(chain).getrandbits(62))
    return tuple(found)


def _request(
    at_ns: int, prompt: int, output: int, hashes: tuple[int, ...], *, hidden: bool
) -> OfferedRequest:
    return OfferedRequest(
        arrival_ns=at_ns,
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=None if hidden else output,
        slo_class="chat",
        targets=_TARGETS,
        hashes=hashes,
        block_size=_BLOCK,
    )


def _system_prompts(rng: random.Random, *, per_s: float, hidden: bool) -> Iterator[OfferedRequest]:
    prompts = [_hashes((f"system {number}", 2000)) for number in range(4)]
    for at_ns in _arrivals(rng, per_s):
        user = 16 + int(rng.expovariate(1 / 300))
        output = max(1, int(rng.expovariate(1 / 120)))
        yield _request(at_ns, 2000 + user, output, rng.choice(prompts), hidden=hidden)


def _sessions(rng: random.Random, *, per_s: float, hidden: bool) -> Iterator[OfferedRequest]:
    for session, begin_ns in enumerate(_arrivals(rng, per_s)):
        parts, at_ns = [(f"session {session}", 512)], begin_ns
        for turn in range(rng.randint(2, 6)):
            output, prompt = rng.randint(20, 150), sum(tokens for _, tokens in parts)
            asked = prompt + rng.randint(1, 15)
            yield _request(at_ns, asked, output, _hashes(*parts), hidden=hidden)
            said = -(-(output + rng.randint(20, 300)) // _BLOCK) * _BLOCK
            parts.append((f"turn {turn}", said))
            at_ns += int((0.03 * output + rng.expovariate(1 / 2)) * NS_PER_S)


def _samples(rng: random.Random, *, per_s: float, hidden: bool) -> Iterator[OfferedRequest]:
    for number, at_ns in enumerate(_arrivals(rng, per_s)):
        hashes = _hashes((f"prompt {number}", 3000))
        for _ in range(8):
            yield _request(at_ns, 3008, rng.randint(50, 200), hashes, hidden=hidden)


def _cold_burst(rng: random.Random, *, hidden: bool) -> Iterator[OfferedRequest]:
    hashes = _hashes(("cold", 6000))
    for _ in range(40):
        yield _request(0, 6020, rng.randint(50, 100), hashes, hidden=hidden)


LOADS: Final[dict[str, Callable[[random.Random, bool], Iterator[OfferedRequest]]]] = {
    "system prompts 30/s": lambda rng, hidden: _system_prompts(rng, per_s=30, hidden=hidden),
    "system prompts 60/s": lambda rng, hidden: _system_prompts(rng, per_s=60, hidden=hidden),
    "sessions 12/s": lambda rng, hidden: _sessions(rng, per_s=12, hidden=hidden),
    "samples 2/s": lambda rng, hidden: _samples(rng, per_s=2, hidden=hidden),
    "samples 6/s": lambda rng, hidden: _samples(rng, per_s=6, hidden=hidden),
    "cold burst": lambda rng, hidden: _cold_burst(rng, hidden=hidden),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRow:
    """The outcome of a load under one policy, over all seeds.

    Args:
        load: name of the load.
        kv_blocks: size of the KV pool.
        policy: the policy.
        offered, kept, late: numbers of requests.
        missed: True if the policy is `slo` and misses an aim.
    """

    load: str
    kv_blocks: int
    policy: str
    offered: int
    kept: int
    late: int
    missed: bool = False


def requests_of(load: str, seed: int, *, hidden: bool) -> list[OfferedRequest]:
    """Return the requests of a load in the order of their arrivals."""
    drawn = LOADS[load](random.Random(seed), hidden)
    return sorted(drawn, key=lambda request: request.arrival_ns)


def measure(
    load: str, kv_blocks: int, policy: str, seeds: Sequence[int], *, hidden: bool
) -> PrefixRow:
    """Serve a load with several seeds under one policy."""
    cell = Cell(name=load, load=Load(rate_per_s=1), fleet=Fleet(kv_blocks=kv_blocks))
    fates: Counter[Fate] = Counter()
    for seed in seeds:
        requests = requests_of(load, seed, hidden=hidden)
        fates.update(one.fate for one in serve_each(cell, requests, seed, policy=policy))
    return PrefixRow(
        load=load,
        kv_blocks=kv_blocks,
        policy=policy,
        offered=fates.total(),
        kept=fates[Fate.KEPT],
        late=fates[Fate.LATE],
    )


def _judged(rows: Sequence[PrefixRow]) -> list[PrefixRow]:
    """Return the rows of one load with the missed aims of `slo`."""
    most = max((row.kept for row in rows if row.policy != Policy.SLO), default=0)
    judged = []
    for row in rows:
        missed = row.policy == Policy.SLO and (
            row.kept < _SHARE * most or row.kept < _SHARE * (row.kept + row.late)
        )
        judged.append(PrefixRow(**asdict(row) | {"missed": missed}))
    return judged


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if an aim is missed."""
    args = _parser().parse_args(argv)
    if args.quick:
        args.loads, args.seeds = ["cold burst"], 1
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    cells = [(load, blocks) for load in args.loads for blocks in _POOLS]
    rows: list[PrefixRow] = []
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        futures = {
            cell: [
                pool.submit(measure, *cell, policy, seeds, hidden=args.hidden)
                for policy in args.policies
            ]
            for cell in cells
        }
        for cell in cells:
            found = _judged([future.result() for future in futures[cell]])
            rows += found
            if not args.json:
                _print(found)
    missed = sum(row.missed for row in rows)
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return int(bool(missed))
    cpu_s = time.process_time() + sum(os.times()[2:4])
    print(f"{missed} aims missed. {cpu_s / 60:.1f} CPU-minutes")
    return int(bool(missed))


def _print(rows: Sequence[PrefixRow]) -> None:
    first = rows[0]
    kept = ", ".join(f"{row.policy} {row.kept} ({row.late} late)" for row in rows)
    missed = "  missed" * any(row.missed for row in rows)
    print(f"{first.load:20} {first.kv_blocks:5} blocks, {first.offered:5} requests: {kept}{missed}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--loads", type=names_of(LOADS), default=list(LOADS), help=f"of {', '.join(LOADS)}"
    )
    parser.add_argument(
        "--policies",
        type=names_of(list(Policy)),
        default=list(_POLICIES),
        help=f"default: {','.join(_POLICIES)}",
    )
    parser.add_argument("--hidden", action="store_true", help="requests without max_tokens")
    parser.add_argument("--first-seed", type=int, default=_FIRST_SEED, help="%(default)s")
    parser.add_argument("--seeds", type=positive_count, default=2, help="of a load (%(default)s)")
    parser.add_argument("--jobs", type=positive_count, default=2, help="processes (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one load, in seconds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
