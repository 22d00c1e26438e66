"""Fixtures that render the chart with Helm; without Helm, tests are skipped with the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tools.cluster import binaries

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/goodput"


@pytest.fixture(scope="session")
def helm() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs Helm."""
    binary = str(binaries.folder() / "helm") if binaries.is_built() else shutil.which("helm")
    if binary is None:
        message = "Helm is missing: `make e2e` builds it"
        if os.environ.get("GOODPUT_REQUIRE_CLUSTER"):
            pytest.fail(message)
        pytest.skip(message)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [binary, *arguments], capture_output=True, text=True, check=False, timeout=60
        )

    return run


@pytest.fixture(scope="session")
def render(
    helm: Callable[..., subprocess.CompletedProcess[str]],
) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that renders the chart and returns its objects in order."""

    def run(*arguments: str) -> list[dict[str, Any]]:
        done = helm("template", "goodput", str(CHART), "--namespace", "goodput-system", *arguments)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return run
