"""The load at which requests begin to wait longer than their TTFT target.

A replica that is busy for 80 % of its time can still keep requests waiting: arrivals and lengths
vary, and a small fleet cannot even them out. The model has two queues. A request first waits for
memory or a place in the batch, then its prompt waits for the prompts before it.

The first queue is a birth-death process of the requests on a replica. With more requests in the
batch, a replica completes more of them per second, up to its largest batch; further requests wait.
The probabilities decrease the faster, the more replicas share the arrivals, and the slower, the
more arrivals and lengths vary. The second queue has one server and an exponential tail.

This module must not know whether targets were met.

Source: Kelly, "Reversibility and Stochastic Networks", 1979, chapter 3 (processor sharing with a
rate that depends on the number of requests); Kingman, "The Single Server Queue in Heavy Traffic",
1961 (tails by the variation of arrivals and of service). That the variation of memory is added to
that of arrivals, instead of less one, was fitted to emulated engines
(tests/replay/emulation/test_sustained_load.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.control.capacity import EngineQueue, ReplicaCapacity

__all__ = ["TTFTTarget", "late_share", "sustained_load"]

_MOST_STATES: Final = 32
"""Numbers of requests at which the process is evaluated; larger batches are sampled."""
_BISECTIONS: Final = 8
LEAST_LOAD: Final = 0.3
"""The model never plans for replicas that are less busy: such a target is too close to the time of
the prompt alone, and more replicas would help little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TTFTTarget:
    """A TTFT target of a class.

    Args:
        ttft_s: the target in seconds.
        late: share of the requests that may miss it.
    """

    ttft_s: float
    late: float


def sustained_load(
    capacity: ReplicaCapacity,
    targets: Sequence[TTFTTarget],
    *,
    replicas: int,
    burstiness: float,
    most: float,
) -> float:
    """Return the device seconds per second of one replica at which every target is just met.

    Args:
        capacity: predicted capacity of one replica.
        targets: the TTFT targets. Targets that even a request alone misses do not count.
        replicas: replicas that share the arrivals.
        burstiness: variance of the arrivals in a span of time, divided by their mean; 1 if they
            are independent.
        most: largest load to return.
    """
    queue = capacity.queue
    if queue is None:
        return most
    reachable = [target for target in targets if target.ttft_s > queue.prefill_s]

    def is_met(load: float) -> bool:
        return all(
            late_share(
                capacity, load=load, ttft_s=t.ttft_s, replicas=replicas, burstiness=burstiness
            )
            <= t.late
            for t in reachable
        )

    if is_met(most):
        return most
    low, high = min(LEAST_LOAD, most), most
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


def late_share(
    capacity: ReplicaCapacity, *, load: float, ttft_s: float, replicas: int, burstiness: float
) -> float:
    """Return the share of requests that wait longer than their TTFT target, at most 1.

    Args:
        capacity: predicted capacity of one replica, with its queues.
        load: device seconds per second of one replica.
        ttft_s: the target in seconds.
        replicas: replicas that share the arrivals.
        burstiness: variance of the arrivals in a span of time, divided by their mean.
    """
    queue = capacity.queue
    assert queue is not None
    if load >= 1:
        return 1.0
    left_s = max(0.0, ttft_s - queue.prefill_s)
    in_prefill = load * queue.prefill_s / capacity.device_s
    if in_prefill >= 1:
        return 1.0
    # A router that balances the load evens out the arrivals of each replica.
    varied = burstiness / replicas + queue.prompt_spread - 1
    mean_s = queue.prefill_s * varied / (2 * (1 - in_prefill))
    behind_prompts = in_prefill * math.exp(-left_s / mean_s) if mean_s else 0.0
    steepness = 2 * replicas / (burstiness + queue.memory_spread)
    waiting = _without_place(capacity, queue, load=load, left_s=left_s, steepness=steepness)
    return min(1.0, behind_prompts + waiting)


def _without_place(
    capacity: ReplicaCapacity, queue: EngineQueue, *, load: float, left_s: float, steepness: float
) -> float:
    """Return the share of requests that wait longer than this for memory or a place in the batch.

    The time of a request with j requests in the batch is nearly x / j + y: each step has a constant
    part, which the batch shares. The product of the ratios of arrivals to completions is then a
    quotient of gamma functions.

    Args:
        capacity: predicted capacity of one replica.
        queue: the queues of the replica.
        load: device seconds per second of one replica.
        left_s: the longest wait.
        steepness: exponent of the probabilities; 1 for one replica with independent arrivals of
            equal requests.
    """
    if not capacity.batch or not load:
        return 0.0
    batch, device_s = capacity.batch, capacity.device_s
    shared_s = 0.0
    if batch > 1:
        shared_s = max(0.0, (queue.alone_s - device_s) / (1 - 1 / batch))
    own_s = max(device_s - shared_s / batch, 1e-6 * device_s)
    shape = shared_s / own_s
    log_ratio, log_zero = math.log(load * own_s / device_s), math.lgamma(1 + shape)

    def log_weight(requests: float) -> float:
        gammas = math.lgamma(requests + 1 + shape) - log_zero - math.lgamma(requests + 1)
        return steepness * (requests * log_ratio + gammas)

    stride = max(1.0, batch / _MOST_STATES)
    states = [log_weight(k * stride) for k in range(math.floor(batch / stride))]
    full = log_weight(batch)
    largest = max(full, *states)
    tail = math.exp(full - largest) / -math.expm1(steepness * math.log(load))
    total = stride * sum(math.exp(w - largest) for w in states) + tail
    return tail * math.exp(steepness * math.log(load) * left_s / device_s) / total
