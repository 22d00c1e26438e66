"""The `TraceReplay` resource: one replay of a trace against a running service, and its verdict."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Final

from goodput_core.declaration import (
    Cel,
    CrossFieldRule,
    claim_path_rule,
    dns_label_field,
    exactly_one_of,
    image_field,
    records_field,
    spec_field,
    trace_field,
)
from goodput_core.slo.targets import format_objective, margin_field, percentage_field
from goodput_core.slo.verdict import VerdictKind
from goodput_core.spec.choices import Endpoint, PromptEncoding
from goodput_core.spec.llmservice import SLOSpec, TokenSecretSpec
from goodput_core.spec.pod import PodSpec, ResourcesSpec
from goodput_core.spec.requests import (
    REQUEST_RULES,
    endpoint_field,
    model_field,
    prompt_field,
    tokenizer_field,
)
from goodput_core.spec.rollout import WindowSpec
from goodput_core.spec.status import ConditionStatus

__all__ = ["ReplayGateSpec", "ReplayTargetSpec", "TraceReplaySpec", "TraceReplayStatus"]

_MAX_PERCENT: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTargetSpec:
    """The server that receives the requests, and the form in which it accepts them."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (exactly_one_of("service", "url"), *REQUEST_RULES)

    service: str | None = dns_label_field(
        "An LLMService of the same namespace; its SLO applies unless the replay has its own.",
        default=None,
    )
    url: str | None = spec_field(
        "The base URL of another server with an OpenAI-compatible API.",
        default=None,
        max_length=512,
        pattern=r"^https?://[^\x00-\x20\x7f]+$",
        pattern_hint="begin with http:// or https:// and name a server",
    )
    model: str | None = model_field()
    endpoint: Endpoint = endpoint_field()
    prompt: PromptEncoding | None = prompt_field()
    tokenizer: str | None = tokenizer_field()
    api_key_secret: TokenSecretSpec | None = spec_field(
        "The Secret with the bearer token of the server; only the pods read it.", default=None
    )


def _check_confidence(gate: ReplayGateSpec) -> str | None:
    if gate.confidence is None or gate.confidence >= Fraction(1, 2):
        return None
    return f"{format_objective(gate.confidence)} is below 50%"


