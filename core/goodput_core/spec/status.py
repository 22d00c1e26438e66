"""`status` of an LLMService: what the operator says of it, in words and rounded numbers.

Written by the operator alone and read by people, `kubectl` and autoscalers. Nothing in it is
needed to go on after a restart except the ring of decisions, which is history.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from goodput_core.spec.fields import spec_field

__all__ = [
    "ClassStatus",
    "ConditionStatus",
    "DecisionStatus",
    "LLMServiceStatus",
    "SummaryStatus",
    "Truth",
]


class Truth(StrEnum):
    """The status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionStatus:
    """One condition, with Kubernetes' own fields."""

    type: str = spec_field("What is said.", max_length=64)
    status: Truth = spec_field("Whether it holds.")
    reason: str = spec_field("Why, in one word.", max_length=64)
    message: str = spec_field("Why, in a sentence.", default="", max_length=2048)
    last_transition_time: str = spec_field(
        "Since when the status holds.", max_length=32, format="date-time"
    )
    observed_generation: int = spec_field("Of the spec that it is said of.", minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStatus:
    """How one class fared over the window that SLOAttained names."""

    name: str = spec_field("The class's name.", max_length=40)
    good: int = spec_field("Requests that attained.", minimum=0)
    total: int = spec_field("Requests that count.", minimum=0)
    attainment: str | None = spec_field(
        "Share of them that attained; absent without any.", default=None, max_length=16
    )
    objective: str | None = spec_field(
        "Share that was promised; absent where none was.", default=None, max_length=16
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionStatus:
    """One decision of the control laws that changed something, or would have."""

    at: str = spec_field("When.", max_length=32, format="date-time")
    knob: str = spec_field("What was turned: TokenBudget or Replicas.", max_length=32)
    reason: str = spec_field("Why, in one word.", max_length=64)
    message: str = spec_field("What and why, in a sentence.", max_length=1024)
    applied: bool = spec_field("Whether it was put in force.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryStatus:
    """The strings of `kubectl get`'s columns."""

    replicas: str | None = spec_field(
        "Engines that are ready, of those that are wanted.", default=None, max_length=32
    )
    attainment: str | None = spec_field(
        "The class that is nearest to its objective, or furthest below.",
        default=None,
        max_length=64,
    )
    goodput: str | None = spec_field(
        "Requests per second that kept their promise.", default=None, max_length=32
    )
    budget: str | None = spec_field("Tokens of a step, at most.", default=None, max_length=32)
    phase: str | None = spec_field("The reason of the condition to look at.", max_length=64,
        default=None)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMServiceStatus:
    """What the operator says of a service."""

    observed_generation: int | None = spec_field(
        "Of the spec that all of this is said of.", default=None, minimum=0
    )
    replicas: int | None = spec_field("Engine pods that there are.", default=None, minimum=0)
    ready_replicas: int | None = spec_field("Of these, ready.", default=None, minimum=0)
    selector: str | None = spec_field(
        "Labels of the engine pods, for autoscalers.", default=None, max_length=512
    )
    recommended_replicas: int | None = spec_field(
        "Engines that the control law would have.", default=None, minimum=0
    )
    token_budget: int | None = spec_field(
        "Tokens of a step, at most, as engines were told.", default=None, minimum=0
    )
    classes: tuple[ClassStatus, ...] = spec_field(
        "How promises fare, by class.", default=(), max_items=16, key="name"
    )
    goodput: str | None = spec_field(
        "Requests per second that kept their promise.", default=None, max_length=32
    )
    summary: SummaryStatus | None = spec_field("For columns.", default=None)
    current_revision: str | None = spec_field(
        "The revision that serves.", default=None, max_length=63
    )
    update_revision: str | None = spec_field(
        "The revision that the spec asks for.", default=None, max_length=63
    )
    failed_revision: str | None = spec_field(
        "Reserved for gated rollouts: the last revision that was refused.",
        default=None,
        max_length=63,
    )
    conditions: tuple[ConditionStatus, ...] = spec_field(
        "What holds.", default=(), max_items=16, key="type"
    )
    decisions: tuple[DecisionStatus, ...] = spec_field(
        "The last decisions, newest first.", default=(), max_items=10
    )
