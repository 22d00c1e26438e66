"""Fields without a new revision are followed by running engines, and the reverse.

The operator decides which change of a service starts new pods, the engine which change of its
manifest it takes over. Whatever fell between the two would never reach a pod.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest
from msgspec import structs
from tests.builders.manifests import llmservice

from goodput_core.control import Bounds, ServiceParams, Setpoint
from goodput_core.spec.workloads import EngineSpec, TokenBudgetSpec
from goodput_engine.core.build import configuration
from goodput_engine.manifest_file import read_manifest
from goodput_engine.server.manifest_watch import followed_fields
from goodput_operator.render.config_map import config_map
from goodput_operator.render.metadata import Owner
from goodput_operator.render.pods import Installation, manifest_key
from goodput_operator.render.revisions import Revision, engine_revision

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_core.spec.llmservice import LLMService
    from goodput_engine.messages import Configure

OWNER: Final = Owner(name="chat", namespace="models", uid="5a0c")
INSTALLATION: Final = Installation(engine_image="e:1", router_image="e:1", fs_group=None)
CLASS: Final = {"name": "a", "ttftMs": 500, "tpotMs": 50}
ENGINE: Final[dict[str, Any]] = {
    "image": "other:1",
    "policy": "sarathi",
    "preemption": "recompute",
    "batchTimeoutMs": 7,
    "ageingSeconds": 7.5,
    "prefillChunkTokens": 7,
    "lateRequests": "drop",
    "swapSpaceGib": 7,
    "maxNumSeqs": 7,
    "maxWaiting": 7,
    "realModel": {"dtype": "float16"},
    "httpProcesses": 7,
    "tensorParallel": 2,
    "resources": {"limits": {"cpu": "8"}},
    "drainSeconds": 7,
    "startupDeadlineSeconds": 7,
    "pod": {"schedulerName": "other"},
}
"""Another value for each field of `spec.engine` but the token budget."""
BUDGET: Final[dict[str, Any]] = {"min": 512, "max": 4096, "initial": 1024, "law": "ema"}
ELSEWHERE: Final[dict[str, dict[str, Any]]] = {
    "model.source": {"model": {"source": "emulated://a100-opt-13b"}},
    "model.revision": {"model": {"source": "emulated://unit", "revision": "b"}},
    "control.mode": {"control": {"mode": "Manual"}},
    "control.intervalSeconds": {"control": {"intervalSeconds": 7}},
    "slo.classes": {"slo": {"classes": [{**CLASS, "ttftMs": 700}]}},
    "slo.default": {
        "slo": {"classes": [CLASS, {**CLASS, "name": "b"}], "default": "b"},
    },
    "router.policy": {"router": {"policy": "round-robin"}},
    "replicas": {"replicas": 3},
}
CHANGES: Final[dict[str, dict[str, Any]]] = {
    **{f"engine.{name}": {"engine": {name: value}} for name, value in ENGINE.items()},
    **{
        f"engine.tokenBudget.{name}": {"engine": {"tokenBudget": {name: value}}}
        for name, value in BUDGET.items()
    },
    **ELSEWHERE,
}
FOLLOWED: Final = (
    *(f"engine.tokenBudget.{name}" for name in BUDGET),
    "slo.classes",
    "slo.default",
    "control.mode",
    "control.intervalSeconds",
    "router.policy",
    "replicas",
)
"""Changes that make no new revision: promises, the token budget, and what no engine reads."""


service = partial(llmservice, slo={"classes": [CLASS]})


def revision_of(llmservice: LLMService) -> Revision:
    return engine_revision(OWNER, llmservice.spec, INSTALLATION, number=1)


def mounted(llmservice: LLMService, folder: Path) -> LLMService:
    """The service as an engine's pod reads it."""
    revision = revision_of(llmservice)
    bounds = Bounds.initial(ServiceParams.of(llmservice.spec))
    decided = Setpoint(limits_revision=1, bounds=bounds, replicas=1)
    stored = config_map(OWNER, llmservice.spec, [revision], decided)
    path = folder / "chat.json"
    path.write_text(stored["data"][manifest_key(revision.name)], encoding="utf-8")
    return read_manifest(path)


def starts_with(llmservice: LLMService) -> Configure:
    """Return the configuration of a new engine, without the token budget of the operator."""
    spec = llmservice.spec
    made = configuration(spec.engine, mode=spec.control.mode, device=str(spec.model.source))
    return structs.replace(made, token_budget=0)


def test_every_field_of_the_engine_is_tried() -> None:
    def names(spec: type) -> set[str]:
        return {
            first + "".join(map(str.capitalize, rest))
            for first, *rest in (one.name.split("_") for one in fields(spec))
        }

    # Another runtime reads no manifest.
    assert {*ENGINE, "tokenBudget", "runtime"} == names(EngineSpec)
    assert set(BUDGET) == names(TokenBudgetSpec)


@pytest.mark.parametrize("name", FOLLOWED)
def test_an_engine_that_follows_a_change_is_as_one_that_starts_after_it(
    name: str, tmp_path: Path
) -> None:
    before, after = mounted(service(), tmp_path), mounted(service(**CHANGES[name]), tmp_path)
    found = followed_fields(after)
    running = structs.replace(starts_with(before), **structs.asdict(found.core))
    assert running == starts_with(after)
    assert (found.slo.classes, found.slo.default) == (
        after.spec.slo.by_name(),
        after.spec.slo.default_class,
    )


@pytest.mark.parametrize("name", CHANGES)
def test_what_running_engines_do_not_follow_starts_pods_of_its_own(name: str) -> None:
    same = revision_of(service(**CHANGES[name])).name == revision_of(service()).name
    assert same == (name in FOLLOWED)
