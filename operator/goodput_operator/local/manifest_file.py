"""Reading a manifest's file: everything that can be wrong with it as one sentence.

The one place of this package that opens a manifest; what its fields mean is core's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

from goodput_core.errors import InputError
from goodput_core.spec.manifest import (
    MAX_MANIFEST_BYTES,
    manifest_text,
    parse_manifest,
    strict_documents,
)

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_core.spec.llmservice import LLMService

__all__ = ["read_manifest"]


def read_manifest(path: Path) -> tuple[LLMService, str]:
    """Read and validate the one `LLMService` in a YAML or JSON file.

    Returns:
        The service, and the text it was read from.

    Raises:
        InputError: the file cannot be read, is too large, is no UTF-8 text or no YAML.
        SpecError: a field that breaks a rule, by file and path.
    """
    text = _read_text(path)
    service = parse_manifest(text, source=str(path), parse_documents=strict_documents(yaml))
    return service, text


def _read_text(path: Path) -> str:
    try:
        # A named pipe or a device could block or never end: only a regular file is a manifest.
        if path.exists() and not path.is_file():
            kind = "a directory" if path.is_dir() else "not a regular file"
            raise InputError(f"{path}: is {kind}; name a manifest file with -f")
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; name a manifest file with -f") from error
    except PermissionError as error:
        raise InputError(f"{path}: may not be read; check its permissions") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    return manifest_text(content, source=str(path))
