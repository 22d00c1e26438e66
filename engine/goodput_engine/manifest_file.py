"""Read manifest files for `goodput engine`, `goodput router` and `replay`.

This is the only module of the package that opens manifests; `goodput_core` defines their fields.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import yaml

from goodput_core.spec.manifest import parse_document, parse_manifest, read_manifest_text

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_core.spec.choices import RouterPolicy
    from goodput_core.spec.llmservice import LLMService

__all__ = ["read_document", "read_manifest"]


def read_manifest(path: Path, *, placement: RouterPolicy | None = None) -> LLMService:
    """Return the single `LLMService` of a file, if this version can run it.

    Args:
        path: a YAML or JSON file.
        placement: overrides `spec.router.policy`; None to keep it.

    Raises:
        InputError: the file cannot be read, is too large, or is not YAML.
        SpecError: a field is invalid; the error has the file and the field's path.
    """
    service = parse_manifest(read_manifest_text(path), source=str(path), yaml=yaml)
    if placement is not None:
        router = replace(service.spec.router, policy=placement)
        service = replace(service, spec=replace(service.spec, router=router))
    return service


def read_document(path: Path) -> object:
    """Return the single document of a YAML or JSON file, which may be a part of a manifest.

    Raises:
        InputError: the file cannot be read, is too large, or is not YAML.
    """
    return parse_document(read_manifest_text(path), source=str(path), yaml=yaml)
