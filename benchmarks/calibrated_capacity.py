"""The replica law of another server with and without a calibrated device profile.

Such a server reports no step times, so its law uses observations (ADR 52). This benchmark measures
what a profile adds. A replica serves a constant load, and `goodput device calibrate`
fits a profile to the times of its tokens. The highest rate at which one virtual replica with that
profile holds the objective is the capacity that the profile predicts. Then a service runs under a
load that changes, with three laws:

- observed: without the profile;
- expected: with this capacity as `control.replicaRequestsPer1000Seconds`, which only adds replicas;
- predicted: the law of Goodput's engine, with the profile as the device.

Cases were written down before any of them ran. Those that begin with K were first run after the law
`expected` had been chosen on the others.

    python -m benchmarks.calibrated_capacity
    python -m benchmarks.calibrated_capacity --cases K3 --seeds 301
    python -m benchmarks.calibrated_capacity --quick    # one case with one seed, in seconds
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from benchmarks.other_servers import DOCUMENTS, SHORT
from rich.console import Console
from rich.table import Table
from tests.core.control.conftest import FORM, LENGTHS, Plant, PlantReplica, Request

from goodput_core.control import DeviceCapacity, ServiceObservation
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.steptime import StepShape
from goodput_engine.device.fit import FittedForm, FormChoice
from goodput_replay.calibration.calibration import ObservedRun, calibrate
from goodput_replay.calibration.requests import ObservedRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CASES", "Outcomes", "ServerLoad", "main", "serve"]

_LAWS: Final = ("observed", "expected", "predicted")
_OBJECTIVE: Final = 0.95
_CALIBRATION_S: Final = 1800
_SEARCH_S: Final = 3600
_SEARCH_STEPS: Final = 8


class _FirstComeReplica(PlantReplica):
    """A replica that orders requests by arrival, and knows no targets.

    Attributes:
        budget: tokens of a step.
        prompts_first: True if steps with prompts have no decodes.
        memory_tokens: KV memory; a request waits until it fits.
        form: law of its steps.
        tokens_ns: times of the tokens by request, if they are recorded.
    """

    budget: ClassVar = 512
    prompts_first: ClassVar = False
    memory_tokens: ClassVar = 200_000
    form: FittedForm = FORM
    tokens_ns: dict[int, list[int]] | None = None

    def _step(self, plant: Plant) -> None:
        batch = self.batch
        shape = StepShape.of(decodes=len(batch), decode_context_tokens=self.context + len(batch))
        tokens = self.budget - (0 if self.prompts_first else len(batch))
        reserved = self.context + sum(request.output for _, _, request in batch)
        first: list[Request] = []
        decodes = True
        while tokens > 0:
            if self.prefilling is None:
                if not self.queue or len(batch) + len(first) >= self.width:
                    break
                reserved += self.queue[0].prompt + self.queue[0].output
                if (batch or first) and reserved > self.memory_tokens:
                    break
                self.prefilling = self.queue.popleft()
            prompt = self.prefilling
            if self.prompts_first and decodes:
                shape, decodes = StepShape.of(decodes=0, decode_context_tokens=0), False
            chunk = min(tokens, prompt.left)
            shape = shape.with_chunk(prompt.prompt - prompt.left, chunk)
            prompt.left -= chunk
            tokens -= chunk
            if not prompt.left:
                first.append(prompt)
                self.prefilling = None
        running = [request for _, _, request in batch] if decodes else []
        self._end_step(plant, self.form.step_ns(shape), first, decodes=decodes)
        if self.tokens_ns is not None:
            for request in (*running, *first):
                self.tokens_ns.setdefault(id(request), []).append(self.now_ns)


class _Chunks(_FirstComeReplica):
    """vLLM's default: prompts in chunks beside the decodes."""


class _PromptsFirst(_FirstComeReplica):
    """Prompts in steps of their own, before the decodes."""

    budget = 2048
    prompts_first = True


class _SmallMemory(_FirstComeReplica):
    memory_tokens = 8_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """One server under one load.

    Args:
        server: class of its replicas.
        lengths: prompt and output tokens, each pair equally likely.
        startup_s: start-up time of a replica.
        rate: requests per second as a function of the time in seconds.
        ends_s: times at which the load changes, and the end.
        calibrated_per_s: rate at which the profile was calibrated.
        publishes_memory: True if the metrics page has the KV memory.
        slowness: factor of the step times since the calibration.
    """

    server: type[_FirstComeReplica]
    lengths: tuple[tuple[int, int], ...]
    startup_s: int
    rate: Callable[[float], float]
    ends_s: tuple[int, ...]
    calibrated_per_s: float = 0.6
    publishes_memory: bool = True
    slowness: float = 1.0


