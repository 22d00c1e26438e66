"""The verdict on a run or a rolling window: PASS, FAIL, INCONCLUSIVE or INVALID, and its reason.

The replayer and the operator share these rules, so they reach the same verdict. The rules are pure
functions of counts, so each can be tested with values computed by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from goodput_core.errors import ExitCode
from goodput_core.slo.conformance import describe_deviation
from goodput_core.slo.evidence import is_load_lacking
from goodput_core.slo.intervals import find_below, requests_needed
from goodput_core.slo.judging import MissReason
from goodput_core.slo.targets import format_objective
from goodput_core.units import NS_PER_S, format_duration, format_estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from goodput_core.slo.evidence import ClassEvidence, ValidityEvidence

__all__ = [
    "MIN_BLOCKS",
    "ClassVerdict",
    "Reason",
    "Verdict",
    "VerdictKind",
    "can_explain",
    "decide",
    "describe_bound",
    "format_share",
    "judge_class",
]

# A window of fewer seconds has too few one-second blocks to estimate the spread between blocks.
MIN_BLOCKS: Final = 20
_PROMPT_TOLERANCE: Final = 0.1


class VerdictKind(StrEnum):
    """The four possible verdicts."""

    PASS = "PASS"  # noqa: S105 - not a password
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a command that ends with this verdict."""
        return ExitCode[self.name]


class Reason(StrEnum):
    """The reason for a verdict. The values never change, because scripts match on them."""

    ATTAINED = "Attained"
    """PASS: the lower bound of every class reaches its objective."""
    BELOW_OBJECTIVE = "BelowObjective"
    """FAIL: the upper bound of a class lies below its objective."""
    NO_ROWS = "NoRows"
    """INCONCLUSIVE: no class with an objective, or one with requests, had a judged request."""
    NO_OBJECTIVE = "NoObjective"
    """INCONCLUSIVE: no class has an objective."""
    UNJUDGED = "Unjudged"
    """INCONCLUSIVE: the records do not suffice to judge some requests of the class."""
    BACKLOG = "Backlog"
    """No longer emitted: the interval accounts for long backlogs. Kept for older summaries."""
    TOO_FEW_BLOCKS = "TooFewBlocks"
    """INCONCLUSIVE: the window has too few seconds, or too few with requests, to estimate their
    spread."""
    TOO_FEW_REQUESTS = "TooFewRequests"
    """INCONCLUSIVE: even if all requests met their targets, the lower bound would be below the
    objective."""
    INTERVAL_SPANS_OBJECTIVE = "IntervalSpansObjective"
    """INCONCLUSIVE: the objective lies between the bounds."""
    INCOMPLETE = "Incomplete"
    """INVALID: the run ended before its trace did."""
    UNSENT_ROWS = "UnsentRows"
    """INVALID: rows of the window were never sent."""
    CLIENT_LAG = "ClientLag"
    """INVALID: the client's send lag exceeds the limit."""
    CLIENT_LAG_DECIDES = "ClientLagDecides"
    """INVALID: without the client's lag the verdict on a class would change. The lag consists of
    late sends, and of stalls while responses arrived."""
    CLIENT_ERROR = "ClientError"
    """INVALID: without the requests that the server rejected as invalid (4xx) or redirected, the
    verdict on a class would change; or they are so many that the load was another one."""
    NEVER_CONNECTED = "NeverConnected"
    """INVALID: no request of the run could connect to the target."""
    CLOSED_LOOP = "ClosedLoop"
    """INCONCLUSIVE: the requests were sent in a closed loop, so the load adapted to the service."""
    SHARD = "Shard"
    """INCONCLUSIVE: the run is one of several shards; the verdict is that of the merged run."""
    NON_CONFORMING = "NonConforming"
    """INVALID: the verdict on a class depends on responses that do not conform to the API or to
    their requests."""
    PROMPT_LENGTHS = "PromptLengths"
    """INVALID: the target counted other prompt tokens than the trace has, which explains it."""
    INVALID_RUN = "InvalidRun"
    """INVALID: a run of a comparison is invalid."""
    WORSE_THAN_BASELINE = "WorseThanBaseline"
    """FAIL: the upper bound of the difference to the baseline lies below the margin."""
    INTERVAL_SPANS_MARGIN = "IntervalSpansMargin"
    """INCONCLUSIVE: the margin lies between the bounds of the difference to the baseline."""
    SINGLE_PAIR = "SinglePair"
    """INCONCLUSIVE: one pair of runs shows nothing about the spread between runs."""
    RUN_ORDER = "RunOrder"
    """INCONCLUSIVE: all runs of one build came before those of the other, so that a drift of the
    machine would look like a difference between the builds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassVerdict:
    """The verdict on one class.

    Args:
        name: the class.
        kind: PASS, FAIL or INCONCLUSIVE.
        reason: stable reason.
        sentence: the explanation, without a final period.
        proof: upper bound that proves the FAIL, corrected for the number of tests; None unless
            the class fails.
    """

    name: str
    kind: VerdictKind
    reason: Reason
    sentence: str
    proof: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on a run or a rolling window.

    Args:
        kind: the verdict.
        reason: the reason given by the first rule that applies.
        sentence: the explanation for the user; names every class that decided.
        classes: one verdict for each class with an objective and judged requests.
        skipped: classes with an objective but without judged requests.
    """

    kind: VerdictKind
    reason: Reason
    sentence: str
    classes: tuple[ClassVerdict, ...]
    skipped: tuple[str, ...]


