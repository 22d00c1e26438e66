"""How often a gate decides, and how often it errs, about a candidate that is 1 % slower.

`error_rates` draws misses from processes whose attainment is known. Here an engine serves requests
in virtual time, and the target lies where 1 % of speed costs attainment. A longer step delays the
requests that wait for it, so misses come in bursts and depend on each other. The product's own gate
judges each comparison.

A comparison replays one window of Poisson arrivals, another one for each seed, on a device and on
one whose every step takes 1 % longer. A case has one pair without noise, as `replay ab --emulate`
records, or four pairs of runs whose devices also differ from run to run by a random factor, as on
real machines. The token budget is fixed, because a law that adapts it to the device would move the
loss to other targets. The true loss is the mean over all seeds. Each comparison is judged by
several rules:

- a margin of half the loss, which the candidate exceeds: PASS is an error;
- a margin equal to the loss: PASS and FAIL are errors;
- a margin of twice the loss, which the candidate keeps: FAIL is an error;
- the default margin of 1 %;
- the baseline's own attainment as the objective, without a margin: PASS is an error;
- the candidate's own attainment as the objective, without a margin: PASS and FAIL are errors.

    python -m benchmarks.slower_candidate
    python -m benchmarks.slower_candidate --cases 'TPOT, one pair' --seeds 1000 --json
    python -m benchmarks.slower_candidate --quick  # a few comparisons of each case

All requests that are served while the queue is long miss together, as in an outage. The rules are
therefore applied twice: without a declared outage, and with the length of such a period declared
(`slo.outageSeconds`). Only then does an error count for the exit code, as in `error_rates`. It is 1
if an error that is allowed in 5 % of the comparisons exceeds that rate by more than three standard
errors.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Final

import msgspec
from benchmarks.comparison.arguments import positive_count, positive_numbers
from benchmarks.comparison.cells import fleet_settings, planned_requests, slo_classes
from benchmarks.comparison.design import poisson_cell, read_knees
from benchmarks.comparison.loads import offered
from benchmarks.error_rates import ALLOWED, STANDARD_ERRORS, broken, standard_error
from benchmarks.slow_down import SlowingForm
from rich.console import Console
from rich.progress import track

from goodput_core.slo.attainment import SecondCounts
from goodput_core.slo.gate import (
    DEFAULT_MARGIN,
    GateClass,
    attainment_evidence,
    decide_gate,
)
from goodput_core.slo.intervals import DEFAULT_CONFIDENCE
from goodput_core.slo.judging import JudgementKind, judge
from goodput_core.slo.pairs import DifferenceEstimate, PairCounts
from goodput_core.slo.targets import Targets
from goodput_core.slo.verdict import VerdictKind
from goodput_core.spec.choices import Policy
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.emulation.emulate import emulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.comparison.cells import Cell
    from benchmarks.comparison.loads import OfferedRequest

    from goodput_core.slo.record import RequestRecord
    from goodput_replay.plan import PlannedRequest

__all__ = [
    "CASES",
    "Comparison",
    "GateRequirement",
    "RuleResult",
    "SlowerCase",
    "main",
    "requirements_of",
]

_SLOWER: Final = 1.01
_FIRST_SEED: Final = 31_001
_QUICK_SEEDS: Final = 4
_BUSY_S: Final = 10
_CLASS: Final = "all"
_NO_OBJECTIVE: Final = Fraction(1, 1000)
"""An objective that every candidate keeps, so that the margin alone decides."""
_ANY_LOSS: Final = Fraction(1)
"""A margin that every candidate keeps, so that the objective alone decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowerCase:
    """Comparisons of a device with a slower one.

    Args:
        name: unique name.
        mix: mix of the requests.
        factor: rate in multiples of the knee.
        tpot_ms: target of all requests.
        window_s: length of the window.
        pairs: pairs of runs; one pair has no noise.
        spread: standard deviation of the factor by which each run's device is slower or faster.
        outage_s: length of a period in which most requests miss.
    """

    name: str
    mix: str
    factor: float
    tpot_ms: float
    window_s: int = 60
    pairs: int = 1
    spread: float = 0.0
    outage_s: int = _BUSY_S

    @property
    def targets(self) -> Targets:
        """The targets of all requests."""
        return Targets(tpot_ns=round(self.tpot_ms * NS_PER_MS))


