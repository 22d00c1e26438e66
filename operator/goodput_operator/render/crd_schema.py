"""From a spec's dataclass to a structural OpenAPI v3 schema, as a CustomResourceDefinition has it.

Every bound becomes one that the API server enforces at the same path: what a field's `Rule` says
in OpenAPI's own words, what `Between` says in CEL. It knows no resource.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from goodput_core.spec.declared import declared_fields
from goodput_core.spec.decode import MAX_ENTRIES, MAX_KEY
from goodput_core.spec.fields import camel_case, rules_between

if TYPE_CHECKING:
    from goodput_core.spec.declared import Declared
    from goodput_core.spec.fields import Cel, Rule

__all__ = ["object_schema", "text_schema"]

_OPAQUE: Final = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_KEYS: Final = {
    "rule": f"self.all(key, 0 < key.size() && key.size() <= {MAX_KEY})",
    "message": f"keys must have 1 to {MAX_KEY} characters",
}


def object_schema(cls: type[Any], description: str | None) -> dict[str, Any]:
    """The schema of one dataclass.

    Args:
        cls: a dataclass whose fields were made by `spec_field`.
        description: what `kubectl explain` says of it; None: the caller says it.
    """
    declared = declared_fields(cls)
    schema: dict[str, Any] = {"description": description} if description else {}
    schema["type"] = "object"
    if required := [field.name for field in declared if field.required]:
        schema["required"] = required
    schema["properties"] = {field.name: _described(field) for field in declared}
    if rules := rules_between(cls):
        schema["x-kubernetes-validations"] = [_rule(one.cel, one.field) for one in rules]
    return schema


def _described(field: Declared) -> dict[str, Any]:
    schema = {"description": _description(field), **_field(field)}
    if field.default is None or field.container is not None:
        return schema
    if field.nested is None:
        schema["default"] = _plain(field.default)
    elif inside := {
        k: part["default"] for k, part in schema["properties"].items() if "default" in part
    }:
        # The defaults inside are filled in only where the object itself is; but rules between
        # fields are held against its default as it is written.
        schema["default"] = inside if rules_between(field.nested) else {}
    return schema


def _description(field: Declared) -> str:
    """What `kubectl explain` says: it shows no bounds and no defaults of its own."""
    rule, said = field.rule, [field.rule.doc]
    if rule.minimum is not None and rule.maximum is not None:
        said.append(f"From {rule.minimum} to {rule.maximum}.")
    if rule.pattern_hint is not None:
        said.append(f"Must {rule.pattern_hint}.")
    if field.container is None and field.nested is None and field.default not in {None, ""}:
        shown = str(field.default).lower() if field.hint is bool else field.default
        said.append(f"Defaults to {shown}.")
    return " ".join(said)


def _plain(default: object) -> object:
    return default.value if isinstance(default, StrEnum) else default


def _field(field: Declared) -> dict[str, Any]:
    if field.container is tuple:
        return _list(field)
    if field.container is Mapping:
        return _map(field)
    if field.nested is not None:
        return object_schema(field.nested, None)
    return _scalar(field.hint, field.rule)


def _list(field: Declared) -> dict[str, Any]:
    rule = field.rule
    # kubectl explains a list and its items as one: the list's sentence does.
    items = {**_OPAQUE, "maxProperties": MAX_ENTRIES}
    if field.nested is not None:
        items = object_schema(field.nested, None)
    schema: dict[str, Any] = {"type": "array", "items": items, "maxItems": rule.max_items}
    if rule.min_items is not None:
        schema["minItems"] = rule.min_items
    if rule.key is None:
        schema["x-kubernetes-list-type"] = "atomic"
    else:
        schema["x-kubernetes-list-type"] = "map"
        schema["x-kubernetes-list-map-keys"] = [camel_case(rule.key)]
    return schema


def _map(field: Declared) -> dict[str, Any]:
    if field.item is Any:
        return {**_OPAQUE, "maxProperties": field.rule.max_items}
    return {
        "type": "object",
        "additionalProperties": _scalar(field.item, field.rule),
        "maxProperties": field.rule.max_items,
        "x-kubernetes-validations": [dict(_KEYS)],
    }


def _scalar(hint: Any, rule: Rule) -> dict[str, Any]:
    if issubclass(hint, StrEnum):
        return {"type": "string", "enum": [member.value for member in hint]}
    if hint is bool:
        return {"type": "boolean"}
    if hint is int:
        return _integer(rule)
    assert hint in {str, Fraction}, hint
    return text_schema(rule)


def _integer(rule: Rule) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer", "format": "int64"}
    if rule.maximum is not None and rule.maximum < 1 << 31:
        schema["format"] = "int32"
    bounds = {"minimum": rule.minimum, "maximum": rule.maximum}
    return schema | {name: bound for name, bound in bounds.items() if bound is not None}


def text_schema(rule: Rule) -> dict[str, Any]:
    """The schema of a text with these bounds."""
    bounds = {
        "format": rule.format,
        "minLength": rule.min_length,
        "maxLength": rule.max_length,
        "pattern": rule.pattern,
    }
    schema: dict[str, Any] = {"type": "string"}
    if rule.int_or_string:
        # A bare number is no text, so that its pattern cannot refuse a negative one.
        schema = {"x-kubernetes-int-or-string": True, "minimum": 0}
    schema |= {name: bound for name, bound in bounds.items() if bound is not None}
    if rule.cel is not None:
        schema["x-kubernetes-validations"] = [_rule(rule.cel, "")]
    return schema


def _rule(cel: Cel, field: str) -> dict[str, Any]:
    rule = {"rule": cel.rule, "message": cel.message}
    return {**rule, "fieldPath": f".{field}"} if field else rule
