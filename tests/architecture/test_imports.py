"""Components import each other in one direction, and the import contracts can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "core": "goodput_core",
    "traces": "goodput_traces",
    "engine": "goodput_engine",
    "replay": "goodput_replay",
    "operator": "goodput_operator",
}
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    roots = ":".join(str(root / folder) for folder in PACKAGES)
    return subprocess.run(
        [LINT_IMPORTS, "--no-cache", "--config", root / "pyproject.toml"],
        cwd=root,
        env={"PYTHONPATH": roots, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the five packages and the contracts, to which a test may add an import."""
    root = tmp_path_factory.mktemp("tree")
    for folder in PACKAGES:
        shutil.copytree(
            ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "*.parquet")
        )
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def test_every_contract_is_kept() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("package", "module", "planted"),
    [
        pytest.param("core", "goodput_core/planted.py", "import numpy", id="numpy in core"),
        pytest.param("core", "goodput_core/planted.py", "import aiohttp", id="aiohttp in core"),
        pytest.param("core", "goodput_core/planted.py", "import kopf", id="kopf in core"),
        pytest.param("core", "goodput_core/planted.py", "import torch", id="torch in core"),
        pytest.param(
            "core", "goodput_core/planted.py", "import goodput_engine", id="engine in core"
        ),
        pytest.param(
            "core",
            "goodput_core/slo/planted.py",
            "import goodput_core.spec.codec",
            id="spec in slo",
        ),
        pytest.param(
            "traces", "goodput_traces/planted.py", "import goodput_replay", id="replay in traces"
        ),
        pytest.param(
            "engine", "goodput_engine/planted.py", "import goodput_traces", id="traces in engine"
        ),
        pytest.param(
            "engine",
            "goodput_engine/scheduler/planted.py",
            "import torch",
            id="torch in the scheduler",
        ),
        pytest.param(
            "engine",
            "goodput_engine/executor/torch/planted.py",
            "from goodput_engine.scheduler.policies.slo import demand",
            id="a policy in the executor",
        ),
        pytest.param(
            "engine",
            "goodput_engine/executor/planted.py",
            "import goodput_engine.scheduler.admission",
            id="admission in the executor",
        ),
        pytest.param(
            "engine",
            "goodput_engine/executor/torch/planted.py",
            "import goodput_engine.scheduler.preemption",
            id="preemption in the executor",
        ),
        pytest.param(
            "operator",
            "goodput_operator/planted.py",
            "import goodput_engine",
            id="engine in operator",
        ),
        pytest.param(
            "operator",
            "goodput_operator/control/planted.py",
            "import goodput_operator.reconcile.snapshot",
            id="reconcile in the control laws",
        ),
        pytest.param("replay", "goodput_replay/planted.py", "import torch", id="torch in replay"),
        pytest.param(
            "replay",
            "goodput_replay/runs/planted.py",
            "def late():\n    from goodput_replay.report import page",
            id="the report in run, hidden in a function",
        ),
        pytest.param(
            "replay",
            "goodput_replay/planted.py",
            "def late():\n    from goodput_operator import local",
            id="operator in replay, hidden in a function",
        ),
    ],
)
def test_a_planted_forbidden_import_is_found(
    copied: Path, package: str, module: str, planted: str
) -> None:
    path = copied / package / module
    path.write_text(planted + "\n", encoding="utf-8")
    try:
        result = lint(copied)
    finally:
        path.unlink()
    assert result.returncode == 1, result.stdout + result.stderr
    assert "planted" in result.stdout


def test_import_operator_gives_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    result = subprocess.run(
        [sys.executable, "-c", "import operator; print(operator.__file__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(ROOT) not in result.stdout


def test_core_runs_on_the_standard_library_alone() -> None:
    code = (
        "import sys, pkgutil, importlib\n"
        f"sys.path.insert(0, {str(ROOT / 'core')!r})\n"
        "import goodput_core\n"
        "for m in pkgutil.walk_packages(goodput_core.__path__, 'goodput_core.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "print(sorted(n for n in sys.modules if 'site-packages' in "
        "str(getattr(sys.modules[n], '__file__', ''))))\n"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.parametrize(
    ("command", "foreign"),
    [
        ("trace", ("goodput_engine", "goodput_replay", "goodput_operator", "aiohttp")),
        ("engine", ("goodput_traces", "goodput_replay", "goodput_operator", "pyarrow")),
        ("router", ("goodput_traces", "goodput_replay", "goodput_operator", "pyarrow")),
        ("up", ("goodput_traces", "goodput_replay", "goodput_engine", "pyarrow", "kopf")),
        ("operator", ("goodput_traces", "goodput_replay", "goodput_engine", "pyarrow", "rich")),
        ("replay", ("goodput_operator", "matplotlib", "torch")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_command_loads_only_its_own_component(command: str, foreign: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        "from goodput_core.dispatch import run_command\n"
        "try:\n"
        f"    run_command([{command!r}, '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print([name for name in {foreign!r} if name in sys.modules], file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.stderr.strip() == "[]", result.stderr
