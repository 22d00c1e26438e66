"""Values of a metrics page as the series of a run.

A page has one sample for each combination of labels, such as engines and models. Levels and
increases are summed over them, shares are averaged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

from goodput_core.contract import LABEL_KV_STATE, METRIC_KV_BLOCKS, METRIC_ROUTER_IN_FLIGHT
from goodput_core.server_metrics import SERVER_METRICS, Labels, PageError, find_samples
from goodput_core.units import NS_PER_S
from goodput_replay.runs.server_metrics import SERIES, SeriesKind, is_counter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goodput_core.server_metrics import DecodedLine, Samples

__all__ = ["PageError", "PageSeries", "is_router", "read_page"]

_KV_USED: Final = (LABEL_KV_STATE, "used")


def read_page(page: bytes, metrics: Iterable[str]) -> Samples:
    """Return the samples of known metrics, and of others that the user named.

    Args:
        page: text in Prometheus's or OpenMetrics's format.
        metrics: names of further metrics.

    Raises:
        PageError: a line of these metrics is invalid, or there are too many.
    """
    known = (metric for names in SERVER_METRICS.values() for metric in names)
    return find_samples(page, {METRIC_ROUTER_IN_FLIGHT, *metrics, *known}, _decode)


def _decode(line: str) -> DecodedLine:
    (family,) = text_string_to_metric_families(line)
    (sample,) = family.samples
    return sample.name, frozenset(sample.labels.items()), float(sample.value)


def is_router(samples: Samples) -> bool:
    """True for the page of Goodput's router, whose state names the engines."""
    return METRIC_ROUTER_IN_FLIGHT in samples


@dataclass(frozen=True, slots=True)
class _CounterState:
    at_ns: int
    values: Mapping[Labels, float]


class PageSeries:
    """Converts the samples of one page to values, with the previous counters as its state.

    Args:
        metrics: metrics that the user named; a counter becomes a rate.
    """

    def __init__(self, metrics: Iterable[str] = ()) -> None:
        self._metrics = tuple(metrics)
        self._counters: dict[str, _CounterState] = {}

    def update(self, at_ns: int, samples: Samples) -> dict[str, float]:
        """Return the value of each series that has one.

        A series has no value if its metric is missing, not a number or infinite, and a rate has
        none at the first scrape. After a reset, a counter has increased by its new value.

        Args:
            at_ns: time of the scrape; later than that of the previous call.
            samples: samples of the page.
        """
        values = {}
        for series in SERIES:
            metric = next((m for m in SERVER_METRICS[series.name] if m in samples), None)
            if metric is not None:
                value = self._evaluate(metric, series.kind, at_ns, samples[metric])
                if value is not None:
                    values[series.name] = value
        for metric in self._metrics:
            if metric in samples:
                kind = SeriesKind.RATE if is_counter(metric) else SeriesKind.LEVEL
                value = self._evaluate(metric, kind, at_ns, samples[metric])
                if value is not None:
                    values[metric] = value
        return values

    def _evaluate(
        self, metric: str, kind: SeriesKind, at_ns: int, samples: Mapping[Labels, float]
    ) -> float | None:
        if not all(map(math.isfinite, samples.values())):
            return None
        if kind is SeriesKind.RATE:
            value = self._rate(metric, at_ns, samples)
        elif metric == METRIC_KV_BLOCKS:
            used = sum(blocks for labels, blocks in samples.items() if _KV_USED in labels)
            total = sum(samples.values())
            value = used / total if total > 0 else None
        elif kind is SeriesKind.SHARE:
            value = sum(samples.values()) / len(samples)
        else:
            value = sum(samples.values())
        # The sum of large numbers may be infinite.
        return value if value is not None and math.isfinite(value) else None

    def _rate(self, metric: str, at_ns: int, samples: Mapping[Labels, float]) -> float | None:
        before = self._counters.get(metric)
        self._counters[metric] = _CounterState(at_ns, samples)
        if before is None or not before.values.keys() & samples.keys():
            return None
        increase = 0.0
        for labels, value in samples.items():
            earlier = before.values.get(labels)
            if earlier is not None:
                increase += value - earlier if value >= earlier else max(value, 0.0)
        return increase * NS_PER_S / (at_ns - before.at_ns)
