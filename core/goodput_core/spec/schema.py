"""Schemas generated from a spec's dataclasses: OpenAPI for the CRD, JSON Schema for editors.

The API server enforces the same bounds as the decoder and names the same paths. It enforces the
rules between fields as CEL, and patterns too: the error of an OpenAPI pattern is the bare regular
expression, that of a rule is a sentence. `goodput schema` prints the JSON Schema of a manifest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from goodput_core.cli import CommandParser
from goodput_core.contract import API_VERSION, KIND_LLMSERVICE
from goodput_core.declaration import Cel, camel_case, cross_field_rules, declared_fields
from goodput_core.errors import ExitCode, InputError
from goodput_core.files import write_output
from goodput_core.spec.codec import MAX_ENTRIES, MAX_KEY
from goodput_core.spec.llmservice import LLMService

if TYPE_CHECKING:
    from goodput_core.declaration import DeclaredField, FieldRule

__all__ = ["json_schema", "main", "make_parser", "object_schema", "pattern_rule", "text_schema"]

_OPAQUE: Final = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_KEY_RULE: Final = {
    "rule": f"self.all(key, 0 < key.size() && key.size() <= {MAX_KEY})",
    "message": f"keys must have 1 to {MAX_KEY} characters",
}


def object_schema(cls: type[Any], description: str | None) -> dict[str, Any]:
    """Return the structural OpenAPI schema of one dataclass.

    Args:
        cls: a dataclass whose fields were made by `spec_field`.
        description: the object's description; None if the caller adds it.
    """
    return _without_patterns(_object_schema(cls, description))


def _object_schema(cls: type[Any], description: str | None) -> dict[str, Any]:
    """Return the schema with each pattern twice: as a keyword, and as a rule with a message."""
    declared = declared_fields(cls)
    schema: dict[str, Any] = {"description": description} if description else {}
    schema["type"] = "object"
    if required := [field.name for field in declared if field.required]:
        schema["required"] = required
    schema["properties"] = {field.name: _describe_field(field) for field in declared}
    if rules := cross_field_rules(cls):
        schema["x-kubernetes-validations"] = [_rule_schema(rule.cel, rule.field) for rule in rules]
    return schema


def _describe_field(field: DeclaredField) -> dict[str, Any]:
    schema = {"description": _describe(field), **_field_schema(field)}
    if field.default is None or field.container is not None:
        return schema
    if field.nested is None:
        schema["default"] = (
            str(field.default) if isinstance(field.default, StrEnum) else field.default
        )
    elif defaults := {
        name: part["default"] for name, part in schema["properties"].items() if "default" in part
    }:
        # The API server checks the rules between fields before it fills in the defaults of these
        # fields. If there are such rules, the object's default must therefore contain them.
        schema["default"] = defaults if cross_field_rules(field.nested) else {}
    return schema


def _describe(field: DeclaredField) -> str:
    # `kubectl explain` shows neither bounds nor defaults, so the description includes them.
    rule, sentences = field.rule, [field.rule.doc]
    if rule.minimum is not None and rule.maximum is not None:
        sentences.append(f"From {rule.minimum} to {rule.maximum}.")
    if rule.pattern_hint is not None:
        sentences.append(f"Must {rule.pattern_hint}.")
    if field.container is None and field.nested is None and field.default not in {None, ""}:
        shown = str(field.default).lower() if field.hint is bool else field.default
        sentences.append(f"Defaults to {shown}.")
    return " ".join(sentences)


def _field_schema(field: DeclaredField) -> dict[str, Any]:
    if field.container is tuple:
        return _list_schema(field)
    if field.container is Mapping:
        return _map_schema(field)
    if field.nested is not None:
        return _object_schema(field.nested, None)
    return _scalar_schema(field.hint, field.rule)


def _list_schema(field: DeclaredField) -> dict[str, Any]:
    rule = field.rule
    # `kubectl explain` shows a list together with its items, so the items need no description.
    items = {**_OPAQUE, "maxProperties": MAX_ENTRIES}
    if field.nested is not None:
        items = _object_schema(field.nested, None)
    elif field.item is int:
        items = _integer_schema(rule)
    elif field.item is str:
        items = _text_schema(rule)
    schema: dict[str, Any] = {"type": "array", "items": items, "maxItems": rule.max_items}
    if rule.min_items is not None:
        schema["minItems"] = rule.min_items
    if rule.key is None:
        schema["x-kubernetes-list-type"] = "atomic"
    else:
        schema["x-kubernetes-list-type"] = "map"
        schema["x-kubernetes-list-map-keys"] = [camel_case(rule.key)]
    return schema


def _map_schema(field: DeclaredField) -> dict[str, Any]:
    if field.item is Any:
        return {**_OPAQUE, "maxProperties": field.rule.max_items}
    return {
        "type": "object",
        "additionalProperties": _scalar_schema(field.item, field.rule),
        "maxProperties": field.rule.max_items,
        "x-kubernetes-validations": [dict(_KEY_RULE)],
    }


def _scalar_schema(hint: Any, rule: FieldRule) -> dict[str, Any]:
    if issubclass(hint, StrEnum):
        return {"type": "string", "enum": [member.value for member in hint]}
    if hint is bool:
        return {"type": "boolean"}
    if hint is int:
        return _integer_schema(rule)
    if hint is float:
        return _number_schema(rule)
    assert hint in {str, Fraction}, hint
    return _text_schema(rule)


def _integer_schema(rule: FieldRule) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer", "format": "int64"}
    if rule.maximum is not None and rule.maximum < 1 << 31:
        schema["format"] = "int32"
    return schema | _bounds(rule)


def _number_schema(rule: FieldRule) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "number", **_bounds(rule)}
    if isinstance(rule.minimum, float):
        # For a whole number, the API server truncates the minimum.
        cel = Cel(rule=f"self >= {rule.minimum}", message=f"must be at least {rule.minimum}")
        schema["x-kubernetes-validations"] = [_rule_schema(cel, "")]
    return schema


def _bounds(rule: FieldRule) -> dict[str, Any]:
    """Return the bounds of a number."""
    bounds = {"minimum": rule.minimum, "maximum": rule.maximum}
    return {name: bound for name, bound in bounds.items() if bound is not None}


def text_schema(rule: FieldRule) -> dict[str, Any]:
    """Return the schema of a text field, without its pattern and rules."""
    bounds = {"format": rule.format, "minLength": rule.min_length, "maxLength": rule.max_length}
    return {"type": "string"} | {name: b for name, b in bounds.items() if b is not None}


def _text_schema(rule: FieldRule) -> dict[str, Any]:
    schema = text_schema(rule)
    if rule.int_or_string:
        # The pattern does not apply to a bare number; `minimum` rejects a negative one.
        del schema["type"]
        schema = {"x-kubernetes-int-or-string": True, "minimum": 0, **schema}
    if rule.pattern is not None:
        schema["pattern"] = rule.pattern
    if rules := _text_rules(rule):
        schema["x-kubernetes-validations"] = [_rule_schema(cel, "") for cel in rules]
    return schema


def _text_rules(rule: FieldRule) -> list[Cel]:
    if rule.pattern is None:
        return [rule.cel] if rule.cel is not None else []
    pattern = pattern_rule(rule)
    if rule.cel is None:
        return [pattern]
    # A text that does not match the pattern has one error only.
    return [pattern, Cel(rule=f"!{pattern.rule} || ({rule.cel.rule})", message=rule.cel.message)]


def pattern_rule(rule: FieldRule, *, at: str = "self") -> Cel:
    """Return the pattern of a field as a rule of the API server.

    Args:
        rule: the bounds of a field with a pattern.
        at: the CEL expression of the text.
    """
    assert rule.pattern is not None
    assert rule.pattern_hint is not None, rule
    quote = '"' if "'" in rule.pattern else "'"
    matches = f"{at}.matches(r{quote}{rule.pattern}{quote})"
    if rule.int_or_string:
        matches = f"(type({at}) != string || {matches})"
    return Cel(rule=matches, message=f"must {rule.pattern_hint}")


def _without_patterns(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without the keyword `pattern`; a field of this name stays."""
    kept = {key: part for key, part in node.items() if key != "pattern"}
    if "properties" in node:
        parts = node["properties"].items()
        kept["properties"] = {name: _without_patterns(part) for name, part in parts}
    for inside in ("items", "additionalProperties"):
        if inside in node:
            kept[inside] = _without_patterns(node[inside])
    return kept


