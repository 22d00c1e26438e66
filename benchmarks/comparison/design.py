"""The cells of the comparison of policies: a pairwise design over the factors of a load.

In a pairwise design, each two values of two different factors occur together in at least one cell.
The cells are the same in every run: the design is greedy, and its draws have a fixed seed.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.comparison.cells import Cell, Fleet
from benchmarks.comparison.loads import (
    MIXES,
    TEXTBOOK,
    TEXTBOOK_RATE_PER_S,
    Arrivals,
    Load,
    TraceWindow,
    long_slack_s,
)

from goodput_core.slo.targets import Targets
from goodput_core.spec.choices import Preemption
from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "FACTORS",
    "HORIZON_SLACKS",
    "TRACES",
    "Setting",
    "cell_of",
    "covering",
    "fleet_of",
    "knee_key",
    "load_of",
    "poisson_cell",
    "read_knees",
    "settings",
    "textbook_cells",
    "write_knees",
]

FACTORS: Final = (0.5, 0.8, 1.0, 1.2, 2.0, 4.0)
_KNEES: Final = Path(__file__).parent / "knees.json"
HORIZON_SLACKS: Final = 3
"""Arrivals last as long as this many of the longest slacks.

In an overload, the requests that arrive last are served without competition from later ones. The
longer the arrivals last, the less this counts.
"""
_DESIGN_SEEDS: Final = 8
"""Number of designs from which the cheapest is taken."""
_UNIT: Final = Fleet(device="unit", kv_blocks=120, max_num_seqs=24, token_budget=8192)
_SMALL: Final = Fleet(device="llama-3-8b-h100")
_LARGE: Final = Fleet(device="llama-3-70b-4xh100")
_AZURE: Final = TraceWindow(
    path="",
    interactive=Targets(ttft_ns=750 * NS_PER_MS, tpot_ns=30 * NS_PER_MS),
    batch=Targets(ttft_ns=2 * NS_PER_S, tpot_ns=30 * NS_PER_MS),
)
_MOONCAKE: Final = TraceWindow(
    path="",
    long_prompt=16_384,
    interactive=Targets(ttft_ns=5 * NS_PER_S, tpot_ns=40 * NS_PER_MS),
    batch=Targets(ttft_ns=15 * NS_PER_S, tpot_ns=40 * NS_PER_MS),
)
TRACES: Final = {"azure": _AZURE, "mooncake": _MOONCAKE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value of each factor.

    Args:
        mix: name of a mix or of a trace.
        factor: rate in multiples of the knee.
        arrivals: arrival process.
        replicas: number of replicas.
        preemption: preemption mode.
        known_lengths: True if the engine knows the output lengths.
        small_kv: True for a small KV pool.
        slow_swap: True for an eighth of the bandwidth to host memory that the profile has.
    """

    mix: str
    factor: float
    arrivals: Arrivals
    replicas: int
    preemption: Preemption
    known_lengths: bool
    small_kv: bool
    slow_swap: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """A fleet for a mix.

    Its device is so slow that a run of `HORIZON_SLACKS` slacks has few requests.

    Args:
        fleet: one replica with a full KV pool.
        small_blocks: KV blocks of a small pool.
        cost: CPU time of a run at the knee, relative to the other mixes.
    """

    fleet: Fleet
    small_blocks: int
    cost: float = 1


_BENCHES: Final[Mapping[str, _Bench]] = {
    "chat": _Bench(fleet=_LARGE, small_blocks=1024),
    "chat-8b": _Bench(fleet=_SMALL, small_blocks=2048),
    "uniform": _Bench(fleet=_LARGE, small_blocks=768),
    "bimodal": _Bench(fleet=_LARGE, small_blocks=896, cost=2),
    "kv-bound": _Bench(fleet=replace(_LARGE, kv_blocks=96), small_blocks=64, cost=6),
    "long-prompt": _Bench(fleet=replace(_SMALL, token_budget=1024), small_blocks=4096, cost=3),
    "deadline": _Bench(fleet=_LARGE, small_blocks=768, cost=2),
    "two-classes": _Bench(fleet=_LARGE, small_blocks=896, cost=2),
    "three-classes": _Bench(fleet=_LARGE, small_blocks=896, cost=2),
    "tight-deadlines": _Bench(fleet=_UNIT, small_blocks=60, cost=2),
    "azure": _Bench(fleet=_LARGE, small_blocks=2048, cost=6),
    "mooncake": _Bench(fleet=_LARGE, small_blocks=13_337, cost=6),
}


