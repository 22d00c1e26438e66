"""The packages that a component imports are declared, and errors name an extra that suffices."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path

import pytest

from goodput_core.contract import DISTRIBUTION
from goodput_core.dispatch import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# A package that is part of another package's API and is installed with it.
PART_OF = {"multidict": "aiohttp", "yarl": "aiohttp", "markupsafe": "jinja2"}
# Extras that only an option of a command needs; the option checks it and names the extra.
OPTIONAL = {"policies": "plot", "replay": "tokenizer"}
# Commands that a command starts as child processes.
STARTS = {"up": ("engine", "router")}


def declared(extra: str) -> set[str]:
    """Return the distributions that an extra declares, including those of nested extras."""
    found = set()
    for line in EXTRAS[extra] if extra else ():
        if inner := re.fullmatch(rf"{DISTRIBUTION}\[(.+)\]", line):
            found |= {name for one in inner[1].split(",") for name in declared(one)}
        else:
            found.add(re.split(r"[^A-Za-z0-9._-]", line)[0].lower())
    return found


def imported(tree: ast.AST) -> set[str]:
    """Return the modules that a module imports when it runs, including those in functions."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                for other in node.orelse:
                    found |= imported(other)
            case ast.Import(names=names):
                found |= {one.name for one in names}
            case ast.ImportFrom(module=str(module), names=names):
                # A name may be a module of a package.
                found |= {module, *(f"{module}.{one.name}" for one in names)}
            case _:
                found |= imported(node)
    return found


@cache
def imported_by(path: Path) -> frozenset[str]:
    """Return the modules that the module of a file imports when it runs."""
    return frozenset(imported(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def homes() -> dict[str, list[str]]:
    """Return the installed distributions by the top-level modules that they provide."""
    return dict(packages_distributions())


def third_parties(module: str) -> set[str]:
    """Return the third-party modules that a module imports, directly or through our modules."""
    found, seen, left = set(), set(), [module]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        if not name.startswith("goodput_"):
            found.add(name.partition(".")[0])
            continue
        parent = name.rpartition(".")[0]
        if parent:
            left.append(parent)
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue  # a name within a module
        if spec is None or spec.origin is None:
            continue
        left += imported_by(Path(spec.origin))
    return found - sys.stdlib_module_names - {"_typeshed"}


def needed(command: str) -> set[str]:
    """Return the distributions that a command and its child processes import."""
    (entry,) = entry_points(group="goodput.commands", name=command)
    names = third_parties(entry.module)
    for child in STARTS.get(command, ()):
        names |= needed(child)
    return distributions(names)


def distributions(names: set[str]) -> set[str]:
    """Return the distributions that provide these top-level modules."""
    return {
        PART_OF.get(name, homes().get(name, [name])[0]).lower().replace("_", "-") for name in names
    }


def test_imports_are_followed_into_functions_and_not_into_type_checking() -> None:
    tree = ast.parse("import a\nif TYPE_CHECKING:\n    import b\ndef f():\n    from c.d import e\n")
    assert imported(tree) == {"a", "c.d", "c.d.e"}


def test_the_engine_needs_uvloop_and_the_operator_kopf() -> None:
    assert "uvloop" in needed("engine")
    assert "kopf" in needed("operator")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_hinted_extra_installs_what_the_command_imports(command: str) -> None:
    installed = declared(COMMANDS[command].extra) | declared(OPTIONAL.get(command, ""))
    assert needed(command) - installed == set()


CHAT = str(ROOT / "examples" / "chat.yaml")
# A command may parse its arguments before it imports third parties.
ARGUMENTS = {
    "wait": ["trp/night"],
    "kubectl": ["status"],
    "up": ["-f", CHAT],
    "operator": [],
    "replay": ["--trace", "sample", "--emulate", CHAT, "--dry-run"],
    "trace": ["describe", "sample"],
    "policies": ["--trace", "sample", "-f", CHAT],
    "engine": ["-f", CHAT],
    "router": ["-f", CHAT, "--upstream", "r0=http://127.0.0.1:1"],
    "device": ["list"],
    "completion": ["bash"],
}


@pytest.mark.parametrize("command", [name for name, one in COMMANDS.items() if one.extra])
def test_a_command_without_its_extra_names_it(command: str) -> None:
    blocked = sorted(
        third_parties(entry_points(group="goodput.commands", name=command)[command].module)
    )
    code = (
        "import sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        "from goodput_core.dispatch import run_command\n"
        f"sys.exit(run_command({[command, *ARGUMENTS[command]]!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (64, ""), done.stderr
    assert f"pip install '.[{COMMANDS[command].extra}]'" in done.stderr


COMPONENTS = ("core", "traces", "engine", "replay", "operator")
# Extras of a component; by default, the extra with the component's name.
EXTRAS_OF = {
    "core": ["completion"],
    "traces": ["replay"],
    "engine": ["engine", "torch", "gpu"],
    "replay": ["replay", "plot", "tokenizer"],
}


def imported_names(path: Path) -> set[str]:
    """Return the top-level names of the third-party modules that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found |= {name.partition(".")[0] for name in names}
    ours = {f"goodput_{folder}" for folder in COMPONENTS} | {"_typeshed"}
    return found - sys.stdlib_module_names - ours


@pytest.mark.parametrize("folder", COMPONENTS)
def test_the_imports_of_a_component_are_declared_and_not_only_transitive(folder: str) -> None:
    declared_names = {name for one in EXTRAS_OF.get(folder, [folder]) for name in declared(one)}
    used = {name for path in (ROOT / folder).rglob("*.py") for name in imported_names(path)}
    assert distributions(used) - declared_names == set()


def test_every_pinned_version_is_exact_and_torch_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.match(r"^[A-Za-z0-9._-]+==[^*]+$", pin)] == []
    assert "torch==2.13.0" in pins