def decide(classes: Sequence[ClassEvidence], validity: ValidityEvidence | None) -> Verdict:
    """Return the verdict on one run, or on a rolling window.

    The precedence is INVALID > FAIL > INCONCLUSIVE > PASS. An invalid run is evidence about the
    client, not about the service. FAIL precedes INCONCLUSIVE because one missed objective is
    enough, even if other classes are undecided. PASS is last because it needs every class.

    FAIL is tested for each class with Holm's step-down correction, so that more classes do not
    make a wrong FAIL likelier. PASS needs no correction, because every class must pass.

    Args:
        classes: every class that has an objective or a request.
        validity: the evidence about the client; None for a rolling window.
    """
    with_objective = [c for c in classes if c.objective is not None]
    skipped = tuple(c.name for c in with_objective if c.interval is None and not c.rows)
    verdicts = _judge_classes(classes)
    kind, reason, sentence = _combine(verdicts, any_objective=bool(with_objective))
    if validity is not None and validity.closed_loop:
        verdicts, skipped = (), ()
        kind, reason = VerdictKind.INCONCLUSIVE, Reason.CLOSED_LOOP
        sentence = (
            "Clients sent the requests in a closed loop: a slow service received fewer of them, so "
            "the run shows its throughput, and not whether it keeps an objective under traffic."
        )
    elif validity is not None and validity.shard:
        verdicts, skipped = (), ()
        kind, reason = VerdictKind.INCONCLUSIVE, Reason.SHARD
        sentence = (
            f"These are the requests of shard {validity.shard}; merge the runs of all shards with "
            "`replay merge` for the verdict."
        )
    if skipped:
        sentence += f" Classes without a judged request: {', '.join(skipped)}."
    if validity is not None:
        problems = list(_validity_problems(verdicts, validity, kind))
        if not problems:
            problems = list(_problem_of_all(verdicts, classes, validity))
        if problems:
            kind, reason = VerdictKind.INVALID, problems[0][0]
            sentence = f"The run is invalid: {'; '.join(text for _, text in problems)}."
        elif verdicts:
            sentence += " This is a single run: the spread between runs is not included."
    return Verdict(kind=kind, reason=reason, sentence=sentence, classes=verdicts, skipped=skipped)


def _combine(
    verdicts: Sequence[ClassVerdict], *, any_objective: bool
) -> tuple[VerdictKind, Reason, str]:
    """Combine the verdicts on the classes, as if the run were valid."""
    for kind in (VerdictKind.FAIL, VerdictKind.INCONCLUSIVE, VerdictKind.PASS):
        deciding = [v for v in verdicts if v.kind is kind]
        if deciding:
            return kind, deciding[0].reason, f"{'; '.join(v.sentence for v in deciding)}."
    if any_objective:
        text = "No class with an objective had a request that could be judged."
        return VerdictKind.INCONCLUSIVE, Reason.NO_ROWS, text
    text = "No class has an objective, so there is nothing to decide."
    return VerdictKind.INCONCLUSIVE, Reason.NO_OBJECTIVE, text


