"""The verdict on a candidate build: its own objectives, and no loss against a baseline.

A gate has two rules for each class with an objective: the candidate's attainment reaches the
objective, and it is at most `margin` below that of the baseline. PASS requires proof of both rules
for every class. FAIL requires proof that one of them is broken. Without a baseline, only the first
rule is judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from functools import partial
from itertools import accumulate, zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from goodput_core.slo.attainment import NO_MISSES, Attainment, MissCounts, SecondCounts
from goodput_core.slo.distributions import student_t_quantile
from goodput_core.slo.evidence import ClassEvidence, class_evidence
from goodput_core.slo.intervals import DEFAULT_CONFIDENCE, find_below
from goodput_core.slo.pairs import DifferenceEstimate, DifferenceInterval, RunSpread
from goodput_core.slo.verdict import (
    ClassVerdict,
    Reason,
    VerdictKind,
    describe_bound,
    judge_class,
)
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goodput_core.slo.intervals import Interval

__all__ = [
    "DEFAULT_MARGIN",
    "GateCheck",
    "GateClass",
    "GateRule",
    "GateVerdict",
    "attainment_evidence",
    "cut_points",
    "decide_gate",
    "format_points",
]

DEFAULT_MARGIN: Final = Fraction(1, 100)


class GateRule(StrEnum):
    """The two rules of a gate."""

    OBJECTIVE = "objective"
    """The candidate's attainment reaches the objective of the class."""
    DIFFERENCE = "difference"
    """The candidate's attainment is at most the margin below that of the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateClass:
    """The evidence about one class.

    Args:
        candidate: attainment of the candidate over all its runs.
        difference: estimated difference to the baseline; None without a baseline, or if a pair has
            no request that was judged in both runs.
        rows: requests of the class in all runs of both builds, judged or not.
        baseline_unjudged: requests of the baseline whose records do not suffice to judge them.
    """

    candidate: ClassEvidence
    difference: DifferenceEstimate | None = None
    rows: int = 0
    baseline_unjudged: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCheck:
    """The verdict on one rule for one class.

    Args:
        slo_class: the class.
        rule: the rule.
        kind: PASS, FAIL or INCONCLUSIVE; INVALID if a disturbance could have decided it.
        reason: stable reason.
        sentence: the explanation, without a final period.
        proof: upper bound that proves the FAIL, corrected for the number of checks; None unless
            the check fails.
        difference: bounds of the difference; None for the objective.
        pairs_to_decide: number of pairs that would probably decide; None if the rule is decided,
            and if a hundred pairs would probably not decide it.
    """

    slo_class: str
    rule: GateRule
    kind: VerdictKind
    reason: Reason
    sentence: str
    proof: float | None = None
    difference: DifferenceInterval | None = None
    pairs_to_decide: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """The verdict on a candidate.

    Args:
        kind: the verdict.
        reason: reason of the first check that decided.
        sentence: the explanation for the user.
        checks: every rule of every judged class.
        skipped: classes with an objective but without a judged request.
    """

    kind: VerdictKind
    reason: Reason
    sentence: str
    checks: tuple[GateCheck, ...]
    skipped: tuple[str, ...]


def attainment_evidence(
    name: str,
    objective: Fraction | None,
    runs: Sequence[SecondCounts],
    *,
    confidence: float = DEFAULT_CONFIDENCE,
    tests: int = 1,
    outage_s: int = 0,
    deterministic: bool = False,
    history: RunSpread | None = None,
    unjudged: int = 0,
    misses: MissCounts = NO_MISSES,
) -> ClassEvidence:
    """Compute the interval of one class's attainment over several runs of the same window.

    All runs have the same arrivals. The seconds of the window are therefore summed over the runs,
    so that a burst that every run meets counts as one event, not as one event per run. The spread
    between the runs widens the bounds if it is larger than that within them.

    Args:
        name: the class.
        objective: share of requests that must meet their targets; None if there is none.
        runs: judged requests of each run by second of the window, at least one run.
        confidence: confidence of each one-sided bound.
        tests: number of tests that share the permitted error probability of FAIL.
        outage_s: the longest outage that the bounds take into account.
        deterministic: True if runs have no spread, as in virtual time.
        history: spread between earlier pairs of one build; None if unknown.
        unjudged: requests whose records do not suffice to judge them.
        misses: missed requests by reason.
    """
    # Runs of causal sessions end at different times.
    stacked = SecondCounts(
        good=[sum(seconds) for seconds in zip_longest(*(run.good for run in runs), fillvalue=0)],
        total=[sum(seconds) for seconds in zip_longest(*(run.total for run in runs), fillvalue=0)],
    )
    evidence = class_evidence(
        name,
        objective,
        stacked,
        confidence=confidence,
        classes=tests,
        outage_s=outage_s,
        runs=len(runs),
        unjudged=unjudged,
        misses=misses,
    )
    if evidence.interval is None or deterministic:
        return evidence
    interval = _widen(evidence.interval, [run.attainment for run in runs], history)
    tolerated_ns = evidence.tolerated_outage_ns
    if objective is not None and len(runs) > 1:
        # The spread between the runs leaves less room than the estimate within them.
        room_s = (interval.lower - float(objective)) * len(stacked.total) * len(runs)
        tolerated_ns = min(tolerated_ns, max(0, int(room_s * NS_PER_S)))
    return replace(evidence, interval=interval, tolerated_outage_ns=tolerated_ns)


def decide_gate(
    classes: Sequence[GateClass],
    *,
    margin: Fraction = DEFAULT_MARGIN,
    confidence: float = DEFAULT_CONFIDENCE,
    with_baseline: bool,
    is_single_run: bool = False,
    is_confounded: bool = False,
    invalid: Sequence[str] = (),
    doubts: Mapping[tuple[str, GateRule], str] = MappingProxyType({}),
) -> GateVerdict:
    """Return the verdict on a candidate.

    The precedence is INVALID > FAIL > INCONCLUSIVE > PASS, as for a single run. Holm's procedure
    keeps the probability of a wrong FAIL over all classes and rules; PASS needs every check.

    Args:
        classes: evidence of every class; classes without an objective are not judged. The
            intervals must have upper bounds for as many tests as there are checks.
        margin: the acceptable loss of attainment against the baseline, 0 or more.
        confidence: confidence of each one-sided bound.
        with_baseline: True if the difference to a baseline is judged.
        is_single_run: True if the candidate has one run, and its runs have a spread.
        is_confounded: True if all runs of one build came before those of the other, so that the
            difference includes any drift of the machine.
        invalid: for each invalid run, the reason as the end of a sentence.
        doubts: checks that a disturbance could have decided, by class and rule, with the
            disturbance in words. Such a check is INVALID, and does not count for the verdict.
    """
    judged = [c for c in classes if c.candidate.objective is not None]
    without = [c for c in judged if c.candidate.interval is None]
    skipped = tuple(c.candidate.name for c in without if not c.rows)
    judged = [c for c in judged if c.candidate.interval is not None]
    tests = len(judged) * (2 if with_baseline else 1)
    intervals = {
        c.candidate.name: c.difference.interval(confidence, tests=max(1, tests))
        for c in judged
        if with_baseline and c.difference is not None
    }
    failed = _find_failed(judged, {} if is_confounded else intervals, margin)
    checks = [_check_unjudged(c) for c in without if c.rows]
    for one in judged:
        name = one.candidate.name
        sharers = failed.get((name, GateRule.OBJECTIVE))
        checks.append(_check_objective(one.candidate, sharers, is_single_run=is_single_run))
        if with_baseline:
            sharers = failed.get((name, GateRule.DIFFERENCE))
            check = _check_difference(one, intervals.get(name), margin, sharers, confidence)
            checks.append(_reject_order(check) if is_confounded else check)
    checks = [_doubt(check, doubts.get((check.slo_class, check.rule))) for check in checks]
    kind, reason, sentence = _combine(checks, any_objective=bool(checks or skipped))
    if skipped:
        sentence += f" Classes without a judged request: {', '.join(skipped)}."
    if is_single_run and checks:
        sentence += " This is a single run: the spread between runs is not included."
    if invalid:
        kind, reason = VerdictKind.INVALID, Reason.INVALID_RUN
        sentence = f"The comparison is invalid: {'; '.join(invalid)}."
    return GateVerdict(
        kind=kind, reason=reason, sentence=sentence, checks=tuple(checks), skipped=skipped
    )


def _doubt(check: GateCheck, doubt: str | None) -> GateCheck:
    """Return a check that a disturbance could have decided as INVALID."""
    if doubt is None:
        return check
    return replace(
        check,
        kind=VerdictKind.INVALID,
        reason=Reason.INVALID_RUN,
        sentence=f"{check.slo_class}: {doubt}",
        proof=None,
        pairs_to_decide=None,
    )


def _combine(
    checks: Sequence[GateCheck], *, any_objective: bool
) -> tuple[VerdictKind, Reason, str]:
    for kind in (VerdictKind.FAIL, VerdictKind.INCONCLUSIVE, VerdictKind.PASS):
        deciding = [check for check in checks if check.kind is kind]
        if deciding:
            sentence = f"{'; '.join(check.sentence for check in deciding)}."
            return kind, deciding[0].reason, sentence
    if any_objective:
        text = "No class with an objective had a request that could be judged."
        return VerdictKind.INCONCLUSIVE, Reason.NO_ROWS, text
    text = "No class has an objective, so there is nothing to decide."
    return VerdictKind.INCONCLUSIVE, Reason.NO_OBJECTIVE, text


def _find_failed(
    judged: Sequence[GateClass],
    intervals: dict[str, DifferenceInterval],
    margin: Fraction,
) -> dict[tuple[str, GateRule], int]:
    """Return the broken rules, and how many checks shared the error probability for each."""
    limits: dict[tuple[str, GateRule], tuple[Fraction, tuple[float, ...]]] = {}
    for one in judged:
        candidate = one.candidate
        if candidate.objective is None or candidate.interval is None or candidate.unjudged:
            continue
        limits[candidate.name, GateRule.OBJECTIVE] = (
            candidate.objective,
            candidate.interval.uppers,
        )
        interval = intervals.get(candidate.name)
        if interval is not None and interval.covers_runs and not one.baseline_unjudged:
            limits[candidate.name, GateRule.DIFFERENCE] = (-margin, interval.uppers)
    return find_below(limits)


def _check_unjudged(one: GateClass) -> GateCheck:
    """Return the open check of a class whose requests were all left unjudged."""
    name = one.candidate.name
    return GateCheck(
        slo_class=name,
        rule=GateRule.OBJECTIVE,
        kind=VerdictKind.INCONCLUSIVE,
        reason=Reason.UNJUDGED if one.candidate.unjudged else Reason.NO_ROWS,
        sentence=f"{name}: none of its requests could be judged in the candidate",
    )


def _check_objective(
    candidate: ClassEvidence, sharers: int | None, *, is_single_run: bool
) -> GateCheck:
    verdict: ClassVerdict = judge_class(
        candidate, sharers, tests="checks", with_remedy=is_single_run
    )
    return GateCheck(
        slo_class=candidate.name,
        rule=GateRule.OBJECTIVE,
        kind=verdict.kind,
        reason=verdict.reason,
        sentence=verdict.sentence,
        proof=verdict.proof,
    )


def _check_difference(
    one: GateClass,
    interval: DifferenceInterval | None,
    margin: Fraction,
    sharers: int | None,
    confidence: float,
) -> GateCheck:
    name, estimate = one.candidate.name, one.difference
    check = GateCheck(
        slo_class=name,
        rule=GateRule.DIFFERENCE,
        kind=VerdictKind.INCONCLUSIVE,
        reason=Reason.NO_ROWS,
        sentence=f"{name}: a pair has no request that was judged in both runs",
    )
    if estimate is None or interval is None:
        return check
    pairs = "one pair" if estimate.pairs == 1 else f"{estimate.pairs} pairs"
    text = f"{name}: {format_points(interval.difference)} against the baseline in {pairs} of runs"
    allowed = format_points(float(margin)).lstrip("+")
    stated = f"with {confidence * 100:.4g}% confidence (margin {allowed})"
    if unjudged := one.candidate.unjudged + one.baseline_unjudged:
        return replace(
            check,
            reason=Reason.UNJUDGED,
            sentence=f"{text}, but {unjudged} requests could not be judged from the records",
            difference=interval,
        )
    if sharers is not None:
        uppers, show = interval.uppers, partial(format_points, up=True)
        bound = describe_bound(uppers, sharers, "checks", confidence, show)
        return replace(
            check,
            kind=VerdictKind.FAIL,
            reason=Reason.WORSE_THAN_BASELINE,
            sentence=f"{text}, {bound} (margin {allowed})",
            proof=uppers[sharers - 1],
            difference=interval,
        )
    if interval.covers_runs and interval.lower >= -margin:
        return replace(
            check,
            kind=VerdictKind.PASS,
            reason=Reason.ATTAINED,
            sentence=f"{text}, at least {format_points(interval.lower)} {stated}",
            difference=interval,
        )
    needed = estimate.pairs_to_decide(float(margin), confidence)
    advice = "replay a longer window of the trace"
    if needed is not None:
        advice = f"about {needed} pairs like these would decide"
    elif not estimate.deterministic:
        advice = "a hundred pairs like these would not decide; replay a longer window of the trace"
    if not interval.covers_runs:
        return replace(
            check,
            reason=Reason.SINGLE_PAIR,
            sentence=f"{text}, which shows nothing about the spread between runs; {advice}",
            difference=interval,
            pairs_to_decide=needed,
        )
    return replace(
        check,
        reason=Reason.INTERVAL_SPANS_MARGIN,
        sentence=f"{text}, between {format_points(interval.lower)} and "
        f"{format_points(interval.uppers[-1], up=True)}, each bound {stated}; {advice}",
        difference=interval,
        pairs_to_decide=needed,
    )


def _reject_order(check: GateCheck) -> GateCheck:
    """Return the check without a decision, because the difference can be a drift."""
    if check.difference is None:
        return check
    return replace(
        check,
        kind=VerdictKind.INCONCLUSIVE,
        reason=Reason.RUN_ORDER,
        sentence=f"{check.slo_class}: {format_points(check.difference.difference)} against the "
        "baseline, but all runs of one build came before those of the other, so this can be a "
        "drift of the machine; alternate the builds, as replay ab does",
        pairs_to_decide=None,
    )


def format_points(difference: float, *, up: bool = False) -> str:
    """Return a difference as `−0.25 points`, rounded as by `cut_points`."""
    return f"{cut_points(difference, up=up)} points"


def cut_points(difference: float, *, up: bool = False) -> str:
    """Return a difference in percentage points, rounded down, or up to the next hundredth."""
    scaled = round(difference * 10_000, 6)
    hundredths = math.ceil(scaled) if up else math.floor(scaled)
    sign = "+" if hundredths > 0 else "−" if hundredths < 0 else ""
    return f"{sign}{abs(hundredths) / 100:.2f}"


def _widen(interval: Interval, runs: Sequence[Attainment], history: RunSpread | None) -> Interval:
    """Return the interval, widened by the spread between the runs."""
    shares = [float(run.share) for run in runs if run.share is not None]
    mean = math.fsum(shares) / len(shares)
    degrees = len(shares) - 1
    squares = math.fsum((share - mean) ** 2 for share in shares)
    if history is not None:
        # A difference between two runs has twice the variance of a run.
        degrees += history.degrees
        squares += history.variance / 2 * history.degrees
    if not degrees:
        return interval
    error = math.sqrt(squares / degrees / len(shares))

    def bound(confidence: float, sign: int) -> float:
        reached = mean + sign * student_t_quantile(confidence, degrees) * error
        return min(max(0.0, reached), 1.0)

    confidence = interval.confidence
    uppers = [
        max(upper, bound(1 - (1 - confidence) / share, 1))
        for share, upper in enumerate(interval.uppers, start=1)
    ]
    return replace(
        interval,
        lower=min(interval.lower, bound(confidence, -1)),
        uppers=tuple(accumulate(uppers, max)),
    )
