"""Conventions of modules and packages, and the dependencies of each component."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
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


EXTRAS = {
    "core": ["completion"],
    "traces": ["replay"],
    "engine": ["engine", "torch"],
    "replay": ["replay"],
}
PART_OF = {"multidict": "aiohttp", "yarl": "aiohttp", "markupsafe": "jinja2"}


def imported(path: Path) -> set[str]:
    """Return the top-level names of the third-party modules that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found |= {name.partition(".")[0] for name in names}
    ours = {f"goodput_{folder}" for folder in FOLDERS} | {"_typeshed"}
    return found - sys.stdlib_module_names - ours


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_imports_of_a_component_are_declared_and_not_only_transitive(folder: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = EXTRAS.get(folder, [folder])
    lines = [line for extra in extras for line in project["optional-dependencies"][extra]]
    declared = {re.split(r"[^A-Za-z0-9._-]", line)[0].lower() for line in lines}
    homes = packages_distributions()
    used = {
        name for path in SOURCES if path.is_relative_to(ROOT / folder) for name in imported(path)
    }
    needed = {PART_OF.get(name, homes.get(name, [name])[0]) for name in used}
    assert {name.lower().replace("_", "-") for name in needed} - declared == set()


def test_every_pinned_version_is_exact_and_torch_is_at_its_chosen_one() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.match(r"^[A-Za-z0-9._-]+==[^*]+$", pin)] == []
    assert "torch==2.13.0" in pins