def _check_margin(gate: ReplayGateSpec) -> str | None:
    if gate.margin is None or gate.compares:
        return None
    return "needs baseline or history"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayGateSpec:
    """The objectives, and the difference to a baseline, decide the condition `Passed`."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        CrossFieldRule(
            field="confidence",
            cel=Cel(
                rule="!has(self.confidence) || self.confidence.matches('^[5-9][0-9]')",
                message="must be at least 50%",
            ),
            problem=_check_confidence,
        ),
        CrossFieldRule(
            field="margin",
            cel=Cel(
                rule="!has(self.margin) || has(self.baseline) || has(self.history)",
                message="needs baseline or history",
            ),
            problem=_check_margin,
        ),
        claim_path_rule("baseline", optional=True),
        claim_path_rule("history", optional=True),
    )

    confidence: Fraction | None = percentage_field(
        "One-sided confidence of the verdict, such as '99%'; default: 95%.", example="'99%'"
    )
    baseline: str | None = records_field(
        "Folder of an earlier run of the same requests, such as the status.report of a "
        "TraceReplay: pvc://CLAIM/PATH, s3://BUCKET/PATH or gs://BUCKET/PATH. The replay must not "
        "lose more attainment against it than the margin. One pair of runs shows nothing about the "
        "spread between runs, so only history lets it pass. Default: the latest recording in "
        "history.",
        default=None,
    )
    margin: Fraction | None = margin_field(
        "Largest accepted loss of attainment against the baseline, such as '1%'; default: 1%.",
        example="'1%'",
    )
    history: str | None = records_field(
        "Folder with recordings of replay ab of the baseline with itself, made at different times, "
        "which show the spread between runs: pvc://CLAIM/PATH, s3://BUCKET/PATH or "
        "gs://BUCKET/PATH.",
        default=None,
    )

    @property
    def compares(self) -> bool:
        """True if the replay is compared with a baseline."""
        return self.baseline is not None or self.history is not None


def _check_slo(spec: TraceReplaySpec) -> str | None:
    if spec.target.url is None or spec.slo is not None:
        return None
    return "is required with target.url, which has no objectives of its own"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReplaySpec:
    """The requests to send, the server that receives them, and the place of the records."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        CrossFieldRule(
            field="slo",
            cel=Cel(
                rule="!has(self.target.url) || has(self.slo)",
                message="is required with target.url, which has no objectives of its own",
            ),
            problem=_check_slo,
        ),
        claim_path_rule("trace"),
        claim_path_rule("records"),
    )

    trace: str = trace_field("The trace")
    window: WindowSpec | None = spec_field("The part of the trace to replay.", default=None)
    speed_percent: int = spec_field(
        "Speed of the replay in percent: 200 replays an hour in 30 minutes.",
        default=100,
        minimum=1,
        maximum=_MAX_PERCENT,
    )
    rate_percent: int = spec_field(
        "Number of requests in percent of those of the trace; bursts are preserved.",
        default=100,
        minimum=1,
        maximum=_MAX_PERCENT,
    )
    target: ReplayTargetSpec = spec_field("The server that receives the requests.")
    allow_production: bool = spec_field(
        "Confirm that the replay may load a server that also serves clients. Required for every "
        'target but an LLMService with the label goodput.dev/production: "false".',
        default=False,
    )
    slo: SLOSpec | None = spec_field(
        "Latency objectives by class; default: those of the target service.", default=None
    )
    gate: ReplayGateSpec | None = spec_field(
        "Judge the replay by its objectives, and against a baseline if there is one; without this "
        "field, Passed stays Unknown.",
        default=None,
    )
    shards: int = spec_field(
        "Number of pods that send, each of them complete sessions.",
        default=1,
        minimum=1,
        maximum=100,
    )
    records: str = records_field(
        "Folder for the records and the report: pvc://CLAIM/PATH, s3://BUCKET/PATH or "
        "gs://BUCKET/PATH. Each replay makes a folder of its own below it. A claim of several "
        "shards must be ReadWriteMany.",
    )
    history_limit: int | None = spec_field(
        "Number of finished replays with the same metadata.generateName to keep, this one "
        "included; older ones are deleted, but not their records. The newest finished one decides. "
        "Default: all.",
        default=None,
        minimum=1,
        maximum=1000,
    )
    arm_deadline_seconds: int = spec_field(
        "Seconds from the creation of the replay within which its target and all shards must be "
        "ready.",
        default=600,
        minimum=5,
        maximum=86_400,
    )
    deadline_seconds: int = spec_field(
        "Seconds after which shards that are still running are stopped; the replay is then "
        "INVALID.",
        default=21_600,
        minimum=10,
        maximum=604_800,
    )
    image: str | None = image_field()
    resources: ResourcesSpec = spec_field("Compute resources of each pod.", factory=ResourcesSpec)
    pod: PodSpec = spec_field("Fields of the pods.", factory=PodSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReplayStatus:
    """Observed state of a replay."""

    observed_generation: int | None = spec_field(
        "Generation of the spec that the status describes.", default=None, minimum=0
    )
    phase: str | None = spec_field(
        "Pending, Arming, Running, Merging, Comparing or Finished.", default=None, max_length=32
    )
    armed: str | None = spec_field("Armed shards and all shards.", default=None, max_length=32)
    start_time: str | None = spec_field(
        "Start of the run, at the same instant in all shards.",
        default=None,
        max_length=32,
        format="date-time",
    )
    completion_time: str | None = spec_field(
        "Time of the verdict.", default=None, max_length=32, format="date-time"
    )
    verdict: VerdictKind | None = spec_field("The verdict.", default=None)
    reason: str | None = spec_field(
        "Reason of the verdict, in one word.", default=None, max_length=64
    )
    message: str | None = spec_field(
        "Reason of the verdict, in a sentence.", default=None, max_length=3000
    )
    interval: str | None = spec_field(
        "Difference to the baseline in the class that decided, with its bounds.",
        default=None,
        max_length=160,
    )
    requests: int | None = spec_field("Requests of the window.", default=None, minimum=0)
    report: str | None = spec_field(
        "Folder of the run, with report.html, summary.json and records.parquet.",
        default=None,
        max_length=1024,
    )
    conditions: tuple[ConditionStatus, ...] = spec_field(
        "Conditions of the replay.", default=(), max_items=16, key="type"
    )
