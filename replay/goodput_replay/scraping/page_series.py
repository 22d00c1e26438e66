"""Values of a metrics page: which metrics of which server are which series.

A page has one sample for each combination of labels, such as engines and models. Levels and
increases are summed over them, shares are averaged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

from goodput_core.contract import (
    LABEL_KV_STATE,
    METRIC_KV_BLOCKS,
    METRIC_OUTPUT_TOKENS,
    METRIC_PREEMPTIONS,
    METRIC_ROUTER_IN_FLIGHT,
    METRIC_RUNNING,
    METRIC_WAITING,
)
from goodput_core.units import NS_PER_S
from goodput_replay.runs.server_metrics import SERIES, SeriesKind, is_counter

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PageError", "PageSeries", "find_samples", "is_router"]

Labels = frozenset[tuple[str, str]]
Samples = dict[str, dict[Labels, float]]

# The first metric that a page has is used. Of vLLM and SGLang, as their documentation names them.
_METRICS: Final[dict[str, tuple[str, ...]]] = {
    "running_requests": (METRIC_RUNNING, "vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting_requests": (METRIC_WAITING, "vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_usage": (
        METRIC_KV_BLOCKS,
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",  # before 0.10
        "sglang:token_usage",
    ),
    "preemptions": (
        METRIC_PREEMPTIONS,
        "vllm:num_preemptions_total",
        "sglang:num_retracted_requests_total",
    ),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "output_tokens": (
        METRIC_OUTPUT_TOKENS,
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
    ),
}
_KV_USED: Final = (LABEL_KV_STATE, "used")
# Limits of the samples that are decoded; a page of 64 engines has about 400.
_MAX_SAMPLES: Final = 1000
_MAX_LINE_BYTES: Final = 2048
_MAX_LABELS: Final = 64


class PageError(Exception):
    """A metrics page that cannot be used; the message completes "the scrape failed: "."""


def find_samples(page: bytes, metrics: Iterable[str]) -> Samples:
    """Return the samples of known metrics, and of others that the user named.

    Only the lines of these metrics are decoded, so a long page costs little.

    Args:
        page: text in Prometheus's or OpenMetrics's format.
        metrics: names of further metrics.

    Raises:
        PageError: a line of these metrics is invalid, or there are too many.
    """
    names = {METRIC_ROUTER_IN_FLIGHT, *metrics, *(m for all_ in _METRICS.values() for m in all_)}
    pattern = "|".join(map(re.escape, sorted(names))).encode()
    found: Samples = {}
    lines = re.finditer(rb"^[ \t]*(?:" + pattern + rb")[{ \t][^\n]*", page, re.MULTILINE)
    for count, match in enumerate(lines):
        line = match[0]
        if count >= _MAX_SAMPLES:
            raise PageError(f"its page has more than {_MAX_SAMPLES} samples of the recorded series")
        if len(line) > _MAX_LINE_BYTES or line.count(b"=") > _MAX_LABELS:
            raise PageError("its page has a line with too many labels")
        name, labels, value = _decode(line)
        # A repeated sample is the same one, and must not be counted twice.
        found.setdefault(name, {})[labels] = value
    return found


def _decode(line: bytes) -> tuple[str, Labels, float]:
    try:
        (family,) = text_string_to_metric_families(line.decode())
        (sample,) = family.samples
        return sample.name, frozenset(sample.labels.items()), float(sample.value)
    except (ValueError, IndexError, OverflowError) as error:
        raise PageError("its page has a line that is not Prometheus text") from error


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
            metric = next((m for m in _METRICS[series.name] if m in samples), None)
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
