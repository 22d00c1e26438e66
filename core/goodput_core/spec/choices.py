"""The words a manifest chooses from: one enum for the command line, the CRD and the tests."""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "Baseline",
    "BudgetLaw",
    "ControlMode",
    "OnInconclusive",
    "Policy",
    "Preemption",
    "RouterPolicy",
    "TaintEffect",
    "TolerationOperator",
]


class Policy(StrEnum):
    """Scheduling policies: one enum for the command line, the CRD and the tests."""

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
    """What becomes of a victim's KV blocks."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    HYBRID = "hybrid"


class RouterPolicy(StrEnum):
    """Which replica a request goes to."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    POWER_OF_TWO = "power-of-two"
    PREFIX_AFFINITY = "prefix-affinity"


class ControlMode(StrEnum):
    """Whether the control laws act, advise or stay silent."""

    AUTO = "Auto"
    RECOMMEND = "Recommend"
    MANUAL = "Manual"


class BudgetLaw(StrEnum):
    """What sizes a step's share of prompts, where the control laws act."""

    FIXED = "fixed"
    """The token budget that is set, whatever a step takes."""
    EMA = "ema"
    """The tightest time per token over a moving average of time per computed token."""
    MODEL = "model"
    """The largest step that a fitted model predicts to keep the tightest time per token."""


class Baseline(StrEnum):
    """What a gate compares a candidate with."""

    FRESH = "Fresh"
    RECORDED = "Recorded"


class OnInconclusive(StrEnum):
    """What a rollout does when its gate cannot tell."""

    PAUSE = "Pause"
    PROMOTE = "Promote"
    ROLLBACK = "Rollback"


class TolerationOperator(StrEnum):
    """How a toleration compares a taint."""

    EQUAL = "Equal"
    EXISTS = "Exists"


class TaintEffect(StrEnum):
    """What a taint does to a pod that does not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"
