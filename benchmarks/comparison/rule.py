"""The rule by which `slo` is compared with every other policy, on paired seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Final

from benchmarks.comparison.admitted import Admitted

from goodput_core.slo.distributions import student_t_quantile
from goodput_core.spec.choices import Policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.comparison.cells import Kept

__all__ = [
    "CellResult",
    "Chances",
    "Difference",
    "chances_by_mix",
    "compare",
    "judge_cell",
    "lower_bound",
]

TOLERANCE: Final = 0.01
SEED_SHARE: Final = 0.95
SURE_SHARE: Final = 0.99
"""Least share in time of the admitted requests whose targets could be ensured."""
CHANCE_TOLERANCE: Final = 0.02
"""Largest difference between the predicted and the true share of the others of a mix."""
LEAST_CHANCES: Final = 500
"""Fewer requests of a mix do not show a difference of two points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`slo` minus another policy, in shares of the offered weight, on paired seeds.

    Args:
        policy: the other policy.
        level: lowest priority level that is counted.
        seeds: number of seeds.
        mean: mean difference.
        low: one-sided lower 95 % bound of the mean difference, from Student's t distribution; the
            lowest difference if the other policy left the cell early.
    """

    policy: str
    level: int
    seeds: int
    mean: float
    low: float

    @property
    def broken(self) -> bool:
        """True if the rule is broken."""
        return self.low < -TOLERANCE

    @property
    def is_open(self) -> bool:
        """True if it is broken only because the seeds are too few for a narrow bound."""
        return self.low < -TOLERANCE <= self.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """A cell judged by the rule.

    Args:
        cell: name of the cell.
        shares: mean kept share of the offered weight, by policy.
        admitted: the requests that `slo` admitted, over all seeds.
        differences: differences to the other policies.
        worst_seed: lowest share of `slo` in the best policy of the same seed.
        worst_seed_number: seed of that share.
        short: True if the seeds are too few for a bound. The rule is then that the mean difference
            is at least −2 %; single seeds are not judged.
        cpu_s: CPU time of all runs.
        bound_share: weight that `slo` kept, as a share of the clairvoyant bound of the same seeds;
            None if no bound was computed.
        opened: the differences that were open, and are judged by new seeds in `differences`.
    """

    cell: str
    shares: Mapping[str, float]
    admitted: Admitted
    differences: tuple[Difference, ...]
    worst_seed: float
    worst_seed_number: int
    short: bool
    cpu_s: float
    bound_share: float | None = None
    opened: tuple[Difference, ...] = ()

    @property
    def open_policies(self) -> list[str]:
        """The other policies whose difference more seeds can decide."""
        return [] if self.short else [one.policy for one in self.differences if one.is_open]

    def settled(self, more: CellResult) -> CellResult:
        """Return the result with the open differences judged by those of new seeds."""
        fresh = {one.policy: one for one in more.differences}
        return replace(
            self,
            differences=_sorted([fresh.get(one.policy, one) for one in self.differences]),
            opened=tuple(one for one in self.differences if one.policy in fresh),
            cpu_s=self.cpu_s + more.cpu_s,
        )

    @property
    def mean_broken(self) -> bool:
        """True if the mean difference to a policy breaks the rule."""
        if self.short:
            return any(difference.mean < -2 * TOLERANCE for difference in self.differences)
        return any(difference.broken for difference in self.differences)

    @property
    def seed_broken(self) -> bool:
        """True if a single seed breaks the rule."""
        return not self.short and self.worst_seed < SEED_SHARE

    @property
    def admitted_broken(self) -> bool:
        """True if too many admitted requests were late although their targets could be ensured."""
        return not self.short and self.admitted.sure_share < SURE_SHARE

    @property
    def broken(self) -> bool:
        """True if the rule is broken, by a difference or by late requests."""
        return self.mean_broken or self.seed_broken or self.admitted_broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """The admitted requests of a mix whose targets could not be ensured.

    Args:
        mix: name of the mix.
        admitted: the admitted requests of all its cells.
    """

    mix: str
    admitted: Admitted

    @property
    def broken(self) -> bool:
        """True if the predicted chances are wrong."""
        admitted = self.admitted
        return admitted.others >= LEAST_CHANCES and abs(admitted.difference) > CHANCE_TOLERANCE


def chances_by_mix(results: Sequence[CellResult]) -> list[Chances]:
    """Add up the cells of each mix with requests whose targets could not be ensured."""
    by_mix: dict[str, Admitted] = {}
    for result in results:
        if result.admitted.others:
            mix = result.cell.partition("/")[0]
            by_mix[mix] = by_mix.get(mix, Admitted()).plus(result.admitted)
    return [Chances(mix=mix, admitted=admitted) for mix, admitted in by_mix.items()]


def compare(one: Sequence[Kept], other: Sequence[Kept]) -> tuple[int, list[float]]:
    """Return the level at which two policies are compared, and the differences on each seed.

    The difference is in the kept weight of this level and all levels above, as a share of the
    offered weight of these levels. Levels are compared from the highest on. The comparison ends at
    the first level at which the policies differ, on average, by more than the tolerance.
    """
    levels = sorted({level for run in one for level in run.levels}, reverse=True)
    differences: list[float] = []
    for level in levels:
        differences = []
        for ours, theirs in zip(one, other, strict=True):
            whole = _offered(ours, level)
            gained = _kept(ours, level) - _kept(theirs, level)
            differences.append(gained / whole if whole else 0.0)
        if abs(statistics.fmean(differences)) > TOLERANCE:
            return level, differences
    return levels[-1], differences


def _offered(run: Kept, lowest: int) -> float:
    return sum(offered for level, (offered, _) in run.levels.items() if level >= lowest)


def _kept(run: Kept, lowest: int) -> float:
    return sum(kept for level, (_, kept) in run.levels.items() if level >= lowest)


def lower_bound(differences: Sequence[float]) -> float:
    """Return the one-sided lower 95 % bound of the mean of paired differences."""
    count = len(differences)
    if count < 2:
        return statistics.fmean(differences)
    error = statistics.stdev(differences) / count**0.5
    mean: float = statistics.fmean(differences)
    bound: float = mean - student_t_quantile(0.95, count - 1) * error
    return bound


def judge_cell(
    name: str,
    runs: Mapping[str, Mapping[int, Kept]],
    *,
    short: bool = False,
    bounds: Mapping[int, float] | None = None,
) -> CellResult:
    """Judge a cell.

    Args:
        name: name of the cell.
        runs: the runs of each policy, by seed.
        short: see `CellResult`.
        bounds: largest weight that any policy can keep, by seed, for some seeds; None for no seed.
    """
    ours = runs[Policy.SLO]
    differences = []
    worst, worst_number = 1.0, 0
    for policy, by_seed in runs.items():
        if policy == Policy.SLO:
            continue
        one, other = [ours[seed] for seed in by_seed], list(by_seed.values())
        level, values = compare(one, other)
        differences.append(
            Difference(
                policy=policy,
                level=level,
                seeds=len(values),
                mean=statistics.fmean(values),
                low=lower_bound(values) if len(values) == len(ours) else min(values),
            )
        )
        for seed, run in by_seed.items():
            share = _seed_share(ours[seed], run)
            if share < worst:
                worst, worst_number = share, seed
    return CellResult(
        cell=name,
        shares={
            policy: statistics.fmean(run.share for run in by_seed.values())
            for policy, by_seed in runs.items()
        },
        admitted=reduce(Admitted.plus, (run.admitted_parts for run in ours.values()), Admitted()),
        differences=_sorted(differences, by_mean=short),
        worst_seed=worst,
        worst_seed_number=worst_number,
        short=short,
        cpu_s=sum(run.cpu_s for by_seed in runs.values() for run in by_seed.values()),
        bound_share=(
            sum(ours[seed].kept_weight for seed in bounds) / sum(bounds.values())
            if bounds
            else None
        ),
    )


def _sorted(differences: Iterable[Difference], *, by_mean: bool = False) -> tuple[Difference, ...]:
    """Return the differences with the worst first."""
    return tuple(sorted(differences, key=lambda one: one.mean if by_mean else one.low))


def _seed_share(ours: Kept, theirs: Kept) -> float:
    """Return the share of one run in another, at the first level at which the runs differ."""
    for level in ours.levels:
        one, other = _kept(ours, level), _kept(theirs, level)
        if one != other:
            return one / other if other else 1.0
    return 1.0
