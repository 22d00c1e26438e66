"""`spec.engine`: how a replica schedules, and the pod it runs in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from goodput_core.spec.choices import BudgetLaw, Policy, Preemption
from goodput_core.spec.fields import Between, Cel, spec_field
from goodput_core.spec.pod import PodSpec
from goodput_core.spec.resources import ResourcesSpec
from goodput_core.units import NS_PER_MS

__all__ = ["EngineSpec", "TokenBudgetSpec"]

_MAX_TOKENS: Final = 1_048_576


def _min_above_max(budget: TokenBudgetSpec) -> str | None:
    return f"{budget.min} is above max, {budget.max}" if budget.min > budget.max else None


def _initial_outside(budget: TokenBudgetSpec) -> str | None:
    if budget.min <= budget.initial <= budget.max:
        return None
    return f"{budget.initial} lies outside min to max, {budget.min} to {budget.max}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudgetSpec:
    """Bounds and start of the tokens that one iteration may compute."""

    BETWEEN: ClassVar[tuple[Between, ...]] = (
        Between(
            field="min",
            cel=Cel(rule="self.min <= self.max", message="must not be above max"),
            problem=_min_above_max,
        ),
        Between(
            field="initial",
            cel=Cel(
                rule="self.min > self.max || "
                "(self.min <= self.initial && self.initial <= self.max)",
                message="must lie within min to max",
            ),
            problem=_initial_outside,
        ),
    )

    min: int = spec_field(
        "Least tokens per iteration.", default=256, minimum=1, maximum=_MAX_TOKENS
    )
    max: int = spec_field(
        "Most tokens per iteration.", default=8192, minimum=1, maximum=_MAX_TOKENS
    )
    initial: int = spec_field(
        "Tokens per iteration at the start.", default=2048, minimum=1, maximum=_MAX_TOKENS
    )
    law: BudgetLaw = spec_field(
        "What sizes the prompts' share of an iteration under control mode Auto; the other modes "
        "keep the initial budget.",
        default=BudgetLaw.MODEL,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """How a replica schedules."""

    image: str | None = spec_field(
        "Container image; the operator's own release when absent. Ignored outside a cluster.",
        default=None,
        min_length=1,
        max_length=512,
    )
    policy: Policy = spec_field("Scheduling policy.", default=Policy.SLO)
    preemption: Preemption = spec_field(
        "What becomes of a preempted request's KV blocks.", default=Preemption.HYBRID
    )
    batch_timeout_ms: int | None = spec_field(
        "How long a batch that is not full is waited for: dynamic counts from its oldest request "
        "(100 unless set), static from its newest (1000 unless set); other policies never wait.",
        default=None,
        minimum=0,
        maximum=3_600_000,
    )
    ageing_seconds: int = spec_field(
        "Waiting that moves a request up one level under priority, and after which every fourth "
        "start goes by waiting under sjf, so that nobody starves.",
        default=30,
        minimum=1,
        maximum=86_400,
    )
    swap_space_gib: int = spec_field(
        "Host memory of a replica for the KV blocks of preempted requests; unused by recompute.",
        default=16,
        minimum=0,
        maximum=65_536,
    )
    token_budget: TokenBudgetSpec = spec_field(
        "Tokens that one iteration may compute.", factory=TokenBudgetSpec
    )
    max_num_seqs: int = spec_field(
        "Most requests that run at once.", default=256, minimum=1, maximum=65_536
    )
    max_waiting: int = spec_field(
        "Most requests that wait; one more is refused with 429.",
        default=1024,
        minimum=0,
        maximum=1_000_000,
    )
    tensor_parallel: int = spec_field(
        "Devices that share one replica.", default=1, minimum=1, maximum=64
    )
    resources: ResourcesSpec = spec_field(
        "Compute resources; ignored outside a cluster.", factory=ResourcesSpec
    )
    drain_seconds: int = spec_field(
        "How long an engine that stops lets its running streams finish; what runs longer is cut "
        "off. Deleting the service may take ten seconds more than this. Ignored outside a cluster.",
        default=30,
        minimum=0,
        maximum=86_400,
    )
    startup_deadline_seconds: int = spec_field(
        "How long an engine may take to load its weights before its container is started again. "
        "Ignored outside a cluster.",
        default=1800,
        minimum=1,
        maximum=86_400,
    )
    pod: PodSpec = spec_field(
        "What is passed through to the engines' pods; ignored outside a cluster.", factory=PodSpec
    )

    @property
    def batch_timeout_ns(self) -> int | None:
        """`batch_timeout_ms` in nanoseconds."""
        return None if self.batch_timeout_ms is None else self.batch_timeout_ms * NS_PER_MS
