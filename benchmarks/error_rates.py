"""How often verdicts are wrong, on simulated services whose true attainment is known.

The objective is the true attainment, where every PASS and every FAIL is an error. Each is allowed
in 5 % of the windows where the outages of the service fit the declared length (docs/verdicts.md);
there, the command fails if a rate exceeds 5 % by more than three standard errors. Elsewhere the
rates are only printed.

    python -m benchmarks.error_rates                            # a minute of CPU time
    python -m benchmarks.error_rates --cases 'outages of 30 s' --trials 10000
    python -m benchmarks.error_rates --quick                    # 200 trials a case, as in CI
    python -m benchmarks.error_rates --json

Further columns show the errors where the objective is a little above or below the true attainment,
and the shares of right verdicts where the service misses half or twice as many requests as the
objective permits.

The exit code is 1 if a rate that should be at most 5 % is too large.
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
from typing import TYPE_CHECKING, Final

import numpy as np
from benchmarks.comparison.arguments import positive_count
from benchmarks.simulated import single_runs
from benchmarks.simulated.intervals import Scales, bounds, failing, passing
from benchmarks.simulated.processes import Windows
from rich.console import Console
from rich.progress import track

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.simulated.single_runs import Case

__all__ = ["RunErrors", "broken", "main", "measure"]

ALLOWED: Final = 0.05
"""Allowed rate of each error."""
STANDARD_ERRORS: Final = 3
_QUICK_TRIALS: Final = 200
_SLIGHTLY: Final = 1.1
"""Misses of the service per permitted miss, where the objective is slightly off the truth."""


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


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a required case has too many errors."""
    parser = _parser()
    args = parser.parse_args(argv)
    cases = [case for case in single_runs.CASES if args.cases in case.name]
    if not cases:
        parser.error(f"argument --cases: no case has a name with {args.cases!r}")
    trials = _QUICK_TRIALS if args.quick else args.trials
    console = Console(stderr=True)
    judge = partial(measure, trials=trials, seed=args.seed)
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        rows = [
            row
            for found in track(
                pool.map(judge, cases),
                "single runs",
                total=len(cases),
                console=console,
                transient=True,
                disable=not console.is_terminal,
            )
            for row in found
        ]
    failed = [row for row in rows if row.broken]
    if args.json:
        print(json.dumps({"runs": [_entry(row) for row in rows], "broken": len(failed)}))
    else:
        _show(rows, failed)
    return int(bool(failed))


def _entry(row: RunErrors) -> dict[str, object]:
    return asdict(row) | {
        "wrong_pass_error": round(standard_error(row.wrong_pass, row.trials), 5),
        "wrong_fail_error": round(standard_error(row.wrong_fail, row.trials), 5),
        "broken": row.broken,
    }


def _show(rows: Sequence[RunErrors], failed: Sequence[RunErrors]) -> None:
    width = max(len(row.case) for row in rows) + 2
    print(
        f"{'case':{width}} {'declared':>8} {'wrong PASS':>14} {'10% worse':>9} "
        f"{'wrong FAIL':>14} {'10% better':>10} {'PASS at half':>12} {'FAIL at twice':>13}  rule"
    )
    for row in rows:
        rule = "–"
        if row.required:
            rule = "broken" if row.broken else "kept"
        print(
            f"{row.case + ('*' if row.late else ''):{width}} {row.outage_s:6} s "
            f"{_rate(row.wrong_pass, row.trials)} {row.wrong_pass_above / row.trials:9.1%} "
            f"{_rate(row.wrong_fail, row.trials)} {row.wrong_fail_below / row.trials:10.1%} "
            f"{row.right_pass / row.trials:12.0%} {row.right_fail / row.trials:13.0%}  {rule}"
        )
    required = sum(row.required for row in rows)
    print(
        f"\nRates of {rows[0].trials:,} windows, ± one standard error. Windows are 5 min long "
        "unless stated.\n* not used until the interval was final.\n"
        f"Rule: where the outages fit the declared length, each error occurs in at most "
        f"{ALLOWED:.0%} of the windows,\nwithin {STANDARD_ERRORS} standard errors. "
        f"{required} rows are judged, {len(failed)} break the rule."
    )


def _rate(count: int, trials: int) -> str:
    return f"{count / trials:6.1%} ± {standard_error(count, trials):5.1%}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", default="", metavar="TEXT", help="only cases with this text in their names"
    )
    parser.add_argument(
        "--trials", type=positive_count, default=1000, help="windows per case (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--jobs", type=positive_count, default=2, help="processes (%(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help=f"{_QUICK_TRIALS} windows per case, as in CI"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
