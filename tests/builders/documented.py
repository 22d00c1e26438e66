"""Configurations and commands as docs print them, so that tests use the text of the page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

__all__ = ["documented_command", "documented_yaml"]

_DOCS = Path(__file__).resolve().parents[2] / "docs"


def _blocks(page: str, language: str) -> list[str]:
    text = (_DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def documented_yaml(page: str, field: str) -> dict[str, Any]:
    """Return the only YAML document of a page that begins with a field, such as `kind: Ingress`."""
    texts = [text for text in _blocks(page, "yaml") if re.search(f"^{field}", text, re.MULTILINE)]
    (found,) = map(yaml.safe_load, texts)
    assert isinstance(found, dict)
    return found


def documented_command(page: str, start: str) -> list[str]:
    """Return the words of the only command of a page that begins with these words."""
    lines = [
        line.removeprefix("$ ")
        for text in _blocks(page, "console")
        for line in text.splitlines()
        if line.startswith(f"$ {start}")
    ]
    (found,) = lines
    return shlex.split(found)
