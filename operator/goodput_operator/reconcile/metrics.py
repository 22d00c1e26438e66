"""The operator's metrics: reconciliations, API calls, and the state of each service."""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import datetime
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from goodput_core.cli import installed_version
from goodput_core.contract import (
    LABEL_APPLIED,
    LABEL_CONDITION,
    LABEL_KNOB,
    LABEL_LLMSERVICE,
    LABEL_OUTCOME,
    LABEL_PHASE,
    LABEL_PROMISE,
    LABEL_REASON,
    LABEL_REVISION,
    LABEL_ROLE,
    LABEL_SLO_CLASS,
    LABEL_STATUS,
    LABEL_USE,
    LABEL_VERDICT,
    LABEL_VERSION,
    METRIC_BUILD_INFO,
    METRIC_OPERATOR_CALLS,
    METRIC_OPERATOR_LEADER,
    METRIC_OPERATOR_OVERDUE,
    METRIC_OPERATOR_TURN_SECONDS,
    METRIC_OPERATOR_TURNS,
    METRIC_OPERATOR_WAITING,
    METRIC_SERVICE_ATTAINMENT,
    METRIC_SERVICE_ATTAINMENT_LOWER,
    METRIC_SERVICE_ATTAINMENT_UPPER,
    METRIC_SERVICE_CONDITION,
    METRIC_SERVICE_CONDITION_REASON,
    METRIC_SERVICE_DECISION_TIME,
    METRIC_SERVICE_DECISIONS,
    METRIC_SERVICE_DESIRED_REPLICAS,
    METRIC_SERVICE_GATE,
    METRIC_SERVICE_MAX_REPLICAS,
    METRIC_SERVICE_MAX_TOKEN_BUDGET,
    METRIC_SERVICE_MIN_REPLICAS,
    METRIC_SERVICE_MIN_TOKEN_BUDGET,
    METRIC_SERVICE_OBJECTIVE,
    METRIC_SERVICE_READY_REPLICAS,
    METRIC_SERVICE_RECOMMENDED_REPLICAS,
    METRIC_SERVICE_REPLICAS,
    METRIC_SERVICE_REVISION,
    METRIC_SERVICE_STARTUP,
    METRIC_SERVICE_TARGET,
    METRIC_SERVICE_TOKEN_BUDGET,
    REVISION_USES,
    ROLE_OPERATOR,
)
from goodput_core.spec.status import Truth

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from goodput_core.control import Change
    from goodput_core.slo.targets import SLOClass
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_operator.kube.cache import Key

    _Sample = tuple[tuple[str, ...], float]

