"""Days of traffic made from an hour of production, and the small fleet that serves them.

The day `documented` is the hour itself, stretched over a day. The trace's transforms make 16 copies
of each request and stretch time by 24, so the rate is two thirds of the trace's, and each of its
minutes takes 24 minutes. Copies would arrive at the same time, so each is moved at random by up to
half of such a stretched minute. Arrivals are then Poisson, at the rate of the trace smoothed over a
minute. The shape of the load and the lengths of every request are preserved; bursts shorter than a
minute are lost.

The other days have Poisson arrivals of random requests of the trace. Their rate is a multiple of
the documented day's mean:

- `night`: 5 % in the first and in the last part of the day, 150 % between them;
- `flash`: 50 %, and three sudden crowds of 200, 150 and 250 % for 5, 15 and 40 minutes;
- `drift`: 100 %, while outputs slowly become longer, from half to twice those of the trace;
- `bursts`: 50 and 200 % in turns of random length, on average 60 and 30 seconds. No replica starts
  in time for such a burst, and the mean over a few minutes hardly changes;
- `workday`: 20 % at night, 130 % in the morning, 75 % at noon, and 120 % in the afternoon;
- `doubling`: 60 %, and twice that for one hour;
- `sawtooth`: six times a rise from 30 to 170 %, each of which ends at once.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from goodput_core.spec.llmservice import LLMService
from goodput_core.units import NS_PER_S
from goodput_replay.emulation.settings import fleet_settings
from goodput_replay.plan import PlannedRequest, PromptKey
from goodput_traces.format.reader import open_trace
from goodput_traces.sample import trace_path
from goodput_traces.transforms import TransformPlan, apply, parse_class_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from goodput_replay.emulation.settings import FleetSettings
    from goodput_traces.format.schema import TraceRow

DEVICE = Path(__file__).with_name("llama-3-8b-l4.yaml")
DAYS: Final = (
    "documented",
    "night",
    "flash",
    "drift",
    "bursts",
    "workday",
    "doubling",
    "sawtooth",
)
_MOST: Final = 2.5
"""The largest multiple of the mean rate in any of the days but the documented one."""
_CROWDS: Final = ((0.15, 300, 2.0), (0.4, 900, 1.5), (0.7, 2400, 2.5))
"""Start as a share of the day, length in seconds, and rate of each crowd."""
_TURNS: Final = ((60.0, 0.5), (30.0, 2.0))
"""Mean length in seconds and rate of the two turns of the day `bursts`; the mean rate is 1."""
_WORKDAY: Final = (
    (0.0, 0.2),
    (0.2, 0.2),
    (0.28, 1.3),
    (0.42, 1.3),
    (0.46, 0.75),
    (0.52, 0.75),
    (0.56, 1.2),
    (0.72, 1.2),
    (0.84, 0.2),
    (1.0, 0.2),
)
"""Corners of the day `workday`: share of the day and rate; linear between them."""
_DOUBLING: Final = (0.4, 3600, 0.6)
"""Start as a share of the day, length in seconds, and rate before and after the doubling."""
_TEETH: Final = (6, 0.3, 1.7)
"""Number of rises of the day `sawtooth`, and rate at the start and at the end of each."""
RULES = ("batch: input_tokens >= 2048", "interactive: *")
MANIFEST: dict[str, Any] = {
    "apiVersion": "goodput.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "day"},
    "spec": {
        "model": {"source": "hf://meta-llama/Llama-3.1-8B-Instruct"},
        "engine": {
            "policy": "sarathi",
            "preemption": "recompute",
            "maxNumSeqs": 64,
            "tokenBudget": {"min": 128, "max": 2048, "initial": 512},
        },
        "minReplicas": 1,
        "maxReplicas": 16,
        "router": {"policy": "least-loaded"},
        "slo": {
            "classes": [
                {"name": "interactive", "ttftMs": 3000, "tpotMs": 150, "objective": "99%"},
                {"name": "batch", "ttftMs": 15_000, "tpotMs": 300, "objective": "95%"},
            ],
            "default": "interactive",
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """The requests of a day, and the fleet that serves them.

    Args:
        trace: a Parquet file, or `sample`.
        stretch: factor by which time is stretched.
        copies: number of copies of each request.
        shape: one of `DAYS`.
        startup_s: start-up time of a replica; None for the device profile's.
        seed: seed of the arrivals and of the choice of requests.
    """

    trace: str
    stretch: int
    copies: int
    shape: str = "documented"
    startup_s: float | None = None
    seed: int = 1

    @property
    def settings(self) -> FleetSettings:
        """Settings of the fleet."""
        service = LLMService.from_dict(MANIFEST)
        settings = fleet_settings(
            service,
            device=str(DEVICE),
            source="benchmark",
            timeout_ns=600 * NS_PER_S,
        )
        startup_s = self.startup_s
        if startup_s is None or settings.control is None:
            return settings
        params = replace(settings.control.params, default_startup_ns=round(startup_s * NS_PER_S))
        return replace(
            settings,
            profile=replace(settings.profile, startup_seconds=startup_s),
            control=replace(settings.control, params=params),
        )

    def rows(self, *, copies: int = 1, stretch: int = 1) -> list[TraceRow]:
        """Return the rows of the trace, copied and stretched."""
        trace = open_trace(trace_path(self.trace))
        plan = TransformPlan(
            rate_scale=Fraction(copies),
            speed=Fraction(1, stretch),
            class_rules=parse_class_rules(RULES),
            first_ns=trace.first_ns,
        )
        return list(apply(trace.rows(), plan))

    def requests(self) -> list[PlannedRequest]:
        """Return the requests of the day, by arrival."""
        if self.shape != "documented":
            rows = self.rows()
            hour_s = (rows[-1].timestamp_start_unix_ns - rows[0].timestamp_start_unix_ns) / NS_PER_S
            length_s = hour_s * self.stretch
            mean = len(rows) * self.copies / length_s
            ends_s = _turn_ends(length_s, self.seed)
            return _random_requests(
                rows,
                seed=self.seed,
                most_per_s=_MOST * mean,
                length_s=length_s,
                share=lambda at_s: _share(self.shape, at_s, length_s, ends_s) / _MOST,
                stretched=(0.5, 2.0) if self.shape == "drift" else (1.0, 1.0),
            )
        rows, rng = self.rows(copies=self.copies, stretch=self.stretch), random.Random(self.seed)
        half_ns = self.stretch * 60 * NS_PER_S // 2
        zero_ns = rows[0].timestamp_start_unix_ns
        length_ns = rows[-1].timestamp_start_unix_ns - zero_ns
        moved: list[tuple[int, int]] = []
        for number, row in enumerate(rows):
            at_ns = row.timestamp_start_unix_ns - zero_ns + rng.randint(-half_ns, half_ns)
            # Times beyond an end of the day are mirrored into it.
            moved.append((length_ns - abs(length_ns - abs(at_ns)), number))
        return [_planned(rows[number], at_ns) for at_ns, number in sorted(moved)]

    def constant(self, rate: float, length_s: int) -> list[PlannedRequest]:
        """Return random requests of the trace as a Poisson process.

        Args:
            rate: requests per second.
            length_s: length in seconds.
        """
        return _random_requests(self.rows(), seed=self.seed, most_per_s=rate, length_s=length_s)


def _turn_ends(length_s: float, seed: int) -> list[float]:
    """Return the ends of the turns of the day `bursts`, in seconds."""
    rng, ends_s = random.Random(seed), [0.0]
    while ends_s[-1] < length_s:
        mean_s, _ = _TURNS[(len(ends_s) - 1) % 2]
        ends_s.append(ends_s[-1] + rng.expovariate(1 / mean_s))
    return ends_s[1:]


def _share(shape: str, at_s: float, length_s: float, ends_s: Sequence[float]) -> float:
    """Return the rate of a day at a time, as a multiple of the documented day's mean.

    Args:
        shape: a day other than the documented one.
        at_s: time in seconds.
        length_s: length of the day.
        ends_s: ends of the turns of the day `bursts`.
    """
    if shape == "night":
        # Twilight takes 6 % of the day, from 30 to 36 % and from 86 to 92 %.
        position = at_s / length_s
        risen = min(max((position - 0.30) / 0.06, 0.0), 1.0)
        fallen = min(max((position - 0.86) / 0.06, 0.0), 1.0)
        return 0.05 + 1.45 * (risen - fallen)
    if shape == "flash":
        for start, crowd_s, rate in _CROWDS:
            if 0 <= at_s - start * length_s < crowd_s:
                return rate
        return 0.5
    if shape == "bursts":
        return _TURNS[bisect_right(ends_s, at_s) % 2][1]
    if shape == "workday":
        positions, rates = zip(*_WORKDAY, strict=True)
        return float(np.interp(at_s / length_s, positions, rates))
    if shape == "doubling":
        start, crowd_s, rate = _DOUBLING
        return 2 * rate if 0 <= at_s - start * length_s < crowd_s else rate
    if shape == "sawtooth":
        teeth, low, high = _TEETH
        return low + (high - low) * (teeth * at_s / length_s % 1.0)
    assert shape == "drift", shape
    return 1.0


def _random_requests(
    rows: Sequence[TraceRow],
    *,
    seed: int,
    most_per_s: float,
    length_s: float,
    share: Callable[[float], float] | None = None,
    stretched: tuple[float, float] = (1.0, 1.0),
) -> list[PlannedRequest]:
    """Return random rows at Poisson times.

    Args:
        rows: rows to choose from.
        seed: seed of the choice and of the times.
        most_per_s: maximum rate in requests per second.
        length_s: length in seconds.
        share: share of the maximum rate at a time in seconds; None for the maximum rate throughout.
        stretched: factor of the output lengths at the start and at the end.
    """
    rng = random.Random(seed)
    first, last = (math.log(factor) for factor in stretched)
    found: list[PlannedRequest] = []
    at_s = rng.expovariate(most_per_s)
    while at_s < length_s:
        if share is None or rng.random() < share(at_s):
            row = rng.choice(rows)
            factor = math.exp(first + (last - first) * at_s / length_s)
            row = replace(
                row,
                request_id=str(len(found)),
                output_tokens=max(1, round(row.output_tokens * factor)),
            )
            found.append(_planned(row, round(at_s * NS_PER_S)))
        at_s += rng.expovariate(most_per_s)
    return found


def _planned(row: TraceRow, at_ns: int) -> PlannedRequest:
    return PlannedRequest(
        request_id=row.request_id,
        scheduled_ns=at_ns,
        slo_class=row.slo_class or "",
        targets=row.targets,
        priority=row.priority,
        prompt=PromptKey(request_id=row.request_id, input_tokens=row.input_tokens),
        output_tokens=row.output_tokens,
        max_output_tokens=row.max_output_tokens,
        cancel_after_ns=row.cancel_after_ns,
    )
