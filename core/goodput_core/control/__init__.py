"""The control laws: token budget and replicas, as functions of values.

`service_law` is called once per interval by whoever runs a service: the operator in a cluster,
the fleet in virtual time. It turns two knobs in one order, budget before replicas, and records
with each decision what it was made from. `share_law` is the loop inside it: an engine asks it
before each step. Nothing here reads a clock, a metric or a file.
"""

from __future__ import annotations

from goodput_core.control.bounds import Bounds, BoundsDecision, BoundsState, bounds_law
from goodput_core.control.observation import (
    DeviceCapacity,
    ReplicaPhase,
    ReplicaWindow,
    ServiceObservation,
    Signal,
    Traffic,
)
from goodput_core.control.params import ServiceParams
from goodput_core.control.promises import ClassWindow, PromiseCounts, Standing, WindowTally
from goodput_core.control.reasons import BoundsReason, ReplicaReason, ShareReason
from goodput_core.control.replicas import ReplicaDecision, replicas_law
from goodput_core.control.service import ServiceDecision, ServiceState, service_law
from goodput_core.control.share import (
    QUANTUM_TOKENS,
    ShareDecision,
    ShareObservation,
    ShareParams,
    ShareState,
    share_law,
)
from goodput_core.control.weighing import ReplicaState
from goodput_core.histogram import LengthBin, LengthMix

__all__ = [
    "QUANTUM_TOKENS",
    "Bounds",
    "BoundsDecision",
    "BoundsReason",
    "BoundsState",
    "ClassWindow",
    "DeviceCapacity",
    "LengthBin",
    "LengthMix",
    "PromiseCounts",
    "ReplicaDecision",
    "ReplicaPhase",
    "ReplicaReason",
    "ReplicaState",
    "ReplicaWindow",
    "ServiceDecision",
    "ServiceObservation",
    "ServiceParams",
    "ServiceState",
    "ShareDecision",
    "ShareObservation",
    "ShareParams",
    "ShareReason",
    "ShareState",
    "Signal",
    "Standing",
    "Traffic",
    "WindowTally",
    "bounds_law",
    "replicas_law",
    "service_law",
    "share_law",
]