def _judge_classes(classes: Sequence[ClassEvidence]) -> tuple[ClassVerdict, ...]:
    """Return one verdict for each class with an objective and requests, in their order."""
    failed = find_below(
        {
            c.name: (c.objective, c.interval.uppers)
            for c in classes
            if c.objective is not None and c.interval is not None and not c.unjudged
        }
    )
    return tuple(
        judge_class(evidence, failed.get(evidence.name))
        if evidence.interval is not None
        else _open_class(evidence)
        for evidence in classes
        if evidence.objective is not None and (evidence.interval is not None or evidence.rows)
    )


def _open_class(evidence: ClassEvidence) -> ClassVerdict:
    """Return the verdict on a class of whose requests none could be judged."""
    text = f"{evidence.name}: none of its {evidence.rows} requests could be judged"
    if evidence.unjudged:
        reason, text = Reason.UNJUDGED, f"{text} from the records"
    else:
        reason, text = Reason.NO_ROWS, f"{text}, because they were cancelled"
    return ClassVerdict(
        name=evidence.name, kind=VerdictKind.INCONCLUSIVE, reason=reason, sentence=text
    )


def describe_bound(
    uppers: Sequence[float],
    sharers: int,
    tests: str,
    confidence: float,
    show: Callable[[float], str],
) -> str:
    """Return the upper bound that proves a FAIL, as the end of a sentence.

    Tables and charts show the bound of each test alone. If the bound corrected for the number of
    tests looks different, the text has both.

    Args:
        uppers: upper bounds; `uppers[k]` is the bound if k + 1 tests share the error probability.
        sharers: number of tests that shared it, from `find_below`.
        tests: the word for several tests.
        confidence: confidence of each bound alone.
        show: formats a bound.
    """
    alone, corrected = show(uppers[0]), show(uppers[sharers - 1])
    text = f"at most {alone} with {confidence * 100:.4g}% confidence"
    if corrected != alone:
        text += f", {corrected} with the correction for {sharers} {tests}"
    return text


