"""Reading the manifest that `goodput engine` and `goodput router` are given.

The one place of this package that opens a manifest; what its fields mean is core's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

from goodput_core.errors import InputError, NotBuiltError
from goodput_core.spec.manifest import MAX_MANIFEST_BYTES, parse_manifest, strict_documents
from goodput_core.support import require_built

if TYPE_CHECKING:
    from pathlib import Path

    from goodput_core.spec.llmservice import LLMService

__all__ = ["read_manifest"]


def read_manifest(path: Path) -> LLMService:
    """The one `LLMService` of a file, if this version can run it.

    Raises:
        InputError: the file cannot be read, is too large, or is no YAML.
        SpecError: a field that breaks a rule, by file and path.
        NotBuiltError: a field that asks for what this version does not have.
    """
    try:
        # A named pipe or a device could block or never end.
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: is not a regular file; name a manifest with -f")
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {reason}; name a manifest with -f") from error
    service = parse_manifest(text, source=str(path), parse_documents=strict_documents(yaml))
    try:
        require_built(service)
    except NotBuiltError as error:
        raise error.at(str(path)) from error
    return service
