"""An hour of production traffic stretched over a day, and the small fleet that serves it.

The trace's transforms make 24 copies of each request and stretch time by 24, so the rate is that of
the trace, and each of its minutes takes 24 minutes. Copies would arrive at the same time, so each
is moved at random by up to half of such a stretched minute. The rate of the day is then the trace's
rate, smoothed over a minute, with Poisson arrivals. The shape of the load and the lengths of every
request are preserved; bursts shorter than a minute are lost.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goodput_core.spec.llmservice import LLMService
from goodput_core.units import NS_PER_S
from goodput_replay.emulation.settings import fleet_settings
from goodput_replay.plan import PlannedRequest, PromptKey
from goodput_traces.format.reader import open_trace
from goodput_traces.sample import sample_path
from goodput_traces.transforms import TransformPlan, apply, parse_class_rules

if TYPE_CHECKING:
    from goodput_replay.emulation.settings import FleetSettings
    from goodput_traces.format.schema import TraceRow

SEED = 1
DEVICE = Path(__file__).with_name("llama-3-8b-l4.yaml")
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
        startup_s: start-up time of a replica; None for the device profile's.
    """

    trace: str
    stretch: int
    copies: int
    startup_s: float | None = None

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
        trace = open_trace(sample_path() if self.trace == "sample" else self.trace)
        plan = TransformPlan(
            rate_scale=Fraction(copies),
            speed=Fraction(1, stretch),
            class_rules=parse_class_rules(RULES),
            first_ns=trace.first_ns,
        )
        return list(apply(trace.rows(), plan))

    def requests(self) -> list[PlannedRequest]:
        """Return the requests of the day, by arrival."""
        rows, rng = self.rows(copies=self.copies, stretch=self.stretch), random.Random(SEED)
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
        rows, rng = self.rows(), random.Random(SEED)
        found: list[PlannedRequest] = []
        at_s = rng.expovariate(rate)
        while at_s < length_s:
            row = replace(rng.choice(rows), request_id=str(len(found)))
            found.append(_planned(row, round(at_s * NS_PER_S)))
            at_s += rng.expovariate(rate)
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
