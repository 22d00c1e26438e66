"""Parse the bytes of a manifest to a validated `LLMService`.

Callers read the file. The YAML parser is an argument, since core has no third-party imports.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from goodput_core.errors import InputError, SpecError
from goodput_core.spec.codec import shown
from goodput_core.spec.llmservice import LLMService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "MAX_MANIFEST_BYTES",
    "manifest_text",
    "one_document",
    "parse_manifest",
    "strict_documents",
]

MAX_MANIFEST_BYTES: Final = 1 << 20


def manifest_text(content: bytes, *, source: str) -> str:
    """Return the text of a manifest file.

    Args:
        content: the file's first `MAX_MANIFEST_BYTES` + 1 bytes, or all if it is shorter.
        source: the file's name, for errors.

    Raises:
        InputError: the content is too large or not UTF-8.
    """
    if len(content) > MAX_MANIFEST_BYTES:
        raise InputError(f"{source}: over {MAX_MANIFEST_BYTES >> 20} MiB; is this a manifest?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source}: byte {error.start} is not UTF-8; save the manifest as UTF-8 text"
        ) from error


def parse_manifest(
    text: str, *, source: str, parse_documents: Callable[[str], Iterable[object]]
) -> LLMService:
    """Validate the one `LLMService` of a manifest.

    Args:
        text: YAML or JSON, as `manifest_text` returns it.
        source: the file's name, for errors.
        parse_documents: a safe YAML parser: `strict_documents(yaml)`.

    Raises:
        InputError: the text is not YAML or does not hold exactly one document.
        SpecError: a field is invalid; names file and path.
    """
    try:
        document = one_document(text, source=source, parse_documents=parse_documents)
        return LLMService.from_dict(document)
    except SpecError as error:
        raise error.at(source) from error


def one_document(
    text: str, *, source: str, parse_documents: Callable[[str], Iterable[object]]
) -> object:
    """Return the parsed value of a text with one YAML document; arguments as of `parse_manifest`.

    Raises:
        InputError: the text is not YAML or does not hold exactly one document.
    """
    try:
        documents = [d for d in parse_documents(text) if d is not None]
    except Exception as error:
        # PyYAML raises other errors than its own for some invalid texts, such as an IndexError
        # for `!!int ''`.
        raise InputError(f"{source}: cannot be read as YAML: {_one_line(error)}") from error
    if not documents:
        raise InputError(f"{source}: is empty; an LLMService is needed")
    if len(documents) > 1:
        raise InputError(
            f"{source}: holds {len(documents)} documents; keep one LLMService in a file"
        )
    return documents[0]


def strict_documents(yaml: Any) -> Callable[[str], Iterable[object]]:
    """Return a safe YAML parser that refuses duplicate keys and merge keys.

    A duplicate key would hide one of the two values. Merge keys (`<<`) can expand without bounds,
    and YAML 1.2 does not have them.

    Args:
        yaml: the PyYAML module.

    Returns:
        A function for `parse_manifest`'s `parse_documents`.
    """
    base = yaml.SafeLoader

    def construct_mapping(self: Any, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - PyYAML's signature
        _refuse_lost_keys(node)
        return base.construct_mapping(self, node, deep)

    loader = type("StrictLoader", (base,), {"construct_mapping": construct_mapping})
    return partial(yaml.load_all, Loader=loader)


def _refuse_lost_keys(node: Any) -> None:
    seen: set[tuple[str, str]] = set()
    if node.id != "mapping":
        return  # PyYAML refuses it
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.tag == "tag:yaml.org,2002:merge":
            raise ValueError(f"line {line}: merge keys (<<) are not supported; repeat the fields")
        if not isinstance(key.value, str):
            continue
        if (key.tag, key.value) in seen:
            raise ValueError(f"line {line}: the key {shown(key.value)} is already used above")
        seen.add((key.tag, key.value))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
