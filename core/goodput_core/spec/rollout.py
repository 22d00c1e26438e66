"""`spec.rollout`: what a new revision must show before it serves."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from goodput_core.slo.targets import OBJECTIVE_PATTERN, parse_objective
from goodput_core.spec.choices import Baseline, OnInconclusive
from goodput_core.spec.fields import Between, Cel, spec_field
from goodput_core.spec.promise import WITHIN_PERCENT

__all__ = ["GateSpec", "RolloutSpec", "WindowSpec"]


def _starts_too_late(window: WindowSpec) -> str | None:
    if window.start_seconds < window.end_seconds:
        return None
    return f"{window.start_seconds} is not before endSeconds, {window.end_seconds}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """A part of a trace."""

    BETWEEN: ClassVar[tuple[Between, ...]] = (
        Between(
            field="startSeconds",
            cel=Cel(
                rule="self.startSeconds < self.endSeconds", message="must be before endSeconds"
            ),
            problem=_starts_too_late,
        ),
    )

    start_seconds: int = spec_field(
        "Seconds from the trace's first arrival to the window's start.",
        minimum=0,
        maximum=31_536_000,
    )
    end_seconds: int = spec_field(
        "Seconds from the trace's first arrival to the window's end.",
        minimum=1,
        maximum=31_536_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSpec:
    """What a new revision must show before it serves."""

    trace: str = spec_field(
        "The trace to replay: pvc://CLAIM/PATH or file://PATH.",
        max_length=512,
        pattern=r"^(pvc|file)://[^\x00-\x20\x7f]+$",
        pattern_hint="begin with pvc:// or file:// and name a trace",
    )
    window: WindowSpec | None = spec_field("The part of the trace to replay.", default=None)
    margin: Fraction | None = spec_field(
        "By how much a candidate may be worse than its baseline, such as '1%'.",
        default=None,
        max_length=11,
        pattern=OBJECTIVE_PATTERN,
        pattern_hint="be a percentage such as '1%'",
        parse=parse_objective,
        cel=WITHIN_PERCENT,
    )
    baseline: Baseline = spec_field(
        "Fresh replays a baseline beside the candidate; Recorded takes an earlier run.",
        default=Baseline.FRESH,
    )
    on_inconclusive: OnInconclusive = spec_field(
        "What a rollout does when the gate cannot tell.", default=OnInconclusive.PAUSE
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """How a new revision replaces the stable one."""

    gate: GateSpec | None = spec_field("What a new revision must show first.", default=None)
    progress_deadline_seconds: int = spec_field(
        "Seconds after which a rollout that does not progress has failed.",
        default=3600,
        minimum=1,
        maximum=604_800,
    )
