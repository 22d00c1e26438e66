"""The verdict on a run: PASS, FAIL, INCONCLUSIVE or INVALID, a stable reason and a sentence.

Pure rules over gathered evidence, so that the replayer, a gate and the operator decide alike
and every rule can be tested with numbers on paper. Nothing here reads records, resamples or
prints. Comparing two runs will bring its own evidence (a difference and a margin) into
`decide` beside these classes; the rules of one run stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from goodput_core.errors import ExitCode
from goodput_core.slo.attainment import Attainment
from goodput_core.slo.intervals import Interval, requests_needed
from goodput_core.slo.targets import format_objective
from goodput_core.units import NS_PER_MS, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "MIN_BLOCKS",
    "ClassEvidence",
    "ClassVerdict",
    "Reason",
    "ValidityEvidence",
    "Verdict",
    "VerdictKind",
    "backlog_bars_pass",
    "decide",
]

# A block outlasts the longest backlog, and a backlog may last a twentieth of the window, so a
# judgeable window always holds about twenty blocks. Fewer say too little about their spread.
MIN_BLOCKS: Final = 20
_LAG_FLOOR_NS: Final = 10 * NS_PER_MS
_LAG_SHARE: Final = 20  # of the tightest TTFT: 5 %
_BACKLOG_SHARE: Final = 20  # of the window


class VerdictKind(StrEnum):
    """The four answers, and what each means to whoever asked."""

    PASS = "PASS"  # noqa: S105 - not a password
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"

    @property
    def exit_code(self) -> ExitCode:
        """What a gate tells the shell."""
        return ExitCode[self.name]


class Reason(StrEnum):
    """Why a verdict is what it is. Scripts and conditions match on these: they never change."""

    ATTAINED = "Attained"
    """PASS: the lower bound of every class reaches its objective."""
    BELOW_OBJECTIVE = "BelowObjective"
    """FAIL: the upper bound of a class lies below its objective."""
    NO_ROWS = "NoRows"
    """INCONCLUSIVE: no class with an objective had a judged request."""
    NO_OBJECTIVE = "NoObjective"
    """INCONCLUSIVE: no class has an objective."""
    UNJUDGED = "Unjudged"
    """INCONCLUSIVE: some requests of the class could not be judged from what was recorded."""
    BACKLOG = "Backlog"
    """INCONCLUSIVE: one backlog lasted over a twentieth of the window."""
    TOO_FEW_BLOCKS = "TooFewBlocks"
    """INCONCLUSIVE: the window holds too few blocks for its backlogs."""
    TOO_FEW_REQUESTS = "TooFewRequests"
    """INCONCLUSIVE: so few requests could not show the objective if all attained."""
    INTERVAL_SPANS_OBJECTIVE = "IntervalSpansObjective"
    """INCONCLUSIVE: the objective lies between the bounds."""
    INCOMPLETE = "Incomplete"
    """INVALID: the run ended before its trace did."""
    UNSENT_ROWS = "UnsentRows"
    """INVALID: rows of the window were never sent."""
    CLIENT_LAG = "ClientLag"
    """INVALID: the client sent too late."""
    CLIENT_LAG_DECIDES = "ClientLagDecides"
    """INVALID: without the client's own lag a class's verdict would be another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassEvidence:
    """What one run shows about one class.

    Args:
        name: the class.
        objective: the share that must attain; None: reported, never judged.
        attainment: attained of judged.
        interval: the bounds of the attainment; None exactly when nothing was judged.
        unjudged: requests in neither count because the record cannot tell about them.
        blocks: non-overlapping blocks that the window holds.
        block_ns: the length of a block, longer than the longest backlog.
        backlog_ns: the longest backlog of the run, over all classes.
        window_ns: the length of the window.
    """

    name: str
    objective: Fraction | None
    attainment: Attainment
    interval: Interval | None
    unjudged: int = 0
    blocks: int
    block_ns: int
    backlog_ns: int
    window_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidityEvidence:
    """What one run shows about its own client.

    Args:
        lag_p99_ns: nearest-rank p99 of actual minus scheduled send; None when nothing was sent.
        tightest_ttft_ns: the smallest TTFT that was promised to any request.
        unsent: rows of the window that were never sent.
        incomplete: why the run ended early, as the end of a sentence; empty: it did not.
        without_lag: the classes, in the same order, had each request been sent on time.
    """

    lag_p99_ns: int | None
    tightest_ttft_ns: int | None
    unsent: int
    incomplete: str = ""
    without_lag: tuple[ClassEvidence, ...]

    @property
    def lag_limit_ns(self) -> int:
        """The p99 of lag beyond which a run says more about its client than about the service."""
        return max(_LAG_FLOOR_NS, (self.tightest_ttft_ns or 0) // _LAG_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassVerdict:
    """The verdict on one class: PASS, FAIL or INCONCLUSIVE."""

    name: str
    kind: VerdictKind
    reason: Reason
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on a run.

    Args:
        kind: of the four.
        reason: of the first rule that decided.
        sentence: for a person; names every class that decided.
        classes: one verdict for each class with an objective and judged requests.
        skipped: classes with an objective but without judged requests.
    """

    kind: VerdictKind
    reason: Reason
    sentence: str
    classes: tuple[ClassVerdict, ...]
    skipped: tuple[str, ...]


def backlog_bars_pass(backlog_ns: int, window_ns: int) -> bool:
    """Whether a backlog is so long that the window shows little but its one course."""
    return backlog_ns * _BACKLOG_SHARE > window_ns


def decide(classes: Sequence[ClassEvidence], validity: ValidityEvidence) -> Verdict:
    """The verdict on one run.

    INVALID > FAIL > INCONCLUSIVE > PASS. An invalid run shows the client, not the service, so
    nothing else may be read off it. FAIL comes before INCONCLUSIVE because one broken promise is
    enough, whatever stays unknown about the others; PASS comes last because it needs them all.

    FAIL is tested for each class with Holm's step-down correction, so that many classes do not
    make a false alarm likelier; PASS needs none, as it asks for all of them at once.

    Args:
        classes: every class that has an objective or a request.
        validity: what is known about the client.
    """
    with_objective = [c for c in classes if c.objective is not None]
    skipped = tuple(c.name for c in with_objective if c.interval is None)
    verdicts = _judge_classes(classes)
    kind, reason, sentence = _of_classes(verdicts, any_objective=bool(with_objective))
    if skipped:
        sentence += f" Skipped, without a judged request: {', '.join(skipped)}."
    problems = list(_validity_problems(verdicts, validity))
    if problems:
        kind, reason = VerdictKind.INVALID, problems[0][0]
        sentence = f"The run is invalid: {'; '.join(text for _, text in problems)}."
    return Verdict(kind=kind, reason=reason, sentence=sentence, classes=verdicts, skipped=skipped)


def _of_classes(
    verdicts: Sequence[ClassVerdict], *, any_objective: bool
) -> tuple[VerdictKind, Reason, str]:
    """What the classes say together, were the run valid."""
    single = "This is a single run: the spread between runs is not included."
    for kind in (VerdictKind.FAIL, VerdictKind.INCONCLUSIVE, VerdictKind.PASS):
        deciding = [v for v in verdicts if v.kind is kind]
        if deciding:
            text = "; ".join(v.sentence for v in deciding)
            return kind, deciding[0].reason, f"{text}. {single}"
    if any_objective:
        text = "No class with an objective had a request that could be judged."
        return VerdictKind.INCONCLUSIVE, Reason.NO_ROWS, text
    text = "No class has an objective, so there is nothing to decide."
    return VerdictKind.INCONCLUSIVE, Reason.NO_OBJECTIVE, text


def _judge_classes(classes: Sequence[ClassEvidence]) -> tuple[ClassVerdict, ...]:
    """One verdict for each class with an objective and judged requests, in their order."""
    failed = _failed(classes)
    return tuple(
        _class_verdict(evidence, evidence.objective, evidence.interval, failed.get(evidence.name))
        for evidence in classes
        if evidence.objective is not None and evidence.interval is not None
    )


def _failed(classes: Sequence[ClassEvidence]) -> dict[str, float]:
    """The classes shown to be below their objective, and the bound that shows it.

    Holm's procedure on bounds: while any class's upper bound, with the error shared by all
    classes not yet rejected, lies below its objective, reject it and share by one fewer.

    Source: Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979.
    """
    open_classes = {
        c.name: (c.objective, c.interval.uppers)
        for c in classes
        if c.objective is not None and c.interval is not None and not c.unjudged
    }
    failed: dict[str, float] = {}
    while open_classes:
        sharers = len(open_classes)
        below = {
            name: uppers[sharers - 1]
            for name, (objective, uppers) in open_classes.items()
            if uppers[sharers - 1] < objective
        }
        if not below:
            break
        failed |= below
        for name in below:
            del open_classes[name]
    return failed


def _class_verdict(
    evidence: ClassEvidence, objective: Fraction, interval: Interval, failed_at: float | None
) -> ClassVerdict:
    good, total = evidence.attainment.good, evidence.attainment.total
    what = f"{evidence.name}: {good} of {total} attained"
    goal = format_objective(objective)
    sure = f"with {interval.confidence * 100:.4g}% confidence"
    kind, reason = VerdictKind.INCONCLUSIVE, Reason.INTERVAL_SPANS_OBJECTIVE
    needed = requests_needed(objective, interval.confidence)
    if evidence.unjudged:
        reason = Reason.UNJUDGED
        why = f"but {evidence.unjudged} could not be judged from what was recorded"
    elif failed_at is not None:
        kind, reason = VerdictKind.FAIL, Reason.BELOW_OBJECTIVE
        why = f"at most {_percent(failed_at)} {sure}, and {goal} was promised"
    elif backlog_bars_pass(evidence.backlog_ns, evidence.window_ns):
        reason = Reason.BACKLOG
        why = (
            f"but one backlog lasted {format_duration(evidence.backlog_ns)} of a window of "
            f"{format_duration(evidence.window_ns)}; replay a longer window, or repeat the run"
        )
    elif evidence.blocks < MIN_BLOCKS:
        reason = Reason.TOO_FEW_BLOCKS
        why = (
            f"but the window holds {evidence.blocks} blocks of "
            f"{format_duration(evidence.block_ns)} and {MIN_BLOCKS} are needed; "
            "replay a longer window"
        )
    elif interval.effective < needed:
        reason = Reason.TOO_FEW_REQUESTS
        together = interval.effective < total
        worth = f"worth {interval.effective:.0f} independent ones as misses came together, "
        why = (
            f"{worth if together else ''}but showing {goal} takes at least {needed} even if all "
            "attain; replay a longer window"
        )
    elif interval.lower >= objective:
        kind, reason = VerdictKind.PASS, Reason.ATTAINED
        why = f"at least {_percent(interval.lower)} {sure}, and {goal} was promised"
    else:
        why = (
            f"between {_percent(interval.lower)} and {_percent(interval.upper)}, each bound "
            f"{sure}, and {goal} lies between; replay a longer window, or repeat the run"
        )
    return ClassVerdict(name=evidence.name, kind=kind, reason=reason, sentence=f"{what}, {why}")


def _validity_problems(
    verdicts: Sequence[ClassVerdict], validity: ValidityEvidence
) -> Iterator[tuple[Reason, str]]:
    """Everything that makes the run say more about its client than about the service."""
    if validity.incomplete:
        yield Reason.INCOMPLETE, f"it is incomplete, {validity.incomplete}"
    if validity.unsent:
        yield Reason.UNSENT_ROWS, f"{validity.unsent} rows were never sent"
    if validity.lag_p99_ns is not None and validity.lag_p99_ns > validity.lag_limit_ns:
        lag, limit = format_duration(validity.lag_p99_ns), format_duration(validity.lag_limit_ns)
        yield Reason.CLIENT_LAG, f"the client sent late, p99 {lag} where {limit} is allowed"
    otherwise = {v.name: v for v in _judge_classes(validity.without_lag)}
    for verdict in verdicts:
        other = otherwise.get(verdict.name)
        if other is not None and other.kind is not verdict.kind:
            change = f"{verdict.name} would be {other.kind}, not {verdict.kind}"
            yield Reason.CLIENT_LAG_DECIDES, f"without the client's own lag {change}"


def _percent(share: float) -> str:
    """Two decimals, cut off: a bound that misses an objective never looks as if it met it."""
    return f"{int(share * 10_000) / 100:.2f}%"
