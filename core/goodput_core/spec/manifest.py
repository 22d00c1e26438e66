"""From the text of a manifest to a validated `LLMService`; reading the file is the caller's.

The YAML parser comes in as an argument: core has no third-party imports, and the same checks
must hold wherever a manifest is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goodput_core.errors import InputError, SpecError
from goodput_core.spec.llmservice import LLMService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["MAX_MANIFEST_BYTES", "parse_manifest"]

MAX_MANIFEST_BYTES: Final = 1 << 20


def parse_manifest(
    text: str, *, source: str, parse_documents: Callable[[str], Iterable[object]]
) -> LLMService:
    """Validate the one `LLMService` of a manifest.

    Args:
        text: YAML or JSON.
        source: the file's name, for errors.
        parse_documents: a safe YAML parser, such as `yaml.safe_load_all`.

    Raises:
        InputError: too large, not YAML, or not exactly one document.
        SpecError: a field that breaks a rule, by file and path.
    """
    if len(text) > MAX_MANIFEST_BYTES:
        raise InputError(f"{source}: over {MAX_MANIFEST_BYTES >> 20} MiB; is this a manifest?")
    try:
        documents = [d for d in parse_documents(text) if d is not None]
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not YAML: {_one_line(error)}") from error
    except Exception as error:
        if type(error).__module__.split(".")[0] != "yaml":
            raise
        raise InputError(f"{source}: not YAML: {_one_line(error)}") from error
    if len(documents) != 1:
        raise InputError(f"{source}: holds {len(documents)} documents; one LLMService is needed")
    try:
        return LLMService.from_dict(documents[0])
    except SpecError as error:
        raise error.at(source) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
