"""Count the requests of a run as they end, in bounded memory.

The counts are those of the finished run's report, except that latencies and send lags are
histograms, whose quantiles are within 1 %, and that requests in flight are sampled.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_core.histogram import DurationHistogram
from goodput_core.quantiles import P99, quantile
from goodput_core.slo.judging import MissReason
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.verdict import Reason, Verdict, VerdictKind, decide
from goodput_core.units import NS_PER_MS, NS_PER_S, NS_PER_US
from goodput_replay.report.timeline import ClassTimeline, Timeline, interval_edges
from goodput_replay.runs.slo import SLOClasses
from goodput_replay.statistics.evidence import EvidenceTally, RunEvidence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from goodput_core.slo.attainment import SecondCounts
    from goodput_core.slo.evidence import ValidityEvidence

__all__ = [
    "LINE_EVERY_NS",
    "MAX_CLASSES",
    "MIN_CLIENT_REQUESTS",
    "LiveTally",
    "LiveWindow",
    "RunProgress",
    "RunSoFar",
]

LINE_EVERY_NS: Final = 10 * NS_PER_S
"""Interval of the lines that describe a run if stderr is not a terminal."""
MAX_CLASSES: Final = 24
"""Maximum number of classes that are counted separately; others count as one class."""
_OTHERS: Final = "other classes"
_MAX_ERRORS: Final = 100
_SHOWN_ERRORS: Final = 5
# Length that is divided into intervals at first if the end of the run is not known.
_FIRST_LENGTH_S: Final = 120
MIN_CLIENT_REQUESTS: Final = 100
"""Ended requests from which the client is judged: of fewer, the p99 of the lag is the maximum."""
_NOT_ENOUGH: Final = frozenset(
    {
        Reason.NO_ROWS,
        Reason.TOO_FEW_BLOCKS,
        Reason.TOO_FEW_REQUESTS,
        Reason.INTERVAL_SPANS_OBJECTIVE,
    }
)
_Error = tuple[str, int | None, str]
_NO_ERRORS: Final = frozenset({Outcome.OK, Outcome.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWindow:
    """The judged window of a run, known before it starts.

    Args:
        slo: SLO classes for judging.
        start_ns: start of the window, nanoseconds since the run's time zero.
        length_ns: length of the window; None if the responses determine it.
        confidence: one-sided confidence of each bound of an attainment.
        closed_loop: True if clients send each request when an earlier response has ended.
        shard: the shard that is sent, as in "2 of 4"; empty if all requests are sent.
        tightest_ttft_ns: smallest TTFT target of the judged requests; None without TTFT targets.
    """

    slo: SLOClasses
    start_ns: int
    length_ns: int | None
    confidence: float
    closed_loop: bool = False
    shard: str = ""
    tightest_ttft_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Progress of a run.

    Args:
        elapsed_ns: time since the run's time zero; negative before it.
        duration_ns: time from the run's time zero to the last arrival; None if the arrivals are not
            known in advance.
        planned: requests of the complete run.
        sent: requests sent.
        in_flight: requests that were sent and have not ended.
        loop_lag_p99_ns, loop_lag_max_ns: delay of the sending event loop.
    """

    elapsed_ns: int
    duration_ns: int | None
    planned: int
    sent: int
    in_flight: int
    loop_lag_p99_ns: int = 0
    loop_lag_max_ns: int = 0

    @property
    def done(self) -> int:
        """Requests that have ended."""
        return self.sent - self.in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSoFar:
    """A run until now.

    Args:
        progress: progress of the run.
        evidence: evidence of the requests that ended.
        verdict: the verdict if the run had ended now, in words for a run that goes on; requests in
            flight are not judged.
        early: True if too few requests have ended to judge the client.
        lag: send lag of the sent requests.
        latencies: latencies by measure and class: `ttft`, `ttft_from_send`, `tpot`, `tbt`, `e2e`.
        input_tokens, output_tokens: tokens by class.
        errors: the most frequent errors: outcome, HTTP status and detail, and their counts;
            warm-up requests included.
        other_errors: requests with an error that `errors` does not list.
    """

    progress: RunProgress
    evidence: RunEvidence
    verdict: Verdict
    early: bool
    lag: DurationHistogram
    latencies: Mapping[tuple[str, str], DurationHistogram]
    input_tokens: Mapping[str, int]
    output_tokens: Mapping[str, int]
    errors: tuple[tuple[_Error, int], ...]
    other_errors: int

    @property
    def validity(self) -> ValidityEvidence:
        """Evidence about the client."""
        return self.evidence.validity


