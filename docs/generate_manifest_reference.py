"""Writes docs/manifest.md from the dataclasses that decode a manifest.

    python docs/generate_manifest_reference.py

A test compares the page with what this makes, so the page cannot promise other bounds than the
decoder enforces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from goodput_core.spec.choices import ControlMode, Policy, Preemption, RouterPolicy
from goodput_core.spec.fields import RULE, Rule, camel_case, rules_between
from goodput_core.spec.llmservice import LLMService
from goodput_core.support import (
    BUILT_CONTROL_MODES,
    BUILT_POLICIES,
    BUILT_PREEMPTIONS,
    BUILT_ROUTER_POLICIES,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).with_name("manifest.md")

_BUILT: dict[type[StrEnum], frozenset[Any]] = {
    Policy: BUILT_POLICIES,
    Preemption: BUILT_PREEMPTIONS,
    RouterPolicy: BUILT_ROUTER_POLICIES,
    ControlMode: BUILT_CONTROL_MODES,
}

_HEAD = """\
# The LLMService manifest

<!-- Made by docs/generate_manifest_reference.py; change the dataclasses in core, not this page. -->

One file describes a service for a laptop (`goodput up -f`), for a replay (`replay -f`) and for a
cluster; [`examples/chat.yaml`](../examples/chat.yaml) is one to start from. Integers carry their
unit in the name and are written bare (`ttftMs: 500`, not `500ms`); there are no floats; shares are
quoted percentages (`"99%"`). A field that is not listed here is an error, never ignored; so are a
key that stands twice, YAML's merge keys (`<<`) and a second document. `status` is the cluster's
and is not read.

A choice in **bold** is what this version runs; the others are valid and refused by name. So is
`rollout.gate`. `tensorParallel` must be the number of devices that the emulated
[profile](devices.md) stands for.

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
    for declared, hint in _declared(cls):
        item = _item(hint)
        if is_dataclass(item) and isinstance(item, type):
            suffix = "[]" if get_origin(hint) is tuple else ""
            name = camel_case(declared.name) + suffix
            yield from _objects(item, f"{path}.{name}" if path else name)


def _section(path: str, cls: type[Any], first: dict[type[Any], str]) -> str:
    rows = "\n".join(_row(path, declared, hint, first) for declared, hint in _declared(cls))
    between = "\n".join(
        f"- {f'`{rule.field}`' if rule.field else 'It'} {rule.cel.message}."
        for rule in rules_between(cls)
    )
    return (
        f"## {f'`{path}`' if path else 'The document'}\n\n{cls.__doc__}\n\n"
        f"| field | type | default | bounds | meaning |\n| --- | --- | --- | --- | --- |\n{rows}\n"
        + (f"\n{between}\n" if between else "")
    )


def _row(path: str, declared: Field[Any], hint: Any, first: dict[type[Any], str]) -> str:
    rule: Rule = declared.metadata[RULE]
    name = camel_case(declared.name)
    shown = _type(hint, rule)
    told = first.get(_item(hint), "")
    if told and not told.startswith(f"{path}.{name}" if path else name):
        shown = f"{shown}, as `{told}`"
    return f"| `{name}` | {shown} | {_default(declared)} | {_bounds(rule)} | {rule.doc} |"


def _declared(cls: type[Any]) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(cls)
    return [(declared, _without_none(hints[declared.name])) for declared in fields(cls)]


def _without_none(hint: Any) -> Any:
    if not isinstance(hint, UnionType):
        return hint
    (only,) = (arg for arg in get_args(hint) if arg is not NoneType)
    return only


def _item(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is tuple else hint


def _type(hint: Any, rule: Rule) -> str:
    if get_origin(hint) is tuple:
        return "list of objects" + (" as in a pod" if get_origin(_item(hint)) is Mapping else "")
    if get_origin(hint) is Mapping:
        if get_args(hint)[1] is Any:
            return "object as in a pod"
        return "map of quantities" if rule.int_or_string else "map of text"
    if is_dataclass(hint):
        return "object"
    if issubclass(hint, StrEnum):
        built = _BUILT.get(hint, frozenset())
        return ", ".join(f"**`{v}`**" if v in built else f"`{v}`" for v in hint)
    return {str: "text", int: "integer", bool: "true or false", Fraction: "percentage"}[hint]


def _default(declared: Field[Any]) -> str:
    if declared.default_factory is not MISSING:
        return "empty" if declared.default_factory is dict else "its defaults"
    if declared.default is MISSING:
        return "**required**"
    if isinstance(declared.default, bool):
        return f"`{str(declared.default).lower()}`"
    if declared.default == ():
        return "empty"
    return "–" if declared.default is None else f"`{declared.default}`"


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