def settings(mixes: Sequence[str]) -> list[Setting]:
    """Return the settings of a pairwise design over these mixes and traces."""
    values: list[Sequence[object]] = [
        mixes,
        FACTORS,
        tuple(Arrivals),
        (1, 4),
        tuple(Preemption),
        (True, False),
        (False, True),
        (False, True),
    ]
    names = [factor.name for factor in fields(Setting)]

    def setting(row: tuple[Any, ...]) -> Setting:
        return Setting(**dict(zip(names, row, strict=True)))

    def cost(row: tuple[Any, ...]) -> float:
        one = setting(row)
        return one.factor * one.replicas * _BENCHES[one.mix].cost

    designs = [covering(values, cost=cost, seed=seed) for seed in range(_DESIGN_SEEDS)]
    return [setting(row) for row in min(designs, key=lambda rows: sum(map(cost, rows)))]


def covering(
    values: Sequence[Sequence[object]],
    *,
    cost: Callable[[tuple[Any, ...]], float] | None = None,
    seed: int = 1,
    tries: int = 30,
) -> list[tuple[Any, ...]]:
    """Return rows in which every two values of two factors occur together.

    Args:
        values: the values of each factor.
        cost: cost of a row; the row with most new pairs for its cost is taken. None if all rows
            cost the same.
        seed: seed of the draws.
        tries: candidate rows per row; a higher number gives fewer rows.
    """
    rng = random.Random(seed)
    factors = range(len(values))
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(factors, 2)
        for a in range(len(values[i]))
        for b in range(len(values[j]))
    }
    rows: list[tuple[int, ...]] = []

    def worth(row: tuple[int, ...]) -> float:
        covered = sum(
            (i, row[i], j, row[j]) in missing for i, j in itertools.combinations(factors, 2)
        )
        return covered / (1 if cost is None else cost(named(row)))

    def named(row: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(values[i][at] for i, at in enumerate(row))

    while missing:
        best = max((_candidate(values, missing, rng) for _ in range(tries)), key=worth)
        missing -= {(i, best[i], j, best[j]) for i, j in itertools.combinations(factors, 2)}
        rows.append(best)
    rows.sort()
    return [named(row) for row in rows]


def _candidate(
    values: Sequence[Sequence[object]], missing: set[tuple[int, int, int, int]], rng: random.Random
) -> tuple[int, ...]:
    """Return a row that starts with a missing pair and covers as many others as it greedily can."""
    first = rng.choice(sorted(missing))
    row = {first[0]: first[1], first[2]: first[3]}
    others = [i for i in range(len(values)) if i not in row]
    rng.shuffle(others)
    for factor in others:
        gains = []
        for at in range(len(values[factor])):
            pairs = (
                (
                    min(factor, i),
                    (at if factor < i else b),
                    max(factor, i),
                    (b if factor < i else at),
                )
                for i, b in row.items()
            )
            gains.append(sum(pair in missing for pair in pairs))
        best = max(gains)
        row[factor] = rng.choice([at for at, gain in enumerate(gains) if gain == best])
    return tuple(row[i] for i in range(len(values)))


def cell_of(setting: Setting, knees: Mapping[str, float], paths: Mapping[str, str]) -> Cell:
    """Return the cell of a setting.

    Args:
        setting: the setting.
        knees: rate of the knee of one replica, by `knee_key`.
        paths: Parquet files of the traces, by name.
    """
    knee = knees[knee_key(setting.mix, small_kv=setting.small_kv)]
    fleet = fleet_of(setting.mix, small_kv=setting.small_kv)
    slow_gb_per_s = fleet.profile().swap_bytes_per_s / 1e9 / 8
    fleet = replace(
        fleet,
        replicas=setting.replicas,
        swap_gb_per_s=slow_gb_per_s if setting.slow_swap else None,
    )
    rate_per_s = knee * setting.factor * setting.replicas
    is_trace = setting.mix in TRACES
    parts = [
        setting.mix,
        f"{setting.factor:g}x",
        "trace" if is_trace else setting.arrivals,
        f"{setting.replicas}r",
        setting.preemption,
        "known" if setting.known_lengths else "hidden",
        "small" if setting.small_kv else "full",
        "slow" if setting.slow_swap else "fast",
    ]
    return Cell(
        name="/".join(parts),
        load=load_of(
            setting.mix,
            paths,
            arrivals=setting.arrivals,
            rate_per_s=rate_per_s,
            known_lengths=setting.known_lengths,
        ),
        fleet=fleet,
        factor=setting.factor,
        preemption=setting.preemption,
    )


def poisson_cell(
    mix: str,
    factor: float,
    knees: Mapping[str, float],
    *,
    known_lengths: bool,
    small_kv: bool = False,
) -> Cell:
    """Return a cell of one replica with Poisson arrivals, under `hybrid`.

    Args:
        mix: name of a mix.
        factor: rate in multiples of the knee.
        knees: rate of the knee of one replica, by `knee_key`.
        known_lengths: True if the engine knows the output lengths.
        small_kv: True for a small KV pool.
    """
    setting = Setting(
        mix=mix,
        factor=factor,
        arrivals=Arrivals.POISSON,
        replicas=1,
        preemption=Preemption.HYBRID,
        known_lengths=known_lengths,
        small_kv=small_kv,
        slow_swap=False,
    )
    return cell_of(setting, knees, {})


def textbook_cells() -> list[Cell]:
    """Return the published generator, at its own rate, in every preemption mode."""
    return [
        Cell(
            name=f"{TEXTBOOK}/{mode}",
            load=Load(mix=TEXTBOOK, rate_per_s=TEXTBOOK_RATE_PER_S),
            fleet=_UNIT,
            preemption=mode,
        )
        for mode in Preemption
    ]


def knee_key(mix: str, *, small_kv: bool) -> str:
    """Return the name of a knee."""
    return f"{mix}/{'small' if small_kv else 'full'}"


def read_knees() -> dict[str, float]:
    """Return the recorded knees, requests per second of one replica."""
    knees: dict[str, float] = json.loads(_KNEES.read_text())
    return knees


def write_knees(knees: Mapping[str, float]) -> None:
    """Record knees."""
    _KNEES.write_text(json.dumps(dict(sorted(knees.items())), indent=2) + "\n")


def fleet_of(mix: str, *, small_kv: bool) -> Fleet:
    """Return one replica for a mix or a trace."""
    bench = _BENCHES[mix]
    return replace(bench.fleet, kv_blocks=bench.small_blocks) if small_kv else bench.fleet


def load_of(
    mix: str,
    paths: Mapping[str, str],
    *,
    arrivals: Arrivals,
    rate_per_s: float,
    known_lengths: bool,
) -> Load:
    """Return the load of a mix, or of a trace whose Parquet file is in the paths."""
    trace = replace(TRACES[mix], path=paths[mix]) if mix in TRACES else None
    slack_s = long_slack_s(trace) if trace else MIXES[mix].longest_slack_s
    return Load(
        mix="" if trace else mix,
        arrivals=arrivals,
        rate_per_s=rate_per_s,
        horizon_s=HORIZON_SLACKS * slack_s,
        known_lengths=known_lengths,
        trace=trace,
    )
