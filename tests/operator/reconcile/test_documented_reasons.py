"""docs/conditions.md against the code: every word that a service may say stands there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from goodput_core.slo.verdict import Reason as VerdictReason

ROOT = Path(__file__).resolve().parents[3]
OPERATOR = ROOT / "operator" / "goodput_operator"
PAGE = (ROOT / "docs" / "conditions.md").read_text(encoding="utf-8")
SPEAKING = ("reconcile/status", "reconcile/attainment", "reconcile/events")
KINDS = {"Pod", "Event", "Service"}

OPEN_WINDOW = (
    VerdictReason.TOO_FEW_REQUESTS,
    VerdictReason.TOO_FEW_BLOCKS,
    VerdictReason.INTERVAL_SPANS_OBJECTIVE,
    VerdictReason.NO_ROWS,
)


def constants(tree: ast.AST) -> set[str]:
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    words = {text for text in texts if isinstance(text, str)}
    return {word for word in words if re.fullmatch(r"([A-Z][a-z]+|SLO)+", word)} - KINDS


def parsed(module: str) -> ast.Module:
    return ast.parse((OPERATOR / f"{module}.py").read_text(encoding="utf-8"))


def reasons() -> set[str]:
    """Every CamelCase constant of the modules that speak, and what a keyword `reason` is given."""
    said = set()
    for module in SPEAKING:
        body = parsed(module).body
        names = {one.name for one in body if isinstance(one, ast.ClassDef)}
        said |= {word for node in body for word in constants(node)} - names
    said |= {reason.value for reason in OPEN_WINDOW}
    (kinds,) = [
        node
        for node in parsed("reconcile/problems").body
        if isinstance(node, ast.ClassDef) and node.name == "ProblemReason"
    ]
    said |= constants(kinds)
    for node in ast.walk(parsed("reconcile/apply")):
        if isinstance(node, ast.keyword) and node.arg == "reason":
            said |= constants(node.value)
    return said


@pytest.mark.parametrize("word", sorted(reasons()))
def test_a_word_that_a_service_may_say_is_explained(word: str) -> None:
    assert f"`{word}`" in PAGE


def test_no_word_is_explained_that_is_never_said() -> None:
    told = set(re.findall(r"`([A-Z]+[a-z][A-Za-z]*)`", PAGE))
    assert told - reasons() == set()
