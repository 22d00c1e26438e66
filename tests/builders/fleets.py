"""Small fleets on a device whose every step takes 1 ms, and requests in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from goodput_core.slo.judging import JudgementKind, judge, targets_for
from goodput_core.slo.record import RequestRecord
from goodput_core.slo.targets import SLOClass, Targets
from goodput_core.spec.choices import RouterPolicy
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.device.load import load_profile
from goodput_engine.messages import Configure
from goodput_replay.emulation.emulate import emulate
from goodput_replay.emulation.settings import FleetOutcome, FleetSettings
from goodput_replay.plan import PlannedRequest, PromptKey
from goodput_replay.runs.slo import SLOClasses

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_replay.emulation.fleet import Actor

__all__ = ["SLO", "FleetRun", "make_fleet", "plan", "run_fleet"]

SLO = SLOClasses(
    classes=(
        SLOClass(name="fast", ttft_ms=50, tpot_ms=5),
        SLOClass(name="slow", ttft_ms=5_000, tpot_ms=50, e2e_ms=9_000),
    ),
    default="fast",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRun:
    """Records and totals of a run."""

    records: list[RequestRecord]
    outcome: FleetOutcome

    def __getitem__(self, name: str) -> RequestRecord:
        return next(record for record in self.records if record.request_id == name)

    def tokens_ms(self, name: str) -> list[float]:
        """Return the time of each token of a request, milliseconds."""
        record = self[name]
        if record.first_token_ns is None:
            return []
        times = [record.first_token_ns / NS_PER_MS]
        for gap_us in record.gaps_us:
            times.append(times[-1] + gap_us / 1000)
        return times

    def ttft_ms(self, percent: int, names: str = "") -> float:
        """Return a percentile of the TTFT of requests whose ids start with `names`."""
        return _percentile(
            (
                (record.first_token_ns - record.scheduled_ns) / NS_PER_MS
                for record in self._named(names)
                if record.first_token_ns is not None
            ),
            percent,
        )

    def tbt_ms(self, percent: int, names: str = "") -> float:
        """Return a percentile of all gaps between tokens of these requests."""
        gaps_us = chain.from_iterable(record.gaps_us for record in self._named(names))
        return _percentile((gap_us / 1000 for gap_us in gaps_us), percent)

    def attained(self, slo: SLOClasses = SLO) -> float:
        """Return the share of all requests that met their SLO."""
        by_name = slo.by_name()
        kinds = [judge(record, targets_for(record, by_name)).kind for record in self.records]
        return kinds.count(JudgementKind.ATTAINED) / len(kinds)

    def _named(self, names: str) -> Iterable[RequestRecord]:
        return (record for record in self.records if record.request_id.startswith(names))


def _percentile(values: Iterable[float], percent: int) -> float:
    """Return a percentile by nearest rank."""
    ranked = sorted(values)
    return ranked[-(-len(ranked) * percent // 100) - 1]


def plan(
    name: str,
    at_ms: float,
    prompt: int,
    output: int,
    *,
    slo_class: str = "fast",
    cancel_ms: float | None = None,
    hashes: Sequence[int] = (),
    block_size: int = 16,
    **fields: Any,
) -> PlannedRequest:
    """Return a request; times in milliseconds."""
    return PlannedRequest(
        request_id=name,
        scheduled_ns=round(at_ms * NS_PER_MS),
        slo_class=slo_class,
        targets=fields.pop("targets", Targets()),
        priority=fields.pop("priority", None),
        prompt=PromptKey(
            request_id=name,
            input_tokens=prompt,
            hashes=hashes,
            block_size=block_size if hashes else 0,
        ),
        output_tokens=output,
        max_output_tokens=fields.pop("max_output_tokens", None),
        cancel_after_ns=None if cancel_ms is None else round(cancel_ms * NS_PER_MS),
        **fields,
    )


def make_fleet(
    *,
    replicas: int = 1,
    placement: RouterPolicy = RouterPolicy.ROUND_ROBIN,
    device: str = "unit",
    timeout_s: float = 600,
    seed: int = 0,
    oracle: bool = False,
    fast_forward: bool = True,
    slo: SLOClasses = SLO,
    profile: dict[str, Any] | None = None,
    **configure: Any,
) -> FleetSettings:
    """Return the settings of a fleet; `profile` and `configure` replace single values."""
    values: dict[str, Any] = {
        "device": device,
        "policy": "sarathi",
        "preemption": "recompute",
        "token_budget": 1024,
        "min_token_budget": 1,
        "max_token_budget": 8192,
        "max_num_seqs": 64,
        "max_waiting": 1000,
    }
    return FleetSettings(
        service="chat",
        profile=replace(load_profile(device), **(profile or {})),
        configure=Configure(**(values | configure)),
        replicas=replicas,
        placement=placement,
        slo=slo,
        timeout_ns=round(timeout_s * NS_PER_S),
        seed=seed,
        oracle=oracle,
        fast_forward=fast_forward,
    )


def run_fleet(
    requests: Iterable[PlannedRequest], settings: FleetSettings, actors: Sequence[Actor] = ()
) -> FleetRun:
    """Serve all requests."""
    records: list[RequestRecord] = []
    outcome = emulate(iter(requests), settings, lambda _, r: records.append(r), actors=actors)
    return FleetRun(records=records, outcome=outcome)
