"""Judging one request: met or missed targets, and the reasons for a miss.

Live displays, reports, verdicts, routers and control laws all use `judge`, so they cannot disagree.
`judge` uses one record and one set of targets. Objectives, windows and statistics are in other
modules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from goodput_core.quantiles import P99, quantile
from goodput_core.slo.conformance import Deviation
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.stalls import NO_STALLS, Stalls
from goodput_core.units import NS_PER_US

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from goodput_core.slo.targets import SLOClass, Targets

__all__ = [
    "Judgement",
    "JudgementKind",
    "MissReason",
    "is_cut_by_client",
    "judge",
    "judge_favourably",
    "targets_for",
    "without_lag",
]


class JudgementKind(StrEnum):
    """The result of judging a request."""

    ATTAINED = "attained"
    """Every target was met. Counts in the numerator and the denominator."""
    MISSED = "missed"
    """At least one target was missed. Counts in the denominator only."""
    EXCLUDED = "excluded"
    """The request was cancelled and had not missed its TTFT target. Counted separately."""
    UNJUDGED = "unjudged"
    """There is no target, or the record does not suffice to judge. Counted separately."""


class MissReason(StrEnum):
    """Reason for a miss. A finished request can have several reasons."""

    TTFT = "ttft"
    TPOT = "tpot"
    TBT = "tbt"
    E2E = "e2e"
    SHORT = "short"
    """The output has fewer tokens than the replayed row."""
    SHED = "shed"
    ERROR = "error"
    TIMEOUT = "timeout"
    UNSENT = "unsent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The judgement of one request.

    Args:
        kind: the result.
        reasons: reasons for a miss, in the order of `MissReason`; empty unless it missed.
    """

    kind: JudgementKind
    reasons: tuple[MissReason, ...] = ()


_ATTAINED: Final = Judgement(kind=JudgementKind.ATTAINED)
_EXCLUDED: Final = Judgement(kind=JudgementKind.EXCLUDED)
_UNJUDGED: Final = Judgement(kind=JudgementKind.UNJUDGED)
# Deviations after which nothing can be said about the latency of the requested response.
_INCOMPARABLE: Final = frozenset(
    {
        Deviation.EXCEEDED_LIMIT,
        Deviation.UNREADABLE_OUTPUT,
        Deviation.NOT_STREAMED,
        Deviation.COMPRESSED,
    }
)
_ENDED: Final = frozenset({Deviation.ENDED_EARLY, Deviation.NO_FINISH_REASON})
# Deviations of an output that may be complete although it counts as an error.
_UNEXPLAINED_END: Final = frozenset({Deviation.UNKNOWN_FINISH_REASON, Deviation.NO_FINISH_REASON})
_FAILURES: Final = {
    Outcome.SHED: MissReason.SHED,
    Outcome.ERROR: MissReason.ERROR,
    Outcome.TIMEOUT: MissReason.TIMEOUT,
    Outcome.UNSENT: MissReason.UNSENT,
}


def targets_for(record: RequestRecord, classes: Mapping[str, SLOClass]) -> Targets:
    """Return the targets of a request: those of its class, overridden by its row's own.

    A class that is not in `classes` has no targets.
    """
    slo_class = classes.get(record.slo_class)
    return record.targets if slo_class is None else slo_class.targets.overridden_by(record.targets)


def judge(record: RequestRecord, targets: Targets) -> Judgement:
    """Judge one request against its targets; a target is met when the measure is ≤ the bound.

    - No targets: unjudged, regardless of the outcome.
    - `shed`, `error`, `timeout`, `unsent`: missed, with that single reason.
    - `cancelled`: excluded, unless the TTFT target had passed without a token before the
      cancellation.
    - An output of one token has no TPOT and no gaps, so it is judged by the other targets. An
      output without tokens misses its TTFT target.
    - An output with fewer tokens than pinned: missed (`short`), in addition to any other reason.
    - If all tokens arrived at one instant, in one event, there is no gap that could exceed the TBT
      target.
    - A TBT target without recorded gaps and without `tbt_p99_us`: unjudged otherwise, unless
      another target was missed.
    """
    if targets.empty:
        return _UNJUDGED
    if record.outcome is Outcome.CANCELLED:
        return _judge_cancelled(record, targets)
    failure = _FAILURES.get(record.outcome)
    if failure is not None:
        return Judgement(kind=JudgementKind.MISSED, reasons=(failure,))
    reasons = tuple(_missed_targets(record, targets))
    if reasons:
        return Judgement(kind=JudgementKind.MISSED, reasons=reasons)
    if targets.tbt_p99_ns is not None and _lacks_gaps(record):
        return _UNJUDGED
    return _ATTAINED