class LiveTally:
    """Counts of one run.

    Args:
        window: the judged window.
    """

    def __init__(self, window: LiveWindow) -> None:
        self._window = window
        self._evidence = EvidenceTally(
            classes=window.slo.classes,
            window_ns=window.length_ns,
            window_start_ns=window.start_ns,
            tightest_ttft_ns=window.tightest_ttft_ns,
            exact_lag=False,
        )
        self._names = set(window.slo.by_name())
        self._errors: Counter[_Error] = Counter()
        self._failed = 0
        self._input_tokens: Counter[str] = Counter()
        self._output_tokens: Counter[str] = Counter()
        self._latencies: defaultdict[tuple[str, str], DurationHistogram] = defaultdict(
            DurationHistogram
        )
        # None if the end is not known yet.
        self._length_ns = window.length_ns
        known_s = None if self._length_ns is None else self._length_ns / NS_PER_S
        self._edges_s = interval_edges(known_s or _FIRST_LENGTH_S)
        count = len(self._edges_s) - 1
        self._offered = [0] * count
        self._served = [0] * count
        self._in_flight = [0] * count
        self._misses: dict[MissReason, list[int]] = {}
        self._lags: dict[int, DurationHistogram] = {}

    @property
    def window(self) -> LiveWindow:
        """The judged window."""
        return self._window

    @property
    def latencies(self) -> Mapping[tuple[str, str], DurationHistogram]:
        """Latencies as in `RunSoFar`."""
        return self._latencies

    def add(self, record: RequestRecord, *, warmup: bool = False) -> None:
        """Count one request that ended."""
        if record.outcome not in _NO_ERRORS:
            error = (record.outcome.value, record.status, record.detail)
            self._failed += 1
            if error in self._errors or len(self._errors) < _MAX_ERRORS:
                self._errors[error] += 1
        if warmup:
            return
        name = self._class_name(record.slo_class)
        if name != record.slo_class:
            record = replace(record, slo_class=name)
        judgement = self._evidence.add(record)
        self._input_tokens[name] += record.input_tokens
        self._output_tokens[name] += record.output_tokens
        for measure, value_ns in _latencies(record):
            self._latencies[measure, name].add(value_ns)
        self._reach(record.scheduled_ns)
        interval = self._interval(record.scheduled_ns)
        self._offered[interval] += 1
        if record.lag_ns is not None:
            self._lags.setdefault(interval, DurationHistogram()).add(record.lag_ns)
        if judgement.reasons:
            counts = self._misses.setdefault(judgement.reasons[0], [0] * len(self._offered))
            counts[interval] += 1
        if record.outcome is Outcome.OK and record.end_ns is not None:
            end_ns = record.end_ns - self._window.start_ns
            self._reach(record.end_ns)
            if self._length_ns is None or end_ns <= self._length_ns:
                self._served[self._interval(record.end_ns)] += 1

    def sample(self, progress: RunProgress) -> None:
        """Note the requests in flight at this time, and the end of the window once it is known.

        Without a closed loop, the window ends with the last scheduled request.
        """
        self._reach(progress.elapsed_ns)
        passed_ns = progress.elapsed_ns - self._window.start_ns
        if passed_ns >= 0 and (self._length_ns is None or passed_ns < self._length_ns):
            interval = self._interval(progress.elapsed_ns)
            self._in_flight[interval] = max(self._in_flight[interval], progress.in_flight)
        all_sent = progress.sent >= progress.planned
        if self._length_ns is None and all_sent and not self._window.closed_loop:
            self._length_ns = self.elapsed_ns(progress)

    def so_far(self, progress: RunProgress) -> RunSoFar:
        """Return the run until now."""
        window = self._window
        evidence = self._evidence.evidence(
            confidence=window.confidence,
            outage_s=window.slo.outage_s,
            closed_loop=window.closed_loop,
            shard=window.shard,
            until_ns=self.elapsed_ns(progress),
        )
        early = progress.done < progress.planned and evidence.overall.rows < MIN_CLIENT_REQUESTS
        errors = tuple(self._errors.most_common(_SHOWN_ERRORS))
        return RunSoFar(
            progress=progress,
            evidence=evidence,
            verdict=_decide_so_far(evidence, progress, early=early),
            early=early,
            lag=self._evidence.lag,
            latencies=self._latencies,
            input_tokens=self._input_tokens,
            output_tokens=self._output_tokens,
            errors=errors,
            other_errors=self._failed - sum(count for _, count in errors),
        )

    def elapsed_ns(self, progress: RunProgress) -> int:
        """Return the length of the part of the window that has passed, at least one second."""
        passed_ns = max(NS_PER_S, progress.elapsed_ns - self._window.start_ns)
        return passed_ns if self._length_ns is None else min(passed_ns, self._length_ns)

    def axis_s(self, progress: RunProgress) -> float:
        """Return the length of the time axis: the window, or the part that has passed."""
        if self._window.length_ns is not None:
            return self._window.length_ns / NS_PER_S
        return -(-self.elapsed_ns(progress) // NS_PER_S)

    def seconds(self, name: str, progress: RunProgress) -> SecondCounts:
        """Return the judged requests of a class by second of the window until now."""
        return self._evidence.seconds(name, -(-self.elapsed_ns(progress) // NS_PER_S))

    def timeline(self, progress: RunProgress) -> Timeline:
        """Return the part of the window that has passed, by interval."""
        self._reach(progress.elapsed_ns)
        elapsed_s = self.elapsed_ns(progress) / NS_PER_S
        begun = max(1, int(np.searchsorted(self._edges_s[:-1], elapsed_s)))
        end_s = min(elapsed_s, self._edges_s[begun])
        shown = begun
        if begun > 1 and 2 * (end_s - self._edges_s[begun - 1]) < self._edges_s[1]:
            shown -= 1  # a rest of less than half an interval is a part of the one before
        edges_s = np.append(self._edges_s[:shown], end_s)
        starts = edges_s[:-1].astype(np.int64)

        def joined(counts: Sequence[int], join: np.ufunc = np.add) -> NDArray[np.int64]:
            values: NDArray[np.int64] = join.reduceat(np.array(counts[:begun]), np.arange(shown))
            return values

        lags_ms = np.full((2, shown), np.nan)
        for interval in range(shown):
            lags = DurationHistogram()
            for part in range(interval, begun if interval == shown - 1 else interval + 1):
                if part in self._lags:
                    lags.merge(self._lags[part])
            if lags.count:
                lags_ms[0, interval] = lags.quantile_ns(0.5) / NS_PER_MS
                lags_ms[1, interval] = lags.max_ns / NS_PER_MS
        classes = []
        for counts in self._evidence.tally.by_class():
            seconds = self.seconds(counts.name, progress)
            good, total = (
                np.add.reduceat(np.array(one, dtype=np.int64), starts)
                for one in (seconds.good, seconds.total)
            )
            classes.append(ClassTimeline(name=counts.name, good=good, total=total))
        return Timeline(
            edges_s=edges_s,
            widths_s=np.diff(edges_s),
            classes=tuple(classes),
            offered=joined(self._offered),
            served=joined(self._served),
            in_flight=joined(self._in_flight, np.maximum),
            misses={r: joined(self._misses[r]) for r in MissReason if r in self._misses},
            lag_p50_ms=lags_ms[0],
            lag_max_ms=lags_ms[1],
        )

    def _class_name(self, name: str) -> str:
        if name in self._names:
            return name
        if len(self._names) < MAX_CLASSES:
            self._names.add(name)
            return name
        return _OTHERS

    def _reach(self, at_ns: int) -> None:
        """If the end of the window is not known, double the intervals until they contain a time."""
        since_s = (at_ns - self._window.start_ns) / NS_PER_S
        while self._length_ns is None and since_s >= self._edges_s[-1]:
            self._edges_s = 2 * self._edges_s
            for sums in (self._offered, self._served, *self._misses.values()):
                _fold(sums, operator.add)
            _fold(self._in_flight, max)
            lags, self._lags = self._lags, {}
            for interval, histogram in lags.items():
                self._lags.setdefault(interval // 2, DurationHistogram()).merge(histogram)

    def _interval(self, at_ns: int) -> int:
        """Return the interval of a time since the run's time zero."""
        since_s = (at_ns - self._window.start_ns) / NS_PER_S
        index = int(np.searchsorted(self._edges_s, since_s, side="right")) - 1
        return min(max(index, 0), len(self._offered) - 1)


def _decide_so_far(evidence: RunEvidence, progress: RunProgress, *, early: bool) -> Verdict:
    """Return the verdict so far.

    While the run goes on, the first requests alone do not make it INVALID, unless some were not
    sent.
    """
    validity = evidence.validity
    verdict = decide(evidence.classes, validity)
    if progress.done >= progress.planned:
        return verdict
    if verdict.kind is VerdictKind.INVALID and early and not validity.unsent:
        valid = replace(
            validity,
            lag_p99_ns=None,
            client_errors=0,
            never_connected=0,
            without_lag=(),
            without_client_errors=(),
            if_conforming=(),
            undisturbed=(),
        )
        verdict = decide(evidence.classes, valid)
        if not (validity.closed_loop or validity.shard):
            rows = f"{evidence.overall.rows} requests have ended"
            verdict = replace(
                verdict,
                kind=VerdictKind.INCONCLUSIVE,
                reason=Reason.TOO_FEW_REQUESTS,
                sentence=f"Not enough yet: {rows}, and the client is judged from "
                f"{MIN_CLIENT_REQUESTS}, {MIN_CLIENT_REQUESTS - evidence.overall.rows} more.",
                classes=(),
            )
    elif verdict.kind is VerdictKind.INCONCLUSIVE and verdict.reason in _NOT_ENOUGH:
        open_classes = (c.sentence for c in verdict.classes if c.kind is verdict.kind)
        sentence = "; ".join(open_classes) or "no request of a class with an objective has ended"
        verdict = replace(verdict, sentence=f"Not enough yet: {sentence}.")
    return verdict


def _fold(counts: list[int], join: Callable[[int, int], int]) -> None:
    """Join each interval with the next one; the intervals after them are empty."""
    joined = [join(*pair) for pair in zip(counts[::2], counts[1::2], strict=True)]
    counts[:] = [*joined, *([0] * len(joined))]


def _latencies(record: RequestRecord) -> Iterator[tuple[str, int]]:
    values = {
        "ttft": record.ttft_ns,
        "ttft_from_send": record.ttft_from_send_ns,
        "tpot": record.tpot_ns,
        "tbt": quantile(record.gaps_us, P99) * NS_PER_US if record.gaps_us else None,
        "e2e": record.e2e_ns,
    }
    for measure, value_ns in values.items():
        if value_ns is not None:
            yield measure, int(value_ns)
