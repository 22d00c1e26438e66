"""Conventions of modules, packages and class names; benchmarks have no import cycles."""

from __future__ import annotations

import ast
import importlib
import re
import tokenize
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benchmarks.__main__ import short_forms

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core", "traces", "engine", "replay", "operator")
SOURCES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
# Benchmarks are left out: each is a program of its own.
NAMED = [
    *SOURCES,
    *(p for folder in ("tests", "tools") for p in sorted((ROOT / folder).rglob("*.py"))),
]
BENCHMARKS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
}
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


# Only this package and this module import packages of the extra `torch` when they are imported.
ENGINE = ROOT / "engine" / "goodput_engine"
NEEDS_TORCH = {ENGINE / "executor" / "torch", ENGINE / "grammars.py"}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, marks=() if NEEDS_TORCH.isdisjoint([path, *path.parents]) else pytest.mark.torch
        )
        for path in EXPORTING
    ],
    ids=name_of,
)
def test_every_exported_name_exists(path: Path) -> None:
    module = importlib.import_module(module_of(path))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert len(module.__all__) == len(set(module.__all__)), "each once"


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_package_ships_its_types(folder: str) -> None:
    assert (ROOT / folder / f"goodput_{folder}" / "py.typed").is_file()


def test_a_process_in_a_session_of_its_own_gets_the_priority_of_its_starter() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    sessions = {name_of(path) for path, text in texts.items() if "start_new_session=True" in text}
    shared = {name_of(path) for path, text in texts.items() if "share_session_priority(" in text}
    assert len(sessions) >= 6
    assert sessions <= shared


def class_names(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Return the places that define each class name, without leading underscores."""
    found = defaultdict(list)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(f"{name_of(path)}:{node.lineno}")
    return found


def test_a_class_name_is_used_once() -> None:
    found = class_names(NAMED)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}
    # Public, private, nested in a function, of tests, of tools.
    assert {"LLMService", "KeyState", "Response", "SteppedCore", "ChartRelease"} <= found.keys()


def test_only_the_plan_names_token_ids_in_the_scheduler() -> None:
    naming = {
        path.name
        for folder in ("scheduler", "kv")
        for path in (ENGINE / folder).rglob("*.py")
        if any(re.search("token_?ids?$|logprob", name, re.IGNORECASE) for name in names_in(path))
    }
    assert naming == {"plan.py"}


def names_in(path: Path) -> set[str]:
    """Return the names in the code of a module, without its comments and texts."""
    with path.open("rb") as file:
        return {one.string for one in tokenize.tokenize(file.readline) if one.type == tokenize.NAME}


def test_decision_records_are_numbered_without_gaps() -> None:
    records = sorted((ROOT / "docs" / "adr").glob("*.md"))
    assert [path.name[:5] for path in records] == [
        f"{number:04d}-" for number in range(1, len(records) + 1)
    ]
    for path in records:
        assert path.read_text(encoding="utf-8").startswith(f"# {int(path.name[:4])}. ")


def benchmarks_imported_by(source: str) -> set[str]:
    """Return the benchmark modules that a source imports."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                found += (module, *(f"{module}.{name.name}" for name in names))
            case ast.Import(names=names):
                found += (name.name for name in names)
    return {name for name in found if name in BENCHMARKS}


@pytest.mark.parametrize(
    "source",
    [
        "from benchmarks.comparison.loads import offered",
        "from benchmarks.comparison import loads",
        "import benchmarks.comparison.loads",
    ],
)
def test_an_import_of_a_benchmark_is_found(source: str) -> None:
    found = benchmarks_imported_by(f"import json\nfrom pathlib import Path\n{source}\n")
    assert found == {"benchmarks.comparison.loads"}


def test_no_benchmark_imports_another_in_a_cycle() -> None:
    graph = {
        name: benchmarks_imported_by(path.read_text(encoding="utf-8"))
        for name, path in BENCHMARKS.items()
    }
    assert any(graph.values())
    # Raises CycleError, which names the modules.
    assert set(TopologicalSorter(graph).static_order()) >= set(graph)


@pytest.mark.parametrize("name", short_forms())
def test_make_bench_runs_only_commands_with_a_short_form(name: str) -> None:
    source = BENCHMARKS[f"benchmarks.{name}"].read_text(encoding="utf-8")
    assert 'if __name__ == "__main__":' in source, "a part of a benchmark belongs in a folder"
    assert '"--quick"' in source
