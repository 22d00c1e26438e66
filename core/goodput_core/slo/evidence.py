"""The evidence of a run or a rolling window: counts and bounds per class, and facts on the client.

Evidence is the input of the verdict rules in `verdict` and `gate`. It says what was measured, and
decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from goodput_core.slo.attainment import NO_MISSES, Attainment, MissCounts, SecondCounts
from goodput_core.slo.conformance import Deviation
from goodput_core.slo.intervals import (
    DEFAULT_CONFIDENCE,
    Interval,
    WindowEstimate,
    count_blocks,
)
from goodput_core.units import NS_PER_MS, NS_PER_S

__all__ = ["ClassEvidence", "ValidityEvidence", "class_evidence", "is_load_lacking"]

_MIN_LAG_LIMIT_NS: Final = 10 * NS_PER_MS
_MAX_LAG_LIMIT_NS: Final = 100 * NS_PER_MS
_LAG_DIVISOR: Final = 20  # 5 % of the tightest TTFT
_MIN_REQUESTS_PER_REJECTION: Final = 10


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
        misses: missed requests by reason.
        rows: all requests of the class, judged or not; 0 if that is not known.
        window_ns: the length of the window.
        busy_s: number of seconds of the window with a judged request.
        outage_ns: the longest outage that the bounds take into account
            (`slo.outageSeconds`).
        tolerated_outage_ns: the longest unobserved outage with which the lower bound still meets
            the objective.
        deciding_window_ns: length of a window that would probably decide about the objective; None
            if no window of a day would.
    """

    name: str
    objective: Fraction | None
    attainment: Attainment
    interval: Interval | None
    unjudged: int = 0
    misses: MissCounts = NO_MISSES
    rows: int = 0
    window_ns: int
    busy_s: int
    outage_ns: int = 0
    tolerated_outage_ns: int = 0
    deciding_window_ns: int | None = None

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
        requests: number of requests of the window that have a record.
        client_errors: number of these requests that the server rejected as invalid or redirected
            (`RequestRecord.client_error`), without those that a baseline answered.
        never_connected: number of requests for which no connection was opened, if none was opened
            in the whole run; otherwise 0.
        incomplete: reason why the run ended early, as the end of a sentence; empty if the run is
            complete.
        without_lag: evidence about the same classes, in the same order, computed as if each
            request had been sent on time, and the client had never stalled.
        without_client_errors: the same without the requests that `client_errors` counts.
        if_conforming: the same, with every question that a deviation of a response raises decided
            in the favour of the service.
        undisturbed: the same without all of these disturbances.
        deviations: number of judged responses with each deviation.
        closed_loop: True if clients sent each request when an earlier response had ended.
        shard: the shard that was sent, as in "2 of 4"; empty if all requests were sent.
        prompt_ratio: prompt tokens that the target counted, divided by those of the trace; None for
            prompts that were not counted, or that were token ids.
    """

    lag_p99_ns: int | None
    tightest_ttft_ns: int | None
    unsent: int
    requests: int = 0
    client_errors: int = 0
    never_connected: int = 0
    incomplete: str = ""
    without_lag: tuple[ClassEvidence, ...]
    without_client_errors: tuple[ClassEvidence, ...] = ()
    if_conforming: tuple[ClassEvidence, ...] = ()
    undisturbed: tuple[ClassEvidence, ...] = ()
    deviations: Mapping[Deviation, int] = field(default_factory=dict)
    closed_loop: bool = False
    shard: str = ""
    prompt_ratio: float | None = None

    @property
    def lag_limit_ns(self) -> int:
        """Limit of the p99 send lag: max(10 ms, min(5 % of the tightest TTFT, 100 ms))."""
        share_ns = (self.tightest_ttft_ns or 0) // _LAG_DIVISOR
        return max(_MIN_LAG_LIMIT_NS, min(share_ns, _MAX_LAG_LIMIT_NS))


def is_load_lacking(rejected: int, requests: int) -> bool:
    """Return True if so many requests were rejected as invalid that the load was another one.

    Args:
        rejected: requests that the server rejected as invalid or redirected.
        requests: all requests of the window.
    """
    return _MIN_REQUESTS_PER_REJECTION * rejected > requests


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
    misses: MissCounts = NO_MISSES,
    rows: int = 0,
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
        misses: missed requests by reason.
        rows: all requests of the class, judged or not; 0 if that is not known.
    """
    attainment = counts.attainment
    interval, tolerated_s, deciding_s = None, 0.0, None
    if attainment.total:
        estimate = WindowEstimate(counts, outage_s=outage_s, runs=runs)
        interval = estimate.interval(confidence, classes=classes)
        if objective is not None:
            tolerated_s = estimate.tolerated_outage_s(objective, confidence)
            deciding_s = estimate.deciding_window_s(objective, confidence, classes=classes)
    return ClassEvidence(
        name=name,
        objective=objective,
        attainment=attainment,
        interval=interval,
        unjudged=unjudged,
        misses=misses,
        rows=rows,
        window_ns=len(counts.total) * NS_PER_S,
        busy_s=sum(map(bool, counts.total)),
        outage_ns=outage_s * NS_PER_S,
        tolerated_outage_ns=int(tolerated_s * NS_PER_S),
        deciding_window_ns=None if deciding_s is None else round(deciding_s * NS_PER_S),
    )
