"""`spec.rollout`: the replacement of the stable revision, and the gate that a new one must pass."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Final

from goodput_core.declaration import (
    Cel,
    CrossFieldRule,
    claim_path_rule,
    image_field,
    recordings_field,
    records_field,
    spec_field,
    trace_field,
)
from goodput_core.slo.pairs import MAX_PAIRS, USUAL_PAIRS
from goodput_core.slo.targets import margin_field
from goodput_core.spec.choices import Baseline, Endpoint, OnInconclusive, PromptEncoding
from goodput_core.spec.pod import PodSpec, ResourcesSpec
from goodput_core.spec.requests import (
    REQUEST_RULES,
    endpoint_field,
    model_field,
    prompt_field,
    tokenizer_field,
)

__all__ = ["GateSpec", "RolloutSpec", "WindowSpec"]

_MAX_WINDOW_SECONDS: Final = 31_536_000


def _check_window(window: WindowSpec) -> str | None:
    if window.start_seconds < window.end_seconds:
        return None
    return f"{window.start_seconds} is not before endSeconds, {window.end_seconds}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """A part of a trace."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        CrossFieldRule(
            field="startSeconds",
            cel=Cel(
                rule="self.startSeconds < self.endSeconds", message="must be before endSeconds"
            ),
            problem=_check_window,
        ),
    )

    start_seconds: int = spec_field(
        "Seconds from the trace's first arrival to the window's start.",
        minimum=0,
        maximum=_MAX_WINDOW_SECONDS,
    )
    end_seconds: int = spec_field(
        "Seconds from the trace's first arrival to the window's end.",
        minimum=1,
        maximum=_MAX_WINDOW_SECONDS,
    )


def _check_pairs(gate: GateSpec) -> str | None:
    if gate.max_pairs is None or 2 <= gate.pairs <= gate.max_pairs:
        return None
    return f"{gate.pairs} lies outside 2 to maxPairs, {gate.max_pairs}"


def _check_history(gate: GateSpec) -> str | None:
    if gate.baseline is not Baseline.RECORDED or gate.history is not None:
        return None
    return "is required, because baseline is Recorded"


def _check_recorded_pairs(gate: GateSpec) -> str | None:
    if gate.baseline is not Baseline.RECORDED or (gate.pairs == 1 and gate.max_pairs is None):
        return None
    return (
        f"is {gate.pairs}; set it to 1 and remove maxPairs, because baseline is Recorded and "
        "further runs of the candidate would share the conditions of the first"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSpec:
    """The test that a new revision must pass before it serves."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        CrossFieldRule(
            field="pairs",
            cel=Cel(
                rule="!has(self.maxPairs) || (2 <= self.pairs && self.pairs <= self.maxPairs)",
                message="must be from 2 to maxPairs",
            ),
            problem=_check_pairs,
        ),
        CrossFieldRule(
            field="history",
            cel=Cel(
                rule="self.baseline != 'Recorded' || has(self.history)",
                message="is required with baseline Recorded",
            ),
            problem=_check_history,
        ),
        CrossFieldRule(
            field="pairs",
            cel=Cel(
                rule="self.baseline != 'Recorded' || (self.pairs == 1 && !has(self.maxPairs))",
                message="must be 1, without maxPairs, with baseline Recorded",
            ),
            problem=_check_recorded_pairs,
        ),
        claim_path_rule("trace"),
        claim_path_rule("records", optional=True),
        claim_path_rule("history", optional=True),
        *REQUEST_RULES,
    )

    trace: str = trace_field("The trace to replay", files=True)
    window: WindowSpec | None = spec_field("The part of the trace to replay.", default=None)
    model: str | None = model_field()
    endpoint: Endpoint = endpoint_field()
    prompt: PromptEncoding | None = prompt_field()
    tokenizer: str | None = tokenizer_field(files=True)
    margin: Fraction | None = margin_field(
        "Largest accepted loss of attainment against the baseline, such as '1%'; default: 1%.",
        example="'1%'",
    )
    pairs: int = spec_field(
        "Pairs of runs that are recorded before the verdict.",
        default=USUAL_PAIRS,
        minimum=1,
        maximum=MAX_PAIRS,
    )
    max_pairs: int | None = spec_field(
        "If the pairs do not decide, record two more and look again, up to this number; default: "
        "no more.",
        default=None,
        minimum=2,
        maximum=MAX_PAIRS,
    )
    baseline: Baseline = spec_field(
        "Fresh replays the trace on the stable revision, too, in an engine beside the candidate. "
        "Recorded compares one run of the candidate with the latest recording in history, and "
        "needs only one engine.",
        default=Baseline.FRESH,
    )
    history: str | None = recordings_field(
        "Folder with recordings of replay ab of one build with itself, which show the spread "
        "between runs: pvc://CLAIM/PATH, or file://PATH outside a cluster.",
        files=True,
    )
    on_inconclusive: OnInconclusive = spec_field(
        "Action after an inconclusive verdict: Pause keeps the stable revision until a decision, "
        "Promote rolls out, and Rollback treats the revision as failed.",
        default=OnInconclusive.PAUSE,
    )
    records: str | None = records_field(
        "Folder for the runs of the gate and their reports: pvc://CLAIM/PATH, s3://BUCKET/PATH or "
        "gs://BUCKET/PATH. Each gate makes a folder of its own below it. Default: they are not "
        "kept.",
        default=None,
    )
    image: str | None = image_field()
    resources: ResourcesSpec = spec_field(
        "Compute resources of the pod that replays.", factory=ResourcesSpec
    )
    pod: PodSpec = spec_field("Fields of the pod that replays.", factory=PodSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """Replacement of the stable revision by a new one."""

    gate: GateSpec | None = spec_field(
        "The test that a new revision must pass. Outside a cluster, `goodput up --gate` reads it.",
        default=None,
    )
    progress_deadline_seconds: int = spec_field(
        "Seconds without progress after which a rollout has failed. Ignored outside a cluster.",
        default=3600,
        minimum=1,
        maximum=604_800,
    )
