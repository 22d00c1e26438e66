"""One outcome per client request: the source of measured attainment.

`OutcomeCounts` judges a request when it ends, and counts its outcome.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from goodput_core.contract import (
    BUCKETS_E2E_S,
    BUCKETS_TPOT_S,
    BUCKETS_TTFT_S,
    CLIENT_OUTCOMES,
    LABEL_LLMSERVICE,
    LABEL_OUTCOME,
    LABEL_PROMISE,
    LABEL_REASON,
    LABEL_RESULT,
    LABEL_ROLE,
    LABEL_SLO_CLASS,
    LABEL_STATUS,
    METRIC_E2E,
    METRIC_MISSES,
    METRIC_PROMISES,
    METRIC_REQUESTS,
    METRIC_ROUTER_ARRIVALS,
    METRIC_ROUTER_CLIENT_ERRORS,
    METRIC_ROUTER_IN_FLIGHT,
    METRIC_ROUTER_OUTPUT_TOKENS,
    METRIC_ROUTER_PROMPT_TOKENS,
    METRIC_ROUTER_RETRIES,
    METRIC_TBT,
    METRIC_TPOT,
    METRIC_TTFT,
    MISSED_TARGETS,
    PROMISE_RESULTS,
    PROMISES,
    ROLE_ROUTER,
)
from goodput_core.control import WindowTally
from goodput_core.slo.judging import JudgementKind, judge
from goodput_core.slo.record import Outcome
from goodput_core.slo.window import SecondRing
from goodput_core.units import NS_PER_S
from goodput_engine.router.upstream_client import RetryReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client import CollectorRegistry

    from goodput_core.control import TargetCounts
    from goodput_core.slo.record import RequestRecord
    from goodput_core.slo.window import RecentSeconds
    from goodput_engine.openai.sse import TokenObserver
    from goodput_engine.router.proxied_request import ProxiedRequest

__all__ = ["OutcomeCounts"]

_FAILURES: Final = ("shed", "error", "timeout")
_NOT_JUDGED: Final = frozenset({"cancelled", JudgementKind.UNJUDGED.value})


class _LatencyHistogram:
    """A histogram of latencies. Counting costs less here than in prometheus_client's.

    Args:
        buckets_s: upper bounds of the buckets in seconds, without the infinite one.
    """

    __slots__ = ("_bounds_ns", "_bounds_s", "_counts", "_sum_ns")

    def __init__(self, buckets_s: tuple[float, ...]) -> None:
        self._bounds_s = [float(bound) for bound in buckets_s]
        self._bounds_ns = [bound * NS_PER_S for bound in buckets_s]
        self._counts = [0] * (len(buckets_s) + 1)
        self._sum_ns = 0.0

    def add(self, latency_ns: float) -> None:
        """Count a latency."""
        self._counts[bisect_left(self._bounds_ns, latency_ns)] += 1
        self._sum_ns += latency_ns

    def add_gaps(self, observer: TokenObserver) -> None:
        """Count the times between the tokens of a stream, whose buckets must be the same."""
        if observer.first_ns is not None and observer.last_ns is not None:
            self._counts = [a + b for a, b in zip(self._counts, observer.gap_counts, strict=True)]
            self._sum_ns += observer.last_ns - observer.first_ns

    def export(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add the cumulative counts to a family."""
        bounds = [*map(str, self._bounds_s), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(labels, buckets=buckets, sum_value=self._sum_ns / NS_PER_S)


class _OutcomesOfClass:
    """The counts of one class."""

    __slots__ = (
        "e2e",
        "misses",
        "outcomes",
        "output_tokens",
        "prompt_tokens",
        "tbt",
        "tpot",
        "ttft",
    )

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(CLIENT_OUTCOMES, 0)
        self.misses = dict.fromkeys((*MISSED_TARGETS, *_FAILURES), 0)
        self.ttft = _LatencyHistogram(BUCKETS_TTFT_S)
        self.tpot = _LatencyHistogram(BUCKETS_TPOT_S)
        self.e2e = _LatencyHistogram(BUCKETS_E2E_S)
        # The buckets of `TokenObserver`.
        self.tbt = _LatencyHistogram(BUCKETS_TPOT_S)
        self.prompt_tokens = 0
        self.output_tokens = 0


class OutcomeCounts(Collector):
    """Counts of client requests by outcome and class: since the start, and for each second.

    The metrics are made when they are scraped, so that a request costs few operations.

    Args:
        registry: registry of the metrics.
        llmservice: the service's name.
        classes: names of the service's classes.
        began_ns: current time; the counts for each second start at it.

    Attributes:
        arrivals: number of received requests, client errors included.
        in_flight: number of requests that have neither an outcome nor a client error.
        idle: set while `in_flight` is 0.
        e2e_only: number of non-streamed responses without timings, judged only by their
            end-to-end time.
        retries: number of retries by reason.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        llmservice: str,
        classes: Iterable[str],
        began_ns: int = 0,
    ) -> None:
        self.llmservice: Final = llmservice
        self.arrivals = 0
        self.in_flight = 0
        self.idle: Final = asyncio.Event()
        self.idle.set()
        self.e2e_only = 0
        self.retries: Final[dict[str, int]] = {}
        self._client_errors: dict[int, int] = {}
        self._classes = {name: _OutcomesOfClass() for name in classes}
        self._seconds = SecondRing(began_ns // NS_PER_S)
        self._targets = WindowTally()
        registry.register(self)

    @property
    def client_errors(self) -> int:
        """Number of requests rejected because of a client error."""
        return sum(self._client_errors.values())

    def by_class(self) -> dict[str, dict[str, int]]:
        """Return the number of requests since the start, by class and outcome."""
        return {name: dict(entry.outcomes) for name, entry in self._classes.items()}

    def target_counts(self) -> dict[str, dict[str, TargetCounts]]:
        """Return the counts of judged targets since the start, by class, for the control laws."""
        return {w.name: {"ttft": w.ttft, "tpot": w.tpot} for w in self._targets.sums()}

    def seconds(self, since_s: int, now_ns: int) -> RecentSeconds:
        """Return the judged requests of each complete second, by class, starting at `since_s`."""
        return self._seconds.recent(since_s, now_ns // NS_PER_S)

    def begin(self) -> None:
        """Count the arrival of a client request."""
        self.arrivals += 1
        self.in_flight += 1
        self.idle.clear()

    def count_retry(self, reason: RetryReason) -> None:
        """Count a retry."""
        self.retries[reason.value] = self.retries.get(reason.value, 0) + 1

    def settle(self, request: ProxiedRequest, now_ns: int) -> str | None:
        """Judge a client request and count its outcome; call it once per request.

        Returns:
            The outcome; None after a client error.
        """
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()
        status = request.client_error
        if status is not None:
            self._client_errors[status] = self._client_errors.get(status, 0) + 1
            return None
        if not request.uploaded and request.outcome is Outcome.CANCELLED:
            # The client disconnected during its upload, to which no target applies.
            self._classes[request.slo.slo_class].outcomes["cancelled"] += 1
            return "cancelled"
        targets = request.measurable_targets
        if targets is not request.slo.targets:
            self.e2e_only += 1
        record = request.record(now_ns)
        counts = self._classes[record.slo_class]
        judgement = judge(record, targets)
        outcome = _outcome_of(record.outcome, judgement.kind)
        counts.outcomes[outcome] += 1
        for reason in (outcome,) if outcome in _FAILURES else judgement.reasons:
            counts.misses[reason] = counts.misses.get(reason, 0) + 1
        if outcome not in _NOT_JUDGED:
            attained = outcome == JudgementKind.ATTAINED.value
            second = now_ns // NS_PER_S
            self._seconds.add(record.slo_class, second, good=int(attained), total=1)
        self._targets.add(record, targets, judgement)
        _observe(counts, record)
        if request.observer is not None:
            counts.tbt.add_gaps(request.observer)
        prompt_tokens, output_tokens = request.reported_tokens
        counts.prompt_tokens += prompt_tokens
        counts.output_tokens += output_tokens
        return outcome

    def collect(self) -> Iterator[Metric]:
        """Part of prometheus_client's `Collector`."""
        service = self.llmservice
        of_class = (LABEL_LLMSERVICE, LABEL_SLO_CLASS)
        requests = CounterMetricFamily(
            METRIC_REQUESTS,
            "Client requests by outcome; each is counted once.",
            labels=(*of_class, LABEL_OUTCOME),
        )
        misses = CounterMetricFamily(
            METRIC_MISSES,
            "Missed requests by reason; a request that missed several targets is counted once for "
            "each.",
            labels=(*of_class, LABEL_REASON),
        )
        ttft = HistogramMetricFamily(
            METRIC_TTFT,
            "Time from the end of a request's upload to its first token.",
            labels=of_class,
        )
        tpot = HistogramMetricFamily(
            METRIC_TPOT, "Mean time per token after the first.", labels=of_class
        )
        e2e = HistogramMetricFamily(
            METRIC_E2E,
            "Time from the end of a request's upload to the end of a complete response.",
            labels=of_class,
        )
        tbt = HistogramMetricFamily(
            METRIC_TBT, "Time between two tokens of a streamed response.", labels=of_class
        )
        prompt_tokens = CounterMetricFamily(
            METRIC_ROUTER_PROMPT_TOKENS,
            "Prompt tokens, of responses that report them: those that are not streamed, and "
            "streams with `usage`.",
            labels=of_class,
        )
        output_tokens = CounterMetricFamily(
            METRIC_ROUTER_OUTPUT_TOKENS,
            "Output tokens of streams, and of other responses that report them.",
            labels=of_class,
        )
        for name, counts in self._classes.items():
            for outcome, count in counts.outcomes.items():
                requests.add_metric((service, name, outcome), count)
            for reason, count in counts.misses.items():
                misses.add_metric((service, name, reason), count)
            counts.ttft.export(ttft, (service, name))
            counts.tpot.export(tpot, (service, name))
            counts.e2e.export(e2e, (service, name))
            counts.tbt.export(tbt, (service, name))
            prompt_tokens.add_metric((service, name), counts.prompt_tokens)
            output_tokens.add_metric((service, name), counts.output_tokens)
        yield from (requests, misses, ttft, tpot, e2e, tbt, prompt_tokens, output_tokens)
        in_flight = GaugeMetricFamily(
            METRIC_ROUTER_IN_FLIGHT,
            "Client requests that have no outcome yet.",
            labels=(LABEL_LLMSERVICE, LABEL_ROLE),
        )
        in_flight.add_metric((service, ROLE_ROUTER), self.in_flight)
        yield in_flight
        arrivals = CounterMetricFamily(
            METRIC_ROUTER_ARRIVALS,
            "Received client requests, regardless of their outcome.",
            labels=(LABEL_LLMSERVICE,),
        )
        arrivals.add_metric((service,), self.arrivals)
        yield arrivals
        retries = CounterMetricFamily(
            METRIC_ROUTER_RETRIES,
            "Requests sent a second time, by reason.",
            labels=(LABEL_LLMSERVICE, LABEL_REASON),
        )
        # `rate` does not see the first increment of a series that begins with it.
        for reason in RetryReason:
            retries.add_metric((service, reason.value), self.retries.get(reason.value, 0))
        yield retries
        client_errors = CounterMetricFamily(
            METRIC_ROUTER_CLIENT_ERRORS,
            "Requests rejected because of a client error; they have no outcome.",
            labels=(LABEL_LLMSERVICE, LABEL_STATUS),
        )
        for status, count in self._client_errors.items():
            client_errors.add_metric((service, str(status)), count)
        yield client_errors
        yield self._target_metrics()

    def _target_metrics(self) -> Metric:
        """Return the tally of targets.

        `kept` means met with at least a fifth to spare, unlike `TargetStatus.KEPT`.
        """
        family = CounterMetricFamily(
            METRIC_PROMISES,
            "Judged TTFT and TPOT targets by result.",
            labels=(LABEL_LLMSERVICE, LABEL_SLO_CLASS, LABEL_PROMISE, LABEL_RESULT),
        )
        for window in self._targets.sums():
            for target, counts in zip(PROMISES, (window.ttft, window.tpot), strict=True):
                kept = counts.judged - counts.missed - counts.close
                values = zip(PROMISE_RESULTS, (kept, counts.close, counts.missed), strict=True)
                for result, value in values:
                    labels = (self.llmservice, window.name, target, result)
                    family.add_metric(labels, value)
        return family


def _outcome_of(outcome: Outcome, kind: JudgementKind) -> str:
    if outcome in {Outcome.SHED, Outcome.ERROR, Outcome.TIMEOUT}:
        return outcome.value
    return "cancelled" if kind is JudgementKind.EXCLUDED else kind.value


def _observe(counts: _OutcomesOfClass, record: RequestRecord) -> None:
    if record.ttft_ns is not None:
        counts.ttft.add(record.ttft_ns)
    if record.tpot_ns is not None:
        counts.tpot.add(float(record.tpot_ns))
    if record.e2e_ns is not None:
        counts.e2e.add(record.e2e_ns)
