"""`spec.engine` and `spec.router`: how a replica schedules, how requests are placed, their pods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from goodput_core.spec.choices import BudgetLaw, Policy, Preemption, RouterPolicy
from goodput_core.spec.declaration import Cel, CrossFieldRule, image_field, spec_field
from goodput_core.spec.pod import PodSpec, ResourcesSpec
from goodput_core.units import NS_PER_MS

__all__ = ["EngineSpec", "RouterSpec", "TokenBudgetSpec"]

_MAX_TOKENS: Final = 1_048_576


def _min_above_max(budget: TokenBudgetSpec) -> str | None:
    return f"{budget.min} is above max, {budget.max}" if budget.min > budget.max else None


def _initial_outside(budget: TokenBudgetSpec) -> str | None:
    if budget.min <= budget.initial <= budget.max:
        return None
    return f"{budget.initial} lies outside min to max, {budget.min} to {budget.max}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudgetSpec:
    """Bounds and initial value of the tokens computed in one iteration."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        CrossFieldRule(
            field="min",
            cel=Cel(rule="self.min <= self.max", message="must not be above max"),
            problem=_min_above_max,
        ),
        CrossFieldRule(
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
        "How the prefill share of an iteration is sized under control mode Auto. The other modes "
        "keep the initial budget.",
        default=BudgetLaw.MODEL,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Scheduling of a replica, and its pod."""

    image: str | None = image_field()
    policy: Policy = spec_field("Scheduling policy.", default=Policy.SLO)
    preemption: Preemption = spec_field(
        "How the KV blocks of a preempted request are restored.", default=Preemption.HYBRID
    )
    batch_timeout_ms: int | None = spec_field(
        "Longest wait for a batch to fill: dynamic counts from its oldest request (default 100), "
        "static from its newest (default 1000). Other policies do not wait.",
        default=None,
        minimum=0,
        maximum=3_600_000,
    )
    ageing_seconds: int = spec_field(
        "Waiting time that raises a request by one level under priority. Under sjf, every fourth "
        "request is admitted by waiting time once one has waited this long, to prevent starvation.",
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
        "Tokens computed in one iteration.", factory=TokenBudgetSpec
    )
    max_num_seqs: int = spec_field(
        "Most requests that run at once.", default=256, minimum=1, maximum=65_536
    )
    max_waiting: int = spec_field(
        "Most requests in the queue; further ones are refused with 429.",
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
        "How long a stopping engine lets running streams finish; longer ones are cut off. Deleting "
        "the service may take ten seconds more than this. Ignored outside a cluster.",
        default=30,
        minimum=0,
        maximum=86_400,
    )
    startup_deadline_seconds: int = spec_field(
        "How long an engine may take to load its weights before its container is restarted. "
        "Ignored outside a cluster.",
        default=1800,
        minimum=1,
        maximum=86_400,
    )
    pod: PodSpec = spec_field(
        "Fields of the engines' pods; ignored outside a cluster.", factory=PodSpec
    )

    @property
    def batch_timeout_ns(self) -> int | None:
        """`batch_timeout_ms` in nanoseconds."""
        return None if self.batch_timeout_ms is None else self.batch_timeout_ms * NS_PER_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """Placement of requests on replicas, and the routers' pods."""

    policy: RouterPolicy = spec_field(
        "Placement of requests.", default=RouterPolicy.PREFIX_AFFINITY
    )
    replicas: int = spec_field(
        "Router pods; a local service runs one.", default=2, minimum=1, maximum=64
    )
    image: str | None = image_field()
    resources: ResourcesSpec = spec_field(
        "Compute resources; ignored outside a cluster.", factory=ResourcesSpec
    )
    drain_seconds: int = spec_field(
        "How long a stopping router lets open streams finish; set at least the engines' value. "
        "Ignored outside a cluster.",
        default=30,
        minimum=0,
        maximum=86_400,
    )
    pod: PodSpec = spec_field(
        "Fields of the routers' pods; ignored outside a cluster.", factory=PodSpec
    )
