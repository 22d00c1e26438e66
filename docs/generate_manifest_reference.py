"""Write docs/manifest.md from the dataclasses that decode a manifest.

    python docs/generate_manifest_reference.py

A test compares the page with the output, so that the page shows the bounds that the decoder checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goodput_core.declaration import (
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

The same manifest describes a service on a laptop (`goodput up -f`), in a replay (`replay -f`) and
in a cluster. Start from [`examples/chat.yaml`](../examples/chat.yaml). Integers are written without
a unit, because the name of the field contains the unit (`ttftMs: 500`, not `500ms`). Shares are
quoted percentages (`"99%"`); there are no floats. Unknown fields, duplicate keys, YAML's merge keys
(`<<`) and a second document are errors. `status` is ignored in a file.

`goodput schema` prints a JSON Schema of the manifest. An editor with the YAML language server
checks a manifest and completes its fields if a comment in the manifest names the schema:

```yaml
# yaml-language-server: $schema=llmservice.schema.json
```

The files in `examples/` name [their copy of the schema](../examples/llmservice.schema.json). The
schema does not contain rules between fields, which are listed below the tables. Goodput and the API
server of a cluster check these rules too.

In a cluster, the fields are those of a CustomResourceDefinition, which is generated from the same
dataclasses as this page (`python -m goodput_operator.render.crd` prints it). The API server of the
cluster rejects the same manifests as Goodput and names the same fields. `kubectl explain
llmservice.spec.engine` shows the descriptions on this page.

As the source of a model, `file://` is a folder or a
GGUF file of this machine, `hf://` [a model of the Hugging Face
Hub](engine.md#models-of-the-hugging-face-hub), and `pvc://` [a folder of a volume of a
cluster](operator.md#a-real-model). To emulate a device instead of serving weights, set the source
to `emulated://PROFILE` or give `--device PROFILE` on the command line.
`tensorParallel` must equal the `tensor_parallel` of the emulated [profile](devices.md), and
`tokenBudget.min` at least its `block_size`.

An object "as in a pod" has the fields that Kubernetes defines for it. Goodput copies it into the
pod without reading it, and the API server of the cluster validates it.
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
        f"- {f'`{rule.field}`' if rule.field else 'The object'} {rule.cel.message}."
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
    if field.container is tuple and field.item is str:
        return "list of texts"
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
    return {
        str: "text",
        int: "integer",
        float: "number",
        bool: "true or false",
        Fraction: "percentage",
    }[field.hint]


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


def _range(low: float | None, high: float) -> str:
    return f"{low:,} to {high:,}" if low else f"at most {high:,}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
