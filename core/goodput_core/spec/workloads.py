"""`spec.engine` and `spec.router`: scheduling, placement of requests, and the pods of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from goodput_core.spec.choices import BudgetLaw, Policy, Preemption, RouterPolicy
from goodput_core.spec.declaration import Cel, CrossFieldRule, image_field, in_order, spec_field
from goodput_core.spec.pod import PodSpec, ResourcesSpec
from goodput_core.units import NS_PER_MS

__all__ = ["EngineSpec", "RouterSpec", "TokenBudgetSpec"]

_MAX_TOKENS: Final = 1_048_576


def _initial_outside(budget: TokenBudgetSpec) -> str | None:
    if budget.min <= budget.initial <= budget.max:
        return None
    return f"{budget.initial} lies outside min to max, {budget.min} to {budget.max}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudgetSpec:
    """Bounds and initial value of the tokens computed in one iteration."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        in_order("min", "max"),
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
        "Minimum tokens per iteration.", default=256, minimum=1, maximum=_MAX_TOKENS
    )
    max: int = spec_field(
        "Maximum tokens per iteration.", default=8192, minimum=1, maximum=_MAX_TOKENS
    )
    initial: int = spec_field(
        "Initial tokens per iteration.", default=2048, minimum=1, maximum=_MAX_TOKENS
    )
    law: BudgetLaw = spec_field(
        "Law that sizes the prefill share of an iteration under control mode Auto. The other modes "
        "use the initial budget.",
        default=BudgetLaw.MODEL,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Scheduling of a replica, and its pod."""

    image: str | None = image_field()
    policy: Policy = spec_field("Scheduling policy.", default=Policy.SLO)
    preemption: Preemption = spec_field(
        "Method of restoring the KV blocks of a preempted request.", default=Preemption.HYBRID
    )
    batch_timeout_ms: int | None = spec_field(
        "Longest wait for a batch to fill, milliseconds. The policy dynamic waits from the arrival "
        "of the oldest request (default 100), static from that of the newest (default 1000). Other "
        "policies do not wait.",
        default=None,
        minimum=0,
        maximum=3_600_000,
    )
    ageing_seconds: int = spec_field(
        "Under priority, waiting time after which a request rises by one level. Under sjf, waiting "
        "time after which every fourth admission goes to the request that has waited longest.",
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
        "Maximum number of running requests.", default=256, minimum=1, maximum=65_536
    )
    max_waiting: int = spec_field(
        "Maximum number of queued requests; further requests are rejected with 429.",
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
        "Seconds that a stopping engine gives running streams to finish; it then aborts them. "
        "Deleting the service may take ten seconds longer. Ignored outside a cluster.",
        default=30,
        minimum=0,
        maximum=86_400,
    )
    startup_deadline_seconds: int = spec_field(
        "Seconds that an engine may take to load its weights before its container is restarted. "
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
        "Seconds that a stopping router gives open streams to finish; set at least the engines' "
        "value. "
        "Ignored outside a cluster.",
        default=30,
        minimum=0,
        maximum=86_400,
    )
    pod: PodSpec = spec_field(
        "Fields of the routers' pods; ignored outside a cluster.", factory=PodSpec
    )
