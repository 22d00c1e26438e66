"""Kept promises of a policy against the offered load: a plateau, or a collapse.

A plateau holds if, at every load up to four times the knee, the policy keeps at least 97 % of the
most that it kept at a lower load. Only mixes with one priority level are compared: among several
levels, a promise of a higher level may cost more than one of a lower level.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from benchmarks.comparison.cells import run_cell
from benchmarks.comparison.design import FACTORS, poisson_cell
from benchmarks.comparison.loads import MIXES

from goodput_core.spec.choices import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Executor

    from benchmarks.comparison.cells import Cell

__all__ = ["Curve", "Point", "curves", "plateau_cell", "plateau_mixes"]

SHARE: Final = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Kept promises at one load, over all seeds.

    Args:
        factor: offered rate in multiples of the knee.
        offered_per_s, kept_per_s: requests per second of arrivals, mean over the seeds.
        admitted_kept: kept share of the admitted requests.
    """

    factor: float
    offered_per_s: float
    kept_per_s: float
    admitted_kept: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Kept against offered requests of one mix.

    Args:
        mix: name of the mix.
        policy: the policy.
        points: results by load, from the lowest on.
    """

    mix: str
    policy: str
    points: tuple[Point, ...]

    @property
    def lowest(self) -> float:
        """Lowest share of a point in the most that was kept at a lower load."""
        most, lowest = 0.0, 1.0
        for point in self.points:
            if most:
                lowest = min(lowest, point.kept_per_s / most)
            most = max(most, point.kept_per_s)
        return lowest

    @property
    def broken(self) -> bool:
        """True if the curve has no plateau."""
        return self.lowest < SHARE


def plateau_mixes() -> list[str]:
    """Return the mixes with a single priority level."""
    return [name for name, mix in MIXES.items() if len({kind.priority for kind in mix.kinds}) == 1]


def plateau_cell(mix: str, factor: float, knees: Mapping[str, float]) -> Cell:
    """Return a cell of a curve: Poisson arrivals on one replica, with the same duration each."""
    cell = poisson_cell(mix, factor, knees, known_lengths=True)
    return replace(cell, name=f"plateau/{cell.name}")


def curves(
    pool: Executor,
    knees: Mapping[str, float],
    seeds: Sequence[int],
    *,
    mixes: Sequence[str],
    factors: Sequence[float] = FACTORS,
    policies: Sequence[str] = (Policy.SLO,),
) -> list[Curve]:
    """Return the curves of these mixes and policies."""
    futures = {
        (mix, policy, factor): pool.submit(
            _point, plateau_cell(mix, factor, knees), policy, list(seeds)
        )
        for mix in mixes
        for policy in policies
        for factor in factors
    }
    return [
        Curve(
            mix=mix,
            policy=policy,
            points=tuple(futures[mix, policy, factor].result() for factor in factors),
        )
        for mix in mixes
        for policy in policies
    ]


def _point(cell: Cell, policy: str, seeds: list[int]) -> Point:
    assert cell.factor is not None
    runs = [run_cell(cell, policy, seed) for seed in seeds]
    admitted = sum(run.admitted for run in runs)
    return Point(
        factor=cell.factor,
        offered_per_s=statistics.fmean(run.offered for run in runs) / cell.load.horizon_s,
        kept_per_s=statistics.fmean(run.kept for run in runs) / cell.load.horizon_s,
        admitted_kept=sum(run.kept for run in runs) / admitted if admitted else 1.0,
    )
