"""Simulated pairs of runs of one trace on two builds, and their cases.

Both runs of a pair have the same requests. Each build has a known long-run share of misses, so the
true difference is exact. The cases were chosen before the code of the statistics was read. The
statistics were not tried on the cases with `late=True` until they were final.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from benchmarks.simulated.processes import Arrivals, Counts, Floats, Lengths, Outages, Windows

__all__ = ["CASES", "PairCase", "PairCounts", "RunFactors", "TraceClass", "draw"]

_ROUNDING: Final = 1e-9
_FIVE_SECONDS: Final = Lengths(kind="fixed", mean_s=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceClass:
    """One class of requests and the misses of the baseline.

    Args:
        per_s: rate of the requests, which are the same in every run.
        hard: share of the requests that miss on both builds, in every run.
        single: chance of a miss of any other request outside of outages.
        down: share of the time in outages, in which every request misses.
        lengths: lengths of the outages.
        only_baseline: share of the time in further outages of the baseline only.
        shared: True if outages come at the same time of the trace in both runs of a pair.
        extra: chance of extra misses of the second build, relative to the worse variant: 1, or 0
            for a class in which the builds are always equal.
    """

    per_s: float = 5.0
    hard: float = 0.0
    single: float = 0.02
    down: float = 0.0
    lengths: Lengths = _FIVE_SECONDS
    only_baseline: float = 0.0
    shared: bool = False
    extra: float = 1.0

    @property
    def miss(self) -> float:
        """Long-run share of misses of the baseline."""
        return 1 - (1 - self.only_baseline) * (1 - self.common_miss)

    @property
    def common_miss(self) -> float:
        """Long-run share of misses that the second build has too."""
        return 1 - (1 - self.hard) * (1 - self.down) * (1 - self.single)

    def longest_outage_s(self, *, by_outages: bool) -> int:
        """Return the length in seconds that an operator would declare; 0 without outages."""
        if not by_outages and not self.down:
            return 0
        factor = 3 if self.lengths.kind == "exponential" else 1
        return math.ceil(factor * self.lengths.mean_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFactors:
    """Factors of the chance of a miss that differ from run to run, with mean 1.

    Args:
        spread: standard deviation of the logarithm of the factor.
        kept: correlation of the logarithms of one run and the next.
        bad: chance of a run with three times the misses of the others.
        drift: change of the factor from the first to the last run, linear.
        on_baseline: True if the factors leave the extra misses of the worse build alone.
    """

    spread: float = 0.0
    kept: float = 0.0
    bad: float = 0.0
    drift: float = 0.0
    on_baseline: bool = False

    def draw(self, trials: int, runs: int, rng: np.random.Generator) -> Floats:
        """Draw the factors, float64 `[trials, runs]`, in the order of the runs."""
        level = rng.standard_normal((trials, runs))
        for run in range(1, runs):
            level[:, run] *= math.sqrt(1 - self.kept**2)
            level[:, run] += self.kept * level[:, run - 1]
        factor = np.exp(self.spread * level - self.spread**2 / 2)
        factor *= np.where(rng.random((trials, runs)) < self.bad, 3.0, 1.0) / (1 + 2 * self.bad)
        factor *= 1 + self.drift * (np.arange(runs) / (runs - 1) - 0.5)
        return factor


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCase:
    """A number of pairs of runs.

    Args:
        name: name of the row.
        pairs: number of pairs.
        margin: largest permitted difference of the attainments.
        classes: classes of the trace.
        runs: the spread between runs.
        seconds: length of each run.
        history: number of earlier pairs of equal builds, from which the spread between runs is
            known if there is one pair. Without them, runs of one pair have no spread.
        quiet: misses of those earlier pairs as a share of the misses of the judged baseline.
        looks: numbers of pairs after which the verdict is asked for, until it is PASS or FAIL; the
            last one is `pairs`. Only the last one if empty.
        by_outages: True if the worse build has more outages, False if it has more single misses.
        late: True if the statistics were not tried on this case until they were final.
    """

    name: str
    pairs: int = 4
    margin: float = 0.01
    classes: tuple[TraceClass, ...] = (TraceClass(),)
    runs: RunFactors = RunFactors()
    seconds: int = 300
    history: int = 0
    quiet: float = 1.0
    looks: tuple[int, ...] = ()
    by_outages: bool = False
    late: bool = False

    @property
    def earlier(self) -> PairCase:
        """The earlier pairs of one build, whose misses are fewer if `quiet` is below 1."""
        classes = tuple(
            replace(
                one,
                **{
                    name: getattr(one, name) * self.quiet
                    for name in ("single", "hard", "down", "only_baseline")
                },
            )
            for one in self.classes
        )
        return replace(self, pairs=self.history, classes=classes)

    @property
    def required(self) -> bool:
        """True if pairs are independent, and the noise of runs is symmetric or small."""
        return self.runs.on_baseline or self.objective_required

    @property
    def objective_required(self) -> bool:
        """True if runs of one build are independent, and their noise is small."""
        return not self.runs.kept and self.runs.spread <= 0.2 and not self.runs.bad


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairCounts:
    """Outcomes of one class, int64 `[trials, pairs, seconds]`.

    Args:
        both: requests that met their targets in both runs.
        only_a: requests that met their targets with the baseline only.
        only_b: requests that met their targets with the second build only.
        neither: requests that missed in both runs.
    """

    both: Counts
    only_a: Counts
    only_b: Counts
    neither: Counts

    @property
    def total(self) -> Counts:
        """Requests of each second, the same in both runs."""
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def difference(self) -> Floats:
        """Difference of each pair, float64 `[trials, pairs]`."""
        difference: Floats = (self.only_b - self.only_a).sum(axis=2) / self.total.sum(axis=2)
        return difference

    @property
    def missed(self) -> Floats:
        """Mean share that the runs of each build missed, float64 `[2, trials]`."""
        alone = np.stack((self.only_b, self.only_a)).sum(axis=3)
        shares = (alone + self.neither.sum(axis=2)) / self.total.sum(axis=2)
        mean: Floats = shares.mean(axis=2)
        return mean

    @property
    def second_build(self) -> Windows:
        """The runs of the second build."""
        return Windows(total=self.total, missed=self.only_a + self.neither)

    def first(self, pairs: int) -> PairCounts:
        """Return the first pairs of each trial."""
        return PairCounts(
            both=self.both[:, :pairs],
            only_a=self.only_a[:, :pairs],
            only_b=self.only_b[:, :pairs],
            neither=self.neither[:, :pairs],
        )


def draw(
    case: PairCase, worse_by: float, trials: int, rng: np.random.Generator
) -> list[PairCounts]:
    """Draw the pairs of many trials.

    Args:
        case: the case.
        worse_by: difference of the builds' shares of misses, as a multiple of the margin.
        trials: number of trials.
        rng: source of random numbers.

    Returns:
        The outcomes of each class.
    """
    factors = case.runs.draw(trials, 2 * case.pairs, rng).reshape(trials, case.pairs, 2)
    a_first = _orders(trials, case.pairs, rng)
    factor = np.stack(
        (
            np.where(a_first, factors[..., 0], factors[..., 1]),
            np.where(a_first, factors[..., 1], factors[..., 0]),
        )
    )
    return [_draw_class(case, one, worse_by, factor, rng) for one in case.classes]


def _draw_class(
    case: PairCase, one: TraceClass, worse_by: float, factor: Floats, rng: np.random.Generator
) -> PairCounts:
    """Draw one class.

    Args:
        case: the case.
        one: the class.
        worse_by: difference of the builds' shares of misses, as a multiple of the margin.
        factor: factors of the baseline's and the second build's runs, `[2, trials, pairs]`.
        rng: source of random numbers.
    """
    # Misses of the second build beyond the common ones, and those of the baseline.
    more = worse_by * case.margin * one.extra + one.miss - one.common_miss
    shape = (*factor.shape[1:], case.seconds)
    runs = shape[0] * shape[1]

    def up(share: float) -> Floats:
        return 1 - _down(runs, case.seconds, share, one.lengths, rng).reshape(shape)

    up_a = up(one.down)
    up_b = up_a if one.shared else up(one.down)
    up_a = up_a * up(one.only_baseline)
    single_b = one.single * factor[1][..., None]
    if case.by_outages:
        # The extra outages of the second build meet only the requests that would not miss.
        up_b = up_b * up(more / (1 - one.common_miss))
    else:
        extra = more / ((1 - one.hard) * (1 - one.down))
        single_b += extra if case.runs.on_baseline else extra * factor[1][..., None]
    chance_a = 1 - up_a * (1 - np.minimum(one.single * factor[0][..., None], 1))
    chance_b = 1 - up_b * (1 - np.minimum(single_b, 1))
    total = Arrivals(per_s=one.per_s, regular=True).draw(runs, case.seconds, rng).reshape(shape)
    hard = rng.binomial(total, one.hard) if one.hard else np.zeros_like(total)
    missed_a = rng.binomial(total - hard, chance_a)
    missed_both = rng.binomial(missed_a, chance_b)
    only_a = rng.binomial(total - hard - missed_a, chance_b)
    return PairCounts(
        both=total - hard - missed_a - only_a,
        only_a=only_a,
        only_b=missed_a - missed_both,
        neither=missed_both + hard,
    )


def _orders(trials: int, pairs: int, rng: np.random.Generator) -> Counts:
    """Return 1 for each pair that begins with the baseline: ABBA or BAAB at random."""
    first = rng.integers(0, 2, (trials, (pairs + 1) // 2))
    return np.stack((first, 1 - first), axis=2).reshape(trials, -1)[:, :pairs]


def _down(
    runs: int, seconds: int, share: float, lengths: Lengths, rng: np.random.Generator
) -> Floats:
    """Draw the share of each second that lies within an outage, float64 `[runs, seconds]`."""
    if share < _ROUNDING:
        return np.zeros((runs, seconds))
    return Outages(miss=share, lengths=lengths).draw(runs, seconds, rng)


def _case(name: str, one: TraceClass | None = None, **options: Any) -> PairCase:
    return PairCase(name=name, classes=(one or TraceClass(),), **options)


def _lengths(mean_s: float, kind: str = "fixed") -> Lengths:
    return Lengths(kind=kind, mean_s=mean_s)


CASES: Final = (
    _case("independent, 2 pairs", pairs=2),
    _case("independent, 4 pairs"),
    _case("independent, 6 pairs", pairs=6, late=True),
    _case("independent, 10 pairs", pairs=10),
    _case("independent, 20/s, 1 min", TraceClass(per_s=20), seconds=60),
    _case("independent, 1 h, margin 0.5 %", seconds=3600, margin=0.005, late=True),
    _case("misses 0.1 %, margin 0.5 %", TraceClass(single=0.001), margin=0.005),
    _case("misses 0.02 %, margin 0.5 %", TraceClass(single=0.0002), margin=0.005, late=True),
    _case("misses 30 %, margin 5 %", TraceClass(single=0.3), margin=0.05),
    _case("80 % of the misses are of hard requests", TraceClass(hard=0.016, single=0.004)),
    _case("runs spread by 20 %, 4 pairs", runs=RunFactors(spread=0.2)),
    _case("runs spread by 20 %, 10 pairs", pairs=10, runs=RunFactors(spread=0.2)),
    _case("runs spread by 30 %, 2 pairs", pairs=2, runs=RunFactors(spread=0.3)),
    _case("runs spread by 30 %, 4 pairs", runs=RunFactors(spread=0.3)),
    _case("runs spread by 30 %, 6 pairs", pairs=6, runs=RunFactors(spread=0.3), late=True),
    _case("runs spread by 30 %, 10 pairs", pairs=10, runs=RunFactors(spread=0.3)),
    _case("runs spread by 80 %, 4 pairs", runs=RunFactors(spread=0.8)),
    _case("one run in ten misses three times as much, 4 pairs", runs=RunFactors(bad=0.1)),
    _case(
        "one run in ten misses three times as much, 10 pairs",
        pairs=10,
        runs=RunFactors(bad=0.1),
        late=True,
    ),
    _case("spread 50 %, half of it carried over, 4 pairs", runs=RunFactors(spread=0.5, kept=0.5)),
    _case(
        "spread 50 %, 80 % of it carried over, 6 pairs",
        pairs=6,
        runs=RunFactors(spread=0.5, kept=0.8),
        late=True,
    ),
    _case(
        "spread 50 % of equal misses, half of it carried over, 4 pairs",
        runs=RunFactors(spread=0.5, kept=0.5, on_baseline=True),
    ),
    _case(
        "spread 50 % of equal misses, 80 % of it carried over, 10 pairs",
        pairs=10,
        runs=RunFactors(spread=0.5, kept=0.8, on_baseline=True),
        late=True,
    ),
    _case("drift from half to one and a half, 4 pairs", runs=RunFactors(drift=1.0)),
    _case("drift from half to one and a half, 6 pairs", pairs=6, runs=RunFactors(drift=1.0)),
    _case(
        "drift from one and a half to half, 10 pairs",
        pairs=10,
        runs=RunFactors(drift=-1.0),
        late=True,
    ),
    _case(
        "shared outages of 5 s, 4 pairs",
        TraceClass(single=0.005, down=0.015, shared=True),
    ),
    _case(
        "shared outages of 5 s, worse by own outages, 6 pairs",
        TraceClass(single=0.005, down=0.015, shared=True),
        pairs=6,
        by_outages=True,
        late=True,
    ),
    _case("own outages of 5 s, 4 pairs", TraceClass(single=0.005, down=0.015), by_outages=True),
    _case(
        "own outages of 5 s, 10 pairs",
        TraceClass(single=0.005, down=0.015),
        pairs=10,
        by_outages=True,
    ),
    _case(
        "own outages around 10 s, 1 h, 4 pairs",
        TraceClass(single=0.005, down=0.015, lengths=_lengths(10, "exponential")),
        seconds=3600,
        by_outages=True,
        late=True,
    ),
    _case(
        "one discordant burst of 3 s in a pair, margin 2 %, 4 pairs",
        TraceClass(single=0.0, down=0.005, lengths=_lengths(3)),
        margin=0.02,
        by_outages=True,
    ),
    _case(
        "one discordant burst of 3 s in a pair, margin 2 %, 10 pairs",
        TraceClass(single=0.0, down=0.005, lengths=_lengths(3)),
        pairs=10,
        margin=0.02,
        by_outages=True,
        late=True,
    ),
    _case(
        "two discordant bursts of 3 s in a pair, margin 2 %, 4 pairs",
        TraceClass(single=0.002, down=0.01, lengths=_lengths(3)),
        margin=0.02,
        by_outages=True,
        late=True,
    ),
    _case(
        "three discordant bursts of 3 s in a pair, margin 2 %, 6 pairs",
        TraceClass(single=0.002, down=0.015, lengths=_lengths(3)),
        pairs=6,
        margin=0.02,
        by_outages=True,
    ),
    _case(
        "outages of 10 s only on the second build, 4 pairs",
        TraceClass(single=0.0005, lengths=_lengths(10)),
        by_outages=True,
    ),
    _case(
        "outages of 30 s only on the second build, 10 pairs",
        TraceClass(single=0.0005, lengths=_lengths(30)),
        pairs=10,
        by_outages=True,
        late=True,
    ),
    _case(
        "bursts of 3 s only on the second build, margin 2 %, 4 pairs",
        TraceClass(single=0.0005, lengths=_lengths(3)),
        margin=0.02,
        by_outages=True,
    ),
    _case("10 requests a run, margin 10 %, 4 pairs", TraceClass(per_s=1 / 30), margin=0.1),
    _case(
        "30 requests a run, margin 5 %, 10 pairs",
        TraceClass(per_s=0.1, single=0.05),
        pairs=10,
        margin=0.05,
    ),
    _case(
        "100 requests a run, margin 3 %, 4 pairs",
        TraceClass(per_s=1 / 3, single=0.03),
        margin=0.03,
        late=True,
    ),
    PairCase(name="two classes, both worse, 4 pairs", classes=(TraceClass(), TraceClass())),
    PairCase(
        name="three classes, one of them worse, 6 pairs",
        pairs=6,
        classes=(TraceClass(), TraceClass(extra=0.0), TraceClass(single=0.05, extra=0.0)),
    ),
    PairCase(
        name="four classes, all worse, 4 pairs",
        classes=tuple(TraceClass(per_s=per_s) for per_s in (3, 4, 5, 6)),
    ),
    PairCase(
        name="four classes, one of them rare and worse, 10 pairs",
        pairs=10,
        margin=0.02,
        classes=(
            TraceClass(per_s=0.2, single=0.03),
            *(TraceClass(extra=0.0) for _ in range(3)),
        ),
        late=True,
    ),
    _case(
        "spread 30 %, drift, own outages of 5 s, 4 pairs",
        TraceClass(single=0.01, down=0.01),
        runs=RunFactors(spread=0.3, drift=0.5),
        by_outages=True,
    ),
    _case(
        "spread 50 %, carry-over, shared outages of 5 s, 6 pairs",
        TraceClass(single=0.01, down=0.01, shared=True),
        pairs=6,
        runs=RunFactors(spread=0.5, kept=0.5),
        late=True,
    ),
    _case(
        "bursts of 3 s only on the baseline, margin 2 %, 4 pairs",
        TraceClass(single=0.0005, lengths=_lengths(3), only_baseline=0.01),
        margin=0.02,
        late=True,
    ),
    _case("one pair without noise", pairs=1),
    _case(
        "one pair without noise, own outages of 5 s, margin 2 %, 1 h",
        TraceClass(single=0.005, down=0.015),
        pairs=1,
        seconds=3600,
        margin=0.02,
        by_outages=True,
        late=True,
    ),
    _case(
        "one pair after 6 of one build, runs spread by 30 %",
        pairs=1,
        history=6,
        margin=0.02,
        runs=RunFactors(spread=0.3),
    ),
    _case(
        "one pair after 6 of one build, equal misses spread by 30 %",
        pairs=1,
        history=6,
        margin=0.02,
        runs=RunFactors(spread=0.3, on_baseline=True),
    ),
    *(
        _case(
            f"one pair after 10 of one build that missed {share}, runs spread by 50 %",
            TraceClass(single=0.05),
            pairs=1,
            history=10,
            quiet=quiet,
            margin=0.02,
            runs=RunFactors(spread=0.5),
            late=True,
        )
        for share, quiet in (("as much", 1.0), ("a third", 1 / 3), ("nothing", 0.0))
    ),
    _case(
        "one pair after 12 of one build, own outages of 5 s, 1 h",
        TraceClass(single=0.005, down=0.015),
        pairs=1,
        history=12,
        seconds=3600,
        margin=0.02,
        by_outages=True,
        late=True,
    ),
    *(
        _case(name, pairs=10, looks=looks, **options)
        for name, looks, options in (
            ("independent, looks at 4, 6, 8 and 10 pairs", (4, 6, 8, 10), {}),
            (
                "runs spread by 20 %, looks at 4, 6, 8 and 10 pairs",
                (4, 6, 8, 10),
                {"runs": RunFactors(spread=0.2)},
            ),
            (
                "runs spread by 30 %, looks at 4, 6, 8 and 10 pairs",
                (4, 6, 8, 10),
                {"runs": RunFactors(spread=0.3)},
            ),
            (
                "runs spread by 30 %, looks at every second pair",
                (2, 4, 6, 8, 10),
                {"runs": RunFactors(spread=0.3), "late": True},
            ),
            (
                "own outages of 5 s, looks at 4, 6, 8 and 10 pairs",
                (4, 6, 8, 10),
                {"one": TraceClass(single=0.005, down=0.015), "by_outages": True},
            ),
            (
                "bursts of 3 s only on the second build, looks at 4, 6, 8 and 10 pairs",
                (4, 6, 8, 10),
                {
                    "one": TraceClass(single=0.0005, lengths=_lengths(3)),
                    "by_outages": True,
                    "late": True,
                },
            ),
            (
                "drift from half to one and a half, looks at 4, 7 and 10 pairs",
                (4, 7, 10),
                {"runs": RunFactors(drift=1.0), "late": True},
            ),
        )
    ),
)
