"""What this version cannot run is refused by its name, whatever else the manifest says."""

from __future__ import annotations

from typing import Any

import pytest

from goodput_core.errors import ExitCode, NotBuiltError
from goodput_core.spec.choices import ControlMode, Policy, Preemption, RouterPolicy
from goodput_core.spec.llmservice import LLMService
from goodput_core.support import (
    BUILT_CONTROL_MODES,
    BUILT_POLICIES,
    BUILT_PREEMPTIONS,
    BUILT_ROUTER_POLICIES,
    require_built,
)


def service(**changes: Any) -> LLMService:
    spec: dict[str, Any] = {
        "model": {"source": "emulated://p"},
        "engine": {"policy": "sarathi", "preemption": "recompute"},
        "router": {"policy": "least-loaded"},
        "slo": {"classes": [{"name": "a", "ttftMs": 1, "tpotMs": 1}]},
        "control": {"mode": "Manual"},
    }
    for path, value in changes.items():
        section, _, field = path.partition("__")
        spec[section] = {**spec.get(section, {}), field: value}
    envelope = {"apiVersion": "goodput.dev/v1alpha1", "kind": "LLMService"}
    return LLMService.from_dict({**envelope, "metadata": {"name": "chat"}, "spec": spec})


CHOICES: list[tuple[str, str, Any, frozenset[Any]]] = [
    ("engine__policy", "spec.engine.policy", Policy, BUILT_POLICIES),
    ("engine__preemption", "spec.engine.preemption", Preemption, BUILT_PREEMPTIONS),
    ("router__policy", "spec.router.policy", RouterPolicy, BUILT_ROUTER_POLICIES),
    ("control__mode", "spec.control.mode", ControlMode, BUILT_CONTROL_MODES),
]
EACH = [
    pytest.param(field, path, str(value), value in built, id=f"{field}-{value}")
    for field, path, choices, built in CHOICES
    for value in choices
]


@pytest.mark.parametrize(("field", "path", "value", "built"), EACH)
def test_a_choice_is_run_or_refused_by_name(field: str, path: str, value: str, built: bool) -> None:
    asked = service(**{field: value})
    if built:
        require_built(asked)
        return
    with pytest.raises(NotBuiltError) as caught:
        require_built(asked)
    assert caught.value.path == path
    assert caught.value.problem.startswith(f"{value} is not built yet; this version has ")
    assert caught.value.exit_code is ExitCode.USAGE


def test_who_does_a_part_of_a_service_says_which_modes_it_honours() -> None:
    with pytest.raises(NotBuiltError) as caught:
        require_built(service(control__mode="Auto"), control_modes=frozenset({ControlMode.MANUAL}))
    assert caught.value.path == "spec.control.mode"
    require_built(service(control__mode="Auto"), control_modes=frozenset({ControlMode.AUTO}))


def test_a_part_that_is_not_built_is_refused_by_name() -> None:
    with pytest.raises(NotBuiltError) as caught:
        require_built(service(rollout__gate={"trace": "file://t"}))
    assert caught.value.path == "spec.rollout.gate"


def test_a_refusal_keeps_its_kind_when_it_names_the_file() -> None:
    with pytest.raises(NotBuiltError) as caught:
        require_built(service(rollout__gate={"trace": "file://t"}))
    named = caught.value.at("chat.yaml")
    assert isinstance(named, NotBuiltError)
    assert str(named).startswith("chat.yaml: spec.rollout.gate: gated rollouts are not built yet")
