"""Measurements of a replica: its Prometheus metrics and its load.

The core's snapshot has counters since the core's start, so a scrape only converts the snapshot. The
only cost of a step is one histogram observation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from goodput_core.contract import (
    HEADER_LOAD,
    LABEL_KV_STATE,
    LABEL_LLMSERVICE,
    LABEL_REVISION,
    LABEL_ROLE,
    METRIC_CORE_RESTARTS,
    METRIC_HOST_KV_BLOCKS,
    METRIC_KV_BLOCKS,
    METRIC_LENGTH_ERROR,
    METRIC_MAX_NUM_SEQS,
    METRIC_OUTPUT_TOKENS,
    METRIC_PREDICTED_LENGTHS,
    METRIC_PREEMPTIONS,
    METRIC_PREFIX_HIT,
    METRIC_PREFIX_QUERIED,
    METRIC_RECOMPUTED_TOKENS,
    METRIC_RUNNING,
    METRIC_SAFETY,
    METRIC_SCHEDULED_TOKENS,
    METRIC_SHED,
    METRIC_STEP_SECONDS,
    METRIC_STEP_TIME_ERROR,
    METRIC_STEPS,
    METRIC_SWAPPED_TOKENS,
    METRIC_TOKEN_BUDGET,
    METRIC_WAITING,
    ROLE_ENGINE,
)
from goodput_core.placement import is_saturated
from goodput_core.units import NS_PER_S
from goodput_engine.process_metrics import register_process_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from goodput_core.engine_state import EngineState
    from goodput_core.slo.importance import Importance
    from goodput_engine.core_client import CoreConnection
    from goodput_engine.messages import StepOutputs
    from goodput_engine.server.settings import ReplicaIdentity
    from goodput_engine.server.state import ServerState

__all__ = ["CONTENT_TYPE", "EngineMetrics", "LoadHeader", "read_load"]

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_STEP_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5,
)  # fmt: skip
_LABELS: Final = (LABEL_LLMSERVICE, LABEL_REVISION, LABEL_ROLE)

_COUNTERS: Final[tuple[tuple[str, str, str], ...]] = (
    (METRIC_STEPS, "steps", "Steps that the core committed."),
    (METRIC_SCHEDULED_TOKENS, "scheduled_tokens", "Tokens computed: prompt and output."),
    (METRIC_OUTPUT_TOKENS, "output_tokens", "Output tokens."),
    (METRIC_PREEMPTIONS, "preemptions", "Requests preempted because of a lack of KV blocks."),
    (
        METRIC_RECOMPUTED_TOKENS,
        "recomputed_tokens",
        "Computed tokens of preempted requests that are computed again.",
    ),
    (
        METRIC_SWAPPED_TOKENS,
        "swapped_tokens",
        "Computed tokens of preempted requests that were copied to host memory.",
    ),
    (
        METRIC_PREFIX_QUERIED,
        "prefix_queried_tokens",
        "Prompt tokens looked up in the prefix cache.",
    ),
    (METRIC_PREFIX_HIT, "prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
    (METRIC_SHED, "shed", "Requests that the core rejected, displaced or dropped because of load."),
    (METRIC_PREDICTED_LENGTHS, "predicted_lengths", "Finished outputs whose length was predicted."),
)
_GAUGES: Final[tuple[tuple[str, str, str], ...]] = (
    (METRIC_RUNNING, "running", "Requests that hold KV blocks."),
    (METRIC_WAITING, "waiting", "Requests that wait for KV blocks or a place in the batch."),
    (METRIC_TOKEN_BUDGET, "token_budget", "Tokens that one step may compute."),
    (METRIC_MAX_NUM_SEQS, "max_num_seqs", "Requests that may run at the same time."),
    (
        METRIC_STEP_TIME_ERROR,
        "step_time_error",
        "Mean of |measured / predicted - 1| over the times of recent steps.",
    ),
    (
        METRIC_LENGTH_ERROR,
        "length_error",
        "Mean of |ln(predicted / true length)| over recent outputs.",
    ),
)


class EngineMetrics:
    """The metrics of one replica, in their own registry.

    Args:
        identity: names of the replica, used as labels.
        state: returns the core's last snapshot; None before the first one.

    Attributes:
        core_restarts: counter of the restarts of the core.
    """

    def __init__(self, identity: ReplicaIdentity, state: Callable[[], EngineState | None]) -> None:
        disable_created_metrics()
        self._registry = CollectorRegistry()
        register_process_metrics(self._registry, llmservice=identity.llmservice, role=ROLE_ENGINE)
        values = (identity.llmservice, identity.revision, ROLE_ENGINE)
        self._steps = Histogram(
            METRIC_STEP_SECONDS,
            "Device time of a step.",
            _LABELS,
            buckets=_STEP_BUCKETS_S,
            registry=self._registry,
        ).labels(*values)
        restarts = Counter(
            METRIC_CORE_RESTARTS.removesuffix("_total"),
            "Restarts of the engine core after its death.",
            _LABELS,
            registry=self._registry,
        )
        self.core_restarts = restarts.labels(*values)
        self._registry.register(_StateCollector(values, state))

    def observe(self, step: StepOutputs) -> None:
        """Count one step; a message without a step is not counted."""
        if step.step_ns:
            self._steps.observe(step.step_ns / NS_PER_S)

    def text(self) -> bytes:
        """Return the response body of `GET /metrics`."""
        return generate_latest(self._registry)


class _StateCollector(Collector):
    def __init__(self, values: tuple[str, ...], state: Callable[[], EngineState | None]) -> None:
        self._values = values
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        if state is None:
            return
        for name, field, doc in _COUNTERS:
            counter = CounterMetricFamily(name.removesuffix("_total"), doc, labels=_LABELS)
            counter.add_metric(self._values, getattr(state, field))
            yield counter
        for name, field, doc in _GAUGES:
            gauge = GaugeMetricFamily(name, doc, labels=_LABELS)
            gauge.add_metric(self._values, getattr(state, field))
            yield gauge
        safety = GaugeMetricFamily(
            METRIC_SAFETY,
            "Share of the tightest TPOT that a step is planned to take; 0 without a budget law.",
            labels=_LABELS,
        )
        safety.add_metric(self._values, state.safety_percent / 100)
        yield safety
        blocks = GaugeMetricFamily(
            METRIC_KV_BLOCKS,
            "KV blocks: used by a request, free but holding a reusable prefix, or free and empty.",
            labels=(*_LABELS, LABEL_KV_STATE),
        )
        free, cached = state.kv_free_blocks, state.kv_cached_blocks
        blocks.add_metric((*self._values, "used"), state.kv_total_blocks - free)
        blocks.add_metric((*self._values, "cached"), cached)
        blocks.add_metric((*self._values, "empty"), free - cached)
        yield blocks
        host = GaugeMetricFamily(
            METRIC_HOST_KV_BLOCKS,
            "Host memory for KV blocks: used by a preempted request, or empty.",
            labels=(*_LABELS, LABEL_KV_STATE),
        )
        host_free = state.host_free_blocks
        host.add_metric((*self._values, "used"), state.host_total_blocks - host_free)
        host.add_metric((*self._values, "empty"), host_free)
        yield host


def read_load(core: CoreConnection, *, draining: bool) -> dict[str, int | bool | Importance | None]:
    """Return the load of a running core after its last step.

    The router uses the load for placement. `GET /control/state` contains it, and so does a header
    of each response, which is usually more recent than the router's last probe.

    Args:
        core: the core.
        draining: True if the HTTP process admits no new request.
    """
    state = core.state
    saturated = is_saturated(
        running=state.running,
        max_num_seqs=state.max_num_seqs,
        waiting=state.waiting,
        max_waiting=state.max_waiting,
        kv_used_blocks=state.kv_total_blocks - state.kv_free_blocks,
        kv_total_blocks=state.kv_total_blocks,
    )
    return {
        "running": state.running,
        "waiting": state.waiting,
        "max_waiting": state.max_waiting,
        "kv_free_blocks": state.kv_free_blocks,
        "kv_total_blocks": state.kv_total_blocks,
        "saturated": saturated or core.full,
        # A core that is behind with reading requests cannot compare a new one with those waiting.
        "displaceable": None if core.full else state.displaceable,
        "draining": state.draining or draining,
    }


class LoadHeader:
    """Builds the load header of responses and caches it until the load changes.

    Args:
        state: state of the HTTP process.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._source: tuple[EngineState | None, bool, bool] = (None, False, False)
        self._headers: dict[str, str] = {}

    def headers(self) -> dict[str, str]:
        """Return the header as a read-only mapping; empty without a core that is ready."""
        core = self._state.core
        if core is None:
            return {}
        source = (core.state, core.full, self._state.draining)
        if source != self._source:
            load = read_load(core, draining=self._state.draining)
            self._source = source
            self._headers = {HEADER_LOAD: msgspec.json.encode(load).decode()}
        return self._headers
