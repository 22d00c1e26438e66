"""The commands of `make chat`, in their order: nothing is downloaded before its size is printed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.builders.documented import documented_command
from tools.smollm2 import model_folder

from goodput_core.errors import SpecError
from goodput_core.spec.manifest import parse_manifest
from goodput_core.spec.support import require_servable

ROOT = Path(__file__).resolve().parents[2]
SERVICE = "examples/smollm2.yaml"
PLAN = "-m tools.smollm2 --plan"


def test_make_chat_prints_size_and_time_downloads_and_talks_to_the_example(tmp_path: Path) -> None:
    commands = tmp_path / "venv" / "bin"
    commands.mkdir(parents=True)
    for name in ("python", "pip"):
        # Each command prints its arguments; only the plan, which downloads nothing, also runs.
        script = (
            f'#!/bin/sh\necho "{name} $*"\n[ "$*" != "{PLAN}" ] || exec {sys.executable} "$@"\n'
        )
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    ended = subprocess.run(
        ["make", "--no-print-directory", f"VENV={tmp_path}/venv", f"CACHE={tmp_path}", "chat"],
        cwd=ROOT,
        # The flags of a `make test` that runs this test.
        env={**os.environ, "HOME": str(tmp_path), "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    first, plan, *others = [
        line for line in ended.stdout.splitlines() if not line.startswith(str(tmp_path))
    ]
    assert first == f"python {PLAN}"
    assert plan.startswith("This first downloads ")
    assert "torch and transformers (5 GB)" in plan
    assert "SmolLM2-135M-Instruct (0.6 GB)" in plan
    assert plan.endswith(" minutes on an idle machine.")
    installed, torch, model, *_, chat = others
    assert installed.startswith("pip install ")
    assert torch == f"python -m tools.torch_packages {tmp_path}/venv"
    assert model == "python -m tools.smollm2"
    # tests/chat/test_chat.py runs this module, and test_real_service.py serves this manifest.
    assert chat == f"python -m tools.chat {SERVICE}"


def test_the_documented_command_runs_all_tests_on_a_gpu_from_a_fresh_clone(tmp_path: Path) -> None:
    lines = (ROOT / "docs" / "engine.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("$ make ") and "pytest" in line]
    make, tests = line.removeprefix("$ ").split(" && ")
    planned = subprocess.run(
        [*make.split(), "-n", "--no-print-directory", f"VENV={tmp_path}/venv"],
        cwd=ROOT,
        env={**os.environ, "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    packages, torch = planned.index(",dev]'"), planned.index("tools.torch_packages")
    assert packages < torch
    command, *options = tests.split()
    assert command == ".venv/bin/pytest"
    files = {ROOT / option for option in options if option.startswith("tests/")}
    marked = {
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and "pytest.mark.gpu" in path.read_text()
    }
    assert marked
    assert marked <= files
    assert all(path.is_file() for path in files)


def test_the_example_serves_the_downloaded_model_with_the_policy_slo() -> None:
    spec = yaml.safe_load((ROOT / SERVICE).read_text())["spec"]
    assert spec["engine"]["policy"] == "slo"
    source = spec["model"]["source"].removeprefix("file://")
    assert Path(source).expanduser() == model_folder()


def test_the_documented_command_makes_the_example_one_for_a_cluster() -> None:
    command = documented_command("engine.md", "sed 's#file")
    pipe = command.index("|")
    assert command[pipe:] == ["|", "kubectl", "apply", "-f", "-"]
    example = (ROOT / SERVICE).read_text(encoding="utf-8")
    changed = subprocess.run(
        command[:pipe], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    local, remote = (parse_manifest(one, source=SERVICE, yaml=yaml) for one in (example, changed))
    with pytest.raises(SpecError):
        require_servable(local)
    require_servable(remote)
    folder = Path(local.spec.model.source).name
    assert remote.spec.model.source == f"pvc://weights/{folder}"
    assert replace(remote.spec, model=local.spec.model) == local.spec
