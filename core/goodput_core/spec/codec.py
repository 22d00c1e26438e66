"""Convert parsed YAML or JSON to a spec's dataclasses and back; errors name the path of the field.

Unknown keys are errors, because a typo in an optional field must not be ignored. Kubernetes' own
objects are copied as JSON of bounded size; the API server validates them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from datetime import date
from enum import Enum, StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, get_args, get_origin

from goodput_core.declaration import (
    FieldRule,
    camel_case,
    cross_field_rules,
    declared_fields,
)
from goodput_core.errors import SpecError, did_you_mean
from goodput_core.slo.targets import format_objective

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MAX_ENTRIES", "MAX_KEY", "copy_json", "decode", "encode", "format_value"]

T = TypeVar("T")

MAX_ENTRIES: Final = 16
"""Maximum number of entries of a list item that is copied as JSON."""
MAX_KEY: Final = 317
"""The longest key that Kubernetes accepts: a DNS subdomain, a slash and a name."""
_ITEM: Final = FieldRule(doc="", max_items=MAX_ENTRIES)
_UNITS: Final = {"Ms": "milliseconds", "Seconds": "seconds"}
_MAX_SHOWN: Final = 60
_MAX_VALUES: Final = 1_000
_MAX_DEPTH: Final = 24
_MAX_TEXT: Final = 4_096


def decode(cls: type[T], value: object, path: str) -> T:
    """Build a spec's dataclass from a decoded mapping.

    Args:
        cls: a dataclass whose fields were made by `spec_field`.
        value: the parsed YAML or JSON value.
        path: the path of `value` in the manifest, for errors.

    Raises:
        SpecError: the first invalid field in the class's order; if all are valid, the first
            violated rule between fields.
    """
    mapping = _require_mapping(value, path)
    declared = {field.name: field for field in declared_fields(cls)}
    for key in mapping:
        if key not in declared:
            hint = did_you_mean(key, declared) or f"; fields are {', '.join(declared)}"
            raise SpecError(_join_path(path, key), f"unknown field{hint}")
    values: dict[str, Any] = {}
    for key, field in declared.items():
        at = _join_path(path, key)
        if mapping.get(key) is None:
            if field.required:
                unit = re.search(r"(Ms|Seconds)$", key) if field.hint is int else None
                remedy = f"; write {key}: NUMBER, in {_UNITS[unit[1]]}" if unit else ""
                raise SpecError(at, f"is required{remedy}")
            continue
        values[field.attribute] = _decode_value(field.hint, mapping[key], at, field.rule)
    decoded = cls(**values)
    for rule in cross_field_rules(cls):
        problem = rule.problem(decoded)
        if problem is not None:
            raise SpecError(_join_path(path, rule.field) if rule.field else path, problem)
    return decoded


def encode(value: Any) -> dict[str, Any]:
    """Return a mapping that `decode` decodes to this value.

    Fields with their default value are left out. So the mapping does not change when a later
    version adds fields, and processes of an earlier version can decode it.

    Args:
        value: an instance of a spec's dataclass.
    """
    return {
        field.name: _encode_value(entry)
        for field in declared_fields(type(value))
        if (entry := getattr(value, field.attribute)) != field.default or field.required
    }


def _encode_value(value: Any) -> Any:
    if is_dataclass(value):
        return encode(value)
    if isinstance(value, tuple):
        return [_encode_value(entry) for entry in value]
    if isinstance(value, Mapping):
        return {key: _encode_value(entry) for key, entry in value.items()}
    if isinstance(value, Fraction):
        return format_objective(value)
    return value.value if isinstance(value, Enum) else value


def _join_path(path: str, key: str) -> str:
    # Errors contain keys of the manifest, so these are shortened and have no line breaks.
    safe = key if len(key) <= MAX_KEY and key.isprintable() else format_value(key)
    return f"{path}.{safe}" if path else safe


def _require_mapping(value: object, path: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise SpecError(path or "manifest", f"must be a mapping, not {_describe_kind(value)}")
    for key in value:
        if not isinstance(key, str):
            raise SpecError(
                path or "manifest", f"has the key {format_value(key)}, which is not text"
            )
    return value


def _decode_value(hint: Any, value: object, path: str, rule: FieldRule) -> object:
    origin = get_origin(hint)
    if origin is tuple:
        return _decode_list(get_args(hint)[0], value, path, rule)
    if origin is not None:  # Mapping[str, X]
        return _decode_map(get_args(hint)[1], value, path, rule)
    if is_dataclass(hint):
        return decode(cast("type[object]", hint), value, path)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _decode_enum(hint, value, path)
    if hint is bool:
        if not isinstance(value, bool):
            raise SpecError(path, f"must be true or false, not {format_value(value)}")
        return value
    if hint is int:
        return _decode_integer(value, path, rule)
    if hint is float:
        return _decode_number(value, path, rule)
    assert hint in {str, Fraction}, hint
    return _decode_text(value, path, rule)


def _decode_list(item: Any, value: object, path: str, rule: FieldRule) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise SpecError(path, f"must be a list, not {_describe_kind(value)}")
    _check_count(len(value), path, rule, "items")
    of_item = rule if item is str else _ITEM
    decoded = tuple(_decode_value(item, v, f"{path}[{i}]", of_item) for i, v in enumerate(value))
    if rule.key is not None:
        seen: dict[object, int] = {}
        for i, entry in enumerate(decoded):
            name = getattr(entry, rule.key)
            if name in seen:
                raise SpecError(
                    f"{path}[{i}]",
                    f"its {camel_case(rule.key)} {name!r} is already used at {path}[{seen[name]}]",
                )
            seen[name] = i
    return decoded


def _decode_map(item: Any, value: object, path: str, rule: FieldRule) -> object:
    mapping = _require_mapping(value, path)
    _check_count(len(mapping), path, rule, "entries")
    if item is Any:
        return copy_json(mapping, path)
    for key in mapping:
        if not 0 < len(key) <= MAX_KEY:
            raise SpecError(path, f"has a key of {len(key)} characters; 1 to {MAX_KEY} allowed")
    return {key: _decode_value(item, v, _join_path(path, key), rule) for key, v in mapping.items()}


def _check_count(count: int, path: str, rule: FieldRule, unit: str) -> None:
    if rule.min_items is not None and count < rule.min_items:
        raise SpecError(path, f"has {count} {unit}; at least {rule.min_items} needed")
    if rule.max_items is not None and count > rule.max_items:
        raise SpecError(path, f"has {count} {unit}; at most {rule.max_items} allowed")


def _decode_enum(hint: type[StrEnum], value: object, path: str) -> StrEnum:
    allowed = [member.value for member in hint]
    if isinstance(value, str) and value in allowed:
        return hint(value)
    problem = f"must be one of {', '.join(allowed)}, not {format_value(value)}"
    if isinstance(value, bool):
        raise SpecError(path, f"{problem} (YAML reads on, off, yes and no as true or false)")
    near = did_you_mean(value, allowed) if isinstance(value, str) else ""
    raise SpecError(path, f"{problem}{near}")


def _decode_integer(value: object, path: str, rule: FieldRule) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        unit = re.search(r"(Ms|Seconds)$", path)
        kind = f"a whole number of {_UNITS[unit[1]]} without a unit" if unit else "a whole number"
        raise SpecError(path, f"must be {kind}, not {format_value(value)}")
    _check_range(value, path, rule)
    return value


def _decode_number(value: object, path: str, rule: FieldRule) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        unit = re.search(r"(Ms|Seconds)$", path)
        kind = f"a number of {_UNITS[unit[1]]} without a unit" if unit else "a number"
        raise SpecError(path, f"must be {kind}, not {format_value(value)}")
    _check_range(value, path, rule)
    return value


def _check_range(value: float, path: str, rule: FieldRule) -> None:
    low, high = rule.minimum, rule.maximum
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"lie in {low} to {high}"
        if low is None or high is None:
            bounds = f"be at least {low}" if high is None else f"be at most {high}"
        raise SpecError(path, f"must {bounds}, not {format_value(value)}")


def _decode_text(value: object, path: str, rule: FieldRule) -> object:
    if rule.int_or_string and isinstance(value, int) and not isinstance(value, bool):
        value = format_value(value)
    if not isinstance(value, str):
        raise SpecError(path, f"must be text, not {format_value(value)}; put it in quotes")
    if rule.min_length is not None and len(value) < rule.min_length:
        raise SpecError(path, "must not be empty")
    if rule.max_length is not None and len(value) > rule.max_length:
        raise SpecError(path, f"has {len(value)} characters; at most {rule.max_length} allowed")
    if rule.pattern is not None and not re.fullmatch(rule.pattern, value):
        hint = rule.pattern_hint or f"match {rule.pattern}"
        raise SpecError(path, f"must {hint}, not {format_value(value)}")
    if rule.parse is None:
        return value
    try:
        return rule.parse(value)
    except ValueError as error:
        raise SpecError(path, str(error)) from error


def copy_json(value: object, path: str) -> object:
    """Return a copy of a value, after a check that it is JSON of bounded size.

    Args:
        value: the parsed YAML or JSON value. With a YAML alias it can contain itself.
        path: the path of `value` in the manifest, for errors.

    Raises:
        SpecError: the value contains more than 1,000 values, more than 24 levels, a text of more
            than 4,096 characters, or something that JSON cannot represent.
    """
    return _copy(value, path, _MAX_DEPTH, iter(range(_MAX_VALUES)))


def _copy(value: object, path: str, depth: int, remaining: Iterator[int]) -> object:
    if depth == 0 or next(remaining, None) is None:
        raise SpecError(
            path, f"is too large; at most {_MAX_VALUES} values and {_MAX_DEPTH} levels allowed"
        )
    if isinstance(value, dict):
        copied: dict[str, object] = {}
        for key, entry in value.items():
            if not isinstance(key, str) or len(key) > _MAX_TEXT:
                raise SpecError(path, "has a key that is not a short text; put it in quotes")
            copied[key] = _copy(entry, path, depth - 1, remaining)
        return copied
    if isinstance(value, list):
        return [_copy(entry, path, depth - 1, remaining) for entry in value]
    if isinstance(value, str):
        if len(value) > _MAX_TEXT:
            raise SpecError(
                path, f"has a text of {len(value)} characters; at most {_MAX_TEXT} allowed"
            )
        return value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value.bit_length() < 64:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise SpecError(path, "holds a value that JSON cannot represent; put it in quotes")


def _describe_kind(value: object) -> str:
    if value is None:
        return "nothing"
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else "a value")


def format_value(value: object) -> str:
    """Format a value of a manifest for an error message: short, on one line, at bounded cost.

    A container is replaced by its kind, because a few lines with YAML aliases can expand to more
    items than fit into memory.
    """
    if value is None or isinstance(value, dict | list):
        return _describe_kind(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        # Python raises for very long integers.
        return str(value) if value.bit_length() <= 128 else "a giant number"
    if isinstance(value, str):
        return repr(value) if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]!r}…"
    if isinstance(value, float | date):
        return str(value)
    return _describe_kind(value)