CASES: Final = (
    SlowerCase(name="TPOT, one pair", mix="chat", factor=0.8, tpot_ms=55),
    # A step of few requests takes hardly less than the target, so 1 % more exceeds it.
    SlowerCase(
        name="TPOT at a low load, one pair", mix="chat", factor=0.1, tpot_ms=17.1, window_s=180
    ),
    SlowerCase(
        name="TPOT, 4 pairs, runs spread by 0.5 %",
        mix="chat",
        factor=0.8,
        tpot_ms=55,
        pairs=4,
        spread=0.005,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The pairs of runs of one seed.

    Args:
        counts: matched requests of each pair.
        candidates: judged requests of each run of the candidate.
        baselines: attained share of each run of the baseline.
    """

    counts: tuple[PairCounts, ...]
    candidates: tuple[SecondCounts, ...]
    baselines: tuple[float, ...]

    @property
    def loss(self) -> float:
        """Mean attainment of the baseline's runs less that of the candidate's."""
        return -DifferenceEstimate(self.counts).difference

    @property
    def attainment(self) -> float:
        """Mean attainment of the candidate's runs."""
        return fmean(float(run.attainment.share or 0) for run in self.candidates)

    def judge(self, rule: GateRequirement, outage_s: int = 0) -> VerdictKind:
        """Return the verdict of the product's gate.

        Args:
            rule: what the gate requires.
            outage_s: declared longest outage.
        """
        alone = len(self.counts) == 1
        candidate = attainment_evidence(
            _CLASS,
            rule.objective,
            self.candidates,
            tests=2,
            outage_s=outage_s,
            deterministic=alone,
        )
        difference = DifferenceEstimate(self.counts, deterministic=alone, outage_s=outage_s)
        rows = 2 * candidate.attainment.total
        evidence = GateClass(candidate=candidate, difference=difference, rows=rows)
        return decide_gate([evidence], margin=rule.margin, with_baseline=True).kind


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRequirement:
    """The requirements of a gate.

    Args:
        name: short description.
        margin: acceptable loss.
        objective: objective of the class.
        may_pass, may_fail: True if PASS, or FAIL, is no error.
    """

    name: str
    margin: Fraction
    objective: Fraction = _NO_OBJECTIVE
    may_pass: bool
    may_fail: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """The verdicts of one rule on the comparisons of a case.

    Args:
        case, rule: their names.
        outage_s: declared longest outage.
        required: True if the periods of misses fit the declared length.
        margin, objective: the required values.
        may_pass, may_fail: True if PASS, or FAIL, is no error.
        loss, loss_error: true loss and its standard error.
        attainment: true attainment of the candidate.
        passed, inconclusive, failed: number of comparisons with each verdict.
    """

    case: str
    rule: str
    outage_s: int
    required: bool
    margin: float
    objective: float
    may_pass: bool
    may_fail: bool
    loss: float
    loss_error: float
    attainment: float
    passed: int
    inconclusive: int
    failed: int

    @property
    def broken(self) -> bool:
        """True if an error is too frequent."""
        trials = self.passed + self.inconclusive + self.failed
        wrong = (0 if self.may_pass else self.passed, 0 if self.may_fail else self.failed)
        return self.required and any(broken(count, trials) for count in wrong)


def compare(case: SlowerCase, slower: float, seed: int) -> Comparison:
    """Replay the window of a seed on both devices.

    Args:
        case: the case.
        slower: factor by which each step of the candidate takes longer.
        seed: seed of the arrivals, the lengths and the noise of the runs.
    """
    cell = poisson_cell(case.mix, case.factor, read_knees(), known_lengths=False)
    load = replace(cell.load, horizon_s=case.window_s)
    requests = [replace(one, targets=case.targets) for one in offered(load, seed)]
    rng = random.Random(seed)
    counts, candidates, baselines = [], [], []
    for _ in range(case.pairs):
        before, after = (
            _serve(cell, requests, factor * rng.gauss(1, case.spread)) for factor in (1, slower)
        )
        seconds = [one.arrival_ns // NS_PER_S for one in requests]
        both = list(zip(before, after, strict=True))

        def by_second(kept: Sequence[bool], seconds: Sequence[int] = seconds) -> list[int]:
            found = Counter(at for at, one in zip(seconds, kept, strict=True) if one)
            return [found[second] for second in range(case.window_s)]

        total = by_second([True] * len(requests))
        counts.append(
            PairCounts(
                gained=by_second([new and not old for old, new in both]),
                lost=by_second([old and not new for old, new in both]),
                total=total,
            )
        )
        candidates.append(SecondCounts(good=by_second(after), total=total))
        baselines.append(fmean(before))
    return Comparison(
        counts=tuple(counts), candidates=tuple(candidates), baselines=tuple(baselines)
    )


def _serve(cell: Cell, requests: Sequence[OfferedRequest], slower: float) -> list[bool]:
    """Return for each request if it met its targets on a device that is slower by a factor."""
    met: dict[str, bool] = {}

    def on_record(planned: PlannedRequest, record: RequestRecord) -> None:
        judgement = judge(record, planned.targets)
        met[planned.request_id] = judgement.kind is JudgementKind.ATTAINED

    profile = cell.fleet.profile()
    form = SlowingForm(profile.form)
    form.slower = slower
    settings = fleet_settings(cell, Policy.SARATHI, 1, cell.preemption, slo=slo_classes(requests))
    planned = planned_requests({str(at): one for at, one in enumerate(requests)})
    settings = replace(
        settings,
        profile=replace(profile, form=form),
        configure=msgspec.structs.replace(settings.configure, budget_law=None),
    )
    emulate(iter(planned), settings, on_record)
    return [met[str(at)] for at in range(len(requests))]


def requirements_of(comparisons: Sequence[Comparison]) -> list[GateRequirement]:
    """Return the rules for a candidate with the mean loss and attainment of these comparisons.

    There are no margins in proportion to the loss if the candidate loses nothing.
    """
    loss = fmean(one.loss for one in comparisons)
    new = fmean(one.attainment for one in comparisons)
    old = fmean(fmean(one.baselines) for one in comparisons)

    def exact(share: float) -> Fraction:
        # No objective is 100 %.
        return min(Fraction(share).limit_denominator(1_000_000), Fraction(999_999, 1_000_000))

    proportional = [
        GateRequirement(
            name="margin of half the loss", margin=exact(loss / 2), may_pass=False, may_fail=True
        ),
        GateRequirement(
            name="margin of the loss", margin=exact(loss), may_pass=False, may_fail=False
        ),
        GateRequirement(
            name="margin of twice the loss", margin=exact(2 * loss), may_pass=True, may_fail=False
        ),
    ]
    return [
        *(proportional if loss > 0 else []),
        GateRequirement(
            name="margin of 1 %",
            margin=DEFAULT_MARGIN,
            may_pass=loss <= DEFAULT_MARGIN,
            may_fail=loss >= DEFAULT_MARGIN,
        ),
        GateRequirement(
            name="objective of the baseline's attainment",
            margin=_ANY_LOSS,
            objective=exact(old),
            may_pass=False,
            may_fail=True,
        ),
        GateRequirement(
            name="objective of its own attainment",
            margin=_ANY_LOSS,
            objective=exact(new),
            may_pass=False,
            may_fail=False,
        ),
    ]


def judge_case(case: SlowerCase, comparisons: Sequence[Comparison]) -> list[RuleResult]:
    """Judge all comparisons of a case by each rule."""
    losses = [one.loss for one in comparisons]
    results = []
    for outage_s in (0, case.outage_s):
        for rule in requirements_of(comparisons):
            kinds = Counter(one.judge(rule, outage_s) for one in comparisons)
            results.append(
                RuleResult(
                    case=case.name,
                    rule=rule.name,
                    outage_s=outage_s,
                    required=outage_s == case.outage_s,
                    margin=float(rule.margin),
                    objective=float(rule.objective),
                    may_pass=rule.may_pass,
                    may_fail=rule.may_fail,
                    loss=fmean(losses),
                    loss_error=stdev(losses) / math.sqrt(len(losses)),
                    attainment=fmean(one.attainment for one in comparisons),
                    passed=kinds[VerdictKind.PASS],
                    inconclusive=kinds[VerdictKind.INCONCLUSIVE],
                    failed=kinds[VerdictKind.FAIL],
                )
            )
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return 1 if an error is too frequent."""
    parser = _parser()
    args = parser.parse_args(argv)
    cases = [case for case in CASES if args.cases in case.name]
    if not cases:
        parser.error(f"argument --cases: no case has a name with {args.cases!r}")
    [slower] = args.slower
    count = _QUICK_SEEDS if args.quick else args.seeds
    seeds = range(args.first_seed, args.first_seed + count)
    console = Console(stderr=True)
    results = []
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        for case in cases:
            found = track(
                pool.map(partial(compare, case, slower), seeds),
                case.name,
                total=count,
                console=console,
                transient=True,
                disable=not console.is_terminal,
            )
            results += judge_case(case, list(found))
    failed = sum(one.broken for one in results)
    if args.json:
        rows = [asdict(one) | {"broken": one.broken} for one in results]
        print(json.dumps({"slower": slower, "seeds": count, "rows": rows, "broken": failed}))
        return int(bool(failed))
    _show(results, count)
    print(
        f"{count:,} comparisons of each case with a candidate that is {slower - 1:.1%} slower, "
        f"with the product's confidence of {DEFAULT_CONFIDENCE:.0%}, ± one standard error.\n"
        f"* an error, allowed in {ALLOWED:.0%} of the comparisons, within {STANDARD_ERRORS} "
        f"standard errors. {failed} rows break this rule."
    )
    return int(bool(failed))


def _show(results: Sequence[RuleResult], trials: int) -> None:
    case = ""
    for one in results:
        if one.case != case:
            case = one.case
            print(
                f"{case}: attainment {one.attainment:.2%}, "
                f"loss {one.loss:.2%} ± {one.loss_error:.2%}"
            )
            print(
                f"  {'rule':40} {'required':>9} {'declared':>8} {'PASS':>16} "
                f"{'INCONCLUSIVE':>16} {'FAIL':>16}"
            )
        required = one.margin if one.margin < 1 else one.objective
        columns = [
            f"{count / trials:.1%} ± {standard_error(count, trials):.1%}{mark:2}"
            for count, mark in (
                (one.passed, "" if one.may_pass else " *"),
                (one.inconclusive, ""),
                (one.failed, "" if one.may_fail else " *"),
            )
        ]
        print(
            f"  {one.rule:40} {required:9.2%} {one.outage_s:6} s "
            + " ".join(f"{text:>16}" for text in columns)
        )
    print()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="", metavar="TEXT", help="cases with this text only")
    parser.add_argument(
        "--seeds", type=positive_count, default=200, help="comparisons per case (%(default)s)"
    )
    parser.add_argument("--first-seed", type=int, default=_FIRST_SEED, help="(%(default)s)")
    parser.add_argument(
        "--slower",
        type=positive_numbers,
        default=[_SLOWER],
        help="factor of the candidate's step times (1.01)",
    )
    parser.add_argument("--jobs", type=positive_count, default=2, help="processes (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few comparisons, in seconds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
