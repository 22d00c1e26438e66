"""How often verdicts are wrong, on simulated services whose true attainment is known.

*Runs.* The objective is the true attainment, where every PASS and every FAIL is an error. Each is
allowed in 5 % of the windows where the outages of the service fit the declared length
(docs/verdicts.md). Further columns show the errors where the objective is a little above or below
the true attainment, and the shares of right verdicts where the service misses half or twice as many
requests as the objective permits.

*Pairs.* Two builds serve the same trace in pairs of runs. If the second build is worse by exactly
the margin, every PASS and every FAIL is an error, and each is allowed in 5 % of the trials. Further
columns show the right verdicts on equal builds and on one that is worse by twice the margin, and
the margin with which 80 % of the trials of equal builds pass.

    python -m benchmarks.error_rates                            # three minutes of CPU time
    python -m benchmarks.error_rates --parts runs --cases 'outages of 30 s' --trials 10000
    python -m benchmarks.error_rates --quick                    # 100 trials a case, as in CI
    python -m benchmarks.error_rates --json

The exit code is 1 if an error that is allowed in 5 % of the trials exceeds that rate by more than
three standard errors. Rates of other cases are only printed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from benchmarks.comparison.arguments import names_of, positive_count
from benchmarks.simulated import pairs, single_runs
from benchmarks.simulated.differences import (
    Differences,
    all_pass,
    any_fails,
    attainment_bounds,
)
from benchmarks.simulated.intervals import Scales, bounds, failing, passing
from benchmarks.simulated.processes import Windows
from rich.console import Console
from rich.progress import track

from goodput_core.slo.intervals import DEFAULT_CONFIDENCE
from goodput_core.slo.looks import look_confidences

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from benchmarks.simulated.pairs import PairCase, PairCounts
    from benchmarks.simulated.processes import Counts, Floats
    from benchmarks.simulated.single_runs import Case

__all__ = ["PairErrors", "RunErrors", "broken", "main", "measure", "measure_pairs"]

PARTS: Final = ("runs", "pairs")
ALLOWED: Final = 0.05
"""Allowed rate of each error."""
STANDARD_ERRORS: Final = 3
WANTED_PASSES: Final = 0.8
"""Aimed share of PASS for equal builds."""
_QUICK_TRIALS: Final = 100
_SLIGHTLY: Final = 1.1
"""Misses of the service per permitted miss, where the objective is slightly off the truth."""
_CHUNK: Final = 1_000_000
"""Seconds of runs that are simulated at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunErrors:
    """Verdicts on the windows of one case with one declared outage.

    Args:
        case: name of the case.
        late: True if the interval was not tried on this case until it was final.
        seconds: length of the windows.
        miss: true share of misses.
        outage_s: declared longest outage.
        required: True if the outages of the case fit the declared length.
        trials: number of windows.
        wrong_pass: windows that pass at the true attainment.
        wrong_pass_above: windows that pass if the service misses a tenth more than permitted.
        wrong_fail: windows that fail at the true attainment.
        wrong_fail_below: windows that fail if the service misses a tenth less than permitted.
        right_pass: windows that pass if the service misses half as much as permitted.
        right_fail: windows that fail if the service misses twice as much as permitted.
    """

    case: str
    late: bool
    seconds: int
    miss: float
    outage_s: int
    required: bool
    trials: int
    wrong_pass: int
    wrong_pass_above: int
    wrong_fail: int
    wrong_fail_below: int
    right_pass: int
    right_fail: int

    @property
    def broken(self) -> bool:
        """True if an error of a required case is too frequent."""
        return self.required and any(
            broken(count, self.trials) for count in (self.wrong_pass, self.wrong_fail)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairErrors:
    """Verdicts on the trials of one case of pairs.

    The first five counts are of the difference between the builds, the last two of the objective of
    the first class, which is the true attainment of equal builds over all runs of the second one.

    Args:
        case: name of the case.
        late: True if the statistics were not tried on this case until they were final.
        pairs: number of pairs.
        margin: largest permitted difference.
        outage_s: declared longest outage.
        required: True if the outages of the case fit the declared length, pairs are independent,
            and the noise of runs is symmetric or small.
        objective_required: True if the outages fit the declared length, runs of one build are
            independent, and their noise is small.
        trials: number of trials.
        wrong_pass: trials that pass if the second build is worse by the margin.
        wrong_fail: trials that fail if the second build is worse by the margin.
        wrong_fail_equal: trials of equal builds that fail.
        right_pass: trials of equal builds that pass.
        right_fail: trials that fail if the second build is worse by twice the margin.
        margin_to_pass: margin with which 80 % of the trials of equal builds pass; None if there are
            several looks.
        objective_wrong_pass: trials whose attainment passes.
        objective_wrong_fail: trials whose attainment fails.
    """

    case: str
    late: bool
    pairs: int
    margin: float
    outage_s: int
    required: bool
    objective_required: bool
    trials: int
    wrong_pass: int
    wrong_fail: int
    wrong_fail_equal: int
    right_pass: int
    right_fail: int
    margin_to_pass: float | None
    objective_wrong_pass: int
    objective_wrong_fail: int

    @property
    def broken(self) -> bool:
        """True if an error of a required case is too frequent."""
        counts = []
        if self.required:
            counts += [self.wrong_pass, self.wrong_fail, self.wrong_fail_equal]
        if self.objective_required:
            counts += [self.objective_wrong_pass, self.objective_wrong_fail]
        return any(broken(count, self.trials) for count in counts)


def broken(count: int, trials: int) -> bool:
    """Return True if the rate exceeds the allowed one by more than three standard errors."""
    error = math.sqrt(ALLOWED * (1 - ALLOWED) * trials)
    return count > ALLOWED * trials + STANDARD_ERRORS * error


def standard_error(count: int, trials: int) -> float:
    """Return the standard error of a rate, which is above 0 even if it was not observed.

    Source: Agresti and Coull, "Approximate is better than exact for interval estimation of
    binomial proportions", The American Statistician, 1998: two errors and two others are added.
    """
    rate = (count + 2) / (trials + 4)
    return math.sqrt(rate * (1 - rate) / (trials + 4))


def measure(case: Case, *, trials: int, seed: int) -> list[RunErrors]:
    """Draw windows of a case and judge them, without and with its longest outage declared."""
    rng = np.random.default_rng((seed, *case.name.encode()))
    drawn = case.process.draw(trials, case.seconds, rng)
    # A window without requests has no verdict.
    filled = drawn.total.sum(axis=1) > 0
    windows = Windows(total=drawn.total[filled], missed=drawn.missed[filled])
    half, less, equal, more, twice = (
        Fraction(1 - case.process.miss / factor).limit_denominator(1_000_000)
        for factor in (0.5, 1 / _SLIGHTLY, 1.0, _SLIGHTLY, 2.0)
    )
    found = []
    for outage_s in sorted({0, case.outage_s or 0}):
        limits = bounds(Scales(windows, outage_s=outage_s))
        found.append(
            RunErrors(
                case=case.name,
                late=case.late,
                seconds=case.seconds,
                miss=case.process.miss,
                outage_s=outage_s,
                required=outage_s == case.outage_s,
                trials=trials,
                wrong_pass=int(passing(limits, equal).sum()),
                wrong_pass_above=int(passing(limits, more).sum()),
                wrong_fail=int(failing(limits, equal).sum()),
                wrong_fail_below=int(failing(limits, less).sum()),
                right_pass=int(passing(limits, half).sum()),
                right_fail=int(failing(limits, twice).sum()),
            )
        )
    return found


def measure_pairs(case: PairCase, *, trials: int, seed: int) -> list[PairErrors]:
    """Draw pairs of a case, with equal builds and with one that is worse, and judge them.

    Returns:
        The verdicts without and with the longest outage of the case declared.
    """
    rng = np.random.default_rng((seed, *case.name.encode()))
    size = max(1, _CHUNK // (case.pairs * case.seconds * len(case.classes)))
    sizes = [min(size, trials - start) for start in range(0, trials, size)]
    longest_s = max(one.longest_outage_s(by_outages=case.by_outages) for one in case.classes)
    outages_s = sorted({0, longest_s})
    passed, failed = np.zeros((2, len(outages_s), 3), dtype=np.int64)
    objective = np.zeros((len(outages_s), 2), dtype=np.int64)
    reached: list[list[Floats]] = [[] for _ in outages_s]
    for worse_by in range(3):
        for chunk in sizes:
            drawn = pairs.draw(case, worse_by, chunk, rng)
            history: Sequence[PairCounts | None] = [None] * len(drawn)
            if case.history:
                history = pairs.draw(case.earlier, 0, chunk, rng)
            for row, outage_s in enumerate(outages_s):
                kinds, lower = _judge_pairs(case, drawn, history, outage_s)
                passed[row, worse_by] += (kinds > 0).sum()
                failed[row, worse_by] += (kinds < 0).sum()
                if not worse_by:
                    objective[row] += _judge_objective(case, drawn[0], history[0], outage_s)
                    reached[row].append(lower)
    return [
        PairErrors(
            case=case.name,
            late=case.late,
            pairs=case.pairs,
            margin=case.margin,
            outage_s=outage_s,
            required=case.required and outage_s == longest_s,
            objective_required=case.objective_required and outage_s == longest_s,
            trials=trials,
            wrong_pass=int(passed[row, 1]),
            wrong_fail=int(failed[row, 1]),
            wrong_fail_equal=int(failed[row, 0]),
            right_pass=int(passed[row, 0]),
            right_fail=int(failed[row, 2]),
            margin_to_pass=None if case.looks else _margin_to_pass(reached[row]),
            objective_wrong_pass=int(objective[row, 0]),
            objective_wrong_fail=int(objective[row, 1]),
        )
        for row, outage_s in enumerate(outages_s)
    ]


def _margin_to_pass(lower: Sequence[Floats]) -> float:
    """Return the margin with which 80 % of the trials pass."""
    return -float(np.quantile(np.concatenate(lower), 1 - WANTED_PASSES))


def _judge_pairs(
    case: PairCase,
    drawn: Sequence[PairCounts],
    history: Sequence[PairCounts | None],
    outage_s: int,
) -> tuple[Counts, Floats]:
    """Judge the differences of all classes.

    Args:
        case: the case.
        drawn: the outcomes of each class.
        history: earlier pairs of one build, by class; None if there are none.
        outage_s: declared longest outage.

    Returns:
        1 for PASS, −1 for FAIL and 0 for INCONCLUSIVE, int64 `[trials]`, and the smallest lower
        bound of the classes at the last look, float64 `[trials]`.
    """
    looks = case.looks or (case.pairs,)
    confidences: Sequence[float] = [DEFAULT_CONFIDENCE]
    if case.looks:
        confidences = look_confidences(looks, DEFAULT_CONFIDENCE)
    kinds = np.zeros(len(drawn[0].both), dtype=np.int64)
    for look, confidence in zip(looks, confidences, strict=True):
        found = [
            Differences(one.first(look), known, outage_s=outage_s)
            for one, known in zip(drawn, history, strict=True)
        ]
        failed = any_fails(found, margin=case.margin, confidence=confidence)
        passed = all_pass(found, margin=case.margin, confidence=confidence)
        kinds = np.where(kinds == 0, np.where(failed, -1, passed), kinds)
    return kinds, np.min([one.bound(DEFAULT_CONFIDENCE, -1) for one in found], axis=0)


def _judge_objective(
    case: PairCase, drawn: PairCounts, history: PairCounts | None, outage_s: int
) -> tuple[int, int]:
    """Return the trials whose attainment passes and fails, at the true attainment."""
    one = case.classes[0]
    lower, upper = attainment_bounds(drawn, history, outage_s=outage_s)
    return int((lower >= 1 - one.miss).sum()), int((upper < 1 - one.miss).sum())


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return 1 if a required case has too many errors."""
    parser = _parser()
    args = parser.parse_args(argv)
    runs = [c for c in single_runs.CASES if "runs" in args.parts and args.cases in c.name]
    paired = [c for c in pairs.CASES if "pairs" in args.parts and args.cases in c.name]
    if not runs and not paired:
        parser.error(f"argument --cases: no case has a name with {args.cases!r}")
    options = {"trials": _QUICK_TRIALS if args.quick else args.trials, "seed": args.seed}
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        of_runs = _all(pool, "single runs", partial(measure, **options), runs)
        of_pairs = _all(pool, "pairs", partial(measure_pairs, **options), paired)
    failed = sum(row.broken for row in (*of_runs, *of_pairs))
    if args.json:
        document: dict[str, Any] = {
            "runs": [_entry(row) for row in of_runs],
            "pairs": [_entry(row) for row in of_pairs],
        }
        print(json.dumps(document | {"broken": failed}))
        return int(bool(failed))
    if of_runs:
        _show_runs(of_runs)
    if of_pairs:
        _show_pairs(of_pairs)
    print(
        f"Rates of {options['trials']:,} trials, ± one standard error. Windows are 5 min long "
        "unless stated.\n* not used until the method was final. – not judged by the rule.\n"
        f"Rule: each error occurs in at most {ALLOWED:.0%} of the trials, within "
        f"{STANDARD_ERRORS} standard errors.\n"
        f"{sum(row.required for row in (*of_runs, *of_pairs))} rows are judged, {failed} break it."
    )
    return int(bool(failed))


def _all(
    pool: Executor, title: str, judge: Callable[..., list[Any]], cases: Sequence[Any]
) -> list[Any]:
    """Return the rows of all cases, with a progress bar on a terminal."""
    console = Console(stderr=True)
    found = track(
        pool.map(judge, cases),
        title,
        total=len(cases),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    return [row for rows in found for row in rows]


def _entry(row: RunErrors | PairErrors) -> dict[str, object]:
    return asdict(row) | {
        "wrong_pass_error": round(standard_error(row.wrong_pass, row.trials), 5),
        "wrong_fail_error": round(standard_error(row.wrong_fail, row.trials), 5),
        "broken": row.broken,
    }


def _show_runs(rows: Sequence[RunErrors]) -> None:
    width = max(len(row.case) for row in rows) + 2
    print(
        f"{'single runs':{width}} {'declared':>8} {'wrong PASS':>14} {'10% worse':>9} "
        f"{'wrong FAIL':>14} {'10% better':>10} {'PASS at half':>12} {'FAIL at twice':>13}  rule"
    )
    for row in rows:
        print(
            f"{_name(row):{width}} {row.outage_s:6} s "
            f"{_rate(row.wrong_pass, row.trials)} {row.wrong_pass_above / row.trials:9.1%} "
            f"{_rate(row.wrong_fail, row.trials)} {row.wrong_fail_below / row.trials:10.1%} "
            f"{row.right_pass / row.trials:12.0%} {row.right_fail / row.trials:13.0%}  {_rule(row)}"
        )
    print()


def _show_pairs(rows: Sequence[PairErrors]) -> None:
    width = max(len(row.case) for row in rows) + 2
    print(
        f"{'pairs':{width}} {'margin':>6} {'declared':>8} {'wrong PASS':>14} {'wrong FAIL':>14} "
        f"{'PASS if equal':>13} {'FAIL at twice':>13} {'80% pass at':>11} "
        f"{'objective: PASS':>15} {'FAIL':>7}  rule"
    )
    for row in rows:
        to_pass = "–" if row.margin_to_pass is None else f"{row.margin_to_pass:.2%}"
        print(
            f"{_name(row):{width}} {row.margin:6.1%} {row.outage_s:6} s "
            f"{_rate(row.wrong_pass, row.trials)} "
            f"{_rate(row.wrong_fail, row.trials)} {row.right_pass / row.trials:13.0%} "
            f"{row.right_fail / row.trials:13.0%} {to_pass:>11} "
            f"{row.objective_wrong_pass / row.trials:15.1%} "
            f"{row.objective_wrong_fail / row.trials:5.1%} "
            f"{' ' if row.objective_required else '–'}  {_rule(row)}"
        )
    print()


def _name(row: RunErrors | PairErrors) -> str:
    return f"{row.case}{'*' if row.late else ''}"


def _rule(row: RunErrors | PairErrors) -> str:
    if not row.required:
        return "–"
    return "broken" if row.broken else "kept"


def _rate(count: int, trials: int) -> str:
    return f"{count / trials:6.1%} ± {standard_error(count, trials):5.1%}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", type=names_of(PARTS), default=",".join(PARTS), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--cases", default="", metavar="TEXT", help="only cases with this text in their names"
    )
    parser.add_argument(
        "--trials", type=positive_count, default=1000, help="trials per case (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--jobs", type=positive_count, default=2, help="processes (%(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help=f"{_QUICK_TRIALS} trials per case, as in CI"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
