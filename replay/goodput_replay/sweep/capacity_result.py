"""The JSON of `replay capacity`. The dataclasses here are its schema, `capacity.schema.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal

from goodput_core.slo.verdict import Reason, VerdictKind
from goodput_replay.runs.summary_parts import doc
from goodput_replay.sweep.search import RateLevel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_replay.sweep.capacity import Capacity
    from goodput_replay.sweep.probe import ProbePlan, ProbeRun

__all__ = ["CapacityResult", "ProbeResult", "describe_capacity"]

_VERSION: Final = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """A tried rate."""

    rate_scale: Annotated[float, doc("Factor of the trace's rate.")]
    offered_per_s: Annotated[float, doc("Requests per second of the replay.")]
    goodput_per_s: Annotated[float, doc("Requests per second that met their targets.")]
    attainment: Annotated[
        dict[str, float | None],
        doc("Attainment by class name; null for a class without judged requests."),
    ]
    verdict: Annotated[VerdictKind, doc("Verdict of the replay.")]
    reason: Annotated[Reason, doc("Stable reason code for scripts.")]
    run: Annotated[str, doc("Folder of the replay.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityResult:
    """Result of `replay capacity`."""

    version: Annotated[str, doc("Version of this schema.")] = _VERSION
    sentence: Annotated[str, doc("Human-readable result.")]
    sessions: Annotated[
        Literal["independent", "causal"],
        doc("independent; causal if requests waited for earlier responses."),
    ]
    shown: Annotated[
        bool, doc("True if the rate of capacity is shown to be sustained; false if it seems to be.")
    ]
    capacity: Annotated[
        ProbeResult | None, doc("Highest sustained rate; null if no rate even seems sustained.")
    ]
    does_not_hold: Annotated[
        ProbeResult | None, doc("Next higher rate, which is not sustained; null if none was tried.")
    ]
    lower_that_do_not_hold: Annotated[
        tuple[ProbeResult, ...], doc("Rates below capacity that missed an objective.")
    ]
    probes: Annotated[tuple[ProbeResult, ...], doc("All valid replays, the lowest rate first.")]


def describe_capacity(
    capacity: Capacity, probes: Sequence[ProbeRun], plan: ProbePlan
) -> CapacityResult:
    """Return the result and the probes for `--json`."""
    return CapacityResult(
        sentence=capacity.sentence,
        sessions="causal" if plan.causal else "independent",
        shown=capacity.best is not None and capacity.level is RateLevel.SHOWN,
        capacity=None if capacity.best is None else _describe_probe(capacity.best),
        does_not_hold=None if capacity.above is None else _describe_probe(capacity.above),
        lower_that_do_not_hold=tuple(map(_describe_probe, capacity.missed_below)),
        probes=tuple(_describe_probe(p) for p in sorted(probes, key=lambda probe: probe.scale)),
    )


def _describe_probe(probe: ProbeRun) -> ProbeResult:
    summary = probe.summary
    return ProbeResult(
        rate_scale=float(probe.scale),
        offered_per_s=summary.overall.offered_per_s,
        goodput_per_s=summary.overall.goodput_per_s,
        attainment={one.name: one.attainment for one in summary.classes},
        verdict=summary.verdict.kind,
        reason=summary.verdict.reason,
        run=str(probe.folder),
    )