__all__ = ["CONTENT_TYPE", "OperatorMetrics"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SERVICE_LABELS: Final = ("namespace", LABEL_LLMSERVICE)
_STATUS_GAUGES: Final = {
    "replicas": METRIC_SERVICE_REPLICAS,
    "readyReplicas": METRIC_SERVICE_READY_REPLICAS,
    "recommendedReplicas": METRIC_SERVICE_RECOMMENDED_REPLICAS,
    "tokenBudget": METRIC_SERVICE_TOKEN_BUDGET,
}
_BOUNDS: Final = {
    "lower": METRIC_SERVICE_ATTAINMENT_LOWER,
    "upper": METRIC_SERVICE_ATTAINMENT_UPPER,
}
_REVISIONS: Final = dict(
    zip(REVISION_USES, ("currentRevision", "updateRevision", "failedRevision"), strict=True)
)
_SERVICE_GAUGES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    METRIC_SERVICE_OBJECTIVE: ("Objective of the attainment.", (LABEL_SLO_CLASS,)),
    METRIC_SERVICE_TARGET: ("Latency target.", (LABEL_SLO_CLASS, LABEL_PROMISE)),
    METRIC_SERVICE_ATTAINMENT: (
        "Share of the judged requests that met their targets, in the window of SLOAttained.",
        (LABEL_SLO_CLASS,),
    ),
    METRIC_SERVICE_ATTAINMENT_LOWER: (
        "Lower confidence bound of the attainment.",
        (LABEL_SLO_CLASS,),
    ),
    METRIC_SERVICE_ATTAINMENT_UPPER: (
        "Upper confidence bound of the attainment.",
        (LABEL_SLO_CLASS,),
    ),
    METRIC_SERVICE_CONDITION: (
        "1 for the status of the condition, 0 for the two others.",
        (LABEL_CONDITION, LABEL_STATUS),
    ),
    METRIC_SERVICE_CONDITION_REASON: (
        "1, with the reason of the condition.",
        (LABEL_CONDITION, LABEL_REASON),
    ),
    METRIC_SERVICE_REPLICAS: ("Engine pods.", ()),
    METRIC_SERVICE_READY_REPLICAS: ("Ready engine pods.", ()),
    METRIC_SERVICE_DESIRED_REPLICAS: ("Replicas that the operator requests.", ()),
    METRIC_SERVICE_RECOMMENDED_REPLICAS: ("Replicas that the control law recommends.", ()),
    METRIC_SERVICE_MIN_REPLICAS: ("Lower bound of the replicas, spec.minReplicas.", ()),
    METRIC_SERVICE_MAX_REPLICAS: ("Upper bound of the replicas, spec.maxReplicas.", ()),
    METRIC_SERVICE_TOKEN_BUDGET: ("Upper bound of the token budget of a step.", ()),
    METRIC_SERVICE_MIN_TOKEN_BUDGET: ("spec.engine.tokenBudget.min.", ()),
    METRIC_SERVICE_MAX_TOKEN_BUDGET: ("spec.engine.tokenBudget.max.", ()),
    METRIC_SERVICE_STARTUP: (
        "Latest measured time from the creation of a replica until it is routable.",
        (),
    ),
    METRIC_SERVICE_REVISION: (
        "1, with a revision of the service and its use: current, update or failed.",
        (LABEL_USE, LABEL_REVISION),
    ),
    METRIC_SERVICE_GATE: (
        "1, with the revision, the phase and the verdict so far of the latest gate.",
        (LABEL_REVISION, LABEL_PHASE, LABEL_VERDICT),
    ),
    METRIC_SERVICE_DECISION_TIME: (
        "Unix time of the latest decision of this kind, of the decisions in the status.",
        (LABEL_KNOB, LABEL_REASON, LABEL_APPLIED),
    ),
}


class OperatorMetrics:
    """The operator's metrics, in their own registry."""

    def __init__(self) -> None:
        disable_created_metrics()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        info = Gauge(
            METRIC_BUILD_INFO,
            "1, with the version of Goodput.",
            [LABEL_ROLE, LABEL_VERSION],
            registry=self._registry,
        )
        info.labels(ROLE_OPERATOR, installed_version()).set(1)
        self._leader = Gauge(
            METRIC_OPERATOR_LEADER, "1 while the Lease is held.", registry=self._registry
        )
        self._waiting = Gauge(
            METRIC_OPERATOR_WAITING, "Services waiting to be reconciled.", registry=self._registry
        )
        self._overdue = Gauge(
            METRIC_OPERATOR_OVERDUE,
            "Time for which the service that is due longest has not been reconciled.",
            registry=self._registry,
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
            ["verb", "kind", LABEL_STATUS],
            registry=self._registry,
        )
        self._services = _ServiceCollector()
        self._registry.register(self._services)
        self._decisions = Counter(
            METRIC_SERVICE_DECISIONS,
            "Decisions of the control laws, applied and recommended.",
            [*_SERVICE_LABELS, LABEL_KNOB, LABEL_REASON, LABEL_APPLIED],
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

    def set_service(
        self,
        key: Key,
        *,
        spec: LLMServiceSpec | None,
        desired_replicas: int | None,
        status: Mapping[str, Any],
    ) -> None:
        """Set the gauges of a service.

        Args:
            key: namespace and name of the service.
            spec: its spec; None if it is invalid.
            desired_replicas: the requested replicas; None if not known.
            status: its status.
        """
        samples = _status_samples(status)
        if spec is not None:
            samples |= _spec_samples(spec)
        if desired_replicas is not None:
            samples[METRIC_SERVICE_DESIRED_REPLICAS] = [((), desired_replicas)]
        self._services.by_key[key] = samples

    def count_decisions(self, key: Key, changes: Iterable[Change]) -> None:
        """Count the changes that the control laws apply or recommend."""
        for change in changes:
            applied = "true" if change.applied else "false"
            self._decisions.labels(*key, change.knob.value, change.reason, applied).inc()

    def remove_service(self, key: Key) -> None:
        """Remove the metrics of a deleted service."""
        self._services.by_key.pop(key, None)
        self._decisions.remove_by_labels(dict(zip(_SERVICE_LABELS, key, strict=True)))

    def expose(self, *, leading: bool, waiting: int, overdue_s: float) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._leader.set(leading)
        self._waiting.set(waiting)
        self._overdue.set(overdue_s)
        return generate_latest(self._registry)


class _ServiceCollector(Collector):
    """The gauges of all services.

    Attributes:
        by_key: samples of each service by metric: further label values, and the value.
    """

    def __init__(self) -> None:
        self.by_key: dict[Key, dict[str, list[_Sample]]] = {}

    def collect(self) -> Iterator[Metric]:
        for name, (text, labels) in _SERVICE_GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=(*_SERVICE_LABELS, *labels))
            for key, samples in self.by_key.items():
                for values, value in samples.get(name, ()):
                    family.add_metric((*key, *values), value)
            yield family


