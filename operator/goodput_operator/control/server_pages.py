"""Readings of other servers than Goodput's engine, from their Prometheus metrics.

A page is not trusted: it is bounded in size, in decoded samples and in values. A page without the
metrics of a known server is no reading, and never a reading of zero. Numbers that a server does not
publish stay unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

from goodput_core.engine_state import EngineState
from goodput_core.histogram import LengthBin
from goodput_core.server_metrics import (
    SERVER_METRICS,
    PageError,
    find_samples,
    sample_mean,
    sample_sum,
)
from goodput_operator.control.readings import EngineCounters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_core.server_metrics import DecodedLine, Samples

__all__ = ["MAX_PAGE_BYTES", "decode_server"]

MAX_PAGE_BYTES: Final = 4 << 20
"""A page of vLLM with one model has about 50 kB."""
_MAX_COUNT: Final = 2**53
_COUNTERS: Final = ("preemptions", "output_tokens")
_CACHE_CONFIG: Final = "vllm:cache_config_info"
"""Metric of vLLM whose labels are the settings of its KV cache."""
_MAX_TOKENS: Final = "sglang:max_total_num_tokens"
_STARTED: Final = "process_start_time_seconds"
# Of finished requests: their number, and the sums of their tokens. vLLM publishes both as one
# histogram, SGLang as counters.
_FINISHED: Final[Mapping[str, tuple[str, ...]]] = {
    "requests": ("vllm:request_prompt_tokens_count", "sglang:num_requests_total"),
    "input": ("vllm:request_prompt_tokens_sum", "sglang:prompt_tokens_total"),
    "cached": ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "output": ("vllm:request_generation_tokens_sum", "sglang:generation_tokens_total"),
}
_NAMES: Final = frozenset(
    {
        _CACHE_CONFIG,
        _MAX_TOKENS,
        _STARTED,
        *(name for names in SERVER_METRICS.values() for name in names),
        *(name for names in _FINISHED.values() for name in names),
    }
)


def decode_server(page: bytes) -> EngineCounters:
    """Decode the metrics page of a server.

    Raises:
        ValueError: the page has no usable numbers of running and queued requests.
    """
    try:
        samples = find_samples(page, _NAMES, _decode)
    except PageError as error:
        raise ValueError(str(error)) from error
    running = _count(samples, SERVER_METRICS["running_requests"])
    waiting = _count(samples, SERVER_METRICS["waiting_requests"])
    if running is None or waiting is None:
        raise ValueError("its page has no known metrics of running and queued requests")
    total, block_size = _kv_blocks(samples)
    usage = sample_mean(samples, SERVER_METRICS["kv_usage"][1:])
    if usage is None or not 0 <= usage <= 1:
        total = block_size = 0
    started = sample_sum(samples, (_STARTED,))
    counters = {name: _count(samples, SERVER_METRICS[name]) for name in _COUNTERS}
    return EngineCounters(
        # A restart shows in the time of its start, or else in smaller counters.
        epoch="" if started is None else str(started),
        state=EngineState(
            running=running,
            waiting=waiting,
            preemptions=counters["preemptions"] or 0,
            output_tokens=counters["output_tokens"] or 0,
            kv_total_blocks=total,
            kv_free_blocks=total - round(total * (usage or 0.0)),
            block_size=block_size,
        ),
        lengths=_finished(samples),
        foreign=True,
        unknown=frozenset(name for name, value in counters.items() if value is None),
    )


def _decode(line: str) -> DecodedLine:
    (family,) = text_string_to_metric_families(line)
    (sample,) = family.samples
    return sample.name, frozenset(sample.labels.items()), float(sample.value)


def _count(samples: Samples, names: tuple[str, ...]) -> int | None:
    """Return a count; None if it is missing or no count."""
    value = sample_sum(samples, names)
    return None if value is None or not 0 <= value <= _MAX_COUNT else round(value)


def _kv_blocks(samples: Samples) -> tuple[int, int]:
    """Return the blocks of the KV cache and their size; zeros if the server publishes neither.

    With data parallelism, each engine of vLLM has a cache of its own.
    """
    caches = [
        (int(blocks), int(size))
        for labels in samples.get(_CACHE_CONFIG, ())
        if _is_small(blocks := dict(labels).get("num_gpu_blocks", ""))
        and _is_small(size := dict(labels).get("block_size", ""))
    ]
    if caches and len({size for _, size in caches}) == 1:
        return sum(blocks for blocks, _ in caches), caches[0][1]
    tokens = _count(samples, (_MAX_TOKENS,))
    return (tokens, 1) if tokens else (0, 0)


def _is_small(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


def _finished(samples: Samples) -> tuple[LengthBin, ...]:
    """Return the lengths of all finished requests in one bin; empty if not known."""
    counts = {name: _count(samples, names) for name, names in _FINISHED.items()}
    requests, tokens, output = counts["requests"], counts["input"], counts["output"]
    if not requests or tokens is None or output is None:
        return ()
    return (
        LengthBin(
            requests=requests,
            input_tokens=tokens,
            cached_tokens=min(counts["cached"] or 0, tokens),
            output_tokens=output,
        ),
    )