def judge_class(
    evidence: ClassEvidence,
    sharers: int | None,
    *,
    tests: str = "classes",
    with_remedy: bool = True,
) -> ClassVerdict:
    """Return the verdict on one class with an objective and judged requests.

    Args:
        evidence: evidence of the class.
        sharers: number of tests that shared the error probability when the upper bound of the class
            was below its objective, from `find_below`; None if it was not.
        tests: the word for several tests.
        with_remedy: False if a longer window is not the only remedy for an undecided class, as
            after several runs.
    """
    objective, interval = evidence.objective, evidence.interval
    assert objective is not None
    assert interval is not None
    good, total = evidence.attainment.good, evidence.attainment.total
    stated = f"(objective {format_objective(objective)})"
    confidence = f"with {interval.confidence * 100:.4g}% confidence {stated}"
    outage_ns, tolerated_ns = evidence.outage_ns, evidence.tolerated_outage_ns
    kind, reason = VerdictKind.INCONCLUSIVE, Reason.INTERVAL_SPANS_OBJECTIVE
    proof = None
    if evidence.unjudged:
        reason = Reason.UNJUDGED
        text = f"but {evidence.unjudged} could not be judged from the records"
    elif sharers is not None:
        kind, reason = VerdictKind.FAIL, Reason.BELOW_OBJECTIVE
        proof = interval.uppers[sharers - 1]
        bound = describe_bound(interval.uppers, sharers, tests, interval.confidence, format_share)
        text = f"{bound} {stated}"
    elif evidence.blocks < MIN_BLOCKS:
        reason = Reason.TOO_FEW_BLOCKS
        window = format_duration(evidence.window_ns)
        missing = format_duration(MIN_BLOCKS * NS_PER_S - evidence.window_ns)
        text = (
            f"but a PASS requires a window of at least {MIN_BLOCKS} s, {missing} more than the "
            f"{window} of this one"
        )
    elif total < (needed := requests_needed(objective, interval.confidence)):
        reason = Reason.TOO_FEW_REQUESTS
        text = (
            f"but an objective of {format_objective(objective)} requires at least {needed} "
            f"requests, {needed - total} more"
        )
    elif evidence.busy_s < (least := min(MIN_BLOCKS, needed)):
        reason = Reason.TOO_FEW_BLOCKS
        text = (
            f"but they arrived in only {evidence.busy_s} of the "
            f"{evidence.window_ns // NS_PER_S} seconds of the window, and a PASS requires "
            f"requests in at least {least} different seconds"
        )
    elif interval.lower >= objective:
        kind, reason = VerdictKind.PASS, Reason.ATTAINED
        unobserved = format_duration(max(outage_ns, tolerated_ns))
        text = (
            f"at least {format_share(interval.lower)} {confidence}; the objective would still be "
            f"met with an unobserved outage of {unobserved}"
        )
    elif 0 < tolerated_ns < outage_ns:
        text = (
            "the objective would still be met with an unobserved outage of "
            f"{format_duration(tolerated_ns)}, but slo.outageSeconds requires "
            f"{format_duration(outage_ns)}"
        )
    else:
        text = (
            f"between {format_share(interval.lower)} and {format_share(interval.upper)}, each "
            f"bound {confidence}"
        )
    if kind is VerdictKind.INCONCLUSIVE and reason is not Reason.UNJUDGED and with_remedy:
        text += _describe_remedy(evidence, reason)
    short = evidence.misses.by_reason.get(MissReason.SHORT, 0)
    if kind is not VerdictKind.PASS and 2 * short > total:
        text += (
            f"; {short} outputs had fewer tokens than their rows; if the model is meant "
            "to choose its output lengths, use --length-pinning none"
        )
    elif kind is VerdictKind.FAIL and (cause := evidence.misses.describe_main(total - good)):
        text += f"; {cause}"
    sentence = f"{evidence.name}: {good} of {total} requests met their targets, {text}"
    return ClassVerdict(
        name=evidence.name, kind=kind, reason=reason, sentence=sentence, proof=proof
    )


def _describe_remedy(evidence: ClassEvidence, reason: Reason) -> str:
    """Return the window that would probably decide about a class, as the end of a sentence."""
    if evidence.deciding_window_ns is None:
        return "; even a window of a day would probably not decide"
    least_ns = MIN_BLOCKS * NS_PER_S
    if reason is Reason.TOO_FEW_BLOCKS and evidence.blocks >= MIN_BLOCKS:
        least_ns = evidence.window_ns * MIN_BLOCKS // evidence.busy_s
    window_ns = max(evidence.deciding_window_ns, least_ns)
    return f"; a window of about {format_estimate(window_ns)} would probably decide"


def _validity_problems(
    verdicts: Sequence[ClassVerdict], validity: ValidityEvidence, kind: VerdictKind
) -> Iterator[tuple[Reason, str]]:
    """Yield every reason why the run is invalid, with the text of each."""
    if validity.incomplete:
        yield Reason.INCOMPLETE, f"it is incomplete, {validity.incomplete}"
    if validity.unsent:
        yield Reason.UNSENT_ROWS, f"{validity.unsent} rows were never sent"
    if effect := _effect_of_rejections(verdicts, validity, kind):
        rejected = f"{validity.client_errors} of {validity.requests} requests"
        text = f"the server rejected {rejected} as invalid (3xx or 4xx), {effect}"
        yield Reason.CLIENT_ERROR, f"{text}; correct the key, the address or the requests"
    if validity.never_connected:
        text = f"none of {validity.never_connected} requests could connect to the target"
        yield Reason.NEVER_CONNECTED, f"{text}, which may not be the service"
    if validity.lag_p99_ns is not None and validity.lag_p99_ns > validity.lag_limit_ns:
        lag, limit = format_duration(validity.lag_p99_ns), format_duration(validity.lag_limit_ns)
        text = f"the p99 of the client's send lag is {lag}, above the limit {limit}"
        yield Reason.CLIENT_LAG, text
    for verdict, other in _changes(verdicts, validity.without_lag):
        change = f"{verdict.name} would be {other}, not {verdict.kind}"
        text = f"without the client's lag (late sends and stalls) {change}"
        yield Reason.CLIENT_LAG_DECIDES, text
    changes = [
        f"{verdict.name} could be {other} instead of {verdict.kind}"
        for verdict, other in _changes(verdicts, validity.if_conforming)
    ]
    if changes:
        doubts = (
            describe_deviation(deviation, count)
            for deviation, count in validity.deviations.items()
            if deviation.leaves_doubt
        )
        text = f"{'; '.join(doubts)}; with responses as requested, {', '.join(changes)}"
        yield Reason.NON_CONFORMING, text
    ratio = validity.prompt_ratio or 1.0
    if can_explain(kind, ratio):
        text = f"the target counted {ratio:.2f} times the prompt tokens of the trace, which can"
        remedy = "give the tokenizer of its model with --tokenizer"
        yield Reason.PROMPT_LENGTHS, f"{text} explain {kind}; {remedy}"


