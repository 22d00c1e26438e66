"""`spec.engine` and `spec.router`: scheduling, placement, and the pods of engines and routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from goodput_core.declaration import Cel, CrossFieldRule, image_field, in_order, spec_field
from goodput_core.spec.choices import (
    BudgetLaw,
    DataType,
    LateRequests,
    Policy,
    Preemption,
    RouterPolicy,
    SamplingSource,
)
from goodput_core.spec.pod import PodSpec, ResourcesSpec
from goodput_core.units import NS_PER_MS, NS_PER_S

__all__ = ["EngineSpec", "RealModelSpec", "RouterSpec", "TokenBudgetSpec"]

_MAX_TOKENS: Final = 1_048_576


def _check_initial(budget: TokenBudgetSpec) -> str | None:
    if budget.min <= budget.initial <= budget.max:
        return None
    return f"{budget.initial} lies outside {budget.min} to {budget.max}, the values of min and max"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudgetSpec:
    """Bounds and initial value of the token budget, the largest number of tokens in a step."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        in_order("min", "max"),
        CrossFieldRule(
            field="initial",
            cel=Cel(
                rule="self.min > self.max || "
                "(self.min <= self.initial && self.initial <= self.max)",
                message="must not be below min or above max",
            ),
            problem=_check_initial,
        ),
    )

    min: int = spec_field("Minimum tokens per step.", default=64, minimum=1, maximum=_MAX_TOKENS)
    max: int = spec_field("Maximum tokens per step.", default=8192, minimum=1, maximum=_MAX_TOKENS)
    initial: int = spec_field(
        "Initial tokens per step.", default=2048, minimum=1, maximum=_MAX_TOKENS
    )
    law: BudgetLaw = spec_field(
        "Law that determines the number of prompt tokens in each step under control mode Auto. The "
        "other modes use the initial budget.",
        default=BudgetLaw.MODEL,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModelSpec:
    """Computation of a real model: data type, memory and threads of a replica."""

    dtype: DataType | None = spec_field(
        "Data type of the weights and of the KV cache. Default: float32 on a CPU, bfloat16 on a "
        "GPU.",
        default=None,
    )
    max_model_tokens: int | None = spec_field(
        "Limit of prompt and output tokens together. Default: that of the model.",
        default=None,
        minimum=1,
        maximum=_MAX_TOKENS,
    )
    block_size: int = spec_field(
        "Tokens per KV block; at most tokenBudget.min.", default=16, minimum=1, maximum=1024
    )
    kv_blocks: int | None = spec_field(
        "Number of KV blocks. Default: as many as memoryUtilization allows, but not more "
        "than maxNumSeqs requests of full length can use.",
        default=None,
        minimum=1,
        maximum=100_000_000,
    )
    memory_utilization: str | None = spec_field(
        "Share of the memory that is left beside the weights and the largest step, for KV blocks "
        "and swap space. Default: 50% on a CPU, 90% on a GPU. The replicas of a local service "
        "divide it.",
        default=None,
        max_length=3,
        pattern="^([1-9]|[1-8][0-9]|9[0-5])%$",
        pattern_hint="be a whole percentage of 1% to 95%, such as '50%'",
    )
    threads: int | None = spec_field(
        "Threads that compute on a CPU. Default: one less than the CPUs of the container, or of "
        "the machine. The replicas of a local service divide the cores.",
        default=None,
        minimum=1,
        maximum=1024,
    )
    sampling_defaults: SamplingSource = spec_field(
        "Source of temperature and other fields that a request leaves out: the model's "
        "generation_config.json (model), or OpenAI's API (openai).",
        default=SamplingSource.MODEL,
    )

    @property
    def memory_percent(self) -> int | None:
        """`memory_utilization` without its sign."""
        return int(self.memory_utilization[:-1]) if self.memory_utilization else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Scheduling of a replica, and its pod."""

    image: str | None = image_field()
    policy: Policy = spec_field("Scheduling policy.", default=Policy.SLO)
    preemption: Preemption = spec_field(
        "Method of restoring the KV blocks of a preempted request.", default=Preemption.HYBRID
    )
    batch_timeout_ms: int | None = spec_field(
        "Longest wait for a batch to fill, in milliseconds. With the policy dynamic, the wait "
        "begins at the arrival of the oldest request (default 100). With static, it begins at the "
        "arrival of the newest request (default 1000). Other policies do not wait.",
        default=None,
        minimum=0,
        maximum=3_600_000,
    )
    ageing_seconds: float = spec_field(
        "With the policy priority, waiting time after which a request rises by one level. With "
        "sjf, waiting time after which every fourth admission goes to the request that has waited "
        "longest. A fraction of a second is allowed.",
        default=30,
        minimum=0.001,
        maximum=86_400,
    )
    late_requests: LateRequests = spec_field(
        "Treatment of requests that can no longer meet their targets. With finish, they are served "
        "to their end. With drop, they are ended: with 429 before their first token, and with an "
        "error event in a stream that has begun.",
        default=LateRequests.FINISH,
    )
    swap_space_gib: int = spec_field(
        "Host memory of a replica for the KV blocks of preempted requests; not used with the "
        "preemption recompute.",
        default=16,
        minimum=0,
        maximum=65_536,
    )
    token_budget: TokenBudgetSpec = spec_field(
        "Largest number of tokens that a step computes.", factory=TokenBudgetSpec
    )
    prefill_chunk_tokens: int | None = spec_field(
        "Largest number of prompt tokens of one request that a step computes. The rest of the "
        "token budget is left for other prompts. Default: only the token budget limits a prompt.",
        default=None,
        minimum=1,
        maximum=_MAX_TOKENS,
    )
    max_num_seqs: int = spec_field(
        "Maximum number of running requests.", default=256, minimum=1, maximum=65_536
    )
    max_waiting: int = spec_field(
        "Maximum number of queued requests. If the queue is full, the least important request, "
        "new or waiting, is rejected with 429.",
        default=1024,
        minimum=0,
        maximum=1_000_000,
    )
    real_model: RealModelSpec = spec_field(
        "Computation of a real model; ignored by an emulated device.", factory=RealModelSpec
    )
    tensor_parallel: int = spec_field(
        "Number of devices that compute each layer of the model together.",
        default=1,
        minimum=1,
        maximum=64,
    )
    resources: ResourcesSpec = spec_field(
        "Compute resources; ignored outside a cluster.", factory=ResourcesSpec
    )
    drain_seconds: int = spec_field(
        "Seconds that running streams have to finish when an engine stops; the engine then aborts "
        "them. Deleting the service may take ten seconds longer. Ignored outside a cluster.",
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
    def ageing_ns(self) -> int:
        """`ageing_seconds` in nanoseconds."""
        return round(self.ageing_seconds * NS_PER_S)

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
        "Number of router pods; a local service has one router.", default=2, minimum=1, maximum=64
    )
    image: str | None = image_field()
    resources: ResourcesSpec = spec_field(
        "Compute resources; ignored outside a cluster.", factory=ResourcesSpec
    )
    drain_seconds: int = spec_field(
        "Seconds that open streams have to finish when a router stops; should not be less than the "
        "engines' drainSeconds. Ignored outside a cluster.",
        default=30,
        minimum=0,
        maximum=86_400,
    )
    pod: PodSpec = spec_field(
        "Fields of the routers' pods; ignored outside a cluster.", factory=PodSpec
    )
