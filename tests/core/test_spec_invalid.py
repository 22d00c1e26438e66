"""The table of invalid manifests: each is rejected at the field to correct."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.invalid_manifests import BASE, CASES, changed

from goodput_core.errors import ExitCode, SpecError
from goodput_core.spec.llmservice import LLMService


def test_the_base_of_the_table_is_valid() -> None:
    assert LLMService.from_dict(BASE).metadata.name == "chat"


def test_the_table_holds_at_least_sixty_cases_of_different_names() -> None:
    assert len({case["name"] for case in CASES}) == len(CASES) >= 60


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_an_invalid_manifest_is_rejected_at_its_field(case: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        LLMService.from_dict(changed(case))
    error = caught.value
    assert error.path == case["path"]
    for word in case["words"]:
        assert word in error.problem
    assert "\n" not in str(error)
    assert error.exit_code is ExitCode.USAGE
