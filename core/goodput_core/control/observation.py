"""What the service's law is told once per interval: values alone, whoever gathered them.

The operator fills these from metrics, the fleet in virtual time from its own objects. Counters
come as what they grew by since the last observation. What could not be learnt is said to be
missing or failed; it is never a zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from goodput_core.control.promises import ClassWindow
from goodput_core.histogram import LengthMix
from goodput_core.steptime import StepTimeForm

if TYPE_CHECKING:
    from goodput_core.steptime import StepShape

__all__ = [
    "DeviceCapacity",
    "ReplicaPhase",
    "ReplicaWindow",
    "ServiceObservation",
    "Signal",
    "Traffic",
]


class Signal(StrEnum):
    """Whether numbers can be believed."""

    FRESH = "fresh"
    """They are of this interval; zeros among them mean that nothing came."""
    MISSING = "missing"
    """Somebody answered, and the numbers were not there, or not yet."""
    FAILED = "failed"
    """Nobody answered, or what was answered is old."""


class ReplicaPhase(StrEnum):
    """Where a replica is in its life."""

    STARTING = "starting"
    """Created and not routable yet."""
    READY = "ready"
    """Routable."""
    DRAINING = "draining"
    """Finishes what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What routers saw, all of them together.

    Args:
        signal: whether the rest can be believed; it is not read otherwise.
        arrivals: requests that came in the interval, refused ones too.
        in_flight: requests that have no outcome yet.
        finished: lengths of those that were answered in the interval.
    """

    signal: Signal
    arrivals: int = 0
    in_flight: int = 0
    finished: LengthMix = field(default_factory=LengthMix)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWindow:
    """One replica.

    Args:
        name: unique among them.
        phase: where it is.
        signal: whether the rest can be believed; it is not read otherwise.
        running, waiting: its requests.
        kv_used_blocks, kv_total_blocks: its KV cache.
        preemptions: in the interval.
        settled: whether its token budget has stopped following a change of the device.
    """

    name: str
    phase: ReplicaPhase
    signal: Signal
    running: int = 0
    waiting: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    preemptions: int = 0
    settled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCapacity:
    """What is known of the device behind a replica.

    Args:
        form: its law of step time.
        kv_tokens: tokens that its KV cache holds.
        host_ns_per_step, host_ns_per_request: what a step takes beside the device's time.
    """

    form: StepTimeForm
    kv_tokens: int
    host_ns_per_step: int = 0
    host_ns_per_request: int = 0

    def step_ns(self, shape: StepShape) -> int:
        """How long a step of this shape takes."""
        host_ns = self.host_ns_per_step + self.host_ns_per_request * shape.num_requests
        return self.form.step_ns(shape) + host_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceObservation:
    """One interval of one service.

    Args:
        interval_ns: how long counters were counted for, above 0.
        traffic: what came.
        classes: how promises fared of requests that ended in the interval.
        replicas: those that exist.
        replicas_asked: how many the workload is asked to have; what was decided last, unless
            somebody else changed it.
        startups_ns: from created to routable, of the latest replicas that started.
        device: what a step takes; None: not known yet.
    """

    interval_ns: int
    traffic: Traffic
    classes: tuple[ClassWindow, ...] = ()
    replicas: tuple[ReplicaWindow, ...] = ()
    replicas_asked: int
    startups_ns: tuple[int, ...] = ()
    device: DeviceCapacity | None = None

    @property
    def ready(self) -> tuple[ReplicaWindow, ...]:
        """Those that are routable."""
        return tuple(r for r in self.replicas if r.phase is ReplicaPhase.READY)

    @property
    def believed(self) -> tuple[ReplicaWindow, ...]:
        """Of the routable ones, those whose numbers can be believed."""
        return tuple(r for r in self.ready if r.signal is Signal.FRESH)
