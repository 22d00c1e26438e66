"""The `LLMService` resource: what to serve and what was promised.

One dataclass per object of the manifest, in the manifest's order. Bounds are in the fields,
rules between fields in `LLMService.check`; both become the CRD's schema and CEL rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from goodput_core.contract import API_VERSION, KIND_LLMSERVICE
from goodput_core.errors import SpecError
from goodput_core.slo import OBJECTIVE_PATTERN, parse_objective
from goodput_core.spec.choices import (
    Baseline,
    BudgetLaw,
    ControlMode,
    OnInconclusive,
    Policy,
    Preemption,
    RouterPolicy,
)
from goodput_core.spec.decode import decode, shown
from goodput_core.spec.fields import DNS_HINT, DNS_LABEL, QUANTITY, QUANTITY_HINT, spec_field
from goodput_core.spec.promise import SLOClassSpec, SLOSpec
from goodput_core.units import NS_PER_MS

__all__ = [
    "ControlMode",
    "ControlSpec",
    "EngineSpec",
    "GateSpec",
    "LLMService",
    "LLMServiceSpec",
    "ModelSpec",
    "Policy",
    "Preemption",
    "RolloutSpec",
    "RouterPolicy",
    "RouterSpec",
    "SLOClassSpec",
    "SLOSpec",
    "TokenBudgetSpec",
    "WindowSpec",
]

_MAX_TOKENS: Final = 1_048_576
_MAX_REPLICAS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Which weights are served."""

    source: str = spec_field(
        "Where the weights are: hf://ORG/NAME, pvc://CLAIM/PATH, file://PATH or emulated://PROFILE.",
        max_length=512,
        pattern=r"^(hf|pvc|file|emulated)://[^\s\x00-\x1f\x7f]+$",
        pattern_hint="begin with hf://, pvc://, file:// or emulated:// and name a model",
    )
    revision: str | None = spec_field(
        "The commit or tag of the weights.", default=None, min_length=1, max_length=128
    )

    @property
    def scheme(self) -> str:
        """The part of `source` before `://`."""
        return self.source.partition("://")[0]

    @property
    def name(self) -> str:
        """The part of `source` after `://`."""
        return self.source.partition("://")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudgetSpec:
    """Bounds and start of the tokens that one iteration may compute."""

    min: int = spec_field(
        "Least tokens per iteration.", default=256, minimum=1, maximum=_MAX_TOKENS
    )
    max: int = spec_field(
        "Most tokens per iteration.", default=8192, minimum=1, maximum=_MAX_TOKENS
    )
    initial: int = spec_field(
        "Tokens per iteration at the start.", default=2048, minimum=1, maximum=_MAX_TOKENS
    )
    law: BudgetLaw = spec_field(
        "What sizes the prompts' share of an iteration under control mode Auto; the other modes "
        "keep the initial budget.",
        default=BudgetLaw.MODEL,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesSpec:
    """Compute resources of an engine pod, as Kubernetes writes them."""

    limits: Mapping[str, str] = spec_field(
        "Upper bounds by resource name.",
        factory=dict,
        max_items=16,
        max_length=32,
        pattern=QUANTITY,
        pattern_hint=QUANTITY_HINT,
        int_or_string=True,
    )
    requests: Mapping[str, str] = spec_field(
        "Reserved amounts by resource name.",
        factory=dict,
        max_items=16,
        max_length=32,
        pattern=QUANTITY,
        pattern_hint=QUANTITY_HINT,
        int_or_string=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """How a replica schedules."""

    image: str | None = spec_field(
        "Container image; ignored outside a cluster.", default=None, min_length=1, max_length=512
    )
    policy: Policy = spec_field("Scheduling policy.", default=Policy.SLO)
    preemption: Preemption = spec_field(
        "What becomes of a preempted request's KV blocks.", default=Preemption.HYBRID
    )
    batch_timeout_ms: int | None = spec_field(
        "How long a batch that is not full is waited for: dynamic counts from its oldest request "
        "(100 unless set), static from its newest (1000 unless set); other policies never wait.",
        default=None,
        minimum=0,
        maximum=3_600_000,
    )
    ageing_seconds: int = spec_field(
        "Waiting that moves a request up one level under priority, and after which every fourth "
        "start goes by waiting under sjf, so that nobody starves.",
        default=30,
        minimum=1,
        maximum=86_400,
    )
    swap_space_gib: int = spec_field(
        "Host memory of a replica for the KV blocks of preempted requests; unused by recompute.",
        default=16,
        minimum=0,
        maximum=65_536,
    )
    token_budget: TokenBudgetSpec = spec_field(
        "Tokens that one iteration may compute.", factory=TokenBudgetSpec
    )
    max_num_seqs: int = spec_field(
        "Most requests that run at once.", default=256, minimum=1, maximum=65_536
    )
    max_waiting: int = spec_field(
        "Most requests that wait; one more is refused with 429.",
        default=1024,
        minimum=0,
        maximum=1_000_000,
    )
    tensor_parallel: int = spec_field(
        "Devices that share one replica.", default=1, minimum=1, maximum=64
    )
    resources: ResourcesSpec = spec_field(
        "Compute resources; ignored outside a cluster.", factory=ResourcesSpec
    )

    @property
    def batch_timeout_ns(self) -> int | None:
        """`batch_timeout_ms` in nanoseconds."""
        return None if self.batch_timeout_ms is None else self.batch_timeout_ms * NS_PER_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How requests are spread over replicas."""

    policy: RouterPolicy = spec_field(
        "Placement of requests.", default=RouterPolicy.PREFIX_AFFINITY
    )
    replicas: int = spec_field(
        "Router pods; a local service runs one.", default=2, minimum=1, maximum=64
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSpec:
    """How the control laws are used."""

    mode: ControlMode = spec_field(
        "Auto applies decisions, Recommend records them, Manual computes none.",
        default=ControlMode.AUTO,
    )
    interval_seconds: int = spec_field(
        "Seconds between decisions of the outer loop.", default=10, minimum=1, maximum=3600
    )
    scale_down_stabilization_seconds: int = spec_field(
        "Seconds for which fewer replicas must suffice before one is taken away.",
        default=300,
        minimum=0,
        maximum=86_400,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """A part of a trace."""

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
        pattern=r"^(pvc|file)://[^\s\x00-\x1f\x7f]+$",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMServiceSpec:
    """What a person asks for."""

    model: ModelSpec = spec_field("Which weights are served.")
    engine: EngineSpec = spec_field("How a replica schedules.", factory=EngineSpec)
    replicas: int | None = spec_field(
        "Replicas set by a human, HPA or KEDA; while set, our law only recommends.",
        default=None,
        minimum=0,
        maximum=_MAX_REPLICAS,
    )
    min_replicas: int = spec_field(
        "Least replicas that the control law keeps.", default=1, minimum=0, maximum=_MAX_REPLICAS
    )
    max_replicas: int = spec_field(
        "Most replicas that the control law keeps.", default=8, minimum=1, maximum=_MAX_REPLICAS
    )
    router: RouterSpec = spec_field("How requests are spread.", factory=RouterSpec)
    slo: SLOSpec = spec_field("What was promised.")
    control: ControlSpec = spec_field("How the control laws are used.", factory=ControlSpec)
    rollout: RolloutSpec = spec_field("How a new revision is let in.", factory=RolloutSpec)

    @property
    def initial_replicas(self) -> int:
        """Replicas before any control law has spoken."""
        return self.min_replicas if self.replicas is None else self.replicas

    def check(self) -> None:
        """Rules between fields.

        Raises:
            SpecError: the first rule that is broken, at the field to change.
        """
        budget = self.engine.token_budget
        at = "spec.engine.tokenBudget"
        if budget.min > budget.max:
            raise SpecError(f"{at}.min", f"{budget.min} is above max, {budget.max}")
        if not budget.min <= budget.initial <= budget.max:
            bounds = f"{budget.min} to {budget.max}"
            raise SpecError(f"{at}.initial", f"{budget.initial} lies outside min to max, {bounds}")
        if self.min_replicas > self.max_replicas:
            raise SpecError(
                "spec.minReplicas", f"{self.min_replicas} is above maxReplicas, {self.max_replicas}"
            )
        self.slo.check("spec.slo")
        gate = self.rollout.gate
        if gate and gate.window and gate.window.start_seconds >= gate.window.end_seconds:
            raise SpecError(
                "spec.rollout.gate.window.startSeconds",
                f"{gate.window.start_seconds} is not before endSeconds, {gate.window.end_seconds}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataSpec:
    """The part of Kubernetes' object metadata that a manifest on disk carries."""

    name: str = spec_field(
        "The service's name.", max_length=40, pattern=DNS_LABEL, pattern_hint=DNS_HINT
    )
    namespace: str | None = spec_field(
        "The namespace; ignored outside a cluster.",
        default=None,
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$",
        pattern_hint="hold lower-case letters, digits and '-' only",
    )
    labels: Mapping[str, str] = spec_field("Labels.", factory=dict, max_items=64, max_length=63)
    annotations: Mapping[str, str] = spec_field(
        "Annotations.", factory=dict, max_items=64, max_length=65_536
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMService:
    """A whole manifest."""

    api_version: str = spec_field("Always goodput.dev/v1alpha1.", max_length=64)
    kind: str = spec_field("Always LLMService.", max_length=64)
    metadata: MetadataSpec = spec_field("The object's name.")
    spec: LLMServiceSpec = spec_field("What is asked for.")

    @classmethod
    def from_dict(cls, value: object) -> LLMService:
        """Validate a decoded manifest.

        Args:
            value: what a YAML or JSON parser returned for one document; a `status` is ignored.

        Raises:
            SpecError: the first field that breaks a rule, by its path.
        """
        if isinstance(value, dict):
            _expect(value, "apiVersion", API_VERSION)
            _expect(value, "kind", KIND_LLMSERVICE)
            value = {key: entry for key, entry in value.items() if key != "status"}
        service = decode(cls, value, "")
        service.spec.check()
        return service


def _expect(value: Mapping[str, object], key: str, wanted: str) -> None:
    if key not in value:
        raise SpecError(key, f"is required; write {key}: {wanted}")
    if value[key] != wanted:
        raise SpecError(key, f"must be {wanted}, not {shown(value[key])}")
