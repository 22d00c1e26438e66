"""Writes docs/manifest.md from the dataclasses that decode a manifest.

    python docs/generate_manifest_reference.py

A test compares the page with what this makes, so the page cannot promise other bounds than the
decoder enforces.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goodput_core.spec.declared import Declared, declared_fields
from goodput_core.spec.fields import Rule, camel_case, rules_between
from goodput_core.spec.llmservice import LLMService

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).with_name("manifest.md")

_HEAD = """\
# The LLMService manifest

<!-- Made by docs/generate_manifest_reference.py; change the dataclasses in core, not this page. -->

One file describes a service for a laptop (`goodput up -f`), for a replay (`replay -f`) and for a
cluster; [`examples/chat.yaml`](../examples/chat.yaml) is one to start from. Integers carry their
unit in the name and are written bare (`ttftMs: 500`, not `500ms`); there are no floats; shares are
quoted percentages (`"99%"`). A field that is not listed here is an error, never ignored; so are a
key that stands twice, YAML's merge keys (`<<`) and a second document. `status` is the cluster's
and is not read.

In a cluster the same fields are a CustomResourceDefinition, made from the same dataclasses
(`python -m goodput_operator.render.crd` prints it): its API server refuses what is refused here,
and names the same field. `kubectl explain llmservice.spec.engine` shows this page's sentences.

What is valid here and not built yet is refused by name: `rollout.gate`, and weights to execute
(`hf://`, `pvc://`, `file://`), in whose place `--device` emulates a profile on the command line; in
a cluster `model.source` names one itself, `emulated://PROFILE`. `tensorParallel` must be the number
of devices that the emulated [profile](devices.md) stands for.

Objects "as in a pod" have Kubernetes' own fields. They are passed on unread, and judged by the
cluster's API server.
"""


def page() -> str:
    """The whole page, as Markdown."""
    first: dict[type[Any], str] = {}
    for path, cls in _objects(LLMService, ""):
        first.setdefault(cls, path)
    sections = [_section(path, cls, first) for cls, path in first.items()]
    return "\n".join([_HEAD, *sections])


def _objects(cls: type[Any], path: str) -> Iterator[tuple[str, type[Any]]]:
    """Every object of the manifest, parents first."""
    yield path, cls
    for field in declared_fields(cls):
        if field.nested is not None:
            name = f"{field.name}[]" if field.container is tuple else field.name
            yield from _objects(field.nested, f"{path}.{name}" if path else name)


def _section(path: str, cls: type[Any], first: dict[type[Any], str]) -> str:
    rows = "\n".join(_row(path, field, first) for field in declared_fields(cls))
    between = "\n".join(
        f"- {f'`{rule.field}`' if rule.field else 'It'} {rule.cel.message}."
        for rule in rules_between(cls)
    )
    return (
        f"## {f'`{path}`' if path else 'The document'}\n\n{cls.__doc__}\n\n"
        f"| field | type | default | bounds | meaning |\n| --- | --- | --- | --- | --- |\n{rows}\n"
        + (f"\n{between}\n" if between else "")
    )


def _row(path: str, field: Declared, first: dict[type[Any], str]) -> str:
    shown = _type(field)
    told = first.get(field.item, "")
    if told and not told.startswith(f"{path}.{field.name}" if path else field.name):
        shown = f"{shown}, as `{told}`"
    bounds = _bounds(field.rule)
    return f"| `{field.name}` | {shown} | {_default(field)} | {bounds} | {field.rule.doc} |"


def _type(field: Declared) -> str:
    if field.container is tuple:
        return "list of objects" + ("" if field.nested else " as in a pod")
    if field.container is Mapping:
        if field.item is Any:
            return "object as in a pod"
        return "map of quantities" if field.rule.int_or_string else "map of text"
    if field.nested is not None:
        return "object"
    if issubclass(field.hint, StrEnum):
        return ", ".join(f"`{v}`" for v in field.hint)
    return {str: "text", int: "integer", bool: "true or false", Fraction: "percentage"}[field.hint]


def _default(field: Declared) -> str:
    if field.required:
        return "**required**"
    if field.default is None:
        return "–"
    if field.container is not None:
        return "empty"
    if field.nested is not None:
        return "its defaults"
    shown = str(field.default).lower() if field.hint is bool else field.default
    return f"`{shown}`"


def _bounds(rule: Rule) -> str:
    said = []
    if rule.minimum is not None:
        said.append(f"{rule.minimum:,} to {rule.maximum:,}")
    if rule.max_items is not None:
        said.append(f"{_range(rule.min_items, rule.max_items)} entries")
    if rule.max_length is not None:
        said.append(f"{_range(rule.min_length, rule.max_length)} characters")
    if rule.pattern_hint is not None:
        said.append(f"must {rule.pattern_hint}")
    if rule.key is not None:
        said.append(f"no two with one `{camel_case(rule.key)}`")
    return "; ".join(said) or "–"


def _range(low: int | None, high: int) -> str:
    return f"{low:,} to {high:,}" if low else f"at most {high:,}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