def _steps(*levels: tuple[int, float]) -> dict[str, Any]:
    """Return the fields of a load with levels: end in seconds, requests per second."""

    def rate(at_s: float) -> float:
        return next((per_s for end_s, per_s in levels if at_s < end_s), levels[-1][1])

    return {"rate": rate, "ends_s": tuple(end_s for end_s, _ in levels)}


def _wave(at_s: float) -> float:
    return 0.5 + 1.8 * (1 - math.cos(2 * math.pi * at_s / 10_800))


CASES: Final = {
    "O1 chunks, a large step": ServerLoad(
        server=_Chunks, lengths=LENGTHS, startup_s=150,
        **_steps((600, 0.66), (5400, 4.0), (12600, 0.66)),
    ),
    "O2 prompts first, up after an hour": ServerLoad(
        server=_PromptsFirst, lengths=LENGTHS, startup_s=150, **_steps((3600, 0.66), (9000, 3.0))
    ),
    "O3 chunks, some documents": ServerLoad(
        server=_Chunks, lengths=DOCUMENTS, startup_s=150, calibrated_per_s=0.4,
        **_steps((600, 0.5), (5400, 2.0), (12600, 0.5)),
    ),
    "K1 a small memory that is not published": ServerLoad(
        server=_SmallMemory, lengths=LENGTHS, startup_s=150, publishes_memory=False,
        **_steps((600, 0.6), (5400, 2.6), (12600, 1.3)),
    ),
    "K2 1.5 times slower since the calibration": ServerLoad(
        server=_Chunks, lengths=LENGTHS, startup_s=60, slowness=1.5,
        **_steps((600, 0.6), (4200, 3.0), (9600, 1.5), (15000, 0.5)),
    ),
    "K3 prompts first, a stair of short requests": ServerLoad(
        server=_PromptsFirst, lengths=SHORT, startup_s=20, calibrated_per_s=1.5,
        **_steps((2400, 2), (4800, 5), (7200, 8), (9600, 5), (12000, 2)),
    ),
    "K4 chunks, a wave": ServerLoad(
        server=_Chunks, lengths=LENGTHS, startup_s=240, rate=_wave, ends_s=(10_800,)
    ),
}  # fmt: skip


class _Service(Plant):
    """A service of such replicas.

    Args:
        case: the servers and the load.
        seed: seed of arrivals and lengths.
        server: class of the replicas, instead of the case's.
        rate: the load, instead of the case's.
        max_replicas: limit of the law.
        expected_per_s: the capacity of a replica that the law expects.
    """

    def __init__(
        self,
        case: ServerLoad,
        seed: int,
        *,
        server: type[_FirstComeReplica] | None = None,
        rate: Callable[[float], float] | None = None,
        max_replicas: int = 12,
        expected_per_s: float | None = None,
    ) -> None:
        self._case = case
        self._server = server or case.server
        self.done: list[tuple[Request, int]] = []
        super().__init__(
            rate=rate or case.rate,
            lengths=case.lengths,
            startup_s=case.startup_s,
            seed=seed,
            foreign=True,
            max_replicas=max_replicas,
            expected_per_s=expected_per_s,
        )
        self.device = None
        self.slowness = case.slowness if server is None else 1.0

    def ended(self, request: Request, now_ns: int) -> None:
        """Count a finished request, and keep it if its tokens are recorded."""
        super().ended(request, now_ns)
        if self._server.tokens_ns is not None:
            self.done.append((request, now_ns))

    def _add(self, startup_ns: int) -> None:
        self._created += 1
        name = f"chat-{self._created:03}"
        self.replicas.append(self._server(name, self.now_ns + startup_ns, 64))

    def _observe(self, arrivals: int) -> ServiceObservation:
        observed = super()._observe(arrivals)
        total = self._case.server.memory_tokens // 16 if self._case.publishes_memory else 0
        return replace(
            observed,
            replicas=tuple(
                replace(r, kv_total_blocks=total, kv_used_blocks=min(total, r.kv_used_blocks))
                for r in observed.replicas
            ),
        )


