"""The verdict on a run or a rolling window: PASS, FAIL, INCONCLUSIVE or INVALID, and its reason.

The replayer and the operator share these rules, so they reach the same verdict. The rules are pure
functions of counts, so each can be tested with values computed by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Final, TypeVar

from goodput_core.errors import ExitCode
from goodput_core.slo.attainment import Attainment, SecondCounts
from goodput_core.slo.conformance import Deviation, describe_deviation
from goodput_core.slo.intervals import (
    DEFAULT_CONFIDENCE,
    Interval,
    WindowEstimate,
    count_blocks,
    requests_needed,
)
from goodput_core.slo.targets import format_objective
from goodput_core.units import NS_PER_MS, NS_PER_S, format_duration

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

__all__ = [
    "MIN_BLOCKS",
    "ClassEvidence",
    "ClassVerdict",
    "Reason",
    "ValidityEvidence",
    "Verdict",
    "VerdictKind",
    "class_evidence",
    "decide",
    "find_below",
    "format_share",
    "judge_class",
]

# A window of fewer seconds has too few one-second blocks to estimate the spread between blocks.
MIN_BLOCKS: Final = 20
_MIN_LAG_LIMIT_NS: Final = 10 * NS_PER_MS
_MAX_LAG_LIMIT_NS: Final = 100 * NS_PER_MS
_PROMPT_TOLERANCE: Final = 0.1
_LAG_DIVISOR: Final = 20  # 5 % of the tightest TTFT
_Test = TypeVar("_Test", bound="Hashable")


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
    """INCONCLUSIVE: no class with an objective had a judged request."""
    NO_OBJECTIVE = "NoObjective"
    """INCONCLUSIVE: no class has an objective."""
    UNJUDGED = "Unjudged"
    """INCONCLUSIVE: the records do not suffice to judge some requests of the class."""
    BACKLOG = "Backlog"
    """No longer emitted: the interval accounts for long backlogs. Kept for older summaries."""
    TOO_FEW_BLOCKS = "TooFewBlocks"
    """INCONCLUSIVE: the window is too short to estimate the spread between its seconds."""
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
    """INVALID: most misses are requests that the server rejected as invalid (4xx)."""
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
class ClassEvidence:
    """The evidence about one class in one window; see `class_evidence`.

    Args:
        name: the class.
        objective: share of requests that must meet their targets; None if the class is reported but
            gets no verdict.
        attainment: counts of requests that met their targets and of judged requests.
        interval: bounds of the attainment; None if no request was judged.
        unjudged: requests that count neither as met nor as missed, because their records do not
            suffice to judge them.
        short: requests missed because the output had fewer tokens than the replayed row.
        window_ns: the length of the window.
        outage_ns: the longest outage that the bounds take into account
            (`slo.outageSeconds`).
        tolerated_outage_ns: the longest unobserved outage with which the lower bound still meets
            the objective.
    """

    name: str
    objective: Fraction | None
    attainment: Attainment
    interval: Interval | None
    unjudged: int = 0
    short: int = 0
    window_ns: int
    outage_ns: int = 0
    tolerated_outage_ns: int = 0

    @property
    def blocks(self) -> int:
        """Number of blocks at the finest scale of the window."""
        return count_blocks(-(-self.window_ns // NS_PER_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidityEvidence:
    """The evidence about the client of one run.

    Args:
        lag_p99_ns: nearest-rank p99 of the send lag; None if no request was sent.
        tightest_ttft_ns: the smallest TTFT target of any request; None without TTFT targets.
        unsent: rows of the window that were never sent.
        missed: number of judged requests that missed.
        client_errors: number of missed requests that the server rejected as invalid (4xx other
            than 408 and 429), without those that a baseline answered.
        incomplete: reason why the run ended early, as the end of a sentence; empty if the run is
            complete.
        without_lag: evidence about the same classes, in the same order, computed as if each
            request had been sent on time, and the client had never stalled.
        if_conforming: the same, with every question that a deviation of a response raises decided
            in the favour of the service; empty if no response deviates.
        deviations: number of judged responses with each deviation.
        closed_loop: True if clients sent each request when an earlier response had ended.
        shard: the shard that was sent, as in "2 of 4"; empty if all requests were sent.
        prompt_ratio: prompt tokens that the target counted, divided by those of the trace; None for
            prompts that were not counted, or that were token ids.
    """

    lag_p99_ns: int | None
    tightest_ttft_ns: int | None
    unsent: int
    missed: int = 0
    client_errors: int = 0
    incomplete: str = ""
    without_lag: tuple[ClassEvidence, ...]
    if_conforming: tuple[ClassEvidence, ...] = ()
    deviations: Mapping[Deviation, int] = field(default_factory=dict)
    closed_loop: bool = False
    shard: str = ""
    prompt_ratio: float | None = None

    @property
    def lag_limit_ns(self) -> int:
        """Limit of the p99 send lag: max(10 ms, min(5 % of the tightest TTFT, 100 ms))."""
        share_ns = (self.tightest_ttft_ns or 0) // _LAG_DIVISOR
        return max(_MIN_LAG_LIMIT_NS, min(share_ns, _MAX_LAG_LIMIT_NS))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassVerdict:
    """The verdict on one class: PASS, FAIL or INCONCLUSIVE."""

    name: str
    kind: VerdictKind
    reason: Reason
    sentence: str


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


def class_evidence(
    name: str,
    objective: Fraction | None,
    counts: SecondCounts,
    *,
    confidence: float = DEFAULT_CONFIDENCE,
    classes: int = 1,
    outage_s: int = 0,
    runs: int = 1,
    unjudged: int = 0,
    short: int = 0,
) -> ClassEvidence:
    """Compute the interval of one class from its per-second counts.

    Args:
        name: the class.
        objective: share of requests that must meet their targets; None if the class is reported but
            gets no verdict.
        counts: judged requests, one entry per second of the window.
        confidence: confidence of each one-sided bound.
        classes: number of classes that share the permitted error probability of FAIL.
        outage_s: the longest outage that the bounds take into account, `slo.outageSeconds`.
        runs: number of runs of the same window whose counts are summed.
        unjudged: requests whose records do not suffice to judge them.
        short: requests missed because the output had fewer tokens than the replayed row.
    """
    attainment = counts.attainment
    interval, tolerated_s = None, 0.0
    if attainment.total:
        estimate = WindowEstimate(counts, outage_s=outage_s, runs=runs)
        interval = estimate.interval(confidence, classes=classes)
        if objective is not None:
            tolerated_s = estimate.tolerated_outage_s(objective, confidence)
    return ClassEvidence(
        name=name,
        objective=objective,
        attainment=attainment,
        interval=interval,
        unjudged=unjudged,
        short=short,
        window_ns=len(counts.total) * NS_PER_S,
        outage_ns=outage_s * NS_PER_S,
        tolerated_outage_ns=int(tolerated_s * NS_PER_S),
    )


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
    skipped = tuple(c.name for c in with_objective if c.interval is None)
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
        if problems:
            kind, reason = VerdictKind.INVALID, problems[0][0]
            sentence = f"The run is invalid: {'; '.join(text for _, text in problems)}."
        elif verdicts:
            if kind is VerdictKind.INCONCLUSIVE:
                sentence += " Replay a longer window, or repeat the run."
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
    """Return one verdict for each class with an objective and judged requests, in their order."""
    failed = find_below(
        {
            c.name: (c.objective, c.interval.uppers)
            for c in classes
            if c.objective is not None and c.interval is not None and not c.unjudged
        }
    )
    return tuple(
        judge_class(evidence, failed.get(evidence.name))
        for evidence in classes
        if evidence.objective is not None and evidence.interval is not None
    )


def find_below(limits: Mapping[_Test, tuple[Fraction, Sequence[float]]]) -> dict[_Test, float]:
    """Return the tests whose upper bounds lie below their limits, with these bounds.

    This is Holm's procedure on bounds. The open tests share the permitted error probability.
    Every test whose upper bound lies below its limit is decided. The remaining ones are then
    tested again, with a larger share for each.

    Args:
        limits: for each test its limit and its upper bounds; `uppers[k]` is the bound if k + 1
            tests share the error probability.

    Source: Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979.
    """
    still_open = dict(limits)
    found: dict[_Test, float] = {}
    while still_open:
        sharers = len(still_open)
        below = {
            key: uppers[sharers - 1]
            for key, (limit, uppers) in still_open.items()
            if uppers[sharers - 1] < limit
        }
        if not below:
            break
        found |= below
        for key in below:
            del still_open[key]
    return found


def judge_class(evidence: ClassEvidence, failed_at: float | None) -> ClassVerdict:
    """Return the verdict on one class with an objective and judged requests.

    Args:
        evidence: evidence of the class.
        failed_at: upper bound that proves the objective missed, from `find_below`; None if no
            bound does.
    """
    objective, interval = evidence.objective, evidence.interval
    assert objective is not None
    assert interval is not None
    good, total = evidence.attainment.good, evidence.attainment.total
    confidence = (
        f"with {interval.confidence * 100:.4g}% confidence "
        f"(objective {format_objective(objective)})"
    )
    outage_ns, tolerated_ns = evidence.outage_ns, evidence.tolerated_outage_ns
    kind, reason = VerdictKind.INCONCLUSIVE, Reason.INTERVAL_SPANS_OBJECTIVE
    if evidence.unjudged:
        reason = Reason.UNJUDGED
        text = f"but {evidence.unjudged} could not be judged from the records"
    elif failed_at is not None:
        kind, reason = VerdictKind.FAIL, Reason.BELOW_OBJECTIVE
        text = f"at most {format_share(failed_at)} {confidence}"
    elif evidence.blocks < MIN_BLOCKS:
        reason = Reason.TOO_FEW_BLOCKS
        window = format_duration(evidence.window_ns)
        text = f"but a PASS requires a window of at least {MIN_BLOCKS} s; this one is {window} long"
    elif total < (needed := requests_needed(objective, interval.confidence)):
        reason = Reason.TOO_FEW_REQUESTS
        text = (
            f"but an objective of {format_objective(objective)} requires at least {needed} requests"
        )
    elif interval.lower >= objective:
        kind, reason = VerdictKind.PASS, Reason.ATTAINED
        unobserved = format_duration(max(outage_ns, tolerated_ns))
        text = (
            f"at least {format_share(interval.lower)} {confidence}; the objective would still be "
            f"met with an unobserved outage of {unobserved}"
        )
    elif 0 < tolerated_ns < outage_ns:
        required = format_duration(evidence.window_ns * outage_ns // tolerated_ns)
        text = (
            "the objective would still be met with an unobserved outage of "
            f"{format_duration(tolerated_ns)}, but slo.outageSeconds requires "
            f"{format_duration(outage_ns)}, and so a window of about {required}"
        )
    else:
        text = (
            f"between {format_share(interval.lower)} and {format_share(interval.upper)}, each "
            f"bound {confidence}"
        )
    if kind is not VerdictKind.PASS and 2 * evidence.short > total:
        text += (
            f"; {evidence.short} outputs had fewer tokens than their rows; if the model is meant "
            "to choose its output lengths, use --length-pinning none"
        )
    sentence = f"{evidence.name}: {good} of {total} requests met their targets, {text}"
    return ClassVerdict(name=evidence.name, kind=kind, reason=reason, sentence=sentence)


def _validity_problems(
    verdicts: Sequence[ClassVerdict], validity: ValidityEvidence, kind: VerdictKind
) -> Iterator[tuple[Reason, str]]:
    """Yield every reason why the run is invalid, with the text of each."""
    if validity.incomplete:
        yield Reason.INCOMPLETE, f"it is incomplete, {validity.incomplete}"
    if validity.unsent:
        yield Reason.UNSENT_ROWS, f"{validity.unsent} rows were never sent"
    if 2 * validity.client_errors > validity.missed:
        rejected = f"{validity.client_errors} of the {validity.missed} missed requests"
        yield Reason.CLIENT_ERROR, f"the server rejected {rejected} as invalid (4xx)"
    if validity.lag_p99_ns is not None and validity.lag_p99_ns > validity.lag_limit_ns:
        lag, limit = format_duration(validity.lag_p99_ns), format_duration(validity.lag_limit_ns)
        text = f"the p99 of the client's send lag is {lag}, above the limit {limit}"
        yield Reason.CLIENT_LAG, text
    for verdict, other in _changes(verdicts, validity.without_lag):
        change = f"{verdict.name} would be {other.kind}, not {verdict.kind}"
        text = f"without the client's lag (late sends and stalls) {change}"
        yield Reason.CLIENT_LAG_DECIDES, text
    changes = [
        f"{verdict.name} could be {other.kind} instead of {verdict.kind}"
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
    excess = {VerdictKind.FAIL: ratio - 1, VerdictKind.PASS: 1 - ratio}
    if excess.get(kind, 0.0) > _PROMPT_TOLERANCE:
        text = f"the target counted {ratio:.2f} times the prompt tokens of the trace, which can"
        remedy = "give the tokenizer of its model with --tokenizer"
        yield Reason.PROMPT_LENGTHS, f"{text} explain {kind}; {remedy}"


def _changes(
    verdicts: Sequence[ClassVerdict], alternative: Sequence[ClassEvidence]
) -> Iterator[tuple[ClassVerdict, ClassVerdict]]:
    """Yield both verdicts on each class on which the alternative evidence has another verdict."""
    others = {v.name: v for v in _judge_classes(alternative)}
    for verdict in verdicts:
        other = others.get(verdict.name)
        if other is not None and other.kind is not verdict.kind:
            yield verdict, other


def format_share(share: float) -> str:
    """Return a percentage truncated to two decimals, so that a missed objective never looks met."""
    return f"{int(share * 10_000) / 100:.2f}%"
