"""The `LLMService` resource: what to serve and what was promised.

One dataclass per object of the manifest, in the manifest's order, in modules named like its parts.
Bounds stand in the fields, rules between fields in each class's `BETWEEN`; both become the CRD's
schema and CEL rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from goodput_core.contract import API_VERSION, KIND_LLMSERVICE
from goodput_core.errors import SpecError
from goodput_core.spec.choices import ControlMode, Policy, Preemption, RouterPolicy
from goodput_core.spec.control import ControlSpec
from goodput_core.spec.decode import decode, shown
from goodput_core.spec.engine import EngineSpec, TokenBudgetSpec
from goodput_core.spec.fields import (
    DNS_HINT,
    DNS_LABEL,
    NAME,
    NAME_HINT,
    Between,
    Cel,
    spec_field,
)
from goodput_core.spec.model import ModelSpec
from goodput_core.spec.promise import SLOClassSpec, SLOSpec
from goodput_core.spec.rollout import GateSpec, RolloutSpec, WindowSpec
from goodput_core.spec.router import RouterSpec

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

_MAX_REPLICAS: Final = 1_000


def _min_above_max(spec: LLMServiceSpec) -> str | None:
    if spec.min_replicas <= spec.max_replicas:
        return None
    return f"{spec.min_replicas} is above maxReplicas, {spec.max_replicas}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMServiceSpec:
    """What a person asks for."""

    BETWEEN: ClassVar[tuple[Between, ...]] = (
        Between(
            field="minReplicas",
            cel=Cel(
                rule="self.minReplicas <= self.maxReplicas", message="must not be above maxReplicas"
            ),
            problem=_min_above_max,
        ),
    )

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
    suspend: bool = spec_field(
        "Run no pods and keep everything else; ignored outside a cluster.", default=False
    )
    router: RouterSpec = spec_field("How requests are spread.", factory=RouterSpec)
    slo: SLOSpec = spec_field("What was promised.")
    control: ControlSpec = spec_field("How the control laws are used.", factory=ControlSpec)
    rollout: RolloutSpec = spec_field("How a new revision is let in.", factory=RolloutSpec)

    @property
    def initial_replicas(self) -> int:
        """Replicas before any control law has spoken."""
        return self.min_replicas if self.replicas is None else self.replicas


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
        pattern=NAME,
        pattern_hint=NAME_HINT,
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
        return decode(cls, value, "")


def _expect(value: Mapping[str, object], key: str, wanted: str) -> None:
    if key not in value:
        raise SpecError(key, f"is required; write {key}: {wanted}")
    if value[key] != wanted:
        raise SpecError(key, f"must be {wanted}, not {shown(value[key])}")
