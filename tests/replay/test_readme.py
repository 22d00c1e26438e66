"""The first screen of the README shows the output of its commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BLOCK = re.compile(
    r"```console\n(\$ (?:goodput trace synthesize|replay --trace load\.parquet) .*?)```", re.DOTALL
)


def run(line: str, folder: Path) -> str:
    """Run a command of the README; its verdict is its exit code."""
    program, *arguments = shlex.split(line)
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *arguments],
        cwd=folder,
        env=os.environ | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode in {0, 1}, done.stderr
    return done.stdout


def excerpt(printed: str) -> str:
    """Return the table of the classes and the verdict of a replay."""
    lines = [line.rstrip() for line in printed.splitlines()]
    first = next(i for i, line in enumerate(lines) if re.match(r" class +attained", line))
    table = lines[first : lines.index("", first)]
    start = next(i for i, line in enumerate(lines) if line.startswith(("PASS", "FAIL")))
    end = next(i for i, line in enumerate(lines) if line.startswith("report:"))
    return "\n".join([*table, "…", *lines[start:end]])


def rerun(block: str, folder: Path) -> str:
    """Return a console block with the output that its commands give now."""
    made = ""
    for line in re.findall(r"^\$ (.*)$", block, flags=re.MULTILINE):
        printed = run(line, folder)
        made += f"$ {line}\n"
        if line.startswith("replay"):
            made += f"{excerpt(printed)}\n"
    return made


@pytest.mark.golden
def test_the_readme_shows_a_pass_and_a_fail_as_printed(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    text = README.read_text(encoding="utf-8")
    shown = [block[1] for block in BLOCK.finditer(text)]
    made = [rerun(block, tmp_path) for block in shown]
    assert any("\nPASS (" in block for block in made)
    assert any("\nFAIL (" in block for block in made)
    if request.config.getoption("--rewrite-golden"):
        for old, new in zip(shown, made, strict=True):
            text = text.replace(old, new)
        README.write_text(text, encoding="utf-8")
    assert shown == made or request.config.getoption("--rewrite-golden")
