"""One outcome per client request: the source of measured attainment.

`OutcomeCounts` judges a request when it ends, and counts its outcome.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from goodput_core.contract import (
    BUCKETS_E2E_S,
    BUCKETS_TPOT_S,
    BUCKETS_TTFT_S,
    CLIENT_OUTCOMES,
    LABEL_LLMSERVICE,
    LABEL_OUTCOME,
    LABEL_PROMISE,
    LABEL_RESULT,
    LABEL_ROLE,
    LABEL_SLO_CLASS,
    LABEL_STATUS,
    METRIC_E2E,
    METRIC_PROMISES,
    METRIC_REQUESTS,
    METRIC_ROUTER_ARRIVALS,
    METRIC_ROUTER_CLIENT_ERRORS,
    METRIC_ROUTER_IN_FLIGHT,
    METRIC_ROUTER_RETRIES,
    METRIC_TPOT,
    METRIC_TTFT,
    PROMISE_RESULTS,
    PROMISES,
    ROLE_ROUTER,
)
from goodput_core.control import WindowTally
from goodput_core.slo.judging import JudgementKind, judge
from goodput_core.slo.record import Outcome
from goodput_core.slo.window import SecondRing
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from goodput_core.control import TargetCounts
    from goodput_core.slo.record import RequestRecord
    from goodput_core.slo.window import RecentSeconds
    from goodput_engine.router.proxied_request import ProxiedRequest
    from goodput_engine.router.upstream_client import RetryReason

__all__ = ["OutcomeCounts"]

_NOT_JUDGED: Final = frozenset({"cancelled", JudgementKind.UNJUDGED.value})


class _TargetCollector(Collector):
    """Exports the tally of targets when metrics are scraped, so it adds no cost per request.

    `kept` means met with at least a fifth to spare, unlike `TargetStatus.KEPT`.
    """

    def __init__(self, llmservice: str, tally: WindowTally) -> None:
        self._llmservice = llmservice
        self._tally = tally

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            METRIC_PROMISES,
            "Judged TTFT and TPOT targets by result.",
            labels=(LABEL_LLMSERVICE, LABEL_SLO_CLASS, LABEL_PROMISE, LABEL_RESULT),
        )
        for window in self._tally.sums():
            for target, counts in zip(PROMISES, (window.ttft, window.tpot), strict=True):
                kept = counts.judged - counts.missed - counts.close
                values = zip(PROMISE_RESULTS, (kept, counts.close, counts.missed), strict=True)
                for result, value in values:
                    family.add_metric([self._llmservice, window.name, target, result], value)
        yield family


class _ClassMetrics:
    """The counters and histograms of one class, looked up only once."""

    __slots__ = ("counts", "e2e", "outcomes", "tpot", "ttft")

    def __init__(self, name: str, outcomes: OutcomeCounts) -> None:
        requests = outcomes.requests
        self.counts = dict.fromkeys(CLIENT_OUTCOMES, 0)
        self.outcomes = {o: requests.labels(outcomes.llmservice, name, o) for o in CLIENT_OUTCOMES}
        self.ttft = outcomes.ttft.labels(outcomes.llmservice, name)
        self.tpot = outcomes.tpot.labels(outcomes.llmservice, name)
        self.e2e = outcomes.e2e.labels(outcomes.llmservice, name)


class OutcomeCounts:
    """Counts of client requests by outcome and class: since the start, and for each second.

    Args:
        registry: registry of the metrics.
        llmservice: the service's name.
        classes: names of the service's classes.
        began_ns: current time; the counts for each second start at it.

    Attributes:
        arrivals: number of received requests, client errors included.
        in_flight: number of requests that have neither an outcome nor a client error.
        idle: set while `in_flight` is 0.
        client_errors: number of requests rejected because of a client error.
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
        labels = (LABEL_LLMSERVICE, LABEL_SLO_CLASS)
        self.llmservice: Final = llmservice
        self.requests: Final = Counter(
            METRIC_REQUESTS,
            "Client requests by outcome; each is counted once.",
            (*labels, LABEL_OUTCOME),
            registry=registry,
        )
        self.ttft: Final = _make_histogram(
            METRIC_TTFT,
            "Time from the end of a request's upload to its first token.",
            BUCKETS_TTFT_S,
            registry,
        )
        self.tpot: Final = _make_histogram(
            METRIC_TPOT, "Mean time per token after the first.", BUCKETS_TPOT_S, registry
        )
        self.e2e: Final = _make_histogram(
            METRIC_E2E,
            "Time from the end of a request's upload to the end of a complete response.",
            BUCKETS_E2E_S,
            registry,
        )
        self._in_flight = Gauge(
            METRIC_ROUTER_IN_FLIGHT,
            "Client requests that have no outcome yet.",
            (LABEL_LLMSERVICE, LABEL_ROLE),
            registry=registry,
        ).labels(llmservice, ROLE_ROUTER)
        self._arrivals = Counter(
            METRIC_ROUTER_ARRIVALS,
            "Received client requests, regardless of their outcome.",
            (LABEL_LLMSERVICE,),
            registry=registry,
        ).labels(llmservice)
        self._retries = Counter(
            METRIC_ROUTER_RETRIES,
            "Requests sent a second time, by reason.",
            (LABEL_LLMSERVICE, "reason"),
            registry=registry,
        )
        self._client_errors = Counter(
            METRIC_ROUTER_CLIENT_ERRORS,
            "Requests rejected because of a client error; they have no outcome.",
            (LABEL_LLMSERVICE, LABEL_STATUS),
            registry=registry,
        )
        self.arrivals = 0
        self.in_flight = 0
        self.idle: Final = asyncio.Event()
        self.idle.set()
        self.client_errors = 0
        self.e2e_only = 0
        self.retries: Final[dict[str, int]] = {}
        self._classes = {name: _ClassMetrics(name, self) for name in classes}
        self._seconds = SecondRing(began_ns // NS_PER_S)
        self._targets = WindowTally()
        registry.register(_TargetCollector(llmservice, self._targets))

    def by_class(self) -> dict[str, dict[str, int]]:
        """Return the number of requests since the start, by class and outcome."""
        return {name: dict(entry.counts) for name, entry in self._classes.items()}

    def target_counts(self) -> dict[str, dict[str, TargetCounts]]:
        """Return the counts of judged targets since the start, by class, for the control laws."""
        return {w.name: {"ttft": w.ttft, "tpot": w.tpot} for w in self._targets.sums()}

    def seconds(self, since_s: int, now_ns: int) -> RecentSeconds:
        """Return the judged requests of each complete second, by class, starting at `since_s`."""
        return self._seconds.recent(since_s, now_ns // NS_PER_S)

    def begin(self) -> None:
        """Count the arrival of a client request."""
        self.arrivals += 1
        self._arrivals.inc()
        self.in_flight += 1
        self.idle.clear()
        self._in_flight.inc()

    def count_retry(self, reason: RetryReason) -> None:
        """Count a retry."""
        self.retries[reason.value] = self.retries.get(reason.value, 0) + 1
        self._retries.labels(self.llmservice, reason.value).inc()

    def settle(self, request: ProxiedRequest, now_ns: int) -> None:
        """Judge a client request and count its outcome; call it once per request."""
        self.in_flight -= 1
        self._in_flight.dec()
        if not self.in_flight:
            self.idle.set()
        if request.client_error is not None:
            self.client_errors += 1
            self._client_errors.labels(self.llmservice, str(request.client_error)).inc()
            return
        if not request.uploaded and request.outcome is Outcome.CANCELLED:
            # The client disconnected during its upload, to which no target applies.
            entry = self._classes[request.slo.slo_class]
            entry.counts["cancelled"] += 1
            entry.outcomes["cancelled"].inc()
            return
        targets = request.measurable_targets
        if targets is not request.slo.targets:
            self.e2e_only += 1
        record = request.record(now_ns)
        entry = self._classes[record.slo_class]
        judgement = judge(record, targets)
        outcome = _outcome_of(record.outcome, judgement.kind)
        entry.counts[outcome] += 1
        entry.outcomes[outcome].inc()
        if outcome not in _NOT_JUDGED:
            attained = outcome == JudgementKind.ATTAINED.value
            second = now_ns // NS_PER_S
            self._seconds.add(record.slo_class, second, good=int(attained), total=1)
        self._targets.add(record, targets, judgement)
        _observe(entry, record)


def _outcome_of(outcome: Outcome, kind: JudgementKind) -> str:
    if outcome in {Outcome.SHED, Outcome.ERROR, Outcome.TIMEOUT}:
        return outcome.value
    return "cancelled" if kind is JudgementKind.EXCLUDED else kind.value


def _observe(entry: _ClassMetrics, record: RequestRecord) -> None:
    if record.ttft_ns is not None:
        entry.ttft.observe(record.ttft_ns / NS_PER_S)
    if record.tpot_ns is not None:
        entry.tpot.observe(record.tpot_ns / NS_PER_S)
    if record.e2e_ns is not None:
        entry.e2e.observe(record.e2e_ns / NS_PER_S)


def _make_histogram(
    name: str, help_: str, buckets: tuple[float, ...], registry: CollectorRegistry
) -> Histogram:
    labels = (LABEL_LLMSERVICE, LABEL_SLO_CLASS)
    return Histogram(name, help_, labels, buckets=buckets, registry=registry)