def _calibrated(case: ServerLoad) -> DeviceCapacity:
    """Return the device that a calibration with half an hour of a case's requests finds."""
    tokens_ns: dict[int, list[int]] = {}
    recording = type("_Recording", (case.server,), {"tokens_ns": tokens_ns})
    rate = _constant(case.calibrated_per_s)
    run = _Service(case, 7, server=recording, rate=rate, max_replicas=1)
    run.run(_CALIBRATION_S)
    requests = []
    for number, (one, end_ns) in enumerate(run.done):
        record = RequestRecord(
            request_id=str(number),
            slo_class="chat",
            scheduled_ns=one.at_ns,
            sent_ns=one.at_ns,
            outcome=Outcome.OK,
            first_token_ns=one.first_ns,
            last_token_ns=end_ns,
            end_ns=end_ns,
            input_tokens=one.prompt,
            output_tokens=one.output,
            replica="one",
        )
        requests.append(
            ObservedRequest(
                record=record,
                arrival_ns=one.at_ns,
                prompt_tokens=one.prompt,
                cached_tokens=0,
                times_ns=np.array(tokens_ns[id(one)], dtype=np.int64),
            )
        )
    requests.sort(key=lambda one: one.arrival_ns)
    found = calibrate(
        [ObservedRun(folder=Path("run"), requests=requests)],
        choice=FormChoice.AUTO,
        service=None,
        base=None,
    )
    memory = case.server.memory_tokens
    if not case.publishes_memory:
        memory = round(found.numbers["kv_blocks"][0] * found.numbers["block_size"][0])
    return DeviceCapacity(form=found.form, kv_tokens=memory)


def _predicted_per_s(case: ServerLoad, device: DeviceCapacity) -> float:
    """Return the highest rate at which one replica with this profile holds the objective."""
    fields = {"form": device.form, "memory_tokens": device.kv_tokens}
    server = type("_Profiled", (_Chunks,), fields)
    low, high = 0.0, 16.0
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        run = _Service(case, 5, server=server, rate=_constant(middle), max_replicas=1)
        run.run(_SEARCH_S)
        held = run.good >= _OBJECTIVE * run.judged
        low, high = (middle, high) if held else (low, middle)
    return low


def _constant(per_s: float) -> Callable[[float], float]:
    return lambda _: per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """One run.

    Args:
        missed_minutes: minutes with fewer than 95 % of the requests in time.
        early_percent: missed requests in the first minutes after a change of the load (15, and two
            start-ups).
        missed_percent: missed requests of the run.
        hours: hours of all replicas.
    """

    missed_minutes: int
    early_percent: float
    missed_percent: float
    hours: float


def serve(case: ServerLoad, seed: int, law: str, device: DeviceCapacity, per_s: float) -> Outcomes:
    """Run a case with a law."""
    service = _Service(case, seed, expected_per_s=per_s if law == "expected" else None)
    if law == "predicted":
        service.device = device
    missed_minutes = early = early_missed = total = missed = begin_s = 0
    for end_s in case.ends_s:
        for minute in range((end_s - begin_s) // 60):
            service.judged = service.good = 0
            service.run(60)
            lost = service.judged - service.good
            total, missed = total + service.judged, missed + lost
            missed_minutes += service.good < _OBJECTIVE * service.judged
            if minute * 60 < 900 + 2 * case.startup_s:
                early, early_missed = early + service.judged, early_missed + lost
        begin_s = end_s
    return Outcomes(
        missed_minutes=missed_minutes,
        early_percent=100 * early_missed / max(1, early),
        missed_percent=100 * missed / max(1, total),
        hours=sum(service.desired) / 360,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one case with one seed")
    parser.add_argument("--cases", nargs="+", default=[], metavar="NAME", help="such as O1 K3")
    parser.add_argument("--seeds", type=int, nargs="+", default=(401, 402, 403), metavar="N")
    args = parser.parse_args(argv)
    chosen = [name for name in CASES if not args.cases or name.split()[0] in args.cases]
    seeds = args.seeds
    if args.quick:
        chosen, seeds = ["K3 prompts first, a stair of short requests"], seeds[:1]
    table = Table("case", "law", "missed minutes", "missed early, %", "missed, %", "replica hours")
    for name in chosen:
        case = CASES[name]
        device = _calibrated(case)
        per_s = _predicted_per_s(case, device)
        for law in _LAWS:
            runs = [serve(case, seed, law, device, per_s) for seed in seeds]
            minutes = [run.missed_minutes for run in runs]
            table.add_row(
                f"{name} ({per_s:.2f}/s)" if law == _LAWS[0] else "",
                law,
                f"{_mean(minutes):.1f} ({' '.join(map(str, minutes))})",
                f"{_mean([run.early_percent for run in runs]):.1f}",
                f"{_mean([run.missed_percent for run in runs]):.2f}",
                f"{_mean([run.hours for run in runs]):.1f}",
            )
    Console(width=110).print(table)
    return 0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