def _spec_samples(spec: LLMServiceSpec) -> dict[str, list[_Sample]]:
    budget = spec.engine.token_budget
    return {
        METRIC_SERVICE_OBJECTIVE: [
            ((one.name,), float(one.objective))
            for one in spec.slo.classes
            if one.objective is not None
        ],
        METRIC_SERVICE_TARGET: [
            ((one.name, name), value_ms / 1000)
            for one in spec.slo.classes
            for name, value_ms in _targets(one).items()
            if value_ms is not None
        ],
        METRIC_SERVICE_MIN_REPLICAS: [((), spec.min_replicas)],
        METRIC_SERVICE_MAX_REPLICAS: [((), spec.max_replicas)],
        METRIC_SERVICE_MIN_TOKEN_BUDGET: [((), budget.min)],
        METRIC_SERVICE_MAX_TOKEN_BUDGET: [((), budget.max)],
    }


def _targets(one: SLOClass) -> dict[str, int | None]:
    return {
        "ttft": one.ttft_ms,
        "tpot": one.tpot_ms,
        "tbt_p99": one.tbt_p99_ms,
        "e2e": one.e2e_ms,
    }


def _status_samples(status: Mapping[str, Any]) -> dict[str, list[_Sample]]:
    samples: dict[str, list[_Sample]] = {
        name: [((), status[field])] for field, name in _STATUS_GAUGES.items() if field in status
    }
    classes = status.get("classes") or ()
    samples[METRIC_SERVICE_ATTAINMENT] = [
        ((one["name"],), one["good"] / one["total"]) for one in classes if one["total"]
    ]
    for field, name in _BOUNDS.items():
        samples[name] = [
            ((one["name"],), float(Fraction(one[field].removesuffix("%")) / 100))
            for one in classes
            if field in one
        ]
    conditions = status.get("conditions") or ()
    samples[METRIC_SERVICE_CONDITION] = [
        ((one["type"], truth.value), int(one["status"] == truth.value))
        for one in conditions
        for truth in Truth
    ]
    samples[METRIC_SERVICE_CONDITION_REASON] = [
        ((one["type"], one["reason"]), 1) for one in conditions
    ]
    startups = (status.get("learnt") or {}).get("startupSeconds") or ()
    samples[METRIC_SERVICE_STARTUP] = [((), startups[-1])] if startups else []
    samples[METRIC_SERVICE_REVISION] = [
        ((use, status[field]), 1) for use, field in _REVISIONS.items() if field in status
    ]
    gate = status.get("gate")
    samples[METRIC_SERVICE_GATE] = (
        [((gate["revision"], gate["phase"], gate.get("verdict", "")), 1)] if gate else []
    )
    times: dict[tuple[str, ...], float] = {}
    for one in status.get("decisions") or ():  # newest first
        applied = "true" if one["applied"] else "false"
        times.setdefault(
            (one["knob"], one["reason"], applied), datetime.fromisoformat(one["at"]).timestamp()
        )
    samples[METRIC_SERVICE_DECISION_TIME] = list(times.items())
    return samples
