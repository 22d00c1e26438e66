"""The enums of a manifest, shared by the command line, the CRD and the tests."""

from __future__ import annotations

from enum import StrEnum

from goodput_core.contract import PATH_CHAT_COMPLETIONS, PATH_COMPLETIONS

__all__ = [
    "AttentionKernel",
    "Baseline",
    "BudgetLaw",
    "ControlMode",
    "DataType",
    "Endpoint",
    "LateRequests",
    "OnInconclusive",
    "Policy",
    "Preemption",
    "PromptEncoding",
    "RouterPolicy",
    "RuntimeKind",
    "SamplingSource",
    "TaintEffect",
    "TolerationOperator",
]


class Policy(StrEnum):
    """Scheduling policies."""

    REQUEST = "request"
    STATIC = "static"
    DYNAMIC = "dynamic"
    ORCA = "orca"
    VLLM = "vllm"
    SARATHI = "sarathi"
    SPLITFUSE = "splitfuse"
    SJF = "sjf"
    PRIORITY = "priority"
    FASTSERVE = "fastserve"
    SLO = "slo"


class Preemption(StrEnum):
    """Methods of restoring the KV blocks of a preempted request."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    HYBRID = "hybrid"


class LateRequests(StrEnum):
    """Treatment of requests that can no longer meet their targets."""

    FINISH = "finish"
    """They are served to their end, after the requests that can meet their targets."""
    DROP = "drop"
    """They are ended with an error, so that their capacity is free for other requests."""


class DataType(StrEnum):
    """Data types in which a real model can be computed."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    AUTO = "auto"


class AttentionKernel(StrEnum):
    """Kernels that compute the attention of a real model."""

    AUTO = "auto"
    """The first one of the others that the device, the data type and the block size allow."""
    TRITON = "triton"
    FLASH_ATTN = "flash-attn"
    TORCH = "torch"


class SamplingSource(StrEnum):
    """Origins of the sampling values that a request leaves out."""

    MODEL = "model"
    """The model's `generation_config.json`."""
    OPENAI = "openai"
    """OpenAI's API."""


class RouterPolicy(StrEnum):
    """Placement policies of the router."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    POWER_OF_TWO = "power-of-two"
    PREFIX_AFFINITY = "prefix-affinity"


class RuntimeKind(StrEnum):
    """Servers that the engines' pods may run."""

    GOODPUT = "Goodput"
    VLLM = "vLLM"
    SGLANG = "SGLang"
    OPENAI = "OpenAI"
    """Any server with OpenAI's completion endpoints."""


class ControlMode(StrEnum):
    """Modes of the control laws: how their decisions are used."""

    AUTO = "Auto"
    RECOMMEND = "Recommend"
    MANUAL = "Manual"


class BudgetLaw(StrEnum):
    """Laws that determine the prefill budget of a step under control mode Auto."""

    FIXED = "fixed"
    """The configured token budget, independent of step times."""
    EMA = "ema"
    """The tightest TPOT target divided by a moving average of the time per computed token."""
    MODEL = "model"
    """The largest step that meets the tightest TPOT target according to a step-time model."""


class Baseline(StrEnum):
    """Baselines of a rollout gate."""

    FRESH = "Fresh"
    RECORDED = "Recorded"


class OnInconclusive(StrEnum):
    """Actions after an inconclusive gate."""

    PAUSE = "Pause"
    PROMOTE = "Promote"
    ROLLBACK = "Rollback"


class Endpoint(StrEnum):
    """One of OpenAI's two generation endpoints."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """The HTTP path."""
        return PATH_COMPLETIONS if self is Endpoint.COMPLETIONS else PATH_CHAT_COMPLETIONS


class PromptEncoding(StrEnum):
    """Forms in which a replay sends its prompts."""

    TOKENS = "tokens"
    TEXT = "text"


class TolerationOperator(StrEnum):
    """Comparison of a toleration with a taint."""

    EQUAL = "Equal"
    EXISTS = "Exists"


class TaintEffect(StrEnum):
    """Effects of a taint on pods that do not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"
