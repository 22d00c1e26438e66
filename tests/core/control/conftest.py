"""A simulated service: replicas that batch continuously, start slowly and report late."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from goodput_core.control import (
    Bounds,
    DeviceCapacity,
    ReplicaPhase,
    ReplicaWindow,
    ServiceDecision,
    ServiceObservation,
    ServiceParams,
    ServiceState,
    Signal,
    Traffic,
    WindowTally,
    service_law,
)
from goodput_core.histogram import LengthMix
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import SLOClass, Targets
from goodput_core.spec.choices import ControlMode
from goodput_core.steptime import RooflineForm, StepShape
from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL_NS = 10 * NS_PER_S
CLASS = SLOClass(name="chat", ttft_ms=10_000, tpot_ms=200, objective=Fraction(95, 100))
# Reading the weights takes as long as computing 80 tokens.
FORM = RooflineForm(
    c0_ns=80 * NS_PER_MS,
    c1_ns_per_token=1 * NS_PER_MS,
    c2_ns_per_context_token=100,
    c4_ns_per_request=100_000,
)
LENGTHS = ((400, 60), (400, 60), (400, 60), (2000, 150))


@dataclass(order=True)
class Request:
    """One request on a replica."""

    at_ns: int
    prompt: int = field(compare=False)
    output: int = field(compare=False)
    left: int = field(compare=False)
    first_ns: int = field(default=0, compare=False)


class PlantReplica:
    """A replica with one decode batch, and prompts in chunks beside it."""

    def __init__(self, name: str, ready_ns: int, width: int) -> None:
        self.name = name
        self.ready_ns = ready_ns
        self.width = width
        self.draining = False
        self.now_ns = ready_ns
        self.queue: deque[Request] = deque()
        self.batch: list[tuple[int, int, Request]] = []
        self.prefilling: Request | None = None
        self.context = 0
        self.epoch = 0
        self.steps = 0

    @property
    def in_flight(self) -> int:
        return len(self.queue) + len(self.batch) + (self.prefilling is not None)

    def run(self, until_ns: int, plant: Plant) -> None:
        """Run the steps that begin before `until_ns`."""
        while self.now_ns < until_ns and self.in_flight:
            self._step(plant)
        if not self.in_flight:
            self.now_ns = max(self.now_ns, until_ns)

    def _step(self, plant: Plant) -> None:
        bounds, batch = plant.bounds, self.batch
        beside = StepShape.of(decodes=len(batch), decode_context_tokens=self.context + len(batch))
        tokens = bounds.max_tokens - len(batch)
        if batch:
            target_ns = CLASS.tpot_ms * NS_PER_MS * bounds.safety_percent / 100
            spare_ns = target_ns - FORM.c2_ns_per_context_token * beside.context_tokens
            spare_ns -= FORM.c4_ns_per_request * (len(batch) + 1)
            in_time = int(spare_ns // FORM.c1_ns_per_token) - len(batch)
            tokens = min(tokens, max(32, in_time))
        shape = beside
        first: list[Request] = []
        while tokens > 0:
            if self.prefilling is None:
                if not self.queue or len(batch) + len(first) >= min(
                    self.width, bounds.max_num_seqs
                ):
                    break
                self.prefilling = self.queue.popleft()
            prompt = self.prefilling
            chunk = min(tokens, prompt.left)
            shape = shape.with_chunk(prompt.prompt - prompt.left, chunk)
            prompt.left -= chunk
            tokens -= chunk
            if not prompt.left:
                first.append(prompt)
                self.prefilling = None
        self._end_step(plant, FORM.step_ns(shape), first)

    def _end_step(
        self, plant: Plant, step_ns: float, first: list[Request], *, decodes: bool = True
    ) -> None:
        """Give a token to the requests of the batch if it decodes, and to the prompts that end."""
        batch = self.batch
        self.now_ns += round(step_ns * plant.slowness)
        self.steps += 1
        self.epoch += decodes
        self.context += len(batch) * decodes
        for prompt in first:
            prompt.first_ns = self.now_ns
            self.context += prompt.prompt + 1
            heapq.heappush(batch, (self.epoch + prompt.output - 1, prompt.at_ns, prompt))
        while batch and batch[0][0] <= self.epoch:
            done = heapq.heappop(batch)[2]
            self.context -= done.prompt + done.output
            plant.ended(done, self.now_ns)


class Plant:
    """A service and its traffic, one interval at a time.

    Args:
        rate: requests per second as a function of the time in seconds.
        replicas: ready replicas at the start.
        startup_s: start-up time of a replica.
        metric_delay: intervals by which observations are late.
        seed: seed of arrivals and lengths.
        lengths: prompt and output tokens, each pair equally likely.
    """

    def __init__(
        self,
        *,
        rate: Callable[[float], float],
        replicas: int = 1,
        startup_s: int = 60,
        metric_delay: int = 1,
        seed: int = 1,
        lengths: tuple[tuple[int, int], ...] = LENGTHS,
        **params: object,
    ) -> None:
        settings: dict[str, object] = {"mode": ControlMode.AUTO, "classes": (CLASS,)}
        settings |= {"max_replicas": 12, "min_tokens": 64, "max_tokens": 2048}
        settings |= {"initial_tokens": 512, "max_num_seqs": 64}
        self.params = ServiceParams(**(settings | params))  # type: ignore[arg-type]
        self.state = ServiceState()
        self.decisions: list[ServiceDecision] = []
        self.desired: list[int] = []
        self.signal: Callable[[float], Signal] = lambda _: Signal.FRESH
        self.device: DeviceCapacity | None = DeviceCapacity(form=FORM, kv_tokens=200_000)
        self.slowness = 1.0
        self.now_ns = 0
        self.good = self.judged = 0
        self._rate = rate
        self._lengths = lengths
        self._rng = random.Random(seed)
        self._startup_ns = startup_s * NS_PER_S
        self._startups: list[int] = []
        self._created = 0
        self.replicas: list[PlantReplica] = []
        self._late: deque[ServiceObservation] = deque()
        self._metric_delay = metric_delay
        self._tally = WindowTally()
        self._finished: list[tuple[int, int, int]] = []
        for _ in range(replicas):
            self._add(0)
        self._desired = replicas
        self.bounds = Bounds.initial(self.params)

    def run(self, seconds: float) -> None:
        """Run the service for this long."""
        end_ns = self.now_ns + round(seconds * NS_PER_S)
        while self.now_ns < end_ns:
            self._interval()

    def ended(self, request: Request, now_ns: int) -> None:
        """Count a finished request."""
        record = RequestRecord(
            request_id="",
            slo_class=CLASS.name,
            scheduled_ns=request.at_ns,
            outcome=Outcome.OK,
            first_token_ns=request.first_ns,
            last_token_ns=now_ns,
            end_ns=now_ns,
            output_tokens=request.output,
        )
        targets: Targets = CLASS.targets
        self._tally.add(record, targets)
        self._finished.append((request.prompt, 0, request.output))
        assert record.ttft_ns is not None
        assert record.tpot_ns is not None
        assert targets.ttft_ns is not None
        assert targets.tpot_ns is not None
        self.judged += 1
        self.good += record.ttft_ns <= targets.ttft_ns and record.tpot_ns <= targets.tpot_ns

    def _interval(self) -> None:
        begin_ns, end_ns = self.now_ns, self.now_ns + INTERVAL_NS
        arrivals, at_ns = 0, begin_ns
        while True:
            rate = self._rate(at_ns / NS_PER_S)
            if rate <= 0:
                break
            at_ns += round(self._rng.expovariate(rate) * NS_PER_S)
            if at_ns >= end_ns:
                break
            arrivals += 1
            prompt, output = self._rng.choice(self._lengths)
            candidates = [r for r in self.replicas if r.ready_ns <= at_ns and not r.draining]
            if not candidates:
                self._tally.add(
                    RequestRecord(
                        request_id="",
                        slo_class=CLASS.name,
                        scheduled_ns=at_ns,
                        outcome=Outcome.SHED,
                        end_ns=at_ns,
                    ),
                    CLASS.targets,
                )
                self.judged += 1
                continue
            for replica in candidates:
                replica.run(at_ns, self)
            emptiest = min(candidates, key=lambda r: r.in_flight)
            emptiest.queue.append(Request(at_ns, prompt, output, left=prompt))
        for replica in self.replicas:
            if replica.ready_ns <= end_ns:
                replica.run(end_ns, self)
        self.now_ns = end_ns
        self.replicas = [r for r in self.replicas if not r.draining or r.in_flight]
        for replica in self.replicas:
            if begin_ns < replica.ready_ns <= end_ns:
                self._startups = [*self._startups[-15:], self._startup_ns]
        self._late.append(self._observe(arrivals))
        if len(self._late) > self._metric_delay:
            self._decide(self._late.popleft())

    def _observe(self, arrivals: int) -> ServiceObservation:
        finished, self._finished = self._finished, []
        return ServiceObservation(
            interval_ns=INTERVAL_NS,
            traffic=Traffic(
                signal=self.signal(self.now_ns / NS_PER_S),
                arrivals=arrivals,
                in_flight=sum(r.in_flight for r in self.replicas),
                finished=LengthMix.of_requests(finished),
            ),
            classes=self._tally.take(),
            replicas=tuple(
                ReplicaWindow(
                    name=r.name,
                    phase=ReplicaPhase.DRAINING
                    if r.draining
                    else ReplicaPhase.READY
                    if r.ready_ns <= self.now_ns
                    else ReplicaPhase.STARTING,
                    signal=Signal.FRESH,
                    running=len(r.batch),
                    waiting=len(r.queue),
                    kv_used_blocks=r.context // 16,
                    kv_total_blocks=200_000 // 16,
                )
                for r in self.replicas
            ),
            desired_replicas=0,
            startups_ns=tuple(self._startups),
            device=self.device,
        )

    def _decide(self, observation: ServiceObservation) -> None:
        observation = replace(observation, desired_replicas=self._desired)
        self.state, decision = service_law(self.state, observation, self.params, self.now_ns)
        self.decisions.append(decision)
        self.bounds = decision.apply_bounds
        while decision.apply_replicas > self._desired:
            self._add(self._startup_ns)
            self._desired += 1
        while decision.apply_replicas < self._desired:
            staying = [r for r in self.replicas if not r.draining]
            max(staying, key=lambda r: (r.ready_ns, r.name)).draining = True
            self._desired -= 1
        self.desired.append(self._desired)

    def _add(self, startup_ns: int) -> None:
        self._created += 1
        self.replicas.append(PlantReplica(f"chat-{self._created:03}", self.now_ns + startup_ns, 64))


@pytest.fixture
def plant() -> Callable[..., Plant]:
    """Return the class of a service under traffic."""
    return Plant
