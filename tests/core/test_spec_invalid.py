"""The table of invalid manifests: each is refused at the field that must change."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from goodput_core.errors import ExitCode, SpecError
from goodput_core.spec.llmservice import LLMService

TABLE = yaml.safe_load(
    Path(__file__).with_name("invalid_manifests.yaml").read_text(encoding="utf-8")
)
CASES = TABLE["cases"]


def steps(path: str) -> list[str | int]:
    return [int(step) if step.isdigit() else step for step in re.findall(r"[^.\[\]]+", path)]


def changed(case: dict[str, Any]) -> Any:
    manifest = copy.deepcopy(TABLE["base"])
    for path in case.get("remove", []):
        *way, last = steps(path)
        del at(manifest, way)[last]
    for path, value in case.get("set", {}).items():
        *way, last = steps(path)
        at(manifest, way)[last] = value
    return manifest


def at(value: Any, way: list[str | int]) -> Any:
    for step in way:
        value = value[step]
    return value


def test_the_base_of_the_table_is_valid() -> None:
    assert LLMService.from_dict(TABLE["base"]).metadata.name == "chat"


def test_the_table_holds_at_least_sixty_cases_of_different_names() -> None:
    assert len({case["name"] for case in CASES}) == len(CASES) >= 60


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_an_invalid_manifest_is_refused_at_its_field(case: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        LLMService.from_dict(changed(case))
    error = caught.value
    assert error.path == case["path"]
    for word in case["words"]:
        assert word in error.problem
    assert "\n" not in str(error)
    assert error.exit_code is ExitCode.USAGE
