"""Serve the series of a run in progress to a Prometheus server.

The page is made from the counts of the observing process when it is requested, so it adds nothing
to the sending process. Counters start at 0 with the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from goodput_core.contract import (
    BUCKETS_E2E_S,
    BUCKETS_TPOT_S,
    BUCKETS_TTFT_S,
    LABEL_OUTCOME,
    LABEL_REASON,
    LABEL_RESULT,
    LABEL_SLO_CLASS,
    LABEL_VERDICT,
    METRIC_REPLAY_ATTAINMENT,
    METRIC_REPLAY_ATTAINMENT_LOWER,
    METRIC_REPLAY_ATTAINMENT_UPPER,
    METRIC_REPLAY_E2E,
    METRIC_REPLAY_ELAPSED,
    METRIC_REPLAY_GOODPUT,
    METRIC_REPLAY_IN_FLIGHT,
    METRIC_REPLAY_JUDGED,
    METRIC_REPLAY_LAG,
    METRIC_REPLAY_LAG_LIMIT,
    METRIC_REPLAY_LOOP_LAG_MAX,
    METRIC_REPLAY_LOOP_LAG_P99,
    METRIC_REPLAY_MISSES,
    METRIC_REPLAY_OBJECTIVE,
    METRIC_REPLAY_PLANNED,
    METRIC_REPLAY_REQUESTS,
    METRIC_REPLAY_SENT,
    METRIC_REPLAY_TPOT,
    METRIC_REPLAY_TTFT,
    METRIC_REPLAY_VERDICT,
    PATH_METRICS,
)
from goodput_core.slo.judging import MissReason
from goodput_core.slo.record import Outcome
from goodput_core.slo.verdict import VerdictKind
from goodput_core.units import NS_PER_S
from goodput_replay.live.server import HOST, require_local_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.metrics_core import Metric

    from goodput_core.histogram import DurationHistogram
    from goodput_replay.live.tally import LiveTally, RunProgress, RunSoFar

__all__ = ["MetricsExporter"]

_BUCKETS_LAG_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1)
_LATENCIES: Final = (
    (METRIC_REPLAY_TTFT, "ttft", "Time from the scheduled arrival to the first token.",
     BUCKETS_TTFT_S),
    (METRIC_REPLAY_TPOT, "tpot", "Mean time per token after the first.", BUCKETS_TPOT_S),
    (METRIC_REPLAY_E2E, "e2e", "Time from the scheduled arrival to the end of a complete response.",
     BUCKETS_E2E_S),
)  # fmt: skip


class MetricsExporter:
    """Serves the metrics of one run.

    Args:
        host: address on which the page is served; on the loopback address, requests with a foreign
            Host header are rejected.

    Attributes:
        app: application with the metrics page, which is empty before the run begins.
    """

    def __init__(self, host: str) -> None:
        self._local = host == HOST
        self._registry = CollectorRegistry()
        self.app = web.Application()
        self.app.router.add_get(PATH_METRICS, self._get_metrics)

    def begin(self, tally: LiveTally, read_progress: Callable[[], RunProgress | None]) -> None:
        """Serve the counts of a run from now on.

        Args:
            tally: counts of the run.
            read_progress: returns the current progress; None before the first one.
        """
        self._registry.register(_RunCollector(tally, read_progress))

    async def _get_metrics(self, request: web.Request) -> web.Response:
        if self._local:
            require_local_host(request)
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )


class _RunCollector(Collector):
    def __init__(self, tally: LiveTally, read_progress: Callable[[], RunProgress | None]) -> None:
        self._tally = tally
        self._read_progress = read_progress

    def collect(self) -> Iterator[Metric]:
        progress = self._read_progress()
        if progress is None:
            return
        so_far = self._tally.so_far(progress)
        yield from _collect_progress(progress)
        yield from _collect_counts(so_far)
        yield from _collect_attainment(so_far)
        yield from _collect_latencies(so_far)
        yield _make_histogram(
            METRIC_REPLAY_LAG, "Send lag of the client.", _BUCKETS_LAG_S, [("", so_far.lag)], ()
        )
        yield _make_gauge(
            METRIC_REPLAY_LAG_LIMIT,
            "Largest p99 send lag of a valid run.",
            so_far.validity.lag_limit_ns / NS_PER_S,
        )


def _collect_progress(progress: RunProgress) -> Iterator[Metric]:
    sent = CounterMetricFamily(
        METRIC_REPLAY_SENT.removesuffix("_total"), "Requests sent, warm-up included."
    )
    sent.add_metric((), progress.sent)
    yield sent
    for name, text, value in (
        (METRIC_REPLAY_PLANNED, "Requests of the complete run, warm-up included.",
         progress.planned),
        (METRIC_REPLAY_IN_FLIGHT, "Requests that were sent and have not ended.",
         progress.in_flight),
        (METRIC_REPLAY_ELAPSED, "Time since the run's time zero.",
         max(0, progress.elapsed_ns) / NS_PER_S),
        (METRIC_REPLAY_LOOP_LAG_P99, "p99 delay of the client's event loop.",
         progress.loop_lag_p99_ns / NS_PER_S),
        (METRIC_REPLAY_LOOP_LAG_MAX, "Maximum delay of the client's event loop.",
         progress.loop_lag_max_ns / NS_PER_S),
    ):  # fmt: skip
        yield _make_gauge(name, text, value)


def _collect_counts(so_far: RunSoFar) -> Iterator[Metric]:
    requests, judged, misses = (
        CounterMetricFamily(name.removesuffix("_total"), text, labels=(LABEL_SLO_CLASS, label))
        for name, text, label in (
            (METRIC_REPLAY_REQUESTS, "Ended requests by outcome.", LABEL_OUTCOME),
            (METRIC_REPLAY_JUDGED, "Requests that met or missed their targets.", LABEL_RESULT),
            (METRIC_REPLAY_MISSES, "Missed requests by reason.", LABEL_REASON),
        )
    )
    for one in so_far.evidence.counts:
        # With zeros too, because a rate needs the value before the first increase.
        for outcome in Outcome:
            requests.add_metric((one.name, outcome.value), one.outcomes.get(outcome, 0))
        good, total = one.attainment.good, one.attainment.total
        judged.add_metric((one.name, "attained"), good)
        judged.add_metric((one.name, "missed"), total - good)
        for reason in MissReason:
            misses.add_metric((one.name, reason.value), one.misses.by_reason.get(reason, 0))
    yield from (requests, judged, misses)


def _collect_attainment(so_far: RunSoFar) -> Iterator[Metric]:
    share, lower, upper, objective = (
        GaugeMetricFamily(name, text, labels=(LABEL_SLO_CLASS,))
        for name, text in (
            (METRIC_REPLAY_ATTAINMENT, "Share of the judged requests that met their targets."),
            (METRIC_REPLAY_ATTAINMENT_LOWER, "Lower bound of the attainment, as in a verdict."),
            (METRIC_REPLAY_ATTAINMENT_UPPER, "Upper bound of the attainment, as in a verdict."),
            (METRIC_REPLAY_OBJECTIVE, "Objective of the attainment."),
        )
    )
    for one in so_far.evidence.classes:
        if one.attainment.share is not None:
            share.add_metric((one.name,), float(one.attainment.share))
        if one.interval is not None:
            lower.add_metric((one.name,), one.interval.lower)
            upper.add_metric((one.name,), one.interval.upper)
        if one.objective is not None:
            objective.add_metric((one.name,), float(one.objective))
    yield from (share, lower, upper, objective)
    yield _make_gauge(
        METRIC_REPLAY_GOODPUT,
        "Requests that met their targets, by the time of the window that has passed.",
        float(so_far.evidence.goodput_per_s),
    )
    verdict = GaugeMetricFamily(
        METRIC_REPLAY_VERDICT,
        "1 for the verdict so far, 0 for the others.",
        labels=(LABEL_VERDICT,),
    )
    for kind in VerdictKind:
        verdict.add_metric((kind.value,), int(kind is so_far.verdict.kind))
    yield verdict


def _collect_latencies(so_far: RunSoFar) -> Iterator[Metric]:
    for name, measure, text, bounds_s in _LATENCIES:
        by_class = [
            (slo_class, histogram)
            for (found, slo_class), histogram in so_far.latencies.items()
            if found == measure
        ]
        yield _make_histogram(name, text, bounds_s, by_class, (LABEL_SLO_CLASS,))


def _make_gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, text)
    gauge.add_metric((), value)
    return gauge


def _make_histogram(
    name: str,
    text: str,
    bounds_s: tuple[float, ...],
    histograms: Iterable[tuple[str, DurationHistogram]],
    labels: tuple[str, ...],
) -> HistogramMetricFamily:
    """Return a family with one histogram for each value of its label, if it has one."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for value, histogram in histograms:
        counts = histogram.counts_up_to(round(bound * NS_PER_S) for bound in bounds_s)
        buckets = [
            *((str(float(bound)), count) for bound, count in zip(bounds_s, counts, strict=True)),
            ("+Inf", histogram.count),
        ]
        family.add_metric((value,) if labels else (), buckets, histogram.sum_ns / NS_PER_S)
    return family
