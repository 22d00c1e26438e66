"""The permissions that docs/operator.md documents."""

from __future__ import annotations

from pathlib import Path

__all__ = ["documented_rights"]

_PAGE = Path(__file__).resolve().parents[2] / "docs/operator.md"


def documented_rights() -> dict[str, set[str]]:
    """Return the verbs of each resource in the table."""
    page = _PAGE.read_text(encoding="utf-8")
    table = page.partition("| resources | verbs | why |\n")[2].partition("\n\n")[0]
    rights: dict[str, set[str]] = {}
    for line in table.splitlines()[1:]:
        resources, verbs = line.strip("|").split("|")[:2]
        for resource in resources.replace("`", "").split(","):
            rights[resource.strip()] = {verb.strip() for verb in verbs.split(",")}
    return rights
