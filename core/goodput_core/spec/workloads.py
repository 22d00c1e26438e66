"""`spec.engine` and `spec.router`: scheduling, placement, and the pods of engines and routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from goodput_core.declaration import (
    Cel,
    CrossFieldRule,
    camel_case,
    data_key_field,
    declared_fields,
    exactly_one_of,
    image_field,
    in_order,
    object_name_field,
    spec_field,
)
from goodput_core.spec.choices import (
    AttentionKernel,
    BudgetLaw,
    DataType,
    LateRequests,
    Policy,
    Preemption,
    RouterPolicy,
    RuntimeKind,
    SamplingSource,
)
from goodput_core.spec.pod import PodSpec, ResourcesSpec
from goodput_core.spec.runtime import RuntimeSpec
from goodput_core.units import NS_PER_MS, NS_PER_S

__all__ = [
    "DEFAULT_BLOCK",
    "FLASH_ATTN_BLOCK",
    "EngineSpec",
    "RealModelSpec",
    "RouterSpec",
    "SessionAffinitySpec",
    "TenantsSecretSpec",
    "TokenBudgetSpec",
    "block_size_problem",
    "default_block_size",
]

_MAX_TOKENS: Final = 1_048_576
_HTTP_NAME: Final = r"^[-!#$%&'*+.^_`|~0-9A-Za-z]+$"


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


_NO_KIND: Final = "!has(self.runtime) || !has(self.runtime.kind)"
_GOODPUT: Final = f"{_NO_KIND} || self.runtime.kind == 'Goodput'"
_NOT_OPENAI: Final = f"{_NO_KIND} || self.runtime.kind != 'OpenAI'"


def _default_only(attribute: str, default: object, *, also_presets: bool = False) -> CrossFieldRule:
    """Declare that a field must have its default with a runtime that cannot follow it.

    Args:
        attribute: the field.
        default: its default; None if it must be absent.
        also_presets: True if the presets of vLLM and SGLang have an argument for the field.
    """
    name = camel_case(attribute)
    literal = f"'{default}'" if isinstance(default, str) else default
    equal = "" if default is None else f" || self.{name} == {literal}"

    def problem(engine: EngineSpec) -> str | None:
        runtime = engine.runtime
        follows = not runtime.foreign or (also_presets and runtime.has_preset)
        if follows or getattr(engine, attribute) == default:
            return None
        kind = runtime.kind.value
        if attribute == "image":
            return f"is not used with runtime kind {kind}; set spec.engine.runtime.image"
        if also_presets:
            return f"has no effect with runtime kind {kind}; remove it and use runtime.args"
        return f"is a setting of Goodput's engine, not of runtime kind {kind}; remove it"

    cel = Cel(
        rule=f"{_NOT_OPENAI if also_presets else _GOODPUT} || !has(self.{name}){equal}",
        message="has no effect with this runtime kind; remove it",
    )
    return CrossFieldRule(field=name, cel=cel, problem=problem)


def _check_budget(engine: EngineSpec) -> str | None:
    budget, kind = engine.token_budget, engine.runtime.kind
    if not engine.runtime.foreign:
        return None
    if budget.law is not BudgetLaw.MODEL:
        return f"its law is a setting of Goodput's engine, not of runtime kind {kind.value}"
    if kind is RuntimeKind.OPENAI and budget != TokenBudgetSpec():
        return "has no effect with runtime kind OpenAI; remove it and use runtime.args"
    if kind is RuntimeKind.VLLM and budget.initial < engine.max_num_seqs:
        # Source: SchedulerConfig of vLLM rejects it.
        return (
            f"its initial value, {budget.initial}, is below maxNumSeqs, {engine.max_num_seqs}, "
            "which vLLM rejects"
        )
    return None


_BUDGET_RULE: Final = CrossFieldRule(
    field="tokenBudget",
    cel=Cel(
        rule=f"({_GOODPUT}) || (self.runtime.kind == 'OpenAI' ? !has(self.tokenBudget) || "
        "((!has(self.tokenBudget.min) || self.tokenBudget.min == 64) && "
        "(!has(self.tokenBudget.max) || self.tokenBudget.max == 8192) && "
        "(!has(self.tokenBudget.initial) || self.tokenBudget.initial == 2048) && "
        "(!has(self.tokenBudget.law) || self.tokenBudget.law == 'model')) : "
        "(!has(self.tokenBudget) || !has(self.tokenBudget.law) || "
        "self.tokenBudget.law == 'model') && (self.runtime.kind != 'vLLM' || "
        "(has(self.tokenBudget) && has(self.tokenBudget.initial) ? self.tokenBudget.initial : "
        "2048) >= (has(self.maxNumSeqs) ? self.maxNumSeqs : 256)))",
        message="must fit the runtime kind: only initial has an effect, with kind vLLM it must not "
        "be below maxNumSeqs, and kind OpenAI has no token budget",
    ),
    problem=_check_budget,
)


FLASH_ATTN_BLOCK: Final = 256
"""The KV blocks of flash-attn have a multiple of so many tokens."""
DEFAULT_BLOCK: Final = 16


def default_block_size(attention: str) -> int:
    """Return the default of `blockSize` for a name of `AttentionKernel`."""
    return FLASH_ATTN_BLOCK if attention == AttentionKernel.FLASH_ATTN else DEFAULT_BLOCK


def block_size_problem(attention: str, block_size: int | None) -> str | None:
    """Return the reason why a kernel cannot read KV blocks of a size; None if it can.

    Args:
        attention: a name of `AttentionKernel`.
        block_size: tokens per block; None for the default of the kernel.
    """
    if attention != AttentionKernel.FLASH_ATTN or (block_size or 0) % FLASH_ATTN_BLOCK == 0:
        return None
    return (
        f"is {block_size}, but flash-attn needs a multiple of {FLASH_ATTN_BLOCK}; set "
        f"{FLASH_ATTN_BLOCK}, or select another attention"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModelSpec:
    """Computation of a real model: data type, attention, memory and threads of a replica."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        CrossFieldRule(
            field="blockSize",
            cel=Cel(
                rule="!has(self.attention) || self.attention != 'flash-attn' || "
                f"!has(self.blockSize) || self.blockSize % {FLASH_ATTN_BLOCK} == 0",
                message=f"flash-attn needs a multiple of {FLASH_ATTN_BLOCK}",
            ),
            problem=lambda spec: block_size_problem(spec.attention, spec.block_size),
        ),
    )

    dtype: DataType | None = spec_field(
        "Data type of the weights and of the KV cache. auto is bfloat16 on a GPU and on a CPU that "
        "computes it faster, else float32. Default: float32 on a CPU, bfloat16 on a GPU.",
        default=None,
    )
    max_model_tokens: int | None = spec_field(
        "Limit of prompt and output tokens together. Default: that of the model.",
        default=None,
        minimum=1,
        maximum=_MAX_TOKENS,
    )
    attention: AttentionKernel = spec_field(
        "Kernel of the attention: a Triton kernel or flash-attn on an NVIDIA GPU, or torch. auto "
        "is torch on a CPU. On a GPU it is flash-attn if that is installed and blockSize is a "
        "multiple of 256, else triton.",
        default=AttentionKernel.AUTO,
    )
    block_size: int | None = spec_field(
        "Tokens per KV block; at most tokenBudget.min. flash-attn needs a multiple of 256. "
        "Default: 16, or 256 if attention is flash-attn.",
        default=None,
        minimum=1,
        maximum=1024,
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
        "Threads that compute on a CPU. Default: the CPUs of the container, or of the machine, "
        "without one for each of httpProcesses. The replicas of a local service divide the cores.",
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
    def tokens_per_block(self) -> int:
        """`block_size`, or the default of the attention."""
        return self.block_size or default_block_size(self.attention)

    @property
    def memory_percent(self) -> int | None:
        """`memory_utilization` without its sign."""
        return int(self.memory_utilization[:-1]) if self.memory_utilization else None


def _check_real_model(engine: EngineSpec) -> str | None:
    if not engine.runtime.foreign or engine.real_model == RealModelSpec():
        return None
    kind = engine.runtime.kind.value
    return f"is for Goodput's engine, not for runtime kind {kind}; use runtime.args"


def _default_real_model() -> str:
    """Return the CEL expression that is true if each field of `realModel` has its default."""
    parts = []
    for field in declared_fields(RealModelSpec):
        at = f"self.realModel.{field.name}"
        literal = f"'{field.default}'" if isinstance(field.default, str) else field.default
        equal = "" if field.default is None else f" || {at} == {literal}"
        parts.append(f"(!has({at}){equal})")
    return " && ".join(parts)


_REAL_MODEL_RULE: Final = CrossFieldRule(
    field="realModel",
    cel=Cel(
        rule=f"{_GOODPUT} || !has(self.realModel) || ({_default_real_model()})",
        message="has no effect with this runtime kind; remove it",
    ),
    problem=_check_real_model,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Scheduling of a replica, and its pod."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        _default_only("image", None),
        _default_only("policy", "slo"),
        _default_only("preemption", "hybrid"),
        _default_only("batch_timeout_ms", None),
        _default_only("ageing_seconds", 30.0),
        _default_only("late_requests", "finish"),
        _default_only("swap_space_gib", 16),
        _default_only("prefill_chunk_tokens", None),
        _default_only("max_waiting", 1024),
        _default_only("http_processes", 1),
        _default_only("max_num_seqs", 256, also_presets=True),
        _default_only("tensor_parallel", 1, also_presets=True),
        _BUDGET_RULE,
        _REAL_MODEL_RULE,
    )

    runtime: RuntimeSpec = spec_field(
        "The server that the pods run; ignored if a device is emulated.", factory=RuntimeSpec
    )
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
    http_processes: int = spec_field(
        "Number of processes of a replica that serve HTTP. Each can use one CPU. In a cluster, the "
        "CPUs of resources, if given, must suffice for these processes and for realModel.threads, "
        "or else for the core process.",
        default=1,
        minimum=1,
        maximum=64,
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
class SessionAffinitySpec:
    """The name of the session of a request, by which all its requests go to one replica."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (exactly_one_of("header", "cookie"),)

    header: str | None = spec_field(
        "The request header whose value identifies the session, such as X-Session-Id.",
        default=None,
        max_length=64,
        pattern=_HTTP_NAME,
        pattern_hint="be the name of an HTTP header",
    )
    cookie: str | None = spec_field(
        "The cookie whose value identifies the session. Goodput sets no cookie.",
        default=None,
        max_length=64,
        pattern=_HTTP_NAME,
        pattern_hint="be the name of a cookie",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantsSecretSpec:
    """The Secret with the tenants of the service; only the routers' pods read it."""

    name: str = object_name_field("The Secret, in the service's namespace.")
    key: str = data_key_field(
        "The key of the Secret's data whose value is the file of tenants.", default="tenants"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """Placement of requests on replicas, and the routers' pods."""

    policy: RouterPolicy = spec_field(
        "Placement of requests.", default=RouterPolicy.PREFIX_AFFINITY
    )
    session_affinity: SessionAffinitySpec | None = spec_field(
        "Place all requests of a session on one replica, as long as that replica has at most a "
        "quarter more requests than the mean. Requests without a session are placed by the policy.",
        default=None,
    )
    tenants_secret: TenantsSecretSpec | None = spec_field(
        "Require API keys of tenants, and divide overloaded replicas fairly among them by their "
        "weights. Ignored outside a cluster.",
        default=None,
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
