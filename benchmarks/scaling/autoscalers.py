"""Scaling laws of other autoscalers for comparison: an HPA, Dynamo's planner, llm-d's analyzer.

Each law follows its documentation and has the form of `service_law`: it takes a state, the
observation of one interval and the manifest's bounds, and returns the next state and a number of
replicas. All laws have the same observations. A law that needs measured step times uses those of
the device profile, which is a better model than it would have, so that only the laws differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from goodput_core.control import ReplicaPhase, Signal
from goodput_core.control.capacity import replica_capacity
from goodput_core.histogram import LengthMix
from goodput_core.steptime import StepShape
from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from goodput_core.control import (
        DeviceCapacity,
        ReplicaWindow,
        ServiceObservation,
        ServiceParams,
    )

__all__ = [
    "DynamoState",
    "HpaParams",
    "HpaState",
    "LlmdState",
    "dynamo_law",
    "hpa_law",
    "llmd_law",
]


# --- Kubernetes' HorizontalPodAutoscaler ----------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class HpaParams:
    """Parameters of an HPA on an average per pod, such as requests in flight.

    Args:
        target: target of the metric, per pod.
        tolerance: a ratio closer to 1 than this causes no change.
        up_ns, down_ns: stabilisation windows.
        sync_ns: time between two syncs.
    """

    target: float
    tolerance: float = 0.1
    up_ns: int = 0
    down_ns: int = 300 * NS_PER_S
    sync_ns: int = 15 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class HpaState:
    """Recent recommendations, (time, replicas), and the time of the last sync."""

    recommended: tuple[tuple[int, int], ...] = ()
    synced_ns: int = -(1 << 60)


def hpa_law(
    state: HpaState,
    observation: ServiceObservation,
    params: ServiceParams,
    now_ns: int,
    hpa: HpaParams,
) -> tuple[HpaState, int]:
    """Return ceil(current · metric / target), with tolerance and stabilisation.

    When scaling up, pods that are not ready count as idle. One sync at most doubles the pods, or
    adds four. Without the metric the number does not change.

    Source: Kubernetes documentation, "Horizontal Pod Autoscaling", algorithm details and default
    scaling behaviour.
    """
    current = observation.desired_replicas
    traffic = observation.traffic
    if now_ns - state.synced_ns < hpa.sync_ns:
        return state, current
    state = replace(state, synced_ns=now_ns)
    if traffic.signal is not Signal.FRESH or not current:
        return state, _within(current, params)
    ready = len(observation.ready)
    wanted = current
    if ready:
        ratio = traffic.in_flight / (ready * hpa.target)
        if ratio > 1:
            ratio = max(1.0, traffic.in_flight / (current * hpa.target))
        pods = ready if ratio < 1 else current
        if abs(ratio - 1) > hpa.tolerance:
            wanted = math.ceil(ratio * pods)
    return _stabilised(state, wanted, current, now_ns, hpa=hpa, params=params)


def _stabilised(
    state: HpaState,
    wanted: int,
    current: int,
    now_ns: int,
    *,
    hpa: HpaParams,
    params: ServiceParams,
) -> tuple[HpaState, int]:
    """Limit a change to the lowest recent recommendation upwards, and to the highest downwards."""
    wanted = _within(wanted, params)
    longest_ns = max(hpa.up_ns, hpa.down_ns)
    known = state.recommended or (
        (now_ns - 1, current),
    )  # the present number counts as the first one
    recent = (*(r for r in known if r[0] >= now_ns - longest_ns), (now_ns, wanted))
    lowest = min(n for at_ns, n in recent if at_ns >= now_ns - hpa.up_ns)
    highest = max(n for at_ns, n in recent if at_ns >= now_ns - hpa.down_ns)
    chosen = min(max(current, lowest), highest)
    chosen = min(chosen, current + max(current, 4))
    return replace(state, recommended=recent), _within(chosen, params)


# --- Dynamo's planner -----------------------------------------------------------------------------
_THROUGHPUT_NS: Final = 180 * NS_PER_S
_SENSITIVITY: Final = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoState:
    """Counts since the last throughput tick, the latest mean lengths, and the lower bound.

    Args:
        requests, counted_ns: arrivals, and the time over which they were counted.
        finished: lengths of finished requests.
        mean: mean (input, cached, output) tokens of the latest tick; None before the first one.
        floor: replicas that the throughput needs.
    """

    requests: int = 0
    counted_ns: int = 0
    finished: LengthMix = field(default_factory=LengthMix)
    mean: tuple[int, int, int] | None = None
    floor: int = 0


def dynamo_law(
    state: DynamoState,
    observation: ServiceObservation,
    params: ServiceParams,
    now_ns: int,  # noqa: ARG001 - the law counts intervals
) -> tuple[DynamoState, int]:
    """Set a lower bound by throughput every three minutes; move by one above it by load.

    The throughput bound is the counted rate (the constant predictor) over the rate that one engine
    serves at the mean lengths within the targets. Load, in aggregated mode, adds a replica if the
    estimated TTFT, or the ITL, of every engine exceeds its target. It removes one if both are below
    0.8 of the target on every engine. It does nothing while replicas start or stop.

    Source: ai-dynamo/dynamo, docs/design-docs/planner-design.md, "Throughput-Based Scaling",
    "Scaling Decisions" and "Aggregated Mode".
    """
    current, traffic = observation.desired_replicas, observation.traffic
    if traffic.signal is not Signal.FRESH or observation.device is None:
        return state, _within(current, params)
    state = replace(
        state,
        requests=state.requests + traffic.arrivals,
        counted_ns=state.counted_ns + observation.interval_ns,
        finished=state.finished + traffic.finished,
    )
    if state.counted_ns >= _THROUGHPUT_NS:
        state = _throughput(state, observation.device, params)
    mean = state.mean
    wanted = max(current, state.floor)
    engines = [r for r in observation.ready if r.signal is Signal.FRESH]
    if wanted == current and len(engines) == current and engines and mean is not None:
        estimates = [_estimate(r, observation, params, mean) for r in engines]
        ttft_ns = min(c.ttft_ms for c in params.classes) * NS_PER_MS
        tpot_ns = params.tightest_tpot_ns
        if all(t > ttft_ns for t, _ in estimates) or all(i > tpot_ns for _, i in estimates):
            wanted = current + 1
        elif all(t < ttft_ns * _SENSITIVITY and i < tpot_ns * _SENSITIVITY for t, i in estimates):
            wanted = max(current - 1, state.floor)
    return state, _within(wanted, params)


def _throughput(state: DynamoState, device: DeviceCapacity, params: ServiceParams) -> DynamoState:
    """Compute the lower bound for the next three minutes."""
    mean = _mean(state.finished) or state.mean
    floor = state.floor
    if mean is not None:
        one = replica_capacity(
            device,
            LengthMix.of_requests([mean]),
            tpot_ns=params.tightest_tpot_ns,
            max_num_seqs=params.max_num_seqs,
            max_tokens=params.initial_tokens,
        )
        assert one is not None
        floor = math.ceil(state.requests * NS_PER_S / state.counted_ns * one.device_s)
    return DynamoState(mean=mean, floor=floor)


def _mean(mix: LengthMix) -> tuple[int, int, int] | None:
    """Return mean (input, cached, output) tokens; None before the first finished request."""
    requests = mix.requests
    if not requests:
        return None
    return (
        sum(b.input_tokens for b in mix.bins) // requests,
        sum(b.cached_tokens for b in mix.bins) // requests,
        max(1, sum(b.output_tokens for b in mix.bins) // requests),
    )


def _estimate(
    replica: ReplicaWindow,
    observation: ServiceObservation,
    params: ServiceParams,
    mean: tuple[int, int, int],
) -> tuple[float, int]:
    """Return the TTFT of the last queued request, in chunks beside the decodes, and the ITL."""
    device = observation.device
    assert device is not None
    prompt, cached, output = mean
    context = device.kv_tokens * replica.kv_used_blocks // max(1, replica.kv_total_blocks)
    decodes = StepShape.of(decodes=replica.running, decode_context_tokens=context)
    queued = (replica.waiting + 1) * (prompt - cached)
    chunk = max(1, params.initial_tokens - replica.running)
    ttft_ns = queued / chunk * device.step_ns(decodes.with_chunk(0, min(chunk, queued)))
    beside = max(1, replica.running * (prompt - cached) // output)
    return ttft_ns, device.step_ns(decodes.with_chunk(0, beside))


# --- llm-d's saturation analyzer ------------------------------------------------------------------
_QUEUE: Final = 5
_KV_SPARE: Final = 0.1
_QUEUE_SPARE: Final = 3
_PEAK_NS: Final = 60 * NS_PER_S
_LLMD_HPA: Final = HpaParams(target=1, up_ns=240 * NS_PER_S, down_ns=240 * NS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmdState:
    """Samples of the last minute (time, replica, KV share, queue), latest target, and HPA state."""

    seen: tuple[tuple[int, str, float, int], ...] = ()
    decided_ns: int = -(1 << 60)
    target: int = 0
    hpa: HpaState = field(default_factory=HpaState)


def llmd_law(
    state: LlmdState,
    observation: ServiceObservation,
    params: ServiceParams,
    now_ns: int,
    kv_threshold: float = 0.80,
) -> tuple[LlmdState, int]:
    """Add a replica if spare capacity is short; remove one if the others would still have enough.

    The law decides every minute, by the peaks of each replica's KV usage and queue in that minute,
    which saturate a replica at `kv_threshold` and at five requests. It does not decide while a
    replica starts. An HPA with stabilisation windows of four minutes applies the
    target.

    Source: llm-d/llm-d-workload-variant-autoscaler, docs/saturation-analyzer.md (one variant) and
    docs/integrations/hpa-integration.md.
    """
    current = observation.desired_replicas
    seen = [s for s in state.seen if s[0] > now_ns - _PEAK_NS]
    for replica in observation.fresh:
        used = replica.kv_used_blocks / max(1, replica.kv_total_blocks)
        seen.append((now_ns, replica.name, used, replica.waiting))
    state = replace(state, seen=tuple(seen))
    if now_ns - state.decided_ns >= _PEAK_NS:
        starting = any(r.phase is ReplicaPhase.STARTING for r in observation.replicas)
        move = 0 if starting else _saturation(state, observation, kv_threshold)
        state = replace(state, decided_ns=now_ns, target=current + move)
    if now_ns - state.hpa.synced_ns < _LLMD_HPA.sync_ns:
        return state, _within(current, params)
    hpa = replace(state.hpa, synced_ns=now_ns)
    hpa, chosen = _stabilised(hpa, state.target, current, now_ns, hpa=_LLMD_HPA, params=params)
    return replace(state, hpa=hpa), chosen


def _saturation(state: LlmdState, observation: ServiceObservation, most_kv: float) -> int:
    """Return the change in replicas: +1, 0 or −1."""
    ready = {r.name for r in observation.fresh}
    kv: dict[str, float] = {}
    queue: dict[str, int] = {}
    for _, name, used, waiting in state.seen:
        if name in ready:
            kv[name] = max(kv.get(name, 0.0), used)
            queue[name] = max(queue.get(name, 0), waiting)
    open_ = [name for name in ready if kv[name] < most_kv and queue[name] < _QUEUE]
    if not ready:
        return 0
    if not open_:
        return 1
    spare_kv = sum(most_kv - kv[name] for name in open_) / len(open_)
    spare_queue = sum(_QUEUE - queue[name] for name in open_) / len(open_)
    if spare_kv < _KV_SPARE or spare_queue < _QUEUE_SPARE:
        return 1
    if len(open_) < 2:
        return 0
    left = len(open_) - 1
    fits = most_kv - sum(kv[name] for name in open_) / left >= _KV_SPARE
    fits = fits and _QUEUE - sum(queue[name] for name in open_) / left >= _QUEUE_SPARE
    return -1 if fits else 0


def _within(replicas: int, params: ServiceParams) -> int:
    return min(max(replicas, params.min_replicas), params.max_replicas)
