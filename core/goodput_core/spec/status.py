"""`status` of an LLMService, for users, `kubectl` and autoscalers; only the operator writes it.

A restarted operator continues from few of the stored fields: the current revision, the decisions,
the times of transitions, what was learnt and, until its own first measurement, the measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from goodput_core.declaration import spec_field
from goodput_core.slo.verdict import VerdictKind

__all__ = [
    "ClassStatus",
    "ConditionStatus",
    "DecisionStatus",
    "GateStatus",
    "LLMServiceStatus",
    "LearntStatus",
    "SummaryStatus",
    "Truth",
]


class Truth(StrEnum):
    """Value of the field `status` of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionStatus:
    """One condition of the service, with the fields of Kubernetes' own conditions."""

    type: str = spec_field("Type of the condition.", max_length=64)
    status: Truth = spec_field("True, False or Unknown.")
    reason: str = spec_field("Reason, in one word.", max_length=64)
    message: str = spec_field("Reason, in a sentence.", default="", max_length=2048)
    last_transition_time: str = spec_field(
        "Time of the last change of the condition's status.", max_length=32, format="date-time"
    )
    observed_generation: int = spec_field(
        "Generation of the spec that the condition describes.", minimum=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStatus:
    """Attainment of one class over the window of the condition `SLOAttained`."""

    name: str = spec_field("The class's name.", max_length=40)
    good: int = spec_field("Requests that met every target.", minimum=0)
    total: int = spec_field("Requests that were judged.", minimum=0)
    attainment: str | None = spec_field(
        "Share of the judged requests that are good; absent if none was judged.",
        default=None,
        max_length=16,
    )
    lower: str | None = spec_field(
        "Lower confidence bound of the attainment; absent if no request was judged.",
        default=None,
        max_length=16,
    )
    upper: str | None = spec_field(
        "Upper confidence bound of the attainment; absent if no request was judged.",
        default=None,
        max_length=16,
    )
    objective: str | None = spec_field(
        "Objective of the class; absent if it has none.", default=None, max_length=16
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionStatus:
    """A change that a control law decided, applied or only recommended."""

    at: str = spec_field("Time of the decision.", max_length=32, format="date-time")
    knob: str = spec_field("Changed quantity, such as TokenBudget or Replicas.", max_length=32)
    reason: str = spec_field("Reason, in one word.", max_length=64)
    message: str = spec_field("Change and reason, in a sentence.", max_length=1024)
    applied: bool = spec_field("True if the decision was applied.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryStatus:
    """Contents of the columns of `kubectl get`."""

    replicas: str | None = spec_field("Ready and desired replicas.", default=None, max_length=32)
    attainment: str | None = spec_field(
        "Attainment and objective of the class with the smallest margin.",
        default=None,
        max_length=64,
    )
    goodput: str | None = spec_field(
        "Requests per second that met their targets.", default=None, max_length=32
    )
    budget: str | None = spec_field("Token budget of a step.", default=None, max_length=32)
    phase: str | None = spec_field(
        "Reason of the most important condition.", default=None, max_length=64
    )
    gate: str | None = spec_field(
        "Phase of the gate of a new revision, its pairs and its verdict so far; absent without a "
        "gate.",
        default=None,
        max_length=64,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateStatus:
    """The gate of the update revision: its progress, and its verdict."""

    revision: str = spec_field("The judged revision.", max_length=63)
    baseline: str = spec_field("The stable revision it is compared with.", max_length=63)
    phase: str = spec_field(
        "Starting, Replaying, Waiting, Passed, Failed, Paused or Suspended.", max_length=32
    )
    pairs: str | None = spec_field(
        "Recorded pairs of runs and planned ones.", default=None, max_length=32
    )
    attempt: int = spec_field(
        "Number of the attempt; invalid measurements are repeated.", default=1, minimum=1
    )
    verdict: VerdictKind | None = spec_field(
        "The verdict, or the verdict so far; absent before the first pair.", default=None
    )
    reason: str | None = spec_field("Reason, in one word.", default=None, max_length=64)
    message: str | None = spec_field("Reason, in a sentence.", default=None, max_length=3000)
    interval: str | None = spec_field(
        "Difference of attainment against the baseline in the class that decided, with its bounds "
        "in percentage points.",
        default=None,
        max_length=160,
    )
    report: str | None = spec_field(
        "Folder of the recorded runs; absent without `records`.", default=None, max_length=700
    )
    started_at: str | None = spec_field(
        "Start of the gate.", default=None, max_length=32, format="date-time"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntStatus:
    """Learnt capacity of the replicas, from which a restarted operator continues."""

    proven_permille: int | None = spec_field(
        "Highest load of a replica that was served with slack, in thousandths of the predicted "
        "load; absent if none was observed.",
        default=None,
        minimum=1,
    )
    proven_time: str | None = spec_field(
        "Time of that observation.", default=None, max_length=32, format="date-time"
    )
    failed_permille: int | None = spec_field(
        "Lowest load of a replica at which a target was missed, in thousandths of the predicted "
        "load; absent if none was observed.",
        default=None,
        minimum=1,
    )
    failed_time: str | None = spec_field(
        "Time of that observation.", default=None, max_length=32, format="date-time"
    )
    proven_milli_requests_per_second: int | None = spec_field(
        "The same as provenPermille in thousandths of a request per second, for a server whose "
        "load cannot be predicted.",
        default=None,
        minimum=1,
    )
    failed_milli_requests_per_second: int | None = spec_field(
        "The same as failedPermille in thousandths of a request per second, for a server whose "
        "load cannot be predicted.",
        default=None,
        minimum=1,
    )
    burstiness_percent: int | None = spec_field(
        "Variance of the arrivals in ten seconds, in percent of that of independent arrivals.",
        default=None,
        minimum=0,
    )
    burst_milli_requests_per_second: int | None = spec_field(
        "Requests per second of bursts that recur, in thousandths; absent if none recur.",
        default=None,
        minimum=1,
    )
    burst_time: str | None = spec_field(
        "Time of the last of these bursts.", default=None, max_length=32, format="date-time"
    )
    startup_seconds: tuple[int, ...] = spec_field(
        "Latest start-up times of a replica, the oldest first.", default=(), max_items=16
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMServiceStatus:
    """Observed state of a service."""

    observed_generation: int | None = spec_field(
        "Generation of the spec that the status describes.", default=None, minimum=0
    )
    replicas: int | None = spec_field("Number of engine pods.", default=None, minimum=0)
    ready_replicas: int | None = spec_field("Number of ready engine pods.", default=None, minimum=0)
    selector: str | None = spec_field(
        "Labels of the engine pods, for autoscalers.", default=None, max_length=512
    )
    recommended_replicas: int | None = spec_field(
        "Number of replicas that the control law recommends.", default=None, minimum=0
    )
    token_budget: int | None = spec_field(
        "Token budget of a step, as set on the engines.", default=None, minimum=0
    )
    learnt: LearntStatus | None = spec_field("Learnt capacity of the replicas.", default=None)
    classes: tuple[ClassStatus, ...] = spec_field(
        "Attainment by class.", default=(), max_items=16, key="name"
    )
    goodput: str | None = spec_field(
        "Requests per second that met their targets.", default=None, max_length=32
    )
    summary: SummaryStatus | None = spec_field(
        "Contents of the columns of `kubectl get`.", default=None
    )
    current_revision: str | None = spec_field("The serving revision.", default=None, max_length=63)
    update_revision: str | None = spec_field(
        "Revision of the spec as last applied.", default=None, max_length=63
    )
    failed_revision: str | None = spec_field(
        "The last revision that its gate rejected.", default=None, max_length=63
    )
    gate: GateStatus | None = spec_field(
        "The gate of the update revision; absent without a gate.", default=None
    )
    conditions: tuple[ConditionStatus, ...] = spec_field(
        "Conditions of the service.", default=(), max_items=16, key="type"
    )
    decisions: tuple[DecisionStatus, ...] = spec_field(
        "Latest decisions, newest first.", default=(), max_items=10
    )
