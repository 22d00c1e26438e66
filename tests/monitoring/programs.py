"""Programs that the tests of dashboards and alerts run."""

from __future__ import annotations

import shutil
import subprocess

import pytest

__all__ = ["run_promtool"]


def run_promtool(*words: str) -> str:
    """Run promtool and return its output; skip the test if it is missing.

    Raises:
        AssertionError: promtool failed; the text is its output.
    """
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("NOT RUN: promtool is missing; install it with `apt-get install prometheus`")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output
