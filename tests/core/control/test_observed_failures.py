"""The load at which another server missed its targets, learnt in a queue of known capacity."""

from __future__ import annotations

import random
from collections import deque
from fractions import Fraction
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples

from goodput_core.control import (
    ReplicaPhase,
    ReplicaReason,
    ReplicaWindow,
    ServiceObservation,
    ServiceParams,
    ServiceState,
    Signal,
    Traffic,
    service_law,
)
from goodput_core.control.slo_window import ClassOutcomes, ClassWindow, TargetCounts
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import ControlMode
from goodput_core.units import NS_PER_S

INTERVAL_S = 10
CHAT = SLOClass(name="chat", ttft_ms=10_000, tpot_ms=200, objective=Fraction(95, 100))


class FifoService:
    """Replicas that share one queue, and start exactly `capacity` requests per second each.

    Args:
        capacity: requests per second of one replica.
        output_s: time from the first token of a request to its end.
        startup_s: start-up time of a replica.
        seed: seed of the arrivals.
    """

    def __init__(self, *, capacity: float, output_s: int, startup_s: int, seed: int) -> None:
        self._capacity = capacity
        self._output_s = output_s
        self._startup_s = startup_s
        self._rng = random.Random(seed)
        self._now_s = 0
        self._queue: deque[float] = deque()
        self._running: deque[tuple[float, bool]] = deque()
        self._ready_s = [0]
        self._started = 0.0
        self._params = ServiceParams(
            mode=ControlMode.AUTO, classes=(CHAT,), max_replicas=40, foreign=True
        )
        self.state = ServiceState()
        self.reasons: list[ReplicaReason] = []
        self.good: list[bool] = []

    @property
    def replicas(self) -> int:
        return len(self._ready_s)

    def run(self, per_s: float, seconds: int) -> None:
        """Serve arrivals at a rate for some time."""
        for _ in range(seconds // INTERVAL_S):
            self._interval(per_s)

    def _interval(self, per_s: float) -> None:
        begin_s, end_s = self._now_s, self._now_s + INTERVAL_S
        at_s, arrivals = begin_s + self._rng.expovariate(per_s), 0
        while at_s < end_s:
            self._queue.append(at_s)
            arrivals += 1
            at_s += self._rng.expovariate(per_s)
        ready = [s for s in self._ready_s if s < end_s]
        self._started += len(ready) * self._capacity * INTERVAL_S
        while self._queue and self._started >= 1:
            self._started -= 1
            wait_s = max(0.0, end_s - INTERVAL_S / 2 - self._queue.popleft())
            first_s = max(begin_s, end_s - INTERVAL_S / 2)
            self._running.append((first_s + self._output_s, wait_s <= CHAT.ttft_ms / 1000))
        self._started = min(self._started, len(ready))  # an idle replica saves nothing for later
        ended: list[bool] = []
        while self._running and self._running[0][0] <= end_s:
            ended.append(self._running.popleft()[1])
        self.good += ended
        self._now_s = end_s
        self._decide(arrivals, ended, len(ready))

    def _decide(self, arrivals: int, ended: list[bool], ready: int) -> None:
        judged, good = len(ended), sum(ended)
        counts = ClassWindow(
            name="chat",
            ttft=TargetCounts(judged=judged, missed=judged - good),
            tpot=TargetCounts(judged=judged),
        )
        observation = ServiceObservation(
            interval_ns=INTERVAL_S * NS_PER_S,
            traffic=Traffic(
                signal=Signal.FRESH,
                arrivals=arrivals,
                in_flight=len(self._queue) + len(self._running),
            ),
            classes=(counts,) if judged else (),
            outcomes=(ClassOutcomes(name="chat", good=good, total=judged),),
            replicas=tuple(
                ReplicaWindow(
                    name=f"chat-{n}",
                    phase=ReplicaPhase.READY if n < ready else ReplicaPhase.STARTING,
                    signal=Signal.FRESH,
                    waiting=ceil(len(self._queue) / ready) if n < ready else 0,
                )
                for n in range(self.replicas)
            ),
            desired_replicas=self.replicas,
            startups_ns=(self._startup_s * NS_PER_S,),
        )
        self.state, decision = service_law(
            self.state, observation, self._params, self._now_s * NS_PER_S
        )
        assert decision.replicas is not None
        self.reasons.append(decision.replicas.reason)
        while self.replicas < decision.apply_replicas:
            self._ready_s.append(self._now_s + self._startup_s)
        del self._ready_s[decision.apply_replicas :]


@settings(max_examples=examples(10))
@given(
    capacity=st.floats(0.3, 4),
    loads=st.lists(st.floats(0.3, 5), min_size=2, max_size=3),
    output_s=st.integers(0, 120),
    startup_s=st.integers(10, 300),
    seed=st.integers(0, 99),
)
def test_after_any_steps_of_the_load_the_replicas_fit_it(
    capacity: float, loads: list[float], output_s: int, startup_s: int, seed: int
) -> None:
    """A miss is never learnt as that of a load that a replica sustains.

    A load slightly above the capacity may be tried, because the learnt rate is an upper bound.
    """
    service = FifoService(capacity=capacity, output_s=output_s, startup_s=startup_s, seed=seed)
    for load in loads:
        service.run(load * capacity, 2400)
        learnt = service.state.replicas.learnt.failed
        assert not learnt or learnt > 0.8 * capacity
    service.run(loads[-1] * capacity, 1800 + 6 * startup_s)
    assert loads[-1] / 1.2 <= service.replicas <= loads[-1] / 0.7 + 1.5
