"""Kept promises of a policy against the offered load: a plateau, or a collapse.

A plateau holds if, at every load up to four times the knee, the policy keeps at least 97 % of the
most that it kept at a lower load, and at least 99 % of its admitted requests whose targets can be
ensured are in time. Only mixes with one priority level are compared: among several
levels, a promise of a higher level may cost more than one of a lower level.

A *series* is all loads of a curve. The usual ones have Poisson arrivals, known output lengths and
one replica. The *wide* ones add hidden lengths, two more arrival processes, two and four replicas,
and the traces. Each value of a factor occurs with every mix, but not each combination of values;
the traces are served by one and two replicas.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

from benchmarks.comparison.admitted import Admitted
from benchmarks.comparison.cells import run_cell
from benchmarks.comparison.design import FACTORS, Setting, cell_of
from benchmarks.comparison.loads import MIXES, Arrivals
from benchmarks.comparison.rule import SURE_SHARE

from goodput_core.spec.choices import Policy, Preemption

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Executor

    from benchmarks.comparison.cells import Cell

__all__ = ["Curve", "Point", "Series", "curves", "plateau_series"]

SHARE: Final = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Kept promises at one load, over all seeds.

    Args:
        factor: offered rate in multiples of the knee.
        offered_per_s, kept_per_s: requests per second of arrivals, mean over the seeds.
        admitted_kept: kept share of the admitted requests.
        sure_kept: the same for those whose targets `slo` could ensure; 1 without any.
    """

    factor: float
    offered_per_s: float
    kept_per_s: float
    admitted_kept: float
    sure_kept: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Kept against offered requests of one series.

    Args:
        name: name of the series.
        policy: the policy.
        points: results by load, from the lowest on.
    """

    name: str
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
    def ensured(self) -> float:
        """Lowest share in time of a point's admitted requests whose targets could be ensured."""
        return min((point.sure_kept for point in self.points), default=1.0)

    @property
    def broken(self) -> bool:
        """True if the curve has no plateau, or at some load too many of the admitted are late."""
        return self.lowest < SHARE or self.ensured < SURE_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The loads of a curve, all with the same duration of arrivals.

    Args:
        mix: name of a mix or of a trace.
        arrivals: arrival process; ignored with a trace.
        replicas: number of replicas.
        known_lengths: True if the engine knows the output lengths.
    """

    mix: str
    arrivals: Arrivals = Arrivals.POISSON
    replicas: int = 1
    known_lengths: bool = True

    @property
    def name(self) -> str:
        """Unique name: the mix, and the values that are not the usual ones."""
        parts = [self.mix]
        if self.arrivals is not Arrivals.POISSON:
            parts.append(self.arrivals)
        if self.replicas > 1:
            parts.append(f"{self.replicas}r")
        if not self.known_lengths:
            parts.append("hidden")
        return "/".join(parts)

    def cell(self, factor: float, knees: Mapping[str, float], paths: Mapping[str, str]) -> Cell:
        """Return the cell of a load, in multiples of the knee; see `cell_of`."""
        setting = Setting(
            mix=self.mix,
            factor=factor,
            arrivals=self.arrivals,
            replicas=self.replicas,
            preemption=Preemption.HYBRID,
            known_lengths=self.known_lengths,
            small_kv=False,
            slow_swap=False,
        )
        return cell_of(setting, knees, paths)


_WIDE: Final = (
    (Arrivals.POISSON, 1, False),
    (Arrivals.GAMMA, 1, False),
    (Arrivals.ON_OFF, 1, True),
    (Arrivals.GAMMA, 2, True),
    (Arrivals.POISSON, 2, False),
    (Arrivals.ON_OFF, 4, False),
    (Arrivals.POISSON, 4, True),
)
_WIDE_TRACES: Final = ((1, True), (1, False), (2, False))
"""On four replicas, a window of a trace has too few requests for four times the knee."""


def plateau_series(traces: Iterable[str] = (), *, wide: bool = False) -> list[Series]:
    """Return the series of the mixes with a single priority level.

    Args:
        traces: names of traces, which only the wide series have.
        wide: True to add the wide series.
    """
    mixes = [name for name, mix in MIXES.items() if len({kind.priority for kind in mix.kinds}) == 1]
    series = [Series(mix=mix) for mix in mixes]
    if wide:
        series += [
            Series(mix=mix, arrivals=arrivals, replicas=replicas, known_lengths=known)
            for mix in mixes
            for arrivals, replicas, known in _WIDE
        ]
        series += [
            Series(mix=trace, replicas=replicas, known_lengths=known)
            for trace in traces
            for replicas, known in _WIDE_TRACES
        ]
    return series


def curves(
    pool: Executor,
    knees: Mapping[str, float],
    seeds: Sequence[int],
    *,
    series: Sequence[Series],
    paths: Mapping[str, str],
    factors: Sequence[float] = FACTORS,
    policies: Sequence[str] = (Policy.SLO,),
) -> list[Curve]:
    """Return the curves of these series and policies.

    Args:
        pool: runs the cells.
        knees: rate of the knee of one replica, by `knee_key`.
        seeds: the seeds.
        series: the series.
        paths: Parquet files of the traces, by name.
        factors: loads in multiples of the knee, from the lowest on.
        policies: the policies.
    """
    futures = {
        (one, policy, factor): pool.submit(
            _point, one.cell(factor, knees, paths), policy, list(seeds)
        )
        for one in series
        for policy in policies
        for factor in factors
    }
    return [
        Curve(
            name=one.name,
            policy=policy,
            points=tuple(futures[one, policy, factor].result() for factor in factors),
        )
        for one in series
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
        sure_kept=reduce(Admitted.plus, (run.admitted_parts for run in runs)).sure_share,
    )
