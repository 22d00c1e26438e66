"""Read a manifest file into a validated `LLMService`.

The PyYAML module is an argument, because core has no third-party imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from goodput_core.errors import InputError, SpecError
from goodput_core.spec.codec import format_value
from goodput_core.spec.llmservice import LLMService

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["MAX_MANIFEST_BYTES", "parse_document", "parse_manifest", "read_manifest_text"]

MAX_MANIFEST_BYTES: Final = 1 << 20


def read_manifest_text(path: Path) -> str:
    """Return the text of a manifest file.

    Raises:
        InputError: the file cannot be read, is too large, or is not UTF-8.
    """
    try:
        # Reading a named pipe or a device could block or never end.
        if path.exists() and not path.is_file():
            kind = "a directory" if path.is_dir() else "not a regular file"
            raise InputError(f"{path}: is {kind}; name a manifest file")
        with path.open("rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; name a manifest file") from error
    except PermissionError as error:
        raise InputError(f"{path}: permission denied; check its permissions") from error
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(f"{path}: cannot be read: {reason}; name a manifest file") from error
    if len(content) > MAX_MANIFEST_BYTES:
        raise InputError(f"{path}: over {MAX_MANIFEST_BYTES >> 20} MiB; is this a manifest?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: byte {error.start} is not UTF-8; save the manifest as UTF-8 text"
        ) from error


def parse_manifest(text: str, *, source: str, yaml: Any) -> LLMService:
    """Validate the one `LLMService` of a manifest.

    Args:
        text: the manifest as YAML or JSON.
        source: name of the file, for errors.
        yaml: the PyYAML module.

    Raises:
        InputError: the text is not YAML or does not hold exactly one document.
        SpecError: a field is invalid; the error has the file and the field's path.
    """
    try:
        return LLMService.from_dict(parse_document(text, source=source, yaml=yaml))
    except SpecError as error:
        raise error.at(source) from error


def parse_document(text: str, *, source: str, yaml: Any, needed: str = "one LLMService") -> object:
    """Return the value of a text with one YAML document; see `parse_manifest` for other arguments.

    Args:
        text: the text.
        source: the file's name, for errors.
        yaml: the module of PyYAML.
        needed: the content that the file must have, for errors.

    Raises:
        InputError: the text is not YAML, does not hold exactly one document, or has duplicate keys
            or merge keys.
    """
    try:
        documents = [d for d in _parse_documents(text, yaml) if d is not None]
    except Exception as error:
        # For some invalid texts PyYAML raises an exception that is not a YAMLError, such as an
        # IndexError for `!!int ''`.
        raise InputError(f"{source}: cannot be read as YAML: {_join_lines(error)}") from error
    if not documents:
        raise InputError(f"{source}: is empty; it needs {needed}")
    if len(documents) > 1:
        raise InputError(f"{source}: holds {len(documents)} documents; keep {needed} in a file")
    return documents[0]


def _parse_documents(text: str, yaml: Any) -> Iterable[object]:
    """Parse with PyYAML's safe loader, but reject duplicate keys and merge keys.

    A duplicate key would hide one of the two values. Merge keys (`<<`) can expand without bounds,
    and YAML 1.2 does not have them.
    """
    base = yaml.SafeLoader

    def construct_mapping(self: Any, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - PyYAML's signature
        _reject_repeated_keys(node)
        return base.construct_mapping(self, node, deep)

    loader = type("StrictLoader", (base,), {"construct_mapping": construct_mapping})
    documents: Iterable[object] = yaml.load_all(text, Loader=loader)
    return documents


def _reject_repeated_keys(node: Any) -> None:
    seen: set[tuple[str, str]] = set()
    if node.id != "mapping":
        return  # PyYAML rejects it
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.tag == "tag:yaml.org,2002:merge":
            raise ValueError(f"line {line}: merge keys (<<) are not supported; repeat the fields")
        if not isinstance(key.value, str):
            continue
        if (key.tag, key.value) in seen:
            raise ValueError(
                f"line {line}: the key {format_value(key.value)} is already used above"
            )
        seen.add((key.tag, key.value))


def _join_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
