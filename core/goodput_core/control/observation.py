"""Inputs of the control laws: one interval of one service, and the manifest's parameters.

Drivers fill them from metrics, and the emulated fleet fills them from its own objects. Counters are
differences since the last observation. Values that could not be read are marked as missing or
failed; they are never replaced by zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from goodput_core.control.slo_window import ClassOutcomes, ClassWindow
from goodput_core.histogram import LengthMix
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import ControlMode, RouterPolicy
from goodput_core.steptime import StepTimeForm
from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_core.steptime import StepShape

__all__ = [
    "MAX_STARTUPS",
    "DeviceCapacity",
    "ReplicaPhase",
    "ReplicaWindow",
    "ServiceObservation",
    "ServiceParams",
    "Signal",
    "Traffic",
]


MAX_STARTUPS: Final = 16
"""Number of latest start-up times that a driver passes to the laws."""


class Signal(StrEnum):
    """State of a measurement."""

    FRESH = "fresh"
    """The values belong to this interval; zeros mean that no request arrived."""
    MISSING = "missing"
    """A process responded without the values, or was read for the first time."""
    FAILED = "failed"
    """A process did not respond in time."""


class ReplicaPhase(StrEnum):
    """Lifecycle phase of a replica."""

    STARTING = "starting"
    """Created, but not routable yet."""
    READY = "ready"
    """Routable."""
    DRAINING = "draining"
    """Finishing its requests, and admitting no new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Traffic of one interval over all routers.

    Args:
        signal: state of the measurement; the other fields are valid only if this is FRESH.
        arrivals: requests that arrived, rejected ones included.
        in_flight: requests that have not ended.
        finished: lengths of the requests that finished in the interval.
    """

    signal: Signal
    arrivals: int = 0
    in_flight: int = 0
    finished: LengthMix = field(default_factory=LengthMix)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWindow:
    """Measurements of one replica over one interval.

    Args:
        name: unique within the service.
        phase: lifecycle phase.
        signal: state of the measurement; the following fields are valid only if this is FRESH.
        running, waiting: running and queued requests.
        kv_used_blocks, kv_total_blocks: blocks of the KV cache.
        preemptions: preemptions in the interval; None if the server does not publish them.
        settled: False while the replica's token budget adapts to a change of the device.
    """

    name: str
    phase: ReplicaPhase
    signal: Signal
    running: int = 0
    waiting: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    preemptions: int | None = 0
    settled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCapacity:
    """The device behind a replica.

    Args:
        form: step-time form that predicts the device time of a step.
        kv_tokens: capacity of the KV cache in tokens.
        host_ns_per_step, host_ns_per_request: host time of a step, which adds to its device time.
    """

    form: StepTimeForm
    kv_tokens: int
    host_ns_per_step: int = 0
    host_ns_per_request: int = 0

    def step_ns(self, shape: StepShape) -> int:
        """Predict the time of a step of this shape, including the host's."""
        host_ns = self.host_ns_per_step + self.host_ns_per_request * shape.num_requests
        return self.form.step_ns(shape) + host_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceObservation:
    """Observation of one service over one interval.

    Args:
        interval_ns: length of the interval, above 0.
        traffic: traffic over all routers.
        classes: met and missed targets of the requests that ended in the interval.
        outcomes: outcomes of these requests.
        objective_missed: True if the service misses an objective in the window of its status; False
            if it has no such window.
        replicas: all existing replicas.
        desired_replicas: desired replicas of the workload; different from the last decision only
            if another controller changed them.
        startups_ns: start-up times of the latest replicas, from creation until routable.
        device: the replicas' device; None if no replica has reported it yet.
    """

    interval_ns: int
    traffic: Traffic
    classes: tuple[ClassWindow, ...] = ()
    outcomes: tuple[ClassOutcomes, ...] = ()
    objective_missed: bool = False
    replicas: tuple[ReplicaWindow, ...] = ()
    desired_replicas: int
    startups_ns: tuple[int, ...] = ()
    device: DeviceCapacity | None = None

    @property
    def ready(self) -> tuple[ReplicaWindow, ...]:
        """Routable replicas."""
        return tuple(r for r in self.replicas if r.phase is ReplicaPhase.READY)

    @property
    def fresh(self) -> tuple[ReplicaWindow, ...]:
        """Routable replicas with valid measurements."""
        return tuple(r for r in self.ready if r.signal is Signal.FRESH)

    @property
    def waiting(self) -> int:
        """Queued requests of the routable replicas with valid measurements.

        If no routable replica has any, the queue is unknown, and all requests in flight count.
        """
        if self.ready and not self.fresh:
            return self.traffic.in_flight
        return sum(r.waiting for r in self.fresh)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParams:
    """Parameters of the control laws, from the manifest.

    Args:
        mode: Auto, Recommend or Manual.
        classes: the SLO classes.
        replicas: replica count set by a user or another autoscaler; the replica law then only
            recommends. None if not set.
        min_replicas, max_replicas: bounds of the replicas.
        min_tokens, max_tokens, initial_tokens: bounds and initial value of the token budget.
        max_num_seqs: the initial batch width, and its upper bound.
        stabilization_ns: time for which fewer replicas must suffice before replicas are removed.
        default_startup_ns: start-up time that is assumed until one has been measured.
        balanced: True if the router places requests by the load of the replicas, so that they share
            one queue.
        foreign: True if the replicas run another server than Goodput's engine, whose limits cannot
            change at run time.
        expected_per_s: requests per second that one replica of such a server is expected to
            sustain; None if not known.
    """

    mode: ControlMode
    classes: tuple[SLOClass, ...]
    replicas: int | None = None
    min_replicas: int = 1
    max_replicas: int = 8
    min_tokens: int = 256
    max_tokens: int = 8192
    initial_tokens: int = 2048
    max_num_seqs: int = 256
    stabilization_ns: int = 300 * NS_PER_S
    default_startup_ns: int = 120 * NS_PER_S
    balanced: bool = True
    foreign: bool = False
    expected_per_s: float | None = None

    @classmethod
    def of(cls, spec: LLMServiceSpec) -> ServiceParams:
        """Return the parameters of a manifest."""
        budget = spec.engine.token_budget
        expected = spec.control.replica_requests_per1000_seconds
        return cls(
            mode=spec.control.mode,
            classes=tuple(spec.slo.by_name().values()),
            replicas=spec.replicas,
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            min_tokens=budget.min,
            max_tokens=budget.max,
            initial_tokens=budget.initial,
            max_num_seqs=spec.engine.max_num_seqs,
            stabilization_ns=spec.control.scale_down_stabilization_seconds * NS_PER_S,
            balanced=spec.router.policy is not RouterPolicy.ROUND_ROBIN,
            foreign=spec.engine.runtime.foreign,
            expected_per_s=None if expected is None else expected / 1000,
        )

    @property
    def initial_replicas(self) -> int:
        """Replica count at the start, and in the modes other than Auto."""
        return self.min_replicas if self.replicas is None else self.replicas

    @property
    def tightest_tpot_ns(self) -> int:
        """The smallest TPOT target of any class."""
        return min(c.tpot_ms for c in self.classes) * NS_PER_MS
