"""The operator's own metrics: turns, calls, and what the status of each service says."""

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
_OF_SERVICE: Final = ("namespace", LABEL_LLMSERVICE)
_OF_STATUS: Final = {
    "replicas": (METRIC_SERVICE_REPLICAS, "Engine pods that there are."),
    "readyReplicas": (METRIC_SERVICE_READY_REPLICAS, "Of these, ready."),
    "recommendedReplicas": (METRIC_SERVICE_RECOMMENDED_REPLICAS, "Replicas that control wants."),
    "tokenBudget": (METRIC_SERVICE_TOKEN_BUDGET, "Tokens of a step at most."),
}


class OperatorMetrics:
    """Counts, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._leader = Gauge(
            METRIC_OPERATOR_LEADER, "1 while this operator may write.", registry=self._registry
        )
        self._waiting = Gauge(
            METRIC_OPERATOR_WAITING, "Services that wait for a turn.", registry=self._registry
        )
        self._turns = Counter(
            METRIC_OPERATOR_TURNS, "Turns that ended.", [LABEL_OUTCOME], registry=self._registry
        )
        self._seconds = Histogram(
            METRIC_OPERATOR_TURN_SECONDS, "How long turns took.", registry=self._registry
        )
        self._calls = Counter(
            METRIC_OPERATOR_CALLS,
            "Calls to the API server, watches apart.",
            ["verb", "kind", "status"],
            registry=self._registry,
        )
        self._of_status = {
            field: Gauge(name, text, _OF_SERVICE, registry=self._registry)
            for field, (name, text) in _OF_STATUS.items()
        }
        self._decisions = Counter(
            METRIC_SERVICE_DECISIONS,
            "Decisions of the control laws, those that were only recommended among them.",
            [*_OF_SERVICE, "knob", "reason", "applied"],
            registry=self._registry,
        )

    def call(self, verb: str, kind: str, status: int) -> None:
        """A call to the API server was answered, or not."""
        self._calls.labels(verb, kind, status).inc()

    @contextmanager
    def reconciliation(self) -> Iterator[None]:
        """Time a turn."""
        begun = time.perf_counter()
        outcome = "error"
        try:
            yield
            outcome = "ok"
        finally:
            self._turns.labels(outcome).inc()
            self._seconds.observe(time.perf_counter() - begun)

    def status(self, key: Key, status: Mapping[str, Any]) -> None:
        """What the status of a service says."""
        for field, gauge in self._of_status.items():
            if field in status:
                gauge.labels(*key).set(status[field])
            else:
                gauge.remove(*key)

    def decided(self, key: Key, changes: Iterable[Change]) -> None:
        """What the control laws put in force for a service, or would."""
        for one in changes:
            applied = "true" if one.applied else "false"
            self._decisions.labels(*key, one.knob.value, one.reason, applied).inc()

    def forget(self, key: Key) -> None:
        """A service is gone."""
        for gauge in self._of_status.values():
            gauge.remove(*key)
        self._decisions.remove_by_labels(dict(zip(_OF_SERVICE, key, strict=True)))

    def text(self, *, leading: bool, waiting: int) -> bytes:
        """The exposition, with what is known only when asked."""
        self._leader.set(leading)
        self._waiting.set(waiting)
        return generate_latest(self._registry)
