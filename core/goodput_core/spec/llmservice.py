"""The `LLMService` resource: the model to serve, and the latency objectives of its traffic.

Each object of the manifest is a dataclass. The declaration of a field contains its bounds, and the
`RULES` of a class are the rules between its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from goodput_core.contract import API_VERSION, KIND_LLMSERVICE
from goodput_core.declaration import (
    Cel,
    CrossFieldRule,
    claim_path_rule,
    data_key_field,
    dns_label_field,
    in_order,
    label_name_field,
    object_name_field,
    spec_field,
    sub_path_field,
)
from goodput_core.errors import SpecError
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import Baseline, ControlMode
from goodput_core.spec.codec import decode, format_value
from goodput_core.spec.rollout import RolloutSpec
from goodput_core.spec.workloads import EngineSpec, RouterSpec

__all__ = [
    "ControlSpec",
    "LLMService",
    "LLMServiceSpec",
    "MetadataSpec",
    "ModelCacheSpec",
    "ModelSpec",
    "PrometheusSpec",
    "SLOSpec",
    "TokenSecretSpec",
]

_MAX_REPLICAS: Final = 1_000


# --- spec.model -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCacheSpec:
    """A PersistentVolumeClaim that keeps downloaded weights for later pods."""

    claim_name: str = object_name_field(
        "The PersistentVolumeClaim; for replicas on several nodes, its access mode must allow "
        "several nodes.",
    )
    sub_path: str | None = sub_path_field(
        "The folder of the volume to use as the cache; default: its root."
    )
    read_only: bool = spec_field(
        "Mount the volume read-only, so that nothing is added to the cache.", default=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSecretSpec:
    """The Secret with the token for downloading the weights; only the pods read it."""

    name: str = object_name_field("The Secret, in the service's namespace.")
    key: str = data_key_field("The key of the Secret's data.", default="token")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The model weights to serve."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (claim_path_rule("source"),)

    source: str = spec_field(
        "Location of the weights: hf://ORG/NAME, pvc://CLAIM/PATH, file://PATH or "
        "emulated://PROFILE. CLAIM is a PersistentVolumeClaim in the service's namespace, and "
        "PATH a folder of its volume (default: its root).",
        max_length=512,
        pattern=r"^(hf|pvc|file|emulated)://[^\x00-\x20\x7f]+$",
        pattern_hint="begin with hf://, pvc://, file:// or emulated:// and name a model",
    )
    revision: str | None = spec_field(
        "The commit of hf:// weights. A tag or a branch (default: main) is resolved at each start "
        "of an engine, which logs its commit. In a cluster, hf:// requires a commit.",
        default=None,
        min_length=1,
        max_length=128,
    )
    cache: ModelCacheSpec | None = spec_field(
        "A volume that keeps downloaded weights; without one, every pod downloads them. Ignored "
        "outside a cluster.",
        default=None,
    )
    token_secret: TokenSecretSpec | None = spec_field(
        "The Secret with the token for hf:// sources. Ignored outside a cluster.", default=None
    )
    offline: bool = spec_field(
        "Load weights from the cache and volumes only, never from the network.",
        default=False,
    )

    @property
    def scheme(self) -> str:
        """The part of `source` before `://`."""
        return self.source.partition("://")[0]

    @property
    def name(self) -> str:
        """The part of `source` after `://`."""
        return self.source.partition("://")[2]

    def at_path(self, path: str) -> ModelSpec:
        """Return the model with another source: a folder or a GGUF file of this machine."""
        return replace(self, source=f"file://{path}")

    @property
    def is_fetched(self) -> bool:
        """True if the weights are downloaded or converted before they are loaded."""
        return self.scheme == "hf" or self.is_gguf

    @property
    def is_gguf(self) -> bool:
        """True if the source is a GGUF file, which is converted before it is loaded."""
        return self.scheme == "file" and self.name.lower().endswith(".gguf")


# --- spec.slo -------------------------------------------------------------------------------


def _check_default(slo: SLOSpec) -> str | None:
    names = [c.name for c in slo.classes]
    if slo.default is None or slo.default in names:
        return None
    return f"{slo.default!r} is not a class; classes: {', '.join(names)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SLOSpec:
    """Latency objectives by class of traffic."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        CrossFieldRule(
            field="default",
            cel=Cel(
                rule="!has(self.default) || self.classes.exists(c, c.name == self.default)",
                message="must be the name of a class",
            ),
            problem=_check_default,
        ),
    )

    classes: tuple[SLOClass, ...] = spec_field(
        "Classes of traffic.", min_items=1, max_items=16, key="name"
    )
    default: str | None = spec_field(
        "Class of requests that name no class; default: the first class.",
        default=None,
        max_length=40,
    )
    outage_seconds: int | None = spec_field(
        "Length in seconds of an unobserved outage with which every objective must still be met "
        "for a PASS. Default: no requirement. Every PASS states the longest such outage.",
        default=None,
        minimum=1,
        maximum=86_400,
    )

    @property
    def default_class(self) -> str:
        """The class of requests that name no class."""
        return self.default if self.default is not None else self.classes[0].name

    def by_name(self) -> dict[str, SLOClass]:
        """Return the targets by class name, in the manifest's order."""
        return {slo_class.name: slo_class for slo_class in self.classes}