def _rule_schema(cel: Cel, field: str) -> dict[str, Any]:
    rule = {"rule": cel.rule, "message": cel.message}
    return {**rule, "fieldPath": f".{field}"} if field else rule


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of an `LLMService` manifest.

    It does not contain the rules between fields; the decoder and the API server check them.
    """
    document = _strip_extensions(
        _object_schema(LLMService, "A language model service and its SLOs.")
    )
    document["properties"]["apiVersion"] = {"const": API_VERSION}
    document["properties"]["kind"] = {"const": KIND_LLMSERVICE}
    # Accepted and ignored, so that a manifest that was read from a cluster is valid.
    document["properties"]["status"] = {"type": "object"}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": KIND_LLMSERVICE}
    return head | document


def _strip_extensions(node: dict[str, Any]) -> dict[str, Any]:
    """Return a structural schema that rejects unknown fields and has no Kubernetes extensions."""
    plain = {k: v for k, v in node.items() if not k.startswith("x-kubernetes-") and k != "format"}
    if "x-kubernetes-int-or-string" in node:
        plain.pop("minimum")
        text = {k: plain.pop(k) for k in ("minLength", "maxLength", "pattern") if k in plain}
        number = {"type": "integer", "minimum": node["minimum"]}
        plain["anyOf"] = [number, {"type": "string", **text}]
    if "properties" in node:
        plain["properties"] = {k: _strip_extensions(v) for k, v in node["properties"].items()}
        plain["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if key in node:
            plain[key] = _strip_extensions(node[key])
    return plain


def make_parser() -> CommandParser:
    """Build the parser of `goodput schema`."""
    parser = CommandParser(
        "goodput schema",
        summary="Print the JSON Schema of an LLMService manifest, for editors and validators.",
        examples=(
            "goodput schema -o llmservice.schema.json",
            "# In a manifest, for editors with the YAML language server:",
            "# yaml-language-server: $schema=llmservice.schema.json",
        ),
    )
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="file to write (default: standard output)"
    )
    return parser


def main(argv: list[str]) -> int:
    """Print or write the JSON Schema.

    Raises:
        InputError: the file cannot be written.
    """
    args = make_parser().parse_args(argv)
    text = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    if args.out is None:
        sys.stdout.write(text)
        return ExitCode.PASS
    try:
        write_output(args.out, text.encode())
    except OSError as error:
        raise InputError(f"{args.out}: the schema cannot be written: {error.strerror}") from error
    return ExitCode.PASS