def judge_favourably(record: RequestRecord, targets: Targets) -> Judgement:
    """Judge one request, and decide every question that its deviations raise in its favour.

    - An output with fewer tokens than pinned is not missed for that.
    - If the number of output tokens is uncertain, it is the largest possible one.
    - A response with an unknown finish reason did not fail, and neither did one with all tokens
      that has no finish reason.
    - A response that exceeds its token limit, whose output cannot be read, or that is not streamed
      or is compressed attains, and so does one that ended before its first token although the
      request forbids it.
    - A response that the time limit of the client ended before it had missed a target attains.

    `judge` decides the same questions against the request. If both lead to the same verdict, the
    deviations do not matter for it.
    """
    deviations = record.deviations
    if is_cut_by_client(record, targets):
        return _ATTAINED
    if not deviations or targets.empty:
        return judge(record, targets)
    no_output = record.first_token_ns is None and not _ENDED.isdisjoint(deviations)
    if no_output or not _INCOMPARABLE.isdisjoint(deviations):
        return _ATTAINED
    if record.outcome is Outcome.ERROR and not _UNEXPLAINED_END.isdisjoint(deviations):
        record = replace(record, outcome=Outcome.OK)
    tokens = (
        record.output_tokens if record.most_output_tokens is None else record.most_output_tokens
    )
    return judge(replace(record, output_tokens=tokens, pinned_output_tokens=None), targets)


def is_cut_by_client(record: RequestRecord, targets: Targets) -> bool:
    """Return True if the client's time limit ended a response that had missed no target yet.

    Such a request is a miss, but a longer time limit could have shown that it attains.
    """
    if record.outcome is not Outcome.TIMEOUT or targets.empty or record.end_ns is None:
        return False
    first_ns, end_ns = record.first_token_ns, record.end_ns
    ttft_ns = (end_ns if first_ns is None else first_ns) - record.scheduled_ns
    if targets.ttft_ns is not None and ttft_ns > targets.ttft_ns:
        return False
    if targets.e2e_ns is not None and end_ns - record.scheduled_ns > targets.e2e_ns:
        return False
    if first_ns is None:
        return True
    # The next token, or the last one if the length is pinned, would have come later than the limit.
    tokens = record.pinned_output_tokens or 1 + max(
        record.output_tokens, record.most_output_tokens or 0
    )
    if targets.tpot_ns is not None and end_ns - first_ns > targets.tpot_ns * (tokens - 1):
        return False
    tbt_ns = _tbt_ns(record)
    return targets.tbt_p99_ns is None or tbt_ns is None or tbt_ns <= targets.tbt_p99_ns


def without_lag(record: RequestRecord, stalls: Stalls = NO_STALLS) -> RequestRecord:
    """Return the same request as if the client had sent it on time and had never stalled.

    Its scheduled arrival becomes the actual send time, and the stalls after it are subtracted from
    every later time. If a request misses its targets with the lag of the client and meets them
    without it, the client caused the miss. Without recorded gaps, the longest stall is subtracted
    from their p99.

    Args:
        record: the request.
        stalls: stalls of the client, on the clock of the record.
    """
    lag_ns = max(0, record.lag_ns or 0)
    start_ns = record.scheduled_ns + lag_ns
    end_ns = start_ns if record.end_ns is None else record.end_ns
    if not stalls.between_ns(start_ns, end_ns):
        stalls = NO_STALLS
        if not lag_ns:
            return record
    cancel_ns = record.cancel_after_ns
    if cancel_ns is not None:
        cancel_ns = max(0, cancel_ns - lag_ns)

    def shifted(at_ns: int | None) -> int | None:
        return None if at_ns is None else at_ns - stalls.between_ns(start_ns, at_ns)

    return replace(
        record,
        scheduled_ns=start_ns,
        first_token_ns=shifted(record.first_token_ns),
        last_token_ns=shifted(record.last_token_ns),
        end_ns=shifted(record.end_ns),
        cancel_after_ns=cancel_ns,
        **_gaps_without(record, stalls),
    )


