"""Valid manifests: their meaning and their defaults."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.builders.manifests import manifest_path

from goodput_core.declaration import declared_fields
from goodput_core.spec.choices import ControlMode, Policy, Preemption, RouterPolicy
from goodput_core.spec.codec import encode
from goodput_core.spec.llmservice import LLMService, LLMServiceSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLE = Path(__file__).parents[2] / "examples" / "chat.yaml"
VALID = list(
    yaml.safe_load_all(Path(__file__).with_name("valid_manifests.yaml").read_text(encoding="utf-8"))
)

# The manifest of the project's design, in full.
DESIGNED = manifest_path("designed").read_text(encoding="utf-8")

SMALLEST = """
apiVersion: goodput.dev/v1alpha1
kind: LLMService
metadata: {name: a}
spec:
  model: {source: "emulated://p"}
  slo: {classes: [{name: only, ttftMs: 1, tpotMs: 1}]}
"""


def service(text: str) -> LLMService:
    return LLMService.from_dict(yaml.safe_load(text))


def test_the_designed_manifest_is_valid() -> None:
    designed = service(DESIGNED).spec
    assert designed.model.scheme == "hf"
    assert designed.model.name == "Qwen/Qwen3-8B"
    assert designed.engine.resources.limits == {"nvidia.com/gpu": "1"}
    assert designed.initial_replicas == 1
    slo_class = designed.slo.by_name()["interactive"]
    assert slo_class.objective == Fraction(99, 100)
    assert slo_class.targets.ttft_ns == 500_000_000
    assert designed.rollout.gate is not None
    assert designed.rollout.gate.margin == Fraction(1, 100)


def test_the_smallest_manifest_takes_every_default() -> None:
    spec = service(SMALLEST).spec
    assert spec.engine.policy is Policy.SLO
    assert spec.engine.preemption is Preemption.HYBRID
    assert spec.router.policy is RouterPolicy.PREFIX_AFFINITY
    assert spec.control.mode is ControlMode.AUTO
    assert (spec.min_replicas, spec.max_replicas, spec.replicas) == (1, 8, None)
    assert spec.slo.default_class == "only"
    assert spec.slo.by_name()["only"].objective is None


def test_the_example_in_the_repository_is_valid() -> None:
    service(EXAMPLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("manifest", VALID, ids=[m["metadata"]["name"] for m in VALID])
def test_a_valid_manifest_is_accepted_and_encoded_unchanged(manifest: dict[str, Any]) -> None:
    taken = LLMService.from_dict(manifest)
    assert LLMService.from_dict(encode(taken)) == taken


def test_the_table_of_valid_manifests_has_every_field() -> None:
    written = {field for m in VALID for field in _written(LLMServiceSpec, m["spec"])}
    assert written == set(_known(LLMServiceSpec))


def _known(cls: type[Any]) -> Iterator[tuple[str, str]]:
    for field in declared_fields(cls):
        yield cls.__name__, field.name
        if field.nested is not None:
            yield from _known(field.nested)


def _written(cls: type[Any], value: Any) -> Iterator[tuple[str, str]]:
    for one in value if isinstance(value, list) else [value]:
        for field in declared_fields(cls):
            if field.name in one:
                yield cls.__name__, field.name
                if field.nested is not None:
                    yield from _written(field.nested, one[field.name])


def test_replicas_set_by_hand_override_the_control_law() -> None:
    assert service(SMALLEST + "  minReplicas: 2\n  replicas: 0\n").spec.initial_replicas == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replicas", 0),
        ("replicas", 1000),
        ("minReplicas", 0),
        ("engine", {"tokenBudget": {"min": 1, "max": 1, "initial": 1}}),
        ("engine", {"maxWaiting": 0}),
        ("engine", {"resources": {"limits": {"cpu": "500m", "memory": "16Gi", "x/y": "1e3"}}}),
        ("engine", None),
        ("model", {"source": "file:///srv/models/größe"}),
        ("control", {"scaleDownStabilizationSeconds": 0}),
        (
            "rollout",
            {"gate": {"trace": "file://t", "window": {"startSeconds": 0, "endSeconds": 1}}},
        ),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_value_on_its_bound_is_valid(field: str, value: Any) -> None:
    manifest = yaml.safe_load(SMALLEST)
    manifest["spec"][field] = value
    LLMService.from_dict(manifest)


@pytest.mark.parametrize("objective", ["99%", "99.9%", "99.999999%", "0.000001%", "5%"])
def test_an_objective_is_an_exact_fraction(objective: str) -> None:
    manifest = yaml.safe_load(SMALLEST)
    manifest["spec"]["slo"]["classes"][0]["objective"] = objective
    (slo_class,) = LLMService.from_dict(manifest).spec.slo.classes
    assert slo_class.objective == Fraction(objective[:-1]) / 100


def test_a_spec_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        service(SMALLEST).spec.replicas = 3  # type: ignore[misc] # what is under test
