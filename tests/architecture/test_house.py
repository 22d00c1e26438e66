"""Conventions of modules, packages and class names; benchmarks have no import cycles."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core", "traces", "engine", "replay", "operator")
SOURCES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "shared"}
MAX_LINES = 500


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_has_a_docstring_and_stays_small(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source)), "a module's docstring says why it exists"
    assert len(source.splitlines()) <= MAX_LINES, "split by responsibility"
    assert path.stem not in VAGUE, "name the one job it does"


EXPORTING = [p for p in SOURCES if "\n__all__ = " in p.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", EXPORTING, ids=name_of)
def test_every_exported_name_exists(path: Path) -> None:
    module = importlib.import_module(module_of(path))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert len(module.__all__) == len(set(module.__all__)), "each once"


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_package_ships_its_types(folder: str) -> None:
    assert (ROOT / folder / f"goodput_{folder}" / "py.typed").is_file()


def public_classes() -> dict[str, list[str]]:
    """Return the modules that define each public class name."""
    found = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name_of(path))
    return found


def test_a_public_class_name_is_used_once() -> None:
    assert {name: where for name, where in public_classes().items() if len(where) > 1} == {}


def test_the_classes_of_the_product_are_found() -> None:
    assert {"LLMService", "Placement", "EngineState"} <= set(public_classes())


def test_no_benchmark_imports_another_in_a_cycle() -> None:
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
