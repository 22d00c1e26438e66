"""`hybrid` against `swap` and `recompute`, over KV sizes and bandwidths to host memory.

The rule: with no policy that preempts, `hybrid` keeps on average over the seeds more than 1 % of
the requests less than the better of the two others, unless this may be chance: the one-sided upper
95 % bound of the mean difference must then be above 0. Of more than a hundred results, some break
this rule by chance, so four times as many new seeds decide on those that do.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from benchmarks.comparison.cells import run_cell
from benchmarks.comparison.design import poisson_cell, textbook_cells
from benchmarks.comparison.rule import lower_bound

from goodput_core.spec.choices import Policy, Preemption

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from benchmarks.comparison.cells import Cell

__all__ = ["MODE_POLICIES", "ModeResult", "compare_modes", "mode_cells"]

TOLERANCE: Final = 0.01
MODE_POLICIES: Final = (
    Policy.SLO,
    Policy.SJF,
    Policy.PRIORITY,
    Policy.SARATHI,
    Policy.VLLM,
    Policy.SPLITFUSE,
    Policy.FASTSERVE,
)
"""The policies that preempt for memory."""
_MIXES: Final = ("kv-bound", "tight-deadlines", "deadline")
_POOLS: Final = (1.0, 0.7)
_GB_PER_S: Final = (1.0, 8.0, 64.0)
_FACTOR: Final = 1.5
MORE_SEEDS: Final = 4
"""Number of new seeds that decide on a broken result, in multiples of the seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeResult:
    """Kept shares of one policy in a cell, mean over the seeds.

    Args:
        cell: name of the cell.
        policy: the policy.
        shares: kept share of the offered weight, by preemption mode.
        high: one-sided upper 95 % bound of the mean difference between `hybrid` and the better of
            the two others, from paired seeds.
        preemptions: preemptions in all modes and seeds.
        short: True if the seeds are few. The rule is then that the difference is at least −2 %.
        before: the result of the first seeds, if they broke the rule; None if they did not.
    """

    cell: str
    policy: str
    shares: Mapping[str, float]
    high: float
    preemptions: int
    short: bool = False
    before: ModeResult | None = None

    @property
    def difference(self) -> float:
        """`hybrid` minus the better of the two others."""
        others = (self.shares[Preemption.SWAP], self.shares[Preemption.RECOMPUTE])
        return self.shares[Preemption.HYBRID] - max(others)

    @property
    def broken(self) -> bool:
        """True if the rule is broken."""
        return self.difference < -TOLERANCE * (1 + self.short) and self.high < 0


def mode_cells(knees: Mapping[str, float]) -> list[Cell]:
    """Return cells with little memory: KV sizes and bandwidths of three mixes, and the textbook."""
    cells = [textbook_cells()[0]]
    for mix in _MIXES:
        cell = poisson_cell(mix, _FACTOR, knees, known_lengths=False, small_kv=True)
        assert cell.fleet.kv_blocks is not None
        for pool in _POOLS:
            blocks = round(cell.fleet.kv_blocks * pool)
            for bandwidth in _GB_PER_S:
                fleet = replace(cell.fleet, kv_blocks=blocks, swap_gb_per_s=bandwidth)
                name = f"{mix}/{_FACTOR:g}x/{blocks} blocks/{bandwidth:g} GB/s"
                cells.append(replace(cell, name=name, fleet=fleet))
    return [replace(cell, name=f"modes/{cell.name}") for cell in cells]


def compare_modes(
    pool: Executor,
    cells: Sequence[Cell],
    seeds: range,
    policies: Sequence[str] = MODE_POLICIES,
    *,
    short: bool = False,
) -> list[ModeResult]:
    """Serve the cells in every mode; cells in which a policy does not preempt are left out.

    Args:
        pool: runs the cells.
        cells: the cells.
        seeds: the seeds of each cell.
        policies: the policies.
        short: see `ModeResult`.
    """
    tasks = [(cell, policy) for cell in cells for policy in policies]
    futures = [pool.submit(_compare, *task, list(seeds), short=short) for task in tasks]
    results = [future.result() for future in futures]
    more = [] if short else [*range(seeds.stop, seeds.stop + MORE_SEEDS * len(seeds))]
    again = {
        at: pool.submit(_compare, *tasks[at], more)
        for at, result in enumerate(results)
        if more and result.broken
    }
    for at, future in again.items():
        results[at] = replace(future.result(), before=results[at])
    return [result for result in results if result.preemptions]


def _compare(cell: Cell, policy: str, seeds: list[int], *, short: bool = False) -> ModeResult:
    runs = {mode: [run_cell(cell, policy, seed, mode) for seed in seeds] for mode in Preemption}
    shares: dict[str, float] = {
        mode: statistics.fmean(run.share for run in runs[mode]) for mode in Preemption
    }
    better = max((Preemption.SWAP, Preemption.RECOMPUTE), key=shares.__getitem__)
    pairs = zip(runs[better], runs[Preemption.HYBRID], strict=True)
    return ModeResult(
        cell=cell.name,
        policy=policy,
        shares=shares,
        high=-lower_bound([other.share - hybrid.share for other, hybrid in pairs]),
        preemptions=sum(run.preemptions for mode in Preemption for run in runs[mode]),
        short=short,
    )
