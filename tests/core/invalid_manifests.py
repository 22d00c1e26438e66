"""The table of invalid manifests, as every validator's tests read it."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml

__all__ = ["BASE", "CASES", "changed"]

_TABLE = yaml.safe_load(
    Path(__file__).with_name("invalid_manifests.yaml").read_text(encoding="utf-8")
)
BASE: dict[str, Any] = _TABLE["base"]
CASES: list[dict[str, Any]] = _TABLE["cases"]


def changed(case: dict[str, Any]) -> Any:
    """The valid manifest with one case's changes."""
    manifest = copy.deepcopy(BASE)
    for path in case.get("remove", []):
        *way, last = _steps(path)
        del _at(manifest, way)[last]
    for path, value in case.get("set", {}).items():
        *way, last = _steps(path)
        _at(manifest, way)[last] = value
    return manifest


def _steps(path: str) -> list[str | int]:
    return [int(step) if step.isdigit() else step for step in re.findall(r"[^.\[\]]+", path)]


def _at(value: Any, way: list[str | int]) -> Any:
    for step in way:
        value = value[step]
    return value
