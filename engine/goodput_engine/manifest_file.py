"""Reading of manifest files for `goodput engine`, `goodput router` and `replay`.

This is the only module of the package that opens a manifest; core defines its fields.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import yaml

from goodput_core.errors import InputError, NotBuiltError
from goodput_core.spec.manifest import (
    MAX_MANIFEST_BYTES,
    manifest_text,
    one_document,
    parse_manifest,
    strict_documents,
)
from goodput_core.spec.support import require_built

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
        NotBuiltError: a field requires a feature that is not implemented.
    """
    service = parse_manifest(
        _read_text(path), source=str(path), parse_documents=strict_documents(yaml)
    )
    if placement is not None:
        router = replace(service.spec.router, policy=placement)
        service = replace(service, spec=replace(service.spec, router=router))
    try:
        require_built(service)
    except NotBuiltError as error:
        raise error.at(str(path)) from error
    return service


def read_document(path: Path) -> object:
    """Return the single document of a YAML or JSON file, which may be a part of a manifest.

    Raises:
        InputError: the file cannot be read, is too large, or is not YAML.
    """
    return one_document(_read_text(path), source=str(path), parse_documents=strict_documents(yaml))


def _read_text(path: Path) -> str:
    try:
        # A named pipe or a device could block or never end.
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: is not a regular file; name a manifest")
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(f"{path}: cannot be read: {reason}; name a manifest") from error
    return manifest_text(content, source=str(path))
