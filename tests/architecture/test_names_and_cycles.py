"""One class name means one thing in the product; benchmarks do not import each other in circles."""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("core", "traces", "engine", "replay", "operator")
# Names of several classes that are still to be renamed; may only shrink.
KNOWN_DUPLICATES = {"Chunk"}


def public_classes() -> dict[str, list[str]]:
    """Return the modules that define each public class name."""
    found = defaultdict(list)
    for folder in PRODUCT:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_a_public_class_name_is_used_once() -> None:
    duplicates = {
        name: where
        for name, where in public_classes().items()
        if len(where) > 1 and name not in KNOWN_DUPLICATES
    }
    assert duplicates == {}


def test_the_classes_of_the_product_are_found() -> None:
    assert {"LLMService", "Placement", "EngineState"} <= set(public_classes())


def test_no_benchmark_imports_another_in_a_circle() -> None:
    graph = {}
    for path in (ROOT / "benchmarks").glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        graph[path.stem] = {
            module.removeprefix("benchmarks.")
            for module in modules
            if module.startswith("benchmarks.")
        }
    assert any(graph.values())
    # Raises CycleError, which names the modules.
    assert set(TopologicalSorter(graph).static_order()) >= set(graph)
