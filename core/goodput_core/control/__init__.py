"""The control laws: token budget and replicas, as pure functions of values.

`control_step` is the body of the control loop. Its drivers (for pods, for local processes, and for
the emulated fleet) call it once per interval with their observation and apply the result. The
engine calls `prefill_law` before each step. Nothing here reads a clock, a metric or a file.
"""

from __future__ import annotations

from goodput_core.control.decision import (
    Change,
    Knob,
    ServiceDecision,
    ServiceState,
    service_law,
)
from goodput_core.control.learnt import LearntCapacity
from goodput_core.control.observation import (
    MAX_STARTUPS,
    DeviceCapacity,
    ReplicaPhase,
    ReplicaWindow,
    ServiceObservation,
    ServiceParams,
    Signal,
    Traffic,
)
from goodput_core.control.prefill_budget import (
    PrefillDecision,
    PrefillObservation,
    PrefillParams,
    PrefillReason,
    PrefillState,
    prefill_law,
)
from goodput_core.control.replicas import (
    ReplicaDecision,
    ReplicaReason,
    ReplicaState,
    replica_law,
)
from goodput_core.control.slo_window import (
    ClassOutcomes,
    ClassWindow,
    OutcomeTally,
    TargetCounts,
    TargetStatus,
    WindowTally,
)
from goodput_core.control.step import (
    ControlInput,
    ControlState,
    ControlStep,
    EngineReading,
    LimitsPush,
    Setpoint,
    control_step,
)
from goodput_core.control.token_budget import (
    Bounds,
    TokenBudgetDecision,
    TokenBudgetReason,
    TokenBudgetState,
    token_budget_law,
)

__all__ = [
    "MAX_STARTUPS",
    "Bounds",
    "Change",
    "ClassOutcomes",
    "ClassWindow",
    "ControlInput",
    "ControlState",
    "ControlStep",
    "DeviceCapacity",
    "EngineReading",
    "Knob",
    "LearntCapacity",
    "LimitsPush",
    "OutcomeTally",
    "PrefillDecision",
    "PrefillObservation",
    "PrefillParams",
    "PrefillReason",
    "PrefillState",
    "ReplicaDecision",
    "ReplicaPhase",
    "ReplicaReason",
    "ReplicaState",
    "ReplicaWindow",
    "ServiceDecision",
    "ServiceObservation",
    "ServiceParams",
    "ServiceState",
    "Setpoint",
    "Signal",
    "TargetCounts",
    "TargetStatus",
    "TokenBudgetDecision",
    "TokenBudgetReason",
    "TokenBudgetState",
    "Traffic",
    "WindowTally",
    "control_step",
    "prefill_law",
    "replica_law",
    "service_law",
    "token_budget_law",
]