def _gaps_without(record: RequestRecord, stalls: Stalls) -> dict[str, Any]:
    """Return the gaps of a request, or their p99, without the stalls; empty if unchanged."""
    first_ns, last_ns = record.first_token_ns, record.last_token_ns
    if first_ns is None or last_ns is None or not stalls.between_ns(first_ns, last_ns):
        return {}
    if not record.gaps_us:
        longest_us = stalls.longest_between_ns(first_ns, last_ns) // NS_PER_US
        p99_us = record.tbt_p99_us
        return {"tbt_p99_us": None if p99_us is None else max(0, p99_us - longest_us)}
    gaps_us, at_ns = [], first_ns
    for gap_us in record.gaps_us:
        next_ns = at_ns + gap_us * NS_PER_US
        gaps_us.append(gap_us - stalls.between_ns(at_ns, next_ns) // NS_PER_US)
        at_ns = next_ns
    return {"gaps_us": gaps_us}


def _judge_cancelled(record: RequestRecord, targets: Targets) -> Judgement:
    if targets.ttft_ns is None:
        return _EXCLUDED
    waited_ns = record.ttft_ns
    if waited_ns is None and record.end_ns is not None:
        waited_ns = record.end_ns - record.scheduled_ns
    elif waited_ns is None:
        waited_ns = record.cancel_after_ns
    if waited_ns is None or waited_ns <= targets.ttft_ns:
        return _EXCLUDED
    return Judgement(kind=JudgementKind.MISSED, reasons=(MissReason.TTFT,))


def _missed_targets(record: RequestRecord, targets: Targets) -> Iterator[MissReason]:
    """Yield the targets that a finished request missed."""
    if targets.ttft_ns is not None:
        ttft_ns = record.ttft_ns
        if ttft_ns is None or ttft_ns > targets.ttft_ns:
            yield MissReason.TTFT
    if targets.tpot_ns is not None and _misses_tpot(record, targets.tpot_ns):
        yield MissReason.TPOT
    if targets.tbt_p99_ns is not None:
        tbt_ns = _tbt_ns(record)
        if tbt_ns is not None and tbt_ns > targets.tbt_p99_ns:
            yield MissReason.TBT
    if targets.e2e_ns is not None:
        e2e_ns = record.e2e_ns
        if e2e_ns is None or e2e_ns > targets.e2e_ns:
            yield MissReason.E2E
    pinned = record.pinned_output_tokens
    if pinned is not None and record.output_tokens < pinned:
        yield MissReason.SHORT


def _misses_tpot(record: RequestRecord, bound_ns: int) -> bool:
    """Return True if (last − first) / (n − 1) exceeds the bound, compared in integers."""
    if record.first_token_ns is None or record.last_token_ns is None or record.output_tokens < 2:
        return False
    return record.last_token_ns - record.first_token_ns > bound_ns * (record.output_tokens - 1)


def _lacks_gaps(record: RequestRecord) -> bool:
    """Return True if an output has gaps between its tokens, but none were recorded."""
    if record.output_tokens < 2 or _tbt_ns(record) is not None:
        return False
    return record.first_token_ns is None or record.first_token_ns != record.last_token_ns


def _tbt_ns(record: RequestRecord) -> int | None:
    """Return the p99 of the request's own gaps; None if no gaps were recorded."""
    if record.gaps_us:
        return quantile(record.gaps_us, P99) * NS_PER_US
    return None if record.tbt_p99_us is None else record.tbt_p99_us * NS_PER_US
