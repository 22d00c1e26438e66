"""The gate on recorded runs: from run folders to a verdict and the values behind it.

`goodput_core.slo.gate` decides. This module checks that the runs belong together, matches their
requests, and builds the result that every output format prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta

from goodput_core.errors import InputError
from goodput_core.slo.attainment import NO_MISSES
from goodput_core.slo.gate import (
    DEFAULT_MARGIN,
    GateClass,
    GateRule,
    GateVerdict,
    attainment_evidence,
    decide_gate,
)
from goodput_core.slo.pairs import DifferenceEstimate, RunSpread
from goodput_core.slo.targets import USUAL_CONFIDENCE, format_objective
from goodput_core.slo.verdict import Reason, VerdictKind, can_explain
from goodput_replay.compare.disturbances import (
    find_leading_build,
    find_overlap,
    invalid_runs,
    judged_otherwise,
    prompt_ratio,
)
from goodput_replay.compare.pairing import match
from goodput_replay.compare.rejections import find_client_errors
from goodput_replay.compare.runs import (
    LoadedRun,
    difference_between,
    load_run,
    missed_shares,
    read_misses,
    reject_copies,
)
from goodput_replay.runs.rounding import cut_share
from goodput_replay.runs.summary_parts import doc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from goodput_replay.compare.disturbances import RunPairs
    from goodput_replay.compare.pairing import Matching

__all__ = [
    "CheckResult",
    "GateClassResult",
    "GateResult",
    "PairResult",
    "RunPair",
    "judge_runs",
]

_RESULT_VERSION: Final = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPair:
    """The folders of one pair of runs.

    Args:
        candidate: run of the candidate.
        baseline: run of the baseline; None if the candidate is judged alone.
    """

    candidate: Path
    baseline: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Verdict on one rule for one class."""

    rule: Annotated[GateRule, doc("objective, or difference to the baseline.")]
    verdict: Annotated[VerdictKind, doc("PASS, FAIL, INCONCLUSIVE or INVALID.")]
    reason: Annotated[Reason, doc("Stable reason code for scripts.")]
    sentence: Annotated[str, doc("Human-readable explanation.")]
    proof: Annotated[
        float | None,
        Meta(
            description="Upper bound that proves the FAIL, corrected for the number of checks; "
            "null unless FAIL."
        ),
    ] = None
    pairs_to_decide: Annotated[
        int | None,
        Meta(
            description="Pairs of runs that would probably decide; null if decided, over 100, or "
            "in virtual time."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """One class in one pair of runs."""

    matched: Annotated[int, doc("Requests that were judged in both runs.")]
    gained: Annotated[int, doc("Requests that met their targets only in the candidate.")]
    lost: Annotated[int, doc("Requests that met their targets only in the baseline.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateClassResult:
    """Evidence and checks of one class."""

    name: Annotated[str, doc("Class name.")]
    objective: Annotated[str | None, doc("Objective of the class; null if none.")]
    good: Annotated[int, doc("Requests of all candidate runs that met their targets.")]
    total: Annotated[int, doc("Judged requests of all candidate runs.")]
    attainment: Annotated[float | None, doc("good / total; null if total is 0.")]
    lower: Annotated[float | None, doc("Lower bound of the candidate's attainment.")]
    upper: Annotated[float | None, doc("Upper bound of the attainment, without correction.")]
    baseline_attainment: Annotated[
        float | None, doc("Attainment of all baseline runs; null without a baseline.")
    ] = None
    difference: Annotated[
        float | None, doc("Mean over the pairs of candidate less baseline; null if unknown.")
    ] = None
    difference_lower: Annotated[float | None, doc("Lower bound of the difference.")] = None
    difference_upper: Annotated[float | None, doc("Upper bound, without correction.")] = None
    pairs: Annotated[tuple[PairResult, ...], doc("Changed requests of each pair.")] = ()
    checks: Annotated[tuple[CheckResult, ...], doc("Verdicts on the rules.")] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """Result of `replay gate` and `replay ab`."""

    version: Annotated[str, doc("Version of this schema.")] = _RESULT_VERSION
    verdict: Annotated[VerdictKind, doc("PASS, FAIL, INCONCLUSIVE or INVALID.")]
    reason: Annotated[Reason, doc("Stable reason code for scripts.")]
    sentence: Annotated[str, doc("Human-readable explanation.")]
    exit_code: Annotated[int, doc("0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 INVALID.")]
    confidence: Annotated[float, doc("One-sided confidence of each bound.")]
    margin: Annotated[float | None, doc("Acceptable loss; null without a baseline.")]
    virtual: Annotated[bool, doc("True if the runs were in virtual time, without noise.")]
    candidates: Annotated[tuple[str, ...], doc("Folders of the candidate's runs.")]
    baselines: Annotated[tuple[str, ...], doc("Folders of the baseline's runs, in pairs.")]
    dropped: Annotated[
        int, doc("Requests of the pairs that were not judged in both runs, or only in one.")
    ]
    classes: Annotated[tuple[GateClassResult, ...], doc("Results per class.")]
    warnings: Annotated[
        tuple[str, ...], doc("Sentences on conditions that the verdict does not include.")
    ] = ()


def judge_runs(
    pairs: Sequence[RunPair],
    *,
    margin: Fraction = DEFAULT_MARGIN,
    confidence: Fraction = USUAL_CONFIDENCE,
    history: Callable[[Sequence[LoadedRun]], Mapping[str, RunSpread]] | None = None,
) -> GateResult:
    """Judge a candidate by its runs, against a baseline if the pairs have one.

    Args:
        pairs: one or more pairs, all with a baseline or all without.
        margin: acceptable loss of attainment.
        confidence: one-sided confidence of each bound.
        history: returns the spread between earlier pairs of one build by class, for these runs;
            None if unknown.

    Raises:
        InputError: a folder has no finished run, the runs cannot be compared, or they have no SLO.
    """
    runs = [
        (load_run(pair.candidate), None if pair.baseline is None else load_run(pair.baseline))
        for pair in pairs
    ]
    first = runs[0][0]
    everything = [run for pair in runs for run in pair if run is not None]
    for run in everything[1:]:
        if difference := difference_between(first.summary, run.summary):
            raise InputError(
                f"{first.folder} and {run.folder} cannot be compared: {difference}; replay the "
                "same trace with the same options and SLO"
            )
    for run in everything:
        if run.summary.run.concurrency is not None:
            raise InputError(
                f"{run.folder}: a closed loop gets no verdict, because its load adapted to the "
                "target; replay without --concurrency"
            )
    if len({run.folder.resolve() for run in everything}) < len(everything):
        raise InputError("the same run folder was given twice; every run counts once")
    reject_copies(everything)
    if first.is_virtual and len(runs) > 1:
        raise InputError(
            f"{first.folder}: runs in virtual time have no noise, so they repeat each other; give "
            "one run of each build"
        )
    if not first.summary.promises and not any(run.summary.overall.total for run in everything):
        raise InputError(
            f"{first.folder}: the run has no SLO; replay with --slo FILE, -f MANIFEST, or a trace "
            "with targets in its rows"
        )
    spreads = {} if history is None else history(everything)

    def judge(
        runs: RunPairs,
        invalid: Sequence[str] = (),
        doubts: Mapping[tuple[str, GateRule], str] = MappingProxyType({}),
    ) -> tuple[GateVerdict, list[GateClass], list[Matching]]:
        matchings = [match(b, candidate) for candidate, b in runs if b is not None]
        evidence = [
            _class_evidence(name, runs, matchings, float(confidence), spreads)
            for name in _class_names(first, everything)
        ]
        verdict = decide_gate(
            evidence,
            margin=margin,
            confidence=float(confidence),
            with_baseline=bool(matchings),
            is_single_run=len(runs) == 1 and not first.is_virtual and not matchings,
            is_confounded=_is_confounded(runs),
            invalid=invalid,
            doubts=doubts,
        )
        return verdict, evidence, matchings

    errors = {
        run.folder: find_client_errors(run, baseline=other)
        for candidate, baseline in runs
        for run, other in ((candidate, baseline), (baseline, None))
        if run is not None
    }
    invalid = list(invalid_runs(runs, errors))
    verdict, evidence, matchings = judge(runs, invalid)
    every: dict[tuple[str, GateRule], str] = {}
    if not invalid:
        found = [
            _changes(verdict, judge(others)[0], condition)
            for condition, others in judged_otherwise(runs, errors)
        ]
        found.append(_explained_by_prompts(verdict, runs))
        if changes := next(filter(None, found), None):
            # A check that fails under every condition is enough for FAIL.
            every = {check: text for one in reversed(found) for check, text in one.items()}
            verdict, evidence, matchings = judge(runs, doubts=every)
            if verdict.kind is not VerdictKind.FAIL:
                verdict, evidence, matchings = judge(runs, list(changes.values()))
    return _build_result(
        verdict,
        evidence,
        runs,
        matchings,
        margin=margin,
        confidence=float(confidence),
        doubts=tuple(every.values()) if verdict.kind is VerdictKind.FAIL else (),
    )


def _is_confounded(runs: RunPairs) -> bool:
    """True if all runs of one build in several pairs started before those of the other.

    In one pair, one of the builds is always the first.
    """
    pairs = [(candidate, baseline) for candidate, baseline in runs if baseline is not None]
    if len(pairs) < 2:
        return False
    new = [candidate.started_at for candidate, _ in pairs]
    old = [baseline.started_at for _, baseline in pairs]
    return max(new) < min(old) or max(old) < min(new)


def _changes(
    verdict: GateVerdict, other: GateVerdict, condition: str
) -> dict[tuple[str, GateRule], str]:
    """Return the checks that have another verdict under a condition, with the ends of sentences."""
    # A request may count only in one of them, such as a cancelled one, and a check may be gone.
    kinds = {(check.slo_class, check.rule): check.kind for check in other.checks}
    changed = [
        (check, kinds.get((check.slo_class, check.rule), VerdictKind.INCONCLUSIVE))
        for check in verdict.checks
    ]
    return {
        (check.slo_class, check.rule): (
            f"{condition}, the {check.rule.value} check of {check.slo_class} would be "
            f"{kind.value}, not {check.kind.value}"
        )
        for check, kind in changed
        if check.kind is not kind
    }


def _explained_by_prompts(verdict: GateVerdict, runs: RunPairs) -> dict[tuple[str, GateRule], str]:
    """Return the checks that longer or shorter prompts than planned can explain, in words."""
    candidate = prompt_ratio([candidate for candidate, _ in runs])
    baseline = prompt_ratio([baseline for _, baseline in runs if baseline is not None])
    ratios = {GateRule.OBJECTIVE: candidate, GateRule.DIFFERENCE: candidate / baseline}
    texts = {
        GateRule.OBJECTIVE: "the prompt tokens of the trace",
        GateRule.DIFFERENCE: "the prompt tokens of the baseline's target",
    }
    return {
        (check.slo_class, check.rule): (
            f"the candidate's target counted {ratios[check.rule]:.2f} times {texts[check.rule]}, "
            f"which can explain {check.kind.value} of the {check.rule.value} check of "
            f"{check.slo_class}; give the tokenizer of its model with --tokenizer"
        )
        for check in verdict.checks
        if can_explain(check.kind, ratios[check.rule])
    }


def _class_names(first: LoadedRun, runs: Sequence[LoadedRun]) -> list[str]:
    """Return the classes of the SLO, then other classes that have requests."""
    names = [promise.name for promise in first.summary.promises]
    names += [name for run in runs for name in run.class_names]
    return list(dict.fromkeys(names))


def _class_evidence(
    name: str,
    runs: RunPairs,
    matchings: Sequence[Matching],
    confidence: float,
    history: Mapping[str, RunSpread],
) -> GateClass:
    candidates = [candidate for candidate, _ in runs]
    baselines = [baseline for _, baseline in runs if baseline is not None]
    first = candidates[0]
    objectives = sum(promise.objective is not None for promise in first.summary.promises)
    summaries, others = (
        [row for run in side for row in run.summary.classes if row.name == name]
        for side in (candidates, baselines)
    )
    counts = [matching.counts(name) for matching in matchings]
    counts = [pair for pair in counts if sum(pair.total)]
    spread = history.get(name)
    if spread is not None and (missed := missed_shares(baselines, name)):
        spread = spread.at(fmean(missed))
    difference = None
    # Without a matched request in one of the pairs, the pairs are not replicates of each other.
    if counts and len(counts) == len(matchings):
        difference = DifferenceEstimate(
            counts,
            deterministic=first.is_virtual,
            history=spread,
            outage_s=first.summary.outage_s,
        )
    return GateClass(
        candidate=attainment_evidence(
            name,
            first.objective(name),
            [run.second_counts(name) for run in candidates],
            confidence=confidence,
            tests=max(1, objectives * (2 if matchings else 1)),
            outage_s=first.summary.outage_s,
            deterministic=first.is_virtual,
            history=spread,
            unjudged=sum(row.unjudged for row in summaries),
            misses=sum((read_misses(row) for row in summaries), NO_MISSES),
        ),
        difference=difference,
        rows=sum(row.requests for row in (*summaries, *others)),
        baseline_unjudged=sum(row.unjudged for row in others),
    )


def _build_result(
    verdict: GateVerdict,
    evidence: Sequence[GateClass],
    runs: RunPairs,
    matchings: Sequence[Matching],
    *,
    margin: Fraction,
    confidence: float,
    doubts: Sequence[str],
) -> GateResult:
    return GateResult(
        verdict=verdict.kind,
        reason=verdict.reason,
        sentence=verdict.sentence,
        exit_code=verdict.kind.exit_code,
        confidence=confidence,
        margin=float(margin) if matchings else None,
        virtual=runs[0][0].is_virtual,
        candidates=tuple(str(candidate.folder) for candidate, _ in runs),
        baselines=tuple(str(baseline.folder) for _, baseline in runs if baseline is not None),
        dropped=sum(matching.dropped for matching in matchings),
        classes=tuple(_build_class(one, verdict, matchings, confidence) for one in evidence),
        warnings=(
            *_warn(runs),
            *(f"{doubt[0].upper()}{doubt[1:]}; this check does not count." for doubt in doubts),
        ),
    )


def _warn(runs: RunPairs) -> Iterator[str]:
    leading = find_leading_build(runs)
    if leading and not _is_confounded(runs):
        yield (
            f"The {leading} ran first in every pair, so a steady drift of the machine is a part of "
            "the difference; alternate the order, as in ABBA."
        )
    if overlap := find_overlap([run for pair in runs for run in pair if run is not None]):
        first, second = overlap
        yield (
            f"{first.folder} and {second.folder} ran at the same time. Runs that share a machine "
            "or a service are not independent, so the bounds may be too narrow; record one run "
            "after the other."
        )


def _build_class(
    one: GateClass, verdict: GateVerdict, matchings: Sequence[Matching], confidence: float
) -> GateClassResult:
    candidate, interval = one.candidate, one.candidate.interval
    share = candidate.attainment.share
    difference = None if one.difference is None else one.difference.interval(confidence)
    counts = [matching.counts(candidate.name) for matching in matchings]
    baselines = [m.baseline.second_counts(candidate.name).attainment for m in matchings]
    baseline_total = sum(b.total for b in baselines)
    return GateClassResult(
        name=candidate.name,
        objective=None if candidate.objective is None else format_objective(candidate.objective),
        good=candidate.attainment.good,
        total=candidate.attainment.total,
        attainment=None if share is None else cut_share(share),
        lower=None if interval is None else cut_share(interval.lower),
        upper=None if interval is None else round(interval.upper, 6),
        baseline_attainment=(
            cut_share(Fraction(sum(b.good for b in baselines), baseline_total))
            if baseline_total
            else None
        ),
        difference=None if difference is None else round(difference.difference, 6),
        difference_lower=None if difference is None else cut_share(difference.lower),
        difference_upper=None if difference is None else round(difference.upper, 6),
        pairs=tuple(
            PairResult(matched=sum(c.total), gained=sum(c.gained), lost=sum(c.lost)) for c in counts
        ),
        checks=tuple(
            CheckResult(
                rule=check.rule,
                verdict=check.kind,
                reason=check.reason,
                sentence=check.sentence,
                proof=None if check.proof is None else round(check.proof, 6),
                pairs_to_decide=check.pairs_to_decide,
            )
            for check in verdict.checks
            if check.slo_class == candidate.name
        ),
    )
