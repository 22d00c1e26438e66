"""From the bytes of a manifest to a validated `LLMService`; reading the file is the caller's.

The YAML parser comes in as an argument: core has no third-party imports, and the same checks
must hold wherever a manifest is read.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from goodput_core.errors import InputError, SpecError
from goodput_core.spec.decode import shown
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
    """The text of a file that should be a manifest.

    Args:
        content: its bytes; of a longer file `MAX_MANIFEST_BYTES` + 1 are enough.
        source: the file's name, for errors.

    Raises:
        InputError: too large, or not UTF-8.
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
        text: YAML or JSON, as `manifest_text` gives it.
        source: the file's name, for errors.
        parse_documents: a safe YAML parser: `strict_documents(yaml)`.

    Raises:
        InputError: not YAML, or not exactly one document.
        SpecError: a field that breaks a rule, by file and path.
    """
    try:
        document = one_document(text, source=source, parse_documents=parse_documents)
        return LLMService.from_dict(document)
    except SpecError as error:
        raise error.at(source) from error


def one_document(
    text: str, *, source: str, parse_documents: Callable[[str], Iterable[object]]
) -> object:
    """What the one document of a YAML text holds; arguments as of `parse_manifest`.

    Raises:
        InputError: not YAML, or not exactly one document.
    """
    try:
        documents = [d for d in parse_documents(text) if d is not None]
    except Exception as error:
        # Whatever a parser stumbles over (PyYAML answers `!!int ''` with an IndexError), the
        # text is at fault.
        raise InputError(f"{source}: cannot be read as YAML: {_one_line(error)}") from error
    if not documents:
        raise InputError(f"{source}: is empty; an LLMService is needed")
    if len(documents) > 1:
        raise InputError(
            f"{source}: holds {len(documents)} documents; keep one LLMService in a file"
        )
    return documents[0]


def strict_documents(yaml: Any) -> Callable[[str], Iterable[object]]:
    """A safe YAML parser that refuses what would be lost or explode in silence.

    A key that stands twice in a mapping would hide one of its values; merge keys (`<<`) can
    grow without bounds, and YAML 1.2 has dropped them.

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
        return  # PyYAML itself refuses it
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.tag == "tag:yaml.org,2002:merge":
            raise ValueError(f"line {line}: merge keys (<<) are not supported; repeat the fields")
        if not isinstance(key.value, str):
            continue
        if (key.tag, key.value) in seen:
            raise ValueError(f"line {line}: the key {shown(key.value)} already stands above")
        seen.add((key.tag, key.value))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
