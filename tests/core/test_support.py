"""Fields that this version does not implement are refused by name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from tests.builders.manifests import llmservice

from goodput_core.errors import ExitCode, NotBuiltError, SpecError
from goodput_core.spec.choices import ControlMode, Policy, Preemption, RouterPolicy
from goodput_core.spec.support import SHIPPED_PROFILES, require_built, require_served
from goodput_engine.device.load import list_profiles, load_profile

if TYPE_CHECKING:
    from enum import StrEnum


CHOICES: dict[str, type[StrEnum]] = {
    "engine__policy": Policy,
    "engine__preemption": Preemption,
    "router__policy": RouterPolicy,
    "control__mode": ControlMode,
}


service = partial(llmservice, "engine")


def test_a_part_that_is_not_built_is_refused_by_name() -> None:
    with pytest.raises(NotBuiltError) as caught:
        require_built(service(rollout__gate={"trace": "file://t"}))
    assert caught.value.path == "spec.rollout.gate"
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize("source", ["hf://a/b", "pvc://claim/b", "file:///b"])
def test_weights_are_refused_where_nothing_can_take_their_place(source: str) -> None:
    asked = service(model__source=source)
    require_built(asked)
    with pytest.raises(NotBuiltError, match=f"so {source} cannot be served") as caught:
        require_served(asked)
    assert caught.value.path == "spec.model.source"


def test_what_is_refused_anywhere_is_served_nowhere() -> None:
    require_served(service())
    with pytest.raises(NotBuiltError):
        require_served(service(rollout__gate={"trace": "file://t"}))


def test_every_choice_that_a_manifest_has_is_built() -> None:
    for path, choices in CHOICES.items():
        for value in choices:
            require_built(service(**{path: str(value)}))


def test_a_refusal_keeps_its_kind_when_it_names_the_file() -> None:
    with pytest.raises(NotBuiltError) as caught:
        require_built(service(rollout__gate={"trace": "file://t"}))
    named = caught.value.at("chat.yaml")
    assert isinstance(named, NotBuiltError)
    assert str(named).startswith("chat.yaml: spec.rollout.gate: gated rollouts are not built yet")


def test_the_table_of_profiles_is_that_of_the_engine() -> None:
    shipped = {name: load_profile(name).tensor_parallel for name in list_profiles()}
    assert dict(SHIPPED_PROFILES) == shipped


def test_an_unknown_profile_is_refused_with_the_list_of_profiles() -> None:
    unknown = service(model__source="emulated://a100")
    require_built(unknown)
    with pytest.raises(SpecError, match=r"no device profile a100; use one of .*unit") as caught:
        require_served(unknown)
    assert caught.value.path == "spec.model.source"


@pytest.mark.parametrize(
    ("profile", "wanted"), [("unit", 2), ("llama-3-70b-4xh100", 1), ("llama-3-70b-4xh100-pp2", 4)]
)
def test_a_wrong_tensor_parallelism_is_refused_with_the_right_one(
    profile: str, wanted: int
) -> None:
    wrong = service(model__source=f"emulated://{profile}", engine__tensorParallel=wanted)
    expected = SHIPPED_PROFILES[profile]
    with pytest.raises(SpecError, match=f"is {wanted}, .*; set it to {expected}") as caught:
        require_served(wrong)
    assert caught.value.path == "spec.engine.tensorParallel"


def test_a_profile_named_by_its_path_is_left_to_the_engine() -> None:
    require_served(service(model__source="emulated://profiles/mine.yaml"))
