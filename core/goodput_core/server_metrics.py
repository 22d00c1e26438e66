"""Metrics of serving engines: which metrics of which server are which quantity.

The replayer records them, and the operator measures replicas of other servers with them. A page has
one sample for each combination of labels, such as engines and models. Only the lines of known
metrics are decoded, so a long page costs little. This module reads no page itself, and leaves the
decoding of a line to its caller.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

from goodput_core.contract import (
    METRIC_KV_BLOCKS,
    METRIC_OUTPUT_TOKENS,
    METRIC_PREEMPTIONS,
    METRIC_RUNNING,
    METRIC_WAITING,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "SERVER_METRICS",
    "SGLANG_PREFIX",
    "SGLANG_RANKS",
    "DecodedLine",
    "Labels",
    "PageError",
    "Samples",
    "find_samples",
    "sample_mean",
    "sample_sum",
]

Labels = frozenset[tuple[str, str]]
Samples = dict[str, dict[Labels, float]]
DecodedLine = tuple[str, Labels, float]
"""Name, labels and value of a sample."""

# The first metric that a page has is used. Of vLLM, as vllm/v1/metrics/loggers.py names them, and
# of SGLang, as python/sglang/srt/metrics/collector.py does.
SERVER_METRICS: Final[Mapping[str, tuple[str, ...]]] = {
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
"""Metrics of Goodput's engine, vLLM and SGLang by quantity."""
_ALL_PRIORITIES: Final = ("priority", "")
SGLANG_PREFIX: Final = "sglang:"
SGLANG_RANKS: Final = ("tp_rank", "pp_rank", "moe_ep_rank")
"""Labels of the processes of SGLang that share one set of requests."""
# Limits of the samples that are decoded; a page of 64 engines has about 400.
_MAX_SAMPLES: Final = 1000
_MAX_LINE_BYTES: Final = 2048
_MAX_LABELS: Final = 64


class PageError(Exception):
    """A metrics page that cannot be used; the message completes "the scrape failed: "."""


def find_samples(
    page: bytes, metrics: Iterable[str], decode: Callable[[str], DecodedLine]
) -> Samples:
    """Return the samples of some metrics.

    Args:
        page: text in Prometheus's or OpenMetrics's format.
        metrics: names of the metrics.
        decode: decodes one line; raises ValueError if it is invalid.

    Raises:
        PageError: a line of these metrics is invalid, or there are too many.
    """
    pattern = "|".join(map(re.escape, sorted(set(metrics)))).encode()
    found: Samples = {}
    lines = re.finditer(rb"^[ \t]*(?:" + pattern + rb")[{ \t][^\n]*", page, re.MULTILINE)
    for count, match in enumerate(lines):
        line = match[0]
        if count >= _MAX_SAMPLES:
            raise PageError(f"its page has more than {_MAX_SAMPLES} samples of the recorded series")
        if len(line) > _MAX_LINE_BYTES or line.count(b"=") > _MAX_LABELS:
            raise PageError("its page has a line with too many labels")
        try:
            name, labels, value = decode(line.decode())
        except (ValueError, IndexError, OverflowError) as error:
            raise PageError("its page has a line that is not Prometheus text") from error
        # A repeated sample is the same one, and must not be counted twice.
        found.setdefault(name, {})[labels] = value
    return {
        name: _without_priorities(_without_ranks(values))
        if name.startswith(SGLANG_PREFIX)
        else values
        for name, values in found.items()
    }


def _without_ranks(values: dict[Labels, float]) -> dict[Labels, float]:
    """Return the largest sample of the ranks that share their requests.

    Each rank of tensor and pipeline parallelism schedules every request. All of them count the
    retracted ones and publish the size of the KV cache, and with
    `--enable-metrics-for-all-schedulers` all other numbers, too. Data-parallel ranks have requests
    of their own, and keep their label.

    Source: `SchedulerMetricsMixin.init_metrics` and `Scheduler.update_running_batch` of SGLang.
    """
    merged: dict[Labels, float] = {}
    for labels, value in values.items():
        shared = frozenset(label for label in labels if label[0] not in SGLANG_RANKS)
        known = merged.get(shared)
        # A rank whose value is not a number makes the complete sample unusable.
        if known is None or value > known or math.isnan(value):
            merged[shared] = value
    return merged


def _without_priorities(values: dict[Labels, float]) -> dict[Labels, float]:
    """Leave out the samples of single priorities if there is one of all priorities.

    With priority scheduling, later versions of SGLang publish both for the numbers of running and
    queued requests. The label is empty in the sample of all priorities.

    Source: `SchedulerMetricsCollector._log_gauge_queue_count` of SGLang.
    """
    totals = {labels - {_ALL_PRIORITIES} for labels in values if _ALL_PRIORITIES in labels}
    if not totals:
        return values
    return {
        labels: value
        for labels, value in values.items()
        if _ALL_PRIORITIES in labels
        or frozenset(label for label in labels if label[0] != _ALL_PRIORITIES[0]) not in totals
    }


def sample_sum(samples: Samples, metrics: Iterable[str]) -> float | None:
    """Return the sum of the first of these metrics; None if it is missing or not a number."""
    name = next((metric for metric in metrics if metric in samples), None)
    if name is None:
        return None
    total = math.fsum(samples[name].values()) if _finite(samples[name]) else math.inf
    return total if math.isfinite(total) else None


def sample_mean(samples: Samples, metrics: Iterable[str]) -> float | None:
    """Return the mean of the first of these metrics; None if it is missing or not a number."""
    name = next((metric for metric in metrics if metric in samples), None)
    total = sample_sum(samples, metrics if name is None else (name,))
    return None if name is None or total is None else total / len(samples[name])


def _finite(values: Mapping[Labels, float]) -> bool:
    return all(map(math.isfinite, values.values()))