# --- spec.control ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSpec:
    """A Prometheus server that scrapes the service's routers."""

    url: str = spec_field(
        "The server's base URL, to which /api/v1/query is added.",
        max_length=512,
        pattern=r"^https?://[^\x00-\x20\x7f]+$",
        pattern_hint="begin with http:// or https:// and name a server",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSpec:
    """Settings of the control laws."""

    mode: ControlMode = spec_field(
        "Auto applies decisions, Recommend only records them, Manual computes none.",
        default=ControlMode.AUTO,
    )
    interval_seconds: int = spec_field(
        "Seconds between two decisions about token budget and replicas.",
        default=10,
        minimum=1,
        maximum=3600,
    )
    scale_down_stabilization_seconds: int = spec_field(
        "Seconds for which fewer replicas must suffice before replicas are removed.",
        default=300,
        minimum=0,
        maximum=86_400,
    )
    replica_requests_per1000_seconds: int | None = spec_field(
        "Requests in 1,000 seconds that one replica of another server is expected to sustain, from "
        "a calibrated device profile. For more, replicas are added before a target is missed.",
        default=None,
        minimum=1,
        maximum=100_000_000,
    )
    prometheus: PrometheusSpec | None = spec_field(
        "Read the routers' counters from this Prometheus server; default: from the routers. "
        "Counters of engines are always read from the engines. Ignored outside a cluster.",
        default=None,
    )


def _check_recorded_baseline(spec: LLMServiceSpec) -> str | None:
    gate, runtime = spec.rollout.gate, spec.engine.runtime
    if gate is None or gate.baseline is not Baseline.RECORDED or not runtime.foreign:
        return None
    return (
        f"is Recorded, but responses of a server of kind {runtime.kind.value} do not name the "
        "revision that a recording must be of; use Fresh"
    )


# --- the document ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMServiceSpec:
    """The desired state of a service."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        in_order("min_replicas", "max_replicas"),
        CrossFieldRule(
            field="rollout.gate.baseline",
            cel=Cel(
                rule="!has(self.rollout) || !has(self.rollout.gate) || "
                "!has(self.rollout.gate.baseline) || self.rollout.gate.baseline != 'Recorded' || "
                "!has(self.engine) || !has(self.engine.runtime) || "
                "!has(self.engine.runtime.kind) || self.engine.runtime.kind == 'Goodput'",
                message="must be Fresh with a runtime other than Goodput, whose responses do not "
                "name their revision",
            ),
            problem=_check_recorded_baseline,
        ),
    )

    model: ModelSpec = spec_field("The model weights to serve.")
    engine: EngineSpec = spec_field("Scheduling of a replica, and its pod.", factory=EngineSpec)
    replicas: int | None = spec_field(
        "Number of replicas, set by hand, by an HPA or by KEDA. While this field is set, the "
        "control law only recommends a number.",
        default=None,
        minimum=0,
        maximum=_MAX_REPLICAS,
    )
    min_replicas: int = spec_field(
        "Minimum number of replicas.", default=1, minimum=0, maximum=_MAX_REPLICAS
    )
    max_replicas: int = spec_field(
        "Maximum number of replicas.", default=8, minimum=1, maximum=_MAX_REPLICAS
    )
    suspend: bool = spec_field(
        "Run no pods, but keep all other objects; ignored outside a cluster.", default=False
    )
    router: RouterSpec = spec_field(
        "Placement of requests on replicas, and the routers' pods.", factory=RouterSpec
    )
    slo: SLOSpec = spec_field("Latency objectives by class of traffic.")
    control: ControlSpec = spec_field("Settings of the control laws.", factory=ControlSpec)
    rollout: RolloutSpec = spec_field(
        "Replacement of the stable revision by a new one.", factory=RolloutSpec
    )

    @property
    def initial_replicas(self) -> int:
        """The replicas before the first decision of a control law."""
        return self.min_replicas if self.replicas is None else self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataSpec:
    """The fields of Kubernetes' object metadata that a manifest may have."""

    name: str = dns_label_field("The service's name.")
    namespace: str | None = label_name_field(
        "The namespace; ignored outside a cluster.", default=None
    )
    labels: Mapping[str, str] = spec_field("Labels.", factory=dict, max_items=64, max_length=63)
    annotations: Mapping[str, str] = spec_field(
        "Annotations.", factory=dict, max_items=64, max_length=65_536
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMService:
    """A complete manifest."""

    api_version: str = spec_field("Always goodput.dev/v1alpha1.", max_length=64)
    kind: str = spec_field("Always LLMService.", max_length=64)
    metadata: MetadataSpec = spec_field("Name, namespace, labels and annotations.")
    spec: LLMServiceSpec = spec_field("The desired state of the service.")

    @classmethod
    def from_dict(cls, value: object) -> LLMService:
        """Validate a decoded manifest.

        Args:
            value: the parsed YAML or JSON value of one document; its `status` is ignored.

        Raises:
            SpecError: the first invalid field, by its path.
        """
        if isinstance(value, dict):
            _expect(value, "apiVersion", API_VERSION)
            _expect(value, "kind", KIND_LLMSERVICE)
            value = {key: entry for key, entry in value.items() if key != "status"}
        return decode(cls, value, "")


def _expect(value: Mapping[str, object], key: str, expected: str) -> None:
    if key not in value:
        raise SpecError(key, f"is required; write {key}: {expected}")
    if value[key] != expected:
        raise SpecError(key, f"must be {expected}, not {format_value(value[key])}")
