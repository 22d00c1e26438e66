"""From a decoded YAML or JSON value to a spec's dataclass, or to the path of what is wrong.

Unknown keys are errors: a typo in an optional field must never be silently ignored.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import is_dataclass
from datetime import date
from enum import StrEnum
from fractions import Fraction
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    TypeVar,
    cast,
    get_args,
    get_origin,
)

from goodput_core.errors import SpecError
from goodput_core.spec.declared import declared_fields
from goodput_core.spec.fields import Rule, camel_case, rules_between
from goodput_core.spec.opaque import bounded_json

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MAX_ENTRIES", "MAX_KEY", "decode", "shown"]

T = TypeVar("T")

MAX_ENTRIES: Final = 16
"""As many entries an opaque item of a list may have."""
_MAX_SHOWN: Final = 60
MAX_KEY: Final = 317
"""The longest key that Kubernetes knows: a DNS subdomain, a slash and a name."""
_ITEM: Final = Rule(doc="", max_items=MAX_ENTRIES)
_UNITS: Final = {"Ms": "milliseconds", "Seconds": "seconds"}


def decode(cls: type[T], value: object, path: str) -> T:
    """Build the dataclass `cls` from a decoded mapping.

    Args:
        cls: a dataclass whose fields were made by `spec_field`.
        value: what the YAML or JSON parser returned.
        path: where `value` stands in the manifest, for errors.

    Raises:
        SpecError: the first field, in the class's order, that breaks a rule, or else the first
            rule between fields that is broken.
    """
    mapping = _mapping(value, path)
    declared = {field.name: field for field in declared_fields(cls)}
    for key in mapping:
        if key not in declared:
            raise SpecError(_join(path, key), _unknown(key, list(declared)))
    values: dict[str, Any] = {}
    for key, field in declared.items():
        at = _join(path, key)
        if mapping.get(key) is None:
            if field.required:
                raise SpecError(at, "is required")
            continue
        values[field.attribute] = _value(field.hint, mapping[key], at, field.rule)
    decoded = cls(**values)
    for rule in rules_between(cls):
        problem = rule.problem(decoded)
        if problem is not None:
            raise SpecError(_join(path, rule.field) if rule.field else path, problem)
    return decoded


def _join(path: str, key: str) -> str:
    # A manifest's own keys stand in the sentence: short ones as they are, no line breaks.
    safe = key if len(key) <= MAX_KEY and key.isprintable() else shown(key)
    return f"{path}.{safe}" if path else safe


def _unknown(key: str, known: list[str]) -> str:
    return f"unknown field{_close(key, known) or '; fields are ' + ', '.join(known)}"


def _close(word: object, known: list[str]) -> str:
    if not isinstance(word, str) or len(word) > _MAX_SHOWN:
        return ""
    # Case is what people get wrong most: sloclass, auto, TTFTMs.
    folded = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.6)
    return f"; did you mean {folded[close[0]]}?" if close else ""


def _mapping(value: object, path: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise SpecError(path or "manifest", f"must be a mapping, not {_kind(value)}")
    for key in value:
        if not isinstance(key, str):
            raise SpecError(path or "manifest", f"has the key {shown(key)}, which is not text")
    return value


def _value(hint: Any, value: object, path: str, rule: Rule) -> object:
    origin = get_origin(hint)
    if origin is tuple:
        return _sequence(get_args(hint)[0], value, path, rule)
    if origin is not None:  # Mapping[str, X]
        return _map(get_args(hint)[1], value, path, rule)
    if is_dataclass(hint):
        return decode(cast("type[object]", hint), value, path)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _enum(hint, value, path)
    if hint is bool:
        if not isinstance(value, bool):
            raise SpecError(path, f"must be true or false, not {shown(value)}")
        return value
    if hint is int:
        return _integer(value, path, rule)
    assert hint in {str, Fraction}, hint
    return _text(value, path, rule)


def _sequence(item: Any, value: object, path: str, rule: Rule) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise SpecError(path, f"must be a list, not {_kind(value)}")
    _count(len(value), path, rule, "items")
    decoded = tuple(_value(item, v, f"{path}[{i}]", _ITEM) for i, v in enumerate(value))
    if rule.key is not None:
        seen: dict[object, int] = {}
        for i, entry in enumerate(decoded):
            name = getattr(entry, rule.key)
            if name in seen:
                key = camel_case(rule.key)
                raise SpecError(
                    f"{path}[{i}]", f"its {key} {name!r} already stands at {path}[{seen[name]}]"
                )
            seen[name] = i
    return decoded


def _map(item: Any, value: object, path: str, rule: Rule) -> object:
    mapping = _mapping(value, path)
    _count(len(mapping), path, rule, "entries")
    if item is Any:
        return bounded_json(mapping, path)
    for key in mapping:
        if not 0 < len(key) <= MAX_KEY:
            raise SpecError(path, f"has a key of {len(key)} characters; 1 to {MAX_KEY} allowed")
    return {key: _value(item, v, _join(path, key), rule) for key, v in mapping.items()}


def _count(count: int, path: str, rule: Rule, what: str) -> None:
    if rule.min_items is not None and count < rule.min_items:
        raise SpecError(path, f"has {count} {what}; at least {rule.min_items} needed")
    if rule.max_items is not None and count > rule.max_items:
        raise SpecError(path, f"has {count} {what}; at most {rule.max_items} allowed")


def _enum(hint: type[StrEnum], value: object, path: str) -> StrEnum:
    allowed = [member.value for member in hint]
    if isinstance(value, str) and value in allowed:
        return hint(value)
    problem = f"must be one of {', '.join(allowed)}, not {shown(value)}"
    if isinstance(value, bool):
        raise SpecError(path, f"{problem} (as YAML reads on, off, yes and no)")
    raise SpecError(path, f"{problem}{_close(value, allowed)}")


def _integer(value: object, path: str, rule: Rule) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        unit = re.search(r"(Ms|Seconds)$", path)
        wanted = f"a whole number of {_UNITS[unit[1]]} without a unit" if unit else "a whole number"
        raise SpecError(path, f"must be {wanted}, not {shown(value)}")
    low, high = rule.minimum, rule.maximum
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"lie in {low} to {high}"
        if low is None or high is None:
            bounds = f"be at least {low}" if high is None else f"be at most {high}"
        raise SpecError(path, f"must {bounds}, not {shown(value)}")
    return value


def _text(value: object, path: str, rule: Rule) -> object:
    if rule.int_or_string and isinstance(value, int) and not isinstance(value, bool):
        value = shown(value)
    if not isinstance(value, str):
        raise SpecError(path, f"must be text, not {shown(value)}; put it in quotes")
    if rule.min_length is not None and len(value) < rule.min_length:
        raise SpecError(path, "must not be empty")
    if rule.max_length is not None and len(value) > rule.max_length:
        raise SpecError(path, f"has {len(value)} characters; at most {rule.max_length} allowed")
    if rule.pattern is not None and not re.fullmatch(rule.pattern, value):
        wanted = rule.pattern_hint or f"match {rule.pattern}"
        raise SpecError(path, f"must {wanted}, not {shown(value)}")
    if rule.parse is None:
        return value
    try:
        return rule.parse(value)
    except ValueError as error:
        raise SpecError(path, str(error)) from error


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else "a value")


def shown(value: object) -> str:
    """A value of a manifest as a sentence repeats it: on one line, short, and at bounded cost.

    Containers are only named: a few lines of YAML aliases can stand for more items than memory
    holds.
    """
    if value is None or isinstance(value, dict | list):
        return _kind(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        # Python refuses to print very long integers.
        return str(value) if value.bit_length() <= 128 else "a giant number"
    if isinstance(value, str):
        return repr(value) if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]!r}…"
    if isinstance(value, float | date):
        return str(value)
    return _kind(value)
