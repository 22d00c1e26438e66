"""The manifest's reference page has the bounds of the decoder."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "docs" / "generate_manifest_reference.py"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_manifest_reference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.golden
def test_the_page_is_generated_from_the_dataclasses(request: pytest.FixtureRequest) -> None:
    module = generator()
    if request.config.getoption("--rewrite-golden"):
        module.PAGE.write_text(module.page(), encoding="utf-8")
    made, written = module.page(), module.PAGE.read_text(encoding="utf-8")
    assert made == written, "rewrite it with `make golden`"


@pytest.mark.parametrize(
    "row",
    [
        "| `ttftMs` | integer | **required** | 1 to 86,400,000 | Target of the time to first token",
        "| `name` | text | **required** | at most 40 characters; must start with a letter",
        "| `limits` | map of quantities | empty | at most 16 entries",
        "## `spec.slo.classes[]`",
        "## `spec.rollout.gate.window`",
        "`sarathi`",
    ],
)
def test_the_page_names_every_kind_of_bound(row: str) -> None:
    assert row in generator().page()