def _effect_of_rejections(
    verdicts: Sequence[ClassVerdict], validity: ValidityEvidence, kind: VerdictKind
) -> str:
    """Return what the client's errors change, as the end of a sentence; empty if nothing."""
    changes = [
        f"{verdict.name} would be {other}, not {verdict.kind}"
        for verdict, other in _changes(verdicts, validity.without_client_errors)
    ]
    if changes:
        return f"and without them {', '.join(changes)}"
    # A service that fails under a lighter load would fail under the load of the trace, too.
    lacking = is_load_lacking(validity.client_errors, validity.requests)
    if lacking and kind is not VerdictKind.FAIL:
        return "so its load was lighter than that of the trace"
    return ""


def _problem_of_all(
    verdicts: Sequence[ClassVerdict],
    classes: Sequence[ClassEvidence],
    validity: ValidityEvidence,
) -> Iterator[tuple[Reason, str]]:
    """Yield the problem if only all disturbances together change a verdict."""
    changes = [
        f"{verdict.name} would be {other}, not {verdict.kind}"
        for verdict, other in _changes(verdicts, validity.undisturbed)
    ]
    if not changes:
        return
    doubts = sum(count for one, count in validity.deviations.items() if one.leaves_doubt)
    disturbances = []
    if validity.client_errors:
        disturbances.append(f"{validity.client_errors} requests rejected as invalid (3xx or 4xx)")
    if doubts:
        disturbances.append(f"{doubts} deviations of responses")
    if tuple(classes) != validity.without_lag:
        disturbances.append("the client's lag")
    reason = Reason.CLIENT_ERROR if validity.client_errors else Reason.NON_CONFORMING
    text = f"{' and '.join(disturbances)} decide together"
    yield reason, f"{text}, and without them {', '.join(changes)}"


def _changes(
    verdicts: Sequence[ClassVerdict], alternative: Sequence[ClassEvidence]
) -> Iterator[tuple[ClassVerdict, str]]:
    """Yield the verdict on each class that has another one by the alternative evidence, and that.

    A class without a judged request has none.

    Args:
        verdicts: the verdicts on the classes.
        alternative: the other evidence about all classes; empty if there is none.
    """
    others = {v.name: v.kind for v in _judge_classes(alternative)}
    empty = {evidence.name for evidence in alternative if evidence.interval is None}
    for verdict in verdicts if alternative else ():
        other = others.get(verdict.name)
        if other is None or verdict.name in empty:
            other_text = "without a judged request"
        else:
            other_text = other.value
        if other is not verdict.kind:
            yield verdict, other_text


def can_explain(kind: VerdictKind, prompt_ratio: float) -> bool:
    """Return True if longer or shorter prompts than planned can explain a verdict.

    Args:
        kind: the verdict.
        prompt_ratio: prompt tokens that the target counted, divided by those that were planned.
    """
    excess = {VerdictKind.FAIL: prompt_ratio - 1, VerdictKind.PASS: 1 - prompt_ratio}
    return excess.get(kind, 0.0) > _PROMPT_TOLERANCE


def format_share(share: float) -> str:
    """Return a percentage truncated to two decimals, so that a missed objective never looks met."""
    return f"{int(share * 10_000) / 100:.2f}%"
