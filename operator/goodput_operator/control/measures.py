"""What an interval of control is judged by: values that measuring fills and deciding reads.

They stand below both, so that neither knows the other, nor whether pods or processes were asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from goodput_core.control import DeviceCapacity, Signal, Traffic
from goodput_core.control.slo_window import ClassWindow

__all__ = ["Attained", "EngineReading", "Measures", "Silence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """What one engine pod said of itself, or that it said nothing.

    Args:
        pod: the pod's name.
        signal: whether the rest can be believed; it is not read otherwise.
        limits_revision: of the limits in force there, `limits_revision` of its state; 0: it
            started with none.
        paced: whether a law sizes its steps (`budget_law` of its state is not empty), so that a
            safety factor can be set.
        running, waiting: its requests.
        kv_used_blocks, kv_total_blocks: its KV cache.
        preemptions: since the last reading.
        token_budget, max_num_seqs, safety_percent: in force; None: not told.
        token_bounds: least and most that it may be told, by the manifest as it has read it; None:
            not told.
        most_seqs: the widest batch that it may be told; None: not told.
        settled: whether its budget has stopped following a change of the device.
        device: its law of step time, learnt or published; None: not known yet.
    """

    pod: str
    signal: Signal
    limits_revision: int = 0
    paced: bool = False
    running: int = 0
    waiting: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    preemptions: int = 0
    token_budget: int | None = None
    max_num_seqs: int | None = None
    safety_percent: int | None = None
    token_bounds: tuple[int, int] | None = None
    most_seqs: int | None = None
    settled: bool = True
    device: DeviceCapacity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attained:
    """Outcomes of one class in an interval, as routers counted them.

    Args:
        name: of the class.
        good: requests that attained.
        total: requests in the denominator: attained, missed, shed, error and timeout.
    """

    name: str
    good: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A pod that is ready and did not tell its numbers.

    Args:
        role: of the pod.
        pod: its name.
        signal: FAILED: it did not answer; MISSING: it answered without them.
        detail: what went wrong, for people.
    """

    role: str
    pod: str
    signal: Signal
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """One control interval of one service, gathered from its routers and engines.

    Args:
        interval_ns: for how long counters were counted, above 0.
        traffic: what the routers saw, all together.
        classes: how promises fared of requests that ended in the interval.
        attained: how many of them attained, by class; every class of the manifest stands here.
        engines: one reading for each engine pod that has an address.
        silent: who should have told numbers and did not, routers first.
    """

    interval_ns: int
    traffic: Traffic
    classes: tuple[ClassWindow, ...] = ()
    attained: tuple[Attained, ...] = ()
    engines: tuple[EngineReading, ...] = ()
    silent: tuple[Silence, ...] = ()
