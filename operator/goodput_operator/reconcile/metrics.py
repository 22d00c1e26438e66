"""The operator's metrics: reconciliations, API calls, and the status of each service."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from goodput_core.contract import (
    LABEL_LLMSERVICE,
    LABEL_OUTCOME,
    METRIC_OPERATOR_CALLS,
    METRIC_OPERATOR_LEADER,
    METRIC_OPERATOR_TURN_SECONDS,
    METRIC_OPERATOR_TURNS,
    METRIC_OPERATOR_WAITING,
    METRIC_SERVICE_DECISIONS,
    METRIC_SERVICE_READY_REPLICAS,
    METRIC_SERVICE_RECOMMENDED_REPLICAS,
    METRIC_SERVICE_REPLICAS,
    METRIC_SERVICE_TOKEN_BUDGET,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from goodput_core.control import Change
    from goodput_operator.kube.cache import Key

__all__ = ["CONTENT_TYPE", "OperatorMetrics"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SERVICE_LABELS: Final = ("namespace", LABEL_LLMSERVICE)
_STATUS_GAUGES: Final = {
    "replicas": (METRIC_SERVICE_REPLICAS, "Engine pods."),
    "readyReplicas": (METRIC_SERVICE_READY_REPLICAS, "Ready engine pods."),
    "recommendedReplicas": (METRIC_SERVICE_RECOMMENDED_REPLICAS, "Recommended replicas."),
    "tokenBudget": (METRIC_SERVICE_TOKEN_BUDGET, "Upper bound of the token budget of a step."),
}


class OperatorMetrics:
    """The operator's metrics, in their own registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._leader = Gauge(
            METRIC_OPERATOR_LEADER, "1 while the Lease is held.", registry=self._registry
        )
        self._waiting = Gauge(
            METRIC_OPERATOR_WAITING, "Services waiting to be reconciled.", registry=self._registry
        )
        self._reconciliations = Counter(
            METRIC_OPERATOR_TURNS,
            "Ended reconciliations.",
            [LABEL_OUTCOME],
            registry=self._registry,
        )
        self._seconds = Histogram(
            METRIC_OPERATOR_TURN_SECONDS, "Duration of reconciliations.", registry=self._registry
        )
        self._calls = Counter(
            METRIC_OPERATOR_CALLS,
            "Calls to the API server, without watches.",
            ["verb", "kind", "status"],
            registry=self._registry,
        )
        self._status_gauges = {
            field: Gauge(name, text, _SERVICE_LABELS, registry=self._registry)
            for field, (name, text) in _STATUS_GAUGES.items()
        }
        self._decisions = Counter(
            METRIC_SERVICE_DECISIONS,
            "Decisions of the control laws, applied and recommended.",
            [*_SERVICE_LABELS, "knob", "reason", "applied"],
            registry=self._registry,
        )

    def count_call(self, verb: str, kind: str, status: int) -> None:
        """Count a call to the API server."""
        self._calls.labels(verb, kind, status).inc()

    @contextmanager
    def time_reconciliation(self) -> Iterator[None]:
        """Record the duration and the outcome of a reconciliation."""
        started = time.perf_counter()
        outcome = "error"
        try:
            yield
            outcome = "ok"
        finally:
            self._reconciliations.labels(outcome).inc()
            self._seconds.observe(time.perf_counter() - started)

    def set_status(self, key: Key, status: Mapping[str, Any]) -> None:
        """Set the gauges of a service from its status."""
        for field, gauge in self._status_gauges.items():
            if field in status:
                gauge.labels(*key).set(status[field])
            else:
                gauge.remove(*key)

    def count_decisions(self, key: Key, changes: Iterable[Change]) -> None:
        """Count the changes that the control laws apply or recommend."""
        for change in changes:
            applied = "true" if change.applied else "false"
            self._decisions.labels(*key, change.knob.value, change.reason, applied).inc()

    def remove_service(self, key: Key) -> None:
        """Remove the metrics of a deleted service."""
        for gauge in self._status_gauges.values():
            gauge.remove(*key)
        self._decisions.remove_by_labels(dict(zip(_SERVICE_LABELS, key, strict=True)))

    def expose(self, *, leading: bool, waiting: int) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._leader.set(leading)
        self._waiting.set(waiting)
        return generate_latest(self._registry)
