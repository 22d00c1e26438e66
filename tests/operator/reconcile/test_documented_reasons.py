"""docs/conditions.md lists every reason in the code, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from goodput_core.slo.verdict import Reason as VerdictReason

ROOT = Path(__file__).resolve().parents[3]
OPERATOR = ROOT / "operator" / "goodput_operator"
PAGE = (ROOT / "docs" / "conditions.md").read_text(encoding="utf-8")
MODULES = (
    "reconcile/status",
    "reconcile/attainment",
    "reconcile/events",
    "reconcile/gate_plan",
    "reconcile/images",
)
KINDS = {"Pod", "Event", "Service"}

OPEN_WINDOW = (
    VerdictReason.TOO_FEW_REQUESTS,
    VerdictReason.TOO_FEW_BLOCKS,
    VerdictReason.INTERVAL_SPANS_OBJECTIVE,
    VerdictReason.NO_ROWS,
)


def camel_case_constants(tree: ast.AST) -> set[str]:
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    names = {text for text in texts if isinstance(text, str)}
    return {name for name in names if re.fullmatch(r"([A-Z][a-z]+|SLO)+", name)} - KINDS


def parse_module(module: str) -> ast.Module:
    return ast.parse((OPERATOR / f"{module}.py").read_text(encoding="utf-8"))


def reasons() -> set[str]:
    """Return the CamelCase constants of the modules with reasons, and values of `reason=`."""
    found = set()
    for module in MODULES:
        body = parse_module(module).body
        classes = {one.name for one in body if isinstance(one, ast.ClassDef)}
        found |= {name for node in body for name in camel_case_constants(node)} - classes
    found |= {reason.value for reason in OPEN_WINDOW}
    (kinds,) = [
        node
        for node in parse_module("reconcile/problems").body
        if isinstance(node, ast.ClassDef) and node.name == "ProblemReason"
    ]
    found |= camel_case_constants(kinds)
    for node in ast.walk(parse_module("reconcile/apply")):
        if isinstance(node, ast.keyword) and node.arg == "reason":
            found |= camel_case_constants(node.value)
    return found


@pytest.mark.parametrize("name", sorted(reasons()))
def test_every_reason_in_the_code_is_documented(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_every_documented_reason_is_in_the_code() -> None:
    documented = set(re.findall(r"`([A-Z]+[a-z][A-Za-z]*)`", PAGE))
    assert documented - reasons() == set()
