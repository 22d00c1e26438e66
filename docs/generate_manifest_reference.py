"""Write docs/manifest.md from the dataclasses that decode a manifest.

    python docs/generate_manifest_reference.py

A test compares the page with the output, so page and decoder have the same bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goodput_core.spec.declaration import (
    DeclaredField,
    FieldRule,
    camel_case,
    cross_field_rules,
    declared_fields,
)
from goodput_core.spec.llmservice import LLMService

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).with_name("manifest.md")

_HEAD = """\
# The LLMService manifest

<!-- Made by docs/generate_manifest_reference.py; change the dataclasses in core, not this page. -->

One file describes a service for a laptop (`goodput up -f`), for a replay (`replay -f`) and for a
cluster. Start from [`examples/chat.yaml`](../examples/chat.yaml). The name of an integer contains
its unit, so the value has none (`ttftMs: 500`, not `500ms`). Shares are quoted percentages
(`"99%"`); there are no floats. Unknown fields, duplicate keys, YAML's merge keys (`<<`) and a
second document are errors. `status` is ignored in a file.

`goodput schema` prints a JSON Schema of this page. Editors with the YAML language server check a
manifest and complete its fields if a comment names the schema:

```yaml
# yaml-language-server: $schema=llmservice.schema.json
```

The files in `examples/` name [the copy there](../examples/llmservice.schema.json). Rules between
fields, listed below a table, are not part of the schema. The decoder and the API server check them.

In a cluster the same fields are a CustomResourceDefinition, generated from the same dataclasses
(`python -m goodput_operator.render.crd` prints it). Its API server rejects the same manifests and
names the same fields. `kubectl explain llmservice.spec.engine` shows the descriptions of this page.

A valid field that is not implemented yet is rejected by name: `rollout.gate`, and `model.source`
with weights to execute (`hf://`, `pvc://`, `file://`). `--device` on the command line, or
`emulated://PROFILE` as the source, emulates a device instead. `tensorParallel` must be the number
of devices of the emulated [profile](devices.md).

Objects "as in a pod" have Kubernetes' own fields. They are copied unread, and the cluster's API
server validates them.
"""


def page() -> str:
    """Return the page as Markdown."""
    first: dict[type[Any], str] = {}
    for path, cls in _objects(LLMService, ""):
        first.setdefault(cls, path)
    sections = [_section(path, cls, first) for cls, path in first.items()]
    return "\n".join([_HEAD, *sections])


def _objects(cls: type[Any], path: str) -> Iterator[tuple[str, type[Any]]]:
    """Yield every object of the manifest with its path, parents first."""
    yield path, cls
    for field in declared_fields(cls):
        if field.nested is not None:
            name = f"{field.name}[]" if field.container is tuple else field.name
            yield from _objects(field.nested, f"{path}.{name}" if path else name)


def _section(path: str, cls: type[Any], first: dict[type[Any], str]) -> str:
    rows = "\n".join(_row(path, field, first) for field in declared_fields(cls))
    between = "\n".join(
        f"- {f'`{rule.field}`' if rule.field else 'It'} {rule.cel.message}."
        for rule in cross_field_rules(cls)
    )
    return (
        f"## {f'`{path}`' if path else 'The document'}\n\n{cls.__doc__}\n\n"
        f"| field | type | default | bounds | meaning |\n| --- | --- | --- | --- | --- |\n{rows}\n"
        + (f"\n{between}\n" if between else "")
    )


def _row(path: str, field: DeclaredField, first: dict[type[Any], str]) -> str:
    shown = _type(field)
    described = first.get(field.item, "")
    if described and not described.startswith(f"{path}.{field.name}" if path else field.name):
        shown = f"{shown}, as `{described}`"
    bounds = _bounds(field.rule)
    return f"| `{field.name}` | {shown} | {_default(field)} | {bounds} | {field.rule.doc} |"


def _type(field: DeclaredField) -> str:
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


def _default(field: DeclaredField) -> str:
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


def _bounds(rule: FieldRule) -> str:
    bounds = []
    if rule.minimum is not None:
        bounds.append(f"{rule.minimum:,} to {rule.maximum:,}")
    if rule.max_items is not None:
        bounds.append(f"{_range(rule.min_items, rule.max_items)} entries")
    if rule.max_length is not None:
        bounds.append(f"{_range(rule.min_length, rule.max_length)} characters")
    if rule.pattern_hint is not None:
        bounds.append(f"must {rule.pattern_hint}")
    if rule.key is not None:
        bounds.append(f"unique `{camel_case(rule.key)}`")
    return "; ".join(bounds) or "–"


def _range(low: int | None, high: int) -> str:
    return f"{low:,} to {high:,}" if low else f"at most {high:,}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
