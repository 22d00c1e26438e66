"""LLMServices from the files in `manifests/`, with changes by path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from goodput_core.spec.llmservice import LLMService

__all__ = ["EXAMPLES", "llmservice", "manifest", "manifest_path", "manifest_text", "write_manifest"]

EXAMPLES = Path(__file__).parents[2] / "examples"
_FOLDER = Path(__file__).with_name("manifest_files")


def manifest_path(name: str = "least") -> Path:
    """Return the file of a manifest, in `manifests/` or else in the project's examples."""
    path = _FOLDER / f"{name}.yaml"
    return path if path.is_file() else EXAMPLES / f"{name}.yaml"


def manifest(name: str = "least", /, **changes: Any) -> dict[str, Any]:
    """Return a manifest as a dict.

    Args:
        name: the file's name without its suffix.
        changes: fields of the spec; a double underscore separates the parts of a path, as in
            `engine__policy="orca"`. None removes the field.
    """
    service: dict[str, Any] = yaml.safe_load(manifest_path(name).read_text(encoding="utf-8"))
    for path, value in changes.items():
        *sections, field = path.split("__")
        section = service["spec"]
        for part in sections:
            section = section.setdefault(part, {})
        if value is None:
            section.pop(field, None)
        else:
            section[field] = value
    return service


def manifest_text(name: str = "least", /, **changes: Any) -> str:
    """Return a manifest as YAML."""
    return yaml.safe_dump(manifest(name, **changes))


def write_manifest(folder: Path, name: str = "least", /, **changes: Any) -> Path:
    """Write a manifest to `chat.yaml` in a folder."""
    path = folder / "chat.yaml"
    path.write_text(manifest_text(name, **changes), encoding="utf-8")
    return path


def llmservice(name: str = "least", /, **changes: Any) -> LLMService:
    """Return a validated manifest."""
    return LLMService.from_dict(manifest(name, **changes))
